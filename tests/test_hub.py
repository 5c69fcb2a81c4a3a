"""The real Hub client uploads a run to a Hub on the loopback interface, whatever that Hub does, and what comes back from it is the run's export.

The client reads its settings when it is imported, so it lives in a process of its own, which forks for each command (`Client`).
"""

from __future__ import annotations

import email.utils
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import checkpoints.hub_client as hub_client
from checkpoints.draft_config import draft_dimensions
from checkpoints.export import export_drafter, validate_export
from checkpoints.hub_card import published_command
from checkpoints.privacy import refuse_private
from checkpoints.provenance import Provenance
from data.target import TargetConfig, load_target_heads, target_fingerprint
from data.vllm_engine import engine_python, worker_environment
from data.vocab import DraftVocabulary
from eval.evaluation import Evaluation
from recipes.eagle3 import recipe
from train.cli import main as recipe_main
from train.drafters.base import load_drafter_class
from train.drafters.eagle3 import Eagle3Config

ROOT = Path(__file__).resolve().parent.parent
EXPORTED = {"README.md", "config.json", "headstart.json", "model.safetensors"}
FORKING_CLIENT = """
import json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
import torch
from huggingface_hub import snapshot_download
import checkpoints.hub, recipes.eagle3, recipes.medusa2, train.cli
from eval.evaluation import Evaluation

def work(command, arguments):
    if command == "download":
        snapshot_download(arguments[0], local_dir=arguments[1], revision=arguments[2])
        return 0
    if command == "hub":
        return checkpoints.hub.main(arguments)
    torch.set_num_threads(1)
    train.cli.main(getattr(recipes, command).recipe(), Evaluation(), arguments)
    return 0

print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        for name, value in job["environment"].items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        os.chdir(job["folder"])
        try:
            code = work(job["command"], job["arguments"])
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


class Client:
    """A process with the real client, for which the loopback Hub is the Hub."""

    def __init__(self, hub: Any, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {**hub.environment(token=None), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKING_CLIENT, str(ROOT)],
            env=environment,
            cwd=folder,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self, command: str, *arguments: object, token: str | None, **environment: str) -> int:
        """Begins a command; its process id."""
        job = {
            "command": command,
            "arguments": [str(argument) for argument in arguments],
            "environment": {"HF_TOKEN": token, **environment},
            "folder": str(self.folder),
            "output": str(self.folder / "output"),
        }
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self._line())

    def wait(self) -> tuple[int, str]:
        """(exit code, output) of the command that was begun."""
        code = int(self._line())
        return code, (self.folder / "output").read_text()

    def __call__(self, command: str, *arguments: object, token: str | None = "hf_loopback_writer", **environment: str) -> tuple[int, str]:
        self.start(command, *arguments, token=token, **environment)
        return self.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)


@dataclass
class Runs:
    """Runs that were made and uploaded by their recipes."""

    eagle3: Path
    medusa2: Path
    output: str


@pytest.fixture(scope="module")
def hub_of_module(loopback_hub_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with loopback_hub_module.LoopbackHub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="module")
def client(hub_of_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(hub_of_module, tmp_path_factory.mktemp("client"))
    yield client
    client.close()


@pytest.fixture
def hub(hub_of_module: Any) -> Iterator[Any]:
    """The Hub without faults and with an empty log."""
    hub_of_module.faults.clear()
    hub_of_module.seen.clear()
    yield hub_of_module
    hub_of_module.faults.clear()


def arguments_of(algorithm: str, tiny_arguments: list[str], runs_dir: Path) -> list[str]:
    if algorithm == "medusa2":
        pairs = zip(tiny_arguments[::2], tiny_arguments[1::2], strict=True)
        tiny_arguments = [part for pair in pairs if not pair[0].startswith("--drafter.") for part in pair]
        tiny_arguments += ["--drafter.lora-dropout", "0", "--drafter.backbone-warmup-steps", "2", "--train.max-steps", "2"]
    return [*tiny_arguments, "--runs-dir", str(runs_dir), "--name", algorithm]


@pytest.fixture(scope="module")
def runs(client: Client, tiny_arguments: list[str]) -> Runs:
    folder = client.folder / "runs"
    code, output = client("eagle3", *arguments_of("eagle3", tiny_arguments, folder), "--push-to-hub", "user/pushed")
    assert code == 0, output
    code, medusa_output = client("medusa2", *arguments_of("medusa2", tiny_arguments, folder))
    assert code == 0, medusa_output
    return Runs(folder / "eagle3", folder / "medusa2", output)


@pytest.fixture
def copied(runs: Runs, tmp_path: Path) -> Path:
    """A copy of the EAGLE-3 run that a test may spoil."""
    kept = shutil.ignore_patterns("step_*", "features", "best_*", "answers", "data")
    return Path(shutil.copytree(runs.eagle3, tmp_path / "run", ignore=kept))


def the_error(code: int, output: str) -> str:
    """The one line of a command that failed as it should."""
    assert code == 2, output
    assert "Traceback" not in output and "hf_loopback" not in output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and output.rstrip().endswith(lines[0]), output
    return lines[0]


# --- what is uploaded -----------------------------------------------------------------------------------------------------


def test_a_recipe_that_is_told_so_ends_on_the_hub(hub: Any, runs: Runs) -> None:
    files = hub.files("user/pushed")
    assert set(files) == EXPORTED | {".gitattributes"}
    for name in EXPORTED - {"README.md"}:
        assert files[name] == (runs.eagle3 / "export" / name).read_bytes(), name
    assert f"4 files are on the Hub as they are here: {hub.url}/user/pushed" in runs.output
    [upload] = json.loads((runs.eagle3 / "hub.json").read_text())["uploads"]
    assert upload["commit"] == hub.repositories["user/pushed"]["branches"]["main"] and upload["repo"] == "user/pushed"
    assert hub.repositories["user/pushed"]["private"] is False


def test_the_same_recipe_again_sends_no_file(hub: Any, client: Client, runs: Runs, tiny_arguments: list[str]) -> None:
    code, output = client("eagle3", *arguments_of("eagle3", tiny_arguments, runs.eagle3.parent), "--push-to-hub", "user/pushed")
    assert code == 0 and "[upload] done before" in output
    assert hub.lines() == ["GET /api/whoami-v2"]


def test_a_downloaded_copy_is_the_export_byte_for_byte(hub: Any, client: Client, runs: Runs, tmp_path: Path) -> None:
    code, output = client("download", "user/pushed", tmp_path / "python", "main")
    assert code == 0, output
    command = [str(Path(sys.executable).with_name("hf")), "download", "user/pushed", "--local-dir", str(tmp_path / "hf")]
    subprocess.run(command, check=True, env=os.environ | hub.environment(), capture_output=True, timeout=60)
    for folder in (tmp_path / "python", tmp_path / "hf"):
        validate_export(folder)
        for name in EXPORTED - {"README.md"}:
            assert (folder / name).read_bytes() == (runs.eagle3 / "export" / name).read_bytes()


def test_a_target_that_was_trained_gets_a_repository_of_its_own_before_its_drafter(hub: Any, client: Client, runs: Runs, tmp_path: Path) -> None:
    code, output = client("hub", runs.medusa2, "user/medusa", "--private")
    assert code == 0, output
    assert [line.split("/commit/")[0] for line in hub.lines("/commit/")] == ["POST /api/models/user/medusa-target", "POST /api/models/user/medusa"]
    assert set(hub.files("user/medusa")) == EXPORTED | {".gitattributes"}
    assert hub.repositories["user/medusa"]["private"] and hub.repositories["user/medusa-target"]["private"]
    code, output = client("download", "user/medusa-target", tmp_path, "main")
    assert code == 0, output
    for path in (runs.medusa2 / "backbone").iterdir():
        assert path.name == "README.md" or (tmp_path / path.name).read_bytes() == path.read_bytes()
    config, _ = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert config.config.num_hidden_layers == 7
    drafter, target = (ModelCard(hub.files(repo)["README.md"].decode()) for repo in ("user/medusa", "user/medusa-target"))
    assert (drafter.data.base_model, drafter.data.base_model_relation) == ("user/medusa-target", "adapter")
    assert "base_model" not in target.data.to_dict()  # the original was a local folder
    settings = json.dumps({"method": "medusa", "model": "user/medusa", "num_speculative_tokens": 2})
    command = f"vllm serve user/medusa-target --speculative-config '{settings}'"
    assert command in drafter.text and command in target.text
    assert "Held-out perplexity" in drafter.text and "Held-out perplexity" in target.text


def test_a_branch_is_made_and_main_is_left(hub: Any, client: Client, runs: Runs, tmp_path: Path) -> None:
    code, output = client("hub", runs.eagle3, "org/branched", "--revision", "trial/1")
    assert code == 0 and f"{hub.url}/org/branched/tree/trial/1" in output, output
    assert set(hub.files("org/branched", "main")) == {".gitattributes"}
    code, output = client("download", "org/branched", tmp_path, "trial/1")
    assert code == 0 and (tmp_path / "model.safetensors").exists(), output


def test_a_dry_run_shows_everything_and_sends_nothing(hub: Any, client: Client, runs: Runs) -> None:
    code, output = client("hub", runs.eagle3, "user/dry", "--dry-run", token=None)
    assert code == 0 and hub.lines() == []
    assert f"{(runs.eagle3 / 'export' / 'model.safetensors').stat().st_size:,} bytes" in output
    assert "base_model_relation" not in output and "model-index:" in output and "## Limits" in output
    assert "without a licence: name one with --license" in output and "name its Hub id with --base-model" in output


# --- the card -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def card(client: Client, runs: Runs) -> ModelCard:
    """With what only the user can know, and with an engine's counters."""
    run = Path(shutil.copytree(runs.eagle3, client.folder / "served", ignore=shutil.ignore_patterns("step_*", "features")))
    report = json.loads((run / "report.json").read_text())
    ours = {"tau": report["tau"], "joint_acceptance": report["joint_acceptance"]}
    measured = {"tau": 1.75, "joint_acceptance": [0.5, 0.25]}
    counts = {"num_outputs": 4, "num_identical_outputs": 4, "num_near_ties": 0, "tokens_per_s": 30.0, "tokens_per_s_plain": 20.0}
    (run / "serve.json").write_text(json.dumps({"engine": "vllm", "engine_version": "0.32.0", "ours": ours, "measured": measured, **counts}))
    config = json.loads((run / "config.json").read_text())
    public = ["HuggingFaceH4/ultrachat_200k/default:train_sft@v1", "HuggingFaceH4/ultrachat_200k:test"]
    config["data"]["sources"] = [*public, "mine/chats", *config["data"]["sources"]]
    prepared = json.loads((run / "stages" / "prepare.json").read_text())["inputs"]
    # A folder that was there when the run read it, though its name could be an id of the Hub.
    record(run, "prepare", inputs={**prepared, "sources": [*prepared["sources"], {"source": "mine/chats", "files": "0123"}]})
    (run / "config.json").write_text(json.dumps(config))
    data_report = {"num_read": 2059, "num_kept": 2043, "num_left_out": 16, "left_out": {"duplicate": {"count": 16}, "empty": {"count": 0}}}
    (run / "data_report.json").write_text(json.dumps(data_report))
    code, output = client("hub", run, "user/carded", "--base-model", "some-org/Some-7B", "--license", "apache-2.0")
    assert code == 0, output
    return ModelCard(client.hub.files("user/carded")["README.md"].decode())


def test_the_hub_reads_what_the_drafter_is(card: ModelCard) -> None:
    data = card.data
    assert (data.base_model, data.base_model_relation) == ("some-org/Some-7B", "adapter")
    assert (data.library_name, data.pipeline_tag, data.license) == ("vllm", "text-generation", "apache-2.0")
    assert {"speculative-decoding", "eagle3", "vllm", "sglang"} <= set(data.tags)
    assert data.datasets == ["HuggingFaceH4/ultrachat_200k"]  # what lies on this machine is nobody else's business


def test_the_hub_reads_the_results_with_their_conditions(card: ModelCard, runs: Runs) -> None:
    report = json.loads((runs.eagle3 / "report.json").read_text())
    results = {result.metric_name: result for result in card.data.eval_results}
    tau = results["tau (tokens per target forward)"]
    assert tau.metric_value == round(report["tau"], 4)
    conditions = {"temperature": 0.0, "num_speculative_tokens": 2, "draft_shape": "chain", "dtype": "float32", "hardware": report["device"]}
    assert tau.metric_args == conditions
    assert (tau.dataset_config, tau.dataset_split, tau.dataset_revision) == ("default", "train_sft", "v1")
    assert tau.dataset_type == "HuggingFaceH4/ultrachat_200k" and tau.dataset_args["num_prompts"] == 4
    for position, share in enumerate(report["joint_acceptance"], start=1):
        joint = results[f"joint acceptance, draft {position}"]
        assert joint.metric_value == round(share, 4) and joint.metric_args["position"] == position
    assert results["speed-up over plain decoding"].metric_value == round(report["speedup_reference_decoder"], 4)
    assert results["tau, counted by vllm 0.32.0"].metric_value == 1.75
    assert results["joint acceptance, draft 2, counted by vllm 0.32.0"].metric_value == 0.25
    assert results["speed-up over plain decoding in vllm 0.32.0"].metric_value == 1.5


def test_the_card_tells_how_to_serve_what_was_done_and_where_it_ends(card: ModelCard, runs: Runs) -> None:
    text = card.text
    assert "vllm serve some-org/Some-7B --speculative-config" in text and '"model": "user/carded"' in text
    assert "sglang.launch_server --model-path some-org/Some-7B" in text and "--speculative-draft-model-path user/carded" in text
    assert "| draft 1 |" in text and "| drafter.ttt_steps | 3 |" in text
    assert "2,059 records read, 2,043 kept, 16 left out" in text and "| duplicate | 16 |" in text and "| empty |" not in text
    assert "## Limits" in text and "It drafts 128 of the target's tokens" in text
    # The run's own name, folders and source paths stay at home.
    assert str(runs.eagle3.parent) not in card.content and "/tmp" not in card.content and "eagle3/export" not in card.content
    assert "HuggingFaceH4/ultrachat_200k/default:train_sft@v1, HuggingFaceH4/ultrachat_200k:test, chats, sharegpt.json" in text


def test_a_card_takes_the_licence_of_a_local_target_and_leaves_out_an_older_exports_counters(client: Client, copied: Path, hub: Any) -> None:
    config = json.loads((copied / "config.json").read_text())
    target = Path(shutil.copytree(config["target"]["model"], copied.parent / "target"))
    (target / "README.md").write_text("---\nlicense: other\nlicense_name: some-licence\nlicense_link: https://example.org/l\n---\n")
    config["target"]["model"] = str(target)
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "serve.json").write_text(json.dumps({"ours": {"tau": 9, "joint_acceptance": [1, 1]}}))
    code, output = client("hub", copied, "user/licensed")
    assert code == 0 and "serve.json is of an earlier export" in output, output
    data = ModelCard(hub.files("user/licensed")["README.md"].decode()).data
    assert (data.license, data.license_name, data.license_link) == ("other", "some-licence", "https://example.org/l")


def test_the_card_of_a_drafter_for_a_merged_adapter_says_how_to_merge_it(client: Client, copied: Path) -> None:
    path = copied / "export" / "headstart.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target": "some-org/base", "adapter": "some-org/lora"}))
    code, output = client("hub", copied, "user/merged", "--dry-run")
    assert code == 0, output
    assert "base_model: some-org/base\n" in output and "vllm serve TARGET --speculative-config" in output
    assert "python -m data.merge_adapter --target.model some-org/base --target.adapter some-org/lora --out TARGET" in output
    code, output = client("hub", copied, "user/merged", "--dry-run", "--base-model", "me/merged")
    assert "base_model: me/merged\n" in output and "vllm serve me/merged --speculative-config" in output and "data.merge_adapter" not in output


def test_commands_get_their_published_names_as_whole_words() -> None:
    report = {"export": "runs/my run/export", "target": "runs"}
    vllm = "vllm serve runs --speculative-config '{\"method\": \"eagle3\", \"model\": \"runs/my run/export\"}' --runs runs/other"
    assert published_command(vllm, report, "u/d", "o/t") == (
        "vllm serve o/t --speculative-config '{\"method\": \"eagle3\", \"model\": \"u/d\"}' --runs runs/other"
    )


# --- what goes wrong on the way -------------------------------------------------------------------------------------------


def forgotten(hub: Any, run: Path) -> dict[str, str]:
    """Makes the Hub's storage forget the weights that other tests have uploaded; their SHA-256 by folder."""
    digests = {name: hashlib.sha256((run / name / "model.safetensors").read_bytes()).hexdigest() for name in ("export", "backbone")}
    for digest in digests.values():
        hub.object_path(digest).unlink(missing_ok=True)
    return digests


def test_a_busy_hub_and_dropped_connections_are_outlasted(hub: Any, client: Client, runs: Runs, loopback_hub_module: Any) -> None:
    forgotten(hub, runs.medusa2)
    fault = loopback_hub_module.Fault
    hub.faults += [
        fault("GET /api/whoami", status=429, headers={"Retry-After": "1"}),
        fault("POST /api/repos/create", after_done=True),  # made, and the answer is lost
        fault("POST .*/preupload", status=503),
        fault("PUT /_storage", after_bytes=2000),
        fault("POST .*/commit", status=503, headers={"Retry-After": "1"}),
    ]
    code, output = client("hub", runs.medusa2, "user/busy", "--backbone-repo", "org/busy-target", "--base-model", "a/b")
    assert code == 0, output
    assert [fault.times for fault in hub.faults] == [0] * 5
    assert "the Hub answers 429; again in 1 s (1 of 5)" in output and "Traceback" not in output
    assert "Signature" not in output  # of the signed address in the client's own warning
    assert hub.files("user/busy")["model.safetensors"] == (runs.medusa2 / "export" / "model.safetensors").read_bytes()
    target = ModelCard(hub.files("org/busy-target")["README.md"].decode()).data
    assert (target.base_model, target.base_model_relation, target.library_name) == ("a/b", "finetune", "transformers")


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: Any, client: Client, runs: Runs, loopback_hub_module: Any) -> None:
    hub.faults.append(loopback_hub_module.Fault("POST .*/commit", after_done=True))
    code, output = client("hub", runs.eagle3, "user/lost")
    assert code == 0, output
    assert len(hub.lines("/commit/")) == 1 and len(hub.repositories["user/lost"]["commits"]) == 2  # .gitattributes, then ours


def killed_at(client: Client, hub: Any, pattern: str, *arguments: object) -> None:
    """kill -9 for an upload as soon as a request has arrived."""
    child = client.start("hub", *arguments, token="hf_loopback_writer")
    for _ in range(2000):
        if hub.lines(pattern):
            break
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    code, output = client.wait()
    assert code == -signal.SIGKILL, output


def test_an_upload_that_was_killed_goes_on_and_sends_nothing_twice(hub: Any, client: Client, runs: Runs, loopback_hub_module: Any) -> None:
    requests = {name: f"PUT /_storage/{digest}" for name, digest in forgotten(hub, runs.medusa2).items()}
    hub.faults.append(loopback_hub_module.Fault(requests["export"], delay_s=0.5, after_bytes=2000))
    killed_at(client, hub, requests["export"], runs.medusa2, "user/killed")
    assert len(hub.lines(requests["backbone"])) == 1
    assert len(hub.lines("/commit/")) == 1 and set(hub.files("user/killed")) == {".gitattributes"}  # of the drafter nothing can be had yet
    hub.seen.clear()
    hub.faults.append(loopback_hub_module.Fault("user/killed/commit", delay_s=0.5))
    killed_at(client, hub, "user/killed/commit", runs.medusa2, "user/killed")
    assert len(hub.lines("PUT")) == len(hub.lines(requests["export"])) == 1  # the target is there
    hub.seen.clear()
    code, output = client("hub", runs.medusa2, "user/killed")
    assert code == 0, output
    assert hub.lines("PUT") == [] and len(hub.lines("/commit/")) == 1
    assert set(hub.files("user/killed")) == EXPORTED | {".gitattributes"}


def test_waits_are_those_that_the_hub_asks_for_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(hub_client.time, "sleep", waits.append)

    def answer(status: int, **headers: str) -> Exception:
        request = httpx2.Request("GET", "https://example.org")
        return HfHubHTTPError("no", response=httpx2.Response(status, headers=headers, request=request))

    in_20_s = email.utils.formatdate(time.time() + 20, usegmt=True)
    errors = [answer(503, **{"Retry-After": "7"}), answer(503, **{"Retry-After": in_20_s}), ConnectionError("gone"), TimeoutError(), answer(500)]

    def call() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert hub_client.attempt("asking", call, retries=5) == "done"
    assert waits == [7, pytest.approx(20, abs=2), 4, 8, 16]
    errors[:] = [ConnectionError("gone")] * 3
    with pytest.raises(hub_client.HubError, match=r"asking: no connection to \S+ \(gone\): run the same command again") as stop:
        hub_client.attempt("asking", call, retries=2)
    assert stop.value.is_passing and waits[5:] == [1, 2]
    errors[:] = [PermissionError("not yours")]
    with pytest.raises(hub_client.HubError, match="asking: not yours") as stop:
        hub_client.attempt("asking", call, retries=2)
    assert not stop.value.is_passing and len(waits) == 7


@pytest.mark.parametrize(
    ("token", "repo", "expected"),
    [
        (None, "user/x", "there is no Hugging Face token to upload to user/x with: set HF_TOKEN or run `hf auth login`"),
        ("hf_loopback_wrong", "user/x", "does not accept the token (401): set HF_TOKEN or run `hf auth login`"),
        ("hf_loopback_reader", "user/x", "the Hugging Face token may only read"),
        ("hf_loopback_writer", "other/x", "is user's, who cannot write to other/x: name a repository of user or org"),
        ("hf_loopback_fine", "other/x", "the token may not do this (403)"),
        ("hf_loop back\nbroken", "user/x", "holds characters that no token has"),
        ("hf_loopback_writer", "x", "'x' is no repository id of the Hub, expected user/name"),
        ("hf_loopback_writer", "user/x--y", "'user/x--y' is no repository id of the Hub"),
    ],
)
def test_a_refusal_is_one_line_that_says_what_to_do(hub: Any, client: Client, runs: Runs, token: str | None, repo: str, expected: str) -> None:
    assert expected in the_error(*client("hub", runs.eagle3, repo, token=token))
    assert hub.lines("PUT|/commit/") == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"match": "commit", "times": 9, "status": 503}, "uploading to user/faulty: the Hub answers 503: run the same command again when"),
        ({"match": "commit", "times": 9, "status": 429}, "too many requests (429): wait a while"),
        ({"match": "commit", "times": 9, "status": 429, "headers": {"Retry-After": "3600"}}, "too many requests (429): wait a while"),
        ({"match": "commit", "times": 9}, "uploading to user/faulty: no connection to http://127.0.0.1"),
        ({"match": "tree", "times": 9, "status": 404}, "the Hub has no such repository or branch (404)"),
        ({"match": "commit", "status": 403}, "the token may not do this (403)"),
        ({"match": "commit", "status": 400}, "Bad request for commit endpoint"),
        ({"match": "whoami", "times": 9, "status": 500}, "checking the token for user/faulty: the Hub answers 500"),
    ],
)
def test_a_hub_that_stays_away_is_one_line(
    hub: Any, client: Client, runs: Runs, loopback_hub_module: Any, fault: dict[str, Any], expected: str
) -> None:
    hub.faults.append(loopback_hub_module.Fault(**fault))
    assert expected in the_error(*client("hub", runs.eagle3, "user/faulty", "--retries", "1" if fault.get("status") == 503 else "0"))


def test_a_hub_that_lists_something_else_is_noticed(
    hub: Any, client: Client, runs: Runs, loopback_hub_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = loopback_hub_module.LoopbackHub.commit

    def corrupted(self: Any, repo: str, revision: str, changes: dict[str, Any]) -> str:
        if "config.json" in changes:
            changes = {**changes, "config.json": {**changes["config.json"], "oid": "0" * 40}, "headstart.json": None}
        return str(commit(self, repo, revision, changes))

    monkeypatch.setattr(loopback_hub_module.LoopbackHub, "commit", corrupted)
    error = the_error(*client("hub", runs.eagle3, "user/corrupted"))
    assert "user/corrupted is not what was uploaded" in error
    assert "config.json has another content there" in error and "headstart.json is not there" in error


# --- what must not be published -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "expected"),
    [
        (str(Path.home() / "targets" / "mine"), "a path of this machine"),
        ("hf_" + "a1" * 17, "something with the form of an access token"),
        ("hf_loopback_writer", "the Hugging Face token"),
        ("s3cret-of-mine", "the value of the environment variable MY_API_KEY"),
    ],
)
def test_nothing_secret_or_local_is_uploaded(hub: Any, client: Client, copied: Path, secret: str, expected: str) -> None:
    path = copied / "export" / "headstart.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "note": secret}))
    error = the_error(*client("hub", copied, "user/secret", MY_API_KEY="s3cret-of-mine"))
    assert f"nothing was uploaded: headstart.json holds {expected}" in error and secret not in error
    assert hub.lines() == []


def test_the_header_of_a_weights_file_is_searched_too(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"made_by": str(Path.home() / "x")}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"model\.safetensors holds a path of this machine"):
        refuse_private({"model.safetensors": tmp_path / "model.safetensors"})


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda run: (run / "report.json").unlink(), "report.json is missing: run the recipe to its end first"),
        (lambda run: shutil.rmtree(run / "export"), "holds no export: expected a run's folder"),
        (lambda run: (run / "export" / "model.safetensors").write_bytes(b"x" * 100), "breaks the eagle3 serving contract"),
        (lambda run: (run / "report.json").write_text('{"joint_acceptance": []}'), "its records lack 'temperature', another version"),
        (lambda run: (run / "report.json").write_text('{"tau": '), "report.json is damaged"),
        (lambda run: (run / "config.json").write_text("[]"), "config.json is damaged"),
        (lambda run: record(run, "export", inputs={"train": "other"}), "report.json is not of this export"),
        (lambda run: record(run, "evaluate", seconds=None), "report.json is not of this export"),
    ],
)
def test_a_run_that_is_not_whole_is_refused(hub: Any, client: Client, copied: Path, spoil: Callable[[Path], object], expected: str) -> None:
    spoil(copied)
    assert expected in the_error(*client("hub", copied, "user/broken"))
    assert hub.lines() == []


def record(run: Path, stage: str, **changes: Any) -> None:
    path = run / "stages" / f"{stage}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_weights_of_another_model_are_not_left_beside_ours(hub: Any, client: Client, runs: Runs) -> None:
    code, output = client("hub", runs.medusa2, "user/mixed")
    assert code == 0, output
    hub.commit("user/mixed", "main", {"model-00001-of-00002.safetensors": hub.store(b"older", is_large=True)})
    commits = len(hub.repositories["user/mixed"]["commits"])
    assert "holds other weights (model-00001-of-00002.safetensors)" in the_error(*client("hub", runs.eagle3, "user/mixed"))
    assert len(hub.repositories["user/mixed"]["commits"]) == commits


def test_a_public_repository_is_not_taken_for_a_private_one(hub: Any, client: Client, runs: Runs) -> None:
    assert client("hub", runs.eagle3, "user/open")[0] == 0
    hub.seen.clear()
    assert "user/open is there and public" in the_error(*client("hub", runs.eagle3, "user/open", "--private"))
    assert hub.lines("PUT|/commit/") == []


@pytest.mark.slow
def test_what_a_user_types_works_in_processes_of_their_own(runs: Runs, tmp_path: Path) -> None:
    server = [sys.executable, str(ROOT / "tests" / "loopback_hub.py"), "--folder", str(tmp_path / "hub")]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as hub:
        try:
            assert hub.stdout is not None
            lines = [hub.stdout.readline().strip().removeprefix("export ") for _ in range(7)]
            environment = os.environ | dict(line.split("=", 1) for line in lines)
            command = [sys.executable, "-m", "checkpoints.hub", str(runs.eagle3), "user/typed"]
            finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
            assert finished.returncode == 0, finished.stderr
            assert finished.stdout.endswith(f"{environment['HF_ENDPOINT']}/user/typed\n")
        finally:
            hub.terminate()


# --- recipes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--push-to-hub", "nobody"], "'nobody' is no repository id of the Hub, expected user/name"),
        (["--push-to-hub", "user/a..b"], "'user/a..b' is no repository id of the Hub"),
        (["--hub-private"], "hub_private has no effect without push_to_hub"),
    ],
)
def test_a_mistyped_repository_is_refused_before_the_run(
    tmp_path: Path, tiny_arguments: list[str], capsys: pytest.CaptureFixture[str], overrides: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        recipe_main(recipe(), Evaluation(), [*tiny_arguments, "--runs-dir", str(tmp_path / "runs"), *overrides])
    assert stop.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "runs").exists()


def test_vllm_would_take_a_medusa_drafter_of_such_a_name_for_another_method() -> None:
    hub_client.check_repo_id("user/EAGLE3-for-mine", "eagle3")
    with pytest.raises(ValueError, match="'eagle3'"):
        hub_client.check_repo_id("user/EAGLE3-for-mine", "medusa1")


@pytest.mark.parametrize(("token", "expected"), [(None, "there is no Hugging Face token"), ("hf_loopback_wrong", "does not accept the token (401)")])
def test_a_token_that_will_not_do_is_noticed_before_training(
    hub: Any, client: Client, tiny_arguments: list[str], tmp_path: Path, token: str | None, expected: str
) -> None:
    arguments = arguments_of("eagle3", tiny_arguments, tmp_path / "runs")
    assert expected in the_error(*client("eagle3", *arguments, "--push-to-hub", "user/tokenless", token=token))
    assert not (tmp_path / "runs").exists()


def test_offline_mode_is_noticed_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        hub_client.check_can_upload("user/x")


def test_a_hub_that_is_away_stops_no_training_and_loses_nothing_at_its_end(
    hub: Any, client: Client, runs: Runs, tiny_arguments: list[str], loopback_hub_module: Any
) -> None:
    """The run's stages are done before; only the upload to another repository is not."""
    hub.faults.append(loopback_hub_module.Fault("whoami", times=2, status=503))
    hub.faults.append(loopback_hub_module.Fault("POST .*/commit", status=403))
    arguments = arguments_of("eagle3", tiny_arguments, runs.eagle3.parent)
    code, output = client("eagle3", *arguments, "--push-to-hub", "user/later", "--hub-private")
    error = the_error(code, output)
    assert "warning: checking the token for user/later: the Hub answers 503" in output
    again = f"python -m checkpoints.hub {runs.eagle3} user/later --private"
    assert f"nothing of it is lost; upload it again with `{again}`" in error
    assert client("hub", *again.split()[3:])[0] == 0
    assert hub.repositories["user/later"]["private"] and set(hub.files("user/later")) == EXPORTED | {".gitattributes"}


# --- the engine -----------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_vllm_serves_by_its_name_what_was_uploaded(hub: Any, client: Client, runs: Runs, tmp_path: Path) -> None:
    """The real engine downloads the drafter itself, as the card's command tells it to, and counts drafts."""
    target = engine_target(tmp_path / "target")
    run = Path(shutil.copytree(runs.eagle3, tmp_path / "run", ignore=shutil.ignore_patterns("step_*", "features", "export", "stages")))
    exported = untrained_drafter(target, run / "export")
    code, output = client("hub", run, "user/served", "--base-model", "user/some-target")
    assert code == 0, output
    job = {
        "target": str(target),
        "revision": None,
        "dtype": "float32",
        "max_num_seqs": 1,
        "max_model_len": 64,
        "max_tokens": 8,
        "stop_token_ids": [],
        "prompts": [[1, 2, 3, 4], [9, 8, 7]],
        "speculative": {"method": "eagle3", "model": "user/served", "num_speculative_tokens": 2},
        "reference_outputs": None,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    # Offline for the target, which is a folder, would be offline for the drafter too.
    environment = worker_environment() | hub.environment() | {"HF_HOME": str(tmp_path / "hf_home"), "OMP_NUM_THREADS": "1"}
    command = [str(engine_python()), "-I", str(ROOT / "eval" / "vllm_worker.py"), str(tmp_path / "job.json"), str(tmp_path / "result.json")]
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    counters = json.loads((tmp_path / "result.json").read_text())["counters"]
    assert counters["num_drafts"] > 0
    [downloaded] = (tmp_path / "hf_home").glob("hub/models--user--served/snapshots/*/model.safetensors")
    assert downloaded.read_bytes() == (exported / "model.safetensors").read_bytes()


def engine_target(folder: Path) -> Path:
    """A random Llama whose head dimension vLLM's CPU kernels know."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w5").save_pretrained(folder)
    return folder


def untrained_drafter(target_dir: Path, out_dir: Path) -> Path:
    """An export that the engine loads; what it accepts is the matter of test_engine_parity.py."""
    target, config = TargetConfig(str(target_dir), dtype="float32"), Eagle3Config(draft_vocab_size=80, ttt_steps=1)
    hf_config = LlamaConfig.from_pretrained(target_dir)
    heads = load_target_heads(target, "cpu", torch.float32)
    drafter = load_drafter_class("eagle3")(config, hf_config, heads, DraftVocabulary(tuple(range(16, 96)), 96, 1.0))
    return export_drafter(
        drafter.export_tensors(),
        algorithm="eagle3",
        target_config=hf_config,
        dimensions=draft_dimensions("eagle3", drafter.export_dimensions()),
        aux_layers=drafter.request.aux_layers,
        dtype=torch.float32,
        out_dir=out_dir,
        provenance=Provenance("c0ffee", {}, "random", target_fingerprint(target), "5eed"),
        card="# a drafter",
    )
