"""What `eval.compare` measures, as data: the contents of compare.json.

Place in the flow: eval/compare.py fills it in -> compare.json -> eval/compare_report.py (table and HTML) and eval/advisor.py (what to deploy). Every
number stands beside what it was measured on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from eval.acceptance import Acceptance, PromptCount
from eval.tune import TunedPoint
from train.drafters.base import load_drafter_class

Kind = Literal["plain", "chain", "static tree", "dynamic tree", "medusa tree", "lookahead", "n-gram", "draft model"]


@dataclass(frozen=True)
class Speed:
    """Timed calls in alternation with plain decoding on the same prompts; prefill included on both sides.

    Attributes:
        ratio: tokens/s over plain tokens/s, of all timed calls together.
        ratio_range: smallest and largest over prompts (over batches, where the batch is larger than 1).
        tokens_per_s, tokens_per_s_plain: of all timed calls together.
        drafting_s, verification_s: mean seconds for each verification. As the times include the prefill, so does the drafting: what the drafter
            does to read the prompt is spread over the verifications.
    """

    ratio: float
    ratio_range: tuple[float, float]
    tokens_per_s: float
    tokens_per_s_plain: float
    drafting_s: float
    verification_s: float


@dataclass(frozen=True)
class Memory:
    """Bytes beyond what plain decoding of the same target holds.

    Attributes:
        weights_bytes: of the drafter or draft model; what it shares with the target is not counted.
        cache_bytes: drafter's keys and values for the longest sequence of the measurement.
        pool_bytes: n-gram pools and the like, at their largest.
        tree_bytes: target's keys and values of the nodes of one verification.
    """

    weights_bytes: int
    cache_bytes: int
    pool_bytes: int
    tree_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.pool_bytes + self.tree_bytes


@dataclass(frozen=True)
class Lossless:
    """Outputs against plain decoding, token by token.

    Attributes:
        dtype: of the target.
        num_outputs: prompts compared.
        num_identical: equal outputs.
        num_near_ties: outputs that differ first where plain decoding's two best logits nearly tie.
        largest_tie_gap: largest such gap.
    """

    dtype: str
    num_outputs: int
    num_identical: int
    num_near_ties: int
    largest_tie_gap: float


@dataclass(frozen=True)
class MethodResult:
    """One method, measured.

    Attributes:
        name: unique, readable: "EAGLE-3 chain", "Lookahead", "n-gram".
        kind: the way of drafting.
        algorithm: of the drafter ("eagle3", "medusa1", ...), or None where nothing is trained.
        drafter: the run, checkpoint or draft model, as the user named it; None where there is none.
        settings: what it was set to, in the paper's names ("draft_length", "total_tokens", "W", "N", "G", ...).
        is_lossless: false for typical acceptance.
        nodes_per_verification: mean tokens of a verification beyond the newest one.
        acceptance: of all prompts, from batch 1.
        acceptance_by_domain: likewise of each domain.
        speed_by_domain: of each domain, batch 1.
        speed_by_batch: by sequences decoded together; batch 1 is always there, the others where they were measured.
        speed_by_draft_length: of chains, batch 1, where other lengths were timed too; acceptance is that of the longest.
        memory: at batch 1.
        lossless: None for a lossy method, and where nothing was checked (temperature above 0).
        tau_predicted: what the teacher-forced acceptance of the drafter says of the same prompts; None for anything but chains of a drafter.
    """

    name: str
    kind: Kind
    algorithm: str | None
    drafter: str | None
    settings: Mapping[str, float | int | str | bool]
    is_lossless: bool
    nodes_per_verification: float
    acceptance: Acceptance
    acceptance_by_domain: Mapping[str, Acceptance]
    speed_by_domain: Mapping[str, Speed]
    speed_by_batch: Mapping[int, Speed]
    speed_by_draft_length: Mapping[int, Speed]
    memory: Memory
    lossless: Lossless | None
    tau_predicted: float | None

    @property
    def speed(self) -> Speed:
        """At batch 1, over all domains."""
        return self.speed_by_batch[1]

    @property
    def has_own_target(self) -> bool:
        """Whether its target was trained with the drafter: what it is lossless against is that one, not the target of the comparison."""
        return self.algorithm is not None and load_drafter_class(self.algorithm).config_class.trains_target

    @property
    def num_changed_outputs(self) -> int:
        """Outputs that differ from plain decoding's without a near tie: a defect, whatever the method promises."""
        found = self.lossless
        return 0 if found is None else found.num_outputs - found.num_identical - found.num_near_ties

    @property
    def keeps_output(self) -> bool:
        """Lossless by design against the target of the comparison, and no output differed but at a near tie."""
        return self.is_lossless and not self.num_changed_outputs and not self.has_own_target


@dataclass(frozen=True)
class Comparison:
    """All methods on one target.

    Attributes:
        target: path or Hub id, as an engine would be given it.
        domains: prompts of each.
        about: command, hardware, versions, dtype, temperature, tokens of an answer.
        plain_tokens_per_s: by batch size.
        forward_s: the target's seconds for one forward, by sequences and by tokens of each: what the advisor's cost model rests on.
        methods: without plain decoding, which every ratio is against.
        not_available: methods that this target or machine cannot run, with the reason.
        weights_bytes: of the target.
        tuning: settings that were searched for methods before they were measured.
        revision: of the target on the Hub, as the user asked for it; None is its newest, or a local folder.
    """

    target: str
    domains: Mapping[str, int]
    about: Mapping[str, Any]
    plain_tokens_per_s: Mapping[int, float]
    forward_s: Mapping[int, Mapping[int, float]]
    methods: tuple[MethodResult, ...]
    weights_bytes: int
    not_available: Mapping[str, str] = field(default_factory=dict)
    tuning: tuple[TunedPoint, ...] = ()
    revision: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON with tau and its interval beside the raw counts of every acceptance."""
        document = asdict(self)
        for method, row in zip(self.methods, document["methods"], strict=True):
            row["acceptance"] = acceptance_to_json(method.acceptance)
            row["acceptance_by_domain"] = {name: acceptance_to_json(value) for name, value in method.acceptance_by_domain.items()}
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Comparison:
        """Reads what `to_json` gave, after a trip through JSON.

        Raises:
            ValueError: if it is something else.
        """
        try:
            fields = {name: document[name] for name in ("target", "domains", "about", "weights_bytes", "not_available")}
            return cls(
                **fields,
                plain_tokens_per_s={int(batch): rate for batch, rate in document["plain_tokens_per_s"].items()},
                forward_s={int(batch): {int(n): s for n, s in row.items()} for batch, row in document["forward_s"].items()},
                methods=tuple(_method_of(row) for row in document["methods"]),
                tuning=tuple(TunedPoint(**point) for point in document["tuning"]),
                revision=document.get("revision"),  # older documents have none
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no comparison: {error!r}; expected what `python -m eval.compare` writes") from error

    def write(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Writes it with further keys (advice, claims), atomically."""
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps(self.to_json() | dict(extra), indent=2) + "\n")
        temporary.replace(path)


def size_text(num_bytes: float) -> str:
    """For people: 0, 512 B, 1.5 KiB, 211 MiB, 12.3 GiB."""
    if num_bytes < 2**10:
        return f"{num_bytes:.0f} B" if num_bytes else "0"
    unit, size = next((unit, num_bytes / limit) for unit, limit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if num_bytes >= limit)
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.1f} {unit}"


_UNDEFINED = dict.fromkeys(("tau", "tau_interval_95", "tau_macro", "joint_acceptance", "conditional_acceptance"))


def acceptance_to_json(acceptance: Acceptance) -> dict[str, Any]:
    """Without a verification (every answer is a single token) the derived numbers are null; the counts say why."""
    counts = {
        "num_prompts": acceptance.num_prompts,
        "num_tokens": acceptance.num_tokens,
        "num_verifications": acceptance.num_verifications,
        "draft_length": acceptance.draft_length,
        "accepted_at": list(acceptance.accepted_at),
        "prompts": [[prompt.num_tokens, prompt.num_verifications] for prompt in acceptance.prompts],
    }
    return (acceptance.to_json() if acceptance.num_verifications else _UNDEFINED) | counts


def acceptance_from_json(row: Mapping[str, Any]) -> Acceptance:
    return Acceptance(tuple(row["accepted_at"]), tuple(PromptCount(*counts) for counts in row["prompts"]))


def _speed_of(row: Mapping[str, Any]) -> Speed:
    return Speed(**{**row, "ratio_range": tuple(row["ratio_range"])})


def _method_of(row: Mapping[str, Any]) -> MethodResult:
    return MethodResult(
        **{
            **row,
            "acceptance": acceptance_from_json(row["acceptance"]),
            "acceptance_by_domain": {name: acceptance_from_json(value) for name, value in row["acceptance_by_domain"].items()},
            "speed_by_domain": {name: _speed_of(value) for name, value in row["speed_by_domain"].items()},
            "speed_by_batch": {int(batch): _speed_of(value) for batch, value in row["speed_by_batch"].items()},
            "speed_by_draft_length": {int(length): _speed_of(value) for length, value in row["speed_by_draft_length"].items()},
            "memory": Memory(**row["memory"]),
            "lossless": None if row["lossless"] is None else Lossless(**row["lossless"]),
        }
    )
