"""Publishes a run's drafter on the Hugging Face Hub, with a model card that says how to serve it and what was measured.

    python -m checkpoints.hub runs/my-drafter user/my-drafter [--private] [--revision BRANCH] [--dry-run]

Place in the flow: export/, config.json, report.json, data_report.json (and serve.json) of a run -> this -> the Hub, and <run>/hub.json, which names
the commits. Each repository gets one commit, so nobody ever downloads half of a new drafter. Run again after an interruption, it sends only what
the Hub does not have. A target that was trained with its drafter (<run>/backbone) goes to a repository of its own, because vLLM serves repositories,
not folders in them.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, try_to_load_from_cache
from huggingface_hub.hf_api import RepoFile

from checkpoints.export import CARD_FILE, CONFIG_FILE, PROVENANCE_FILE, TENSORS_FILE, validate_export
from checkpoints.hub_card import License, RunFacts, backbone_hub_card, drafter_hub_card
from checkpoints.hub_client import DEFAULT_RETRIES, HubError, attempt, check_access, check_repo_id, hide_signed_urls
from checkpoints.privacy import refuse_private
from checkpoints.provenance import portable_name
from checkpoints.run_files import read_run_json

_BACKBONE_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
MAIN = "main"


@dataclass(frozen=True)
class HubConfig:
    """Upload a run's exported drafter to the Hugging Face Hub. The token is HF_TOKEN, or that of `hf auth login`.

    Attributes:
        run: the run's folder, for example runs/quickstart.
        repo: where to, as user/name; it is made if it is not there.
        private: make it a private repository.
        revision: the branch, made if it is not there.
        dry_run: print the files and the card; send nothing.
        base_model: the target's Hub id, where the run used a local copy, or merged an adapter into it that is published now.
        license: as the Hub spells it, for example apache-2.0; else what the target's own files say.
        backbone_repo: where a target that was trained with its drafter goes; REPO-target unless named.
        retries: how often a request is repeated while the Hub is busy or the network away.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    repo: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="USER/REPO")]
    private: bool = False
    revision: str = MAIN
    dry_run: bool = False
    base_model: str | None = None
    license: str | None = None
    backbone_repo: str | None = None
    retries: int = DEFAULT_RETRIES

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}, expected 0 or more")
        for repo in filter(None, (self.base_model, self.backbone_repo)):
            check_repo_id(repo, "")


@dataclass(frozen=True)
class Publication:
    """One repository as it will be.

    Attributes:
        repo: its id.
        files: name in the repository to a local path or to content.
    """

    repo: str
    files: Mapping[str, Path | bytes]


def upload_run(config: HubConfig) -> list[str]:
    """Uploads what a run has exported, checks it on the Hub and writes <run>/hub.json.

    Returns:
        The addresses; none on a dry run.

    Raises:
        ValueError: if the run is not whole, something private would be published, or the Hub refuses.
    """
    hide_signed_urls()
    try:
        publications = plan_upload(config)
    except KeyError as error:  # the card reads much, and older versions wrote less
        raise ValueError(f"{config.run}: its records lack {error}, another version of headstart wrote them: run the recipe again") from error
    for publication in publications:
        _print_plan(publication, config)
    if config.dry_run:
        return []
    api = HfApi()
    check_access(api, [publication.repo for publication in publications], config.retries)
    done = [_publish(api, publication, config) for publication in publications]
    (config.run / "hub.json").write_text(json.dumps({"uploads": done}, indent=2) + "\n")
    return [upload["url"] for upload in done]


def upload_after_run(run: Path, repo: str, private: bool) -> None:
    """The last stage of a recipe.

    Raises:
        ValueError: with the command that uploads again.
    """
    try:
        upload_run(HubConfig(run=run, repo=repo, private=private))
    except (ValueError, OSError) as error:
        again = f"python -m checkpoints.hub {shlex.quote(str(run))} {repo}{' --private' if private else ''}"
        raise ValueError(f"{error}. The run is whole and nothing of it is lost; upload it again with `{again}`") from error


# --- what is published --------------------------------------------------------------------------------------------------


def plan_upload(config: HubConfig) -> list[Publication]:
    """The repositories, a trained target first, so that its drafter is never there without it.

    Raises:
        ValueError: if files are missing, stale or hold something private.
    """
    facts = read_run(config)
    check_repo_id(config.repo, facts.algorithm)
    export, backbone = config.run / "export", config.run / "backbone"
    backbone_repo = (config.backbone_repo or f"{config.repo}-target") if "backbone" in facts.report else None
    if config.backbone_repo is not None and backbone_repo is None:
        raise ValueError(f"backbone-repo has no effect: {config.run} trained no target")
    files: dict[str, Path | bytes] = {name: export / name for name in (CONFIG_FILE, PROVENANCE_FILE, TENSORS_FILE)}
    files[CARD_FILE] = drafter_hub_card(facts, config.repo, backbone_repo).encode()
    publications = [Publication(config.repo, files)]
    if backbone_repo is not None:
        if backbone_repo == config.repo:
            raise ValueError(f"backbone-repo is {config.repo} too: drafter and target need a repository each, vLLM serves no subfolders")
        target: dict[str, Path | bytes] = {path.name: path for path in sorted(backbone.iterdir()) if path.suffix in _BACKBONE_SUFFIXES}
        if CONFIG_FILE not in target or not any(name.endswith(".safetensors") for name in target):
            raise ValueError(f"{backbone} holds no model: run the recipe to its end again")
        target[CARD_FILE] = backbone_hub_card(facts, backbone_repo, config.repo).encode()
        publications.insert(0, Publication(backbone_repo, target))
    for publication in publications:
        refuse_private(publication.files, [config.run, Path(facts.config["target"]["model"])])
    return publications


def read_run(config: HubConfig) -> RunFacts:
    """Reads and checks the files of a run.

    Raises:
        ValueError: if one is missing, or was made for another export.
    """
    run = config.run
    if not (run / "export").is_dir():
        raise ValueError(f"{run} holds no export: expected a run's folder, for example runs/quickstart, after its recipe has ended")
    validate_export(run / "export")
    _refuse_stale(run)
    provenance, report = read_run_json(run / "export" / PROVENANCE_FILE), read_run_json(run / "report.json")
    run_config, data_report = read_run_json(run / "config.json"), read_run_json(run / "data_report.json")
    serve = read_run_json(run / "serve.json") if (run / "serve.json").is_file() else None
    if serve is not None and serve["ours"]["joint_acceptance"] != report["joint_acceptance"]:
        print(f"{run}/serve.json is of an earlier export and left out of the card: run `python -m eval.serve {run}` for this one", flush=True)
        serve = None
    # A target that was trained has its own name in the provenance; at the export, local targets were told from Hub ids.
    named = portable_name(run_config["target"]["model"]) if "backbone" in report else provenance["target"]
    base_model = config.base_model or (named if "/" in named else None)
    return RunFacts(
        algorithm=provenance["algorithm"],
        provenance=provenance,
        config=run_config,
        report=report,
        data_report=data_report,
        serve=serve,
        local_sources=_local_sources(run, run_config["data"]["sources"]),
        base_model=base_model,
        has_published_target=config.base_model is not None or not provenance.get("adapter"),
        license=License(id=config.license) if config.license else _license_of_target(run_config["target"], base_model),
    )


def _refuse_stale(run: Path) -> None:
    """Figures of an earlier export must not be published with this one; the run's stage records (train/stages.py) tell."""
    paths = [run / "stages" / f"{stage}.json" for stage in ("export", "evaluate")]
    if not all(path.is_file() for path in paths):
        return
    export, evaluate = (read_run_json(path) for path in paths)
    fingerprint = hashlib.sha256(json.dumps(export["inputs"], sort_keys=True).encode()).hexdigest()[:16]
    if export["seconds"] is None or evaluate["seconds"] is None or evaluate["inputs"]["export"] != fingerprint:
        raise ValueError(f"{run}/report.json is not of this export: run the recipe to its end again")


def _local_sources(run: Path, sources: list[str]) -> frozenset[str]:
    """Sources that were files or folders when the run read them."""
    record = run / "stages" / "prepare.json"
    if record.is_file():
        return frozenset(entry["source"] for entry in read_run_json(record)["inputs"]["sources"] if "files" in entry)
    return frozenset(source for source in sources if Path(source).exists())


def _license_of_target(target: Mapping[str, Any], base_model: str | None) -> License:
    """The licence that the target's own card names, where a copy of the card is on this machine."""
    card: Any = Path(target["model"]) / CARD_FILE
    if not card.is_file() and base_model is not None:
        card = try_to_load_from_cache(base_model, CARD_FILE, revision=target["revision"] or MAIN)
    if not isinstance(card, (str, Path)) or not Path(card).is_file():
        return License()
    data = ModelCard.load(card, ignore_metadata_errors=True).data
    return License(data.license, data.license_name, data.license_link) if isinstance(data.license, str) else License()


def _print_plan(publication: Publication, config: HubConfig) -> None:
    kind, branch = "private" if config.private else "public", "" if config.revision == MAIN else f", branch {config.revision}"
    print(f"{publication.repo} ({kind} if it is new{branch}):", flush=True)
    for name, source in sorted(publication.files.items()):
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        print(f"  {name:<40} {size:>16,} bytes", flush=True)
    card = publication.files[CARD_FILE]
    assert isinstance(card, bytes)
    if b"\nlicense:" not in card:
        print("  without a licence: name one with --license, for example the target's", flush=True)
    if b"\nbase_model:" not in card:
        print("  without a base model, because the target was a local folder: name its Hub id with --base-model", flush=True)
    if config.dry_run:
        print(f"\n----- {CARD_FILE} of {publication.repo}\n{card.decode()}-----\n", flush=True)


# --- the Hub ------------------------------------------------------------------------------------------------------------


def _publish(api: HfApi, publication: Publication, config: HubConfig) -> dict[str, str]:
    """Uploads one repository in one commit and checks what the Hub then lists."""
    repo, retries = publication.repo, config.retries
    attempt(f"making {repo}", lambda: api.create_repo(repo, private=config.private or None, exist_ok=True), retries)
    if config.private and attempt(f"looking at {repo}", lambda: api.model_info(repo), retries).private is False:
        raise HubError(f"{repo} is there and public: make it private on the Hub, or choose another name; nothing was uploaded")
    if config.revision != MAIN:
        attempt(f"making the branch {config.revision}", lambda: api.create_branch(repo, branch=config.revision, exist_ok=True), retries)
    _refuse_other_weights(_listed(api, repo, config.revision, retries), publication)
    operations: list[CommitOperationAdd] = []

    def commit() -> str:
        # New ones each time: the client remembers what the Hub had, which a lost answer has made wrong.
        operations[:] = [CommitOperationAdd(name, source) for name, source in publication.files.items()]
        return api.create_commit(repo, operations, commit_message="Upload by headstart", revision=config.revision).oid

    oid = attempt(f"uploading to {repo}", commit, retries)
    _verify(_listed(api, repo, oid, retries), publication, operations)
    url = f"{api.endpoint}/{repo}" + ("" if config.revision == MAIN else f"/tree/{config.revision}")
    print(f"{len(operations)} files are on the Hub as they are here: {url}", flush=True)
    return {"repo": repo, "revision": config.revision, "commit": oid, "url": url}


def _listed(api: HfApi, repo: str, revision: str, retries: int) -> dict[str, RepoFile]:
    """The files of a repository, by name."""
    entries = attempt(f"listing {repo}", lambda: list(api.list_repo_tree(repo, recursive=True, revision=revision)), retries)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _refuse_other_weights(listed: Mapping[str, RepoFile], publication: Publication) -> None:
    """Engines load every weight file at the top of a repository, so those of another model must not stay beside ours."""
    others = sorted(name for name in listed if "/" not in name and name.endswith(_WEIGHT_SUFFIXES) and name not in publication.files)
    if others:
        raise ValueError(
            f"{publication.repo} holds other weights ({', '.join(others)}), which engines would load too: delete them there, or choose another "
            "repository; nothing was uploaded"
        )


def _verify(listed: Mapping[str, RepoFile], publication: Publication, operations: list[CommitOperationAdd]) -> None:
    """Compares names, sizes and hashes of what the Hub lists with what was sent."""
    wrong = []
    for operation in operations:
        name = operation.path_in_repo
        found = listed.get(name)
        if found is None:
            wrong.append(f"{name} is not there")
        elif found.size != operation.upload_info.size:
            wrong.append(f"{name} has {found.size:,} bytes there and {operation.upload_info.size:,} here")
        elif (found.lfs.sha256 if found.lfs else found.blob_id) != _digest(operation, is_large=found.lfs is not None):
            wrong.append(f"{name} has another content there")
    if wrong:
        raise HubError(f"{publication.repo} is not what was uploaded: {'; '.join(wrong)}. Run the same command again")


def _digest(operation: CommitOperationAdd, is_large: bool) -> str:
    """What the Hub names a file by: SHA-256 of a large file, git's SHA-1 of a small one."""
    if is_large:
        return operation.upload_info.sha256.hex()
    with operation.as_file() as file:
        content = file.read()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def main(args: list[str] | None = None) -> int:
    """0 when everything is on the Hub, 2 with one line when not, 130 when interrupted."""
    try:
        for url in upload_run(tyro.cli(HubConfig, args=args, prog="python -m checkpoints.hub")):
            print(url)
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on; what is uploaded is not sent twice", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
