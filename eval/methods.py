"""The line-up of a comparison: every decoding method that a target, its drafters and a draft model allow.

Place in the flow: runs and settings -> `line_ups` -> `Contender`s -> eval/compare.py times them. Medusa-2's heads fit only the target that was
trained with them, so such a run brings a target of its own, and its speed-up is against that target's own plain decoding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from checkpoints.provenance import UNKNOWN
from data.target import Target, TargetConfig, target_hf_config
from data.target_files import target_fingerprint
from eval.acceptance import Trajectory, trajectory_features
from eval.decode.chain import Chain
from eval.decode.draft_model import DraftModel
from eval.decode.dynamic_tree import DynamicTree
from eval.decode.lookahead import Lookahead
from eval.decode.loop import Method, Plain, decode
from eval.decode.medusa_tree import MedusaTree, calibrate_medusa_tree, measure_head_accuracies
from eval.decode.mtp import mtp_unavailable_reason
from eval.decode.ngram import NGram
from eval.decode.static_tree import StaticTree
from eval.decode.tree_shape import TreeShape
from eval.decode.verify import Greedy, RandomChance, Sampled, Sampling, Typical, Verifier
from eval.evaluation import exported_drafter
from eval.measurement import Kind
from train.drafters.base import Drafter

NAMES = {"eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "medusa1": "Medusa-1", "medusa2": "Medusa-2"}
PACK_TOKENS = 4096
# Medusa's own temperature where its acceptance needs one: at 0 it would be greedy decoding.
TYPICAL_TEMPERATURE = 0.7


@dataclass(frozen=True)
class MethodConfig:
    """What the methods are set to; names as in the papers.

    Attributes:
        draft_length: longest chain of drafts; shorter ones are timed too.
        tree_depth: rounds of expansion of EAGLE-2's dynamic tree, which gets one level deeper than that: 5 levels, as EAGLE-1's static tree.
        tree_top_k: children of a node, and nodes that are expanded in a round.
        tree_total_tokens: of that tree, root included; 0 takes as many as EAGLE-1's static tree has, so that the two compare.
        medusa_tree_tokens: nodes of Medusa's calibrated tree, root included.
        lookahead_w: W, the window size: positions guessed ahead in each step. Some articles swap W and N. The paper's A100 has room for W = G = 15,
            two cores have not: --tune finds what pays.
        lookahead_n: N, the n-gram size.
        lookahead_g: G, n-grams verified in each step.
        ngram_min: shortest suffix that prompt lookup looks for.
        ngram_max: longest one.
    """

    draft_length: int = 5
    tree_depth: int = 4
    tree_top_k: int = 8
    tree_total_tokens: int = 0
    medusa_tree_tokens: int = 26
    lookahead_w: int = 5
    lookahead_n: int = 4
    lookahead_g: int = 5
    ngram_min: int = 2
    ngram_max: int = 4

    def __post_init__(self) -> None:
        for name in ("draft_length", "tree_depth", "tree_top_k", "lookahead_w", "lookahead_g", "ngram_min"):
            if getattr(self, name) < 1:
                raise ValueError(f"methods.{name} is {getattr(self, name)}, expected at least 1")
        for name, also in (("medusa_tree_tokens", ()), ("tree_total_tokens", (0,))):
            if getattr(self, name) < 2 and getattr(self, name) not in also:
                raise ValueError(f"methods.{name} is {getattr(self, name)}, expected at least 2: the newest token and a draft")
        if self.lookahead_n < 2:
            raise ValueError(f"methods.lookahead_n is {self.lookahead_n}, expected at least 2: an n-gram is a token and what followed it")
        if self.ngram_max < self.ngram_min:
            raise ValueError(f"methods.ngram_max is {self.ngram_max}, expected at least methods.ngram_min, which is {self.ngram_min}")


@dataclass(frozen=True)
class Contender:
    """One method, ready to decode.

    Attributes:
        name, kind, algorithm, drafter, settings: as in `MethodResult`.
        method: at its settings.
        verifier: how its drafts are accepted.
        is_lossless: false for typical acceptance.
        at_length: chains at other draft lengths; None for other methods.
        with_settings: the method at other parameters, for `--tune`; None where there is nothing to tune.
        head: the drafter of a chain, whose teacher-forced acceptance predicts tau; None for anything else.
    """

    name: str
    kind: Kind
    algorithm: str | None
    drafter: str | None
    settings: Mapping[str, float]
    method: Method
    verifier: Verifier
    is_lossless: bool = True
    at_length: Callable[[int], Method] | None = None
    with_settings: Callable[[Mapping[str, int]], Method] | None = None
    head: Drafter | None = None

    def tuned(self, settings: Mapping[str, int]) -> Contender:
        """The same at other parameters."""
        assert self.with_settings is not None
        return replace(self, settings=dict(settings), method=self.with_settings(settings))


@dataclass
class LineUp:
    """The methods of one target.

    Attributes:
        target: loaded.
        name: path or Hub id.
        contenders: without plain decoding.
        verifier: of plain decoding.
    """

    target: Target
    name: str
    contenders: list[Contender]
    verifier: Verifier = field(default_factory=Greedy)


@dataclass(frozen=True)
class DrafterFiles:
    """A trained drafter on disk.

    Attributes:
        name: as the user named it.
        label: unique among the drafters of the comparison.
        export: the checkpoint.
        algorithm: of the drafter.
        backbone: the target that was trained with it, or None.
    """

    name: str
    label: str
    export: Path
    algorithm: str
    backbone: Path | None

    @property
    def has_heads(self) -> bool:
        """Whether it is Medusa, whose tree must be calibrated."""
        return self.algorithm in ("medusa1", "medusa2")


def find_drafters(names: Sequence[str]) -> list[DrafterFiles]:
    """Runs' directories or their exports.

    Raises:
        ValueError: if one has no finished export, or is named twice.
    """
    exports = [_export_of(name) for name in names]
    algorithms = [json.loads((export / "headstart.json").read_text())["algorithm"] for export in exports]
    found = []
    for name, export, algorithm in zip(names, exports, algorithms, strict=True):
        if [other.resolve() for other in exports].count(export.resolve()) > 1:
            raise ValueError(f"--drafters names {export} twice: name each drafter once")
        label = NAMES.get(algorithm, algorithm)
        if algorithms.count(algorithm) > 1:
            label += f" ({name.rstrip('/')})"
        backbone = export.parent / "backbone"
        if algorithm == "medusa2" and not backbone.is_dir():
            raise ValueError(
                f"--drafters {name} are Medusa-2 heads, which fit only the target trained with them: {backbone} is missing; name the run"
            )
        found.append(DrafterFiles(name, label, export, algorithm, backbone if algorithm == "medusa2" else None))
    return found


def _export_of(name: str) -> Path:
    export = next((folder for folder in (Path(name) / "export", Path(name)) if (folder / "headstart.json").is_file()), None)
    if export is None:
        hint = f"; another tool's checkpoint is made one by `python -m checkpoints.convert {name} OUT --to headstart`"
        raise ValueError(
            f"--drafters {name} holds no export (headstart.json): name a finished run, such as runs/quickstart, or its export folder{hint}"
        )
    return export


def check_drafter(drafter: DrafterFiles, target: TargetConfig) -> None:
    """Raises ValueError where the drafter was trained for another target: its acceptance would be low and nobody would know why."""
    trained_for = json.loads((drafter.export / "headstart.json").read_text())["target_fingerprint"]
    if trained_for == UNKNOWN:
        _check_sizes(drafter, target)
        return
    found = target_fingerprint(target)
    if trained_for != found:
        raise ValueError(
            f"{drafter.name} was trained for the target {trained_for}, but {target.model} is {found}: name the target that it was trained for"
        )


def _check_sizes(drafter: DrafterFiles, target: TargetConfig) -> None:
    """A converted checkpoint does not say its target: only its sizes can be compared."""
    config, expected = json.loads((drafter.export / "config.json").read_text()), target_hf_config(target).to_dict()
    for name in ("vocab_size", "hidden_size"):
        if config[name] != expected[name]:
            raise ValueError(
                f"{drafter.name} was made for a target with {name} {config[name]}, but {target.model} has {expected[name]}: "
                "it belongs to another target"
            )


def check_backbone(drafter: DrafterFiles, backbone: Target, target: Target) -> None:
    """Raises ValueError where a target that was trained with its heads is no variant of the compared one: the prompts would mean something else."""
    for name in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size"):
        found, expected = (model.config.to_dict()[name] for model in (backbone, target))
        if found != expected:
            raise ValueError(f"{drafter.backbone} has {name} {found} and the target {expected}: {drafter.name} was trained for another target")
    if backbone.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ValueError(f"{drafter.backbone} has another tokenizer than the target: {drafter.name} was trained for another target")


@dataclass
class Builder:
    """Makes the line-ups, once for each dtype; Medusa's trees are calibrated once.

    Attributes:
        settings: of the methods.
        calibration_prompts: token ids; none of them is reported.
        max_new_tokens: of a calibration answer.
        temperature: 0 is greedy.
        device: of the targets.
        medusa_trees: by drafter.
        tuned: settings that a search found, by method; they take the place of `settings`.
        not_available: methods that could not be set up, with the reason.
    """

    settings: MethodConfig
    calibration_prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    temperature: float
    device: torch.device
    medusa_trees: dict[str, TreeShape] = field(default_factory=dict)
    tuned: dict[str, Mapping[str, int]] = field(default_factory=dict)
    not_available: dict[str, str] = field(default_factory=dict)

    def verifier(self) -> Verifier:
        return Greedy() if self.temperature == 0 else Sampled(Sampling(self.temperature), RandomChance(seed=0))

    def line_ups(self, target: TargetConfig, drafters: Sequence[DrafterFiles], draft_model: TargetConfig | None) -> list[LineUp]:
        """The target's methods, and those of each target that was trained with its heads.

        Raises:
            ValueError: if a drafter or the draft model does not fit.
        """
        first = LineUp(Target.load(target, self.device), target.model, [], self.verifier())
        others = []
        for drafter in drafters:
            line_up, config = first, target
            if drafter.backbone is not None:
                config = replace(target, model=str(drafter.backbone), revision=None)
                line_up = LineUp(Target.load(config, self.device), config.model, [], self.verifier())
                check_backbone(drafter, line_up.target, first.target)
                others.append(line_up)
            check_drafter(drafter, config)
            line_up.contenders += self._trained(drafter, exported_drafter(drafter.export, config, self.device), line_up.target)
        first.contenders += self._untrained(draft_model, first.target)
        for line_up in (first, *others):
            line_up.contenders = [
                contender.tuned(self.tuned[contender.name]) if contender.name in self.tuned else contender for contender in line_up.contenders
            ]
        return [first, *others]

    def _trained(self, files: DrafterFiles, drafter: Drafter, target: Target) -> list[Contender]:
        longest = drafter.config.longest_chain()
        length = self.settings.draft_length if longest is None else min(longest, self.settings.draft_length)

        def contender(kind: Kind, settings: Mapping[str, float], method: Method, suffix: str, verifier: Verifier | None = None) -> Contender:
            chosen = verifier or self.verifier()
            return Contender(f"{files.label} {suffix}", kind, files.algorithm, files.name, settings, method, chosen, is_lossless=chosen.is_lossless)

        chain = contender("chain", {"draft_length": length}, Chain(drafter, length), "chain")
        contenders = [replace(chain, at_length=lambda draft_length: Chain(drafter, draft_length), head=drafter)]
        if longest is not None:
            shape = self._medusa_tree(files, drafter, target)
            if shape is None:
                return contenders
            tree, settings = MedusaTree(drafter, shape), {"total_tokens": 1 + shape.num_nodes}
            temperature = self.temperature or TYPICAL_TEMPERATURE
            typical = Typical(temperature, RandomChance(seed=0))
            return [
                *contenders,
                contender("medusa tree", settings, tree, "tree"),
                contender("medusa tree", {**settings, "temperature": temperature}, tree, "tree, typical acceptance", typical),
            ]
        static = StaticTree(drafter)
        total_tokens = self.settings.tree_total_tokens or 1 + static.most_nodes
        dynamic_settings = {"total_tokens": total_tokens, "depth": self.settings.tree_depth, "top_k": self.settings.tree_top_k}
        dynamic_tree = DynamicTree(drafter, **dynamic_settings)
        dynamic = contender("dynamic tree", {**dynamic_settings, "total_tokens": 1 + dynamic_tree.most_nodes}, dynamic_tree, "dynamic tree")
        return [
            *contenders,
            contender("static tree", {"total_tokens": 1 + static.most_nodes}, static, "static tree"),
            replace(dynamic, with_settings=lambda settings: DynamicTree(drafter, **settings)),
        ]

    def _untrained(self, draft_model: TargetConfig | None, target: Target) -> list[Contender]:
        chosen = self.settings
        lookahead = {"W": chosen.lookahead_w, "N": chosen.lookahead_n, "G": chosen.lookahead_g}
        ngram = {"draft_length": chosen.draft_length, "min_n": chosen.ngram_min, "max_n": chosen.ngram_max}

        def ngram_of(draft_length: int) -> Method:
            return NGram(draft_length, chosen.ngram_min, chosen.ngram_max)

        contenders = [
            Contender("n-gram", "n-gram", None, None, ngram, ngram_of(chosen.draft_length), self.verifier(), at_length=ngram_of),
            *(
                Contender(
                    f"Lookahead{', prompt pool' * has_pool}",
                    "lookahead",
                    None,
                    None,
                    lookahead,
                    lookahead_of(has_pool)(lookahead),
                    self.verifier(),
                    with_settings=lookahead_of(has_pool),
                )
                for has_pool in (False, True)
            ),
        ]
        if draft_model is not None:
            model = Target.load(draft_model, self.device)

            def drafted(draft_length: int) -> Method:
                return DraftModel(target, model, draft_length)

            settings = {"draft_length": chosen.draft_length}
            contenders.append(
                Contender(
                    "draft model", "draft model", None, draft_model.model, settings, drafted(chosen.draft_length), self.verifier(), at_length=drafted
                )
            )
        return contenders

    def _medusa_tree(self, files: DrafterFiles, drafter: Drafter, target: Target) -> TreeShape | None:
        """Calibrated once for each drafter, on the target's greedy answers to the calibration prompts; None where they are too short."""
        if files.name not in self.medusa_trees:
            try:
                accuracies_Kk = self._head_accuracies(drafter, target)
            except ValueError as error:
                self.not_available[f"{files.label} tree"] = str(error)
                return None
            self.medusa_trees[files.name] = calibrate_medusa_tree(accuracies_Kk, self.settings.medusa_tree_tokens - 1)
        return self.medusa_trees[files.name]

    def _head_accuracies(self, drafter: Drafter, target: Target) -> Tensor:
        length = drafter.config.longest_chain() or 1
        trajectories = [greedy_trajectory(target, prompt, self.max_new_tokens, length) for prompt in self.calibration_prompts]
        return measure_head_accuracies(drafter, trajectory_features(target, trajectories, drafter.feature_request(), PACK_TOKENS))


def lookahead_of(has_prompt_pool: bool) -> Callable[[Mapping[str, int]], Method]:
    """Makes Lookahead from its parameters in the paper's names."""
    return lambda settings: Lookahead(settings["W"], settings["N"], settings["G"], has_prompt_pool=has_prompt_pool)


def greedy_trajectory(target: Target, prompt: Sequence[int], max_new_tokens: int, draft_length: int) -> Trajectory:
    """The target's greedy answer, and as much after its end as a chain of drafts looks."""
    answer = decode(target, Plain(), [prompt], Greedy(), max_new_tokens, target.end_ids).answers[0].token_ids
    return with_extra_tokens(target, prompt, answer, draft_length)


def with_extra_tokens(target: Target, prompt: Sequence[int], answer: Sequence[int], draft_length: int) -> Trajectory:
    """A known answer with the greedy continuation past its end."""
    extra = decode(target, Plain(), [[*prompt, *answer]], Greedy(), draft_length, ()).answers[0].token_ids
    return Trajectory(tuple(prompt), tuple(answer), extra)


def not_available(target: Target) -> dict[str, str]:
    """Methods that this target cannot run, with the reason."""
    return {"MTP": mtp_unavailable_reason(target)}
