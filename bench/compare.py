"""pagedkv against other engines on the same file, prompts and threads, in turns: A B C A B C ...

Each engine lives in a process of its own and sleeps while another measures. Peers run under the interpreter of their
own environment (--peer-python), where llama-cpp-python and openvino-genai are installed; a peer that does not start is
named and left out. A first round of every job is not counted.

    python bench/compare.py --peer-python peers/bin/python
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import results

from pagedkv.core.cpus import default_threads
from pagedkv.models.catalogue import resolve
from pagedkv.models.source import open_model

ENGINES = ("pagedkv", "llama.cpp", "llama.cpp-fa", "openvino")
WORKER = Path(__file__).parent / "engines" / "worker.py"


@dataclass(frozen=True)
class Job:
    """`figure`: decode counts new tokens, prefill prompt tokens, of all prompts together, per second."""

    figure: str
    batch: int
    prompt_tokens: int
    gen_tokens: int

    @property
    def name(self) -> str:
        return f"{self.figure} {self.batch if self.figure == 'decode' else self.prompt_tokens}"

    def speed(self, answer: dict[str, float]) -> float:
        """Tokens per second of one answer of a worker."""
        if self.figure == "decode":
            return self.batch * self.gen_tokens / answer["decode_s"]
        return self.batch * self.prompt_tokens / answer["prefill_s"]


@dataclass
class Worker:
    """A running engine."""

    name: str
    process: subprocess.Popen
    about: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        name: str,
        python: str,
        model: Path,
        threads: int,
        verbose: bool,
        *,
        label: str | None = None,
        options: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "Worker | None":
        """Engine `name`, loaded, shown as `label`; None, with a line on standard error, when it cannot run there.

        options: further arguments of the engine. environment: variables of its process besides the caller's.
        """
        command = [python, str(WORKER), name, str(model), str(threads), json.dumps(dict(options or {}))]
        name = label or name
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            text=True,
        )
        worker = cls(name, process)
        try:
            worker.about = worker._read()
        except EOFError:
            print(f"{name}: does not start under {Path(python).name}; left out (--verbose tells why)", file=sys.stderr)
            return None
        return worker

    def run(self, prompts: list[list[int]], gen_tokens: int) -> dict[str, float]:
        """Seconds of one job. RuntimeError when the engine died."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps({"prompts": prompts, "gen_tokens": gen_tokens}) + "\n")
            self.process.stdin.flush()
            return self._read()
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"{self.name} died; --verbose tells why") from None

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise EOFError
        return json.loads(line)


def random_prompts(model: Path, batch: int, n_tokens: int, seed: int) -> list[list[int]]:
    """Prompts of random ordinary tokens of the model's vocabulary, all different."""
    with open_model(model) as opened:
        tokenizer = opened.tokenizer
    ordinary = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    draw = random.Random(seed)
    return [draw.choices(ordinary, k=n_tokens) for _ in range(batch)]


def compare(workers: list[Worker], jobs: list[Job], model: Path, rounds: int) -> list[dict]:
    """A row for each job and engine, with all its samples; prints medians and ratios as it goes."""
    rows = []
    for job in jobs:
        prompts = random_prompts(model, job.batch, job.prompt_tokens, seed=job.batch)
        speeds: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for turn in range(rounds + 1):
            for worker in workers:
                speed = job.speed(worker.run(prompts, job.gen_tokens))
                if turn:
                    speeds[worker.name].append(speed)
        medians = {name: statistics.median(samples) for name, samples in speeds.items()}
        best = max((median for name, median in medians.items() if name != "pagedkv"), default=None)
        ratio = f"   {medians['pagedkv'] / best:.2f} x the best peer" if best and "pagedkv" in medians else ""
        shown = "".join(f"{name} {median:9.1f}   " for name, median in medians.items())
        print(f"{job.name:12}{shown}{ratio}", flush=True)
        for worker in workers:
            rows.append({
                "bench": "compare",
                "job": job.name,
                "engine": worker.name,
                "version": worker.about["version"],
                "settings": worker.about["settings"],
                "model": model.name,
                "batch": job.batch,
                "prompt_tokens": job.prompt_tokens,
                "gen_tokens": job.gen_tokens,
                "unit": "tokens/s",
                **results.summary(speeds[worker.name]),
            })  # fmt: skip
    return rows


def main() -> None:
    """Run the comparison the arguments ask for, print it and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter of the environment that has the peers")
    parser.add_argument("--engines", default=",".join(ENGINES), help="of these, in this order")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="catalogue name or GGUF file")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--batch", default="1,8,32", help="batch sizes of decode")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt in decode")
    parser.add_argument("--gen-tokens", type=int, default=64, help="counted steps of decode")
    parser.add_argument("--prefill", default="512", help="prompt lengths of prefill")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each engine")
    parser.add_argument("--name", default="compare", help="results go to NAME.jsonl")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="directory of the results")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    options = parser.parse_args()

    names = options.engines.split(",")
    if unknown := set(names) - set(ENGINES):
        parser.error(f"unknown engines: {', '.join(sorted(unknown))}; known: {', '.join(ENGINES)}")
    if not options.peer_python and names != ["pagedkv"]:
        parser.error("--peer-python: needed for engines other than pagedkv")
    model = resolve(options.model)
    jobs = [Job("decode", int(b), options.prompt_tokens, options.gen_tokens) for b in options.batch.split(",") if b]
    jobs += [Job("prefill", 1, int(n), 1) for n in options.prefill.split(",") if n]
    pythons = {name: sys.executable if name == "pagedkv" else options.peer_python for name in names}
    started = [Worker.start(name, pythons[name], model, options.threads, options.verbose) for name in names]
    workers = [worker for worker in started if worker]
    try:
        rows = compare(workers, jobs, model, options.rounds)
    finally:
        for worker in workers:
            worker.stop()
    path = results.write(options.name, rows, threads=options.threads, directory=options.results)
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
