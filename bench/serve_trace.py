"""Replays a seeded trace of requests through the engine, in process, and says what its users would feel.

    python bench/serve_trace.py                    # all parts, 2,000 requests
    python bench/serve_trace.py --requests 300 --parts prefix
    python bench/serve_trace.py --clock cpu --parts gaps      # one thread's processor time, when others work

prefix: throughput with and without the prefix cache, in turns, on a trace in which half of the requests begin with one
of a few long common texts. gaps: seconds between two tokens of running requests while long prompts arrive, with the
bound of the scheduler and without. shares: what scheduler, sampling and the rest take of a step.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results

from pagedkv import LLM, SamplingParams


@dataclass(frozen=True)
class Asked:
    """One request of a trace."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Shape:
    """What a trace looks like: `shared` of the requests begin with one of `n_texts` common texts of text_tokens tokens;
    own tokens and new tokens of each are drawn evenly from the ranges given."""

    shared: float = 0.5
    n_texts: int = 8
    text_tokens: int = 384
    own_tokens: tuple[int, int] = (8, 48)
    new_tokens: tuple[int, int] = (4, 24)

    def trace(self, n_requests: int, vocabulary: list[int], seed: int) -> list[Asked]:
        """The trace of this seed: the same on every machine."""
        draw = random.Random(f"trace {seed}")
        texts = [draw.choices(vocabulary, k=self.text_tokens) for _ in range(self.n_texts)]
        asked = []
        for _ in range(n_requests):
            text = draw.choice(texts) if draw.random() < self.shared else []
            own = draw.choices(vocabulary, k=draw.randint(*self.own_tokens))
            params = SamplingParams(
                temperature=0.8,
                top_p=0.95,
                seed=draw.randrange(2**32),
                max_tokens=draw.randint(*self.new_tokens),
                ignore_eos=True,
            )
            asked.append(Asked(text + own, params))
        return asked


def replay(llm: LLM, trace: list[Asked], concurrent: int, clock: Callable[[], float]) -> float:
    """Seconds until all of the trace is answered, with `concurrent` requests on the way at a time."""
    engine, to_come, open_requests = llm.engine, deque(trace), 0
    start = clock()
    while to_come or open_requests:
        while to_come and open_requests < concurrent:
            asked = to_come.popleft()
            engine.add_request({"prompt_token_ids": asked.prompt}, asked.params)
            open_requests += 1
        open_requests -= sum(output.finished for output in engine.step())
    return clock() - start


def measure_prefix(open_llm: Callable[..., LLM], vocabulary: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Both engines replay the same slices of the trace in turns, A B A B; the cache keeps what it learned."""
    shape = Shape()
    trace = shape.trace(options.requests, vocabulary, options.seed)
    size = max(options.concurrent, len(trace) // options.slices)
    slices = [trace[i : i + size] for i in range(0, len(trace), size)]
    speeds: dict[bool, list[float]] = {True: [], False: []}
    seconds = {True: 0.0, False: 0.0}
    with open_llm(enable_prefix_caching=True) as cached, open_llm(enable_prefix_caching=False) as plain:
        for llm in (cached, plain):
            replay(llm, Shape(shared=0).trace(4, vocabulary, 1 << 20), 4, options.clock)
        for part in slices:
            for llm, caching in ((cached, True), (plain, False)):
                took = replay(llm, part, options.concurrent, options.clock)
                seconds[caching] += took
                speeds[caching].append(len(part) / took)
        stats = cached.engine.stats()
    print(f"prefix cache: {len(trace) / seconds[True]:.2f} requests/s with, {len(trace) / seconds[False]:.2f} without, "
          f"{seconds[False] / seconds[True]:.2f} x")  # fmt: skip
    return {
        "part": "prefix",
        "requests": len(trace),
        "concurrent": options.concurrent,
        "shape": vars(shape),
        "with_cache": results.summary(speeds[True]),
        "without_cache": results.summary(speeds[False]),
        "unit": "requests/s",
        "ratio": round(seconds[False] / seconds[True], 3),
        "hit_share": round(stats["prefix_hit_tokens"] / stats["prefix_query_tokens"], 3),
    }


def gaps_of(
    llm: LLM, vocabulary: list[int], options: argparse.Namespace, paced: bool
) -> tuple[list[float], list[float]]:
    """Gaps between tokens of readers, who run until the last of the long prompts, one at a time, has its answer; and
    what each of those waited for it."""
    engine, clock = llm.engine, options.clock
    engine.scheduler.paced = paced
    draw = random.Random(f"gaps {options.seed}")
    reader = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    readers = {
        engine.add_request({"prompt_token_ids": draw.choices(vocabulary, k=64)}, reader) for _ in range(options.readers)
    }
    last: dict[str, float] = {}
    gaps: list[float] = []
    waits: list[float] = []
    long, arrived, idle = "", 0.0, 0
    while len(waits) < options.long_prompts:
        if not long and len(last) == options.readers:
            idle += 1
            if idle > options.every:
                arrived, idle = clock(), 0
                long = engine.add_request({"prompt_token_ids": draw.choices(vocabulary, k=options.long_tokens)}, once)
        outputs = engine.step()
        now = clock()
        for output in outputs:
            if output.request_id == long:
                waits.append(now - arrived)
                long = ""
            else:
                if output.request_id in last:
                    gaps.append(now - last[output.request_id])
                last[output.request_id] = now
    for name in readers:
        engine.abort(name)
    while engine.has_unfinished():
        engine.step()
    engine.scheduler.paced = True
    return gaps, waits


def measure_gaps(open_llm: Callable[..., LLM], vocabulary: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Quantiles of the gaps with the bound and without it."""
    row: dict[str, Any] = {
        "part": "gaps",
        "readers": options.readers,
        "long_prompts": options.long_prompts,
        "long_tokens": options.long_tokens,
        "unit": "ms",
    }
    with open_llm(enable_prefix_caching=False) as llm:
        for name, paced in (("bounded", True), ("unbounded", False)):
            gaps, waits = gaps_of(llm, vocabulary, options, paced)
            p50, p99 = statistics.median(gaps), statistics.quantiles(gaps, n=100)[98]
            row[name] = {
                "p50": round(p50 * 1e3, 2),
                "p99": round(p99 * 1e3, 2),
                "max": round(max(gaps) * 1e3, 2),
                "p99_of_median": round(p99 / p50, 2),
                "waits_s": [round(wait, 2) for wait in waits],
                "gaps": len(gaps),
            }
            print(f"gaps, {name}: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, {p99 / p50:.2f} x; "
                  f"a prompt of {options.long_tokens} took {max(waits):.1f} s at most")  # fmt: skip
    return row


def measure_shares(open_llm: Callable[..., LLM], vocabulary: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Where the time of steps goes: clocks around the scheduler, the sampling and the forward."""
    spent: dict[str, float] = defaultdict(float)
    clock = options.clock

    def timed(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                spent[name] += clock() - start

        setattr(owner, method, measured)

    trace = Shape().trace(min(options.requests, 300), vocabulary, options.seed)
    with open_llm(enable_prefix_caching=True) as llm:
        engine = llm.engine
        for method in ("schedule", "settle", "fork", "remove", "add"):
            timed(engine.scheduler, method, "scheduler")
        timed(engine.drawing, "draw", "sampling")
        timed(engine, "_forward", "forward")
        timed(engine, "_run_step", "step")
        replay(llm, trace, options.concurrent, clock)
    shares = {name: round(value / spent["step"], 4) for name, value in spent.items() if name != "step"}
    both = shares["scheduler"] + shares["sampling"]
    print(f"of step time: scheduler {shares['scheduler']:.1%}, sampling {shares['sampling']:.1%}, together {both:.1%}; "
          f"forward {shares['forward']:.1%}")  # fmt: skip
    return {
        "part": "shares",
        "requests": len(trace),
        "concurrent": options.concurrent,
        **shares,
        "unit": "of step time",
    }


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PARTS = {"prefix": measure_prefix, "gaps": measure_gaps, "shares": measure_shares}


def main() -> None:
    """Run the parts the arguments ask for, print them and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="catalogue name or GGUF file")
    parser.add_argument("--threads", type=int, help="default: what the machine grants")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, of one thread")
    parser.add_argument("--parts", default=",".join(PARTS), help="of these, in this order")
    parser.add_argument("--requests", type=int, default=2000, help="length of the trace")
    parser.add_argument("--concurrent", type=int, default=64, help="requests on the way at a time")
    parser.add_argument("--slices", type=int, default=10, help="turns in which the trace is replayed")
    parser.add_argument("--readers", type=int, default=16, help="running requests whose gaps are measured")
    parser.add_argument("--long-prompts", type=int, default=3, help="how many long prompts arrive, one at a time")
    parser.add_argument("--long-tokens", type=int, default=4000, help="tokens of the prompts that arrive beside them")
    parser.add_argument("--every", type=int, default=40, help="steps of decoding alone before each of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="directory of the results")
    options = parser.parse_args()
    if options.clock == "cpu":
        options.threads = 1
    clock, options.clock = options.clock, CLOCKS[options.clock]
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")

    def open_llm(**settings: Any) -> LLM:
        longest = max(options.long_tokens + 16, 1024)
        pages = options.concurrent * 40 + -(-longest // 16) + options.readers * 150
        return LLM(options.model, threads=options.threads, max_num_seqs=options.concurrent, kv_pages=pages, **settings)

    with open_llm() as llm:
        special = llm.tokenizer.special_ids
        vocabulary = [i for i in range(llm.tokenizer.vocab_size) if i not in special]
        threads = llm.engine.stats()["threads"]
    head = {"bench": "serve_trace", "model": Path(options.model).name, "seed": options.seed, "clock": clock}
    for part in parts:  # each is kept as soon as it is measured
        row = head | PARTS[part](open_llm, vocabulary, options)
        path = results.write("serve_trace", [row], threads=threads, directory=options.results)
        print(f"written to {path.name}", flush=True)


if __name__ == "__main__":
    main()
