"""pagedkv against itself: instruction sets, thread counts, activation formats, in turns on the same work.

Every combination of the values given is an engine in a process of its own, as in compare.py.

    python bench/variants.py --isa vnni,avx512,avx2 --activations int8,int12
    python bench/variants.py --threads 1,2
"""

import argparse
import itertools
import sys
from pathlib import Path

import results
from compare import Job, Worker, compare

from pagedkv.core._kernels import isa_names
from pagedkv.core.cpus import default_threads
from pagedkv.models.catalogue import resolve


def main() -> None:
    """Run every combination the arguments ask for, print them and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="catalogue name or GGUF file")
    parser.add_argument("--isa", default=isa_names()[0], help="of " + ", ".join(isa_names()))
    parser.add_argument("--threads", default=str(default_threads()), help="thread counts")
    parser.add_argument("--activations", default="int8", help="of int8, int12")
    parser.add_argument("--batch", default="1,32", help="batch sizes of decode")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt in decode")
    parser.add_argument("--gen-tokens", type=int, default=32, help="counted steps of decode")
    parser.add_argument("--prefill", default="512", help="prompt lengths of prefill")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each variant")
    parser.add_argument("--name", default="variants", help="results go to NAME.jsonl")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="directory of the results")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    options = parser.parse_args()

    model = resolve(options.model)
    jobs = [Job("decode", int(b), options.prompt_tokens, options.gen_tokens) for b in options.batch.split(",") if b]
    jobs += [Job("prefill", 1, int(n), 1) for n in options.prefill.split(",") if n]
    workers: list[Worker] = []
    about: dict[str, dict[str, str | int]] = {}
    try:
        for isa, threads, activations in itertools.product(
            options.isa.split(","), options.threads.split(","), options.activations.split(",")
        ):
            label = f"{isa} {activations} x{threads}"
            about[label] = {"isa": isa, "threads": int(threads), "activations": activations}
            worker = Worker.start(
                "pagedkv",
                sys.executable,
                model,
                int(threads),
                options.verbose,
                label=label,
                options={"activations": activations},
                environment={"PAGEDKV_ISA": isa},
            )
            if worker:
                workers.append(worker)
        rows = compare(workers, jobs, model, options.rounds)
    finally:
        for worker in workers:
            worker.stop()
    rows = [{**row, **about[row["engine"]], "bench": "variants"} for row in rows]
    path = results.write(options.name, rows, threads=default_threads(), directory=options.results)
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
