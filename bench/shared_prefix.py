"""Decoding many sequences behind one long prefix: on shared pages, read once for all of them, and on copies, in turns.

Same prompts, same outputs: the two differ in the prefix cache alone.

    python bench/shared_prefix.py
"""

import argparse
import time
from pathlib import Path

import results

from pagedkv import LLM, SamplingParams
from pagedkv.commands.bench import random_prompts
from pagedkv.core.cpus import default_threads

STEP_TOKENS = 512  # of a prompt in a step


class Side:
    """One engine and what it decodes. A sample is the seconds of a few steps in which every sequence decodes."""

    def __init__(self, options: argparse.Namespace, shared: bool):
        n_prompt = options.prefix_tokens + options.own_tokens
        # the first ones decode while the others' prompts are computed, and nobody may finish before the last sample
        early = options.batch * (n_prompt // STEP_TOKENS + 2)
        max_tokens = options.gen_tokens * (options.rounds + 1) + early
        length = n_prompt + max_tokens
        self.batch, self.steps = options.batch, options.gen_tokens
        self.llm = LLM(
            options.model,
            threads=options.threads,
            max_num_seqs=options.batch,
            max_num_batched_tokens=STEP_TOKENS + options.batch,
            max_model_len=length,
            kv_pages=options.batch * -(-length // 16) + 64,
            enable_prefix_caching=shared,
        )
        self.engine = self.llm.engine
        self.engine.scheduler.paced = False
        self.tokens: dict[str, list[int]] = {}
        prefix = random_prompts(self.llm, 1, options.prefix_tokens, 1)[0]["prompt_token_ids"]
        own = random_prompts(self.llm, options.batch, options.own_tokens, 2)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        prompts = [prefix + each["prompt_token_ids"] for each in own]
        for i, prompt in enumerate(prompts):
            self.engine.add_request({"prompt_token_ids": prompt}, params, request_id=str(i))
            while str(i) not in self.tokens:  # one by one: the first one's pages are there for the rest
                self.step()

    def step(self) -> None:
        """One step of the engine; the tokens so far are kept."""
        for output in self.engine.step():
            self.tokens[output.request_id] = output.outputs[0].token_ids

    def sample(self) -> float:
        """Tokens a second."""
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        return self.batch * self.steps / (time.perf_counter() - start)


def main() -> None:
    """Measure both, print them, and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="catalogue name or GGUF file")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--batch", type=int, default=32, help="sequences")
    parser.add_argument("--prefix-tokens", type=int, default=2000, help="tokens that all of them begin with")
    parser.add_argument("--own-tokens", type=int, default=16, help="tokens of each one's own behind them")
    parser.add_argument("--gen-tokens", type=int, default=8, help="counted steps of a sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each side")
    parser.add_argument("--name", default="shared_prefix", help="results go to NAME.jsonl")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="directory of the results")
    options = parser.parse_args()

    sides = {"shared": Side(options, True), "copies": Side(options, False)}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(options.rounds + 1):
        for name, side in sides.items():
            figure = side.sample()
            if round_:  # the first warms up
                samples[name].append(figure)
    for i, shared in sides["shared"].tokens.items():
        if any(one != other for one, other in zip(shared, sides["copies"].tokens[i], strict=False)):
            raise SystemExit(f"request {i}: the two sides drew different tokens")
    if any(side.engine.stats()["running"] != side.batch for side in sides.values()):
        raise SystemExit("a request ended before the last sample")
    work = {key: getattr(options, key) for key in ("batch", "prefix_tokens", "own_tokens", "gen_tokens")}
    rows = [
        {"bench": "shared_prefix", "pages": name, "model": Path(options.model).name, **work, "unit": "tokens/s"}
        | {"pages_in_use": sides[name].engine.stats()["pages_in_use"]}
        | results.summary(values)
        for name, values in samples.items()
    ]
    on_shared, on_copies = (row["median"] for row in rows)
    print(f"shared {on_shared:.0f} tokens/s, copies {on_copies:.0f} tokens/s: {on_shared / on_copies:.2f} x")
    path = results.write(options.name, rows, threads=options.threads, directory=options.results)
    print(f"written to {path.name}")
    for side in sides.values():
        side.llm.close()


if __name__ == "__main__":
    main()
