"""`pagedkv bench`: prefill and decode speed of the whole engine, sampling and text included."""

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.commands.generate import OutputFailed, failure
from pagedkv.version import commit

if TYPE_CHECKING:
    from pagedkv import LLM
    from pagedkv.models.config import ModelConfig

REPEATS = 5
KV_FORMAT = "f16"
PAGE_TOKENS = 16
STEP_TOKENS = 512
IN_CACHE = 256, 512  # rows and columns of a matrix that any processor's second level cache holds


def run(
    model: str,
    *,
    threads: int | None,
    prompt_tokens: int,
    gen_tokens: int,
    batches: list[int],
    activations: str,
    with_profile: bool,
    as_json: bool,
) -> None:
    """Measure each batch size REPEATS times after a run that is not counted, and print medians.

    ValueError when prompt_tokens and gen_tokens do not fit the model's context.
    """
    with load(model, threads, prompt_tokens, gen_tokens, max(batches), activations=activations) as llm:
        head = {
            "isa": llm.engine.stats()["isa"],
            "threads": llm.engine.stats()["threads"],
            "model": Path(model).name,
            "kv_format": KV_FORMAT,
            "activations": activations,
            "commit": commit(),
        }
        if not as_json:
            print(", ".join(f"{name} {value}" for name, value in head.items() if value))
            print(f"{'batch':>6}{'prompt':>8}{'new':>6}{'prefill t/s':>13}{'decode t/s':>12}{'ttft ms':>10} spread")
        limits = machine_limits(llm) if with_profile else {}
        for batch in batches:
            measure(llm, random_prompts(llm, batch, prompt_tokens, 0), gen_tokens)
            samples = [
                measure(llm, random_prompts(llm, batch, prompt_tokens, seed), gen_tokens)
                for seed in range(1, REPEATS + 1)
            ]
            row = summarise(samples, batch, prompt_tokens, gen_tokens) | head
            if with_profile:
                row["profile"] = profile(llm, batch, prompt_tokens, gen_tokens) | limits
            print(json.dumps(row) if as_json else text_row(row), flush=True)


def text_row(row: dict[str, Any]) -> str:
    """A row for people, in the columns of the heading; the profile, if there is one, on lines of its own."""
    samples = row["samples"]["decode_tps"]
    spread = (max(samples) - min(samples)) / row["decode_tps"]
    lines = [
        f"{row['batch']:6}{row['prompt_tokens']:8}{row['gen_tokens']:6}{row['prefill_tps']:13.1f}"
        f"{row['decode_tps']:12.1f}{row['ttft_ms']:10.1f} {spread:.1%}"
    ]
    if "profile" in row:
        found = row["profile"]
        reads, memory = found["decode_bytes_per_s"], found["read_bandwidth"]
        for phase in ("prefill", "decode"):
            macs, peak = found[f"{phase}_macs_per_s"], found["kernel_macs_per_s"]
            lines.append(f"{phase:>14}: " + ", ".join(f"{name} {share:.1%}" for name, share in found[phase].items()))
            lines.append(
                f"{'':16}{macs / 1e9:.1f} GMAC/s in matrices, {macs / peak:.0%} of the {peak / 1e9:.1f} "
                f"that the {found['kernel_type']} kernel reaches in cache"
            )
        lines.append(
            f"{'':16}{reads / 1e9:.1f} GB/s of weights, {reads / memory:.0%} of the {memory / 1e9:.1f} "
            "that memory was measured to deliver"
        )
    return "\n".join(lines)


def load(
    model: str,
    threads: int | None,
    prompt_tokens: int,
    gen_tokens: int,
    batch: int,
    *,
    activations: str = "int8",
) -> "LLM":
    """An LLM whose pool holds `batch` requests of that size at once and that caches no prefixes."""
    from pagedkv.llm import LLM

    budget = max(STEP_TOKENS, 2 * batch)
    length = prompt_tokens + gen_tokens + _steps_of_prefill(batch, prompt_tokens, budget)
    llm = LLM(
        model,
        threads=threads,
        kv_format=KV_FORMAT,
        page_tokens=PAGE_TOKENS,
        kv_pages=batch * -(-length // PAGE_TOKENS),
        max_num_seqs=batch,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
        activations=activations,
    )
    llm.engine.scheduler.paced = False  # nobody reads along: prompts are to be done as fast as they can
    return llm


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one run: until all requests have their first token, of the steps after that, and each one's wait."""

    prefill_s: float
    decode_s: float
    ttft_s: list[float]


def measure(
    llm: "LLM",
    prompts: list[dict[str, list[int]]],
    gen_tokens: int,
    on_prefilled: Callable[[], object] | None = None,
) -> Sample:
    """Submit all prompts, of one length, at once; then count gen_tokens steps in which all of them decode. ValueError
    where the context has no room for that.

    on_prefilled is called, untimed, between prefill and decode. Aborts the requests when done. OutputFailed when the
    model's outputs cannot be computed, which would be fast.
    """
    from pagedkv.engine.params import SamplingParams

    engine = llm.engine
    # requests that are ready early decode beside the others' prefill: nobody may finish before the counted steps end
    length = len(prompts[0]["prompt_token_ids"])
    early = _steps_of_prefill(len(prompts), length, engine.scheduler.max_num_batched_tokens)
    if length + gen_tokens + early > engine.max_model_len:
        raise ValueError(
            f"prompt_tokens {length}, gen_tokens {gen_tokens} and {early} steps beside others' prompts need a context "
            f"of {length + gen_tokens + early} tokens; it is {engine.max_model_len}"
        )
    params = SamplingParams(max_tokens=gen_tokens + early, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    first_token: dict[str, float] = {}
    while len(first_token) < len(ids):
        for output in engine.step():
            if reason := failure(output):
                raise OutputFailed(reason)
            first_token.setdefault(output.request_id, time.perf_counter() - start)
    prefill_s = time.perf_counter() - start
    if on_prefilled:
        on_prefilled()
    start = time.perf_counter()
    for _ in range(gen_tokens):
        engine.step()
    decode_s = time.perf_counter() - start
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    return Sample(prefill_s, decode_s, list(first_token.values()))


def summarise(samples: list[Sample], batch: int, prompt_tokens: int, gen_tokens: int) -> dict[str, Any]:
    """Medians over the samples, and all of them under "samples"."""
    kept = {
        "prefill_tps": [round(batch * prompt_tokens / sample.prefill_s, 2) for sample in samples],
        "decode_tps": [round(batch * gen_tokens / sample.decode_s, 2) for sample in samples],
        "ttft_ms": [round(1000 * statistics.median(sample.ttft_s), 3) for sample in samples],
    }
    medians = {name: statistics.median(values) for name, values in kept.items()}
    return {"batch": batch, "prompt_tokens": prompt_tokens, "gen_tokens": gen_tokens, **medians, "samples": kept}


def random_prompts(llm: "LLM", batch: int, n_tokens: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random ordinary tokens, all different."""
    draw = random.Random(seed)
    ordinary = [i for i in range(llm.tokenizer.vocab_size) if i not in llm.tokenizer.special_ids]
    return [{"prompt_token_ids": draw.choices(ordinary, k=n_tokens)} for _ in range(batch)]


def profile(llm: "LLM", batch: int, prompt_tokens: int, gen_tokens: int) -> dict[str, Any]:
    """Where the time of the forward steps goes, and how much they read and compute.

    prefill, decode           share of each operation in the time of the phase, largest first
    decode_bytes_per_s        bytes of weights read a second: every step reads all of them once
    prefill_macs_per_s, decode_macs_per_s    multiply-accumulates of matrix products, attention not counted
    """
    forward = llm.model.forward
    prefill: dict[str, float] = {}
    forward.profile = True
    try:
        forward.profile_seconds()
        prompts = random_prompts(llm, batch, prompt_tokens, 0)
        measure(llm, prompts, gen_tokens, lambda: prefill.update(forward.profile_seconds()))
        decode = forward.profile_seconds()
    finally:
        forward.profile = False
    layers, head = macs_per_token(llm.model.config)
    prefill_s, decode_s = sum(prefill.values()), sum(decode.values())
    return {
        "prefill": _shares(prefill),
        "decode": _shares(decode),
        "decode_bytes_per_s": round(gen_tokens * forward.nbytes / decode_s),
        "prefill_macs_per_s": round(batch * (prompt_tokens * layers + head) / prefill_s),
        "decode_macs_per_s": round(batch * gen_tokens * (layers + head) / decode_s),
    }


def macs_per_token(config: "ModelConfig") -> tuple[int, int]:
    """Multiply-accumulates of all layers' matrices, and of the output head, for one token."""
    rows = config.head_dim * (config.n_heads + 2 * config.n_kv_heads)
    attention = config.hidden_size * (rows + config.head_dim * config.n_heads)
    ffn = 3 * config.hidden_size * config.ffn_size
    if config.n_experts:
        ffn = config.n_experts_used * ffn + config.n_experts * config.hidden_size
    return (
        config.n_layers * (attention + ffn),
        config.vocab_size * config.hidden_size,
    )


def machine_limits(llm: "LLM") -> dict[str, Any]:
    """What the model's threads reach when nothing else holds them up.

    read_bandwidth            bytes a second read from memory
    kernel_macs_per_s         multiply-accumulates a second of the matrix kernel on weights in its cache, of the type
                              most of the model's bytes have, kernel_type
    """
    from pagedkv.core.matmul import PackedMatrix
    from pagedkv.core.probe import kernel_macs, read_bandwidth
    from pagedkv.models.gguf import TENSOR_TYPES
    from pagedkv.models.source import open_model

    n_bytes: Counter[str] = Counter()
    with open_model(llm.model.path) as opened:
        for tensor in opened.tensors.tensors.values():
            n_bytes[tensor.type_name] += tensor.n_bytes
    kind = n_bytes.most_common(1)[0][0]
    block, block_bytes = next((block, size) for name, block, size in TENSOR_TYPES.values() if name == kind)
    rows, columns = IN_CACHE
    pool = llm.model.forward.pool
    weights = PackedMatrix.pack(pool, kind, bytes(rows * columns // block * block_bytes), rows, columns)
    return {
        "read_bandwidth": round(read_bandwidth(pool)),
        "kernel_macs_per_s": round(kernel_macs(pool, weights)),
        "kernel_type": kind,
    }


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values()) or 1.0
    return {name: round(s / total, 4) for name, s in sorted(seconds.items(), key=lambda item: -item[1])}


def _steps_of_prefill(batch: int, prompt_tokens: int, budget: int) -> int:
    """Upper bound of the steps until all prompts are computed: running decodes take up to `batch` tokens of each."""
    return -(-batch * prompt_tokens // (budget - batch)) + 2
