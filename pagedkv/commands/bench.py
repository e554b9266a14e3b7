"""`pagedkv bench`: prefill and decode speed of the whole engine, sampling and text included."""

import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.version import commit

if TYPE_CHECKING:
    from pagedkv import LLM

REPEATS = 5
KV_FORMAT = "f16"
PAGE_TOKENS = 16
STEP_TOKENS = 512


def run(
    model: str,
    *,
    threads: int | None,
    prompt_tokens: int,
    gen_tokens: int,
    batches: list[int],
    profile: bool,
    as_json: bool,
) -> None:
    """Measure each batch size REPEATS times after a run that is not counted, and print medians.

    ValueError when prompt_tokens and gen_tokens do not fit the model's context.
    """
    with load(model, threads, prompt_tokens, gen_tokens, max(batches)) as llm:
        head = {
            "isa": llm.engine.stats()["isa"],
            "threads": llm.engine.stats()["threads"],
            "model": Path(model).name,
            "kv_format": KV_FORMAT,
            "commit": commit(),
        }
        if not as_json:
            print(", ".join(f"{name} {value}" for name, value in head.items() if value))
            print(f"{'batch':>6}{'prompt':>8}{'new':>6}{'prefill t/s':>13}{'decode t/s':>12}{'ttft ms':>10} spread")
        for batch in batches:
            measure(llm, batch, prompt_tokens, gen_tokens, seed=0)
            samples = [measure(llm, batch, prompt_tokens, gen_tokens, seed) for seed in range(1, REPEATS + 1)]
            row = summarise(samples, batch, prompt_tokens, gen_tokens) | head
            shares = profile_shares(llm, batch, prompt_tokens, gen_tokens) if profile else None
            if as_json:
                print(json.dumps(row | ({"profile": shares} if shares else {})), flush=True)
                continue
            spread = _spread([sample["decode_tps"] for sample in samples])
            print(
                f"{batch:6}{prompt_tokens:8}{gen_tokens:6}{row['prefill_tps']:13.1f}{row['decode_tps']:12.1f}"
                f"{row['ttft_ms']:10.1f} {spread:.1%}",
                flush=True,
            )
            for phase, parts in (shares or {}).items():
                print(f"{'':6}{phase:>8}: " + ", ".join(f"{name} {share:.1%}" for name, share in parts.items()))


def load(model: str, threads: int | None, prompt_tokens: int, gen_tokens: int, batch: int) -> "LLM":
    """An LLM whose pool holds `batch` requests of that size at once and that caches no prefixes."""
    from pagedkv.llm import LLM

    budget = max(STEP_TOKENS, 2 * batch)
    length = prompt_tokens + gen_tokens + _steps_of_prefill(batch, prompt_tokens, budget)
    return LLM(
        model,
        threads=threads,
        kv_format=KV_FORMAT,
        page_tokens=PAGE_TOKENS,
        kv_pages=batch * -(-length // PAGE_TOKENS),
        max_num_seqs=batch,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )


def measure(
    llm: "LLM",
    batch: int,
    prompt_tokens: int,
    gen_tokens: int,
    seed: int,
    on_prefilled: Callable[[], object] | None = None,
) -> dict[str, float]:
    """One sample: prefill until every request has its first token, then gen_tokens steps of the whole batch.

    prefill_tps     prompt tokens of all requests / seconds until the last of them has its first token
    decode_tps      batch * gen_tokens / seconds of the steps after that
    ttft_ms         milliseconds from submission to first token, median over the requests
    """
    from pagedkv.engine.params import SamplingParams

    engine = llm.engine
    # requests that are ready early decode beside the others' prefill: nobody may finish before the counted steps end
    max_tokens = gen_tokens + _steps_of_prefill(batch, prompt_tokens, engine.scheduler.max_num_batched_tokens)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    prompts = random_prompts(llm, batch, prompt_tokens, seed)
    start = time.perf_counter()
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    first_token: dict[str, float] = {}
    while len(first_token) < batch:
        for output in engine.step():
            first_token.setdefault(output.request_id, time.perf_counter())
    prefilled = time.perf_counter()
    if on_prefilled:
        on_prefilled()
    decode_start = time.perf_counter()
    n_tokens = 0
    for _ in range(gen_tokens):
        n_tokens += len(engine.step())
    stop = time.perf_counter()
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    return {
        "prefill_tps": batch * prompt_tokens / (prefilled - start),
        "decode_tps": n_tokens / (stop - decode_start),
        "ttft_ms": 1000 * statistics.median(at - start for at in first_token.values()),
    }


def summarise(samples: list[dict[str, float]], batch: int, prompt_tokens: int, gen_tokens: int) -> dict[str, Any]:
    """Medians of the samples, and all of them under "samples"."""
    medians = {name: round(statistics.median(s[name] for s in samples), 3) for name in samples[0]}
    kept = {name: [round(s[name], 3) for s in samples] for name in samples[0]}
    return {"batch": batch, "prompt_tokens": prompt_tokens, "gen_tokens": gen_tokens, **medians, "samples": kept}


def random_prompts(llm: "LLM", batch: int, n_tokens: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random ordinary tokens, all different."""
    draw = random.Random(seed)
    ordinary = [i for i in range(llm.tokenizer.vocab_size) if i not in llm.tokenizer.special_ids]
    return [{"prompt_token_ids": draw.choices(ordinary, k=n_tokens)} for _ in range(batch)]


def profile_shares(llm: "LLM", batch: int, prompt_tokens: int, gen_tokens: int) -> dict[str, dict[str, float]]:
    """Share of each operation of the forward step in its time, largest first: of prefill and of decode."""
    forward = llm.model.forward
    prefill: dict[str, float] = {}
    forward.profile = True
    try:
        forward.profile_seconds()
        measure(llm, batch, prompt_tokens, gen_tokens, 0, lambda: prefill.update(forward.profile_seconds()))
        decode = forward.profile_seconds()
    finally:
        forward.profile = False
    return {"prefill": _shares(prefill), "decode": _shares(decode)}


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values()) or 1.0
    return {name: round(s / total, 4) for name, s in sorted(seconds.items(), key=lambda item: -item[1])}


def _steps_of_prefill(batch: int, prompt_tokens: int, budget: int) -> int:
    """Upper bound of the steps until all prompts are computed: running decodes take up to `batch` tokens of each."""
    return -(-batch * prompt_tokens // (budget - batch)) + 2


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)
