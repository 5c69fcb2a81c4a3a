"""A drafter that starts from another's weights: `--train.init-from` a folder or Hub id, of a run's export or of another tool's checkpoint.

Place in the flow: checkpoints/foreign.py reads it -> `WarmStart` -> train/training.py, which takes its draft vocabulary and loads its weights into
the drafter before the first step. What does not fit is told before any work. The weights are part of the train stage's fingerprint by their content.

Where training begins, the run keeps what it takes in <run>/init_from, and reads that from then on: a source that has changed or gone can neither
end nor change a run that goes on, and the report measures the drafter that training began with.

Shapes: W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from checkpoints.export import CONFIG_FILE, PROVENANCE_FILE, TENSORS_FILE, staged_directory, write_json
from checkpoints.foreign import Checkpoint, ReadOptions, read_checkpoint
from checkpoints.resume import WARM_START_FOLDER, latest_checkpoint
from checkpoints.serving import serving_format
from checkpoints.tensor_files import local_folder
from data.target import TargetHeads
from data.vocab import DraftVocabulary
from train.drafters.base import Drafter, DrafterConfig, FeatureRequest
from train.drafters.eagle1 import Eagle1Config
from train.drafters.eagle3 import Eagle3Config
from train.drafters.llama_layer import LayerShape
from train.drafters.medusa1 import Medusa1Config

# In a checkpoint, but not trained: the vocabulary's maps, EAGLE-1's zeros, copies of the target's tensors.
_NOT_TRAINED = ("d2t", "t2d", "fc.bias", "embed_tokens.weight")
_SETTINGS = "A drafter keeps its shape: change --drafter.*, or start from another"


class WarmStart:
    """The weights that a run starts from."""

    def __init__(self, source: str, target: PretrainedConfig, kept: Path | None = None) -> None:
        """
        Args:
            source: folder or Hub id.
            target: the target's (text) config.
            kept: what `keep` has written of it, to be read instead.

        Raises:
            ValueError: if it is no drafter's checkpoint, or one of a target of other sizes.
        """
        self.source = source
        try:
            self._checkpoint: Checkpoint = read_checkpoint(kept or local_folder(source), ReadOptions(target_config=target, drop_fc_bias=True))
            self._config, self._tensors = self._checkpoint.prepared()
        except ValueError as error:
            raise ValueError(f"--train.init-from: {error}") from error

    @property
    def digest(self) -> str:
        """Hash of the config and of every tensor's bytes, wherever they lie."""
        digest = hashlib.sha256(json.dumps(self._config, sort_keys=True).encode())
        for name, tensor in sorted(self._tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def keep(self, run_dir: Path) -> None:
        """Writes the weights, as they are read, where `kept_weights` finds them."""
        with staged_directory(run_dir / WARM_START_FOLDER, {CONFIG_FILE, TENSORS_FILE, PROVENANCE_FILE}, marker=PROVENANCE_FILE) as staging:
            save_file(self._tensors, staging / TENSORS_FILE, metadata={"format": "pt"})
            write_json(staging / CONFIG_FILE, self._config)
            facts = {"algorithm": self._checkpoint.algorithm, "target": self._checkpoint.target, "source": self.source}
            write_json(staging / PROVENANCE_FILE, facts)

    def check(self, config: DrafterConfig, target: PretrainedConfig, request: FeatureRequest) -> list[str]:
        """Raises ValueError where the checkpoint cannot start this drafter; returns what may make it start worse, one line each."""
        found = self._checkpoint
        if serving_format(found.algorithm).name != serving_format(config.algorithm).name:
            raise ValueError(f"--train.init-from {self.source} is a drafter of {found.algorithm}, but this run trains {config.algorithm}")
        if isinstance(config, Eagle3Config):
            self._check_eagle3(config, target, request)
        differences = {
            name: (value, expected)
            for name, expected in _dimensions(config, target).items()
            if (value := asdict(found.dimensions)[name]) != expected and name != "rms_norm_eps"
        }
        if differences:
            listed = ", ".join(f"{name} {value} instead of {expected}" for name, (value, expected) in differences.items())
            raise ValueError(f"--train.init-from {self.source} is of another shape than this run's drafter: {listed}. {_SETTINGS}")
        return self._notes(config, target)

    def _check_eagle3(self, config: Eagle3Config, target: PretrainedConfig, request: FeatureRequest) -> None:
        if self._checkpoint.aux_layers != request.aux_layers:
            raise ValueError(
                f"--train.init-from {self.source} reads the target's states {list(self._checkpoint.aux_layers)}, this run those of "
                f"{list(request.aux_layers)}: set --drafter.aux-layers {' '.join(map(str, self._checkpoint.aux_layers))}"
            )
        size, wanted = self._config["draft_vocab_size"], config.vocabulary_size(target.vocab_size) or target.vocab_size
        if size != wanted:
            option = "None" if size == target.vocab_size else size
            raise ValueError(
                f"--train.init-from {self.source} drafts from {size} tokens, this run from {wanted}: set --drafter.draft-vocab-size {option}, "
                "its vocabulary is taken as it is"
            )

    def _notes(self, config: DrafterConfig, target: PretrainedConfig) -> list[str]:
        notes = list(self._checkpoint.notes)
        if isinstance(config, (Eagle1Config, Eagle3Config)):
            theirs, ours = self._config["rope_parameters"], LayerShape.from_target(target).rope_parameters
            if theirs != ours:
                notes.append(f"it was trained with the rotation {theirs}, this run rotates as the target does, {ours}: it starts worse than it was")
        return notes

    def vocabulary(self, counts_V: np.ndarray) -> DraftVocabulary | None:
        """Its draft vocabulary, and how much of the counted tokens it covers; None where it covers the whole vocabulary."""
        if "d2t" not in self._tensors:
            return None
        ids_W = torch.arange(len(self._tensors["d2t"])) + self._tensors["d2t"]
        coverage = float(counts_V[ids_W.numpy()].sum() / max(1, counts_V.sum()))
        return DraftVocabulary(ids=tuple(ids_W.tolist()), target_vocab_size=len(counts_V), coverage=coverage)

    @torch.no_grad()
    def load_into(self, drafter: Drafter) -> None:
        """Puts the weights in the place of the drafter's first ones; before it is given a target to train."""
        left_out = (*_NOT_TRAINED, *(("lm_head.weight",) if self._config.get("original_lm_head") else ()))
        drafter.load_state_dict({name: tensor for name, tensor in self._tensors.items() if name not in left_out})

    def differences(self, heads: TargetHeads) -> list[str]:
        """Tensors of the target that the checkpoint has differently, one line each: the run takes the target's."""
        pairs = [("embed_tokens.weight", heads.embed_VH)]
        if self._config.get("original_lm_head"):
            pairs.append(("lm_head.weight", heads.lm_head_VH))
        found = []
        for name, ours in pairs:
            theirs = self._tensors.get(name)
            if theirs is not None and not torch.equal(theirs.to(ours), ours):
                share = float((theirs.to(ours) - ours).float().norm() / ours.float().norm())
                found.append(f"its {name} differs from the target's by {share:.1%}; the target's is taken")
        return found


def _dimensions(config: DrafterConfig, target: PretrainedConfig) -> dict[str, Any]:
    """The sizes of the drafter that this run trains, in config.json's terms."""
    if isinstance(config, Medusa1Config):
        return {
            "hidden_size": target.hidden_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "original_lm_head": config.shared_lm_head,
        }
    assert isinstance(config, (Eagle1Config, Eagle3Config))
    norms = config.norms if isinstance(config, Eagle3Config) else ()
    return {**LayerShape.from_target(target, config.intermediate_size).export_dimensions(), "norms": norms}


def kept_weights(run_dir: Path, source: str) -> Path | None:
    """The folder of the weights that the training of a run began with, where it has begun and they are of `source`; else None."""
    folder = run_dir / WARM_START_FOLDER
    has_begun = latest_checkpoint(run_dir) is not None or (run_dir / "best.json").is_file()
    if not has_begun or not (folder / PROVENANCE_FILE).is_file():
        return None
    return folder if json.loads((folder / PROVENANCE_FILE).read_text())["source"] == source else None


def load_warm_start(
    source: str | None, config: DrafterConfig, target: PretrainedConfig, request: FeatureRequest, run_dir: Path, is_shown: bool
) -> WarmStart | None:
    """The weights that a run starts from, checked; None where it starts from its own.

    Args:
        source: train.init_from.
        config: of the drafter.
        target: the target's (text) config.
        request: the target states that the drafter reads.
        run_dir: of the run, which may have kept them.
        is_shown: whether this process says what there is to know.

    Raises:
        ValueError: if they do not fit.
    """
    if source is None:
        return None
    kept = kept_weights(run_dir, source)
    warm_start = WarmStart(source, target, kept)
    notes = warm_start.check(config, target, request)
    if kept is not None:
        notes.append(f"training has begun with what it held then, which is in {kept}; another --name takes what it holds now")
    if is_shown:
        for note in notes:
            print(f"note: --train.init-from {source}: {note}", flush=True)
    return warm_start
