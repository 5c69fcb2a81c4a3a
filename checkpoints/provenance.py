"""Where a checkpoint comes from: headstart's commit, the versions it ran on, the target, and the run's config.

Written as `headstart.json` beside an export. It holds no path of the machine that wrote it and no time, so the same run writes
the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("headstart", "torch", "transformers", "deepspeed", "safetensors")
REPOSITORY = Path(__file__).resolve().parent.parent
# Target and fingerprint of a converted checkpoint that does not say them.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Provenance:
    """What made a checkpoint.

    Attributes:
        commit: headstart's git commit, with "+changes" where the working tree differed from it; "unknown" outside a checkout.
        versions: package name to version, and "python".
        target: the target's Hub id, or the last part of its local path.
        target_fingerprint: what data/target.py calls the target's revision or fingerprint.
        run_config_sha256: see `config_digest`.
        adapter: of a target that is a base with a LoRA adapter, the adapter's Hub id or the last part of its path; `target` is the base then.
    """

    commit: str
    versions: dict[str, str]
    target: str
    target_fingerprint: str
    run_config_sha256: str
    adapter: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class TrainingFacts:
    """What the training took.

    Attributes:
        train_seconds: wall time of the training stage.
        total_seconds: wall time of all stages, those of earlier starts and the evaluation included.
        num_train_tokens: tokens that the drafter was trained on, repeats counted.
        num_steps: optimizer steps.
        best_step: the step whose weights were exported.
    """

    train_seconds: float
    total_seconds: float
    num_train_tokens: int
    num_steps: int
    best_step: int


def collect_provenance(target: str, target_fingerprint: str, run_config: Mapping[str, Any], adapter: str | None = None) -> Provenance:
    """Provenance of a checkpoint that this process is about to write.

    Args:
        target: Hub id or local path of the target.
        target_fingerprint: its revision or fingerprint.
        run_config: the resolved run config, as JSON values.
        adapter: Hub id or local path of the adapter on it, where there is one.
    """
    return Provenance(
        commit=git_commit(REPOSITORY),
        versions=installed_versions(),
        target=portable_name(target),
        target_fingerprint=target_fingerprint,
        run_config_sha256=config_digest(run_config),
        adapter=None if adapter is None else portable_name(adapter),
    )


def portable_name(target: str) -> str:
    """A Hub id as it is, a local path (one that exists or cannot be an id) by its last part."""
    is_path = Path(target).exists() or target.startswith((".", "/", "~")) or target.count("/") > 1
    return Path(target).name if is_path else target


def config_digest(run_config: Mapping[str, Any]) -> str:
    """SHA-256 of a config's canonical JSON (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(run_config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a checkpoint's numbers; "absent" for one that is not installed."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


def git_commit(directory: Path) -> str:
    """HEAD of the checkout at `directory`, with "+changes" for uncommitted ones; "unknown" where there is no git or checkout."""
    command = ["git", "-C", str(directory)]
    try:
        head = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*command, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if status.strip() else head
