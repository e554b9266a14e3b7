"""How much memory a KV pool may take when nobody says."""

import os
import re
from pathlib import Path

DEFAULT_SHARE = 4  # the pool's default bound is available memory divided by this
MEMORY = "memory"  # the bound of `memory_limits` that is the machine's, not somebody's setting


def available_memory(root: Path = Path("/")) -> int:
    """Bytes a new allocation can hope for: the least that any of `memory_limits` leaves; 1 GiB when the system tells
    nothing."""
    return min(memory_limits(root).values(), default=2**30)


def memory_limits(root: Path = Path("/")) -> dict[str, int]:
    """What each bound that the system tells still leaves, in bytes, by its name: MemAvailable, the tightest cgroup (v2
    or v1) above this process, its limits of address space and data, and the commit limit where that is strict."""
    found = {
        MEMORY: _mem_available(root),
        "control group": min(_cgroup_headroom(root), default=None),
        "address space limit (ulimit -v)": _limit_headroom(root, "Max address space", 0),
        "data size limit (ulimit -d)": _limit_headroom(root, "Max data size", 5),
        "commit limit (vm.overcommit_memory=2)": _commit_headroom(root),
    }
    return {name: max(0, left) for name, left in found.items() if left is not None}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _mem_available(root: Path) -> int | None:
    return _meminfo(root).get("MemAvailable")


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo."""
    found = re.findall(r"^(\w+):\s*(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return {name: 1024 * int(kibibytes) for name, kibibytes in found}


def _limit_headroom(root: Path, name: str, field: int) -> int | None:
    """What a resource limit of this process leaves; `field`: the number in /proc/self/statm, in OS pages, it bounds."""
    soft = re.search(rf"^{name} +(\d+) ", _read(root / "proc/self/limits"), re.MULTILINE)
    used = _read(root / "proc/self/statm").split()
    if soft is None or len(used) <= field or not used[field].isdigit():
        return None
    return int(soft[1]) - int(used[field]) * os.sysconf("SC_PAGESIZE")


def _commit_headroom(root: Path) -> int | None:
    """What strict accounting, if it is on, still lets this machine allocate."""
    info = _meminfo(root)
    if _read(root / "proc/sys/vm/overcommit_memory").strip() != "2" or not {"CommitLimit", "Committed_AS"} <= {*info}:
        return None
    return info["CommitLimit"] - info["Committed_AS"]


def _cgroup_headroom(root: Path) -> list[int]:
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            directory = base.joinpath(*parts[:depth])
            try:
                found.append(int((directory / limit).read_text()) - int((directory / usage).read_text()))
            except (OSError, ValueError):
                continue
    return found
