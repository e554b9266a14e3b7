"""`pagedkv doctor` and `pagedkv info`."""

import errno
import os
import resource
import subprocess
from types import SimpleNamespace

import command_line
import pytest

from pagedkv.commands import doctor
from pagedkv.commands.info import size
from pagedkv.core._kernels import ThreadPool
from pagedkv.core.matmul import PackedMatrix
from pagedkv.core.probe import kernel_macs, read_bandwidth


def lines_of(text):
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


# Doctor


def test_report(pagedkv_command):
    result = pagedkv_command("doctor")
    assert result.returncode == 0 and result.stderr == ""
    found = lines_of(result.stdout)
    assert {"pagedkv", "threads", "memory", "huge pages", "model cache"} <= set(found)
    assert "scalar" in found["instruction sets"] and "GB/s" in found["read bandwidth"]
    assert "numpy" in found["dependencies"]


@pytest.mark.parametrize(
    "environment, named",
    [
        ({"PAGEDKV_ISA": "mmx"}, ["'mmx'", "unset it"]),
        ({"PAGEDKV_ISA": "scalar"}, ["unset PAGEDKV_ISA"]),
        ({"PAGEDKV_THREADS": "0"}, ["PAGEDKV_THREADS", "'0'"]),
        ({"PAGEDKV_THREADS": "1000"}, ["PAGEDKV_THREADS=", "1000 threads"]),
        ({"PAGEDKV_HOME": "/dev/null/models"}, ["/dev/null: Not a directory", "PAGEDKV_HOME"]),
        ({"PAGEDKV_HOME": "/proc/models"}, ["/proc: ", "PAGEDKV_HOME"]),
        ({"PAGEDKV_HOME": "~nobody-of-this-name/x"}, ["home directory", "PAGEDKV_HOME"]),
        ({"PAGEDKV_HOME": "x" * 300}, ["File name too long", "PAGEDKV_HOME"]),
    ],
)
def test_problems_come_with_their_fix(pagedkv_command, environment, named):
    result = pagedkv_command("doctor", **environment)
    assert result.returncode == 0 and result.stderr == "" and "found" in result.stdout.splitlines()[-1]
    problems = [line for line in result.stdout.splitlines() if line.strip().startswith("problem:")]
    assert any(all(word in problem for word in named) for problem in problems), result.stdout


@pytest.mark.parametrize(
    "affinity, processors, quota, used, problem",
    [
        (8, 8, None, 8, ""),
        (2, 8, None, 2, ""),
        (8, 8, 4.0, 4, ""),
        (8, 8, None, 9, "PAGEDKV_THREADS=8"),
        (8, 8, 2.0, 8, "PAGEDKV_THREADS=2"),
        (8, 8, None, 2, "6 processors stay idle"),
        (8, 8, 2.5, 2, "0.5 processors of the quota"),
        (8, 8, 0.5, 1, "grant at least 1"),
    ],
)
def test_threads(affinity, processors, quota, used, problem):
    found = doctor.threads_finding(affinity, processors, quota, used)
    assert found.value.startswith(f"{used};") and (problem in found.problem if problem else found.problem == "")


@pytest.mark.parametrize(
    "text, value, problem",
    [
        ("always [madvise] never\n", "madvise", False),
        ("[always] madvise never\n", "always", False),
        ("always madvise [never]\n", "never", True),
    ],
)
def test_huge_pages(tmp_path, text, value, problem):
    setting = tmp_path / "enabled"
    setting.write_text(text)
    found = doctor.huge_pages(setting)
    assert found.value == value and ("echo madvise" in found.problem) == problem
    assert doctor.huge_pages(tmp_path / "absent").problem == ""


def test_cache_directories_that_cannot_be_used(tmp_path, monkeypatch):
    (tmp_path / "dangling").symlink_to(tmp_path / "absent" / "far")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "models").write_text("a file")
    (tmp_path / "fine" / "models").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for name, named in ("dangling", "No such file"), ("held", "Not a directory"), ("fine/" + "x" * 300, "too long"):
        found = doctor.cache_finding(tmp_path / name)
        assert named in found.problem and "PAGEDKV_HOME" in found.problem
    for name in ("fine", "new", "new/and/deep"):
        assert doctor.cache_finding(tmp_path / name) == doctor.Finding("model cache", str(tmp_path / name))
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    assert "3.0 MiB of disk is left" in doctor.cache_finding(tmp_path / "fine").problem


def test_a_full_disk(tmp_path, monkeypatch):
    def write(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(doctor.Path, "write_bytes", write)
    assert "No space left on device" in doctor.cache_finding(tmp_path).problem and os.listdir(tmp_path) == []


GIB = 1 << 30


@pytest.mark.parametrize(
    "limits, value, problem",
    [
        ({"memory": 8 * GIB}, "8.0 GiB available", ""),
        ({"memory": GIB // 2}, "512.0 MiB available", "stop other programs"),
        ({"memory": 8 * GIB, "control group": 4 * GIB}, "4.0 GiB available, bounded by the control group", ""),
        ({"memory": 8 * GIB, "control group": GIB // 2}, "512.0 MiB available, bounded by", "raise the control group"),
        ({"memory": 8 * GIB, "data size limit (ulimit -d)": 4 * GIB}, "4.0 GiB available, bounded", "to unlimited"),
        ({"memory": 8 * GIB, "address space limit (ulimit -v)": 9 * GIB}, "8.0 GiB available", ""),
        ({}, "unknown", ""),
    ],
)
def test_memory(limits, value, problem):
    found = doctor.memory_finding(limits)
    assert found.value.startswith(value) and (problem in found.problem if problem else found.problem == "")
    assert found.value.endswith("available") == (len(limits) > 0 and min(limits, key=limits.get) == "memory")


def test_a_limit_of_address_space_is_reported(tmp_path):
    result = subprocess.run(
        [*command_line.COMMAND, "doctor"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=command_line.environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB)),
    )
    assert result.returncode == 0 and "bounded by the address space limit (ulimit -v)" in result.stdout
    assert "raise the address space limit" in result.stdout


def test_cpu_name(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU\n\nmodel name\t: Other\n")
    assert doctor.cpu_name(info) == "Fast CPU"
    assert doctor.cpu_name(tmp_path / "absent")


# The probe


def test_read_bandwidth_reads_with_every_thread_and_gives_memory_back():
    for threads in (1, 3):
        assert read_bandwidth(ThreadPool(threads), 8 << 20, 2) > 0
    before = resident()
    for _ in range(3):
        read_bandwidth(ThreadPool(1), 64 << 20, 1)
    assert resident() - before < 32 << 20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("size, repeats, named", [(0, 1, "n_bytes"), (1 << 40, 1, "n_bytes"), (1 << 20, 0, "repeats")])
def test_read_bandwidth_refuses(size, repeats, named):
    with pytest.raises(ValueError, match=named):
        read_bandwidth(ThreadPool(1), size, repeats)


@pytest.mark.parametrize("kind, block_bytes", [("Q4_1", 20), ("Q8_0", 34), ("F32", 128)])
def test_kernel_macs_runs_the_kernel_of_each_kind(kind, block_bytes):
    pool = ThreadPool(2)
    weights = PackedMatrix.pack(pool, kind, bytes(32 * 3 * block_bytes), 32, 96)
    assert kernel_macs(pool, weights, 3, 2) > 0
    with pytest.raises(ValueError, match="n_tokens, repeats"):
        kernel_macs(pool, weights, 0, 1)


# Info


def test_info_of_the_real_model(pagedkv_command, smollm2_path):
    result = pagedkv_command("info", "smollm2-135m-instruct")
    assert result.returncode == 0 and result.stderr == ""
    found = lines_of(result.stdout)
    assert found["rotary embedding"] == "64 values, base 100000" and found["windows"] == "none"
    assert found["architecture"] == "llama" and found["layers"] == "30" and found["hidden size"] == "576"
    assert found["attention"] == "9 heads over 3 KV heads of 64" and found["context"] == "8,192 tokens"
    assert found["parameters"] == "134,515,008" and "smollm" in found["tokenizer"] and found["chat template"] == "yes"
    assert "210 x Q4_1" in found["types"] and "'<|im_end|>'" in found["stop tokens"]
    # 1000 tokens * 30 layers * 3 heads * 2 (K, V) * 64 values * 2 bytes
    assert "22.0 MiB as f16" in found["KV per 1,000 tokens"] and "43.9 MiB as f32" in found["KV per 1,000 tokens"]
    assert found["memory of weights"] == "92.1 MiB"


def test_info_tells_windows_and_every_rotation(pagedkv_command, gemma3_path):
    found = lines_of(pagedkv_command("info", gemma3_path).stdout)
    assert found["windows"] == "15 layers see 512 tokens" and found["context"] == "32,768 tokens"
    assert found["rotary embedding"] == "256 values, base 1e+06; 256 values, base 10000"
    assert found["chat template"] == "no" and "Q5_0" in found["types"] and "not supported" not in found["types"]


def test_info_names_a_type_that_cannot_be_computed(pagedkv_command, smollm2_path, tmp_path):
    raw = bytearray(smollm2_path.read_bytes())
    norm = b"output_norm.weight" + (1).to_bytes(4, "little") + (576).to_bytes(8, "little")
    raw[raw.index(norm) + len(norm)] = 26
    (tmp_path / "other.gguf").write_bytes(raw)
    found = lines_of(pagedkv_command("info", "other.gguf").stdout)
    assert "1 x I32 (2.2 KiB, not supported)" in found["types"]


def test_info_of_a_catalogue_name_and_of_its_file_agree(pagedkv_command, smollm2_path):
    assert pagedkv_command("info", smollm2_path).stdout == pagedkv_command("info", "smollm2-135m-instruct").stdout


def test_pull_prints_the_path_alone(pagedkv_command, smollm2_path):
    result = pagedkv_command("pull", "smollm2-135m-instruct")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{smollm2_path}\n", "")


def test_sizes():
    assert [size(n) for n in (0, 1023, 1536)] == ["0 bytes", "1023 bytes", "1.5 KiB"]
    assert [size(n) for n in (5 << 20, 3 << 29)] == ["5.0 MiB", "1.5 GiB"]
