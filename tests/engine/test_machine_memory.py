"""Available memory from a made-up /proc and cgroup tree."""

from pagedkv.engine.memory import available_memory


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


def test_this_machine():
    assert 2**20 < available_memory() < 2**50
