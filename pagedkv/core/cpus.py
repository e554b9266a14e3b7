"""How many threads a job may use: affinity, the cgroup CPU quota, PAGEDKV_THREADS."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_processors() -> int:
    """Processors this process may run on, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _fields(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def cgroup_quota(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> float | None:
    """Smallest CPU quota, in processors, over this process's cgroup and all its ancestors (v2, v1); None: unlimited.

    `root` and `membership` name the mounted hierarchy and the membership file, to be tested on made-up trees.
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = Path(root) if not controllers else Path(root, "cpu")
        parts = [p for p in path.split("/") if p]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            fields = _fields(folder / "cpu.max") if not controllers else (
                _fields(folder / "cpu.cfs_quota_us") + _fields(folder / "cpu.cfs_period_us")
            )
            if len(fields) == 2 and all(f.isdecimal() for f in fields) and int(fields[1]):  # "max" and -1: unlimited
                quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def default_threads() -> int:
    """PAGEDKV_THREADS, else min(affinity, floor of the cgroup quota), at least 1. A bad variable is a ValueError."""
    forced = os.environ.get("PAGEDKV_THREADS")
    if forced:
        if not forced.isdecimal() or not 1 <= int(forced) <= 1024:
            raise ValueError(f"PAGEDKV_THREADS: {forced!r} is not an integer in [1, 1025)")
        return int(forced)
    quota = cgroup_quota()
    limit = available_processors()
    return max(1, min(limit, math.floor(quota)) if quota is not None else limit)
