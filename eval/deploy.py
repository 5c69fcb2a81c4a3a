"""The commands that serve a measured method with vLLM and SGLang, or plainly why there is none.

Place in the flow: a `MethodResult` of eval/measurement.py -> `deploy_commands` -> eval/advisor.py; `serve_commands` -> report.json of a run.
What an engine can do was read in its source, vLLM 0.32.0 (config/speculative.py, v1/spec_decode/) and SGLang 0.5.23 (arg_groups/fields/spec.py,
arg_groups/speculative_hook.py, speculative/); read it again when one of these versions moves.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints.serving import FORMATS, serving_format, vllm_serve_command
from eval.measurement import MethodResult

_VLLM = f"vLLM {FORMATS['eagle3'].engines['vllm'].version}"
_SGLANG = f"SGLang {FORMATS['eagle3'].engines['sglang'].version}"
_SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "eagle1": "EAGLE"}
# Below an explicit "medusa" or "draft_model" vLLM still guesses from the path, and takes a folder with one of these in its name for that method.
_VLLM_PATH_TRAPS = ("eagle-", "eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class Deployment:
    """How to serve one method.

    Attributes:
        vllm, sglang: the shell command, or "" where the engine has nothing near.
        vllm_reason, sglang_reason: why there is no command, or how what the engine does differs from what was measured; "" where it is the same.
    """

    vllm: str
    sglang: str
    vllm_reason: str
    sglang_reason: str


def serve_commands(algorithm: str, target: str, export_dir: Path | str, draft_length: int) -> dict[str, str]:
    """The shell command that serves a target with an exported drafter, in chains, for each engine that loads the format."""
    engines = serving_format(algorithm).engines
    commands = {}
    if "vllm" in engines:
        commands["vllm"] = vllm_serve_command(algorithm, target, export_dir, draft_length)
    if "sglang" in engines:
        commands["sglang"] = _sglang(target, _SGLANG_ALGORITHMS[algorithm], export_dir, (draft_length, 1), draft_length + 1)
    return commands


def deploy_commands(method: MethodResult, num_speculative_tokens: int, target: str, revision: str | None = None) -> Deployment:
    """The commands that come nearest to a measured method.

    Args:
        method: what was measured.
        num_speculative_tokens: K of a chain, levels of a tree.
        target: path or Hub id; a drafter that was trained with its target is served with the trained one of its run.
        revision: of the target on the Hub; a local folder has none, and neither has a target that was trained with its drafter.

    Raises:
        ValueError: if there is no draft to make, or the method lacks a setting or a drafter that its command needs.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}, expected at least 1 (serve without drafting otherwise)")
    found = _nearest(method, num_speculative_tokens, target)
    if revision is None or method.has_own_target or Path(target).is_dir():
        return found
    # Both engines take it for the target and its tokenizer, and not for the drafter.
    pinned = f" --revision {shlex.quote(revision)}"
    return replace(found, vllm=found.vllm and found.vllm + pinned, sglang=found.sglang and found.sglang + pinned)


def _nearest(method: MethodResult, num_speculative_tokens: int, target: str) -> Deployment:
    if method.kind == "lookahead":
        return Deployment("", "", f"{_VLLM} does not support Lookahead decoding", f"{_SGLANG} does not support Lookahead decoding")
    if method.kind == "n-gram":
        return _ngram(method, num_speculative_tokens, target)
    if method.kind == "draft model":
        return _draft_model(method, num_speculative_tokens, target)
    return _draft_head(method, num_speculative_tokens, target)


def _draft_head(method: MethodResult, draft_length: int, target: str) -> Deployment:
    algorithm = _needed(method.algorithm, method, "the algorithm of its drafter")
    run = Path(_needed(method.drafter, method, "a drafter"))
    export = run / "export" if (run / "export").is_dir() else run
    has_backbone = algorithm == "medusa2" and (export.parent / "backbone").is_dir()
    target = str(export.parent / "backbone") if has_backbone else target
    commands = serve_commands(algorithm, target, export, draft_length)
    vllm, sglang = commands["vllm"], commands.get("sglang", "")
    sglang_reason = "" if sglang else f"{_SGLANG} does not support Medusa"
    if method.kind == "dynamic tree" and sglang:
        sglang = _dynamic_tree(method, algorithm, target, export, draft_length)
    elif method.kind == "static tree" and sglang:
        sglang_reason = f"{_SGLANG} has no fixed trees: the command drafts a chain, the nearest"
    vllm_reasons = []
    if method.kind != "chain":
        vllm_reasons.append(f"{_VLLM} drafts chains only: the command drafts a chain of {draft_length}, the nearest")
    if not method.is_lossless:
        vllm_reasons.append(f"{_VLLM} has no typical acceptance: it verifies without loss")
    vllm_reason = ". ".join(vllm_reasons)
    if algorithm.startswith("medusa") and (trap := _path_trap(export)):
        vllm, vllm_reason = "", trap
    limits = _engine_limits(export)
    if "vllm" in limits:
        vllm, vllm_reason = "", f"{_VLLM} cannot serve this drafter: {limits['vllm']}"
    if "sglang" in limits:
        sglang, sglang_reason = "", f"{_SGLANG} cannot serve this drafter: {limits['sglang']}"
    return Deployment(vllm, sglang, vllm_reason, sglang_reason)


def _dynamic_tree(method: MethodResult, algorithm: str, target: str, export: Path, num_levels: int) -> str:
    """SGLang's EAGLE worker drafts exactly this tree.

    Its steps are the tree's levels, and its draft tokens count the newest token too: it keeps the best `num_draft_tokens - 1` of
    top_k + (steps - 1) * top_k^2 nodes.
    """
    top_k, total_tokens = int(_setting(method, "top_k")), int(_setting(method, "total_tokens"))
    num_possible = top_k + (num_levels - 1) * top_k**2
    return _sglang(target, _SGLANG_ALGORITHMS[algorithm], export, (num_levels, top_k), min(total_tokens, 1 + num_possible))


def _ngram(method: MethodResult, num_drafts: int, target: str) -> Deployment:
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_min": int(_setting(method, "min_n")),
        "prompt_lookup_max": int(_setting(method, "max_n")),
    }
    # Not with --speculative-ngram-max-bfs-breadth 1: the tree can branch at its root all the same, and FlashAttention would verify it as a chain.
    sglang_reason = (
        f"{_SGLANG} looks up the answers that it has given so far, of all requests, and of a prompt only its last 18 tokens, and drafts a tree: "
        "what is copied from a prompt is not found"
    )
    return Deployment(_vllm(target, speculative), _sglang(target, "NGRAM", None, None, num_drafts + 1), "", sglang_reason)


def _draft_model(method: MethodResult, draft_length: int, target: str) -> Deployment:
    model = _needed(method.drafter, method, "a draft model")
    speculative = {"method": "draft_model", "model": model, "num_speculative_tokens": draft_length}
    trap = _path_trap(model)
    sglang = _sglang(target, "STANDALONE", model, (draft_length, 1), draft_length + 1)
    return Deployment("" if trap else _vllm(target, speculative), sglang, trap, "")


def _vllm(target: str, speculative: Mapping[str, Any]) -> str:
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def _sglang(target: str, algorithm: str, draft: Path | str | None, steps_and_top_k: tuple[int, int] | None, num_draft_tokens: int) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", algorithm]
    if draft is not None:
        words += ["--speculative-draft-model-path", str(draft)]
    if steps_and_top_k is not None:
        words += ["--speculative-num-steps", str(steps_and_top_k[0]), "--speculative-eagle-topk", str(steps_and_top_k[1])]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(num_draft_tokens), "--dtype", "bfloat16"])


def _path_trap(path: Path | str) -> str:
    found = [trap for trap in _VLLM_PATH_TRAPS if trap in str(path).lower()]
    return f"{_VLLM} takes {path} for another method because of {found[0]!r} in its name: rename it or make a link to it" if found else ""


def _engine_limits(export: Path) -> Mapping[str, str]:
    """What the exporter wrote about engines that load the checkpoint and use it badly."""
    facts = export / "headstart.json"
    return json.loads(facts.read_text())["engine_limits"] if facts.is_file() else {}


def _needed(value: str | None, method: MethodResult, what: str) -> str:
    if value is None:
        raise ValueError(f"method {method.name!r} of kind {method.kind!r} names no drafter, expected {what}: compare the methods again")
    return value


def _setting(method: MethodResult, name: str) -> float | int | str | bool:
    if name not in method.settings:
        raise ValueError(f"method {method.name!r} has the settings {sorted(method.settings)}, expected {name!r} as well: compare the methods again")
    return method.settings[name]
