"""README.md of what a run writes for others to use: an exported drafter, and the target that was trained with it where there is one.

Place in the flow: train/run.py -> this -> the text beside the weights. Anyone who finds the folder without its run learns here what it fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.provenance import Provenance
from checkpoints.serving import serving_format, vllm_serve_command


def drafter_card(algorithm: str, provenance: Provenance, draft_length: int, original: str | None, backbone: Mapping[str, Any] | None) -> str:
    """The card of a drafter.

    Args:
        algorithm: as in train/drafters/.
        provenance: of the export; its target is the one that the drafter fits.
        draft_length: drafts of a chain that it was measured with.
        original: the target before it was trained with the drafter, where it was.
        backbone: the contents of backbone.json, likewise.
    """
    engines = ", ".join(f"{name} {row.version}" for name, row in serving_format(algorithm).engines.items())
    title, target = f"{algorithm} drafter for {provenance.target}", provenance.target
    if provenance.adapter is not None:
        title, target = f"{title} with the adapter {provenance.adapter}", "THE_MERGED_TARGET"
    if original is not None:
        title, target = f"{algorithm} drafter for {original}, trained together with it", "THE_TRAINED_TARGET"
    lines = [
        "---",
        f"tags: [speculative-decoding, {algorithm}]",
        "---",
        "",
        f"# {title}",
        "",
        f"Made by headstart ({provenance.commit}) for the target with the fingerprint `{provenance.target_fingerprint}`. Loads in {engines}:",
        "",
        "```bash",
        vllm_serve_command(algorithm, target, "THIS_FOLDER", draft_length),
        "```",
    ]
    if provenance.adapter is not None:
        lines += [
            "",
            "## It fits the base with its adapter",
            "",
            f"Serve it with {provenance.target} and the adapter {provenance.adapter} merged: the run's `target/`, or what this makes:",
            "",
            "```bash",
            f"python -m data.merge_adapter --target.model {provenance.target} --target.adapter {provenance.adapter} --out THE_MERGED_TARGET",
            "```",
            "",
            "vLLM also serves the two apart, with the same acceptance for requests that name the model `tuned` (not for adapters with DoRA or whole "
            "modules; above rank 16 add `--max-lora-rank`):",
            "",
            "```bash",
            vllm_serve_command(algorithm, provenance.target, "THIS_FOLDER", draft_length)
            + f" --enable-lora --lora-modules tuned={provenance.adapter}",
            "```",
        ]
    if original is not None and backbone is not None:
        lines += [
            "",
            "## It fits only the target that was trained with it",
            "",
            f"The heads were trained together with their target. Serve them with that trained target, not with {original}: with any other the output "
            "stays right, but drafts are rarely accepted.",
            "",
            *backbone_changes(backbone),
        ]
    return "\n".join(lines) + "\n"


def backbone_card(original: str, backbone: Mapping[str, Any]) -> str:
    """The card of a target that was trained with its drafter, which is a model of its own now."""
    title = f"# {original}, trained together with its draft heads"
    about = "This is not the original model: its answers can differ. It is the target that the drafter in `export/` of the same run fits."
    return "\n".join([title, "", about, "", *backbone_changes(backbone)]) + "\n"


def backbone_changes(backbone: Mapping[str, Any]) -> list[str]:
    return [
        f"Held-out perplexity {backbone['perplexity_before']:.3f} before and {backbone['perplexity_after']:.3f} after "
        f"({backbone['num_perplexity_tokens']:,} tokens). {backbone['answer_token_agreement']:.1%} of the tokens of the original's greedy answers "
        f"are still its choice; {backbone['num_identical_answers']} of {backbone['num_answers']} answers are unchanged."
    ]
