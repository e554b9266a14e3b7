"""Decode speed with prompt lookup against plain decoding: the same prompts in turns, A B B A, with equal outputs.

    python bench/speculation.py
    python bench/speculation.py --clock cpu     # one thread's processor time, for a machine that is not quiet

quote: summarise a text and quote from it, one request at a time. chat: open questions, greedy and sampled, alone and in
batches. Speed counts from the first token of a batch to its last.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results

from pagedkv import LLM, SamplingParams

TEXTS = (
    "The lighthouse at Cape Arden was built in 1867 from grey granite blocks that were shipped down the coast. "
    "Its lamp burned whale oil at first, later paraffin, and since 1931 it has been electric. The keepers lived "
    "in two small houses beside the tower, kept goats and a garden, and wrote down every ship that passed. When "
    "the light was made automatic in 1984 the last keeper, Ines Moreno, stayed in the village and still winds the "
    "clock in the hall.",
    "Sourdough bread needs only flour, water, salt and time. A starter of wild yeast and bacteria is fed with "
    "flour and water until it doubles within eight hours. The dough is mixed, rested, folded four times over "
    "three hours, shaped, and left in a cold place overnight. It is baked in a closed pot at 250 degrees for "
    "twenty minutes, so that steam keeps the crust soft while the loaf rises, and then without the lid for "
    "twenty-five more until the crust is dark.",
    "The committee met on Tuesday to discuss the new library. Mrs. Okafor reported that the roof would cost "
    "48,000 euros and that the city would pay half of it. Mr. Lindqvist asked whether the reading room could open "
    "in the evening, and was told that two more people would have to be hired. The committee voted seven to two "
    "to repair the roof this summer, to open until nine on Thursdays from October, and to look for a sponsor for "
    "the children's corner.",
    "Bees find their way home by the sun, by landmarks and by the smell of their hive. A forager that has found "
    "flowers tells the others with a dance: she runs in a straight line while shaking her body, circles back, and "
    "runs again. The angle of the line against the vertical is the angle of the flowers against the sun, and the "
    "length of the run tells how far they are. Others follow her in the dark, touch her with their antennae, and "
    "then fly out themselves.",
)
QUOTE = "Summarise the following text by quoting its most important sentences word for word.\n\n{}"
QUESTIONS = (
    "Write a short story about a boy who finds a door in an old oak tree.",
    "Explain why the sky is blue to somebody who never went to school.",
    "What should I think of before I adopt a dog?",
    "Give me a plan for a week of cheap dinners.",
    "Describe the life of a sailor in the eighteenth century.",
    "How do I learn to play the piano as an adult?",
    "Write a letter to a friend who moved to another country.",
    "What makes a good teacher?",
)


@dataclass(frozen=True)
class Workload:
    """Prompts that are answered `batch` at a time."""

    name: str
    prompts: tuple[str, ...]
    batch: int
    temperature: float
    new_tokens: int


WORKLOADS = (
    Workload("quote", tuple(QUOTE.format(text) for text in TEXTS), 1, 0.0, 160),
    Workload("chat", QUESTIONS[:4], 1, 0.0, 120),
    Workload("chat, sampled", QUESTIONS[:4], 1, 0.8, 120),
    Workload("chat, sampled, batch 8", QUESTIONS, 8, 0.8, 60),
    Workload("chat, sampled, batch 32", QUESTIONS * 4, 32, 0.8, 40),
)


def answer(llm: LLM, prompts: list[str], work: Workload, clock: Callable[[], float]) -> tuple[list[list[int]], float]:
    """Token ids of all outputs, and the seconds from the first step that gave all a token to the end."""
    engine, tokenizer = llm.engine, llm.tokenizer
    names = []
    for seed, prompt in enumerate(prompts):
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        params = SamplingParams(temperature=work.temperature, seed=seed, max_tokens=work.new_tokens)
        names.append(engine.add_request({"prompt_token_ids": ids}, params))
    done: dict[str, list[int]] = {}
    begun: set[str] = set()
    start, counted = 0.0, 0
    while engine.has_unfinished():
        for output in engine.step():
            begun.add(output.request_id)
            if output.finished:
                done[output.request_id] = output.outputs[0].token_ids
        if not start and len(begun) == len(names):
            start = clock()
    end = clock()
    counted = sum(map(len, done.values())) - len(names)
    return [done[name] for name in names], (end - start) / counted


def measure(plain: LLM, guessing: LLM, work: Workload, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Medians of both, in turns. RuntimeError when an output differs."""
    speeds: dict[str, list[float]] = {"plain": [], "guessing": []}
    batches = [list(work.prompts[i : i + work.batch]) for i in range(0, len(work.prompts), work.batch)]
    before = guessing.engine.stats()
    turns = [("plain", plain), ("guessing", guessing)]
    for _ in range(rounds):
        spent = {"plain": 0.0, "guessing": 0.0}
        for prompts in batches:
            outputs = []
            for name, llm in turns:
                found, seconds = answer(llm, prompts, work, clock)
                spent[name] += seconds
                outputs.append(found)
            if outputs[0] != outputs[1]:
                raise RuntimeError(f"{work.name}: outputs differ")
        turns.reverse()
        for name, seconds in spent.items():
            speeds[name].append(len(batches) / seconds)
    after = guessing.engine.stats()
    drafted = after["spec_draft_tokens"] - before["spec_draft_tokens"]
    accepted = after["spec_accepted_tokens"] - before["spec_accepted_tokens"]
    row = {
        "workload": work.name,
        "batch": work.batch,
        "temperature": work.temperature,
        "unit": "tokens/s",
        "plain": results.summary(speeds["plain"]),
        "guessing": results.summary(speeds["guessing"]),
        "drafted": drafted,
        "accepted": accepted,
    }
    row["ratio"] = round(row["guessing"]["median"] / row["plain"]["median"], 3)
    print(f"{work.name:26}{row['plain']['median']:9.1f}{row['guessing']['median']:9.1f}{row['ratio']:7.2f} x   "
          f"{accepted} of {drafted} guesses right", flush=True)  # fmt: skip
    return row


def main() -> None:
    """Measure all workloads, print them and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="catalogue name or GGUF file")
    parser.add_argument("--threads", type=int, help="default: what the machine grants")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, of one thread")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", help="workloads whose name begins with this")
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="directory of the results")
    options = parser.parse_args()
    threads = 1 if options.clock == "cpu" else options.threads
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    config = {"method": "ngram", "num_speculative_tokens": options.num_speculative_tokens}
    settings: dict[str, Any] = {"threads": threads, "kv_pages": 1000, "max_model_len": 1024}
    head = {"bench": "speculation", "model": Path(options.model).name, "clock": options.clock, "config": config}
    with LLM(options.model, **settings) as plain, LLM(options.model, speculative_config=config, **settings) as guessing:
        answer(plain, list(QUESTIONS[:1]), WORKLOADS[1], clock)
        answer(guessing, list(QUESTIONS[:1]), WORKLOADS[1], clock)
        used = plain.engine.stats()["threads"]
        for work in WORKLOADS:
            if not options.only or work.name.startswith(options.only):
                row = head | measure(plain, guessing, work, options.rounds, clock)
                path = results.write("speculation", [row], threads=used, directory=options.results)
                print(f"written to {path.name}", flush=True)


if __name__ == "__main__":
    main()
