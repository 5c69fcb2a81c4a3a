"""Runs inside the vLLM environment: prompts in, the target's hidden states of all their positions out, as safetensors files in a scratch folder.

Started by data/vllm_states.py as `python -I data/vllm_states_worker.py JOB.json`. It imports nothing of headstart, which lives elsewhere. The states
are the engine's own: speculative method `extract_hidden_states` keeps them in a cache of its own, and a KV connector writes them out.

    job file     target, revision (or null), dtype, layers (ascending ids; k is the residual stream after k layers), scratch, tensor_parallel,
                 max_model_len, max_batched_tokens, gpu_memory
    stdin        a line a document: {"index", "ids"}. Its end is ours: an orphan ends itself.
    stdout       {"ready": version} once; then a line a document, in any order: {"index", "path"}; or {"error"} and the end

The file at `path` holds hidden_states [T, layers, H] and token_ids [T]. It is whole when `path`.lock can be locked for reading.
"""

import fcntl
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, TextIO

import torch
from safetensors.torch import save_file

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector, extract_from_kv_cache
except ImportError as import_error:
    missing: ImportError | None = import_error
    ExampleHiddenStatesConnector = object
else:
    missing = None

# For the engine to end its other processes in; then they are ended with us.
GRACE_S = 20.0


class Copied:
    """Stands for the CUDA event after which a copy to host memory is done: on a CPU it always is."""

    def query(self) -> bool:
        return True


class StatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """The engine's connector, on a CPU too: there it would ask for a CUDA stream and pinned memory (vLLM 0.32)."""

    def _submit_async_write(self, pending: Any) -> None:
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks_B1 = torch.tensor(pending.block_ids, dtype=torch.long)[:, None]
        slots = (blocks_B1 * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            save_file({"hidden_states": states, "token_ids": pending.token_ids.contiguous()}, pending.filename)
        finally:
            os.close(lock)
        self._req_copy_events[pending.req_id] = Copied()


def main(job_path: str) -> int:
    """Runs until stdin ends."""
    # The engine and its processes print what they like; the lines of ours go through a descriptor that they don't have.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    documents: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=read_documents, args=(documents,), daemon=True).start()
    try:
        with open(job_path) as file:
            engine, sampling = start_engine(json.load(file))
        serve(engine, sampling, documents, replies)
    except Exception as error:
        traceback.print_exc()
        say(replies, {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return 1
    return 0


def read_documents(documents: "queue.Queue[Any]") -> None:
    """Takes every line at once, so that whoever sends them never waits; then makes sure that nothing outlives the sender."""
    for line in sys.stdin:
        documents.put(json.loads(line))
    documents.put(None)
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def start_engine(job: dict[str, Any]) -> tuple[Any, Any]:
    """(engine, sampling parameters)."""
    import vllm

    if missing is not None:
        raise RuntimeError(f"vLLM {vllm.__version__} cannot extract hidden states ({missing})")
    engine = vllm.LLM(
        model=job["target"],
        revision=job["revision"],
        dtype=job["dtype"],
        tensor_parallel_size=job["tensor_parallel"],
        distributed_executor_backend="mp" if job["tensor_parallel"] > 1 else None,
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=job["max_batched_tokens"],
        max_num_seqs=min(256, job["max_batched_tokens"]),
        gpu_memory_utilization=job["gpu_memory"],
        # The states of a cached prefix would not be computed, and so not be there.
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        enforce_eager=True,
        async_scheduling=False,
        skip_tokenizer_init=True,
        generation_config="vllm",
        seed=0,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
        },
        kv_transfer_config={
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "__main__",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job["scratch"]},
        },
    )
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    return engine.llm_engine, sampling


def serve(engine: Any, sampling: Any, documents: "queue.Queue[Any]", replies: TextIO) -> None:
    """Feeds the engine as documents come, and says where the states of each are."""
    import vllm

    say(replies, {"ready": vllm.__version__})
    scheduler = engine.engine_core.engine_core.scheduler
    while True:
        try:
            # The states of a finished request are written in the step after it: the engine rests only when it has none of these left.
            document = documents.get(block=not scheduler.has_requests())
        except queue.Empty:
            for output in engine.step():
                if output.finished:
                    say(replies, {"index": int(output.request_id), "path": output.kv_transfer_params["hidden_states_path"]})
            continue
        if document is None:
            return
        engine.add_request(str(document["index"]), {"prompt_token_ids": document["ids"]}, sampling)


def say(replies: TextIO, reply: dict[str, Any]) -> None:
    """One line."""
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
