"""What --dry-run says of a target and a machine, and what it chooses: the real shapes of Llama-3.1-8B and 70B, without weights or tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest
import tyro

from recipes.eagle1 import recipe as eagle1
from recipes.eagle3 import recipe as eagle3
from recipes.medusa1 import recipe as medusa1
from train.cli import CommandLine
from train.config import RunConfig
from train.engine import read_deepspeed_config
from train.fit import RUNGS, Setting, choose, command_line, kept_arguments, pack_sizes, setting, with_setting
from train.machine import MachineConfig, machine_of
from train.memory import device_total
from train.plan import Plan, make_plan, subject_of
from train.plan_table import print_plan

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 50_000_000
SHAPES = {"8b": (4096, 32, 32, 14336), "70b": (8192, 80, 64, 28672)}
HEAD_8B = 128256 * 4096


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model, with config.json alone."""
    folder = tmp_path_factory.mktemp("targets")
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for name, (hidden, layers, heads, inner) in SHAPES.items():
        fields = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "intermediate_size": inner,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": rope,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields))
    return folder


def run_of(recipe: RunConfig, targets: Path, name: str, tmp_path: Path, **train: object) -> RunConfig:
    target = dataclasses.replace(recipe.target, model=str(targets / name))
    return dataclasses.replace(recipe, target=target, runs_dir=tmp_path, train=dataclasses.replace(recipe.train, **train))


def plan_of(config: RunConfig, gib: float, gpus: int = 4, **machine: object) -> Plan:
    return make_plan(config, MachineConfig(gpus=gpus, gpu_memory_gb=gib, tokens=TOKENS, **machine))  # type: ignore[arg-type]


def choices(config: RunConfig, sizes_gib: Iterable[int], gpus: int = 4) -> list[Setting | None]:
    """What is chosen on ever smaller devices."""
    machines = [machine_of(MachineConfig(gpus=gpus, gpu_memory_gb=gib, host_memory_gb=512)) for gib in sizes_gib]
    subject = subject_of(config, machines[0])
    return [choose(subject, machine)[0] for machine in machines]


def chosen(plan: Plan) -> Setting:
    assert plan.chosen is not None
    return plan.chosen


# --- the choice -----------------------------------------------------------------------------------------------------------


def test_8b_on_80_gib_keeps_the_recipe_as_it_is(targets: Path, tmp_path: Path) -> None:
    plan = plan_of(run_of(eagle3(), targets, "8b", tmp_path), 80)
    assert (chosen(plan).rung.name, chosen(plan).pack_tokens, chosen(plan).packs_per_rank) == ("torch engine", 8192, 2)
    assert chosen(plan).total_bytes == plan.given.total_bytes <= plan.machine.usable_bytes == int(80 * 2**30 * 0.9)


def test_the_preference_goes_from_what_costs_nothing_to_what_costs_most(targets: Path, tmp_path: Path) -> None:
    """The same run on ever smaller devices: smaller packs first, then ZeRO, then recomputing, then the host; then nothing."""
    config = run_of(eagle3(), targets, "70b", tmp_path)
    found = choices(config, range(110, 10, -2))
    order = [RUNGS.index(setting.rung) for setting in found if setting is not None]
    assert order == sorted(order) and None in found
    names = {setting.rung.name for setting in found if setting is not None}
    assert {"torch engine", "ZeRO-2"} <= names and any("recomputing" in name for name in names)
    is_none = [setting is None for setting in found]
    assert is_none == sorted(is_none), "what fits a smaller device fits a larger one"


def test_the_first_setting_that_fits_is_taken_not_the_smallest(targets: Path, tmp_path: Path) -> None:
    config = run_of(eagle3(), targets, "70b", tmp_path)
    plan, subject = plan_of(config, 40), subject_of(config, machine_of(MachineConfig(gpus=4, gpu_memory_gb=40)))
    assert chosen(plan).rung.zero_file is not None and not chosen(plan).rung.recomputes
    dearer = [rung for rung in RUNGS if rung.recomputes and rung.zero_file is not None]
    assert chosen(plan).total_bytes > min(setting(subject, plan.machine, rung, 2048).total_bytes for rung in dearer)
    for rung in RUNGS[: RUNGS.index(chosen(plan).rung)]:
        assert all(setting(subject, plan.machine, rung, size).total_bytes > plan.machine.usable_bytes for size in (8192, 4096, 2048))
    assert plan.given.total_bytes > plan.machine.usable_bytes


def test_one_gpu_has_nothing_to_divide(targets: Path, tmp_path: Path) -> None:
    config = run_of(eagle3(), targets, "8b", tmp_path)
    names = {setting.rung.name for setting in choices(config, range(60, 14, -2), gpus=1) if setting is not None}
    assert names <= {"torch engine", "torch engine, recomputing"} | {rung.name for rung in RUNGS if "offload" in rung.name}
    assert "torch engine, recomputing" in names


def test_a_host_without_room_cannot_take_the_optimizer(targets: Path, tmp_path: Path) -> None:
    config = run_of(medusa1(), targets, "8b", tmp_path)
    sizes = range(80, 20, -2)
    offloaded = [gib for gib, setting in zip(sizes, choices(config, sizes), strict=True) if setting is not None and "offloaded" in setting.rung.name]
    assert offloaded
    assert plan_of(config, offloaded[0], host_memory_gb=32.0).chosen is None


def test_the_batch_is_kept_and_the_ranks_share_it_evenly(targets: Path, tmp_path: Path) -> None:
    config = run_of(eagle3(), targets, "8b", tmp_path)
    assert pack_sizes(config, 4) == [8192, 4096, 2048]
    assert pack_sizes(config, 32) == [2048]
    assert pack_sizes(config, 64) == []  # 1024 is less than data.max_length
    for gpus, nodes in ((4, 1), (4, 2), (8, 4)):
        found = chosen(plan_of(config, 80, gpus=gpus, nodes=nodes))
        assert found.pack_tokens * found.packs_per_rank * gpus * nodes == config.train.batch_tokens


def test_ranks_that_no_pack_can_serve_are_told_the_batch_that_would(targets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(run_of(eagle3(), targets, "8b", tmp_path), capsys, MachineConfig(gpus=64, gpu_memory_gb=80, tokens=TOKENS))
    assert "64 ranks CANNOT SHARE 8 packs evenly" in said
    assert "raise train.batch_tokens to a multiple of 131,072" in said


def test_every_zero_file_of_the_choices_is_one_that_deepspeed_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for rung in RUNGS:
        if rung.zero_file is not None:
            config = read_deepspeed_config(ROOT / rung.zero_file)
            assert f"ZeRO-{DeepSpeedZeroConfig(**config['zero_optimization']).stage}" in rung.name  # unknown fields raise
            # Without it DeepSpeed takes no optimizer but its own, which it would have to compile.
            assert ("offload" in rung.zero_file) == (config.get("zero_force_ds_cpu_optimizer") is False)


# --- the numbers ----------------------------------------------------------------------------------------------------------


def test_the_parts_sum_to_the_total(targets: Path, tmp_path: Path) -> None:
    plan = plan_of(run_of(eagle3(), targets, "8b", tmp_path), 80)
    assert chosen(plan).total_bytes == 1_000_000_000 + round(device_total(chosen(plan).parts) * 1.05)


def test_disk_is_the_store_the_checkpoints_and_the_weights(targets: Path, tmp_path: Path) -> None:
    config = run_of(eagle3(), targets, "8b", tmp_path)
    config = dataclasses.replace(config, features=dataclasses.replace(config.features, storage="lossless"))
    plan = plan_of(config, 80)
    assert plan.disk.store == TOKENS * (4 * 4096 * 2 + 5)
    assert plan.disk.checkpoints == (2 + 1) * 12 * plan.num_parameters
    assert plan.disk.free is None
    small = dataclasses.replace(config, features=dataclasses.replace(config.features, storage="int8"))
    assert plan_of(small, 80).disk.store == TOKENS * (4 * (4096 + 2 * 128) + 5)
    online = dataclasses.replace(config, features=dataclasses.replace(config.features, mode="online"))
    assert plan_of(online, 80).disk.store == 0


def test_time_is_operations_over_assumed_speed(targets: Path, tmp_path: Path) -> None:
    plan = plan_of(run_of(eagle3(), targets, "8b", tmp_path), 80)
    assert plan.num_target_parameters == 8_030_261_248  # as Meta counts it
    assert plan.extraction_flops == 2 * plan.num_target_parameters * TOKENS
    fc = 3 * 4096 * 4096
    assert plan.training_flops == plan.num_train_tokens * (6 * (fc + 7 * (plan.num_parameters - fc)) + 2 * HEAD_8B)
    assert plan.num_train_tokens == 4 * TOKENS
    assert plan.machine.training_flops == pytest.approx(312e12 * 0.3) and plan.machine.forward_flops == pytest.approx(312e12 * 0.4)


def test_each_algorithm_has_its_operations(targets: Path, tmp_path: Path) -> None:
    plan = plan_of(run_of(medusa1(), targets, "8b", tmp_path), 80)
    assert plan.training_flops == plan.num_train_tokens * 6 * plan.num_parameters
    plan = plan_of(run_of(eagle1(), targets, "8b", tmp_path), 80)
    assert plan.training_flops == plan.num_train_tokens * 6 * (plan.num_parameters + HEAD_8B)


def test_an_online_target_is_in_every_ranks_memory_and_time(targets: Path, tmp_path: Path) -> None:
    config = run_of(eagle3(), targets, "8b", tmp_path)
    offline = plan_of(config, 80)
    online = plan_of(dataclasses.replace(config, features=dataclasses.replace(config.features, mode="online")), 80)
    assert online.given.total_bytes - offline.given.total_bytes == pytest.approx(1.05 * 2 * 8_030_261_248, rel=0.02)
    assert online.training_flops - offline.training_flops == pytest.approx(2 * 8_030_261_248 * 4 * TOKENS)


# --- what is printed ------------------------------------------------------------------------------------------------------


def dry_run(config: RunConfig, capsys: pytest.CaptureFixture[str], machine: MachineConfig, arguments: tuple[str, ...] = ()) -> str:
    capsys.readouterr()
    print_plan(config, machine, "recipes/eagle3.py", arguments)
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_target_larger_than_a_gpu_is_said_to_be_so_with_a_way_out(targets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(run_of(eagle3(), targets, "70b", tmp_path), capsys, MachineConfig(gpus=4, gpu_memory_gb=80, tokens=TOKENS))
    assert "70.6 B parameters" in said and "DOES NOT FIT 77.31 GB" in said
    assert "the target does not fit one GPU" in said and "on a machine with devices of 149 GiB" in said
    assert "choice: torch engine" in said, "training from a store is possible all the same"


def test_where_nothing_fits_what_lacks_and_what_would_help_is_said(targets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(run_of(medusa1(), targets, "8b", tmp_path), capsys, MachineConfig(gpus=1, gpu_memory_gb=16, tokens=TOKENS))
    assert "nothing fits: the least is" in said and "which lacks" in said and "--drafter.shared-lm-head" in said
    assert "command:" not in said


def test_the_printed_command_is_one_that_the_recipe_accepts_and_means_the_choice(targets: Path, tmp_path: Path) -> None:
    own = ["--name", "x", f"--target.model={targets / '70b'}", "--runs-dir", str(tmp_path), "--train.pack-tokens", "16384"]
    planned = [*own, "--dry-run", "--plan.gpus", "4", "--plan.gpu-memory-gb=40", "--plan.tokens", str(TOKENS)]
    command = tyro.cli(CommandLine, default=CommandLine(config=eagle3()), args=planned)
    plan = make_plan(command.config, command.plan)
    line = command_line(chosen(plan), plan.machine, "recipes/eagle3.py", planned)
    assert line.startswith("deepspeed --num_gpus 4 recipes/eagle3.py --name x ") and "--plan" not in line and "--dry-run" not in line
    script, *arguments = shlex.split(line)[3:]
    again = tyro.cli(CommandLine, default=CommandLine(config=eagle3()), args=arguments)
    assert script == "recipes/eagle3.py" and not again.dry_run
    assert again.config == with_setting(command.config, chosen(plan))
    assert (ROOT / str(again.config.train.deepspeed_config)).exists()


@pytest.mark.parametrize(
    ("machine", "rung", "start"),
    [
        (MachineConfig(gpus=1, gpu_memory_gb=80), 0, "python r.py"),
        (MachineConfig(gpus=4, gpu_memory_gb=80), 0, "torchrun --nproc-per-node 4 r.py"),
        (MachineConfig(gpus=4, gpu_memory_gb=80), 2, "deepspeed --num_gpus 4 r.py"),
        (MachineConfig(gpus=4, nodes=2, gpu_memory_gb=80), 2, "deepspeed --hostfile launch/hostfile.example --num_nodes 2 --num_gpus 4 r.py"),
        (MachineConfig(gpus=2, device="cpu"), 2, "deepspeed --num_accelerators 2 r.py"),
    ],
)
def test_each_launcher_is_named_as_it_is_called(machine: MachineConfig, rung: int, start: str) -> None:
    assert command_line(Setting(RUNGS[rung], 2048, 1, [], 0), machine_of(machine), "r.py", []).startswith(start + " --train.pack-tokens 2048 ")


def test_arguments_that_the_planner_decides_are_replaced() -> None:
    given = ["--train.pack_tokens=4096", "--train.recompute", "--name", "x", "--train.deepspeed-config", "z.json", "--plan.gpus", "4", "--dry-run"]
    assert kept_arguments(given) == ["--name", "x"]


# --- where lengths come from, and mistakes --------------------------------------------------------------------------------


def test_a_target_without_tokenizer_asks_for_a_number_of_tokens(targets: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"to plan without it, say how many tokens the data have: --plan\.tokens N"):
        make_plan(run_of(eagle3(), targets, "8b", tmp_path), MachineConfig(gpus=4, gpu_memory_gb=80))


def test_the_report_of_prepared_data_gives_the_number_of_tokens(targets: Path, tmp_path: Path) -> None:
    config = run_of(eagle3(), targets, "8b", tmp_path)
    config.run_dir.mkdir()
    splits = {"train": {"num_tokens": 1_000_000, "num_samples": 1000}}
    (config.run_dir / "data_report.json").write_text(json.dumps({"tokens": {"splits": splits}}))
    plan = make_plan(config, MachineConfig(gpus=4, gpu_memory_gb=80))
    assert (plan.num_tokens, plan.num_documents, plan.is_exact) == (1_000_000, 1000, False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--dry-run", "--plan.gpus", "0"], "plan.gpus is 0, expected at least 1"),
        (["--dry-run", "--plan.margin", "1.5"], "plan.margin is 1.5, expected a share in [0, 1)"),
        (["--dry-run", "--plan.gpu-memory-gb", "-1"], "plan.gpu_memory_gb is -1.0, expected a positive number"),
        (["--plan.gpus", "4"], "plan.* has no effect on a run: add --dry-run"),
    ],
)
def test_a_mistake_in_the_machine_is_named(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(CommandLine, default=CommandLine(config=eagle3()), args=options)
    assert expected in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_gpu_of_unknown_memory_is_an_error_where_there_is_none_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"say plan\.gpu_memory_gb too"):
        machine_of(MachineConfig(gpus=4, device="h100"))
