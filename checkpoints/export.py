"""Writes a drafter as a checkpoint that the engines load, and checks one against the contract.

Place in the flow: trained drafter -> `export_drafter` -> runs/<name>/export/ (config.json, model.safetensors, headstart.json, README.md) ->
evaluator, vLLM, SGLang, Hub. An export ends by being read back and compared bit for bit with what was given; the rules themselves
are the rows of checkpoints/serving.py.

Shapes: W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from checkpoints.draft_config import CONFIG_BUILDERS, Dimensions, sliding_window_of
from checkpoints.provenance import Provenance
from checkpoints.serving import (
    ServingFormat,
    config_problems,
    engine_limits,
    expected_shape,
    format_of_config,
    serving_format,
    shape_numbers,
    target_limits,
    tensor_rules,
)

CONFIG_FILE = "config.json"
TENSORS_FILE = "model.safetensors"
PROVENANCE_FILE = "headstart.json"
CARD_FILE = "README.md"
SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "BOOL": "bool"}
MODEL_DTYPES = ("float32", "bfloat16", "float16")


def export_drafter(
    tensors: Mapping[str, Tensor],
    *,
    algorithm: str,
    target_config: PretrainedConfig,
    dimensions: Dimensions,
    aux_layers: Sequence[int],
    dtype: torch.dtype,
    out_dir: Path,
    provenance: Provenance,
    card: str,
) -> Path:
    """Writes a checkpoint that the engines load; nothing is at `out_dir` unless the whole export passed its checks.

    Args:
        tensors: by contract name, floating ones in any floating dtype on any device. With the full vocabulary `d2t` and `t2d`
            may be there and are left out of the file.
        algorithm: as in train/drafters/, with a row in checkpoints/serving.py.
        target_config: the target's transformers config.
        dimensions: the draft block's sizes.
        aux_layers: HF `hidden_states` indices, ascending; empty where the drafter reads none.
        dtype: dtype of the floating tensors in the file.
        out_dir: an earlier export there is replaced.
        provenance: written to headstart.json.
        card: written to README.md.

    Returns:
        `out_dir`.

    Raises:
        ValueError: if the tensors or the config break the contract, or `out_dir` holds something else than an export.
    """
    config, to_write = prepare_export(
        tensors, algorithm=algorithm, target_config=target_config, dimensions=dimensions, aux_layers=aux_layers, dtype=dtype
    )
    with staged_directory(out_dir, {CONFIG_FILE, TENSORS_FILE, PROVENANCE_FILE, CARD_FILE}, marker=PROVENANCE_FILE) as staging:
        save_file(to_write, staging / TENSORS_FILE, metadata={"format": "pt"})
        write_json(staging / CONFIG_FILE, config)
        text = target_config.get_text_config()
        limits = engine_limits(config, text.num_hidden_layers) | target_limits(algorithm, text.model_type, sliding_window_of(text))
        write_json(staging / PROVENANCE_FILE, {"algorithm": algorithm, "engine_limits": limits, **provenance.to_json()})
        (staging / CARD_FILE).write_text(card)
        _check_reload(staging, to_write)
    return out_dir


def prepare_export(
    tensors: Mapping[str, Tensor],
    *,
    algorithm: str,
    target_config: PretrainedConfig,
    dimensions: Dimensions,
    aux_layers: Sequence[int],
    dtype: torch.dtype,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of an export, checked against the contract, before anything is written; arguments as for `export_drafter`."""
    row = serving_format(algorithm)
    build_config, _ = CONFIG_BUILDERS[row.name]
    config = build_config(tensors, target_config, dimensions, aux_layers, dtype)
    return config, _prepared_tensors(tensors, row, config, dtype)


@contextlib.contextmanager
def staged_directory(out_dir: Path, own_names: Set[str], marker: str) -> Iterator[Path]:
    """A folder to write into, which takes the place of `out_dir` when the block ends without an error; nothing of it is left otherwise.

    Args:
        out_dir: an earlier output there is replaced.
        own_names: files that such an output has.
        marker: the one of them that says we wrote it.

    Raises:
        ValueError: if `out_dir` holds anything else.
    """
    _refuse_foreign_directory(out_dir, own_names, marker)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        _replace_directory(staging, out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_export(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors (on the CPU) of an export that passes `validate_export`."""
    config = validate_export(directory)
    return config, load_file(directory / TENSORS_FILE)


def validate_export(directory: Path) -> dict[str, Any]:
    """Checks a checkpoint against the contract of every engine of its format.

    Returns:
        The config.

    Raises:
        ValueError: naming every missing, unexpected or misshapen tensor and every config field that is wrong, each with what
            was found and what was expected.
    """
    config = read_config(directory / CONFIG_FILE)
    row = format_of_config(config)
    problems = config_problems(config)
    tensors_path = directory / TENSORS_FILE
    if not tensors_path.is_file():
        problems.append(f"{TENSORS_FILE} is missing")
    elif not problems:  # shapes follow from the config
        problems += _file_problems(tensors_path, row, config)
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(f"{directory} breaks the {row.name} serving contract:\n  {listed}\nexport the drafter again")
    return config


def _file_problems(path: Path, row: ServingFormat, config: Mapping[str, Any]) -> list[str]:
    """What is wrong with a safetensors file; reads its header, and the two vocabulary maps."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: _header(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            problems = _tensor_problems(found, row, config)
            if not problems and "d2t" in found:
                problems = _vocabulary_problems(file.get_tensor("d2t"), file.get_tensor("t2d"))
            return problems
    except SafetensorError as error:
        return [f"{path.name} is not a safetensors file: {error}"]


def _header(tensor_slice: Any) -> tuple[tuple[int, ...], str]:
    dtype = tensor_slice.get_dtype()
    return tuple(tensor_slice.get_shape()), SAFETENSORS_DTYPES.get(dtype, dtype)


def _tensor_problems(found: Mapping[str, tuple[tuple[int, ...], str]], row: ServingFormat, config: Mapping[str, Any]) -> list[str]:
    """One line for each tensor that differs from the contract; `found` maps a name to its shape and dtype."""
    numbers = shape_numbers(config)
    problems, allowed = [], set()
    for rule in tensor_rules(row, config):
        allowed.add(rule.name)
        expected = (expected_shape(rule, numbers), config["dtype"] if rule.dtype == "model" else rule.dtype)
        described = f"{list(expected[0])} {expected[1]}"
        if rule.name not in found:
            if rule.presence != "optional":
                problems.append(f"{rule.name} is missing, expected {described}")
        elif found[rule.name] != expected:
            shape, dtype = found[rule.name]
            problems.append(f"{rule.name} is {list(shape)} {dtype}, expected {described}")
    if numbers["target_hidden_size"] != numbers["hidden_size"] and "embed_tokens.weight" not in found:
        problems.append("embed_tokens.weight is missing: the target's embedding has another width, so the draft needs its own")
    problems += [f"{name} is unexpected: vLLM raises on it" for name in sorted(set(found) - allowed)]
    return problems


def _vocabulary_problems(d2t_W: Tensor, t2d_V: Tensor) -> list[str]:
    """Checks that d2t holds offsets (target id = j + d2t[j]) to ascending ids, the ones that t2d marks."""
    num_target = t2d_V.shape[0]
    target_ids_W = torch.arange(d2t_W.shape[0]) + d2t_W
    if bool((target_ids_W < 0).any() or (target_ids_W >= num_target).any() or (target_ids_W.diff() <= 0).any()):
        return [
            f"d2t + arange gives ids {int(target_ids_W.min())}..{int(target_ids_W.max())}, expected ascending, distinct ids in "
            f"0..{num_target - 1}: d2t holds offsets (target id - j), not ids"
        ]
    marked = t2d_V.nonzero().flatten()
    if not torch.equal(marked, target_ids_W):
        return [f"t2d marks {marked.numel()} tokens that are not the {target_ids_W.numel()} of d2t, expected the same set"]
    return []


def _prepared_tensors(tensors: Mapping[str, Tensor], row: ServingFormat, config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors as the file will hold them, checked against the contract before anything is written."""
    left_out = {rule.name for rule in row.tensors if rule.presence == "draft_vocab"} - {rule.name for rule in tensor_rules(row, config)}
    prepared = {}
    for name, tensor in tensors.items():
        if name in left_out:
            if name == "d2t" and bool((tensor != 0).any()):
                raise ValueError("the draft vocabulary is the whole target vocabulary, but d2t has offsets that are not zero")
            continue
        value = tensor.detach().to("cpu", dtype=dtype if tensor.is_floating_point() else None)
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"{name} holds values that are not finite in {dtype}: the training diverged, export an earlier step")
        prepared[name] = value.contiguous().clone()
    found = {name: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in prepared.items()}
    problems = config_problems(config) or _tensor_problems(found, row, config)
    if not problems and "d2t" in prepared:
        problems = _vocabulary_problems(prepared["d2t"], prepared["t2d"])
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(f"the drafter does not fit the {row.name} serving contract:\n  {listed}")
    return prepared


def _check_reload(directory: Path, written: Mapping[str, Tensor]) -> None:
    """Reads an export back and compares every tensor bit for bit."""
    _, reloaded = read_export(directory)
    different = [name for name in written if not torch.equal(written[name], reloaded[name])]
    if different:
        names = ", ".join(different)
        raise ValueError(f"{directory}: {names} read back differently from what was written; is the disk full or failing?")


def read_config(path: Path) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        ValueError: if it is missing or no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: {path.parent} is not an exported drafter")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): export the drafter again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON for people to read."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def _refuse_foreign_directory(directory: Path, own_names: Set[str], marker: str) -> None:
    """Only an earlier output of ours, or an empty directory, may be replaced."""
    if not directory.exists():
        return
    names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else {directory.name}
    foreign = names - own_names if marker in names else names
    if foreign:
        listed = ", ".join(sorted(foreign)[:5])
        raise ValueError(f"{directory} holds {listed}, which no export wrote: choose another directory or empty it")


def _replace_directory(new: Path, directory: Path) -> None:
    """Moves `new` to `directory`; at every moment the directory is the old export, absent, or the new one, never a mixture."""
    for file in new.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if directory.exists():
        retired = directory.with_name(f".{directory.name}.{os.getpid()}.old")
        directory.rename(retired)
        new.rename(directory)
        shutil.rmtree(retired)
    else:
        new.rename(directory)
