"""Clients that come in crowds, go away in the middle, read slowly, or speak bad HTTP: nobody else notices."""

import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from conftest import MODEL, served

from pagedkv import LLM, SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = ["page", "table", "of", "maps", "each", "virtual", "address", "while", "memory", "waits", "quiet"]


def raw_request(path, body, *, headers=(), length=None):
    """The bytes of a POST of a JSON value."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {size}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


def connect(live):
    return socket.create_connection(("127.0.0.1", live.port), timeout=60)


def receive_all(connection):
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def exchange(live, data):
    """What the server answers to `data` until it closes or is silent for a while."""
    with connect(live) as connection:
        connection.sendall(data)
        connection.settimeout(0.5)
        parts = []
        with suppress(TimeoutError):
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


def steps_until_free(live, n_before):
    """Engine steps between a moment when `n_before` had been made and the next moment when no page is in use."""
    deadline = time.monotonic() + 60
    while live.llm.engine.stats()["pages_in_use"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return live.llm.engine.stats()["steps"] - n_before


# Leaving


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_frees_its_pages(real, stream, phase, how):
    """Also while its prompt is computed, without a stream, and with the connection reset instead of closed."""
    real.wait_idle()
    ids = list(range(1000, 4000 if phase == "prefill" else 1020))
    body = {"prompt": ids, "max_tokens": 1500, "ignore_eos": True, "stream": stream, "n": 2}
    connection = connect(real)
    connection.sendall(raw_request(COMPLETIONS, body))
    generated = real.llm.engine.stats()["generation_tokens"]
    deadline = time.monotonic() + 60
    while True:
        stats = real.llm.engine.stats()
        if stats["pages_in_use"] and (phase == "prefill" or stats["generation_tokens"] > generated + 6):
            break
        assert time.monotonic() < deadline, stats
        time.sleep(0.002)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    steps = real.llm.engine.stats()["steps"]
    connection.close()
    assert steps_until_free(real, steps) <= 3
    stats = real.wait_idle()
    assert stats["generation_tokens"] < generated + 1000 and real.llm.check() == []


def test_leaving_before_the_queue_moves(real):
    """Requests that wait, and whole batches of prompts, go with their client."""
    real.wait_idle()
    aborted = real.llm.engine.stats()["requests_abort"]
    connections = [connect(real) for _ in range(5)]
    for connection in connections:
        body = {"prompt": [f"Number {i}:" for i in range(20)], "max_tokens": 1000, "ignore_eos": True}
        connection.sendall(raw_request(COMPLETIONS, body))
    deadline = time.monotonic() + 60
    while (stats := real.llm.engine.stats())["waiting"] + stats["running"] < 100:
        assert time.monotonic() < deadline, stats
        time.sleep(0.002)
    for connection in connections:
        connection.close()
    stats = real.wait_idle(60)
    assert stats["requests_abort"] == aborted + 100 and stats["pages_in_use"] == 0


def test_a_client_of_http_1_0_gets_a_stream_it_can_read(real):
    """It knows no chunks: the body is what a client of HTTP/1.1 reads, its length known."""
    body = {"prompt": "A page", "max_tokens": 9, "seed": 3, "stream": True, "stream_options": {"include_usage": True}}
    with connect(real) as connection:
        connection.sendall(raw_request(COMPLETIONS, body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        answer = receive_all(connection)
    head, _, found = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and b"content-length: %d\r\n" % len(found) in head.lower() + b"\r\n"
    events = [json.loads(line[6:]) for line in found.decode().splitlines() if line.startswith("data: {")]
    assert found.endswith(b"data: [DONE]\n\n") and events[-1]["usage"]["completion_tokens"] == 9
    expected = real.post(COMPLETIONS, {**body, "stream": False, "stream_options": None}).json()["choices"][0]["text"]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == expected


def test_the_official_client_stops_a_stream(real):
    real.wait_idle()
    stream = real.client().completions.create(
        model=MODEL, prompt="Count: one, two,", max_tokens=2000, extra_body={"ignore_eos": True}, stream=True
    )
    for _, _ in zip(range(5), stream, strict=False):
        pass
    assert real.llm.engine.stats()["running"] == 1
    steps = real.llm.engine.stats()["steps"]
    stream.close()
    assert steps_until_free(real, steps) <= 3


# Crowds


def crowd(seed, n):
    """Requests of every kind; each with what has to be known to compute it alone."""
    rng = random.Random(seed)
    found = []
    for number in range(n):
        prompt = f"{number}: " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        found.append(
            {
                "prompt": prompt,
                "max_tokens": rng.randint(1, 30),
                "temperature": rng.choice([0, 0.7, 1.3]),
                "seed": rng.randrange(2**32),
                "n": rng.choice([1, 1, 1, 2]),
                "top_p": rng.choice([1.0, 0.9]),
                "stop": rng.choice([None, [" the"]]),
            }
        )
    return rng, found


def test_every_answer_of_a_crowd_is_its_solo_answer(smollm2_path, solo):
    """64 clients at a time over a pool too small for half of them, a third of which leave at some moment."""
    rng, requests = crowd(7, 64)
    leaves = [rng.random() < 0.33 for _ in requests]
    after = [rng.random() * 2 for _ in requests]
    left = []  # those who left before their answer came
    start = threading.Barrier(64)

    def ask(live, number):
        body = requests[number]
        with httpx.Client(base_url=live.url, timeout=300) as client:
            start.wait()
            if leaves[number]:
                long = {**body, "max_tokens": 400, "ignore_eos": True, "stream": False, "n": 2}
                try:
                    client.post(COMPLETIONS, json=long, timeout=httpx.Timeout(300, read=after[number]))
                except httpx.ReadTimeout:
                    left.append(number)
                return None
            if number % 2:
                return [choice["text"] for choice in client.post(COMPLETIONS, json=body).json()["choices"]]
            texts = [""] * body["n"]
            with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            texts[choice["index"]] += choice["text"]
            assert line == "" or line == "data: [DONE]"
            return texts

    pages = 40  # of 16 tokens; 64 clients with about 80 tokens each want some 320
    with LLM(smollm2_path, threads=2, kv_pages=pages, max_num_seqs=48) as llm, served(llm) as live:
        with ThreadPoolExecutor(64) as pool:
            with llm.engine._lock:  # no step before those who stay are there: they meet however slow the machine is
                asked = [pool.submit(ask, live, number) for number in range(64)]
                deadline = time.monotonic() + 120
                while llm.engine.stats()["waiting"] < 64 - sum(leaves):
                    assert time.monotonic() < deadline, llm.engine.stats()
                    time.sleep(0.01)
            answers = [each.result() for each in asked]
        stats = live.wait_idle()
        found = live.metrics()
        assert stats["preemptions"] > 0 and stats["requests_abort"] == len(left) > 10
        assert found['pagedkv:pages{state="free"}'] + found['pagedkv:pages{state="cached"}'] == pages
        assert found['pagedkv:pages{state="in_use"}'] == 0 == found["vllm:num_requests_running"]
        assert found["vllm:num_requests_waiting"] == 0 == found["vllm:kv_cache_usage_perc"]
        assert llm.check() == []
    stayed = [number for number in range(64) if not leaves[number]]
    params = [SamplingParams(**{k: v for k, v in requests[number].items() if k != "prompt"}) for number in stayed]
    for number, output in zip(stayed, solo.generate([requests[i]["prompt"] for i in stayed], params), strict=True):
        assert answers[number] == [each.text for each in output.outputs], requests[number]


def test_a_reader_that_stops_costs_nobody(tiny_path):
    """What nobody reads waits in bounded space and holds nobody up. Read again, it is all there, in fewer events."""
    params = SamplingParams(max_tokens=240, seed=5, ignore_eos=True)
    with LLM(tiny_path, threads=1, kv_pages=100) as llm, served(llm, send_buffer=4096) as live:
        sleeper = socket.socket()
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sleeper.settimeout(120)
        sleeper.connect(("127.0.0.1", live.port))
        body = {"prompt": "A page", "max_tokens": 240, "seed": 5, "ignore_eos": True, "stream": True, "logprobs": 20,
                "return_token_ids": True}  # fmt: skip
        sleeper.sendall(raw_request(COMPLETIONS, body, headers=["Connection: close"]))
        assert live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 9}).status_code == 200
        live.wait_idle()
        assert live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 9}).status_code == 200
        text = receive_all(sleeper).decode("utf-8", "replace")
        sleeper.close()
        wanted = llm.generate("A page", params)[0].outputs[0]
    events = [json.loads(line.partition("data: ")[2]) for line in text.split("\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == wanted.token_ids
    assert "".join(choice["text"] for choice in choices) == wanted.text and "data: [DONE]" in text
    assert len(events) < 200


# Bad HTTP


GET, POST = b"GET /health HTTP/1.1\r\nHost: x\r\n", b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
JSON, CHUNKED = b"Content-Type: application/json\r\n", b"Transfer-Encoding: chunked\r\n"
BAD_HTTP = [
    # data, status; None: it waits for the rest; 0: as the HTTP library likes, but no failure
    (b"", None), (b"\r\n\r\n", None), (b"hello\r\n\r\n", 400), (b"GET / HTTP/9.9\r\n\r\n", 0), (GET, None),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n" + b"\0" * 200, 400), (b"GET /health HTTP/1.1\r\n\r\n", 0),
    (GET + b"Host: b\r\n\r\n", 0), (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 0),
    (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400), (GET + b"A: b\r\n" * 20_000 + b"\r\n", 0),
    (POST + b"\r\n", 415), (POST + JSON + b"\r\n", 400), (POST + JSON + b"Content-Length: -5\r\n\r\n{}", 400),
    (POST + JSON + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}", 400),
    (POST + JSON + b"Content-Length: 20000000\r\n\r\n{}", 413), (raw_request("/tokenize", b"{", length=100), None),
    (POST + JSON + CHUNKED + b"\r\nzz\r\n{}\r\n", 400), (POST + JSON + CHUNKED + b"\r\n2\r\n{", None),
    (POST + b"Content-Type: \xff\xff\r\nContent-Length: 2\r\n\r\n{}", 415), (GET + b" folded: x\r\n\r\n", 0),
    (GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n", 200),
]  # fmt: skip


@pytest.mark.parametrize("data, status", BAD_HTTP, ids=lambda value: repr(value)[:50] + str(len(repr(value))))
def test_bad_http(small, data, status):
    """It is refused or waited for, never answered with a 5xx, and the server goes on."""
    answered = exchange(small, data)
    if status == 0:
        assert answered.split(b" ")[1][:1] in (b"2", b"4"), answered[:200]
    else:
        assert answered == b"" if status is None else answered.startswith(b"HTTP/1.1 %d " % status), answered[:200]
    assert small.http.get("/health").status_code == 200


@pytest.mark.parametrize("piece", [b"A: b\r\n" * 1000, b"a" * 8000], ids=["headers", "one header"])
@pytest.mark.parametrize("start", [GET, b"GET /"], ids=["in headers", "in the path"])
def test_a_head_without_end(small, start, piece):
    """What comes before a body is bounded, however it comes."""
    with connect(small) as connection, suppress(ConnectionError):
        connection.sendall(start)
        for _ in range(200):
            connection.sendall(piece)
            time.sleep(0.001)
        pytest.fail("the server read it all")
    assert small.http.get("/health").status_code == 200


@pytest.mark.parametrize("size, fits", [(65_000, True), (66_000, False), (79_000, False), (300_000, False)])
@pytest.mark.parametrize("form", ["one header", "headers", "path"])
def test_a_whole_head_is_bounded_too(small, size, fits, form):
    """At 64 KiB, also when it comes at once, and behind another request's body."""
    first = raw_request("/tokenize", {"prompt": "a" * 100_000})
    if form == "path":
        head = b"GET /health?" + b"a" * size + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    else:
        filling = b"A: " + b"b" * size + b"\r\n" if form == "one header" else b"Abc: efgh\r\n" * (size // 11)
        head = GET + filling + b"Connection: close\r\n\r\n"
    for before in (b"", first):
        with connect(small) as connection, suppress(ConnectionError):
            connection.sendall(before + head)
            answered = receive_all(connection)
            statuses = re.findall(rb"HTTP/1.1 (\d+)", answered)
            assert statuses[-1:] == [b"200" if fits else b"400"], (statuses, answered[-300:])
            assert fits or b"more than 65536 bytes before the body" in answered


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("route", ["completion", "tokenize"])
def test_a_client_that_has_sent_all_gets_its_answer(real, stream, route):
    """It ends its sending behind the request and reads on, as `nc -N` does."""
    body = {"prompt": list(range(1000, 2500)), "max_tokens": 40, "ignore_eos": True, "stream": stream, "seed": 3}
    path = COMPLETIONS
    if route == "tokenize":
        path, body = "/tokenize", {"prompt": "hello " * 400}
    with connect(real) as connection:
        connection.sendall(raw_request(path, body, headers=["Connection: close"]))
        expected = receive_all(connection).split(b"\r\n\r\n", 1)[1]
    with connect(real) as connection:
        connection.sendall(raw_request(path, body))
        connection.shutdown(socket.SHUT_WR)
        answered = receive_all(connection)
    while answered.startswith(b"HTTP/1.1 102"):
        answered = answered.split(b"\r\n\r\n", 1)[1]
    assert answered.startswith(b"HTTP/1.1 200"), answered[:200]
    if route == "tokenize":
        assert answered.endswith(expected)
    else:
        assert texts_of(answered) == texts_of(expected) != b""


def texts_of(answered):
    """What the `text` fields of an answer or of its events say, joined."""
    return b"".join(re.findall(rb'"text":"((?:[^"\\\\]|\\\\.)*)"', answered))


def test_pieces_and_pipelines(small):
    """Bodies byte by byte and in chunks, and requests sent before the first is answered."""
    last = raw_request("/tokenize", {"prompt": "hello"}, headers=["Connection: close"])
    with connect(small) as connection:
        for byte in last:
            connection.sendall(bytes([byte]))
        assert b'"count"' in receive_all(connection)
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, bytes([byte])) for byte in b'{"prompt": "hello"}') + b"0\r\n\r\n"
    whole = raw_request("/tokenize", {"prompt": "hello"})
    with connect(small) as connection:
        connection.sendall(POST + JSON + CHUNKED + b"\r\n" + chunks + whole * 3)
        connection.sendall(raw_request("/tokenize", b"{", headers=["Connection: close"]))
        answered = receive_all(connection)
    assert answered.count(b"HTTP/1.1 200") == 4 and answered.count(b"HTTP/1.1 400") == 1


def test_idle_connections_and_half_requests(small):
    """Connections that send half a request and wait keep nobody from being answered."""
    halves = [connect(small) for _ in range(100)]
    for half in halves:
        half.sendall(raw_request(COMPLETIONS, b'{"prompt": ', length=1000))
    body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
    assert small.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 4
    for half in halves:
        half.close()
    assert small.http.get("/health").status_code == 200


# Ending


def test_ending_finishes_or_cancels_and_refuses_meanwhile(smollm2_path, solo):
    """While it ends, a server answers what it finishes in time, cancels the rest, and says 503 to everybody else."""
    clients = ThreadPoolExecutor(8)
    with LLM(smollm2_path, threads=2, kv_pages=600) as llm, served(llm, shutdown_timeout=4.0) as live, clients as pool:
        short = {"prompt": "One two three", "max_tokens": 8, "temperature": 0}
        endless = {"prompt": "One two three", "max_tokens": 7000, "ignore_eos": True, "priority": 1}
        late = httpx.Client(base_url=live.url, timeout=60)
        assert late.get("/ready").status_code == 200
        answers = [pool.submit(live.post, COMPLETIONS, {**endless, "stream": stream}) for stream in (False, True)]
        deadline = time.monotonic() + 30
        while llm.engine.stats()["running"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        quick = pool.submit(live.post, COMPLETIONS, short)
        while live.llm.engine.stats()["running"] < 3 and not quick.done():
            time.sleep(0.001)
        closing = pool.submit(live.close_service)
        while not live.service.draining:
            time.sleep(0.01)
        for response in (late.get("/ready"), late.post(COMPLETIONS, json=short), late.post(CHAT, json={})):
            assert response.status_code == 503 and response.json()["error"]["code"] == "unavailable"
        assert late.get("/metrics").status_code == 200 == late.get("/v1/models").status_code
        wanted = solo.generate(short["prompt"], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text
        assert quick.result().json()["choices"][0]["text"] == wanted
        whole, stream = (answer.result() for answer in answers)
        closing.result()
        assert whole.status_code == 503 and "stopped" in whole.json()["error"]["message"]
        events = stream.text.split("\n\n")
        assert stream.status_code == 200 and "[DONE]" not in stream.text
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "unavailable" and len(events) > 10
        assert late.get("/health").status_code == 503 == late.get("/ready").status_code
        assert late.post("/v1/embeddings", json={"input": "x"}).status_code == 503
        assert late.get("/metrics").status_code == 200
        late.close()
        assert llm.engine.stats()["pages_in_use"] == 0 and llm.check() == []
