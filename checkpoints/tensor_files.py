"""Tensors from files that other tools wrote: safetensors or PyTorch's pickles, in one file or in shards, from a folder or from the Hub.

Place in the flow: a folder or a Hub id -> `local_folder`, `open_tensors` -> checkpoints/foreign.py. Nothing in a file is ever run: a pickle is read
with weights_only, and one that holds more than tensors is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

# In the order in which they are looked for: an index before the shard that may bear the whole file's name.
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a checkpoint, safetensors not read yet.

    Attributes:
        file: the file that names them all, for messages.
        places: the file of each, or the tensor itself where it had to be read to be found.
    """

    file: str
    places: Mapping[str, Path | Tensor]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors, on the CPU, as they are stored.

        Raises:
            ValueError: if a file is damaged.
        """
        tensors = {}
        for name in names:
            place = self.places[name]
            tensors[name] = place if isinstance(place, Tensor) else _from_safetensors(place, name)
        return tensors


def local_folder(source: str, revision: str | None = None) -> Path:
    """A local folder as it is; of a Hub id, a copy of what a checkpoint is made of.

    Raises:
        ValueError: if there is no such folder or repository, or it cannot be reached.
    """
    if Path(source).is_dir():
        if revision is not None:
            raise ValueError(f"--revision {revision} has no effect on the local folder {source}: leave it out")
        return Path(source)
    if Path(source).exists():
        raise ValueError(f"{source} is a file, expected the folder of a checkpoint or a Hub id")
    if not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise ValueError(f"{source} does not exist: expected the folder of a checkpoint or a Hub id (owner/name)")
    folder = _download(source, revision, ["*.json", "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        folder = _download(source, revision, ["*.json", "*.bin", "*.pt"])
    return folder


def _download(source: str, revision: str | None, patterns: list[str]) -> Path:
    at = f" at {revision}" if revision else ""
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ValueError(f"{source} is gated: accept its terms on the Hub and log in (`hf auth login`)") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(f"{source}{at} is neither a local folder nor on the Hub, or it is private and you are not logged in") from error
    except HfHubHTTPError as error:
        raise ValueError(f"{source}{at} could not be downloaded ({_first_line(error)}): try again, what has come is kept") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{source}{at} is no local folder, and the Hub cannot be reached ({_first_line(error)})") from error


def open_tensors(folder: Path) -> TensorFiles:
    """The tensors of a checkpoint's folder.

    Raises:
        ValueError: if there are none, a file is missing or damaged, or a pickle holds more than tensors.
    """
    for name in INDEX_FILES:
        if (folder / name).is_file():
            return _open_shards(folder / name)
    for name in SINGLE_FILES:
        if (folder / name).is_file():
            return TensorFiles(name, _open_file(folder / name))
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
    raise ValueError(f"{folder} has no tensors: found {found}, expected {', '.join(SINGLE_FILES)} or an index of shards")


def read_embedding(target: str) -> Tensor:
    """The token embedding [V, H] of a model; of one on the Hub, only the file that holds it is downloaded.

    Raises:
        ValueError: if it cannot be found.
    """
    folder = Path(target)
    if not folder.is_dir():
        folder = _download(target, None, ["*.json"])
        index = folder / "model.safetensors.index.json"
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        shards = {shard for name, shard in weight_map.items() if name.endswith("embed_tokens.weight")} or {"model.safetensors"}
        folder = _download(target, None, ["*.json", *shards])
        found = {name: path for shard in shards for name, path in _open_file(folder / shard).items()}
        files = TensorFiles("model.safetensors", found)
    else:
        files = open_tensors(folder)
    names = [name for name in files.places if name.endswith("embed_tokens.weight")]
    if len(names) != 1:
        raise ValueError(f"{target} has {len(names)} tensors named embed_tokens.weight, expected one")
    return files.read(names)[names[0]]


def _open_shards(index: Path) -> TensorFiles:
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{index} is damaged ({_first_line(error)}): expected a weight_map of tensor names to files") from error
    shards: dict[str, Mapping[str, Path | Tensor]] = {}
    for shard in sorted(set(weight_map.values())):
        if PurePath(shard).name != shard:
            raise ValueError(f"{index} names the file {shard}, which is outside its folder")
        if not (index.parent / shard).is_file():
            raise ValueError(f"{index} names {shard}, which is missing: copy or download it")
        shards[shard] = _open_file(index.parent / shard)
    absent = sorted(name for name, shard in weight_map.items() if name not in shards[shard])
    if absent:
        raise ValueError(f"{index} promises {absent[0]} in {weight_map[absent[0]]}, which lacks it: copy or download both again")
    return TensorFiles(index.name, {name: shards[shard][name] for name, shard in weight_map.items()})


def _open_file(path: Path) -> Mapping[str, Path | Tensor]:
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)


def _open_safetensors(path: Path) -> dict[str, Path | Tensor]:
    """Opening it checks that it is as long as its header says."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({_first_line(error)}): copy or download it again") from error


def _from_safetensors(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged at {name} ({_first_line(error)}): copy or download it again") from error


def _open_pickle(path: Path) -> dict[str, Path | Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its zip, pickle and tensor layers raise
        refused = re.search(r"(?:GLOBAL|Unsupported (?:global|class|operand)[^\w]*)\s*([\w.]+)", str(error))
        if refused is not None:
            raise ValueError(
                f"{path} names {refused[1]}, which is code and no tensor: nothing of it was run; ask its author for safetensors"
            ) from error
        raise ValueError(f"{path} is damaged, or no file of tensors ({_first_line(error)}): copy or download it again") from error
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(value, Tensor) for value in loaded.values()):
        kinds = {type(value).__name__ for value in loaded.values()} if isinstance(loaded, dict) else {type(loaded).__name__}
        raise ValueError(f"{path} holds {', '.join(sorted(kinds)) or 'nothing'}, expected tensors by name: save the model's state_dict alone")
    return dict(loaded)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
