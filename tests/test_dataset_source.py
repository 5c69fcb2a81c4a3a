"""`datasets` at both ends: the Hub's and folders laid out like it are read by the real library; what is prepared is an ordinary dataset."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from data.conversations import Conversation, read_conversations
from data.dataset_source import HubName, parse_hub_name
from data.prepare import DataConfig, prepare
from data.report import DataError, DataReport
from data.sources import read_records
from data.target import TargetConfig, load_tokenizer
from train.stages import source_identity

README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
  - split: test_sft
    path: data/test_sft-*.parquet
- config_name: pairs
  data_files: pairs/*.parquet
---
# Chats
"""


def chats(words: str, num: int) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": "Yo"}
    turns = [[{"role": "user", "content": f"{words} {number}"}, answer] for number in range(num)]
    return [{"id": f"{words}{number}", "note": "x", "messages": messages} for number, messages in enumerate(turns)]


def write_repository(folder: Path, readme: str = README, words: str = "train") -> Path:
    """A dataset as the Hub has it: Parquet shards of two splits, and a second configuration."""
    (folder / "data").mkdir(parents=True)
    (folder / "pairs").mkdir()
    if readme:
        (folder / "README.md").write_text(readme)
    rows = chats(words, 4)
    Dataset.from_list(rows[:2]).to_parquet(str(folder / "data" / "train-00000-of-00002.parquet"))
    Dataset.from_list(rows[2:]).to_parquet(str(folder / "data" / "train-00001-of-00002.parquet"))
    Dataset.from_list(chats("test", 1)).to_parquet(str(folder / "data" / "test_sft-00000-of-00001.parquet"))
    Dataset.from_list([{"prompt": f"ask {number}", "response": "Yo"} for number in range(3)]).to_parquet(str(folder / "pairs" / "a.parquet"))
    return folder


def read(source: str, streaming: bool = True) -> tuple[list[Conversation], DataReport]:
    report = DataReport()
    return list(read_conversations(source, report, streaming=streaming)), report


def questions(conversations: list[Conversation]) -> list[str]:
    return [conversation.turns[0].content for conversation in conversations]


TRAIN = [f"train {number}" for number in range(4)]


# --- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("acme/chats", HubName("acme/chats", None, None, None)),
        ("chats", HubName("chats", None, None, None)),
        ("acme/chats:train_sft", HubName("acme/chats", None, "train_sft", None)),
        ("acme/chats/en.v1", HubName("acme/chats", "en.v1", None, None)),
        ("acme/chats/en:test@v2", HubName("acme/chats", "en", "test", "v2")),
        ("acme/chats@refs/pr/7", HubName("acme/chats", None, None, "refs/pr/7")),
        ("a/b/c/d", None),
        ("-x/y", None),
        ("acme/chats:", None),
        ("acme/chats@", None),
    ],
)
def test_a_hub_name_has_configuration_split_and_revision(source: str, expected: HubName | None) -> None:
    assert parse_hub_name(source) == expected


# --- folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readme", [README, ""])
def test_a_folder_laid_out_like_a_hub_dataset_is_read_by_split(tmp_path: Path, readme: str) -> None:
    folder = write_repository(tmp_path / "chats", readme)
    if not readme:  # told by the names of its files; without a README all of them are one configuration
        (folder / "pairs" / "a.parquet").unlink()
    conversations, report = read(str(folder))
    assert questions(conversations) == TRAIN
    assert "only the split `train` is read, not test_sft; name another" in report.warnings[0]
    assert report.columns == {str(folder): {"messages": 4}}
    assert [conversation.id for conversation in conversations] == ["train0", "train1", "train2", "train3"]
    assert questions(read(f"{folder}:test_sft")[0]) == ["test 0"]
    with pytest.raises(DataError, match=r"has the splits train, test_sft, not 'dev'"):
        read(f"{folder}:dev")


def test_a_configuration_of_a_folder_is_named_behind_it(tmp_path: Path) -> None:
    folder = write_repository(tmp_path / "chats")
    conversations, report = read(f"{folder}/pairs")
    assert questions(conversations) == ["ask 0", "ask 1", "ask 2"]
    assert report.columns == {f"{folder}/pairs": {"prompt -> response": 3}}
    assert questions(read(f"{folder}/pairs:train")[0]) == ["ask 0", "ask 1", "ask 2"]
    with pytest.raises(DataError, match="cannot be read as a dataset"):
        read(f"{folder}/no_such")


def test_a_changed_file_of_a_configuration_is_noticed(tmp_path: Path) -> None:
    folder = write_repository(tmp_path / "chats")
    before = source_identity(f"{folder}/pairs", str)
    (folder / "pairs" / "a.parquet").write_text("")
    assert source_identity(f"{folder}/pairs", str) != before


def test_a_split_of_a_folder_of_plain_files_is_found_by_their_names(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats(split, 2)))
    assert questions(read(f"{tmp_path}:test")[0]) == ["test 0", "test 1"]
    assert len(read(str(tmp_path))[0]) == 4  # and without a split all files, as ever


# --- a Hub ----------------------------------------------------------------------------------------------------------------

SHAS = {"main": "a" * 40, "v2": "b" * 40}


class Hub:
    """A loopback Hub with one dataset, in two revisions, for the real client.

    Attributes:
        paths: every request, for what was asked.
        fails: of a path that contains the key, requests that get the status instead of an answer.
    """

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self.paths: list[str] = []
        self.fails: dict[str, int] = {}
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = unquote(urlparse(request.path).path)
        self.paths.append(f"{request.command} {path}")
        failed = next((status for part, status in self.fails.items() if part in path), None)
        if failed is not None:
            self.send(request, failed, b"{}")
        elif path.startswith("/api/datasets/acme/chats"):
            self.api(request, path.removeprefix("/api/datasets/acme/chats").strip("/"), body)
        elif path.startswith("/datasets/acme/chats/resolve/"):
            revision, _, name = path.removeprefix("/datasets/acme/chats/resolve/").partition("/")
            self.file(request, revision, name)
        elif "acme/secret" in path:
            self.send(request, 401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
        else:
            self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def api(self, request: http.server.BaseHTTPRequestHandler, what: str, body: bytes) -> None:
        kind, _, rest = what.partition("/")
        if kind in ("", "revision"):
            revision = rest or "main"
            if self.folder(revision) is None:
                self.send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            sha = SHAS.get(revision, revision)
            facts = {"_id": "1", "id": "acme/chats", "sha": sha, "private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
            siblings = [{"rfilename": name} for name in self.names(revision)]
            self.json(request, facts | {"tags": [], "siblings": siblings, "lastModified": "2026-01-01T00:00:00.000Z"})
        elif kind == "tree":
            revision, _, folder = rest.partition("/")
            is_recursive = parse_qs(urlparse(request.path).query).get("recursive", ["false"])[0].lower() == "true"
            self.json(request, self.entries(revision, folder, is_recursive))
        elif kind == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            everything = self.entries(rest, "", True)
            self.json(request, [entry for entry in everything if entry["path"] in asked])
        else:
            self.send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def folder(self, revision: str) -> Path | None:
        return next((self.folders[name] for name, sha in SHAS.items() if revision in (name, sha)), None)

    def names(self, revision: str) -> list[str]:
        folder = self.folder(revision)
        assert folder is not None
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def entries(self, revision: str, below: str, is_recursive: bool) -> list[dict[str, Any]]:
        folder = self.folder(revision)
        assert folder is not None
        paths = sorted((folder / below).rglob("*") if is_recursive else (folder / below).glob("*"))
        return [
            {
                "type": "file" if path.is_file() else "directory",
                "oid": f"{index:040d}",
                "size": path.stat().st_size if path.is_file() else 0,
                "path": path.relative_to(folder).as_posix(),
            }
            for index, path in enumerate(paths)
        ]

    def file(self, request: http.server.BaseHTTPRequestHandler, revision: str, name: str) -> None:
        folder = self.folder(revision)
        if folder is None or not (folder / name).is_file():
            self.send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        content = (folder / name).read_bytes()
        headers = {"ETag": f'"{abs(hash(content)):x}"', "X-Repo-Commit": SHAS.get(revision, revision), "Accept-Ranges": "bytes"}
        if wanted := request.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            self.send(request, 206, content[begin : end + 1], headers)
        else:
            self.send(request, 200, content, headers)

    def json(self, request: http.server.BaseHTTPRequestHandler, value: Any) -> None:
        self.send(request, 200, json.dumps(value).encode())

    def send(self, request: http.server.BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        request.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    made = Hub({"main": write_repository(folder / "main"), "v2": write_repository(folder / "v2", words="second")})
    yield made
    made.server.shutdown()


# Reads each source named as an argument in a process of its own, as the Hub's address is taken from the environment at the import.
READER = """
import json, sys
import datasets
datasets.config.STREAMING_READ_MAX_RETRIES = 1
datasets.config.STREAMING_READ_RETRY_INTERVAL = 0
from data.conversations import read_conversations
from data.report import DataReport
for source in sys.argv[2:]:
    report, asked = DataReport(), []
    try:
        for conversation in read_conversations(source, report, streaming=sys.argv[1] == "stream"):
            asked.append(conversation.turns[0].content)
        print(json.dumps({"asked": asked, "columns": report.columns}))
    except ValueError as error:
        print(json.dumps({"asked": asked, "error": str(error)}))
"""


def read_in_process(how: str, sources: list[str], url: str, cache: Path, **variables: str) -> list[dict[str, Any]]:
    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}
    command = [sys.executable, "-c", READER, how, *sources]
    root = Path(__file__).resolve().parent.parent
    finished = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]


def test_the_hub_s_configurations_splits_and_revisions_are_streamed_by_the_real_client(hub: Hub, tmp_path: Path) -> None:
    sources = ["acme/chats", "acme/chats:test_sft", "acme/chats/pairs:train", "acme/chats@v2"]
    errors = ["acme/chats:dev", "acme/chats/no_such", "acme/chats@v3", "acme/nothing", "acme/secret"]
    hub.paths.clear()
    results = read_in_process("stream", sources + errors, hub.url, tmp_path)
    assert [result["asked"] for result in results[:4]] == [
        TRAIN,
        ["test 0"],
        ["ask 0", "ask 1", "ask 2"],
        [f"second {number}" for number in range(4)],
    ]
    assert results[0]["columns"] == {"acme/chats": {"messages": 4}}
    for source, result in zip(errors, results[4:], strict=True):
        assert result["asked"] == [] and source in result["error"] and "\n" not in result["error"], result
    assert "test_sft" in results[4]["error"] and "pairs" in results[5]["error"]  # what there is instead
    assert "needs `hf auth login` or HF_TOKEN" in results[8]["error"]
    # Streamed: of the Parquet shards no copy is left behind.
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"PAR1"]
    assert any("resolve" in path and "train-00001" in path for path in hub.paths)


def test_a_dataset_that_was_downloaded_is_read_without_a_network(hub: Hub, tmp_path: Path) -> None:
    (online,) = read_in_process("download", ["acme/chats"], hub.url, tmp_path)
    (offline,) = read_in_process("download", ["acme/chats"], "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert online["asked"] == offline["asked"] == TRAIN
    (streamed,) = read_in_process("stream", ["acme/chats"], "http://127.0.0.1:9", tmp_path / "empty", HF_HUB_OFFLINE="1")
    assert "--data.no-streaming" in streamed["error"] and "\n" not in streamed["error"]


def test_a_hub_that_fails_in_the_middle_is_one_line_that_says_after_how_many_records(hub: Hub, tmp_path: Path) -> None:
    hub.fails = {"train-00001": 403}  # as when access is taken away; after a 5xx or a lost connection the client tries for minutes
    try:
        (result,) = read_in_process("stream", ["acme/chats"], hub.url, tmp_path)
    finally:
        hub.fails = {}
    assert result["asked"] == ["train 0", "train 1"]
    assert "stopped giving acme/chats after 2 records" in result["error"] and "\n" not in result["error"]


# --- what is prepared -----------------------------------------------------------------------------------------------------

BARE = """
import json, sys
from datasets import load_from_disk
loaded = load_from_disk(sys.argv[1])
train = loaded["train"]
print(json.dumps({
    "splits": {name: len(split) for name, split in loaded.items()},
    "features": {name: str(feature) for name, feature in train.features.items()},
    "first": {name: value for name, value in train[0].items()},
    "description": train.info.description,
    "ours": sorted(name for name in sys.modules if name.split(".")[0] in ("data", "train", "headstart")),
}))
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, sharegpt: Path) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    config = DataConfig((str(sharegpt),), max_length=96, num_heldout=12, num_workers=1)
    prepare(config, load_tokenizer(TargetConfig(str(tiny_target))), folder / "data")
    return folder / "data"


def test_prepared_data_opens_without_headstart_and_says_what_it_is(prepared: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-c", BARE, str(prepared)]
    finished = subprocess.run(command, cwd=tmp_path, env={"HF_HOME": str(tmp_path)}, text=True, capture_output=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout)
    assert seen["ours"] == []
    assert seen["splits"]["heldout"] == 12
    assert seen["features"] == {
        "conversation_id": "Value('string')",
        "input_ids": "List(Value('int32'))",
        "loss_mask": "List(Value('bool'))",
        "prompt_ids": "List(Value('int32'))",
    }
    assert len(seen["first"]["input_ids"]) == len(seen["first"]["loss_mask"])
    description = seen["description"]
    assert "sources: sharegpt.json\n" in description and "columns: conversations\n" in description and "most tokens of a sample: 96\n" in description
    assert "chosen with seed 0" in description and str(prepared.parent.parent) not in description


def test_prepared_data_goes_through_parquet_and_back(prepared: Path, tmp_path: Path) -> None:
    loaded = load_from_disk(str(prepared))
    assert isinstance(loaded, DatasetDict)
    for name, split in loaded.items():
        split.to_parquet(str(tmp_path / f"{name}-00000-of-00001.parquet"))
    files = {name: str(tmp_path / f"{name}-*.parquet") for name in loaded}
    again = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    for name, split in loaded.items():
        assert again[name].features == split.features
        assert again[name].to_dict() == split.to_dict()


def test_prepared_data_is_no_source_of_conversations(prepared: Path) -> None:
    """It holds tokens of one tokenizer; a run of another one must not take them for text."""
    with pytest.raises(DataError, match="has the columns conversation_id, input_ids, loss_mask, prompt_ids"):
        list(read_records(f"{prepared}:train"))
