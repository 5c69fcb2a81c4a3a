"""A launch whose processes do not know of each other, or whose machines do not share the run's folder, ends before it does harm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import train.launcher
from train.launcher import check_launcher, check_shared_folder, hold_run_folder

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TORCHRUN,
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},  # a shell on a node of a job
        {"SLURM_STEP_NUM_TASKS": "2", **TORCHRUN},  # one torchrun a node
        {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", **TORCHRUN},
        {"ACCELERATE_USE_CPU": "True"},
    ],
)
def test_launches_that_can_be_meant_are_let_through(environment: dict[str, str]) -> None:
    check_launcher(environment)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 processes that do not know of each other"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 processes"),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, "on a CPU accelerate starts one process"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16", **TORCHRUN}, r"--mixed_precision \(ACCELERATE_MIXED_PRECISION=bf16\) .* --train.precision bf16"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", **TORCHRUN}, "--use_deepspeed .* use launch/train_<algorithm>.py"),
        ({"ACCELERATE_USE_FSDP": "true", **TORCHRUN}, "--use_fsdp .*ds_zero3.json"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", **TORCHRUN}, "--dynamo_backend .* configuration file$"),
    ],
)
def test_launches_that_would_do_something_else_than_they_say_are_an_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_launcher(environment)


@pytest.mark.slow
def test_a_recipe_that_srun_started_twice_ends_with_one_line_and_writes_nothing(tmp_path: Path) -> None:
    recipe = Path(__file__).resolve().parent.parent / "recipes" / "eagle3.py"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | {"SLURM_STEP_NUM_TASKS": "2"}
    command = [sys.executable, str(recipe), "--name", "x", "--runs-dir", str(tmp_path / "runs"), "--target.model", "no/such"]
    finished = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1].startswith("error: srun has started 2 processes that do not know of each other")
    assert not (tmp_path / "runs").exists()


class TwoRanks:
    """One of two ranks, whose other one is done with everything that it does: `written` is the folder of that one."""

    world_size = 2

    def __init__(self, rank: int, written: Path, number: int = 7) -> None:
        self.rank, self._written, self._number = rank, written, number

    def barrier(self) -> None:
        if self.rank == 1 and self._written.exists():
            (self._written / f".rank0-{self._number}").touch()

    def sum(self, values: Sequence[float]) -> list[float]:
        return [values[0] + (self._number if self.rank == 1 else 0)]


def test_a_rank_that_sees_what_rank_0_writes_goes_on(tmp_path: Path) -> None:
    check_shared_folder(tmp_path, TwoRanks(1, tmp_path))


def test_a_rank_on_a_folder_of_its_own_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.launcher, "_APPEARS_S", 0.3)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"rank 1 on .* does not see what rank 0 writes to .*here: .* on a file system that all of them share"):
        check_shared_folder(tmp_path / "here", TwoRanks(1, tmp_path / "there"))


def test_rank_0_leaves_nothing_behind(tmp_path: Path) -> None:
    check_shared_folder(tmp_path, TwoRanks(0, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_one_process_has_nobody_to_share_with(tmp_path: Path) -> None:
    ranks: Any = TwoRanks(1, tmp_path)
    ranks.world_size = 1
    check_shared_folder(tmp_path / "not there", ranks)


HOLDER = """
import sys
from pathlib import Path
from train.launcher import hold_run_folder
held = hold_run_folder(Path(sys.argv[1]))
print(1, flush=True)
input()
"""


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_gone_however_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline()
        with pytest.raises(ValueError, match=r"run is in use by another run: wait for it, end it, or choose another --name"):
            hold_run_folder(tmp_path / "run")
        first.kill()
        first.wait()
    hold_run_folder(tmp_path / "run").close()
