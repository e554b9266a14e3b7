"""What HTTP costs: the same requests in process and through `pagedkv serve`, in turns on the same machine.

    python bench/server_overhead.py                # 32 streams, and cached prompts at idle
    python bench/server_overhead.py --threads 1    # the engine on one processor, HTTP and the client on the other

streams: tokens/s of `--streams` requests at once, A B A B: LLM.generate() here, and one HTTP stream each against a
server in a process of its own. `wall` compares the time on the clock; the client takes part of the same machine's
processors, which is the bias. `cpu` compares processor time a token, of this process in process and of the server's
process over HTTP, which others on the machine disturb less and in which the client does not count.
ttft: from sending a prompt whose pages are cached to its first event, at idle, beside the first output in process.
"""

import argparse
import json
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import results

from pagedkv import LLM, SamplingParams

TICKS = os.sysconf("SC_CLK_TCK")
TOKENS_BEFORE = 64  # of each stream's prompt
PAGE = 16


def requests(n: int, vocabulary: list[int], n_tokens: int, seed: str) -> list[dict[str, Any]]:
    """n bodies of completions: prompts of their own, n_tokens new tokens each, sampled, seeded."""
    draw = random.Random(seed)
    return [
        {"prompt": draw.choices(vocabulary, k=TOKENS_BEFORE), "max_tokens": n_tokens, "temperature": 0.8, "seed": i,
         "ignore_eos": True}
        for i in range(n)
    ]  # fmt: skip


def in_process(llm: LLM, asked: list[dict[str, Any]]) -> tuple[float, float, list[list[int]]]:
    """Seconds on the wall and of processors until all are answered, and the answers' tokens."""
    prompts = [{"prompt_token_ids": one["prompt"]} for one in asked]
    names = ("max_tokens", "temperature", "seed", "ignore_eos")
    params = [SamplingParams(**{name: one[name] for name in names}) for one in asked]
    start, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params)
    wall = time.perf_counter() - start
    return wall, time.process_time() - cpu, [output.outputs[0].token_ids for output in outputs]


class Stream:
    """One request over a connection of its own, as cheaply as a client can be: bytes are kept, and read afterwards."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        content = json.dumps(body).encode()
        self.request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
        ) + content
        self.parts: list[bytes] = []

    def send(self) -> None:
        """Send the request."""
        self.socket.sendall(self.request)

    def read(self) -> bytes:
        """What has come; nothing at the end."""
        part = self.socket.recv(1 << 16)
        self.parts.append(part)
        return part

    def tokens(self) -> list[int]:
        """The tokens of all events. Raises RuntimeError for an answer that is not a whole stream."""
        answer = b"".join(self.parts)
        if not answer.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in answer:
            raise RuntimeError(f"the server answered {answer[:300]!r}")
        lines = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
        events = [json.loads(line) for line in lines]
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]

    def n_events(self) -> int:
        """Events that came."""
        return b"".join(self.parts).count(b"data: {")


def over_http(port: int, pid: int, asked: list[dict[str, Any]]) -> tuple[float, float, list[list[int]], int]:
    """As in_process(), the processors' time being the server's; and the number of events."""
    streams = [Stream(port, {**one, "stream": True, "return_token_ids": True}) for one in asked]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        start, cpu = time.perf_counter(), processor_time(pid)
        for stream in streams:
            stream.send()
        left = len(streams)
        while left:
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
                    left -= 1
        wall, cpu = time.perf_counter() - start, processor_time(pid) - cpu
    return wall, cpu, [stream.tokens() for stream in streams], sum(stream.n_events() for stream in streams)


def processor_time(pid: int) -> float:
    """Seconds that a process has computed, in user and in system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def server(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(port, process id) of `pagedkv serve` with the options' settings."""
    command = [sys.executable, "-P", "-m", "pagedkv", "serve", "--model", options.model, "--port", "0"]
    settings = {"--max-num-seqs": options.streams, "--kv-pages": pages(options), "--threads": options.threads}
    command += [str(word) for pair in settings.items() if pair[1] is not None for word in pair]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "serving" in line:
                yield int(line.split(" (")[0].rsplit(":", 1)[1]), process.pid
                return
        raise RuntimeError(f"the server did not start: {''.join(said).strip()}")
    finally:
        process.terminate()
        process.wait(60)
        assert process.stderr is not None
        process.stderr.close()


def pages(options: argparse.Namespace) -> int:
    """Room for all streams and the long prompts."""
    own = options.streams * (TOKENS_BEFORE + options.tokens + PAGE)
    return 2 * (own + sum(options.prompt_tokens) + 16 * PAGE) // PAGE


def measure_streams(
    llm: LLM, port: int, pid: int, vocabulary: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Throughput and processor time a token, in process and over HTTP. Raises RuntimeError where tokens differ."""
    names = ("in_process", "http")
    speeds: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    overheads = []
    n_events = 0
    for number in range(-1, options.rounds):  # the first warms up
        asked = requests(options.streams, vocabulary, options.tokens, f"round {number}")
        a_wall, a_cpu, expected = in_process(llm, asked)
        b_wall, b_cpu, found, n_events = over_http(port, pid, asked)
        if found != expected:
            raise RuntimeError("the server's tokens are not those of the engine in process")
        if number >= 0:
            n_tokens = options.streams * options.tokens
            for name, wall, cpu in (("in_process", a_wall, a_cpu), ("http", b_wall, b_cpu)):
                speeds[name].append(n_tokens / wall)
                costs[name].append(1e3 * cpu / n_tokens)
            overheads.append(1 - a_wall / b_wall)
    wall, cpu = statistics.median(overheads), overhead(costs)
    print(f"{options.streams} streams: {statistics.median(speeds['in_process']):.0f} tokens/s in process, "
          f"{statistics.median(speeds['http']):.0f} over HTTP: {wall:.1%} less; of processor time {cpu:.1%} "
          f"({n_events} events for {options.streams * options.tokens} tokens)")  # fmt: skip
    return {
        "part": "streams",
        "streams": options.streams,
        "new_tokens": options.tokens,
        "prompt_tokens": TOKENS_BEFORE,
        "unit": "tokens/s, ms of processor time a token",
        **{f"{name}_wall": results.summary(speeds[name]) for name in names},
        **{f"{name}_cpu": results.summary(costs[name]) for name in names},
        "overhead_wall": results.summary(overheads),
        "overhead_cpu": round(cpu, 4),
        "events": n_events,
    }


def overhead(costs: dict[str, list[float]]) -> float:
    """The share of the server's processor time that the engine in process did not need."""
    return 1 - statistics.median(costs["in_process"]) / statistics.median(costs["http"])


def measure_ttft(llm: LLM, port: int, text: str, n_tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token of a cached prompt, in process and over HTTP, in turns."""
    waits: dict[str, list[float]] = {"in_process": [], "http": []}
    cached = 0
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    body = {"prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    for number in range(-2, options.ttft_rounds):  # the first fill the caches
        start = time.perf_counter()
        for _ in llm.stream(text, params):
            waits["in_process"] += [1e3 * (time.perf_counter() - start)] if number >= 0 else []
            break
        stream = Stream(port, body)
        start = time.perf_counter()
        stream.send()
        while b"data: {" not in stream.read():
            pass
        waits["http"] += [1e3 * (time.perf_counter() - start)] if number >= 0 else []
        while stream.read():
            pass
        stream.socket.close()
        stream_answer = b"".join(stream.parts)
        usage = json.loads(stream_answer.split(b"data: ")[-2])["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if usage["prompt_tokens"] != n_tokens:
            raise RuntimeError(f"the prompt has {usage['prompt_tokens']} tokens, not {n_tokens}")
    medians = {name: statistics.median(values) for name, values in waits.items()}
    print(f"first token of a prompt of {n_tokens} tokens, {cached} of them cached: "
          f"{medians['in_process']:.1f} ms in process, {medians['http']:.1f} ms over HTTP")  # fmt: skip
    return {
        "part": "ttft",
        "prompt_tokens": n_tokens,
        "cached_tokens": cached,
        "unit": "ms",
        **{name: results.summary(values) for name, values in waits.items()},
    }


def text_of(llm: LLM, n_tokens: int) -> str:
    """A text of exactly n_tokens tokens."""
    draw = random.Random(f"text {n_tokens}")
    words = ["page", "table", "head", "cache", "token", "step", "queue", "river", "stone", "lamp", "garden", "seven"]
    text = " ".join(draw.choices(words, k=2 * n_tokens))
    for length in range(n_tokens, 0, -1):
        found = llm.tokenizer.decode(llm.tokenizer.encode(text)[:length])
        while len(llm.tokenizer.encode(found)) < n_tokens:
            found += " a"
        if len(llm.tokenizer.encode(found)) == n_tokens:
            return found
    raise RuntimeError(f"no text of {n_tokens} tokens was found")


PARTS = ("streams", "ttft")


def main() -> None:
    """Run the parts the arguments ask for, print them and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="catalogue name or GGUF file")
    parser.add_argument("--threads", type=int, help="of the engine; default: what the machine grants")
    parser.add_argument("--parts", default=",".join(PARTS), help="of these, in this order")
    parser.add_argument("--streams", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[2000, 2015], help="lengths of cached prompts")
    parser.add_argument("--ttft-rounds", type=int, default=30, help="times each of them is asked")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="directory of the results")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    if min(options.streams, options.tokens, options.rounds, options.ttft_rounds, *options.prompt_tokens) < 1:
        parser.error("--streams, --tokens, --rounds, --prompt-tokens and --ttft-rounds must be at least 1")

    settings: dict[str, Any] = {"threads": options.threads, "max_num_seqs": options.streams}
    with LLM(options.model, kv_pages=pages(options), **settings) as llm, server(options) as (port, pid):
        special = llm.tokenizer.special_ids
        vocabulary = [i for i in range(llm.tokenizer.vocab_size) if i not in special]
        threads = llm.engine.stats()["threads"]
        rows = []
        if "streams" in parts:
            rows.append(measure_streams(llm, port, pid, vocabulary, options))
        if "ttft" in parts:
            rows += [measure_ttft(llm, port, text_of(llm, n), n, options) for n in options.prompt_tokens]
    head = {"bench": "server_overhead", "model": Path(options.model).name, "loop": loop_name()}
    path = results.write("server_overhead", [head | row for row in rows], threads=threads, directory=options.results)
    print(f"written to {path.name}")


def loop_name() -> str:
    """The event loop that uvicorn chooses here."""
    import importlib.util

    return "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"


if __name__ == "__main__":
    main()
