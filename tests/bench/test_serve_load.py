"""The load generator against a live server of its own kind: a stand-in that answers what the test knows."""

import asyncio
import importlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


@pytest.fixture
def serve_load(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("serve_load")


class StandIn(BaseHTTPRequestHandler):
    """Two events and a usage of three tokens; seed 1 gets a 429, seed 2 an error in its stream."""

    seen: list  # bodies, set by the test

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, json.dumps({"data": [{"id": "named"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if body["seed"] == 1:
            self.answer(429, b"{}")
            return
        events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]
        events.append({"error": {}} if body["seed"] == 2 else {"choices": [], "usage": {"completion_tokens": 3}})
        lines = [f"data: {json.dumps(event)}" for event in events] + ["data: [DONE]"]
        self.answer(200, "\n\n".join([*lines, ""]).encode())

    def answer(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def test_a_trace_is_its_seed_and_arrives_at_its_rate(serve_load):
    shape = {"rate": 50.0, "prompt_words": 8, "max_tokens": 4, "shared": 0.5}
    asked = serve_load.trace(2000, **shape, seed=3)
    assert asked == serve_load.trace(2000, **shape, seed=3) != serve_load.trace(2000, **shape, seed=4)
    arrivals = [at for at, _ in asked]
    assert arrivals == sorted(arrivals) and 36 < arrivals[-1] < 44
    assert {body["max_tokens"] for _, body in asked} == set(range(1, 8))
    long = [body["prompt"] for _, body in asked if len(body["prompt"].split()) > 32]
    assert 900 < len(long) < 1100 and len({tuple(prompt.split()[:32]) for prompt in long}) == 4


def test_answers_are_counted_by_how_they_ended(serve_load):
    StandIn.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        asked = [(0.0, {"prompt": "x", "max_tokens": 3, "seed": seed}) for seed in range(5)]
        model, answers = asyncio.run(serve_load.run(f"http://127.0.0.1:{server.server_port}", None, None, asked))
    finally:
        server.shutdown()
        server.server_close()
    assert model == "named" and all(body["model"] == "named" and body["stream"] for body in StandIn.seen)
    found = serve_load.figures(answers)
    assert found["requests"] == 5 and found["answered"] == 3
    assert found["statuses"] == {"200": 3, "429": 1, "error": 1}
    assert all(len(answers[i].events) == 2 and answers[i].n_tokens == 3 for i in (0, 3, 4))


def test_percentiles_are_of_waits_since_arrival(serve_load):
    answers = [serve_load.Answer(10.0, [10.0 + i / 100, 10.5 + i / 100], 11.0, 2, 1, "200") for i in range(1, 102)]
    found = serve_load.figures(answers)
    assert found["ttft_ms"] == {"p50": 510.0, "p95": 960.0, "p99": 1000.0}
    assert found["gap_ms"] == {"p50": 500.0, "p95": 500.0, "p99": 500.0}
    assert found["end_ms"]["p50"] == 1000.0 and found["tokens_per_s"] == 202.0 and found["cached_tokens"] == 101


def test_a_server_that_is_not_there_is_no_answer(serve_load):
    asked = [(0.0, {"prompt": "x", "max_tokens": 1, "seed": 0})]
    _, answers = asyncio.run(serve_load.run("http://127.0.0.1:1", "m", None, asked))
    assert serve_load.figures(answers) == {"requests": 1, "answered": 0, "statuses": {"ConnectError": 1}}
