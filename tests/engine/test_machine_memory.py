"""Available memory from a made-up /proc and cgroup tree."""

import os
import resource
import subprocess
import sys

import command_line
import pytest

from pagedkv.engine.memory import available_memory, memory_limits

PAGE = os.sysconf("SC_PAGESIZE")


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_meminfo_alone(tmp_path):
    write(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    assert available_memory(tmp_path) == 1000 * 1024


def test_tightest_cgroup_v2_ancestor_wins(tmp_path):
    write(tmp_path, proc__meminfo="MemAvailable: 1000000 kB\n", proc__self__cgroup="0::/a/b\n")
    write(
        tmp_path,
        sys__fs__cgroup__a__memory_DOT_max="5000\n",
        sys__fs__cgroup__a__memory_DOT_current="1000\n",
        sys__fs__cgroup__a__b__memory_DOT_max="max\n",
        sys__fs__cgroup__a__b__memory_DOT_current="10\n",
    )
    assert available_memory(tmp_path) == 4000


def test_cgroup_v1(tmp_path):
    write(tmp_path, proc__meminfo="MemAvailable: 1000000 kB\n", proc__self__cgroup="3:cpu,memory:/x\n2:cpuset:/\n")
    (tmp_path / "sys/fs/cgroup/memory/x").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory/x/memory.limit_in_bytes").write_text("900")
    (tmp_path / "sys/fs/cgroup/memory/x/memory.usage_in_bytes").write_text("1000")
    assert available_memory(tmp_path) == 0


def test_nothing_known(tmp_path):
    assert available_memory(tmp_path) == 2**30


LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max file size             5                    5                    bytes     \n"
    "Max data size             {data:<20} unlimited            bytes     \n"
    "Max address space         {space:<20} unlimited            bytes     \n"
)


@pytest.mark.parametrize(
    "space, data, left",
    [
        ("unlimited", "unlimited", 1000 * 1024),
        (50 * PAGE, "unlimited", 40 * PAGE),
        ("unlimited", 50 * PAGE, 47 * PAGE),
        (20 * PAGE, 9 * PAGE, 6 * PAGE),
        (5 * PAGE, "unlimited", 0),  # lowered below what is mapped already
        (2**62, 2**62, 1000 * 1024),
    ],
)
def test_limits_of_the_process(tmp_path, space, data, left):
    write(
        tmp_path,
        proc__meminfo="MemAvailable: 1000 kB\n",
        proc__self__limits=LIMITS.format(data=data, space=space),
        proc__self__statm="10 4 2 1 0 3 0\n",
    )
    assert available_memory(tmp_path) == left


@pytest.mark.parametrize("mode, left", [("0", 1000), ("1", 1000), ("2", 300)])
def test_strict_accounting(tmp_path, mode, left):
    info = "MemAvailable: 1000 kB\nCommitLimit: 900 kB\nCommitted_AS: 600 kB\nHugePages_Total: 0\n"
    write(tmp_path, proc__meminfo=info, proc__sys__vm__overcommit_memory=f"{mode}\n")
    assert available_memory(tmp_path) == left * 1024


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_a_process_with_a_limit_of_its_own(kind):
    code = "from pagedkv.engine.memory import available_memory; print(available_memory())"
    limit = 600 << 20
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env=command_line.environment(),
        preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),
    )
    assert result.returncode == 0, result.stderr
    assert limit - (100 << 20) < int(result.stdout) < limit


def test_each_bound_has_its_name(tmp_path):
    assert memory_limits(tmp_path) == {}
    assert memory_limits()["memory"] > 2**20


def test_this_machine():
    assert 2**20 < available_memory() < 2**50
