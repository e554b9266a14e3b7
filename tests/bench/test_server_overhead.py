"""The comparison of engine and server: it runs, writes what it measured, and fails where answers differ."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import command_line
import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def server_overhead(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("server_overhead")


def test_the_script_writes_what_it_measured(smollm2_path, tmp_path):
    arguments = [
        "--streams",
        "3",
        "--tokens",
        "4",
        "--rounds",
        "2",
        "--prompt-tokens",
        "48",
        "50",
        "--ttft-rounds",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, BENCH / "server_overhead.py", "--model", smollm2_path, "--results", tmp_path, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=command_line.environment(PYTHONSAFEPATH=None),
    )
    assert done.returncode == 0, done.stderr
    streams, *waits = map(json.loads, (tmp_path / "server_overhead.jsonl").read_text().splitlines())
    assert all(row["commit"] and row["threads"] >= 1 and row["loop"] for row in [streams, *waits])
    assert streams["streams"] == 3 and 1 <= streams["events"] <= 12
    for name in ("in_process_wall", "http_wall", "in_process_cpu", "http_cpu", "overhead_wall"):
        assert len(streams[name]["samples"]) == 2
    assert all(low > 0 for low in streams["in_process_wall"]["samples"] + streams["http_wall"]["samples"])
    assert [(row["prompt_tokens"], row["cached_tokens"]) for row in waits] == [(48, 47), (50, 48)]
    assert all(len(row["http"]["samples"]) == len(row["in_process"]["samples"]) == 2 for row in waits)


def test_what_is_no_whole_stream_is_no_answer(server_overhead):
    stream = object.__new__(server_overhead.Stream)
    event = b'data: {"choices":[{"token_ids":[%d,7]}]}\n\n'
    stream.parts = [
        b"HTTP/1.1 200 OK\r\n\r\n" + event % 1,
        event % 2 + b'data: {"choices":[]}\n\ndata: [DONE]\n\n',
        b"",
    ]
    assert stream.tokens() == [1, 7, 2, 7] and stream.n_events() == 3
    for parts in ([b"HTTP/1.1 429 Too Many Requests\r\n\r\ndata: [DONE]"], [b"HTTP/1.1 200 OK\r\n\r\n" + event % 1]):
        stream.parts = parts
        with pytest.raises(RuntimeError, match="the server answered"):
            stream.tokens()


def test_overhead_is_a_share_of_what_the_server_took(server_overhead):
    assert server_overhead.overhead({"in_process": [3.0, 9.0, 3.0], "http": [4.0, 4.0, 1.0]}) == 0.25
