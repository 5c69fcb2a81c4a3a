"""Converts a drafter's checkpoint between headstart's format and those of other tools, in both directions.

    python -m checkpoints.convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B runs/imported --to headstart --target meta-llama/Llama-3.1-8B-Instruct
    python -m checkpoints.convert runs/my-run/export my-speculator --to speculators --target my-org/my-model

Place in the flow: a folder or a Hub id in any layout (checkpoints/foreign.py tells which) -> a folder in the wanted one (checkpoints/layouts.py) ->
`eval.compare --drafters`, `--train.init-from`, engines, other trainers. Tensors keep every bit. A conversion ends by reading back what it wrote and
comparing it; nothing is at OUT unless that passed. Nothing in the source is run: no pickled code, no code of a repository.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from checkpoints.export import CARD_FILE, CONFIG_FILE, export_drafter, read_export, staged_directory, write_json
from checkpoints.foreign import Checkpoint, ReadOptions, read_checkpoint
from checkpoints.layouts import ForeignFiles, Layout, Serves, foreign_files
from checkpoints.provenance import UNKNOWN, Provenance, collect_provenance, portable_name
from checkpoints.serving import engine_limits, vllm_serve_command
from checkpoints.tensor_files import local_folder, read_embedding

# Lies beside a checkpoint in another layout and says that it may be replaced.
RECORD_FILE = "converted.json"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class ConvertConfig:
    """Convert a drafter's checkpoint to another tool's format, or to headstart's.

    Attributes:
        source: folder or Hub id: SafeAILab's EAGLE-1, -2 or -3, SpecForge, AngelSlim, speculators, FasterDecoding's Medusa, or headstart's own.
        out: folder to write; an earlier conversion there is replaced, anything else is not.
        to: the format to write. headstart is what vLLM and SGLang load with --speculative-config, and what this project evaluates and trains further.
        target: path or Hub id of the target that the drafter belongs to. Its sizes are compared; speculators and medusa write its name.
        revision: of the source on the Hub.
        aux_layers: EAGLE-3: HF hidden_states indices of the target's states, where the source does not say them or says two different things.
        drop_fc_bias: EAGLE-1: leave out an fc.bias that is not zero, as vLLM does.
        with_embedding: EAGLE: add the target's embedding. Engines take it from the target where it is missing; speculators' own loader does not.
        num_drafts: drafts of a chain in the speculators format and in the printed commands.
    """

    source: tyro.conf.Positional[str]
    out: tyro.conf.Positional[Path]
    to: Layout
    target: str | None = None
    revision: str | None = None
    aux_layers: tuple[int, ...] | None = None
    drop_fc_bias: bool = False
    with_embedding: bool = False
    num_drafts: int = 3

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ValueError(f"--num-drafts is {self.num_drafts}, expected at least 1")


@dataclass(frozen=True)
class Converted:
    """What a conversion did.

    Attributes:
        source: what was read.
        algorithm: of the drafter.
        files: names in the folder that was written.
        notes: of reading and writing.
        command: how it is served, or None where nothing serves the layout.
    """

    source: Checkpoint
    algorithm: str
    files: tuple[str, ...]
    notes: tuple[str, ...]
    command: str | None


def convert(config: ConvertConfig) -> Converted:
    """Reads, writes, reads back, compares.

    Raises:
        ValueError: if the source is of no known layout or damaged, or the wanted layout cannot hold it.
    """
    folder = local_folder(config.source, config.revision)
    if config.out.exists() and config.out.resolve() == folder.resolve():
        raise ValueError(f"{config.out} is the source itself: choose another folder to write to")
    target = None if config.target is None else target_config(config.target)
    options = ReadOptions(target, config.aux_layers, config.drop_fc_bias)
    source = read_checkpoint(folder, options)
    if source.layout == config.to:
        raise ValueError(f"{config.source} is in the {config.to} layout already: copy the folder")
    if config.with_embedding:
        source = _with_embedding(source, config)
    notes = list(source.notes)
    if config.to == "speculators" and EMBEDDING not in source.tensors:
        notes.append("without an embedding vLLM takes the target's, but speculators 0.9.0 itself starts from whatever is in memory: --with-embedding")
    if config.to == "headstart":
        _write_ours(source, config)
    else:
        files = _foreign(source, config, target)
        notes += files.notes
        _write_foreign(source, files, config, options)
    if source.algorithm.startswith("medusa") and "eagle-" in str(config.out.resolve()).lower():
        notes.append(f"vLLM takes any path with 'eagle-' in it for EAGLE-1, {config.out} too: move it before you serve it")
    names = tuple(sorted(path.name for path in config.out.iterdir()))
    return Converted(source, source.algorithm, names, tuple(notes), serve_command(source, config))


def target_config(name: str) -> PretrainedConfig:
    """The (text) config of a target; nothing else of it is read.

    Raises:
        ValueError: if there is none.
    """
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError, HfHubHTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"--target {name} cannot be read: expected a model's folder with a config.json or a Hub id ({reason})") from error


def _with_embedding(source: Checkpoint, config: ConvertConfig) -> Checkpoint:
    """The checkpoint with the target's embedding in it, in its own dtype."""
    if config.target is None:
        raise ValueError("--with-embedding takes the target's embedding: say which target with --target")
    if source.algorithm.startswith("medusa"):
        raise ValueError("--with-embedding has no effect on Medusa heads: they read no embedding")
    if EMBEDDING in source.tensors:
        raise ValueError(f"--with-embedding has no effect: {config.source} has an embedding of its own")
    embed_VH = read_embedding(config.target)
    stored_VH = embed_VH.to(source.dtype)
    is_exact = torch.equal(stored_VH.float(), embed_VH.float())
    note = f"the target's embedding added{'' if is_exact else f', rounded from {embed_VH.dtype} to {source.dtype}'}"
    return replace(source, tensors={**source.tensors, EMBEDDING: stored_VH}, notes=(*source.notes, note))


# --- writing --------------------------------------------------------------------------------------------------------------


def _write_ours(source: Checkpoint, config: ConvertConfig) -> None:
    """`export_drafter` reads back and compares by itself."""
    provenance = collect_provenance(_target_name(source, config) or UNKNOWN, UNKNOWN, _record(source, config))
    export_drafter(
        source.tensors,
        algorithm=source.algorithm,
        target_config=source.target_config,
        dimensions=source.dimensions,
        aux_layers=source.aux_layers,
        dtype=source.dtype,
        out_dir=config.out,
        provenance=provenance,
        card=_card(source, config, provenance),
    )
    _, expected = source.prepared()
    _, written = read_export(config.out)
    _compare(expected, written, config.out)


def _foreign(source: Checkpoint, config: ConvertConfig, target: PretrainedConfig | None) -> ForeignFiles:
    name = _target_name(source, config)
    if name is not None and config.to == "speculators" and Path(name).is_dir():
        name = str(Path(name).resolve())  # vLLM looks for it from wherever it is started
    ours, tensors = source.prepared()
    architectures = () if target is None else tuple(target.architectures or ())
    serves = Serves(name, architectures, None if target is None else target.num_hidden_layers, config.num_drafts)
    return foreign_files(config.to, source.algorithm, ours, tensors, serves)


def _write_foreign(source: Checkpoint, files: ForeignFiles, config: ConvertConfig, options: ReadOptions) -> None:
    provenance = collect_provenance(_target_name(source, config) or UNKNOWN, UNKNOWN, _record(source, config))
    own_names = {CONFIG_FILE, "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", CARD_FILE, RECORD_FILE}
    with staged_directory(config.out, own_names, marker=RECORD_FILE) as staging:
        write_json(staging / CONFIG_FILE, files.config)
        write_json(staging / RECORD_FILE, {"algorithm": source.algorithm, **_record(source, config), "headstart": provenance.commit})
        (staging / CARD_FILE).write_text(_card(source, config, provenance))
        if files.file.endswith(".safetensors"):
            save_file(files.tensors, staging / files.file, metadata={"format": "pt"})
        else:
            torch.save(files.tensors, staging / files.file)
        _check_foreign(source, staging, options, config)


def _check_foreign(source: Checkpoint, written: Path, options: ReadOptions, config: ConvertConfig) -> None:
    """Reads the folder as any reader of its layout does, and compares what an engine would see."""
    again = read_checkpoint(written, options)
    if again.layout != config.to:
        raise ValueError(f"what was written reads as the {again.layout} layout, expected {config.to}: please report this")
    expected_config, expected = source.prepared()
    found_config, found = again.prepared()
    if expected_config.get("original_lm_head"):  # written once for each head
        head_VH = expected.pop("lm_head.weight")
        expected |= {f"lm_heads.{head}.weight": head_VH for head in range(expected_config["num_heads"])}
        expected_config["original_lm_head"] = False
    _compare(expected, found, written)
    told = ("eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states")  # the default ones may be named or not
    different = [name for name, value in expected_config.items() if name not in told and found_config.get(name) != value]
    if different or (source.aux_layers and options.target_config is not None and again.aux_layers != source.aux_layers):
        raise ValueError(f"{', '.join(different) or 'the auxiliary layers'} read back differently from config.json: please report this")


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: Path) -> None:
    """Raises ValueError unless the tensors are the same, bit for bit."""
    different = sorted(expected.keys() ^ found.keys()) or [name for name in expected if not torch.equal(expected[name], found[name])]
    if different:
        raise ValueError(f"{where}: {', '.join(different[:4])} read back differently from what was written; is the disk full or failing?")


def _target_name(source: Checkpoint, config: ConvertConfig) -> str | None:
    """The target as the user names it, else as the source does where that can be looked up anywhere."""
    if config.target is not None:
        return config.target
    return source.target if source.target is not None and "/" in source.target else None


def _record(source: Checkpoint, config: ConvertConfig) -> dict[str, str]:
    """Where a conversion comes from, without paths of this machine."""
    return {"converted_from": source.layout, "converted_to": config.to, "source": portable_name(config.source)}


def _card(source: Checkpoint, config: ConvertConfig, provenance: Provenance) -> str:
    lines = [
        "---",
        f"tags: [speculative-decoding, {source.algorithm}]",
        "---",
        "",
        f"# {source.algorithm} drafter, converted from {portable_name(config.source)}",
        "",
        f"Converted by headstart ({provenance.commit}) from the {source.layout} layout to {config.to}; its tensors are those of the source, bit for "
        f"bit. It belongs to the target {provenance.target}.",
        *(f"\n- {note}" for note in source.notes),
    ]
    return "\n".join(lines) + "\n"


# --- telling --------------------------------------------------------------------------------------------------------------


def serve_command(source: Checkpoint, config: ConvertConfig) -> str | None:
    """How the written checkpoint is used where it belongs."""
    target = _target_name(source, config) or "TARGET"
    out = shlex.quote(str(config.out))
    if config.to == "speculators":
        return f"vllm serve {out}"
    if config.to == "medusa":
        return f"python -m medusa.inference.cli --model {out}"
    if config.to == "safeailab":
        return f"EaModel.from_pretrained(use_eagle3={source.algorithm == 'eagle3'}, base_model_path={target!r}, ea_model_path={str(config.out)!r})"
    return vllm_serve_command(source.algorithm, target, config.out, config.num_drafts)


def print_converted(converted: Converted, config: ConvertConfig) -> None:
    """What was read, what was written, what to know, how to use it."""
    source = converted.source
    num_values = sum(tensor.numel() for tensor in source.tensors.values())
    dtype = str(source.dtype).removeprefix("torch.")
    layers = f", the target's HF hidden_states {list(source.aux_layers)}" if source.knows_layers else ""
    print(
        f"read     {source.layout} {converted.algorithm}: {len(source.tensors)} tensors of {dtype}, {num_values:,} values, from {config.source} "
        f"({source.file}){layers}"
    )
    for note in converted.notes:
        print(f"note     {note}")
    if source.algorithm == "eagle3":
        ours, _ = source.prepared()
        for engine, reason in engine_limits(ours, source.target_config.num_hidden_layers).items():
            print(f"note     {engine} cannot serve it with full acceptance: {reason}")
    print(f"wrote    {config.to}: {config.out} ({', '.join(converted.files)}), read back, the same bit for bit")
    if config.target is None:
        print("target   not named, so nothing was compared with it (--target MODEL)")
    if converted.command is not None:
        print(f"use      {converted.command}")


def main(args: list[str] | None = None) -> int:
    """0 when it is written, 2 when it could not be."""
    try:
        config = tyro.cli(ConvertConfig, args=args, prog="python -m checkpoints.convert")
        print_converted(convert(config), config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
