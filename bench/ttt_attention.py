"""How much the merged TTT attention saves against the explicit T x (T + S) mask: time of forward and backward, and peak memory, in one run.

    OMP_NUM_THREADS=1 .venv/bin/python bench/ttt_attention.py

Prints hardware, versions and shapes, then median and range over the repeats of each, alternating, and their ratio; writes
bench/results/ttt_attention.json.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from train.attention import ttt_attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_DIAGONALS, REPEATS = 9, 3, 64, 3, 5
LENGTHS = (512, 1024, 2048)
VARIANTS = ("naive", "merged")


def naive(query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor, diagonals: list[tuple[Tensor, Tensor]], lengths: tuple[int, ...]) -> Tensor:
    """One softmax over an explicit mask of all keys of all steps, key/value heads repeated: what the peers' eager paths compute."""
    num_tokens, num_heads, head_dim = query_TND.shape
    keys = torch.cat([key_TMD, *(key for key, _ in diagonals)]).repeat_interleave(num_heads // NUM_KV_HEADS, 1)
    values = torch.cat([value_TMD, *(value for _, value in diagonals)]).repeat_interleave(num_heads // NUM_KV_HEADS, 1)
    causal_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    mask = torch.cat([causal_TT, *(torch.eye(num_tokens, dtype=torch.bool) for _ in diagonals)], dim=1)
    scores = torch.einsum("tnd,snd->nts", query_TND, keys) * head_dim**-0.5
    return torch.einsum("nts,snd->tnd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values)


def measure(variant: str, num_tokens: int) -> dict[str, float]:
    """Seconds and peak bytes of one forward and backward in this process."""
    torch.manual_seed(0)
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, requires_grad=True)
    pairs = [[torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM, requires_grad=True) for _ in range(2)] for _ in range(1 + NUM_DIAGONALS)]
    function = {"naive": naive, "merged": ttt_attention}[variant]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    function(query, *pairs[0], [(key, value) for key, value in pairs[1:]], (num_tokens,)).sum().backward()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_bytes": 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}


def main() -> None:
    """Alternates the variants in fresh processes, so that peak memory is each one's own."""
    if len(sys.argv) == 3:
        measure(sys.argv[1], 64)  # warm-up
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return
    about = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    shapes = {"heads": NUM_HEADS, "kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "diagonals": NUM_DIAGONALS, "dtype": "float32"}
    print(about, shapes)
    rows = []
    for num_tokens in LENGTHS:
        samples: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for _ in range(REPEATS):
            for variant in VARIANTS:
                command = [sys.executable, __file__, variant, str(num_tokens)]
                samples[variant].append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        row: dict[str, float | list[float]] = {"tokens": num_tokens}
        for variant in VARIANTS:
            seconds = [sample["seconds"] for sample in samples[variant]]
            row[f"{variant}_s"] = statistics.median(seconds)
            row[f"{variant}_range_s"] = [min(seconds), max(seconds)]
            row[f"{variant}_peak_bytes"] = statistics.median(sample["peak_bytes"] for sample in samples[variant])
        print(row, flush=True)
        rows.append(row)
    results = ROOT / "bench" / "results"
    results.mkdir(exist_ok=True)
    document = {"command": "bench/ttt_attention.py", "about": about, "shapes": shapes, "rows": rows}
    (results / "ttt_attention.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
