"""The server at saturation: memory and file descriptors stay flat, whatever its clients do. And streams that nobody
reads, beside one that somebody does. PAGEDKV_SOAK_SECONDS=3600 is the long form."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from test_clients import raw_request
from test_serve import running

SECONDS = float(os.environ.get("PAGEDKV_SOAK_SECONDS", "12"))

# A client in a process of its own, to be killed at any moment: it reads streams one after the other.
VICTIM = """
import httpx, itertools, sys
with httpx.Client(base_url=sys.argv[1], timeout=60) as client:
    for i in itertools.count():
        body = {"prompt": "victim " * 9, "max_tokens": 60, "ignore_eos": True, "seed": i, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                pass
"""


def resident(process):
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def descriptors(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def traffic(url, seed, deadline):
    """Requests of every kind until the deadline: read to the end, left in the middle, refused, not streamed."""
    draw = random.Random(seed)
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < deadline:
            body = {"prompt": "soak " * draw.randint(1, 15), "max_tokens": draw.randint(1, 40)}
            body["seed"] = draw.randrange(99)
            kind = draw.random()
            if kind < 0.1:
                assert client.post("/v1/completions", json=body | {"temperature": -1}).status_code == 400
            elif kind < 0.5:
                answer = client.post("/v1/completions", json=body | {"n": draw.randint(1, 3)})
                assert answer.status_code in (200, 429), answer.text
            else:
                with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                    assert answer.status_code in (200, 429)
                    for _ in answer.iter_lines():
                        if draw.random() < 0.1:
                            break


def settled(client, process):
    """Counters of a server that has nothing to do any more, its resident bytes and its file descriptors."""
    deadline = time.monotonic() + 60
    while True:
        found = client.get("/debug/arena").json()["stats"]
        if not found["running"] and not found["waiting"] and not found["pages_in_use"] and descriptors(process) < 40:
            return found, resident(process), descriptors(process)
        assert time.monotonic() < deadline, (found, descriptors(process))
        time.sleep(0.05)


def saturate(url, seconds, seed):
    """Twelve clients and a stream of victims for so long; the first exception of a client, if any."""
    deadline, errors = time.monotonic() + seconds, []

    def client(i):
        try:
            traffic(url, f"{seed} {i}", deadline)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=[i]) for i in range(12)]
    for thread in threads:
        thread.start()
    n_killed = 0
    while time.monotonic() < deadline:
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, url])
        time.sleep(min(1.5, max(0.0, deadline - time.monotonic())))
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        n_killed += 1
    for thread in threads:
        thread.join()
    return errors, n_killed


def test_memory_and_descriptors_stay_flat(tmp_path, tiny_path):
    options = ["--threads", 1, "--kv-pages", 60, "--max-model-len", 200, "--max-queue", 16, "--max-num-seqs", 8]
    with running(tmp_path, tiny_path, *options) as (process, client):
        url = str(client.base_url)
        errors, _ = saturate(url, SECONDS, "warm")
        assert not errors
        before, bytes_before, open_before = settled(client, process)
        errors, n_killed = saturate(url, SECONDS, "measured")
        assert not errors and n_killed >= SECONDS / 6
        after, bytes_after, open_after = settled(client, process)
        assert after["steps"] > before["steps"] + 100
        assert after["pages_free"] + after["pages_cached"] == after["pages_total"] == 60
        assert open_after <= open_before + 4
        assert bytes_after < bytes_before + (8 << 20), f"{bytes_before} grew to {bytes_after}"


@pytest.mark.parametrize("n_idle", [256])
def test_streams_that_nobody_reads(tmp_path, tiny_path, n_idle):
    """They are asked for and left lying; whoever comes then gets the answer of an idle server."""
    options = ["--threads", 1, "--kv-pages", 6000, "--max-model-len", 256, "--max-queue", 400, "--max-num-seqs", 300]
    asked = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "seed": 7, "temperature": 0.9}
    with running(tmp_path, tiny_path, *options) as (process, client):
        expected = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        idle = []
        try:
            for i in range(n_idle):
                connection = socket.create_connection((client.base_url.host, client.base_url.port))
                body = {"prompt": "idle", "max_tokens": 240, "ignore_eos": True, "seed": i, "stream": True}
                connection.sendall(raw_request("/v1/completions", body))
                idle.append(connection)
            pieces = []
            with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
            assert "".join(pieces) == expected
        finally:
            for connection in idle:
                connection.close()
        found, _, _ = settled(client, process)
        assert found["pages_free"] + found["pages_cached"] == found["pages_total"]
