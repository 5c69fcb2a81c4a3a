"""Every command of docs/ is run, in the order of its page, on a small model, with the real vLLM and a Hub on loopback.

A page's ```bash blocks make one shell session in a copy of the checkout that holds what the pages speak of: my-org/my-model (a small fine-tuned chat
model), conversations.json and, but for own-model.md, which makes it, the finished run runs/my-drafter. A comment right before a block says what is
special about it:

    <!-- server -->                  starts a server: it is waited for, and stays until the page ends or starts another at the same port
    <!-- elsewhere: tests/x.py -->   this machine has not got what it needs; that test runs the same script with a stand-in

`SMALLER` says what a machine with two cores and a model of 512 tokens replace: how many GPUs there are, that vLLM compiles first, and how many tokens
EAGLE-3 may draft (the recipe's 32,000 are more than the model has). Figures on the pages are those of bench/results.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_reader import write_conversations, write_model

from data.vllm_engine import EngineError, engine_python, worker_environment
from eval.measurement import acceptance_from_json
from eval.process_guard import start_guarded, stop_guarded

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"(?:^<!-- (?P<note>.+?) -->\n)?^```bash\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)")
PORT = re.compile(r"--port[ =](\d+)")
SMALLER = {
    "--nproc-per-node 4": "--nproc-per-node 2",
    "--config_file launch/accelerate.yaml": "--config_file launch/accelerate.yaml --num_processes 2",
    "--num_gpus 4": "--num_accelerators 2",
    "vllm serve my-org/my-model": "vllm serve my-org/my-model --enforce-eager",  # without a minute of compiling
}
SMALL_VOCABULARY = (re.compile(r"((?:recipes/|launch/train_)eagle3\.py)"), r"\1 --drafter.draft-vocab-size 256")
COPIED = ("train", "data", "recipes", "checkpoints", "eval", "launch", "bench", "tests", "docs", "Makefile", "pyproject.toml", "README.md")
MAKES_ITS_OWN_RUN = "own-model.md"
FINISHED_RUN = """python recipes/eagle3.py --name my-drafter --target.model my-org/my-model --data.sources conversations.json \\
    --train.batch-tokens 2048 --train.pack-tokens 2048 --train.num-epochs 8 --optim.learning-rate 3e-3
"""
PAGE_LIMIT_S = 600
SERVER_LIMIT_S = 180
GRACE_S = 30.0
TAIL_CHARACTERS = 6000


@dataclass(frozen=True)
class Block:
    """One ```bash block of a page and the comment before it."""

    note: str
    code: str

    @property
    def is_server(self) -> bool:
        return self.note == "server"

    @property
    def elsewhere(self) -> str | None:
        return self.note.removeprefix("elsewhere: ") if self.note.startswith("elsewhere: ") else None

    @property
    def port(self) -> int:
        found = PORT.search(self.code)
        return int(found[1]) if found else 8000


def blocks(text: str) -> list[Block]:
    return [Block(match["note"] or "", match["code"]) for match in BLOCK.finditer(text)]


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def smaller(code: str) -> str:
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    pattern, replacement = SMALL_VOCABULARY
    return pattern.sub(replacement, code)


def script(page: list[Block]) -> str:
    """The blocks as one shell script that ends at the first command that fails."""
    parts = [
        "set -euo pipefail",
        # A server is the only child of the subshell that it is started in.
        "end_server() { kill $(cat /proc/$1/task/$1/children) 2> /dev/null || true; wait $1 || true; }",
        'trap \'for name in ${!server_*}; do end_server "${!name}"; done\' EXIT',
    ]
    for number, block in enumerate(page, start=1):
        if block.elsewhere:
            continue
        parts.append(f"echo '==== block {number}'")
        code = smaller(block.code)
        if not block.is_server:
            parts.append(code)
            continue
        server, log = f"server_{block.port}", f"server_{number}.log"
        parts.append(f'if [ -n "${{{server}:-}}" ]; then end_server "${server}"; fi')
        parts.append(f"(\n{code}\nexit) > {log} 2>&1 < /dev/null &\n{server}=$!")
        parts.append(
            f"for second in $(seq {SERVER_LIMIT_S}); do curl -sf http://localhost:{block.port}/health > /dev/null && break; "
            f"kill -0 ${server} 2> /dev/null || {{ echo 'the server has ended'; exit 1; }}; "
            f"[ $second -lt {SERVER_LIMIT_S} ] || {{ echo 'the server does not answer'; exit 1; }}; sleep 1; done"
        )
    return "\n".join(parts)


def failing_block(page: list[Block], output: str, folder: Path) -> str:
    """What a reader of the test's failure wants to see: the block, what it printed, and the servers' last words."""
    *_, (number, start) = [(0, 0), *((int(match[1]), match.end()) for match in re.finditer(r"^==== block (\d+)$", output, re.MULTILINE))]
    code = smaller(page[number - 1].code) if number else "(before the first block)"
    logs = [f"\n{log.name} ends with:\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("server_*.log"))]
    return f"block {number}:\n\n{code}\nprinted:\n{output[start:][-TAIL_CHARACTERS:]}{''.join(logs)}"


def left_running(marker: str) -> list[int]:
    """The processes that have the marker in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if marker.encode() in environ.read_bytes() and is_running(int(environ.parent.name)):
                found.append(int(environ.parent.name))
    return found


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_page(page: list[Block], folder: Path, environment: dict[str, str]) -> str:
    """Runs the blocks in the folder and ends what they have started; fails with the block that failed, or where something outlives its end."""
    for port in {block.port for block in page if block.is_server}:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)), f"port {port} is taken: end what listens there, the page starts its own server"
    marker = f"HEADSTART_DOCS_PAGE={uuid.uuid4().hex}"
    log = folder / "page.log"
    with log.open("w") as file:
        # Under the guard, so that a test run that is killed leaves nothing behind either.
        guard = start_guarded(["bash", "-c", script(page)], file, environment | dict([marker.split("=")]), folder, GRACE_S)
    try:
        code: int | str = guard.wait(PAGE_LIMIT_S)
    except subprocess.TimeoutExpired:
        code = f"none after {PAGE_LIMIT_S} s"
    finally:
        stop_guarded(guard)
        left = end_left(marker)
    assert code == 0, f"exit code {code}. {failing_block(page, log.read_text(), folder)}"
    assert not left, f"still running, and killed: {left}"
    return log.read_text()


def end_left(marker: str) -> list[int]:
    """Waits for what is just ending, in whatever session, and kills the rest; those that had to be killed."""
    until = time.monotonic() + GRACE_S
    while left := left_running(marker):
        if time.monotonic() > until:
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            return left
        time.sleep(0.1)
    return []


@pytest.fixture(scope="session")
def docs_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's model."""
    folder = tmp_path_factory.mktemp("docs_model") / "my-model"
    torch.set_num_threads(1)
    assert write_model(folder) < 0.6  # It was 6.2 when it had learned nothing.
    return folder


@pytest.fixture(scope="session")
def docs_conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's conversations."""
    path = tmp_path_factory.mktemp("docs_conversations") / "conversations.json"
    write_conversations(path)
    return path


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory, docs_model: Path, docs_conversations: Path) -> Path:
    """A checkout with the reader's model and conversations in it."""
    folder = tmp_path_factory.mktemp("reader") / "headstart"
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    shutil.copytree(docs_model, folder / "my-org" / "my-model")
    shutil.copy(docs_conversations, folder / "conversations.json")
    return folder


@pytest.fixture(scope="session")
def engine_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command `vllm`. That of the CPU build cannot start (eval/vllm_cli.py says why), so it is ours that does the same."""
    try:
        engine = engine_python()
    except EngineError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("tools")
    (folder / "vllm").write_text(f'#!/bin/sh\nexec "{engine}" -I "{ROOT}/eval/vllm_cli.py" "$@"\n')
    (folder / "vllm").chmod(stat.S_IRWXU)
    return folder


@pytest.fixture(scope="session")
def reader_environment(engine_tools: Path) -> dict[str, str]:
    """The environment of the reader's shell, without the Hub."""
    names = ("PYTHONPATH", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    ours = {name: value for name, value in worker_environment().items() if name not in names}
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), str(engine_tools), os.environ["PATH"]])
    return ours | {"PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def finished_run(workplace: Path, reader_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/my-drafter as own-model.md makes it, for the pages that go on from there; made in a place of the same kind."""
    folder = tmp_path_factory.mktemp("finished") / "headstart"
    shutil.copytree(workplace, folder, symlinks=True)
    run_page([Block("", FINISHED_RUN)], folder, reader_environment)
    return folder / "runs"


@pytest.fixture
def place(request: pytest.FixtureRequest, page: Path, workplace: Path, tmp_path: Path) -> Path:
    """A workplace of this page's own."""
    folder = tmp_path / "headstart"
    shutil.copytree(workplace, folder, symlinks=True)
    if page.name != MAKES_ITS_OWN_RUN and any("runs/my-drafter" in block.code for block in blocks(page.read_text())):
        shutil.copytree(request.getfixturevalue("finished_run"), folder / "runs")
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_works(page: Path, place: Path, reader_environment: dict[str, str], loopback_hub: Any) -> None:
    run_page(blocks(page.read_text()), place, reader_environment | loopback_hub.environment())


# --- the pages, without running anything ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_page_has_commands_and_what_it_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    assert text.count("```bash") == len(blocks(text)) > 0, f"{page.name}: a ```bash block is not closed, or there is none"
    for path, anchor in LINK.findall(text):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} points to {path}"
        assert not anchor or anchor in anchors(target.read_text()), f"{page.name} points to #{anchor} of {target.name}"
    for block in blocks(text):
        assert block.note == "" or block.is_server or block.elsewhere, f"{page.name}: what is {block.note!r}?"
        if block.elsewhere:
            names = re.findall(r"[\w./-]+\.(?:sh|py|yaml|example)", block.code)
            assert any(Path(name).stem in (ROOT / block.elsewhere).read_text() for name in names), f"{block.elsewhere} runs none of {names}"


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def page_text(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def short(share: float, digits: int) -> str:
    """A share as the pages write it: .364"""
    return f"{share:.{digits}f}".removeprefix("0")


def test_the_example_of_the_numbers_page_is_what_the_quickstart_measured() -> None:
    text, document = page_text("numbers.md"), results("quickstart.json")
    report, served = document["report"], document["serve"]
    joint = [short(value, 4) for value in report["joint_acceptance"]]
    assert f"| joint acceptance | {' | '.join(joint)} |" in text
    assert f"| conditional acceptance | {' | '.join(short(value, 3) for value in report['conditional_acceptance'])} |" in text
    assert f"tau = 1 + {' + '.join(joint)} = {report['tau']:.3f}" in text
    assert f"{report['num_prompts']} held-out prompts, {report['num_verifications']:,} verifications" in text
    assert f"after {report['train_seconds'] / 60:.1f} minutes of training" in text
    third, given = report["joint_acceptance"][2], report["conditional_acceptance"][2]
    assert f"in {third:.1%} of the verifications, and the third one in {given:.0%}" in text
    assert f"vLLM {served['engine_version']} gave {served['measured']['tau']:.3f} with the same four shares, and all {served['num_outputs']}" in text
    assert served["measured"]["joint_acceptance"] == report["joint_acceptance"] and served["num_identical_outputs"] == served["num_outputs"]
    decoder = report["reference_decoder"]
    ours = f"{decoder['tokens_per_s_plain']:.1f} tokens/s without and {decoder['tokens_per_s']:.1f} with"
    assert ours in text and f"{served['tokens_per_s_plain']:.1f} and {served['tokens_per_s']:.1f} in vLLM" in text


def test_the_recipes_table_is_what_the_bench_measured() -> None:
    text, document = page_text("methods.md"), results("recipes.json")
    for name, row in document["rows"].items():
        low, high = row["tau_interval_95"]
        joint = " ".join(short(value, 3) for value in row["joint_acceptance"])
        line = f"| {row['tau']:.3f} ({low:.3f} to {high:.3f}) | {joint} | {row['tau_untrained']:.3f} | {row['tau_shuffled_states']:.3f} |"
        assert line in text, f"{name}: {line}"
        assert f"{row['num_train_tokens']:,} tokens" in text
    assert f"| bigram table | {document['bigram_table']['tau']:.3f}" in text
    first, third = (document["rows"]["eagle1"]["conditional_acceptance"][draft] for draft in (0, 2))
    assert f"falls from {short(first, 2)} to {short(third, 2)} by the third draft" in text
    backbone = document["rows"]["medusa2"]["backbone"]
    assert f"{backbone['perplexity_before']:.2f} to {backbone['perplexity_after']:.2f}; {backbone['answer_token_agreement']:.1%} of" in text


def test_the_comparison_table_is_what_the_bench_measured() -> None:
    text, document = page_text("methods.md"), results("compare.json")
    for method in document["methods"]:
        acceptance, speeds = method["acceptance"], method["speed_by_batch"]
        low, high = acceptance["tau_interval_95"]
        domains = " | ".join(f"{method['acceptance_by_domain'][domain]['tau']:.2f}" for domain in ("chat", "code", "summarisation", "maths"))
        ratios = f"{speeds['1']['ratio']:.2f} | {speeds['8']['ratio']:.2f}"
        line = f"| {acceptance['tau']:.2f} ({low:.2f} to {high:.2f}) | {domains} | {ratios} | {sum(method['memory'].values()) / 2**20:.1f} |"
        assert line in text, f"{method['name']}: {line}"
        if method["name"] == "n-gram":
            assert f"n-gram's tau between {low:.2f} and {high:.2f}" in text
    about = document["about"]
    assert f"{sum(document['domains'].values())} prompts x {about['max_new_tokens']} tokens, {about['dtype']}" in text
    for name in ("n-gram", "Lookahead, prompt pool", "Lookahead"):
        code, summaries, chat = (acceptance_from_json(document["repetition"][name][domain]) for domain in ("code", "summarisation", "chat"))
        assert f"{(code + summaries).tau:.2f} against {chat.tau:.2f}" in text


# --- the harness itself -----------------------------------------------------------------------------------------------------


def bare_environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page_with_server(port: int, *rest: str) -> list[Block]:
    # A file `health` is what this server answers with.
    server = f"touch health\n{sys.executable} -m http.server --bind 127.0.0.1 --port {port}\n"
    # http.server takes the port as an argument of its own; --port is what the harness reads.
    return [Block("server", server.replace(f"--port {port}", f"{port} # --port {port}")), *(Block("", code) for code in rest)]


def test_blocks_share_one_shell_and_a_server_ends_with_its_page(tmp_path: Path) -> None:
    port = free_port()
    ask = "answer=$(curl -s -o /dev/null -w '%{http_code}' http://localhost:PORT/health)\n"
    page = page_with_server(port, ask.replace("PORT", str(port)), "echo got $answer\n")
    assert "got 200" in run_page(page, tmp_path, bare_environment())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port))


def test_a_second_server_takes_the_port_of_the_first(tmp_path: Path) -> None:
    first = page_with_server(free_port())[0]
    run_page([first, first], tmp_path, bare_environment())
    assert "Address already in use" not in (tmp_path / "server_2.log").read_text()


def test_a_test_run_that_is_killed_leaves_nothing_of_a_page(tmp_path: Path) -> None:
    code = "echo $$ > page_pid\\nsleep 300\\n"
    killed = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]; from pathlib import Path; import test_docs; "
        f"test_docs.run_page([test_docs.Block('', '{code}')], Path({str(tmp_path)!r}), test_docs.bare_environment())"
    )
    runner = subprocess.Popen([sys.executable, "-c", killed])
    until = time.monotonic() + 60
    while not (tmp_path / "page_pid").exists() or not (tmp_path / "page_pid").read_text().strip():
        assert time.monotonic() < until and runner.poll() is None
        time.sleep(0.1)
    page_process = int((tmp_path / "page_pid").read_text())
    runner.kill()
    runner.wait()
    while is_running(page_process):
        assert time.monotonic() < until, "the page outlives its test run"
        time.sleep(0.1)


def test_a_failure_shows_the_block_and_what_it_printed(tmp_path: Path) -> None:
    page = [Block("", "echo fine\n"), Block("", "echo so far\nfalse | cat\necho further\n"), Block("", "echo never\n")]
    with pytest.raises(AssertionError) as caught:
        run_page(page, tmp_path, bare_environment())
    message = str(caught.value)
    assert "exit code 1. block 2:" in message and "false | cat" in message and "so far" in message
    assert "never" not in message and "echo fine" not in message


def test_a_server_that_does_not_start_fails_its_page_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)the server has ended.*no such model"):
        run_page([Block("server", f"echo no such model; exit 1 # --port {free_port()}\n")], tmp_path, bare_environment())


def test_a_taken_port_is_said_before_anything_is_run(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"port {port} is taken"):
            run_page(page_with_server(port), tmp_path, bare_environment())
    assert not (tmp_path / "page.log").exists()


def test_what_outlives_a_page_is_found_in_any_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GRACE_S", 0.5)
    # Once it is called sleep, it is in a session of its own.
    page = [Block("", "setsid sleep 300 > /dev/null 2>&1 < /dev/null &\nuntil grep -q sleep /proc/$!/comm; do sleep 0.1; done\n")]
    with pytest.raises(AssertionError, match="still running, and killed"):
        run_page(page, tmp_path, bare_environment())
