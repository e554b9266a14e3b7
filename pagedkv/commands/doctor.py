"""`pagedkv doctor`: what this machine offers, what pagedkv will use of it, and what to change."""

import math
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedkv.commands.info import size
from pagedkv.version import build, commit, version

LOW_MEMORY = 1 << 30
LOW_DISK = 1 << 28
PROBE_FILE = 1 << 16
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CPU_INFO = Path("/proc/cpuinfo")
DEPENDENCIES = ("numpy", "tokenizers", "jinja2", "click", "tqdm")
PROBE_BYTES = 1 << 28
NOT_LOADED = "unknown without the compiled part, see instruction sets"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `problem` says what is wrong and how to mend it, empty when all is well."""

    name: str
    value: str
    problem: str = ""


def run() -> None:
    """Print findings and, behind each that needs it, the problem and its fix. Measures for about a second."""
    n_problems = 0
    for finding in findings():
        print(f"{finding.name + ':':18}{finding.value}")
        if finding.problem:
            n_problems += 1
            print(f"{'':4}problem: {finding.problem}")
    print(f"{n_problems} problem{'' if n_problems == 1 else 's'} found" if n_problems else "no problems found")


def findings() -> Iterator[Finding]:
    """Everything doctor looks at, in the order of the report. Raises nothing: what cannot be found out is a finding."""
    yield Finding("pagedkv", _versions())
    yield Finding("dependencies", ", ".join(_installed(name) for name in DEPENDENCIES))
    yield Finding("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    yield Finding("processor", f"{cpu_name()}, {platform.machine()}")
    yield _instruction_sets()
    yield _threads()
    yield _memory()
    yield huge_pages(HUGE_PAGES)
    yield _bandwidth()
    yield _cache_directory()


def cpu_name(cpu_info: Path = CPU_INFO) -> str:
    """The processor's name as Linux tells it; the machine type where it does not."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model", "Hardware"))]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> str:
    record = build()
    parts = [version(), f"commit {commit() or 'unknown'}", f"built with {record['compiler'] or 'an unknown compiler'}"]
    return ", ".join(parts)


def _installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return f"{name} {installed(name)}"
    except PackageNotFoundError:
        return f"{name} missing"


def _instruction_sets() -> Finding:
    try:
        from pagedkv.core._kernels import isa, isa_names
    except ImportError as error:
        fix = "; unset it, or set it to one of these" if "PAGEDKV_ISA" in str(error) else ""
        if error.name:  # Python's own error, which names a module and no remedy
            fix = "; install pagedkv again"
        return Finding("instruction sets", "none usable", f"{error}{fix}")
    names, chosen = isa_names(), isa()
    forced = " by PAGEDKV_ISA" if os.environ.get("PAGEDKV_ISA") else ""
    problem = ""
    if chosen != names[0]:
        problem = f"{names[0]} is faster than {chosen}; unset PAGEDKV_ISA"
    elif chosen == "scalar":
        problem = "no SIMD kernels run here: give the virtual machine the host's CPU model, or use a newer processor"
    return Finding("instruction sets", f"{', '.join(names)}; uses {chosen}{forced}", problem)


def _threads() -> Finding:
    try:
        from pagedkv.core.cpus import available_processors, cgroup_quota, default_threads

        used = default_threads()
    except ImportError:
        return Finding("threads", NOT_LOADED)
    except ValueError as error:
        return Finding("threads", "none", f"{error}; unset it or correct it")
    return threads_finding(available_processors(), os.cpu_count() or 1, cgroup_quota(), used)


def threads_finding(affinity: int, processors: int, quota: float | None, used: int) -> Finding:
    """Threads that will be used, against the processors this process may run on and the CPU time it is granted."""
    granted = f"CPU quota {quota:g}" if quota is not None else "no CPU quota"
    value = f"{used}; affinity allows {affinity} of {processors} processors, {granted}"
    limit = affinity if quota is None else min(affinity, max(1, math.floor(quota)))
    problem = ""
    if used > limit:
        problem = f"{used} threads on {limit} processors wait for each other; set PAGEDKV_THREADS={limit} or unset it"
    elif used < limit:
        problem = f"{limit - used} processors stay idle; set PAGEDKV_THREADS={limit} or unset it"
    elif quota is not None and quota < 1:
        problem = f"a quota of {quota:g} processors stops every thread for part of the time; grant at least 1"
    elif quota is not None and quota < affinity and quota != limit:
        problem = f"{quota - limit:g} processors of the quota stay idle; grant whole processors"
    return Finding("threads", value, problem)


def _memory() -> Finding:
    from pagedkv.engine.memory import memory_limits

    return memory_finding(memory_limits())


def memory_finding(limits: dict[str, int]) -> Finding:
    """Bytes that each bound leaves, as `memory_limits` tells them: the least, and whose it is."""
    if not limits:
        return Finding("memory", "unknown")
    from pagedkv.engine.memory import MEMORY

    name = min(limits, key=limits.__getitem__)
    left = limits[name]
    value = f"{size(left)} available"
    if name != MEMORY:
        value += f", bounded by the {name}"
    problem = ""
    if left < LOW_MEMORY:
        remedy = "stop other programs" if name == MEMORY else f"raise the {name}"
        problem = f"less than {size(LOW_MEMORY)} is left; {remedy}"
    elif "ulimit" in name:
        problem = f"the {name} leaves less than memory does; raise it to unlimited, or expect a smaller KV pool"
    return Finding("memory", value, problem)


def huge_pages(setting: Path) -> Finding:
    """Whether the system gives 2 MiB pages to those who ask, as pagedkv does for weights and KV pages."""
    try:
        text = setting.read_text()
    except OSError:
        return Finding("huge pages", "not offered by this system")
    chosen = text.partition("[")[2].partition("]")[0]
    fix = f"reading weights misses the TLB more often; as root: echo madvise > {setting}"
    return Finding("huge pages", chosen or text.strip(), fix if chosen == "never" else "")


def _bandwidth() -> Finding:
    try:
        from pagedkv.core._kernels import ThreadPool
        from pagedkv.core.probe import read_bandwidth

        pool = ThreadPool()
        speed = read_bandwidth(pool, PROBE_BYTES)
    except ImportError:
        return Finding("read bandwidth", NOT_LOADED)
    except (ValueError, MemoryError) as error:
        return Finding("read bandwidth", "not measured", f"{error}")
    bound = "decoding one sequence cannot read a model's weights faster"
    return Finding("read bandwidth", f"{speed / 1e9:.1f} GB/s with {pool.n_threads} threads: {bound}")


def _cache_directory() -> Finding:
    from pagedkv.models.catalogue import home

    try:
        return cache_finding(home())
    except RuntimeError as error:  # no home directory to expand ~ to
        return Finding("model cache", "none", f"{error}; set PAGEDKV_HOME to a directory")


def cache_finding(directory: Path) -> Finding:
    """Whether models can be kept in `directory`, found out by making a directory and a file; none of them stays."""
    from tempfile import TemporaryDirectory

    target, problem = directory / "models", ""
    existing = target
    try:
        while not os.path.lexists(existing):
            existing = existing.parent
        with TemporaryDirectory(prefix=".doctor-", dir=existing) as scratch:
            inside = Path(scratch, *target.relative_to(existing).parts)
            inside.mkdir(parents=True, exist_ok=True)
            (inside / "probe").write_bytes(bytes(PROBE_FILE))
        room = shutil.disk_usage(existing).free
        if room < LOW_DISK:
            problem = f"{size(room)} of disk is left, too little for a model; set PAGEDKV_HOME to another directory"
    except OSError as error:
        reason = error.strerror or type(error).__name__
        problem = f"{existing}: {reason}, so no model can be pulled; set PAGEDKV_HOME to another directory"
    return Finding("model cache", str(directory), problem)
