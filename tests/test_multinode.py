"""Two nodes, by every launcher that the examples in launch/ name, end like one process; and a node that dies loses nothing.

Both nodes are this machine: 127.0.0.1 and 127.0.0.2, one process each, on the CPU. Real are the launchers, the processes and what they say to each
other over TCP; ssh, sshd and pdsh too, where they are installed. Stand-ins are Slurm's own commands, and otherwise pdsh and ssh, which run here what
they would run there: without the caller's variables, as sshd does.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from same_run import assert_same_run

pytestmark = pytest.mark.slow

BINARIES = Path(sys.executable).parent
TIMEOUT_S = 180
LAST_STEP = ("--train.heldout-every", "6")
# Of a launcher around this test run, none may come through.
NOT_OURS = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OURS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, launcher_in: Any) -> Path:
    """The run that one process takes."""
    launcher = launcher_in(tmp_path_factory.mktemp("reference"))
    launcher.here("plain", *LAST_STEP)
    return launcher.runs_dir / "plain"


def free_port() -> int:
    """One that launch/slurm.sh can derive from a job's number."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Node:
    """A command on one node, in a process group of its own."""

    def __init__(self, command: list[str], folder: Path, log: Path, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in NOT_OURS} | OURS | variables
        self._log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s:\n{self.output[-3000:]}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(launcher: Any) -> Iterator[Any]:
    """Starts commands on nodes; what is still running at the end is killed."""
    nodes: list[Node] = []

    def start_node(command: list[str], folder: Path | None = None, **variables: str) -> Node:
        node = Node(command, folder or launcher.runs_dir, launcher.runs_dir / f"node_{len(nodes)}.log", **variables)
        nodes.append(node)
        return node

    yield start_node
    for node in nodes:
        node.kill()
    launcher.clear_shared_memory()


def assert_both_end_well(*nodes: Node) -> None:
    for node in nodes:
        assert node.wait() == 0, node.output[-3000:]


def options(launcher: Any, name: str, *overrides: str) -> list[str]:
    return ["--name", name, "--runs-dir", str(launcher.runs_dir), *launcher.arguments, *LAST_STEP, *overrides]


def write_tool(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


# --- accelerate -----------------------------------------------------------------------------------------------------------


def test_accelerate_on_two_machines_ends_like_one_process(launcher: Any, start: Any, reference: Path) -> None:
    machines = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    command = [str(BINARIES / "accelerate"), "launch", "--config_file", str(launcher.checkout / "launch" / "accelerate.yaml"), *machines]
    script = [str(launcher.checkout / "recipes" / "eagle3.py"), *options(launcher, "two")]
    assert_both_end_well(*(start([*command, "--machine_rank", str(rank), *script]) for rank in range(2)))
    assert_same_run(launcher.runs_dir / "two", reference)


# --- deepspeed and a hostfile ---------------------------------------------------------------------------------------------


def write_hostfile(folder: Path) -> Path:
    (folder / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    return folder / "hosts"


def start_without_ssh(launcher: Any, start: Any, *overrides: str) -> list[Node]:
    where = ["--hostfile", str(write_hostfile(launcher.runs_dir)), "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    script = [str(launcher.checkout / "launch" / "train_eagle3.py"), *options(launcher, "two", *overrides)]
    return [start([str(BINARIES / "deepspeed"), *where, "--node_rank", str(rank), *script]) for rank in range(2)]


def test_a_node_that_dies_ends_the_other_and_the_same_command_goes_on(launcher: Any, start: Any, reference: Path) -> None:
    run_dir = launcher.runs_dir / "two"
    nodes = start_without_ssh(launcher, start, "--train.save-every", "1")
    until = time.monotonic() + TIMEOUT_S
    while not list(run_dir.glob("step_[1-6]")):
        assert time.monotonic() < until and all(node.process.poll() is None for node in nodes), nodes[0].output[-3000:]
        time.sleep(0.005)
    nodes[1].kill()
    assert nodes[0].wait(60) != 0, "it ended before the kill: nothing is tested"
    assert "another rank has stopped" in nodes[0].output, nodes[0].output[-3000:]
    assert not (run_dir / "export").exists()

    again = start_without_ssh(launcher, start, "--train.save-every", "1")
    assert_both_end_well(*again)
    assert "[extract] done before" in again[0].output
    assert "rank 0: steps 0 to 6" not in again[0].output and " to 6 on cpu" in again[0].output
    assert_same_run(run_dir, reference)


# Runs a command on every host of -w, as pdsh does: %n is the host's number, the exit code (-S) the largest; each side is logged like ssh's.
PDSH = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[sys.argv.index("-w") + 2 :]
commands = [" ".join(words).replace("%n", str(n)) for n, _ in enumerate(sys.argv[sys.argv.index("-w") + 1].split(","))]
open("ssh.log", "a").write("".join(f"{{command}}\\n" for command in commands))
bare = {{name: os.environ[name] for name in ("HOME", "PATH")}}
sys.exit(max([process.wait() for process in [subprocess.Popen(["/bin/sh", "-c", command], env=bare) for command in commands]]))
"""
SSH = """#!/bin/sh
case "$*" in *"hostname -I") echo 127.0.0.1;; esac
"""
SSHD_CONFIG = """Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/key
PidFile {folder}/pid
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
SSH_CONFIG = """Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
HAS_SSH = SSHD is not None and shutil.which("pdsh") is not None and shutil.which("ssh-keygen") is not None


@pytest.fixture
def ssh_options(launcher: Any, start: Any) -> list[str]:
    """Has `ssh` and `pdsh` in the folder `tools` reach both nodes: the real ones and an sshd of this test's own where they are installed."""
    tools = launcher.runs_dir / "tools"
    if not HAS_SSH:
        write_tool(tools, "pdsh", PDSH)
        write_tool(tools, "ssh", SSH)
        return []
    folder, port = launcher.runs_dir / "sshd", free_port()
    folder.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(port=port, folder=folder))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
    if os.geteuid() == 0:  # then sshd wants it
        Path("/run/sshd").mkdir(exist_ok=True)
    start([str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")])
    real = shutil.which("ssh")
    write_tool(tools, "ssh", f"""#!/bin/sh\necho "$*" >>{launcher.runs_dir}/ssh.log\nexec {real} -F {folder}/ssh_config "$@"\n""")
    return ["--ssh_port", str(port), "--master_addr", "127.0.0.1"]


def test_a_hostfile_with_ssh_ends_like_one_process_and_takes_the_stated_variables_along(
    launcher: Any, start: Any, reference: Path, ssh_options: list[str]
) -> None:
    # Both in the folder in which the launcher is started; without the second, ranks would have as many threads as the machine has cores.
    (launcher.runs_dir / ".deepspeed_env").write_text("HF_HUB_OFFLINE=1\nOMP_NUM_THREADS=1\n")
    where = ["--hostfile", str(write_hostfile(launcher.runs_dir)), "--master_port", str(free_port()), *ssh_options]
    script = [str(launcher.checkout / "launch" / "train_eagle3.py"), *options(launcher, "two")]
    path = f"{launcher.runs_dir / 'tools'}:{os.environ['PATH']}"
    assert_both_end_well(start([str(BINARIES / "deepspeed"), *where, *script], PATH=path, WANDB_MODE="offline"))
    assert_same_run(launcher.runs_dir / "two", reference)
    sent = [line for line in (launcher.runs_dir / "ssh.log").read_text().splitlines() if "deepspeed.launcher.launch" in line]
    assert len(sent) == 2
    for number, line in enumerate(sorted(sent, key=lambda line: line[line.index("--node_rank") :])):
        assert f"--node_rank={number} --master_addr=127.0.0.1" in line
        assert "export HF_HUB_OFFLINE=1; " in line and "export OMP_NUM_THREADS=1; " in line
        assert "WANDB_MODE" not in line  # which is why launch/hostfile.example tells of .deepspeed_env


# --- Slurm ----------------------------------------------------------------------------------------------------------------

SBATCH = """#!/bin/bash
# Slurm runs a copy of the script, on the first node.
copy=$(mktemp); cp "$1" "$copy"; shift
export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NODELIST='127.0.0.[1-2]' SLURM_NNODES=2 SLURM_NODEID=0 SLURM_PROCID=0
export SLURM_GPUS_ON_NODE=1 SLURM_CPUS_PER_TASK=1
exec bash "$copy" "$@"
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames 127.0.0.[1-2]" ] && printf '127.0.0.1\\n127.0.0.2\\n'
"""
SRUN = """#!/bin/bash
# The command once a node; the first that fails ends the others.
[[ $1 = --kill-on-bad-exit=1 ]] && shift
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2 "$@" &
done
wait -n || { code=$?; kill %1 %2 2>/dev/null; exit $code; }
wait -n
"""


@pytest.mark.parametrize("how", ["torchrun", "deepspeed"])
def test_the_slurm_job_on_two_nodes_ends_like_one_process(launcher: Any, start: Any, reference: Path, how: str) -> None:
    submitted = launcher.runs_dir / "checkout"
    submitted.mkdir()
    for name in ("launch", "recipes", "train", "data", "eval", "checkpoints"):
        (submitted / name).symlink_to(launcher.checkout / name)
    (submitted / ".venv").symlink_to(BINARIES.parent)
    tools = launcher.runs_dir / "tools"
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN}.items():
        write_tool(tools, name, text)
    command = [str(tools / "sbatch"), "launch/slurm.sh", "launch/train_eagle3.py", *options(launcher, "two")]
    job = {"PATH": f"{tools}:{os.environ['PATH']}", "LAUNCHER": how, "SLURM_JOB_ID": str(40000 + free_port() - 20000)}
    node = start(command, submitted, **job)
    assert_both_end_well(node)
    assert "rank 1: steps" in node.output
    assert_same_run(launcher.runs_dir / "two", reference)
    assert not list(submitted.glob(".hosts-*"))
