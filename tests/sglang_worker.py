"""Runs inside the SGLang environment (`make sglang`): its real model classes on the CPU, from the files of a target and of our export.

    python -I tests/sglang_worker.py JOB.json RESULTS

    job:     target and exports (folders), input_ids and next_ids (lists of T token ids)
    results: a folder with one <number of the export>.safetensors for each:
             aux [T, A*Ht] and last [T, Ht]: what the target class captures for the drafter; logits [T, W] and hidden [T, H]: what the draft class
             makes of them, and hands to its next step; target_ids [W]: its map of draft ids (EAGLE-3 with a draft vocabulary)
             draft_class in its metadata.
             And metrics.txt: what SGLang's own collector writes to /metrics of 2 requests, of 10 and 7 tokens after 4 and 3 verifications

Real: ServerArgs and the published configuration, the process groups (one process, gloo), config reading, every layer of both models with its
weight loaders, LlamaForCausalLM's capture of auxiliary states, the sharing of embedding and head, the metrics collector.

Stubbed, because they need CUDA or belong to other kinds of models: the packages in `STUBBED` can be imported and do nothing; the AMX kernels of
sgl_kernel are said to be missing, so that layers take SGLang's own torch code; `RadixAttention` is torch's attention over the one sequence,
instead of paged keys and values. Not run: scheduler, sampling, CUDA graphs, the draft worker's loop and trees.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
STUBBED = ("sgl_kernel", "torchvision", "torchaudio", "triton")


class _AnyInstance:
    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self


class _AnyClass(type):
    """A class with every attribute; as a decorator, with arguments or without, it changes nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _AnyClass(name, (_AnyInstance,), {}))
        return cls.__dict__[name]

    def __call__(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else super().__call__()


class _StubModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _AnyClass(name, (_AnyInstance,), {}))
        return self.__dict__[name]


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STUBBED else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _StubFinder())

import torch  # noqa: E402

torch.cpu._is_amx_tile_supported = lambda: False

from safetensors.torch import load_file, save_file  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.models.llama import LlamaForCausalLM  # noqa: E402
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle  # noqa: E402
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3  # noqa: E402
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from transformers import AutoConfig  # noqa: E402

DRAFT_CLASSES = {"LlamaForCausalLMEagle3": LlamaForCausalLMEagle3, "LlamaForCausalLMEagle": LlamaForCausalLMEagle}


def attention(
    self: RadixAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: ForwardBatch, save_kv_cache: bool = True
) -> torch.Tensor:
    """Causal attention of one whole sequence, [T, heads*head_dim]."""
    q, k, v = (tensor.view(1, q.shape[0], -1, self.head_dim).transpose(1, 2) for tensor in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True)
    return attended.transpose(1, 2).flatten(2)[0]


RadixAttention.forward = attention


def start(target: str) -> None:
    """What a scheduler process does before it loads a model."""
    server_args = ServerArgs(model_path=target, device="cpu", dtype="float32", attention_backend="torch_native")
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=rendezvous)
    parallel_state.initialize_model_parallel(backend="gloo")


def loaded(model_class: type, folder: str, config: Any) -> Any:
    """A model with the weights of a folder."""
    model = model_class(config).float()
    model.load_weights(load_file(Path(folder, "model.safetensors")).items())
    return model.eval()


def prefill(ids: torch.Tensor, hidden: torch.Tensor | None) -> ForwardBatch:
    """One new sequence of all these tokens."""
    length = torch.tensor([len(ids)])
    batch = ForwardBatch(ForwardMode.EXTEND, 1, ids, torch.tensor([0]), length, torch.arange(len(ids)), len(ids))
    batch.extend_seq_lens = length
    batch.spec_info = types.SimpleNamespace(hidden_states=hidden)
    return batch


def metrics() -> str:
    """The text of /metrics."""
    import prometheus_client

    labels = {"model_name": "m"}
    collector = TokenizerMetricsCollector(labels=labels)
    for tokens, verifications in ((10, 4), (7, 3)):
        collector.observe_one_finished_request(labels, 5, tokens, 0, 1.0, False, spec_verify_ct=verifications)
    return prometheus_client.generate_latest().decode()


def main(job_path: str, results: str) -> None:
    """Runs the job with each of its exports."""
    job = json.loads(Path(job_path).read_text())
    start(job["target"])
    ids, next_ids = torch.tensor(job["input_ids"]), torch.tensor(job["next_ids"])
    for number, export in enumerate(job["exports"]):
        tensors, draft_class = drafted(job["target"], export, ids, next_ids)
        path = Path(results, f"{number}.safetensors")
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, {"draft_class": draft_class})
    Path(results, "metrics.txt").write_text(metrics())


@torch.no_grad()
def drafted(target_dir: str, export: str, ids: torch.Tensor, next_ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
    """What one export drafts after the target's states, and the name of its class."""
    positions = torch.arange(len(ids))
    config = AutoConfig.from_pretrained(export)
    draft_class = DRAFT_CLASSES[config.architectures[0]]
    is_eagle3 = draft_class is LlamaForCausalLMEagle3

    target = loaded(LlamaForCausalLM, target_dir, AutoConfig.from_pretrained(target_dir))
    if is_eagle3:  # as its model runner does, from the same field
        target.set_eagle3_layers_to_capture(getattr(config, "eagle_config", {}).get("eagle_aux_hidden_state_layer_ids"))
    output = target.model(ids, positions, prefill(ids, None))
    last, aux = output if is_eagle3 else (output, [output])

    draft = loaded(draft_class, export, config)
    embed, head = target.get_embed_and_head()  # as its draft worker does
    if is_eagle3:
        draft.set_embed(embed)
    else:
        draft.set_embed_and_head(embed, head)
    found = draft.model(next_ids, positions, prefill(next_ids, torch.cat(list(aux), dim=-1)))
    output, hidden = (found[0], found[1][0]) if is_eagle3 else (found, found)
    vocabulary = config.draft_vocab_size if is_eagle3 else config.vocab_size
    result = {
        "aux": torch.cat(list(aux), dim=-1),
        "last": last,
        "logits": output @ draft.lm_head.weight[:vocabulary].T,  # SGLang pads the head to a multiple of 64 rows
        "hidden": hidden,
    }
    if is_eagle3 and draft.get_hot_token_id() is not None:
        result["target_ids"] = draft.get_hot_token_id()
    return result, type(draft).__name__


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
