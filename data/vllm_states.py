"""The target's hidden states out of vLLM: for targets that one process cannot hold, since the engine splits them over GPUs (tensor parallelism).

Place in the flow: `extract` of data/extract.py asks `VllmSource.packs` instead of a loaded `Target`; store, checksums and resuming are the same.

The engine runs in its own environment and processes (data/vllm_states_worker.py). Documents go in as token ids, a window of them at a time, so that
it always has work and the states in transit stay few; their states come back as files in `<store>/vllm_scratch`, which are read and removed in the
order of the documents. vLLM's state k is the residual stream after k layers, as in transformers; the last one is before the final norm, which is
applied here (data/final_norm.py). If we are killed, the end of its stdin ends the engine; if it is killed, we stop with one line, and the next run
goes on.

Shapes: T tokens, A auxiliary states, S states that the engine hands out, H hidden size.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from data.batch import Features
from data.extract import Pack, document_packs
from data.final_norm import load_final_norm
from data.shards import Shard, StoreHeader
from data.target_files import TargetConfig, base_and_adapter, check_target_files, stored_dtype, target_hf_config
from data.vllm_engine import EngineError, engine_python, worker_environment

WORKER = Path(__file__).with_name("vllm_states_worker.py")
SCRATCH, LOG = "vllm_scratch", "vllm.log"
MAX_BATCHED_TOKENS = 8192
_WINDOW_BATCHES = 4
# Of each GPU's memory: our own processes hold a context on it, and rank 0 encodes there.
_GPU_MEMORY = 0.85
_END_S = 30.0
# What launchers tell their processes; the engine has ranks of its own.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
_NOISE = ("Traceback", "File ", "[rank", "During handling", "The above exception")


class VllmSource:
    """The states of a target that vLLM runs.

    Args:
        config: the target.
        tensor_parallel: GPUs that the engine splits it over.
        device: where the final norm is applied and the states are encoded.
        max_batched_tokens: of one step of the engine; a longer document takes several.

    Raises:
        ValueError: if there is no such target.
    """

    def __init__(
        self, config: TargetConfig, tensor_parallel: int, device: torch.device | str, max_batched_tokens: int = MAX_BATCHED_TOKENS
    ) -> None:
        check_target_files(config)
        if base_and_adapter(config)[1] is not None:
            raise ValueError(
                f"{config.adapter or config.model} is an adapter, which --target-backend vllm does not run: merge it with "
                "`python -m data.merge_adapter` and name the folder that this writes as target.model"
            )
        self._config, self._tensor_parallel, self._device = config, tensor_parallel, torch.device(device)
        self._max_batched_tokens = max_batched_tokens
        self._text = target_hf_config(config)
        self.dtype: torch.dtype = stored_dtype(self._text) if config.dtype == "auto" else getattr(torch, config.dtype)
        self.hidden_size: int = self._text.hidden_size

    def scratch_bytes(self, header: StoreHeader) -> int:
        """Bytes of the states that are in transit at most, in documents that end a window."""
        num_states = len(self._layers(header))
        return 2 * _WINDOW_BATCHES * self._max_batched_tokens * num_states * self.hidden_size * self.dtype.itemsize

    def packs(
        self, samples: Dataset, shards: Sequence[Shard], lengths: np.ndarray, header: StoreHeader, folder: Path
    ) -> Generator[Features, None, None]:
        """Features of all documents of the shards, in order, on this source's device.

        Raises:
            ValueError: if the engine is not there, does not run the target, dies, or gives other rows than it was asked for; a document is longer
                than the target takes; a token is outside its vocabulary.
        """
        if not shards:
            return
        longest = int(max(lengths[shard.first : shard.end].max() for shard in shards))
        self._check_length(longest)
        norm = load_final_norm(self._config, self._device, self.dtype) if header.has_last else None
        window, in_flight, sent = _WINDOW_BATCHES * self._max_batched_tokens, 0, deque[tuple[int, Pack]]()
        with _Engine(self._job(header, longest, folder), folder) as engine:
            for pack in (pack for shard in shards for pack in document_packs(samples, shard, lengths)):
                self._check_tokens(pack)
                sent.append((engine.send(pack), pack))
                in_flight += len(pack.input_ids_T)
                while in_flight > window:
                    in_flight -= len(sent[0][1].input_ids_T)
                    yield self._received(engine, *sent.popleft(), header, norm)
            while sent:
                yield self._received(engine, *sent.popleft(), header, norm)

    def _layers(self, header: StoreHeader) -> list[int]:
        """The states to ask for, ascending: the auxiliary ones, and the one before the final norm."""
        return sorted({*header.aux_layers, *([self._text.num_hidden_layers] if header.has_last else [])})

    def _job(self, header: StoreHeader, longest: int, folder: Path) -> dict[str, Any]:
        path = Path(self._config.model)
        return {
            "target": str(path.resolve()) if path.is_dir() else self._config.model,
            "revision": self._config.revision,
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": self._layers(header),
            "scratch": str((folder / SCRATCH).resolve()),
            "tensor_parallel": self._tensor_parallel,
            # One for the token that the engine samples, one for the draft that it takes for certain: without that room it keeps no states.
            "max_model_len": longest + 2,
            "max_batched_tokens": self._max_batched_tokens,
            "gpu_memory": _GPU_MEMORY,
        }

    def _received(self, engine: _Engine, first: int, pack: Pack, header: StoreHeader, norm: nn.Module | None) -> Features:
        """The states of a pack's documents, the first of which has this index among all that were sent."""
        layers = self._layers(header)
        documents = pack.input_ids_T.split(pack.lengths)
        shape = (len(layers), self.hidden_size)
        states_TSH = torch.cat([engine.states(first + place, ids_T, shape, self.dtype) for place, ids_T in enumerate(documents)]).to(self._device)
        columns = [layers.index(layer) for layer in header.aux_layers]
        aux_TX = states_TSH[:, columns].flatten(1) if columns else None
        with torch.no_grad():
            last_TH = norm(states_TSH[:, -1]) if norm is not None else None
        return Features(pack.input_ids_T.to(self._device), pack.loss_mask_T.to(self._device), tuple(pack.lengths), aux_TX, last_TH)

    def _check_length(self, longest: int) -> None:
        limit = self._text.to_dict().get("max_position_embeddings")
        if limit is not None and longest > limit:
            raise ValueError(
                f"a document has {longest:,} tokens, but the target takes {limit:,} (max_position_embeddings): vLLM has no positions beyond; "
                f"set --data.max-length {limit}"
            )

    def _check_tokens(self, pack: Pack) -> None:
        highest, size = int(pack.input_ids_T.max()), self._text.vocab_size
        if highest >= size:
            raise ValueError(f"token id {highest} is outside the target's vocabulary of {size}: the tokenizer is not the target's own")


class _Engine:
    """The worker process, started and ended.

    Raises:
        ValueError: whatever goes wrong, in one line; its log says more.
    """

    def __init__(self, job: dict[str, Any], folder: Path) -> None:
        self._job, self._scratch, self._log = job, folder / SCRATCH, folder / LOG
        self._num_sent = self._num_received = 0
        self._paths: dict[int, Path] = {}
        self._process: subprocess.Popen[str]

    def __enter__(self) -> _Engine:
        try:
            python = engine_python()
        except EngineError as error:
            raise ValueError(f"--target-backend vllm: {error}") from error
        self._discard()  # of an extraction that was killed
        self._scratch.mkdir(exist_ok=True)
        job_path = self._scratch / "job.json"
        job_path.write_text(json.dumps(self._job))
        started = time.monotonic()
        print(f"extract: vLLM starts on {self._job['tensor_parallel']} device(s); its log is {self._log}", flush=True)
        with self._log.open("w") as log:
            # -I keeps our folders, and whatever PYTHONPATH names, away from the engine's imports; data/tokenize.py would hide the standard one.
            self._process = subprocess.Popen(
                [str(python), "-I", str(WORKER), str(job_path.resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(),
                cwd=self._scratch,
                start_new_session=True,
            )
        try:
            version = self._reply()["ready"]
        except BaseException:
            self._end()
            raise
        print(f"extract: vLLM {version} is ready after {time.monotonic() - started:.0f} s", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def send(self, pack: Pack) -> int:
        """Hands over the documents of a pack; the index of the first one."""
        first = self._num_sent
        for ids_T in pack.input_ids_T.split(pack.lengths):
            try:
                print(json.dumps({"index": self._num_sent, "ids": ids_T.tolist()}), file=self._pipe(self._process.stdin), flush=True)
            except BrokenPipeError:
                raise self._died() from None
            self._num_sent += 1
        return first

    def states(self, index: int, ids_T: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """[T, S, H] states of a document that was sent, as soon as they are there."""
        while index not in self._paths:
            reply = self._reply()
            self._paths[reply["index"]] = Path(reply["path"])
        path = self._paths.pop(index)
        lock = path.with_name(f"{path.name}.lock")
        try:
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)  # waits for the writer
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"vLLM did not write the states of document {index} ({error}): {self._hint()}") from error
        path.unlink()
        lock.unlink()
        found, wanted = tensors["hidden_states"], (len(ids_T), *shape)
        if tuple(found.shape) != wanted or found.dtype != dtype or not torch.equal(tensors["token_ids"], ids_T):
            raise ValueError(
                f"vLLM gave states {list(found.shape)} of {found.dtype} for document {index}, expected {list(wanted)} of {dtype} for its own tokens: "
                f"this version of vLLM extracts otherwise than the one that `make vllm` installs; {self._hint()}"
            )
        self._num_received += 1
        return found

    def _reply(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line.endswith("\n"):
            raise self._died()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ValueError(f"vLLM cannot extract the target's states: {reply['error'][:500]}; {self._hint()}")
        return reply

    def _died(self) -> ValueError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)
        code = self._process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line and not line.startswith(_NOISE)), "nothing")
        return ValueError(f"vLLM {how} after {self._num_received:,} documents; the last line of its log: {last[:300]}; {self._hint()}")

    def _hint(self) -> str:
        return f"its log is {self._log}. Run the recipe again: it goes on after the last whole shard"

    def _end(self) -> None:
        """Ends the engine and whatever it started, gently first: then it removes its shared memory."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                self._pipe(pipe).close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._discard()

    def _discard(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def _environment() -> dict[str, str]:
    """The engine's, without the launcher's ranks."""
    ours = {name: value for name, value in worker_environment().items() if name not in _LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")}
    # We step the engine ourselves, in the worker's process. Its longest sequence is a document and two tokens that nobody computes.
    return ours | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
