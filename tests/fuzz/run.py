"""Fuzz the readers of model files by hand.

    python tests/fuzz/run.py gguf --runs 100000                       seeded mutations, guided by new refusals
    python tests/fuzz/run.py gguf --runs 100000 --engine atheris      guided by coverage; needs `pip install atheris`

Stops at the first fault, whose input it leaves in --finds. --keep DIR: also writes inputs that found something new.
"""

import argparse
import hashlib
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models")]

CORPUS = HERE / "corpus"
MAX_BYTES = 1 << 16


def corpus(target: str) -> list[bytes]:
    """The kept inputs of a target, in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def mutators(target: str):
    """rng -> what makes another input of one or two."""
    import document
    import json_document

    found = {"gguf": document.Mutator, "tokenizer_json": json_document.Mutator, "hub": json_document.HubMutator}
    return found[target]


def plain(target: str, runs: int, seed: int, keep: Path | None = None, finds: Path | None = None) -> dict[str, int]:
    """Run `runs` mutations drawn from `seed`; returns how often each kind of outcome came. Raises at a fault."""
    import targets

    rng = random.Random(seed)
    mutator = mutators(target)(rng)
    kept = corpus(target)
    outcomes: dict[str, int] = {}
    with targets.bounds():
        for raw in kept:
            outcomes.setdefault(shape(targets.check(target, raw)), 0)
        found = list(kept)
        for i in range(runs):
            # most begin from kept ones: what was refused early leads to little else
            raw = mutator.mutate(rng.choice(kept if rng.random() < 0.7 else found), rng.choice(found))[:MAX_BYTES]
            try:
                outcome = shape(targets.check(target, raw, traced=i % 16 == 0))
            except BaseException:
                save(raw, finds or Path("."), "fault")
                print(f"{target}: seed {seed}, input {i}", file=sys.stderr)
                raise
            if outcome not in outcomes:
                found.append(raw)
                if keep:
                    save(raw, keep, "kept")
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def shape(outcome: str) -> str:
    """An outcome without the names and numbers of one input."""
    return re.sub(r"/\S+|'[^']*'|\"[^\"]*\"|b'.*'|[-+]?\d[\d.e+-]*|\[.*?\]|\(.*?\)", "#", outcome)[:120]


def save(raw: bytes, directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}-{hashlib.sha256(raw).hexdigest()[:12]}").write_bytes(raw)


def guided(target: str, runs: int, seed: int, keep: Path | None, finds: Path) -> None:
    """Run under atheris, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["pagedkv.models"]):
        import targets
    mutator_of = mutators(target)

    def mutate(raw, max_size, seed):
        rng = random.Random(seed)
        return mutator_of(rng).mutate(raw, rng.choice(seeds))[:max_size]

    def cross(one, other, max_size, seed):
        return mutator_of(random.Random(seed)).mutate(one, other)[:max_size]

    def one_input(raw):
        targets.check(target, raw)

    seeds = corpus(target)
    finds.mkdir(parents=True, exist_ok=True)
    # libFuzzer adds to the first directory it is given
    first = keep or Path(tempfile.mkdtemp())
    first.mkdir(parents=True, exist_ok=True)
    # libFuzzer takes its parent's largest memory for its own; bounds() below are the limit
    arguments = [f"-runs={runs}", f"-seed={seed}", f"-max_len={MAX_BYTES}", "-timeout=30", "-rss_limit_mb=0",
                 f"-artifact_prefix={finds}/", "-print_final_stats=1", "-reload=0"]  # fmt: skip
    arguments = [sys.argv[0], *arguments, str(first), str(CORPUS / target)]
    atheris.Setup(arguments, one_input, custom_mutator=mutate, custom_crossover=cross)
    with targets.bounds():
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["gguf", "tokenizer_json", "hub"])
    parser.add_argument("--engine", choices=["plain", "atheris"], default="plain")
    parser.add_argument("--runs", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--finds", type=Path, default=Path("."))
    given = parser.parse_args()
    if given.engine == "atheris":
        guided(given.target, given.runs, given.seed, given.keep, given.finds)
        return
    start = time.perf_counter()
    outcomes = plain(given.target, given.runs, given.seed, given.keep, given.finds)
    seconds = time.perf_counter() - start
    good = sum(n for outcome, n in outcomes.items() if "good" in outcome)
    figures = {"runs": given.runs, "seconds": round(seconds), "outcomes": len(outcomes), "good": good}
    print(json.dumps({"target": given.target, "seed": given.seed, **figures}))


if __name__ == "__main__":
    main()
