"""A loopback server that speaks as much of Weights & Biases' protocol as its real client needs to log, resume and sync.

It keeps what a server keeps of a run: the history by line, the summary, and the bytes of uploaded files.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0" * 40


class LoopbackWandb:
    """Started by `with`; `url` is WANDB_BASE_URL."""

    def __init__(self) -> None:
        self.history: dict[str, dict[int, dict[str, Any]]] = {}
        self.uploads: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LoopbackWandb:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, folder: str) -> dict[str, str]:
        """What makes the client use this server and write nothing outside `folder`."""
        places = dict.fromkeys(("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"), folder)
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online", **places}

    def rows(self, run_id: str) -> list[dict[str, Any]]:
        """The history of a run, by line."""
        return [row for _, row in sorted(self.history.get(run_id, {}).items())]

    def _stream(self, run_id: str, body: dict[str, Any]) -> None:
        lines = self.history.setdefault(run_id, {})
        for name, chunk in (body.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                lines |= {chunk["offset"] + index: json.loads(line) for index, line in enumerate(chunk["content"])}

    def _answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        def file(name: str) -> dict[str, Any]:
            names = {"id": name, "name": name, "displayName": name, "storagePath": name}
            upload = {"uploadUrl": f"{self.url}/upload/{name}", "uploadHeaders": [], "uploadMultipartUrls": None}
            return names | upload | {"artifact": {"id": "artifact"}}

        project = {"id": "project", "name": variables.get("project") or "project", "entity": {"id": "entity", "name": "me"}}
        if operation == "RunResumeStatus":
            return {"model": project | {"bucket": self._resumed(variables["name"])}}
        if operation == "UpsertBucket":
            name = variables["name"] or "unnamed"
            is_new = name not in self.history
            lines = self.history.setdefault(name, {})
            texts = {"displayName": name, "description": None, "config": "{}", "sweepName": None, "historyLineCount": len(lines)}
            return {"upsertBucket": {"bucket": {"id": name, "name": name, "project": project, **texts}, "inserted": is_new}}
        if operation == "CreateArtifactFiles":
            edges = [{"node": file(item["name"])} for item in variables["input"]["artifactFiles"]]
            return {"createArtifactFiles": {"files": {"edges": edges}}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": [file(name) for name in variables["files"]]}}
        artifact = {"id": "artifact", "state": "PENDING", "digest": "", "artifactSequence": {"id": "sequence", "latestArtifact": None}}
        fixed: dict[str, dict[str, Any]] = {
            "Viewer": {"viewer": {"id": "me", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}},
            "ArtifactType": {"project": None},
            "ServerFeaturesQuery": {"serverInfo": {"features": []}},
            "CreateArtifact": {"createArtifact": {"artifact": artifact}},
            "CreateArtifactManifest": {"createArtifactManifest": {"artifactManifest": {"id": "manifest", "file": file("manifest")}}},
            "CommitArtifact": {"commitArtifact": {"artifact": artifact}},
        }
        return fixed.get(operation, {})

    def _resumed(self, run_id: str) -> dict[str, Any] | None:
        """What a client is told of a run that it may go on with."""
        if run_id not in self.history:
            return None
        rows = self.rows(run_id)
        counts = {"logLineCount": 0, "historyLineCount": len(rows), "eventsLineCount": 0}
        texts = {"summaryMetrics": "{}", "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]), "eventsTail": "[]", "config": "{}"}
        return {"id": run_id, "name": run_id, "displayName": run_id, "tags": [], "notes": None, "wandbConfig": "{}", **counts, **texts}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def _body(self) -> bytes:
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _reply(self, answer: dict[str, Any]) -> None:
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self._reply({})

            def do_PUT(self) -> None:
                server.uploads[self.path.removeprefix("/upload/")] = self._body()
                self._reply({})

            def do_POST(self) -> None:
                body = self._body()
                if self.path.endswith("/file_stream"):
                    server._stream(self.path.split("/")[-2], json.loads(body))
                    self._reply({})
                elif self.path == "/graphql":
                    asked = json.loads(body)
                    named = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
                    self._reply({"data": server._answer(named[1] if named else "", asked.get("variables") or {})})
                else:
                    self._reply({})

        return Handler
