"""Thread counts from affinity, cgroup quotas and PAGEDKV_THREADS; ISA detection on made-up registers."""

import os
import subprocess
import sys

import pytest

from pagedkv.core import _testing_threads as hooks
from pagedkv.core import cpus
from pagedkv.core._kernels import ThreadPool, isa_names


@pytest.fixture
def cgroup(tmp_path):
    """make(membership lines, {file: content}) -> quota read from such a tree."""

    def make(membership, files):
        (tmp_path / "membership").write_text("".join(f"{line}\n" for line in membership))
        for name, content in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return cpus.cgroup_quota(str(tmp_path / "root"), str(tmp_path / "membership"))

    return make


V2 = [
    ({"a/b/cpu.max": "150000 100000\n"}, 1.5),
    ({"a/b/cpu.max": "max 100000\n"}, None),
    ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
    ({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "300000 100000\n", "cpu.max": "800000 100000\n"}, 3.0),
    ({"cpu.max": "200000 100000\n"}, 2.0),
    ({"a/c/cpu.max": "100000 100000\n"}, None),
    ({"a/b/cpu.max": "100000 0\n"}, None),
    ({"a/b/cpu.max": "garbage\n"}, None),
    ({"a/b/cpu.max": "x y\n"}, None),
    ({"a/b/cpu.max": ""}, None),
    ({}, None),
]


@pytest.mark.parametrize(("files", "expected"), V2)
def test_quota_v2_is_the_smallest_up_the_ancestors(cgroup, files, expected):
    assert cgroup(["0::/a/b"], files) == expected


def v1(path, quota, period=100000):
    return {f"{path}/cpu.cfs_quota_us": f"{quota}\n", f"{path}/cpu.cfs_period_us": f"{period}\n"}


V1 = [
    (v1("cpu/docker/x", 250000), 2.5),
    (v1("cpu/docker/x", -1), None),
    ({**v1("cpu/docker/x", -1), **v1("cpu/docker", 100000, 50000)}, 2.0),
    (v1("cpu", 300000), 3.0),
    ({"cpu/docker/x/cpu.cfs_quota_us": "100000\n"}, None),
    (v1("memory/docker/x", 100000), None),
]


@pytest.mark.parametrize(("files", "expected"), V1)
def test_quota_v1(cgroup, files, expected):
    lines = ["12:memory:/docker/x", "4:cpu,cpuacct:/docker/x", "3:cpuset:/", "1:name=systemd:/docker/x"]
    assert cgroup(lines, files) == expected


def test_quota_hybrid_takes_the_smaller_of_both(cgroup):
    files = {**v1("cpu/s", 400000), "s/cpu.max": "100000 100000"}
    assert cgroup(["4:cpu:/s", "0::/s"], files) == 1.0
    assert cgroup(["4:cpu:/s", "0::/t"], files) == 4.0


def test_quota_of_a_path_with_a_colon(cgroup):
    assert cgroup(["0::/a:b"], {"a:b/cpu.max": "700000 100000"}) == 7.0


def test_no_membership_file_means_no_quota(tmp_path):
    assert cpus.cgroup_quota(str(tmp_path), str(tmp_path / "absent")) is None


@pytest.mark.parametrize(
    ("quota", "affinity", "expected"),
    [(None, 8, 8), (3.9, 8, 3), (0.5, 8, 1), (16.0, 4, 4), (1.0, 1, 1), (2.0, 2, 2)],
)
def test_default_threads(monkeypatch, quota, affinity, expected):
    monkeypatch.delenv("PAGEDKV_THREADS", raising=False)
    monkeypatch.setattr(cpus, "cgroup_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    assert cpus.default_threads() == expected


def test_default_threads_under_a_real_affinity_mask():
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "from pagedkv.core.cpus import available_processors, default_threads;"
        "print(available_processors(), default_threads())"
    )
    env = {k: v for k, v in os.environ.items() if k != "PAGEDKV_THREADS"}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).split() == ["1", "1"]


def test_variable_overrides_affinity_and_quota(monkeypatch):
    monkeypatch.setattr(cpus, "cgroup_quota", lambda: 1.0)
    monkeypatch.setenv("PAGEDKV_THREADS", "7")
    assert cpus.default_threads() == 7
    assert ThreadPool().n_threads == 7
    assert ThreadPool(2).n_threads == 2
    monkeypatch.setenv("PAGEDKV_THREADS", "")
    assert cpus.default_threads() == 1


@pytest.mark.parametrize("value", ["0", "-1", "1025", "two", "1.5", "²", " 2"])
def test_bad_variable_is_named(monkeypatch, value):
    monkeypatch.setenv("PAGEDKV_THREADS", value)
    with pytest.raises(ValueError, match=r"^PAGEDKV_THREADS: .* is not an integer in \[1, 1025\)$"):
        cpus.default_threads()


@pytest.mark.parametrize("value", [0, -3, 1025, 1.0, "2", True])
def test_bad_thread_count_is_named(value):
    with pytest.raises(ValueError, match=r"^threads: .* is (not an integer|outside \[1, 1024\])$"):
        ThreadPool(value)


# --- instruction sets: bit numbers as in the processor manuals --------------------------------------------------------

OSXSAVE, AVX, FMA, F16C = 1 << 27, 1 << 28, 1 << 12, 1 << 29
AVX2, AVX512F, AVX512DQ, AVX512BW, AVX512VL = 1 << 5, 1 << 16, 1 << 17, 1 << 30, 1 << 31
VNNI, TILE, TILE_INT8 = 1 << 11, 1 << 24, 1 << 25
YMM, ZMM, TILES = 0x6, 0xE0, 0x60000
AVX512 = AVX512F | AVX512DQ | AVX512BW | AVX512VL
EVERYTHING = (7, OSXSAVE | AVX | FMA | F16C, AVX2 | AVX512, VNNI, TILE | TILE_INT8, YMM | ZMM | TILES)
FEATURES = {"avx2": 1, "avx512": 2, "vnni": 4, "amx": 8, "neon": 16}


def x86_names(*registers):
    found = hooks.features_x86(*registers)
    return [name for name, bit in FEATURES.items() if found & bit]


def without(register, bits):
    changed = list(EVERYTHING)
    changed[register] &= ~bits
    return changed


def test_a_processor_with_everything():
    assert x86_names(*EVERYTHING) == ["avx2", "avx512", "vnni", "amx"]


@pytest.mark.parametrize(
    ("register", "bits", "expected"),
    [
        (0, 7, []),  # leaf 7 does not exist
        *[(1, bit, []) for bit in (OSXSAVE, AVX, FMA, F16C)],
        (2, AVX2, []),
        *[(2, bit, ["avx2"]) for bit in (AVX512F, AVX512DQ, AVX512BW, AVX512VL)],
        (3, VNNI, ["avx2", "avx512"]),
        *[(4, bit, ["avx2", "avx512", "vnni"]) for bit in (TILE, TILE_INT8)],
        *[(5, bit, []) for bit in (2, 4)],  # the system does not save YMM
        *[(5, bit, ["avx2"]) for bit in (0x20, 0x40, 0x80)],
        *[(5, bit, ["avx2", "avx512", "vnni"]) for bit in (0x20000, 0x40000)],
    ],
)
def test_one_missing_bit_takes_what_needs_it(register, bits, expected):
    assert x86_names(*without(register, bits)) == expected


def test_arm_words():
    assert hooks.features_arm(1 << 9 | 1 << 10 | 1 << 20, 0) == 16
    assert hooks.features_arm(1 << 9 | 1 << 10 | 1 << 20, 1 << 13) == 16 | 32
    for missing in (9, 10, 20):
        words = sum(1 << bit for bit in (9, 10, 20) if bit != missing)
        assert hooks.features_arm(words, 1 << 13) == 0


def test_every_isa_requires_its_own_feature_and_scalar_none():
    required = hooks.required_features()
    assert list(required)[-1] == "scalar"
    assert required["scalar"] == 0
    for name, bits in required.items():
        assert name == "scalar" or bits & FEATURES[name]
    assert isa_names()[-1] == "scalar"


def run_with_isa(value):
    code = "from pagedkv.core._kernels import isa; print(isa())"
    env = {**os.environ, "PAGEDKV_ISA": value}
    return subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True)


@pytest.mark.parametrize("name", isa_names())
def test_variable_forces_an_isa(name):
    assert run_with_isa(name).stdout.strip() == name


def test_empty_variable_leaves_the_best():
    assert run_with_isa("").stdout.strip() == isa_names()[0]


@pytest.mark.parametrize("name", ["sse9", "AVX2", "scalar "])
def test_unknown_isa_is_an_import_error_that_lists_the_others(name):
    result = run_with_isa(name)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: PAGEDKV_ISA: {name!r} is not available here; available: {', '.join(isa_names())}"
