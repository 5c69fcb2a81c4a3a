"""The files that say where a run happens are accepted by DeepSpeed and Slurm, and leave to the recipe what it decides."""

import json
import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parent.parent / "launch"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_files_hold_zero_settings_that_deepspeed_knows(stage, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = json.loads((LAUNCH / f"ds_zero{stage}.json").read_text())
    # bf16, micro-batch, accumulation, clipping and optimizer are the recipe's: train/engine.py fills them in.
    assert set(config) <= {"zero_optimization", "wall_clock_breakdown"}
    assert DeepSpeedZeroConfig(**config["zero_optimization"]).stage == stage  # unknown fields raise


def test_hostfile_example_names_two_machines_of_four(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.launcher.runner import fetch_hostfile

    assert fetch_hostfile(str(LAUNCH / "hostfile.example")) == {"node-1": 4, "node-2": 4}


def run_slurm_script(checkout: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs the job script as Slurm would on its first node, with stand-ins for Slurm's own commands."""
    tools = checkout / "tools"
    tools.mkdir()
    (checkout / "launch").mkdir()
    (checkout / "launch" / "train_medusa1.py").touch()
    commands = {"scontrol": r"printf 'gpu-7\ngpu-9\n'", "srun": 'printf "%s\\n" "$@"'}
    for name, body in commands.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_JOB_NODELIST": "gpu-[7,9]",
        "SLURM_JOB_ID": "123456",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    return subprocess.run(["bash", str(LAUNCH / "slurm.sh"), *arguments], env=environment, capture_output=True, text=True)


def test_slurm_script_starts_one_launcher_on_each_node(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "torchrun").touch(mode=0o755)
    finished = run_slurm_script(tmp_path, ["launch/train_medusa1.py", "--name", "two words"])
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [
        "--kill-on-bad-exit=1",
        ".venv/bin/torchrun",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "4",
        "--rdzv-id",
        "123456",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "gpu-7:23456",
        "launch/train_medusa1.py",
        "--name",
        "two words",
    ]


def test_slurm_script_without_an_environment_says_how_to_make_it(tmp_path):
    finished = run_slurm_script(tmp_path, [])
    assert finished.returncode == 2
    assert "make setup TORCH_BUILD=cuda" in finished.stderr


@pytest.mark.parametrize("arguments", [[], ["--name", "my-run"], ["launch/train_medusa7.py"]])
def test_slurm_script_without_a_recipe_says_how_to_name_one(tmp_path, arguments):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "torchrun").touch(mode=0o755)
    finished = run_slurm_script(tmp_path, arguments)
    assert finished.returncode == 2
    assert f"the first argument is '{arguments[0] if arguments else ''}', expected a script of launch/ or recipes/" in finished.stderr


def test_accelerate_reads_its_file_as_four_gpus_of_one_machine():
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(LAUNCH / "accelerate.yaml"))
    assert (config.num_machines, config.num_processes, str(config.distributed_type), config.mixed_precision) == (
        1,
        4,
        "DistributedType.MULTI_GPU",
        "no",
    )


@pytest.mark.parametrize("name", ["slurm.sh", "hostfile.example", "accelerate.yaml"])
def test_each_example_says_what_to_type_for_each_algorithm(name):
    text = (LAUNCH / name).read_text()
    folder = "recipes/" if name == "accelerate.yaml" else "launch/train_"
    assert [algorithm for algorithm in ("eagle1", "eagle3", "medusa1", "medusa2") if f"{folder}{algorithm}.py" not in text] == []
