"""How much memory a KV pool may take when nobody says."""

from pathlib import Path

DEFAULT_SHARE = 4  # the pool's default bound is available memory divided by this


def available_memory(root: Path = Path("/")) -> int:
    """Bytes a new allocation can hope for: MemAvailable, or what the tightest cgroup (v2 or v1) above this process
    still allows if that is less; 1 GiB when the system tells nothing."""
    found = [*_mem_available(root), *_cgroup_headroom(root)]
    return max(0, min(found)) if found else 2**30


def _mem_available(root: Path) -> list[int]:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return [int(line.split()[1]) * 1024]
    except (OSError, ValueError, IndexError):
        pass
    return []


def _cgroup_headroom(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
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
