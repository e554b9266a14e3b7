"""Runs one engine in a process of its own: a JSON object a line in, one a line out.

worker.py ENGINE MODEL THREADS [OPTIONS]
    ENGINE: pagedkv, llama.cpp, llama.cpp-fa, openvino; OPTIONS: a JSON object of further arguments of its Engine

First line out: {"version": ..., "settings": ...}. Then for each {"prompts": [[token ids]], "gen_tokens": n}:
{"prefill_s": ..., "decode_s": ...}. Prefill ends when every prompt has its first token; decode is n steps of all.
All prompts of a job have the same length. Needs nothing but the engine and NumPy; whatever the engine prints goes to
standard error.
"""

import importlib
import json
import os
import sys

ENGINES = {
    "pagedkv": ("pagedkv_engine", {}),
    "llama.cpp": ("llama_cpp_engine", {"flash_attention": False}),
    "llama.cpp-fa": ("llama_cpp_engine", {"flash_attention": True}),
    "openvino": ("openvino_engine", {}),
}


def main() -> None:
    """Serve jobs until standard input ends."""
    name, model, threads, *more = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, options = ENGINES[name]
    options = {**options, **json.loads(more[0] if more else "{}")}
    engine = importlib.import_module(module).Engine(model, int(threads), **options)

    def answer(content: dict) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    answer({"version": engine.version, "settings": engine.settings})
    for line in sys.stdin:
        job = json.loads(line)
        prefill_s, decode_s = engine.measure(job["prompts"], job["gen_tokens"])
        answer({"prefill_s": prefill_s, "decode_s": decode_s})


if __name__ == "__main__":
    main()
