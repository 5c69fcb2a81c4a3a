"""Runs inside the vLLM environment: generates greedily with the real engine and writes what it produced and counted.

Started by eval/serve.py as `python -I eval/vllm_worker.py JOB.json RESULT.json`. It imports nothing of headstart, which lives in
another environment, and nothing but vLLM and the standard library. The job and the result are JSON:

    job:    target, revision (or null), dtype, max_num_seqs, max_model_len, max_tokens, stop_token_ids, prompts (lists of token
            ids), speculative (vLLM's speculative_config, or null), reference_outputs (lists of token ids, or null)
    result: engine_version, outputs (lists of token ids), seconds, counters (num_drafts, num_accepted, accepted_per_position; null
            without a drafter), gaps (for each output that differs from its reference: the index of the prompt and, at the first
            differing token, the log-probability of the best token minus that of the runner-up)
"""

import json
import sys
import time
from typing import Any

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def main(job_path: str, result_path: str) -> None:
    """Runs one job."""
    import vllm

    with open(job_path) as file:
        job = json.load(file)
    engine = vllm.LLM(
        model=job["target"],
        revision=job["revision"],
        dtype=job["dtype"],
        speculative_config=job["speculative"],
        max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"],
        enforce_eager=True,
        # A cached prefix would be computed once and not again: the counts would depend on the order of the prompts.
        enable_prefix_caching=False,
        # Token ids go in and come out. The stop tokens are the job's, not the tokenizer's.
        skip_tokenizer_init=True,
        generation_config="vllm",
        disable_log_stats=False,
        seed=0,
    )
    greedy = {"temperature": 0.0, "ignore_eos": True, "stop_token_ids": job["stop_token_ids"], "detokenize": False}
    # The first call allocates and compiles: kept out of the time and of the counts.
    generate(engine, job["prompts"][:1], vllm.SamplingParams(max_tokens=4, **greedy))

    before = counters(engine)
    started = time.perf_counter()
    outputs = generate(engine, job["prompts"], vllm.SamplingParams(max_tokens=job["max_tokens"], **greedy))
    seconds = time.perf_counter() - started
    after = counters(engine)

    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    result = {
        "engine_version": vllm.__version__,
        "outputs": token_ids,
        "seconds": seconds,
        "counters": subtract(after, before) if job["speculative"] else None,
        "gaps": gaps(engine, job, token_ids, greedy) if job["reference_outputs"] else [],
    }
    with open(result_path, "w") as file:
        json.dump(result, file)


def generate(engine: Any, prompts: list[list[int]], sampling: Any) -> list[Any]:
    """The engine's outputs, in the order of the prompts."""
    return engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def counters(engine: Any) -> dict[str, Any]:
    """The engine's own counters of speculative decoding so far."""
    found: dict[str, Any] = {}
    for metric in engine.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def subtract(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Counters of the time in between; those that have not counted yet are zero."""
    missing = set(COUNTERS.values()) - set(after)
    if missing:
        raise RuntimeError(f"vLLM reports no {', '.join(sorted(missing))}: its counters have other names in this version")
    earlier = before["accepted_per_position"]
    return {
        "num_drafts": after["num_drafts"] - before["num_drafts"],
        "num_accepted": after["num_accepted"] - before["num_accepted"],
        "accepted_per_position": [now - then for now, then in zip(after["accepted_per_position"], earlier, strict=True)],
    }


def gaps(engine: Any, job: dict[str, Any], outputs: list[list[int]], greedy: dict[str, Any]) -> list[dict[str, Any]]:
    """How close the best two tokens are where this engine's output first differs from the reference."""
    import vllm

    found = []
    for index, (output, reference) in enumerate(zip(outputs, job["reference_outputs"], strict=True)):
        if output == reference:
            continue
        pairs = list(zip(output, reference, strict=False))
        position = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
        prefix = job["prompts"][index] + output[:position]
        sampling = vllm.SamplingParams(max_tokens=1, logprobs=2, **greedy)
        [completion] = generate(engine, [prefix], sampling)[0].outputs
        best, second = sorted((entry.logprob for entry in completion.logprobs[0].values()), reverse=True)[:2]
        found.append({"prompt": index, "position": position, "gap": best - second})
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
