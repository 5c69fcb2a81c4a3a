"""The serve check tells a drafter that serves as measured from one that does not; and the real vLLM serves what we export.

Most tests put a small script in the place of the engine's interpreter. The test marked `engine` runs the real vLLM on the models of
tests/table_run.py: the counts to expect follow by hand.
"""

import json
import re
import shutil
import stat
import time
from pathlib import Path

import pytest
from table_run import ALSO_STOPS, MAX_TOKENS, NUM_DRAFTS, STOP, write_table_run

from eval.serve import VLLM_VERSION, main
from eval.vllm_worker import subtract


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("serve") / "run"
    write_table_run(run)
    return run


def test_the_table_run_has_something_to_find(table_run):
    """Some drafts are accepted at every position and some are not; some answers end early, some at the limit."""
    joint = json.loads((table_run / "report.json").read_text())["joint_acceptance"]
    assert 0.95 > joint[0] > joint[1] >= joint[2] > 0.05
    answers = [json.loads(line)["answer_ids"] for line in (table_run / "answers" / "answers.jsonl").read_text().splitlines()]
    assert {len(answer) == MAX_TOKENS for answer in answers} == {True, False}


FAKE_ENGINE = """#!/usr/bin/env python3
import json, sys
assert sys.argv[1] == "-I" and sys.argv[2].endswith("vllm_worker.py")
job = json.load(open(sys.argv[3]))
answers = [json.loads(line)["answer_ids"] for line in open(RUN + "/answers/answers.jsonl")]
is_plain = job["speculative"] is None
result = dict(engine_version="9.9", outputs=answers, seconds=2.0 if is_plain else 1.0, counters=None, gaps=[])
if not is_plain:
    joint = json.load(open(RUN + "/report.json"))["joint_acceptance"]
    accepted = [round(10**6 * share) for share in joint]
    result["counters"] = dict(num_drafts=10**6, num_accepted=sum(accepted), accepted_per_position=accepted)
BODY
json.dump(result, open(sys.argv[4], "w"))
"""


@pytest.fixture
def fake_engine(table_run, tmp_path, monkeypatch):
    """Puts a script in the place of the engine's interpreter; its argument is Python that changes the result."""

    def install(body: str = "") -> None:
        script = tmp_path / "python"
        script.write_text(FAKE_ENGINE.replace("BODY", body).replace("RUN", repr(str(table_run))))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("HEADSTART_VLLM_PYTHON", str(script))
        (table_run / "serve.json").unlink(missing_ok=True)

    return install


def serve_json(run: Path) -> dict:
    return json.loads((run / "serve.json").read_text())


def test_agreement_passes_and_writes_the_named_keys(table_run, fake_engine, capsys):
    fake_engine()
    assert main([str(table_run)]) == 0
    written = serve_json(table_run)
    assert set(written) == {
        "engine",
        "engine_version",
        "ours",
        "measured",
        "num_outputs",
        "num_identical_outputs",
        "num_near_ties",
        "tokens_per_s",
        "tokens_per_s_plain",
    }
    assert set(written["ours"]) == set(written["measured"]) == {"tau", "joint_acceptance"}
    assert (written["engine"], written["engine_version"]) == ("vllm", "9.9")
    assert written["num_identical_outputs"] == written["num_outputs"] == 12
    assert written["tokens_per_s"] == 2 * written["tokens_per_s_plain"]
    assert "passed" in capsys.readouterr().out


@pytest.mark.parametrize(("shift", "exit_code"), [(9_000, 0), (-9_000, 0), (11_000, 1), (-11_000, 1)])
def test_acceptance_may_differ_by_a_hundredth_and_no_more(table_run, fake_engine, shift, exit_code):
    fake_engine(f"if not is_plain: accepted[1] += {shift}")
    assert main([str(table_run)]) == exit_code


def test_a_changed_output_fails_unless_the_best_two_are_nearly_tied(table_run, fake_engine, capsys):
    change = "if is_plain: answers[3][2] += 1; result['gaps'] = [dict(prompt=3, position=2, gap={gap})]"
    fake_engine(change.format(gap=0.5))
    assert main([str(table_run)]) == 1
    assert (serve_json(table_run)["num_identical_outputs"], serve_json(table_run)["num_near_ties"]) == (11, 0)
    fake_engine(change.format(gap=1e-5))
    assert main([str(table_run)]) == 0
    assert (serve_json(table_run)["num_identical_outputs"], serve_json(table_run)["num_near_ties"]) == (11, 1)
    assert "prompt 3 differs from token 2" in capsys.readouterr().out


def test_both_runs_get_the_same_greedy_job(table_run, fake_engine, tmp_path):
    fake_engine(f"json.dump(job, open({str(tmp_path)!r} + ('/plain' if is_plain else '/drafted'), 'w'))")
    main([str(table_run)])
    plain, drafted = (json.loads((tmp_path / name).read_text()) for name in ("plain", "drafted"))
    assert drafted["speculative"]["method"] == "eagle3"
    assert drafted["speculative"]["num_speculative_tokens"] == NUM_DRAFTS
    assert plain["reference_outputs"] is not None
    assert drafted["stop_token_ids"] == [STOP, ALSO_STOPS]
    assert drafted["max_tokens"] == MAX_TOKENS
    different = {name for name in plain if plain[name] != drafted[name]}
    assert different == {"speculative", "reference_outputs"}


@pytest.mark.parametrize("text", ['{"tau": ', "[]"])
def test_a_damaged_report_is_named(table_run, fake_engine, tmp_path, capsys, text):
    run = shutil.copytree(table_run, tmp_path / "run")
    (run / "report.json").write_text(text)
    assert main([str(run)]) == 2
    assert "report.json is damaged" in capsys.readouterr().err


def test_a_run_that_cannot_be_written_to_is_one_line(table_run, fake_engine, tmp_path, capsys):
    run = shutil.copytree(table_run, tmp_path / "run")
    (run / "serve.log").unlink(missing_ok=True)
    (run / "serve.log").mkdir()
    assert main([str(run)]) == 2
    error = capsys.readouterr().err
    assert "serve.log" in error and error.count("\n") == 1


def test_an_engine_that_fails_shows_the_end_of_its_log(table_run, fake_engine, capsys):
    fake_engine("print('line', *range(3)); sys.exit('the kernel is not for this machine')")
    assert main([str(table_run)]) == 2
    error = capsys.readouterr().err
    assert "ended with code 1" in error
    assert "the kernel is not for this machine" in error
    assert "line 0 1 2" in (table_run / "serve.log").read_text()
    assert not (table_run / "serve.json").exists()


def test_an_engine_that_hangs_is_ended_with_all_it_started(table_run, fake_engine, tmp_path, capsys):
    pid_file = tmp_path / "pid"
    fake_engine(
        "import subprocess, time; child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    started = time.monotonic()
    assert main([str(table_run), "--timeout-s", "6"]) == 2
    assert time.monotonic() - started < 20
    assert "longer than 6 s" in capsys.readouterr().err
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"  # ended, perhaps not yet collected


def test_without_an_engine_the_one_command_is_named(table_run, monkeypatch, capsys):
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", "/nowhere/bin/python")
    assert main([str(table_run)]) == 2
    assert "make vllm" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "report.json", "answers/answers.jsonl", "export/config.json"])
def test_an_incomplete_run_is_named_by_the_missing_file(table_run, fake_engine, capsys, name):
    fake_engine()
    path = table_run / name
    path.rename(path.with_suffix(".away"))
    try:
        assert main([str(table_run)]) == 2
    finally:
        path.with_suffix(".away").rename(path)
    assert f"{path} is missing" in capsys.readouterr().err


def test_a_report_of_other_prompts_is_refused(table_run, fake_engine, capsys):
    fake_engine()
    path = table_run / "report.json"
    report = path.read_text()
    path.write_text(json.dumps(json.loads(report) | {"num_prompts": 99}))
    try:
        assert main([str(table_run)]) == 2
    finally:
        path.write_text(report)
    assert "99 prompts" in capsys.readouterr().err


def test_counts_are_those_of_the_measured_time_only():
    before = {"num_drafts": 2, "num_accepted": 3, "accepted_per_position": [2, 1]}
    after = {"num_drafts": 12, "num_accepted": 10, "accepted_per_position": [7, 3]}
    assert subtract(after, before) == {"num_drafts": 10, "num_accepted": 7, "accepted_per_position": [5, 2]}
    with pytest.raises(RuntimeError, match="num_accepted"):
        subtract({"num_drafts": 1}, {})


def test_the_makefile_installs_the_version_that_the_contract_was_read_from():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert re.search(r"^VLLM_VERSION := (.*)$", makefile, re.MULTILINE)[1] == VLLM_VERSION


@pytest.mark.engine
def test_vllm_counts_what_the_table_says(table_run, monkeypatch):
    """Exact equality: the shift, the offsets of d2t, the default layers and the stop tokens all have to be right."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main([str(table_run)]) == 0
    written = serve_json(table_run)
    assert written["engine_version"].startswith(VLLM_VERSION)
    assert written["measured"]["joint_acceptance"] == pytest.approx(written["ours"]["joint_acceptance"], abs=1e-12)
    assert written["measured"]["tau"] == pytest.approx(written["ours"]["tau"], abs=1e-12)
    assert written["num_identical_outputs"] == 12
