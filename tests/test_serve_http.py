"""The serve check over HTTP: what a sweep writes, what it says of servers that fail, and that nothing is left running; then the real `vllm serve`.

Most tests start tests/tiny_vllm.py, a real server process, in the place of vLLM. The test marked `engine` starts the real one on the models of
tests/table_run.py, whose counts follow by hand.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from table_run import MAX_TOKENS, NUM_DRAFTS, write_table_run

from eval.engine_counters import DraftCounts, draft_counts
from eval.serve import VLLM_VERSION, main
from eval.vllm_server import EngineError, vllm_server

ROOT = Path(__file__).parent.parent
NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("serve_http") / "run"
    write_table_run(run)
    return run


@pytest.fixture
def tiny_vllm(table_run, tmp_path, monkeypatch):
    """Puts tests/tiny_vllm.py in the place of the engine's interpreter; its arguments are the server's faults."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests" / "tiny_vllm.py"}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", str(python))
    plan = tmp_path / "plan.json"
    monkeypatch.setenv("TINY_VLLM", str(plan))
    for name in ("serve_http.json", "serve_http.log", "serve_http.png"):
        (table_run / name).unlink(missing_ok=True)

    def tell(faults: dict | None = None) -> None:
        plan.write_text(json.dumps({"run": str(table_run), **(faults or {})}))

    tell()
    return tell


@contextlib.contextmanager
def own_server(table_run, model="my-model", is_drafting=True):
    """A tiny server of the user's; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target = str(table_run / "target")
    command = [os.environ["HEADSTART_VLLM_PYTHON"], "-I", "vllm", "serve", target, "--port", str(port), "--served-model-name", model]
    process = subprocess.Popen([*command, *(["--speculative-config", "{}"] if is_drafting else [])], stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            with contextlib.suppress(httpx2.TransportError):
                httpx2.get(f"{url}/health")
                break
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def result(run: Path) -> dict:
    return json.loads((run / "serve_http.json").read_text())


def is_gone(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"  # ended, perhaps not yet collected


def wait_until(is_true, seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(0.05)
    return is_true()


# --- what a sweep gives ---------------------------------------------------------------------------------------------------


def test_a_sweep_passes_and_writes_the_keys_of_serve_json_and_its_levels(table_run, tiny_vllm, capsys):
    assert main([str(table_run), "--http", "--concurrency", "1", "3"]) == 0
    written = result(table_run)
    assert set(written) >= {"engine", "engine_version", "ours", "measured", "num_outputs", "num_identical_outputs", "num_near_ties"}
    assert (written["engine_version"], written["is_complete"], written["error"]) == ("0.32.0", True, None)
    assert written["measured"]["joint_acceptance"] == pytest.approx(written["ours"]["joint_acceptance"], abs=1e-6)
    assert written["measured"]["tau"] == pytest.approx(written["ours"]["tau"], abs=1e-6)
    assert [level["concurrency"] for level in written["levels"]] == [1, 3]
    for level in written["levels"]:
        assert (level["num_identical_outputs"], level["num_near_ties"]) == (NUM_PROMPTS, 0)
        assert level["with_drafter"]["num_verifications"] == 10**6 * NUM_PROMPTS
        assert level["without_drafter"]["acceptance"] is None
        assert level["speedup"] == level["with_drafter"]["tokens_per_s"] / level["without_drafter"]["tokens_per_s"]
        for name in ("first_token_s", "later_token_s", "request_s"):
            assert 0 < level["with_drafter"][name]["p50"] <= level["with_drafter"][name]["p99"]
    assert (table_run / "serve_http.png").read_bytes().startswith(b"\x89PNG")
    assert "passed" in capsys.readouterr().out
    arguments = [json.loads(line.split(" ", 1)[1]) for line in (table_run / "serve_http.log").read_text().splitlines() if "arguments " in line[:10]]
    drafted, plain = arguments
    assert json.loads(drafted[drafted.index("--speculative-config") + 1])["num_speculative_tokens"] == NUM_DRAFTS
    assert "--speculative-config" not in plain
    assert drafted[drafted.index("--host") + 1] == "127.0.0.1"  # of this machine only
    assert drafted[drafted.index("--max-num-seqs") + 1] == "3"


def test_latencies_are_of_the_tokens_as_they_arrive(table_run, tiny_vllm):
    """24 tokens in chunks of 3 with 50 ms after each: the first after nothing, the last after 0.4 s; five at once take a fifth."""
    tiny_vllm({"pause": 0.05})
    with own_server(table_run) as url:
        assert main([str(table_run), "--url", url, "--model", "my-model", "--concurrency", "1", "6"]) == 0
        assert httpx2.get(f"{url}/state").json()["most_running"] == 6
    one, six = (level["with_drafter"] for level in result(table_run)["levels"])
    assert one["first_token_s"]["p50"] < 0.05 < 0.4 <= one["request_s"]["p99"] < 1.0
    assert 0.4 / (MAX_TOKENS - 1) <= one["later_token_s"]["p50"] < 0.4
    assert one["seconds"] > 2 * six["seconds"]


def test_acceptance_that_differs_by_more_than_a_hundredth_fails(table_run, tiny_vllm, capsys):
    tiny_vllm({"shift": 0.011})
    assert main([str(table_run), "--http", "--concurrency", "2"]) == 1
    assert "differs by up to 0.0110" in capsys.readouterr().out
    tiny_vllm({"shift": -0.009})
    assert main([str(table_run), "--http", "--concurrency", "2"]) == 0


@pytest.mark.parametrize(("gap", "exit_code"), [(0.5, 1), (1e-5, 0)])
def test_a_changed_output_fails_unless_the_best_two_are_nearly_tied(table_run, tiny_vllm, capsys, gap, exit_code):
    tiny_vllm({"change": [3], "gap": gap})
    assert main([str(table_run), "--http", "--concurrency", "2"]) == exit_code
    assert result(table_run)["num_identical_outputs"] == NUM_PROMPTS - 1
    assert result(table_run)["num_near_ties"] == (exit_code == 0)
    assert "prompt 3 differs from token" in capsys.readouterr().out


# --- a server that fails --------------------------------------------------------------------------------------------------


def test_a_server_that_does_not_start_shows_the_end_of_its_log(table_run, tiny_vllm, capsys):
    tiny_vllm({"start": "the kernel is not for this machine"})
    assert main([str(table_run), "--http"]) == 2
    error = capsys.readouterr().err
    assert "vllm serve ended with code 1" in error
    assert "the kernel is not for this machine" in error


def test_a_server_killed_in_mid_request_is_named_with_its_log_and_loses_no_finished_level(table_run, tiny_vllm, capsys):
    tiny_vllm({"die_after": NUM_PROMPTS + 4})
    assert main([str(table_run), "--http", "--concurrency", "1", "2"]) == 2
    error = capsys.readouterr().err
    assert "answers at concurrency 2: vllm serve ended with code 9" in error
    assert "the engine has lost its memory" in error
    written = result(table_run)
    assert not written["is_complete"]
    assert "ended with code 9" in written["error"]
    assert [level["concurrency"] for level in written["levels"]] == [1]
    assert written["measured"]["tau"] == pytest.approx(written["ours"]["tau"], abs=1e-6)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(table_run, tiny_vllm, capsys, status):
    tiny_vllm({"busy": 3, "busy_status": status, "retry_after": 0.2})
    started = time.monotonic()
    assert main([str(table_run), "--http", "--concurrency", "1"]) == 0
    assert time.monotonic() - started < 25
    assert result(table_run)["num_identical_outputs"] == NUM_PROMPTS


def test_a_server_that_stays_busy_is_given_up(table_run, tiny_vllm, capsys):
    tiny_vllm({"busy": 10**6, "retry_after": 0})
    assert main([str(table_run), "--http", "--concurrency", "1"]) == 2
    assert "did not answer 6 times, the last time with 429: too much to do" in capsys.readouterr().err


def test_an_answer_that_breaks_off_is_asked_for_again_and_the_count_says_so(table_run, tiny_vllm, capsys):
    tiny_vllm({"cut": 2})
    assert main([str(table_run), "--http", "--concurrency", "1"]) == 0
    assert result(table_run)["levels"][0]["with_drafter"]["num_retries"] == 2
    assert "2 requests were tried again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"status": 400}, "answers 400: it cannot"),
        ({"without_ids": True}, "without token ids"),
        ({"without_counters": True}, "has no vllm:spec_decode_num_drafts_total"),
        ({"version": "0.9.1"}, "vLLM 0.9.1, too old: 0.10.2 or newer is needed"),
        ({"name": "another/model"}, "serves another/model, expected"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_clear_line(table_run, tiny_vllm, capsys, faults, said):
    tiny_vllm(faults)
    assert main([str(table_run), "--http", "--concurrency", "1"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_another_version_is_measured_with_a_warning(table_run, tiny_vllm, capsys):
    tiny_vllm({"version": "0.33.1+cpu"})
    assert main([str(table_run), "--http", "--concurrency", "1"]) == 0
    assert f"the server is vllm 0.33.1+cpu; our exports are checked with {VLLM_VERSION}" in " ".join(capsys.readouterr().out.split())


def test_a_server_that_is_never_healthy_is_given_up(table_run, tmp_path, monkeypatch, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho loading; sleep 600\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", str(python))
    assert main([str(table_run), "--http", "--timeout-s", "1"]) == 2
    assert "not healthy after 1 s" in capsys.readouterr().err


# --- a server of the user's -----------------------------------------------------------------------------------------------


def test_a_server_of_the_users_is_measured_and_left_running(table_run, tiny_vllm, capsys):
    with own_server(table_run) as url, own_server(table_run, is_drafting=False) as plain_url:
        assert main([str(table_run), "--url", f"{url}/v1", "--plain-url", plain_url, "--concurrency", "2"]) == 0
        assert httpx2.get(f"{url}/health").status_code == 200
    assert result(table_run)["levels"][0]["speedup"] > 0


def test_without_a_plain_server_outputs_are_compared_with_our_own_answers(table_run, tiny_vllm):
    with own_server(table_run) as url:
        assert main([str(table_run), "--url", url, "--concurrency", "2"]) == 0
    [level] = result(table_run)["levels"]
    assert (level["num_identical_outputs"], level["speedup"], level["without_drafter"]) == (NUM_PROMPTS, None, None)


def test_a_server_with_another_model_is_refused(table_run, tiny_vllm, capsys):
    with own_server(table_run, model="llama") as url:
        assert main([str(table_run), "--url", url, "--model", "mistral"]) == 2
    assert "serves llama, expected mistral" in capsys.readouterr().err


def test_a_server_with_another_number_of_drafts_is_refused_before_the_prompts_are_answered(table_run, tiny_vllm, capsys):
    tiny_vllm({"num_drafts": NUM_DRAFTS - 1})
    with own_server(table_run) as url:
        assert main([str(table_run), "--url", url, "--concurrency", "2"]) == 2
        assert httpx2.get(f"{url}/state").json()["answers"] == 0
    error = capsys.readouterr().err
    assert f"the server drafts {NUM_DRAFTS - 1} tokens at a time, but the run was measured with {NUM_DRAFTS}" in error
    assert f"start it with num_speculative_tokens {NUM_DRAFTS}" in error


def test_a_key_comes_from_the_environment_and_a_missing_one_is_named(table_run, tiny_vllm, monkeypatch, capsys):
    tiny_vllm({"key": "s3cret"})
    with own_server(table_run) as url:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        assert main([str(table_run), "--url", url]) == 2
        assert "refuses the key (401): set OPENAI_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
        assert main([str(table_run), "--url", url, "--concurrency", "1"]) == 0
    assert "s3cret" not in (table_run / "serve_http.json").read_text() + "".join(capsys.readouterr())


def test_no_server_at_the_url_is_one_clear_line(table_run, tiny_vllm, capsys):
    assert main([str(table_run), "--url", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9/v1/models does not list the served models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", "2"], "concurrency has no effect without --http"),
        (["--http", "--max-num-seqs", "2"], "max-num-seqs has no effect with --http"),
        (["--http", "--plain-url", "http://x"], "no effect without --url"),
        (["--http", "--concurrency", "0"], "expected positive numbers"),
        (["--engine", "sglang"], "start it with `python -m sglang.launch_server"),
        (["--url", "ftp://x"], "http://HOST:PORT"),
        (["--url", "http://me:secret@host:8000"], "OPENAI_API_KEY"),
        (["--url", "http://localhost:abc"], "http://HOST:PORT"),
    ],
)
def test_a_setting_without_effect_or_sense_is_refused(table_run, tiny_vllm, capsys, arguments, said):
    with contextlib.suppress(SystemExit):  # of tyro, with 2, where the arguments alone are wrong
        assert main([str(table_run), *arguments]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert "secret" not in error


# --- the end of a server --------------------------------------------------------------------------------------------------


def pids(path: Path) -> list[int]:
    assert wait_until(lambda: path.exists() and len(path.read_text().split()) == 2)
    return [int(word) for word in path.read_text().split()]


def test_a_server_and_what_it_started_are_gone_after_the_block_and_after_an_error(table_run, tiny_vllm, tmp_path):
    for error in (None, RuntimeError("in the block")):
        tiny_vllm({"child": str(tmp_path / f"pids-{error}")})
        with contextlib.suppress(RuntimeError), vllm_server(str(table_run / "target"), log=tmp_path / "log") as server:
            started = pids(tmp_path / f"pids-{error}")
            assert not any(map(is_gone, started))
            assert httpx2.get(f"{server.base_url}/v1/models").json()["data"][0]["id"] == server.model
            if error:
                raise error
        assert all(map(is_gone, started))
    with pytest.raises(EngineError, match="ended with code"):
        server.require_alive()


@pytest.mark.slow
def test_ending_the_check_ends_its_server(table_run, tiny_vllm, tmp_path):
    """By Ctrl-C, by a batch system, and by force; all three at once, each with a run of its own."""
    ways = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    checks, servers = {}, {}
    for number in ways:
        run = shutil.copytree(table_run, tmp_path / number.name)
        tiny_vllm({"child": str(run / "pids"), "pause": 0.5})
        plan = shutil.copy(os.environ["TINY_VLLM"], run / "plan.json")
        command = [sys.executable, "-m", "eval.serve", str(run), "--http"]
        environment = {**os.environ, "TINY_VLLM": str(plan)}
        checks[number] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for number in ways:
        servers[number] = pids(tmp_path / number.name / "pids")
    time.sleep(1.5)  # in the middle of the first answers
    for number, check in checks.items():
        check.send_signal(number)
        _, error = check.communicate(timeout=300)
        assert check.returncode == ways[number]
        assert "Traceback" not in error
        assert wait_until(lambda pids=servers[number]: all(map(is_gone, pids)))
    assert json.loads((tmp_path / "SIGINT" / "serve_http.json").read_text())["error"] == "interrupted"


@pytest.mark.slow
def test_a_killed_offline_engine_ends_too(table_run, tmp_path, monkeypatch):
    """The engine without a server is guarded in the same way."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {tmp_path / 'pids'}\nwait\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "HEADSTART_VLLM_PYTHON": str(python)}
    process = subprocess.Popen([sys.executable, "-m", "eval.serve", str(table_run)], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    started = pids(tmp_path / "pids")
    process.kill()
    process.wait()
    assert wait_until(lambda: all(map(is_gone, started)))


# --- counters -------------------------------------------------------------------------------------------------------------

VLLM_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.78e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 0.0
"""


def test_counters_are_summed_over_engines_and_ordered_by_position():
    assert draft_counts(VLLM_METRICS, "vllm") == DraftCounts(15, 40, 11, (8, 3))


def test_counters_that_go_back_are_a_restarted_server():
    with pytest.raises(EngineError, match="started again"):
        DraftCounts(3, 6, 1, (1,)).since(DraftCounts(4, 8, 1, (1,)))


def test_sglang_counts_accepted_drafts_by_what_is_left_of_its_tokens():
    """3 requests of 40 tokens together: 3 from the prompts, 20 from verifications, so 17 drafts were accepted."""
    text = """\
sglang:spec_accept_length{model_name="m"} 1.5
sglang:spec_verify_calls_total{model_name="m"} 20.0
sglang:generation_tokens_total{model_name="m",is_streaming="true"} 30.0
sglang:generation_tokens_total{model_name="m",is_streaming="false"} 10.0
sglang:num_requests_total{model_name="m",is_streaming="true"} 3.0
"""
    assert draft_counts(text, "sglang") == DraftCounts(20, None, 17, ())
    assert draft_counts('sglang:spec_accept_length{model_name="m"} 0.0\n', "sglang") == DraftCounts(0, None, 0, ())
    with pytest.raises(EngineError, match="--enable-metrics"):
        draft_counts(VLLM_METRICS, "sglang")


# --- the real one ---------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_real_server_counts_what_the_table_says_and_changes_no_output_at_any_concurrency(table_run, monkeypatch):
    """One request at a time is exact; with more, a batch near the longest context would be left without drafts (`RunFiles.max_model_len`)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([str(table_run), "--http", "--concurrency", "1", "2", "4"]) == 0
    written = result(table_run)
    assert written["engine_version"].startswith(VLLM_VERSION)
    assert written["measured"]["joint_acceptance"] == pytest.approx(written["ours"]["joint_acceptance"], abs=1e-12)
    assert written["measured"]["tau"] == pytest.approx(written["ours"]["tau"], abs=1e-12)
    for level in written["levels"]:
        drafted = level["with_drafter"]
        assert level["num_identical_outputs"] == NUM_PROMPTS
        assert drafted["acceptance"]["tau"] == pytest.approx(written["ours"]["tau"], abs=0.15)
        assert drafted["num_drafted"] == NUM_DRAFTS * drafted["num_verifications"]
    own = {str(os.getpid())}
    left = [path for path in Path("/proc").glob("[0-9]*") if str(table_run) in _command_line(path) and path.name not in own]
    assert left == []


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text().replace("\0", " ") + (process / "environ").read_text(errors="replace")
    except OSError:
        return ""
