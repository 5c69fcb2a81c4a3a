"""A real HTTP server that speaks as much of the OpenAI API as headstart asks for, with a deterministic model and any fault that is wanted.

Its chat model answers with a hash of the whole history, so an answer tells what was asked. Its completion model answers with token ids that follow
from the prompt's.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = dict[str, Any]
END = 257


def chat_answer(messages: list[Message]) -> str:
    """The model: what it says to a history."""
    return f"answer {hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:12]}"


def completion_ids(prompt: list[int], max_tokens: int) -> list[int]:
    """The other model: 1 to 6 tokens and the end token, or `max_tokens` without it."""
    ids = [(7 * sum(prompt) + 31 * place) % 200 for place in range(1 + sum(prompt) % 6)] + [END]
    return ids[:max_tokens]


@dataclass
class Fault:
    """Instead of an answer: a status with a body, or one of the ways to break off.

    Attributes:
        kind: status, cut (the connection closes without a word), half (it closes within the reply), garbage (a reply that is no JSON), late.
    """

    kind: str = "status"
    status: int = 500
    message: str = "something broke"
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class FakeServer:
    """Serves one model until the `with` block ends.

    Attributes:
        bodies: of the requests for answers, in their order of arrival.
        asked: how often each last user message was asked.
        headers: of the newest request.
        most_in_flight: requests answered at the same time.
        fault: called with a request and how often its like has come before; a Fault replaces the answer.
        message: makes the message of an answer from the request.
        choice: further fields of the choice, for example finish_reason.
    """

    def __init__(self, model: str = "tiny", max_model_len: int | None = None, delay_s: float = 0.0, port: int = 0) -> None:
        self.model, self.max_model_len, self.delay_s = model, max_model_len, delay_s
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.asked: Counter[str] = Counter()
        self.headers: dict[str, str] = {}
        self.most_in_flight = self._in_flight = 0
        self.fault: Callable[[dict[str, Any], int], Fault | None] = lambda body, count: None
        self.message: Callable[[dict[str, Any]], Message] = lambda body: {"content": chat_answer(body["messages"])}
        self.choice: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {}
        self.gives_token_ids = True
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.headers = dict(self.headers)
                if self.path != "/v1/models":
                    self.reply(404, {"error": {"message": f"no route {self.path}"}})
                    return
                fault = fake.fault({}, 0)
                if fault is not None and fault.status in (400, 401, 403):
                    self.reply(fault.status, {"error": {"message": fault.message}})
                    return
                self.reply(200, {"object": "list", "data": [{"id": fake.model, "max_model_len": fake.max_model_len}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = json.dumps(body.get("messages") or body["prompt"])
                with fake._lock:
                    fake.bodies.append(body)
                    fake.times.append(time.monotonic())
                    fake.headers = dict(self.headers)
                    if "messages" in body:
                        fake.asked[body["messages"][-1]["content"]] += 1
                    count = fake._seen[question]
                    fake._seen[question] += 1
                    fake._in_flight += 1
                    fake.most_in_flight = max(fake.most_in_flight, fake._in_flight)
                try:
                    time.sleep(fake.delay_s)
                    self.answer(body, fake.fault(body, count))
                finally:
                    with fake._lock:
                        fake._in_flight -= 1

            def answer(self, body: dict[str, Any], fault: Fault | None) -> None:
                if fault is None or fault.kind == "late":
                    time.sleep(fault.seconds if fault else 0)
                    self.reply(200, fake.completion(body) if "prompt" in body else fake.chat(body))
                elif fault.kind == "status":
                    self.reply(fault.status, {"error": {"message": fault.message}}, fault.headers)
                elif fault.kind == "garbage":
                    self.reply(200, "{not json")
                else:
                    if fault.kind == "half":
                        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
                    self.close_connection = True

            def reply(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
                data = (value if isinstance(value, str) else json.dumps(value)).encode()
                self.send_response(status)
                for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass  # a client that was killed

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> FakeServer:
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.02), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", **self.message(body)}
        usage = {"prompt_tokens": 10, "completion_tokens": 3}
        return {"model": self.model, "usage": usage, "choices": [{"index": 0, "finish_reason": "stop", "message": message, **self.choice(body)}]}

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = completion_ids(body["prompt"], body["max_tokens"])
        has_ended = ids[-1] == END
        text = bytes(token for token in ids if token < 128).decode()
        choice = {"index": 0, "text": text, "finish_reason": "stop" if has_ended else "length"}
        if self.gives_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
        return {"model": self.model, "choices": [{**choice, **self.choice(body)}]}
