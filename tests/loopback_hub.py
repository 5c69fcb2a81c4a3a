"""A Hugging Face Hub on the loopback interface: what the real client needs to upload, list and download models, and faults on demand.

    python tests/loopback_hub.py [--port 0] [--folder DIR]

prints the variables (HF_ENDPOINT, HF_TOKEN, HF_HUB_DISABLE_XET=1 ...) that must be set *before* huggingface_hub is imported. Everything
lies in the folder, and is there again after a restart. Tests run it in a thread: `with LoopbackHub(folder) as hub`.

Paths and answers are those that huggingface_hub 2.4 sends and reads (hf_api.py, _commit_api.py, lfs.py, file_download.py); storage is LFS.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import re
import shutil
import socket
import threading
import time
import urllib.parse
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

WRITER, READER, FINE_GRAINED = "hf_loopback_writer", "hf_loopback_reader", "hf_loopback_fine"
OWNER, ORGANISATION = "user", "org"
_TOKENS = {WRITER: "write", READER: "read", FINE_GRAINED: "fineGrained"}
_LARGE_BYTES = 1_000_000
_RELATIONS = ("adapter", "finetune", "quantized", "merge")
_NAME = r"[\w.-]+/[\w.-]+"


@dataclass
class Fault:
    """What goes wrong with the next requests that match.

    Attributes:
        match: a regular expression searched in "METHOD path".
        times: how many requests it is for.
        status: answered instead of the real answer; 0 to cut the connection.
        headers: of that answer.
        after_bytes: the body is read up to here before the connection is cut, as by a network that goes away.
        after_done: the request is carried out and only its answer is lost.
        delay_s: seconds to wait before anything is done, then the request is answered as always if `status` is None.
    """

    match: str
    times: int = 1
    status: int | None = 0
    headers: dict[str, str] = field(default_factory=dict)
    after_bytes: int | None = None
    after_done: bool = False
    delay_s: float = 0.0


@dataclass
class Seen:
    """One request.

    Attributes:
        line: "METHOD path" with the query.
        status: of the answer, 0 where the connection was cut.
        num_bytes: of its body that arrived.
        token: with which it came.
    """

    line: str
    status: int = 0
    num_bytes: int = 0
    token: str | None = None


class LoopbackHub:
    """The server and what it holds.

    Attributes:
        url: for HF_ENDPOINT.
        faults: taken from, in order, by the requests that match.
        seen: every request so far.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.lock = threading.RLock()
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        state = folder / "repositories.json"
        self.repositories: dict[str, dict[str, Any]] = json.loads(state.read_text()) if state.exists() else {}
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve_forever(self) -> None:
        """Answers until interrupted."""
        self._server.serve_forever()

    def environment(self, token: str | None = WRITER) -> dict[str, str]:
        """Variables with which a process takes this for the Hub; nothing of the user's own account is seen."""
        own = {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(self.folder / "hf_home"),
            "no_proxy": "127.0.0.1",
        }
        return own if token is None else {**own, "HF_TOKEN": token}

    def lines(self, pattern: str = "") -> list[str]:
        """"METHOD path" of the requests so far that match."""
        return [seen.line for seen in self.seen if re.search(pattern, seen.line)]

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """What a repository holds."""
        repository = self.repositories[repo]
        return {name: self.object_path(entry["digest"]).read_bytes() for name, entry in self.tree(repository, revision).items()}

    def tree(self, repository: dict[str, Any], revision: str) -> dict[str, dict[str, Any]]:
        """name -> entry of a branch or a commit; KeyError where there is none."""
        tree: dict[str, dict[str, Any]] = repository["commits"][repository["branches"].get(revision, revision)]
        return tree

    def object_path(self, sha256: str) -> Path:
        return self.folder / "objects" / sha256

    def store(self, content: bytes, is_large: bool) -> dict[str, Any]:
        """Keeps a small file's content, or names a large one's; its entry."""
        sha256 = hashlib.sha256(content).hexdigest()
        path = self.object_path(sha256)
        if not path.exists():
            path.write_bytes(content)
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {"digest": sha256, "oid": oid, "size": len(content), "is_large": is_large}

    def commit(self, repo: str, revision: str, changes: dict[str, dict[str, Any] | None]) -> str:
        """A new commit on a branch; None removes a file."""
        with self.lock:
            repository = self.repositories[repo]
            tree = dict(self.tree(repository, revision)) if repository["branches"] else {}
            tree.update({name: entry for name, entry in changes.items() if entry is not None})
            tree = {name: entry for name, entry in tree.items() if changes.get(name, entry) is not None}
            oid = hashlib.sha1(json.dumps([repo, len(repository["commits"]), tree], sort_keys=True).encode()).hexdigest()
            repository["commits"][oid] = tree
            repository["branches"][revision] = oid
            self.save()
            return oid

    def save(self) -> None:
        temporary = self.folder / "repositories.tmp"
        temporary.write_text(json.dumps(self.repositories))
        temporary.replace(self.folder / "repositories.json")

    def fault_for(self, line: str) -> Fault | None:
        """The next fault that is meant for this request."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, line):
                    fault.times -= 1
                    return fault
        return None


class _Cut(Exception):
    """The connection ends without an answer."""


class _Refused(Exception):
    """An error of the Hub."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: `seen` is the log."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # --- one request ----------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        self.hub: LoopbackHub = self.server.hub  # type: ignore[attr-defined]
        authorization = self.headers.get("Authorization", "")
        self.seen = Seen(f"{self.command} {self.path}", token=authorization.removeprefix("Bearer ") or None)
        is_control = self.path.startswith("/_loopback/")
        if not is_control:
            self.hub.seen.append(self.seen)
        try:
            fault = None if is_control else self.hub.fault_for(self.seen.line)
            if fault is not None:
                time.sleep(fault.delay_s)
                if fault.after_bytes is not None:
                    self._read(fault.after_bytes)
                    raise _Cut
                if fault.status == 0 and not fault.after_done:
                    raise _Cut
            self.body = self._read(int(self.headers.get("Content-Length") or 0)) if "chunked" not in self._encoding() else self._read_chunks()
            if fault is not None and fault.status:
                self._send(fault.status, json.dumps({"error": "injected"}).encode(), fault.headers)
                return
            status, answer, headers = self._route()
            if fault is not None and fault.after_done:
                raise _Cut
            self._send(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode(), headers)
        except _Refused as error:
            headers = {"X-Error-Message": str(error), **({"X-Error-Code": error.code} if error.code else {})}
            self._send(error.status, json.dumps({"error": str(error), "errors": [{"message": str(error)}]}).encode(), headers)
        except (_Cut, ConnectionError, TimeoutError):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def _encoding(self) -> str:
        return str(self.headers.get("Transfer-Encoding") or "")

    def _read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while self.seen.num_bytes < count:
            part = self.rfile.read1(min(2**16, count - self.seen.num_bytes))  # type: ignore[attr-defined]
            if not part:
                raise _Cut
            parts.append(part)
            self.seen.num_bytes += len(part)
        return b"".join(parts)

    def _read_chunks(self) -> bytes:
        parts: list[bytes] = []
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        self.seen.num_bytes = sum(map(len, parts))
        return b"".join(parts)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.seen.status = status
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # --- who may what ---------------------------------------------------------------------------------------------------

    def _role(self) -> str | None:
        if self.seen.token is None:
            return None
        if self.seen.token not in _TOKENS:
            raise _Refused(401, "Invalid credentials in Authorization header")
        return _TOKENS[self.seen.token]

    def _repository(self, repo: str, is_write: bool = False) -> dict[str, Any]:
        role = self._role()
        repository = self.hub.repositories.get(repo)
        if repository is None or (repository["private"] and role is None):
            raise _Refused(401 if role is None else 404, "Repository not found", "RepoNotFound")
        if is_write and (role in (None, "read") or repo.split("/")[0] not in (OWNER, ORGANISATION)):
            raise _Refused(403, "you need write access to this repository")
        return repository

    def _tree(self, repo: str, revision: str) -> tuple[str, dict[str, dict[str, Any]]]:
        """(commit, files) of a branch or a commit."""
        repository = self._repository(repo)
        revision = urllib.parse.unquote(revision)
        try:
            return repository["branches"].get(revision, revision), self.hub.tree(repository, revision)
        except KeyError:
            raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None

    # --- what it can do -------------------------------------------------------------------------------------------------

    def _route(self) -> tuple[int, Any, dict[str, str]]:
        path = urllib.parse.urlsplit(self.path).path
        for method, pattern, work in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method:
                return work(self, *found.groups())
        raise _Refused(404, f"the loopback Hub has no {self.command} {path}")

    def _whoami(self) -> tuple[int, Any, dict[str, str]]:
        role = self._role()
        if role is None:
            raise _Refused(401, "Invalid username or password.")
        token = {"displayName": "test", "role": role}
        return 200, {"type": "user", "name": OWNER, "orgs": [{"name": ORGANISATION}], "auth": {"accessToken": token}}, {}

    def _create(self) -> tuple[int, Any, dict[str, str]]:
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or OWNER
        repo = f"{owner}/{wanted['name']}"
        if self._role() in (None, "read") or owner not in (OWNER, ORGANISATION):
            raise _Refused(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        answer = {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo}
        with self.hub.lock:
            if repo in self.hub.repositories:
                return 409, {**answer, "error": "You already created this model repo"}, {}
            self.hub.repositories[repo] = {"private": wanted.get("visibility") == "private", "branches": {}, "commits": {}}
            attributes = self.hub.store(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", is_large=False)
            self.hub.commit(repo, "main", {".gitattributes": attributes})
        return 200, answer, {}

    def _validate_yaml(self) -> tuple[int, Any, dict[str, str]]:
        problem = card_problem(json.loads(self.body)["content"])
        if problem:
            raise _Refused(400, problem)
        return 200, {"errors": [], "warnings": []}, {}

    def _preupload(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        self._repository(repo, is_write=True)
        _, tree = self._tree(repo, revision)
        files = []
        for file in json.loads(self.body)["files"]:
            is_large = file["path"].endswith((".safetensors", ".bin")) or file["size"] > _LARGE_BYTES
            entry = tree.get(file["path"])
            oid = None if entry is None else entry["digest"] if entry["is_large"] else entry["oid"]
            files.append({"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": oid})
        return 200, {"files": files}, {}

    def _lfs_batch(self, repo: str) -> tuple[int, Any, dict[str, str]]:
        self._repository(repo, is_write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if not self.hub.object_path(wanted["oid"]).exists():
                # As real storage does: the address is signed, and the token is not sent along.
                upload = {"href": f"{self.hub.url}/_storage/{wanted['oid']}?X-Amz-Signature=0123456789abcdef"}
                verify = {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"}
                entry["actions"] = {"upload": upload, "verify": verify}
            objects.append(entry)
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _put(self, oid: str) -> tuple[int, Any, dict[str, str]]:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _Refused(400, "the content has another SHA-256")
        temporary = self.hub.object_path(f"{oid}.{threading.get_ident()}")
        temporary.write_bytes(self.body)
        temporary.replace(self.hub.object_path(oid))
        return 200, {}, {}

    def _verify(self, repo: str) -> tuple[int, Any, dict[str, str]]:
        wanted = json.loads(self.body)
        path = self.hub.object_path(wanted["oid"])
        if not path.exists() or path.stat().st_size != wanted["size"]:
            raise _Refused(422, "the object is not there")
        return 200, {}, {}

    def _commit(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        self._repository(repo, is_write=True)
        changes: dict[str, dict[str, Any] | None] = {}
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                changes[value["path"]] = self.hub.store(base64.b64decode(value["content"]), is_large=False)
            elif item["key"] == "lfsFile":
                if not self.hub.object_path(value["oid"]).exists():
                    raise _Refused(400, f"{value['path']}: the object {value['oid']} was never uploaded")
                changes[value["path"]] = self.hub.store(self.hub.object_path(value["oid"]).read_bytes(), is_large=True)
            elif item["key"] == "deletedFile":
                changes[value["path"]] = None
        self._tree(repo, revision)
        oid = self.hub.commit(repo, urllib.parse.unquote(revision), changes)
        return 200, {"commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "success": True}, {}

    def _info(self, repo: str, revision: str | None = None) -> tuple[int, Any, dict[str, str]]:
        commit, tree = self._tree(repo, revision or "main")
        siblings = [{"rfilename": name} for name in sorted(tree)]
        about = {"_id": repo, "id": repo, "modelId": repo, "sha": commit, "private": self.hub.repositories[repo]["private"], "siblings": siblings}
        return 200, {**about, "tags": [], "downloads": 0, "likes": 0, "disabled": False, "gated": False}, {}

    def _list(self, repo: str, revision: str, _: str | None = None) -> tuple[int, Any, dict[str, str]]:
        _, tree = self._tree(repo, revision)
        entries = []
        for name, entry in sorted(tree.items()):
            large = {"lfs": {"oid": entry["digest"], "size": entry["size"], "pointerSize": 134}} if entry["is_large"] else {}
            entries.append({"type": "file", "path": name, "oid": entry["oid"], "size": entry["size"], **large})
        return 200, entries, {}

    def _paths_info(self, repo: str, revision: str) -> tuple[int, Any, dict[str, str]]:
        wanted = urllib.parse.parse_qs(self.body.decode()).get("paths", [])
        _, entries, _ = self._list(repo, revision)
        return 200, [entry for entry in entries if entry["path"] in wanted], {}

    def _branch(self, repo: str, branch: str) -> tuple[int, Any, dict[str, str]]:
        repository, branch = self._repository(repo, is_write=True), urllib.parse.unquote(branch)
        if branch in repository["branches"]:
            raise _Refused(409, f"Reference already exists: {branch}")
        repository["branches"][branch] = repository["branches"]["main"]
        self.hub.save()
        return 200, {}, {}

    def _resolve(self, repo: str, revision: str, name: str) -> tuple[int, Any, dict[str, str]]:
        commit, tree = self._tree(repo, revision)
        entry = tree.get(urllib.parse.unquote(name))
        if entry is None:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        content = self.hub.object_path(entry["digest"]).read_bytes()
        etag = f'"{entry["digest"] if entry["is_large"] else entry["oid"]}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if entry["is_large"]:
            headers |= {"X-Linked-ETag": etag, "X-Linked-Size": str(entry["size"])}
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if begin:
            start = int(begin.group(1))
            return 206, content[start:], {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        return 200, content, headers

    def _add_faults(self) -> tuple[int, Any, dict[str, str]]:
        self.hub.faults += [Fault(**fault) for fault in json.loads(self.body)]
        return 200, {}, {}

    def _show_seen(self) -> tuple[int, Any, dict[str, str]]:
        return 200, [{**asdict(seen), "token": seen.token is not None} for seen in self.hub.seen], {}


_ROUTES = [
    ("GET", r"/api/whoami-v2", _Handler._whoami),
    ("POST", r"/api/repos/create", _Handler._create),
    ("POST", r"/api/validate-yaml", _Handler._validate_yaml),
    ("POST", rf"/api/models/({_NAME})/preupload/([^/]+)", _Handler._preupload),
    ("POST", rf"/({_NAME})\.git/info/lfs/objects/batch", _Handler._lfs_batch),
    ("POST", rf"/({_NAME})\.git/info/lfs/objects/verify", _Handler._verify),
    ("PUT", r"/_storage/([0-9a-f]{64})", _Handler._put),
    ("POST", rf"/api/models/({_NAME})/commit/([^/]+)", _Handler._commit),
    ("POST", rf"/api/models/({_NAME})/branch/([^/]+)", _Handler._branch),
    ("POST", rf"/api/models/({_NAME})/paths-info/([^/]+)", _Handler._paths_info),
    ("GET HEAD", rf"/api/models/({_NAME})", _Handler._info),
    ("GET HEAD", rf"/api/models/({_NAME})/revision/([^/]+)", _Handler._info),
    ("GET", rf"/api/models/({_NAME})/tree/([^/]+)(/.*)?", _Handler._list),
    ("GET HEAD", rf"/({_NAME})/resolve/([^/]+)/(.+)", _Handler._resolve),
    ("POST", r"/_loopback/faults", _Handler._add_faults),
    ("GET", r"/_loopback/seen", _Handler._show_seen),
]


def card_problem(card: str) -> str | None:
    """What the Hub would refuse in a card's metadata, as far as its documentation says."""
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if not found:
        return None  # a card without metadata is a warning
    try:
        data = yaml.safe_load(found.group(1))
    except yaml.YAMLError as error:
        return f"the metadata is no YAML: {error}"
    if not isinstance(data, dict):
        return "the metadata is no mapping"
    for name in [data.get("base_model"), *(data.get("datasets") or [])]:
        if name is not None and not re.fullmatch(_NAME, name):
            return f"{name!r} is no id of the Hub"
    if data.get("base_model_relation", _RELATIONS[0]) not in _RELATIONS:
        return f"base_model_relation must be one of {', '.join(_RELATIONS)}"
    for model in data.get("model-index", []):
        for result in model["results"]:
            if not (result["task"]["type"] and result["dataset"]["type"] and result["dataset"]["name"] and result["metrics"]):
                return "model-index has an incomplete result"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face Hub on the loopback interface, for tests.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--folder", type=Path, required=True, help="where it keeps what is uploaded")
    parser.add_argument("--empty", action="store_true", help="forget what an earlier start has left in the folder")
    options = parser.parse_args()
    if options.empty:
        shutil.rmtree(options.folder, ignore_errors=True)
    hub = LoopbackHub(options.folder, options.port)
    # One line each, to be read by `eval` in a shell.
    for name, value in hub.environment().items():
        print(f"export {name}={value}", flush=True)
    hub.serve_forever()


if __name__ == "__main__":
    main()
