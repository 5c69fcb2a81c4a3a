"""What the tables of a comparison of decoding methods say, cell by cell, and the sentence above them.

Place in the flow: `Comparison` -> `Sheet`s -> eval/compare_report.py, which draws the same ones on the console and in HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eval.acceptance import Acceptance
from eval.advisor import SPEED_NOISE, Candidate, candidates_at_batch, decide, drafts_text, is_useless
from eval.compare_plots import prompts_text
from eval.measurement import Comparison, MethodResult, Speed, size_text
from eval.page import Cell, Sheet

_NUM_POSITIONS = 4
_COLUMNS_BESIDE_NAME = 6
_PLAIN = "plain decoding"
_MISSING = Cell("-")


def method_sheet(comparison: Comparison) -> Sheet:
    """One row a method, after plain decoding."""
    longest = max((method.acceptance.draft_length for method in comparison.methods), default=0)
    num_positions = min(_NUM_POSITIONS, longest)
    header = (
        Cell("method"),
        Cell("tau", "95%"),
        Cell("tau", "macro"),
        Cell("accepted, %", f"drafts 1-{num_positions}"),
        Cell("speed-up", "range"),
        Cell("memory", "of target"),
        Cell("drafting", "share"),
        Cell("nodes"),
        Cell("lossless"),
    )
    rate = comparison.plain_tokens_per_s.get(1)
    plain = (Cell(_PLAIN), Cell("1.00"), Cell("1.00"), _MISSING, Cell("1.00x", _rate(rate)), *[_MISSING] * 3, Cell("reference"))
    speeds = _speed_cells([method.speed_by_batch.get(1) for method in comparison.methods], comparison.methods, has_range=True)
    rows = [
        (
            Cell(method.name),
            *_tau_cells(method.acceptance),
            _positions_cell(method.acceptance, num_positions),
            speed,
            Cell(f"+{size_text(method.memory.total_bytes)}", _share(method.memory.total_bytes, comparison.weights_bytes)),
            _drafting_cell(method.speed_by_batch.get(1)),
            Cell(f"{method.nodes_per_verification:.1f}"),
            _lossless_cell(method),
        )
        for method, speed in zip(comparison.methods, speeds, strict=True)
    ]
    return Sheet("Methods, batch 1", header, (plain, *rows), _method_note(comparison))


def _method_note(comparison: Comparison) -> str:
    dtypes = sorted({method.lossless.dtype for method in comparison.methods if method.lossless})
    return (
        "tau: tokens per verification of the target, prefill excluded; all prompts together, with a 95% bootstrap interval over prompts where "
        "there are several; macro: mean over prompts. accepted: verifications that accepted all drafts up to this one. speed-up: tokens/s over "
        f"plain decoding of the same prompts; range over prompts; marked where lossless, more than {SPEED_NOISE:.0%} faster than plain decoding, and "
        "as fast as the fastest such, within the same share. memory: beyond plain decoding, and as a share of the target's weights. "
        "drafting: mean time of the drafts of one verification, with its part of the time in which the drafter reads the prompt, and its share of "
        "drafting and verification. nodes: tokens beyond the newest one in a verification. "
        f"lossless: outputs equal to plain decoding{' in ' if dtypes else ''}{', '.join(dtypes)}; a near tie differs first where "
        "the target's two best logits are almost equal."
    )


def domain_sheets(comparison: Comparison) -> list[Sheet]:
    """Tau and speed-up of each domain, a few domains a table; none where there is one domain or no method."""
    domains = list(comparison.domains)
    if len(domains) < 2 or not comparison.methods:
        return []
    sheets = []
    for start in range(0, len(domains), _COLUMNS_BESIDE_NAME):
        part = domains[start : start + _COLUMNS_BESIDE_NAME]
        columns = [_domain_column(comparison.methods, domain) for domain in part]
        header = (Cell("method"), *(Cell(domain, prompts_text(comparison.domains[domain])) for domain in part))
        sheets.append(Sheet("Speed-up and tau by domain, batch 1", header, _rows(comparison.methods, columns)))
    return sheets


def _domain_column(methods: Sequence[MethodResult], domain: str) -> list[Cell]:
    taus = [method.acceptance_by_domain.get(domain) for method in methods]
    speeds = _speed_cells([method.speed_by_domain.get(domain) for method in methods], methods)
    details = [f"tau {tau.tau:.2f}" if tau is not None and tau.num_verifications else "" for tau in taus]
    return [Cell("1.00x", "tau 1.00"), *(replace(speed, detail=detail) for speed, detail in zip(speeds, details, strict=True))]


def batch_sheets(comparison: Comparison) -> list[Sheet]:
    """Speed-up by sequences decoded together; none where only batch 1 was measured."""
    batches = sorted({batch for method in comparison.methods for batch in method.speed_by_batch})
    if batches in ([], [1]):
        return []
    sheets = []
    for start in range(0, len(batches), _COLUMNS_BESIDE_NAME):
        part = batches[start : start + _COLUMNS_BESIDE_NAME]
        columns = [
            [
                Cell("1.00x", _rate(comparison.plain_tokens_per_s.get(batch))),
                *_speed_cells([method.speed_by_batch.get(batch) for method in comparison.methods], comparison.methods, has_range=True),
            ]
            for batch in part
        ]
        header = (Cell("method"), *(Cell(f"batch {batch}") for batch in part))
        sheets.append(Sheet("Speed-up by batch size", header, _rows(comparison.methods, columns)))
    return sheets


def draft_length_sheets(comparison: Comparison) -> list[Sheet]:
    """Speed-up of chains by draft length; none where no other length was timed. Marked over all lengths: one of them is to be chosen."""
    methods = [method for method in comparison.methods if method.speed_by_draft_length]
    lengths = sorted({length for method in methods for length in method.speed_by_draft_length})
    places = [(method, length) for method in methods for length in lengths]
    cells = _speed_cells([method.speed_by_draft_length.get(length) for method, length in places], [method for method, _ in places], has_range=True)
    by_place = {(method.name, length): cell for (method, length), cell in zip(places, cells, strict=True)}
    sheets = []
    for start in range(0, len(lengths), _COLUMNS_BESIDE_NAME):
        part = lengths[start : start + _COLUMNS_BESIDE_NAME]
        rows = tuple((Cell(method.name), *(by_place[method.name, length] for length in part)) for method in methods)
        header = (Cell("method"), *(Cell(f"{length} draft" if length == 1 else f"{length} drafts") for length in part))
        sheets.append(Sheet("Speed-up by draft length, batch 1", header, rows))
    return sheets


def settings_sheet(comparison: Comparison) -> Sheet:
    """How each method drafts and what it was set to; for chains, tau as predicted from the teacher-forced pass."""
    rows = tuple(
        (
            Cell(method.name),
            Cell(method.kind),
            Cell(method.drafter or "none"),
            Cell(_plain_text(method.settings) or "-"),
            Cell(f"{method.acceptance.tau:.2f}") if method.acceptance.num_verifications else _MISSING,
            _MISSING if method.tau_predicted is None else Cell(f"{method.tau_predicted:.2f}"),
        )
        for method in comparison.methods
    )
    header = (Cell("method"), Cell("drafts by"), Cell("drafter"), Cell("settings"), Cell("tau", "decoded"), Cell("tau", "predicted"))
    return Sheet("Settings", header, rows, is_prose=True)


def _rows(methods: Sequence[MethodResult], columns: Sequence[Sequence[Cell]]) -> tuple[tuple[Cell, ...], ...]:
    names = [Cell(_PLAIN), *(Cell(method.name) for method in methods)]
    return tuple(zip(names, *columns, strict=True))


def tuning_sheets(comparison: Comparison) -> list[Sheet]:
    """Everything that a search of parameters tried, the fastest first; none where nothing was searched."""
    if not comparison.tuning:
        return []
    header = (Cell("method"), Cell("settings"), Cell("speed-up"), Cell("tau"), Cell("used"))
    rows = tuple(
        (Cell(point.method), Cell(_plain_text(point.settings)), Cell(f"{point.speedup:.2f}x"), Cell(f"{point.tau:.2f}"), Cell("yes" * point.is_best))
        for point in sorted(comparison.tuning, key=lambda point: (point.method, -point.speedup))
    )
    return [Sheet("Settings that were tried", header, rows, "Measured on the calibration prompts, which are none of those above.")]


def _tau_cells(acceptance: Acceptance) -> tuple[Cell, Cell]:
    if not acceptance.num_verifications:
        return _MISSING, _MISSING
    low, high = acceptance.tau_interval()
    return Cell(f"{acceptance.tau:.2f}", f"{low:.2f}-{high:.2f}" if acceptance.num_prompts > 1 else "1 prompt"), Cell(f"{acceptance.tau_macro:.2f}")


def _positions_cell(acceptance: Acceptance, num_positions: int) -> Cell:
    if not acceptance.num_verifications:
        return _MISSING
    shares = [f"{share * 100:.0f}" for share in acceptance.joint_acceptance[:num_positions]]
    return Cell(" ".join(share.rjust(2) for share in shares + ["-"] * (num_positions - len(shares))))


def _speed_cells(speeds: Sequence[Speed | None], methods: Sequence[MethodResult], has_range: bool = False) -> list[Cell]:
    """Of one column, or of all between which there is to choose."""
    marked = _marked(speeds, methods)
    return [replace(_speed_cell(speed, has_range), is_best=is_best) for speed, is_best in zip(speeds, marked, strict=True)]


def _marked(speeds: Sequence[Speed | None], methods: Sequence[MethodResult]) -> list[bool]:
    """Of each, whether it could be advised by this speed: output kept, drafts of use, clearly faster than plain decoding, as fast as any such."""
    can_be = {method.name: method.keeps_output and not is_useless(method.acceptance) for method in methods}
    ratios = [speed.ratio if speed is not None and can_be[method.name] else 0.0 for speed, method in zip(speeds, methods, strict=True)]
    return [ratio > 1 + SPEED_NOISE and ratio >= max(ratios) * (1 - SPEED_NOISE) for ratio in ratios]


def _speed_cell(speed: Speed | None, has_range: bool = True) -> Cell:
    if speed is None:
        return _MISSING
    return Cell(f"{speed.ratio:.2f}x", f"{speed.ratio_range[0]:.2f}-{speed.ratio_range[1]:.2f}" if has_range else "")


def _drafting_cell(speed: Speed | None) -> Cell:
    if speed is None:
        return _MISSING
    drafting_ms = speed.drafting_s * 1e3
    digits = 0 if drafting_ms >= 100 else 1 if drafting_ms >= 1 else 2
    return Cell(f"{drafting_ms:.{digits}f} ms", _share(speed.drafting_s, speed.drafting_s + speed.verification_s))


def _lossless_cell(method: MethodResult) -> Cell:
    cell = _checked_cell(method)
    return replace(cell, detail="\n".join(filter(None, (cell.detail, "own target")))) if method.has_own_target else cell


def _checked_cell(method: MethodResult) -> Cell:
    if not method.is_lossless:
        return Cell("LOSSY", "by design")
    if method.lossless is None:
        return Cell("unchecked")
    counts = method.lossless
    if method.num_changed_outputs:
        return Cell(f"NO {counts.num_identical}/{counts.num_outputs}", f"{method.num_changed_outputs} differ")
    ties = f"{counts.num_near_ties} near tie{'s' if counts.num_near_ties > 1 else ''}" if counts.num_near_ties else ""
    return Cell(f"yes {counts.num_identical}/{counts.num_outputs}", ties)


def _share(part: float, whole: float) -> str:
    if not part or not whole:
        return ""
    share = part / whole
    return "<0.1%" if share < 0.001 else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _rate(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{tokens_per_s:,.1f} tok/s"


def headline(comparison: Comparison) -> str:
    """What the advisor says of a single request, in one sentence; where the samples are too few for advice, what they showed."""
    if not comparison.methods:
        return "No method was measured."
    decision = decide(candidates_at_batch(comparison, 1))
    if not decision.kept:
        return "No method that keeps the target's output was measured."
    if decision.chosen is not None and decision.chosen.method.keeps_output:
        return f"{decision.chosen.method.name} is the lossless method to deploy for a single request: {_numbers(decision.chosen)}."
    if decision.refusal:
        return _few_samples(decision.kept)
    useful = [one for one in decision.kept if not one.is_useless]
    if not useful:
        return "No lossless method is of use here: none has drafts accepted often enough to matter."
    best = max(useful, key=lambda one: one.ratio)
    return f"No lossless method is clearly faster than plain decoding here; the nearest is {best.method.name}: {_numbers(best)}."


def _few_samples(kept: Sequence[Candidate]) -> str:
    """What was measured; nothing is predicted from a few samples."""
    best = max(kept, key=lambda one: one.measured_ratio)
    numbers = f"{best.measured_ratio:.2f}x plain decoding at batch 1"
    if best.choice is not None:
        numbers += f" with {drafts_text(best.set_to if best.is_predicted else best.num_drafts)}"
    if best.measured_ratio > 1 + SPEED_NOISE:
        return f"{best.method.name} measured fastest of the lossless methods, on too few samples to advise it: {numbers}."
    return (
        f"No lossless method measured clearly faster than plain decoding, on too few samples to advise; the nearest is {best.method.name}: {numbers}."
    )


def _numbers(candidate: Candidate) -> str:
    """Of the advised number of drafts; the range over prompts is known of the one that was set."""
    text = f"{candidate.ratio:.2f}x plain decoding at batch 1"
    tau = candidate.acceptance.tau if candidate.acceptance.num_verifications else None
    if candidate.choice is not None:
        text += f" with {drafts_text(candidate.num_drafts)}{' (predicted, not measured)' * candidate.is_predicted}"
        tau = 1 + sum(candidate.acceptance.joint_acceptance[: candidate.num_drafts])
    if candidate.num_drafts == candidate.set_to:
        low, high = candidate.method.speed.ratio_range
        text += f" ({low:.2f}x to {high:.2f}x)"
    return text if tau is None else f"{text}, {tau:.2f} tokens per verification"


def conditions(comparison: Comparison) -> list[tuple[str, str]]:
    """What it was measured on: target, prompts, and everything that the measurement wrote down."""
    domains = ", ".join(f"{domain} ({count})" for domain, count in comparison.domains.items())
    total = sum(comparison.domains.values())
    rows = [("target", f"{comparison.target} ({size_text(comparison.weights_bytes)} of weights)"), ("prompts", f"{total} in all: {domains}")]
    return rows + [(name.replace("_", " "), _plain_text(value)) for name, value in comparison.about.items()]


def _plain_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain_text(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain_text(item) for item in value)
    return str(value)
