"""Prints the answers of seeded requests as JSON: token ids, bits of log-probabilities, text, a hash of all logits.

    python tests/answers.py [MODEL.gguf]

The same file must come out of every machine, thread count and PAGEDKV_ISA. Without a model only the tiny one of the
tests answers. Needs nothing but the package and its dependencies.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent / "models"))
import tiny

from pagedkv import LLM, SamplingParams

TINY_PROMPTS = ["hello world", [5, 9, 70, 12, 33] * 3, [7] * 40, "12 hello"]
REAL_PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]


def answers(model, prompts, n_new, **settings):
    """What `model` says to all prompts at once, greedy and sampled in turns, and logits of the last prompt alone."""
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=n_new, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    with LLM(model, kv_pages=200, max_model_len=256, **settings) as llm:
        rows = []
        for output in llm.generate(prompts, params):
            done = output.outputs[0]
            values = [entry[token] for entry, token in zip(done.logprobs, done.token_ids, strict=True)]
            rows.append([list(done.token_ids), np.array(values, np.float32).tobytes().hex(), done.text])
        logits = llm.logits(llm.tokenizer.encode(prompts[-1]))
    return {"rows": rows, "logits": hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()}


def main(models):
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        small = Path(directory, "tiny.gguf")
        small.write_bytes(tiny.model())
        for name, model, prompts, n_new in [
            ("tiny", small, TINY_PROMPTS, 24),
            *((Path(model).name, model, REAL_PROMPTS, 12) for model in models),
        ]:
            for kv_format in ("f16", "int8"):
                for activations in ("int8", "int12"):
                    key = f"{name}, pages {kv_format}, activations {activations}"
                    found[key] = answers(model, prompts, n_new, kv_format=kv_format, activations=activations)
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main(sys.argv[1:])
