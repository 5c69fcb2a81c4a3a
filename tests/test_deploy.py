"""Each method gets the commands that its engines understand, or is told why there is none."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from checkpoints.draft_config import DraftDimensions, MedusaDimensions, eagle1_config, eagle3_config, medusa_config
from eval.acceptance import Acceptance, PromptCount
from eval.deploy import deploy_commands, serve_commands
from eval.measurement import Kind, Memory, MethodResult, Speed
from eval.serve import engine_python, worker_environment


def method(
    kind: Kind, algorithm: str | None = None, drafter: str | None = None, settings: Mapping[str, Any] | None = None, **changes: Any
) -> MethodResult:
    """A measured method; nothing but what a command is made of matters."""
    speed = Speed(1.5, (1.4, 1.6), 15.0, 10.0, 0.01, 0.1)
    fields: dict[str, Any] = {
        "name": kind,
        "kind": kind,
        "algorithm": algorithm,
        "drafter": drafter,
        "settings": settings or {},
        "is_lossless": True,
        "nodes_per_verification": 3.0,
        "acceptance": Acceptance((3, 2, 1), (PromptCount(10, 4),)),
        "acceptance_by_domain": {},
        "speed_by_domain": {},
        "speed_by_batch": {1: speed},
        "speed_by_draft_length": {},
        "memory": Memory(1, 0, 0, 0),
        "lossless": None,
        "tau_predicted": None,
    }
    return MethodResult(**(fields | changes))


def speculative_config(command: str) -> dict[str, Any]:
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"] and words[3] == "--speculative-config" and len(words) == 5
    return json.loads(words[4])


def flags(command: str) -> dict[str, str]:
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    return dict(zip(words[3::2], words[4::2], strict=True))


@pytest.mark.parametrize(("algorithm", "vllm_method", "sglang_algorithm"), [("eagle1", "eagle", "EAGLE"), ("eagle3", "eagle3", "EAGLE3")])
def test_an_eagle_chain_is_served_by_both_engines_as_it_was_measured(algorithm: str, vllm_method: str, sglang_algorithm: str) -> None:
    found = deploy_commands(method("chain", algorithm, "some head"), 3, "my target")
    assert (found.vllm_reason, found.sglang_reason) == ("", "")
    assert speculative_config(found.vllm) == {"method": vllm_method, "model": "some head", "num_speculative_tokens": 3}
    assert flags(found.sglang) == {
        "--model-path": "my target",
        "--speculative-algorithm": sglang_algorithm,
        "--speculative-draft-model-path": "some head",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
        "--dtype": "bfloat16",
    }
    assert serve_commands(algorithm, "my target", "some head", 3) == {"vllm": found.vllm, "sglang": found.sglang}


@pytest.mark.parametrize("kind", ["chain", "medusa tree"])
def test_medusa_is_for_vllm_which_drafts_its_chain(kind: Kind) -> None:
    found = deploy_commands(method(kind, "medusa1", "heads"), 3, "t")
    assert speculative_config(found.vllm) == {"method": "medusa", "model": "heads", "num_speculative_tokens": 3}
    assert found.sglang == "" and "does not support Medusa" in found.sglang_reason
    assert ("chains only" in found.vllm_reason) == (kind == "medusa tree")


def test_typical_acceptance_is_in_no_engine() -> None:
    found = deploy_commands(method("medusa tree", "medusa1", "heads", is_lossless=False), 3, "t")
    assert "no typical acceptance" in found.vllm_reason and "chains only" in found.vllm_reason


def test_a_runs_export_is_served_and_medusa_2_with_the_backbone_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "backbone").mkdir()
    for drafter in (tmp_path, tmp_path / "export"):
        found = deploy_commands(method("chain", "medusa2", str(drafter)), 3, "the original")
        command = found.vllm
        assert shlex.split(command)[2] == str(tmp_path / "backbone")
        assert speculative_config(command)["model"] == str(tmp_path / "export")
    assert shlex.split(deploy_commands(method("chain", "medusa1", str(tmp_path)), 3, "the original").vllm)[2] == "the original"


def test_a_revision_is_pinned_but_for_a_local_folder_and_a_target_of_its_own(tmp_path: Path) -> None:
    for one in (method("chain", "eagle3", "head"), method("n-gram", settings=NGRAM), method("draft model", drafter="small")):
        found = deploy_commands(one, 3, "org/model", "it's v1")
        assert shlex.split(found.vllm)[-2:] == ["--revision", "it's v1"] and flags(found.sglang)["--revision"] == "it's v1"
        assert "--revision" not in deploy_commands(one, 3, str(tmp_path), "v1").vllm
    assert "--revision" not in deploy_commands(method("chain", "medusa2", "heads"), 3, "org/model", "v1").vllm
    medusa = deploy_commands(method("chain", "medusa1", "heads"), 3, "org/model", "v1")
    assert medusa.vllm.endswith("--revision v1") and medusa.sglang == ""


def test_sglang_drafts_the_dynamic_tree_and_vllm_its_chain() -> None:
    """5 levels of 4, 31 nodes and the newest token."""
    found = deploy_commands(method("dynamic tree", "eagle3", "head", {"top_k": 4, "total_tokens": 32}), 5, "t")
    tree = {"--speculative-num-steps": "5", "--speculative-eagle-topk": "4", "--speculative-num-draft-tokens": "32"}
    assert flags(found.sglang).items() >= tree.items() and found.sglang_reason == ""
    assert speculative_config(found.vllm)["num_speculative_tokens"] == 5 and "chains only" in found.vllm_reason


def test_a_dynamic_tree_asks_for_no_more_nodes_than_there_are() -> None:
    """2 levels of 2: 2 + 4 nodes."""
    found = deploy_commands(method("dynamic tree", "eagle1", "head", {"top_k": 2, "total_tokens": 60}), 2, "t")
    assert flags(found.sglang)["--speculative-num-draft-tokens"] == "7"


def test_a_static_tree_is_a_chain_in_both_engines() -> None:
    found = deploy_commands(method("static tree", "eagle1", "head"), 4, "t")
    assert flags(found.sglang)["--speculative-eagle-topk"] == "1" and "no fixed trees" in found.sglang_reason
    assert speculative_config(found.vllm)["num_speculative_tokens"] == 4 and "chains only" in found.vllm_reason


NGRAM = {"min_n": 2, "max_n": 4}


def test_ngram_is_the_same_in_vllm_and_another_one_in_sglang() -> None:
    found = deploy_commands(method("n-gram", settings=NGRAM), 5, "t")
    assert (
        speculative_config(found.vllm) == {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        and found.vllm_reason == ""
    )
    assert flags(found.sglang) == {
        "--model-path": "t",
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": "6",
        "--dtype": "bfloat16",
    }
    assert "is not found" in found.sglang_reason


def test_a_draft_model_is_served_by_both_engines() -> None:
    found = deploy_commands(method("draft model", drafter="small"), 3, "t")
    assert speculative_config(found.vllm) == {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}
    given = {"--speculative-algorithm": "STANDALONE", "--speculative-draft-model-path": "small", "--speculative-num-steps": "3"}
    assert flags(found.sglang).items() >= (given | {"--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "4"}).items()
    assert (found.vllm_reason, found.sglang_reason) == ("", "")


def test_lookahead_is_in_no_engine() -> None:
    found = deploy_commands(method("lookahead", settings={"W": 5, "N": 3, "G": 5}), 2, "t")
    assert (found.vllm, found.sglang) == ("", "")
    assert "does not support" in found.vllm_reason and "does not support" in found.sglang_reason


@pytest.mark.parametrize("name", ["runs/EAGLE3-against-medusa/export", "my-eagle-heads"])
def test_a_path_that_vllm_takes_for_another_method_is_refused(name: str) -> None:
    for one in (method("chain", "medusa1", name), method("draft model", drafter=name)):
        found = deploy_commands(one, 3, "t")
        assert found.vllm == "" and name in found.vllm_reason and "rename" in found.vllm_reason
    assert deploy_commands(method("chain", "eagle3", name), 3, "t").vllm


def test_what_the_exporter_knows_of_an_engine_is_heeded(tmp_path: Path) -> None:
    (tmp_path / "headstart.json").write_text(json.dumps({"engine_limits": {"sglang": "it captures nothing"}}))
    found = deploy_commands(method("chain", "eagle3", str(tmp_path)), 3, "t")
    assert found.vllm and found.sglang == "" and "it captures nothing" in found.sglang_reason


@pytest.mark.parametrize(
    ("one", "drafts", "message"),
    [
        (method("chain", "eagle3", "d"), 0, "expected at least 1"),
        (method("chain", None, "d"), 3, "the algorithm of its drafter"),
        (method("chain", "eagle3"), 3, "expected a drafter"),
        (method("draft model"), 3, "expected a draft model"),
        (method("n-gram", settings={"min_n": 1}), 3, "expected 'max_n'"),
        (method("dynamic tree", "eagle3", "d"), 3, "expected 'top_k'"),
    ],
)
def test_what_a_command_lacks_is_named(one: MethodResult, drafts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deploy_commands(one, drafts, "t")


# --- against the engine -----------------------------------------------------------------------------------------------

# Each command as `vllm serve` itself parses and checks it, up to the engine's start.
PARSE = """
import json, shlex, sys
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
found = []
for command in json.load(open(sys.argv[1])):
    words = shlex.split(command)
    args = parser.parse_args(words[2:])
    args.model = args.model_tag or args.model
    engine = EngineArgs.from_cli_args(args)
    try:
        parsed = engine.create_speculative_config(engine.create_model_config(), ParallelConfig())
        found.append([parsed.method, parsed.num_speculative_tokens, parsed.prompt_lookup_min, parsed.prompt_lookup_max])
    except Exception as error:
        found.append(repr(error))
json.dump(found, open(sys.argv[2], "w"))
"""


def write_configs(folder: Path) -> LlamaConfig:
    """A target, its draft model, and the config.json of a drafter of each format: all that vLLM reads before it loads weights."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = LlamaConfig(**sizes, max_position_embeddings=256, architectures=["LlamaForCausalLM"], dtype="float32")
    target.save_pretrained(folder / "target")
    target.save_pretrained(folder / "small")
    block, medusa = DraftDimensions.of_target(target), MedusaDimensions(64, 3, 1, False)
    tensors = {"lm_head.weight": torch.zeros(80, 64)}
    configs = {
        "eagle1": eagle1_config({}, target, block, (), torch.float32),
        "eagle3": eagle3_config(tensors, target, block, (2, 3, 4), torch.float32),
        "medusa1": medusa_config({}, target, medusa, (), torch.float32),
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "a-medusa-beside-eagle3").symlink_to(folder / "medusa1")
    return target


@pytest.mark.engine
def test_vllm_understands_every_command(tmp_path: Path) -> None:
    write_configs(tmp_path)
    methods = [
        method("chain", "eagle1", str(tmp_path / "eagle1")),
        method("chain", "eagle3", str(tmp_path / "eagle3")),
        method("chain", "medusa1", str(tmp_path / "medusa1")),
        method("dynamic tree", "eagle3", str(tmp_path / "eagle3"), {"top_k": 2, "total_tokens": 8}),
        method("medusa tree", "medusa1", str(tmp_path / "medusa1")),
        method("n-gram", settings=NGRAM),
        method("draft model", drafter=str(tmp_path / "small")),
    ]
    commands = [deploy_commands(one, 3, str(tmp_path / "target")).vllm for one in methods]
    # And that it really takes a path for a method: the reason for which such a path gets no command.
    trap = serve_commands("medusa1", str(tmp_path / "target"), tmp_path / "a-medusa-beside-eagle3", 3)["vllm"]
    (tmp_path / "commands.json").write_text(json.dumps([*commands, trap]))
    words = [str(engine_python()), "-I", "-c", PARSE, str(tmp_path / "commands.json"), str(tmp_path / "found.json")]
    ended = subprocess.run(words, env=worker_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    *found, trapped = json.loads((tmp_path / "found.json").read_text())
    assert [tuple(row) for row in found] == [
        ("eagle", 3, 0, 0),
        ("eagle3", 3, 0, 0),
        ("medusa", 3, 0, 0),
        ("eagle3", 3, 0, 0),
        ("medusa", 3, 0, 0),
        ("ngram", 3, 2, 4),
        ("draft_model", 3, 0, 0),
    ]
    assert isinstance(trapped, str) or trapped[0] != "medusa"
