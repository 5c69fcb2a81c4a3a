"""The page of a run, report.html: its result, the curves of its training, its data and settings, where it comes from and how to serve it.

Place in the flow: the last stage of a recipe, or `python -m eval.report RUN` at any time: the page shows what the run's folder holds so far, and says
what it could not read. Everything that an engine has measured (serve.json, serve_http.json) stands beside ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.metrics import Metrics, read_metrics
from data.report import report_rows
from eval.page import (
    Cell,
    Sheet,
    html_command,
    html_definitions,
    html_folded,
    html_headline,
    html_note,
    html_page,
    html_plots,
    html_table,
    html_tiles,
    write_page,
)
from eval.report import conditions_text, duration_text
from eval.training_plots import draw_training

_STAGES = ("prepare", "answer", "states", "regenerate", "extract", "train", "backbone", "backbone_answer", "backbone_states", "export", "evaluate")
_NEEDED = (
    *("tau", "tau_interval_95", "tau_untrained", "joint_acceptance", "joint_acceptance_untrained", "conditional_acceptance"),
    *("reference_decoder", "serve_commands", "train_seconds", "total_seconds", "num_train_tokens", "num_steps", "best_step"),
)
_MISSING = Cell("-")


@dataclass(frozen=True)
class RunState:
    """What a run's folder holds; None for what is not there yet.

    Attributes:
        config: config.json.
        metrics: metrics.jsonl.
        report: report.json.
        data: data_report.json.
        provenance: headstart.json of the export.
        engines: serve.json and serve_http.json by how the engine was asked.
        stage_seconds: of each stage that was begun; None for one that is not done.
        problems: sentences about what could not be read or does not fit.
    """

    run_dir: Path
    config: dict[str, Any]
    metrics: Metrics
    report: dict[str, Any] | None
    data: dict[str, Any] | None
    provenance: dict[str, Any] | None
    engines: dict[str, dict[str, Any]]
    stage_seconds: dict[str, float | None]
    problems: tuple[str, ...]


def write_run_page(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the page of a run and returns where it is.

    Args:
        run_dir: the run's folder.
        out: the file; None is report.html in it.

    Raises:
        ValueError: if the folder is no run.
    """
    path = out or run_dir / "report.html"
    write_page(run_page(read_run_state(run_dir)), path)
    return path


# --- reading ----------------------------------------------------------------------------------------------------------


def read_run_state(run_dir: Path) -> RunState:
    """Reads what there is.

    Raises:
        ValueError: if there is no config.json.
    """
    problems: list[str] = []
    config = _read(run_dir / "config.json", problems)
    if config is None:
        raise ValueError(f"{run_dir} holds no readable config.json, so it is no run: name the folder of one, for example runs/quickstart")
    found = {name: _read(run_dir / name, problems) for name in ("report.json", "data_report.json", "serve.json", "serve_http.json")}
    records = {name: _read(run_dir / "stages" / f"{name}.json", problems) for name in _STAGES}
    report = found["report.json"]
    if report is not None and (missing := [name for name in _NEEDED if name not in report]):
        problems.append(f"report.json lacks {', '.join(missing)}: another version of headstart wrote it; evaluate again to see it here.")
        report = None
    best = run_dir / "best.json"
    if report is not None and best.exists() and best.stat().st_mtime > (run_dir / "report.json").stat().st_mtime:
        problems.append("report.json is older than the training: the results are those of an earlier one.")
    metrics = read_metrics(run_dir / "metrics.jsonl")
    if metrics.num_damaged:
        problems.append(f"metrics.jsonl has {_counted(metrics.num_damaged, 'damaged line')}, left out here.")
    num_infinite = sum(not _is_finite(record.get("loss")) for record in metrics.of("train"))
    if num_infinite:
        problems.append(f"The loss of {_counted(num_infinite, 'step')} is not a finite number and is not drawn.")
    asked = {"offline": found["serve.json"], "HTTP": found["serve_http.json"]}
    return RunState(
        run_dir=run_dir,
        config=config,
        metrics=metrics,
        report=report,
        data=found["data_report.json"],
        provenance=_read(run_dir / "export" / "headstart.json", problems),
        engines={how: result for how, result in asked.items() if result is not None and result.get("measured")},
        stage_seconds={name: record.get("seconds") for name, record in records.items() if record is not None},
        problems=tuple(problems),
    )


def _read(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """A JSON object; None where there is none, which is a problem only if there is a file."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.name} is not a JSON object and is left out.")
        return None
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# --- the page ---------------------------------------------------------------------------------------------------------


def run_page(state: RunState) -> str:
    """The page as HTML; the same folder gives the same bytes."""
    report = state.report
    parts = [html_headline(_headline(state)), *map(html_note, state.problems)]
    if report is not None:
        parts += [html_note(conditions_text(report)), html_tiles(_tiles(state, report)), html_table(_acceptance_sheet(state, report))]
    if state.engines:
        parts.append(html_table(_engine_sheet(state)))
    if report is not None:
        commands = "".join(html_command(engine, command) for engine, command in report["serve_commands"].items())
        parts.append(f'<h2>Serve it</h2>\n<section class="advice">{commands}</section>')
    if plots := draw_training(state.metrics):
        parts += ["<h2>Training</h2>", html_plots(plots)]
    if report is not None and "backbone" in report:
        parts.append(html_definitions("The target that was trained with it", _plain_rows(report["backbone"])))
    if state.data is not None:
        parts.append(html_table(_data_sheet(state.data)))
    parts.append(html_definitions("Time", _times(state)))
    parts.append(html_folded("Settings", _settings(state.config)))
    if state.provenance is not None:
        parts.append(html_definitions("Where it comes from", _plain_rows(state.provenance)))
    return html_page(_title(state), parts)


def _title(state: RunState) -> str:
    algorithm = f"{state.provenance['algorithm']} for " if state.provenance and "algorithm" in state.provenance else "a drafter for "
    return f"{state.run_dir.resolve().name}: {algorithm}{_plain(state.config.get('target', {}).get('model', 'an unknown target'))}"


def _headline(state: RunState) -> str:
    if state.report is not None:
        report = state.report
        low, high = report["tau_interval_95"]
        return f"tau {report['tau_untrained']:.3f} → {report['tau']:.3f} tokens per target forward (95% interval {low:.3f} to {high:.3f})"
    measured = [record for record in state.metrics.of("heldout") if _is_finite(record.get("tau"))]
    if measured:
        best = max(measured, key=lambda record: record["tau"])
        return f"Not evaluated yet: step {state.metrics.last_step:,}, held-out tau {best['tau']:.3f} at step {best['step']:,}"
    if state.metrics.records:
        return f"Not evaluated yet: step {state.metrics.last_step:,} of the training"
    begun = [name for name, seconds in state.stage_seconds.items() if seconds is None]
    return f"Not trained yet{': ' + begun[-1] + ' has begun' if begun else ''}"


def _tiles(state: RunState, report: dict[str, Any]) -> list[tuple[str, str, str]]:
    decoder = report["reference_decoder"]
    low, high = decoder["speedup_range"]
    joint = [f"{share:.1%}" for share in report["joint_acceptance"]]
    tiles = [
        ("tau", f"{report['tau']:.3f}", f"untrained {report['tau_untrained']:.3f}"),
        ("first draft accepted", joint[0] if joint else "-", f"all {len(joint)}: {joint[-1]}" if joint else ""),
        ("speed-up, reference decoder", f"{decoder['speedup_reference_decoder']:.2f}x", f"{low:.2f} to {high:.2f}, {decoder['dtype']}"),
    ]
    for how, result in state.engines.items():
        speedup = _speedup(result.get("tokens_per_s"), result.get("tokens_per_s_plain"))
        tiles.append((f"tau counted by {result['engine']}, {how}", f"{result['measured']['tau']:.3f}", f"speed-up {speedup}"))
    tiles.append(("training", duration_text(report["train_seconds"]), f"everything {duration_text(report['total_seconds'])}"))
    tiles.append(("tokens trained on", f"{report['num_train_tokens']:,}", f"{report['num_steps']:,} steps, best {report['best_step']:,}"))
    return tiles


def _acceptance_sheet(state: RunState, report: dict[str, Any]) -> Sheet:
    """One row a draft and one of tau; a column for each engine that has counted."""
    engines = [(f"{result['engine']} {result['engine_version']}", how, result["measured"]) for how, result in state.engines.items()]
    header = (Cell("draft"), Cell("untrained"), Cell("accepted"), Cell("given the", "earlier ones"), *(Cell(name, how) for name, how, _ in engines))
    columns = [report["joint_acceptance_untrained"], report["joint_acceptance"], report["conditional_acceptance"]]
    columns += [measured["joint_acceptance"] for _, _, measured in engines]
    rows = [
        (Cell(str(place + 1)), *(Cell(f"{column[place]:.2%}") if place < len(column) else _MISSING for column in columns))
        for place in range(len(report["joint_acceptance"]))
    ]
    taus = [report["tau_untrained"], report["tau"], None, *(measured["tau"] for _, _, measured in engines)]
    rows.append((Cell("tau"), *(_MISSING if tau is None else Cell(f"{tau:.4f}", is_best=place == 1) for place, tau in enumerate(taus))))
    note = (
        "accepted: verifications in which this draft and all before it were accepted; tau = 1 + their sum. Every engine counts the same way, on the "
        "same prompts."
    )
    return Sheet("Joint acceptance", header, tuple(rows), note)


def _engine_sheet(state: RunState) -> Sheet:
    """One row a way of asking, and of HTTP one a number of requests at once."""
    header = (Cell("engine"), Cell("tau"), Cell("tokens/s", "without"), Cell("tokens/s", "with"), Cell("speed-up"), Cell("outputs", "identical"))
    rows = []
    for how, result in state.engines.items():
        name = f"{result['engine']} {result['engine_version']}, {how}"
        levels = result.get("levels")
        if not levels:
            rows.append(_engine_row(name, result["measured"]["tau"], result["tokens_per_s_plain"], result["tokens_per_s"], result, result))
            continue
        for level in levels:
            drafted, plain = level["with_drafter"], level["without_drafter"]
            acceptance = drafted["acceptance"]
            plain_rate = plain["tokens_per_s"] if plain else None
            name_here = f"{name}, {level['concurrency']} at once"
            rows.append(_engine_row(name_here, acceptance["tau"] if acceptance else None, plain_rate, drafted["tokens_per_s"], level, result))
    notes = [f"{how}: ended early: {result['error']}" for how, result in state.engines.items() if result.get("error")]
    return Sheet("In the engine", header, tuple(rows), "; ".join(notes))


def _engine_row(
    name: str, tau: float | None, plain: float | None, drafted: float | None, counts: Mapping[str, Any], result: Mapping[str, Any]
) -> tuple[Cell, ...]:
    identical, ties = counts["num_identical_outputs"], counts["num_near_ties"]
    return (
        Cell(name),
        Cell("-" if tau is None else f"{tau:.3f}"),
        *(Cell("-" if rate is None else f"{rate:,.1f}") for rate in (plain, drafted)),
        Cell(_speedup(drafted, plain)),
        _MISSING if identical is None else Cell(f"{identical} of {result['num_outputs']}", f"{_counted(ties, 'near tie')}" if ties else ""),
    )


def _speedup(drafted: float | None, plain: float | None) -> str:
    return f"{drafted / plain:.2f}x" if drafted and plain else "-"


def _data_sheet(data: dict[str, Any]) -> Sheet:
    rows = tuple((Cell(what), Cell(f"{count:,}"), Cell(example), Cell(rule)) for what, count, example, rule in report_rows(data))
    notes = []
    if tokens := data.get("tokens"):
        share = tokens["num_supervised_tokens"] / max(1, tokens["num_tokens"])
        notes.append(f"{tokens['num_tokens']:,} tokens, {share:.1%} supervised; {tokens['num_tokens_lost']:,} cut off.")
        notes += [f"{name}: {split['num_samples']:,} samples, {split['num_tokens']:,} tokens." for name, split in tokens["splits"].items()]
    if data.get("num_warnings"):
        notes.append(f"{_counted(data['num_warnings'], 'warning')}, the first: {data['warnings'][0]}")
    return Sheet("Data", (Cell(""), Cell("records"), Cell("example"), Cell("rule")), rows, " ".join(notes), is_prose=True)


def _times(state: RunState) -> list[tuple[str, str]]:
    return [(name, "begun, not done" if seconds is None else duration_text(seconds)) for name, seconds in state.stage_seconds.items()]


def _settings(config: Mapping[str, Any]) -> list[tuple[str, Sequence[tuple[str, str]]]]:
    """Groups as in the recipe; what stands alone comes first."""
    alone = {name: value for name, value in config.items() if not isinstance(value, dict)}
    groups = [(name, _plain_rows(value)) for name, value in config.items() if isinstance(value, dict)]
    return [("run", _plain_rows(alone)), *groups]


def _plain_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), _plain(value)) for name, value in values.items()]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return {None: "default", True: "yes", False: "no"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
