"""The one writer of benchmark results: JSON lines with what made them, under bench/results/."""

import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent.parent))  # the checkout, built in place, where pagedkv is not installed

from pagedkv.commands.doctor import cpu_name
from pagedkv.version import build, commit, version

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code: processor, ISA, system, versions, compiler and its flags."""
    from pagedkv.core._kernels import isa

    made = build()
    return {
        "cpu": cpu_name(),
        "processors": len(os.sched_getaffinity(0)),
        "isa": isa(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pagedkv": version(),
        "commit": commit(),
        "build_commit": made["commit"],
        "compiler": made["compiler"],
        "flags": made["flags"],
    }


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, spread and all samples of one figure."""
    median = statistics.median(samples)
    return {
        "median": round(median, 3),
        "spread": round((max(samples) - min(samples)) / median, 4) if median else None,
        "samples": [round(sample, 3) for sample in samples],
    }


def write(name: str, rows: Sequence[Mapping[str, Any]], *, threads: int, directory: Path = RESULTS) -> Path:
    """Append rows to `<name>.jsonl`, each with the time, the machine and the threads; returns the file's path.

    What a row says itself, such as the ISA it was measured with, stays.
    ValueError for a row in which a text is an absolute path: results are published.
    """
    head = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "threads": threads, **machine()}
    lines = [json.dumps({**row, **{name: value for name, value in head.items() if name not in row}}) for row in rows]
    for row in rows:
        for field, value in row.items():
            if isinstance(value, str) and value.startswith("/"):
                raise ValueError(f"{field}: {value!r} is a path of this machine; give a name")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.jsonl"
    with open(path, "a") as file:
        file.write("".join(line + "\n" for line in lines))
    return path
