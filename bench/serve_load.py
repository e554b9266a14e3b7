"""Load on a running server: requests arrive when a seeded trace says so, whether or not earlier ones are done.

    pagedkv serve --port 8000 &
    python bench/serve_load.py --url http://127.0.0.1:8000 --rate 4 --requests 200 --plot load.svg

Every request streams. Figures: time to first token, gap between two events of a stream, time to the end, tokens/s of
all together; medians, 95th and 99th percentiles. A client on the server's own machine takes its processors' time,
which is the bias of these figures. Needs httpx, and matplotlib for --plot.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import results

WORDS = ["page", "table", "head", "cache", "token", "step", "queue", "river", "stone", "lamp", "garden", "seven"]


@dataclass
class Answer:
    """What one request met, in seconds since the run began. status: of HTTP, or what ended it before or after that."""

    arrival: float
    events: list[float] = field(default_factory=list)
    end: float = 0.0
    n_tokens: int = 0
    n_cached: int = 0
    status: str = ""


Trace = list[tuple[float, dict[str, Any]]]


def trace(n: int, *, rate: float, prompt_words: int, max_tokens: int, shared: float, seed: int) -> Trace:
    """(arrival in seconds, request body) of n requests: Poisson arrivals, `rate` a second; `shared` of the prompts
    begin with one of four long common texts. The same for a seed on every machine."""
    draw = random.Random(f"load {seed}")
    texts = [" ".join(draw.choices(WORDS, k=4 * prompt_words)) for _ in range(4)]
    found, now = [], 0.0
    for i in range(n):
        now += draw.expovariate(rate)
        own = " ".join(draw.choices(WORDS, k=draw.randint(1, 2 * prompt_words)))
        prompt = f"{draw.choice(texts)} {own}" if draw.random() < shared else own
        body = {"prompt": prompt, "max_tokens": draw.randint(1, 2 * max_tokens - 1), "temperature": 0.8, "seed": i}
        found.append((now, body))
    return found


async def ask(client: httpx.AsyncClient, body: dict[str, Any], arrival: float, start: float) -> Answer:
    """Send one request at its time and read its stream to the end."""
    await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
    answer = Answer(arrival)
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    try:
        async with client.stream("POST", "/v1/completions", json={**body, **options}) as response:
            answer.status = str(response.status_code)
            if response.status_code == 200:
                await read(response, answer, start)
    except httpx.HTTPError as error:
        answer.status = type(error).__name__
    answer.end = time.perf_counter() - start
    return answer


async def read(response: httpx.Response, answer: Answer, start: float) -> None:
    """Note when each event with tokens comes, and the usage."""
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            answer.status = "error"
        if event.get("choices"):
            answer.events.append(time.perf_counter() - start)
        if event.get("usage"):
            answer.n_tokens = event["usage"]["completion_tokens"]
            answer.n_cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def run(url: str, model: str | None, key: str | None, asked: Trace) -> tuple[str, list[Answer]]:
    """Replay the trace; the model's name and one Answer per request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as client:
        if model is None:
            listed = (await client.get("/v1/models")).raise_for_status().json()
            model = listed["data"][0]["id"]
        start = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, {**body, "model": model}, at, start) for at, body in asked))
    return model, answers


def figures(answers: list[Answer]) -> dict[str, Any]:
    """Counts, throughput, and percentiles in milliseconds over the requests that were answered."""
    done = [answer for answer in answers if answer.status == "200" and answer.events]
    statuses: dict[str, int] = {}
    for answer in answers:
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
    found: dict[str, Any] = {"requests": len(answers), "answered": len(done), "statuses": statuses}
    if not done:
        return found
    seconds = max(answer.end for answer in done) - min(answer.arrival for answer in done)
    found["tokens_per_s"] = round(sum(answer.n_tokens for answer in done) / seconds, 2)
    found["cached_tokens"] = sum(answer.n_cached for answer in done)
    waits = {
        "ttft_ms": [answer.events[0] - answer.arrival for answer in done],
        "gap_ms": [gap for answer in done for gap in np.diff(answer.events).tolist()],
        "end_ms": [answer.end - answer.arrival for answer in done],
    }
    for name, values in waits.items():
        if values:
            low, high, highest = np.percentile(np.array(values) * 1e3, [50, 95, 99]).tolist()
            found[name] = {"p50": round(low, 2), "p95": round(high, 2), "p99": round(highest, 2)}
    return found


def plot(answers: list[Answer], path: Path) -> None:
    """Waits over the time of arrival, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [answer for answer in answers if answer.status == "200" and answer.events]
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    arrivals = [answer.arrival for answer in done]
    axes.scatter(arrivals, [answer.events[0] - answer.arrival for answer in done], s=9, label="first token")
    axes.scatter(arrivals, [answer.end - answer.arrival for answer in done], s=9, label="end")
    axes.set(xlabel="arrival, s", ylabel="wait, s", ylim=(0, None))
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run the load the arguments ask for, print it and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="as the server calls it; the first it lists if not given")
    parser.add_argument("--api-key")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals a second")
    parser.add_argument("--prompt-words", type=int, default=64, help="of a prompt's own, on average")
    parser.add_argument("--max-tokens", type=int, default=32, help="new tokens, on average")
    parser.add_argument("--shared", type=float, default=0.5, help="share of prompts that begin with a common text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="picture of the waits, .svg or .png")
    parser.add_argument("--name", default="serve_load", help="results go to NAME.jsonl")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="directory of the results")
    options = parser.parse_args()
    if options.requests < 1 or not options.rate > 0:
        parser.error("--requests must be at least 1 and --rate above 0")

    shape = {name: getattr(options, name) for name in ("rate", "prompt_words", "max_tokens", "shared", "seed")}
    asked = trace(options.requests, **shape)
    model, answers = asyncio.run(run(options.url, options.model, options.api_key, asked))
    row = {"bench": "serve_load", "model": model, **shape, **figures(answers)}
    print(json.dumps(row, indent=2))
    if options.plot:
        plot(answers, options.plot)
    results.write(options.name, [row], threads=0, directory=options.results)
    if row["answered"] < row["requests"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
