"""What a check of a real engine reads of a finished run, and what every such check calls equal.

Place in the flow: config.json, export/, answers/ and report.json of a run -> this -> eval/serve.py and eval/sweep.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from checkpoints.export import validate_export
from checkpoints.run_files import read_run_json
from checkpoints.serving import format_of_config
from data.adapter import ORIGIN_FILE
from data.target_files import TargetConfig, target_fingerprint

# Of joint acceptance, between the engine's and ours.
TOLERANCE = 0.01
# Two log-probabilities closer than this can change places when the same sum is taken in another order.
NEAR_TIE_NATS = {"float32": 1e-3, "bfloat16": 0.25, "auto": 0.25}


@dataclass(frozen=True)
class Acceptance:
    """Mean acceptance length, and the share of verifications in which drafts 0..p were all accepted."""

    tau: float
    joint_acceptance: list[float]


@dataclass(frozen=True)
class RunFiles:
    """What the check reads of a run.

    Attributes:
        target: path or Hub id of the target; `revision` belongs to it.
        prompts: token ids of the held-out prompts.
        answers: the target's own greedy answers, as our evaluation walked them.
        ours: `tau` and `joint_acceptance` of report.json.
    """

    target: str
    revision: str | None
    export: Path
    vllm_method: str
    prompts: list[list[int]]
    answers: list[list[int]]
    draft_length: int
    ours: Acceptance

    @property
    def max_tokens(self) -> int:
        """An answer that is shorter than the longest ended with a stop token, so one limit gives the engine all the same ends."""
        return max(len(answer) for answer in self.answers)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt with its answer and two verifications past its end.

        vLLM drafts for nobody in a batch in which one request might outgrow this, and takes that every draft in flight is accepted: with room for one
        verification only, requests at once cost some acceptance (measured).
        """
        return max(len(prompt) for prompt in self.prompts) + self.max_tokens + 2 * (self.draft_length + 1)

    @property
    def target_path(self) -> str:
        """The target as another process finds it from any working directory."""
        path = Path(self.target)
        return str(path.resolve()) if path.exists() else self.target

    @property
    def speculative(self) -> dict[str, Any]:
        """vLLM's speculative config."""
        return {"method": self.vllm_method, "model": str(self.export), "num_speculative_tokens": self.draft_length}


def read_run(run: Path) -> RunFiles:
    """Reads and checks the files of a run.

    Raises:
        ValueError: if one is missing or does not fit the others.
    """
    target = read_run_json(run / "config.json")["target"]
    report = read_run_json(run / "report.json")
    # A target that was trained with its drafter, or merged from a base and its adapter, is the run's own.
    own = "backbone" if "backbone" in report else "target" if target.get("adapter") or (run / "target" / ORIGIN_FILE).is_file() else None
    if own is not None:
        target = {"model": str(run / own), "revision": None}
        fits, found = read_run_json(run / "export" / "headstart.json")["target_fingerprint"], target_fingerprint(TargetConfig(target["model"]))
        if fits != found:
            raise ValueError(f"{run}/export fits the target {fits}, but {run}/{own} is {found}: run the recipe to its end again")
    config = validate_export(run / "export")
    path = run / ("backbone_answers" if "backbone" in report else "answers") / "answers.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is missing: run the recipe to its end, it answers the held-out prompts")
    answers = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    ours = Acceptance(tau=report["tau"], joint_acceptance=report["joint_acceptance"])
    if len(answers) != report["num_prompts"] or len(ours.joint_acceptance) != report["draft_length"]:
        raise ValueError(
            f"{run}/report.json speaks of {report['num_prompts']} prompts and {report['draft_length']} drafts, but there are "
            f"{len(answers)} answers and {len(ours.joint_acceptance)} acceptances: run the recipe again to evaluate anew"
        )
    return RunFiles(
        target=target["model"],
        revision=target["revision"],
        export=(run / "export").resolve(),
        vllm_method=format_of_config(config).vllm_method,
        prompts=[answer["prompt_ids"] for answer in answers],
        answers=[answer["answer_ids"] for answer in answers],
        draft_length=report["draft_length"],
        ours=ours,
    )


def stop_token_ids(target: str, revision: str | None) -> list[int]:
    """The tokens that end an answer, as for `Target`: the generation config's (else the config's) and the tokenizer's own."""
    commit = revision or "main"
    try:
        eos = GenerationConfig.from_pretrained(target, revision=commit).eos_token_id
    except OSError:  # no such file
        eos = AutoConfig.from_pretrained(target, revision=commit).get_text_config().eos_token_id
    configured = eos if isinstance(eos, (list, tuple)) else [eos]
    tokenizer = AutoTokenizer.from_pretrained(target, revision=commit)
    return sorted({token for token in [*configured, tokenizer.eos_token_id] if token is not None})


def largest_difference(ours: Acceptance, measured: Acceptance) -> float:
    """Of joint acceptance, at any position."""
    return max(abs(a - b) for a, b in zip(ours.joint_acceptance, measured.joint_acceptance, strict=True))
