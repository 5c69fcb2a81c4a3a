"""The model cards of what is published: metadata that the Hub understands, and what a stranger must know to use and to judge a drafter.

Place in the flow: config.json, report.json, data_report.json and serve.json of a run -> `RunFacts` -> `drafter_hub_card`, `backbone_hub_card` ->
README.md on the Hub. checkpoints/card.py is the short card that lies in the export before anything is measured.
The metadata's fields: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from checkpoints.card import backbone_changes
from checkpoints.provenance import portable_name
from checkpoints.serving import serving_format

# As data/sources.py reads it: OWNER/NAME[/CONFIG][:SPLIT][@REVISION].
_HUB_DATASET = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?")
_FILE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".gz")
# Of the run, not of the recipe; and what the other sections of the card say.
_UNTOLD = {"num_workers", "sources", "log_every", "save_every", "num_kept_checkpoints", "shard_tokens", "path"}
_SECTIONS = ("drafter", "optim", "train", "data", "answers", "features", "eval")
UNKNOWN_TARGET = "TARGET"


@dataclass(frozen=True)
class License:
    """What the card says of the licence.

    Attributes:
        id: as the Hub spells it, for example "apache-2.0"; None where nobody has said it.
        name, link: of a licence whose id is "other".
    """

    id: str | None = None
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class RunFacts:
    """What a run has left that its cards tell.

    Attributes:
        algorithm: as in train/drafters/.
        provenance: headstart.json.
        config: config.json of the run.
        report: report.json.
        data_report: data_report.json.
        serve: serve.json where it belongs to this report, else None.
        local_sources: the data sources that were files or folders of the machine.
        base_model: Hub id of the target, None where only a local copy is known; of one with an adapter the base's, unless `has_published_target`.
        has_published_target: `base_model` is what the drafter is served with.
        license: of the drafter.
    """

    algorithm: str
    provenance: Mapping[str, Any]
    config: Mapping[str, Any]
    report: Mapping[str, Any]
    data_report: Mapping[str, Any]
    serve: Mapping[str, Any] | None
    local_sources: frozenset[str]
    base_model: str | None
    has_published_target: bool
    license: License

    @property
    def served_model(self) -> str | None:
        """Hub id of the target that the drafter is served with, if it has one."""
        return self.base_model if self.has_published_target else None

    @property
    def original(self) -> str:
        """The target as anybody may read it."""
        target = self.config["target"]
        name, adapter = portable_name(target["model"]), target.get("adapter")
        return self.served_model or (f"{name} with the adapter {portable_name(adapter)} merged into it" if adapter else self.base_model or name)

    def source_names(self) -> list[str]:
        """The data sources as anybody may read them."""
        return [source if self.hub_dataset(source) else Path(source).name for source in self.config["data"]["sources"]]

    def hub_dataset(self, source: str) -> re.Match[str] | None:
        """The parts of a source that is a dataset of the Hub."""
        found = None if source in self.local_sources else _HUB_DATASET.fullmatch(source)
        return None if found is None or found["id"].endswith(_FILE_SUFFIXES) else found

    def hub_datasets(self) -> list[re.Match[str]]:
        """Those of the data sources."""
        return [found for source in self.config["data"]["sources"] if (found := self.hub_dataset(source))]

    def dataset_ids(self) -> list[str] | None:
        """Their ids, each once, for the metadata."""
        return list(dict.fromkeys(found["id"] for found in self.hub_datasets())) or None


def drafter_hub_card(facts: RunFacts, repo: str, backbone_repo: str | None) -> str:
    """README.md of a drafter.

    Args:
        facts: of its run.
        repo: where it is published.
        backbone_repo: where the target that was trained with it is published; None where it fits the original.
    """
    target = backbone_repo or facts.served_model
    engines = serving_format(facts.algorithm).engines
    data = ModelCardData(
        base_model=backbone_repo or facts.base_model,
        library_name="vllm",  # said, because the Hub would otherwise guess transformers, which cannot load it
        license=facts.license.id,
        license_name=facts.license.name,
        license_link=facts.license.link,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-head", facts.algorithm, *engines, "headstart"],
        datasets=facts.dataset_ids(),
        model_name=repo.split("/")[1],
        eval_results=_results(facts),
        # The Hub knows adapter, finetune, quantized and merge. Weights that are of use only beside those of the base are an adapter.
        base_model_relation="adapter" if backbone_repo or facts.base_model else None,
    )
    versions = ", ".join(f"{name} {row.version}" for name, row in engines.items())
    lines = [
        f"# {facts.algorithm} drafter for {facts.original}",
        "",
        f"A draft head for speculative decoding: it proposes tokens that {target or facts.original} verifies several at a time, and the answers stay "
        f"the target's own. It is no model by itself. Made by headstart ({facts.provenance['commit'][:12]}); loads in {versions}.",
        "",
        *_serving(facts, repo, target, backbone_repo),
        *_measured(facts),
        *_training(facts),
        *_data(facts),
        *_limits(facts, backbone_repo),
    ]
    return _card(data, facts.license, lines)


def backbone_hub_card(facts: RunFacts, repo: str, drafter_repo: str) -> str:
    """README.md of a target that was trained together with its drafter."""
    data = ModelCardData(
        base_model=facts.base_model,
        library_name="transformers",
        license=facts.license.id,
        license_name=facts.license.name,
        license_link=facts.license.link,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", facts.algorithm, "headstart"],
        datasets=facts.dataset_ids(),
        base_model_relation="finetune" if facts.base_model else None,
    )
    lines = [
        f"# {facts.original}, trained together with its draft heads",
        "",
        f"This is not the original model: its answers can differ. It is the target that the drafter [{drafter_repo}](https://huggingface.co/"
        f"{drafter_repo}) fits, and is served with it:",
        "",
        *_commands(facts, drafter_repo, repo),
        "## What the training did to it",
        "",
        *backbone_changes(facts.report["backbone"]),
        "",
        *_data(facts),
    ]
    return _card(data, facts.license, lines)


def _card(data: ModelCardData, license: License, lines: list[str]) -> str:
    comment = [] if license.id else ["<!-- No licence is named: neither the uploader nor the target's files said one. -->", ""]
    return "\n".join(["---", data.to_yaml(), "---", "", *comment, *lines]).rstrip() + "\n"


# --- metadata -----------------------------------------------------------------------------------------------------------


def _results(facts: RunFacts) -> list[EvalResult]:
    """The Hub's model-index: every number with what it was measured on."""
    report, serve = facts.report, facts.serve
    args = {"temperature": report["temperature"], "num_speculative_tokens": report["draft_length"], "draft_shape": report["draft_shape"]}
    ours = {**args, "dtype": report["dtype"], "hardware": report["device"]}
    results = [_result(facts, "acceptance_length", "tau (tokens per target forward)", report["tau"], ours)]
    for position, share in enumerate(report["joint_acceptance"], start=1):
        results.append(_result(facts, "joint_acceptance", f"joint acceptance, draft {position}", share, {**ours, "position": position}))
    decoder = {**ours, "dtype": report["reference_decoder"]["dtype"], "batch_size": 1, "decoder": "headstart reference decoder"}
    results.append(_result(facts, "speedup", "speed-up over plain decoding", report["speedup_reference_decoder"], decoder))
    if serve is not None:
        engine = f"{serve['engine']} {serve['engine_version']}"
        counted = {**args, "engine": engine}
        results.append(_result(facts, "acceptance_length", f"tau, counted by {engine}", serve["measured"]["tau"], counted))
        for position, share in enumerate(serve["measured"]["joint_acceptance"], start=1):
            name = f"joint acceptance, draft {position}, counted by {engine}"
            results.append(_result(facts, "joint_acceptance", name, share, {**counted, "position": position}))
        speedup = serve["tokens_per_s"] / serve["tokens_per_s_plain"]
        results.append(_result(facts, "speedup", f"speed-up over plain decoding in {engine}", speedup, counted))
    return results


def _result(facts: RunFacts, metric: str, name: str, value: float, args: dict[str, Any]) -> EvalResult:
    datasets, names = facts.hub_datasets(), ", ".join(facts.source_names())
    first = datasets[0] if datasets else None
    return EvalResult(
        task_type="text-generation",
        dataset_type=first["id"] if first else re.sub(r"[^\w.-]+", "-", names),
        dataset_name=f"held-out prompts of {names}",
        dataset_config=first["config"] if first else None,
        dataset_split=first["split"] if first else None,
        dataset_revision=first["revision"] if first else None,
        dataset_args={"num_prompts": facts.report["num_prompts"], "num_verifications": facts.report["num_verifications"]},
        metric_type=metric,
        metric_name=name,
        metric_value=round(value, 4),
        metric_args=args,
    )


# --- the text -----------------------------------------------------------------------------------------------------------


def _serving(facts: RunFacts, repo: str, target: str | None, backbone_repo: str | None) -> list[str]:
    lines = ["## Serve it", "", *_commands(facts, repo, target)]
    if backbone_repo is not None:
        lines += [
            f"**It fits only [{backbone_repo}](https://huggingface.co/{backbone_repo})**, the target that was trained together with it, not "
            f"{facts.original}: with any other the output stays right, but drafts are rarely accepted.",
            "",
            *backbone_changes(facts.report["backbone"]),
            "",
        ]
    elif target is None and (adapter := facts.provenance.get("adapter")):
        merge = ["python", "-m", "data.merge_adapter", "--target.model", facts.provenance["target"], "--target.adapter", adapter]
        lines += [
            f"`{UNKNOWN_TARGET}` is {facts.provenance['target']} with the adapter {adapter} merged into one model, which headstart writes:",
            "",
            "```bash",
            shlex.join([*merge, "--out", UNKNOWN_TARGET]),
            "```",
            "",
        ]
    elif target is None:
        copy = f"`{UNKNOWN_TARGET}` is your copy of {facts.original}"
        lines += [f"{copy}, the one with the fingerprint `{facts.provenance['target_fingerprint']}`.", ""]
    return lines


def _commands(facts: RunFacts, repo: str, target: str | None) -> list[str]:
    """The serve commands of the report with the names that they have on the Hub."""
    lines = ["```bash"]
    for engine, command in facts.report["serve_commands"].items():
        if engine not in facts.provenance["engine_limits"]:
            lines.append(published_command(command, facts.report, repo, target or UNKNOWN_TARGET))
    return [*lines, "```", ""]


def published_command(command: str, report: Mapping[str, Any], repo: str, target: str) -> str:
    """A serve command of report.json with the published names in place of the local paths."""
    words = []
    for word in shlex.split(command):
        if word.startswith("{"):
            settings = json.loads(word)
            words.append(json.dumps({**settings, "model": repo} if settings["model"] == report["export"] else settings))
        else:
            words.append({report["export"]: repo, report["target"]: target}.get(word, word))
    return shlex.join(words)


def _measured(facts: RunFacts) -> list[str]:
    report, serve = facts.report, facts.serve
    low, high = report["tau_interval_95"]
    decoder, device = report["reference_decoder"], report["device"]
    lines = [
        "## Measured",
        "",
        f"{report['num_prompts']} held-out prompts of {', '.join(facts.source_names())}, {report['num_verifications']:,} verifications; greedy "
        f"(temperature {report['temperature']:g}), {report['draft_shape']} of {report['draft_length']}, {report['dtype']} on {report['device']}, "
        "against the target's full vocabulary.",
        "",
        *(f"| {' | '.join(row)} |" for row in _acceptance_rows(report, serve)),
        "",
        f"*tau* is tokens per target forward, the bonus token included (95% interval {low:.3f} to {high:.3f}); *joint acceptance* at position n is "
        "the share of verifications in which drafts 1..n were all accepted, so tau = 1 + their sum.",
        "",
        f"Speed-up over plain decoding: {decoder['speedup_reference_decoder']:.2f} times in headstart's reference decoder (batch 1, "
        f"{decoder['dtype']}, {_prompts(decoder['num_outputs'])}, {device}: {decoder['tokens_per_s_plain']:.1f} -> "
        f"{decoder['tokens_per_s']:.1f} tokens/s).",
    ]
    if serve:
        plain, drafted = serve["tokens_per_s_plain"], serve["tokens_per_s"]
        lines.append(
            f"In {serve['engine']} {serve['engine_version']}: {drafted / plain:.2f} times ({plain:.1f} -> {drafted:.1f} tokens/s); "
            f"{serve['num_identical_outputs']} of {serve['num_outputs']} outputs identical with and without the drafter."
        )
    return [*lines, ""]


def _prompts(count: int) -> str:
    return f"{count} prompt" + "s" * (count != 1)


def _acceptance_rows(report: Mapping[str, Any], serve: Mapping[str, Any] | None) -> list[list[str]]:
    """Cells of the table of acceptances, the engine's in a column of their own."""
    columns = ["joint acceptance", "untrained", "trained", *([f"{serve['engine']} {serve['engine_version']}"] if serve else [])]
    rows = [columns, ["---"] * len(columns)]
    for index, share in enumerate(report["joint_acceptance"]):
        counted = [f"{serve['measured']['joint_acceptance'][index]:.4f}"] if serve else []
        rows.append([f"draft {index + 1}", f"{report['joint_acceptance_untrained'][index]:.4f}", f"{share:.4f}", *counted])
    counted = [f"**{serve['measured']['tau']:.3f}**"] if serve else []
    return [*rows, ["**tau**", f"{report['tau_untrained']:.3f}", f"**{report['tau']:.3f}**", *counted]]


def _training(facts: RunFacts) -> list[str]:
    report = facts.report
    versions = ", ".join(f"{name} {version}" for name, version in facts.provenance["versions"].items() if version != "absent")
    lines = [
        "## Training",
        "",
        f"{report['num_train_tokens']:,} tokens (repeats counted), {report['num_steps']:,} steps, step {report['best_step']:,} kept; "
        f"{report['train_seconds']:,.0f} s of training, {report['total_seconds']:,.0f} s for everything. {versions}.",
        "",
        "| setting | value |",
        "| --- | --- |",
    ]
    for section in _SECTIONS:
        for name, value in facts.config.get(section, {}).items():
            text = None if name in _UNTOLD else _setting(value)
            if text is not None:
                lines.append(f"| {section}.{name} | {text} |")
    return [*lines, ""]


def _setting(value: Any) -> str | None:
    """A setting as the card shows it; None for what is not set and for addresses, which are of the machine."""
    if isinstance(value, str):
        return None if "://" in value else portable_name(value) if "/" in value else value
    if isinstance(value, (list, tuple)):
        return " ".join(filter(None, (_setting(item) for item in value)))
    return None if value is None or isinstance(value, dict) else str(value)


def _data(facts: RunFacts) -> list[str]:
    report = facts.data_report
    lines = [
        "## Data",
        "",
        f"{', '.join(facts.source_names())}: {report['num_read']:,} records read, {report['num_kept']:,} kept, {report['num_left_out']:,} left out.",
        "",
    ]
    reasons = [(reason, found["count"]) for reason, found in report["left_out"].items() if found["count"]]
    if reasons:
        lines += ["| left out because | records |", "| --- | --- |", *(f"| {reason} | {count:,} |" for reason, count in reasons), ""]
    return lines


def _limits(facts: RunFacts, backbone_repo: str | None) -> list[str]:
    report, draft_vocabulary = facts.report, facts.config["drafter"].get("draft_vocab_size")
    fits = f"It fits the target with the fingerprint `{facts.provenance['target_fingerprint']}`"
    lines = [
        "## Limits",
        "",
        f"- {fits}. Another target, also a fine-tune of it, accepts fewer drafts; the output stays that target's own."
        if backbone_repo is None
        else f"- {fits}, which is {backbone_repo}.",
        "- Acceptance was measured greedily on prompts like those of its training; sampling and other kinds of text accept less. It was trained on "
        f"texts of up to {facts.config['data']['max_length']:,} tokens.",
        f"- The speed-up is of {report['device']} and single requests. Large batches gain less, and can lose.",
    ]
    if draft_vocabulary is not None:
        lines.append(f"- It drafts {draft_vocabulary:,} of the target's tokens (`d2t`, `t2d`); a rarer one is always the target's to find.")
    lines += [f"- {engine} cannot serve it with full acceptance: {reason}." for engine, reason in facts.provenance["engine_limits"].items()]
    if "sglang" not in serving_format(facts.algorithm).engines:
        lines.append("- SGLang does not support this format; vLLM does.")
    return lines
