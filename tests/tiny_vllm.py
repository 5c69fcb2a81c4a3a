"""A small real HTTP server in the place of `vllm serve`: it takes the same arguments and speaks the same API, and misbehaves as told.

    python tests/tiny_vllm.py -I SCRIPT serve TARGET --port P --served-model-name NAME [--speculative-config JSON]

Not a test: tests/test_serve_http.py starts it. The environment variable TINY_VLLM names a JSON file with `run`, a finished run whose answers it
gives and whose acceptance it counts, and any of these faults:

    start: exit with this text instead of starting      name: model name that it serves            version: of /version
    busy: so many completions get `busy_status` first, with Retry-After `retry_after`              status: every completion gets it
    die_after: so many answers, and it is gone in the middle of the next                           cut: so many answers break off first
    without_ids: no token ids      without_counters: none in /metrics      shift: added to the share of the first position
    num_drafts: so many at a time, fewer than the run's
    change: the prompts whose plain answer differs in the last token, with `gap` nats between the best two
    child: it starts a process that outlives it, and writes both process ids to this file
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COUNTED_PER_ANSWER = 10**6
LABELS = 'engine="0",model_name="a \\"name\\", with commas"'

plan = json.loads(Path(os.environ["TINY_VLLM"]).read_text())
run = Path(plan["run"])
answers = {
    tuple(answer["prompt_ids"]): answer["answer_ids"] for answer in map(json.loads, (run / "answers" / "answers.jsonl").read_text().splitlines())
}
joint = json.loads((run / "report.json").read_text())["joint_acceptance"]
joint = joint[: plan.get("num_drafts", len(joint))]
state = {"completions": 0, "answers": 0, "running": 0, "most_running": 0}
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """The endpoints that a sweep uses."""

    protocol_version = "HTTP/1.1"

    def log_message(self, text, *values):
        print(text % values, flush=True)

    def do_GET(self):
        if self.path == "/health":
            self.reply(200, {})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": server_arguments.served_model_name, "root": server_arguments.target}]})
        elif self.path == "/version":
            self.reply(200, {"version": plan.get("version", "0.32.0")})
        elif self.path == "/state":
            self.reply(200, state)
        elif self.path == "/metrics":
            self.reply(200, metrics(), "text/plain")
        else:
            self.reply(404, {"error": {"message": "Not Found"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with lock:
            state["completions"] += 1
            number = state["completions"]
        if plan.get("key") and self.headers.get("authorization") != f"Bearer {plan['key']}":
            self.reply(401, {"error": "Unauthorized"})
        elif number <= plan.get("busy", 0):
            self.reply(plan.get("busy_status", 429), {"error": {"message": "too much to do"}}, after=plan.get("retry_after"))
        elif "status" in plan:
            self.reply(plan["status"], {"object": "error", "message": "it cannot"})
        elif body.get("logprobs"):
            tops = {"token_id:1": -0.5, "token_id:2": -0.5 - plan.get("gap", 0.0)}
            self.reply(200, {"choices": [{"token_ids": [1], "logprobs": {"top_logprobs": [tops]}}]})
        else:
            with lock:
                state["running"] += 1
                state["most_running"] = max(state["most_running"], state["running"])
            try:
                self.stream(body)
            finally:
                with lock:
                    state["running"] -= 1

    def stream(self, body):
        prompt = body["prompt"]
        tokens = list(answers[tuple(prompt)])[: body["max_tokens"]]
        if not is_drafting and body["max_tokens"] > 4 and list(answers).index(tuple(prompt)) in plan.get("change", []):
            tokens[-1] += 1
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        is_whole = body["max_tokens"] > 4  # the others only warm up
        with lock:
            state["answers"] += is_whole
            number = state["answers"]
        for place in range(0, len(tokens), 3):
            choice = {"index": 0, "text": "", "token_ids": tokens[place : place + 3]}
            if plan.get("without_ids"):
                del choice["token_ids"]
            self.event(json.dumps({"choices": [choice]}))
            time.sleep(plan.get("pause", 0.0))
            if is_whole and number > plan.get("die_after", 10**9):
                print("Fatal: the engine has lost its memory", flush=True)
                os._exit(9)
            if is_whole and number <= plan.get("cut", 0):
                self.close_connection = True
                return
        self.event("[DONE]")
        self.close_connection = True

    def event(self, text):
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def reply(self, status, body, kind="application/json", after=None):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        if after is not None:
            self.send_header("retry-after", str(after))
        self.end_headers()
        self.wfile.write(data)


def metrics():
    lines = ["# HELP vllm:num_requests_running Number of requests.", f"vllm:num_requests_running{{{LABELS}}} {state['running']}"]
    if is_drafting and not plan.get("without_counters"):
        num = state["answers"] * COUNTED_PER_ANSWER
        accepted = [round(num * share) for share in joint]
        accepted[0] += round(num * plan.get("shift", 0.0))
        lines += [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f"vllm:spec_decode_num_drafts_total{{{LABELS}}} {num:.1f}",
            f"vllm:spec_decode_num_drafts_created{{{LABELS}}} 1.7e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{LABELS}}} {num * len(joint):.1f}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{LABELS}}} {float(sum(accepted))}",
            *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{LABELS},position="{p}"}} {n:.1f}' for p, n in enumerate(accepted)),
        ]
    return "\n".join(lines) + "\n"


parser = argparse.ArgumentParser()
parser.add_argument("-I", action="store_true")
parser.add_argument("script")
parser.add_argument("command")
parser.add_argument("target")
parser.add_argument("--port", type=int)
parser.add_argument("--served-model-name")
parser.add_argument("--speculative-config")
server_arguments, others = parser.parse_known_args()
is_drafting = server_arguments.speculative_config is not None
server_arguments.served_model_name = plan.get("name", server_arguments.served_model_name)
print("arguments", json.dumps(sys.argv[1:]), flush=True)
if "start" in plan:
    sys.exit(plan["start"])
if "child" in plan:
    child = subprocess.Popen(["sleep", "600"])
    Path(plan["child"]).write_text(f"{os.getpid()} {child.pid}")
ThreadingHTTPServer(("127.0.0.1", server_arguments.port), Handler).serve_forever()
