"""Building and installing: from a source distribution, in a path with spaces, without a compiler."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP_LEVEL = {
    "setup.py", "pyproject.toml", "README.md", "LICENSE", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md",
    "pagedkv", "csrc", "tests", "bench", "docs",
}  # fmt: skip
BUILT = ("build", "dist", "*.egg-info", "__pycache__", "*.so", "*.o", ".*", "build.json")


def environment(**changes):
    """Without what would let the checkout or its tools be found by accident."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PAGEDKV_"))}
    return kept | changes


def run(*command, cwd, **changes):
    return subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=environment(**changes), timeout=900
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the checkout as it was before any build, in a path with spaces."""
    copy = tmp_path_factory.mktemp("a path") / "with spaces"
    generated = {path.with_suffix(".c").name for path in (ROOT / "pagedkv" / "core").glob("*.pyx")}
    shutil.copytree(
        ROOT,
        copy,
        ignore=lambda folder, names: {
            *shutil.ignore_patterns(*BUILT)(folder, names),
            *(generated & set(names) if folder.endswith("core") else ()),
        },
    )
    return copy


@pytest.fixture(scope="module")
def distribution(source, tmp_path_factory):
    """The source distribution, unpacked in another path with spaces."""
    folder = tmp_path_factory.mktemp("source distribution")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    result = run(sys.executable, "-c", code, cwd=source)
    assert result.returncode == 0, result.stdout + result.stderr
    with tarfile.open(folder / result.stdout.splitlines()[-1]) as archive:
        archive.extractall(folder / "un packed", filter="data")
    return next((folder / "un packed").iterdir())


@pytest.fixture(scope="module")
def installed(distribution, tmp_path_factory):
    """The directory into which pip installed the source distribution, with the build tools of this environment."""
    target = tmp_path_factory.mktemp("site packages")
    command = ["pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--target", target, distribution]
    result = run(sys.executable, "-m", *command, cwd=distribution.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def test_top_level():
    made = {"build", "dist", "pagedkv.egg-info"} | {path.parent.name for path in ROOT.glob("*/pyvenv.cfg")}
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - made == TOP_LEVEL


def test_source_distribution_is_whole(distribution):
    wanted = {path.relative_to(ROOT) for path in (ROOT / "csrc").iterdir()}
    for pattern in ("*.py", "*.pyx", "*.pxd", "*.pyi", "*.h", "py.typed"):
        wanted |= {path.relative_to(ROOT) for path in (ROOT / "pagedkv").rglob(pattern)}
    wanted |= {path.relative_to(ROOT) for path in (ROOT / "pagedkv" / "server" / "static").iterdir()}
    wanted |= {Path(name) for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE")}
    assert {Path("csrc/k_neon.c"), Path("csrc/k_avx2.c"), Path("pagedkv/include/pagedkv/pagedkv.h")} <= wanted
    missing = [path for path in wanted if not (distribution / path).exists()]
    assert missing == []


def test_installed_from_a_path_with_spaces_it_runs(installed, tmp_path):
    code = (
        "import pagedkv, pagedkv.core._kernels as k\n"
        "kv = pagedkv.PagedKVCache(2, 1, 32, n_pages=2); seq = kv.sequence(); seq.extend(5)\n"
        "print(pagedkv.__file__, k.isa(), kv.check())"
    )
    result = run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(installed)) and result.stdout.endswith("[]\n")


def test_what_is_installed(installed):
    names = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    for name in ("py.typed", "core/arena.pxd", "core/arena.pyi", "include/pagedkv/pagedkv.h", "build.json"):
        assert f"pagedkv/{name}" in names
    assert "pagedkv/server/static/index.html" in names
    assert not [name for name in names if name.endswith((".c", ".pyx", ".o"))]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"pagedkv", "bin"}
    assert any(re.fullmatch(r"pagedkv-[\d.]+\.dist-info/licenses/LICENSE", name) for name in names)


def test_the_build_records_what_made_it(installed):
    record = json.loads((installed / "pagedkv" / "build.json").read_text())
    assert record["commit"] is None  # a source distribution has none
    assert record["compiler"] and "-ffp-contract=off" in record["flags"]
    assert "-march" not in record["flags"]


@pytest.mark.parametrize("setting", ["CC", "PATH"])
def test_without_a_compiler_the_first_error_line_says_so(source, tmp_path, setting):
    changes = {"CC": "/absent/cc"} if setting == "CC" else {"PATH": str(tmp_path), "CC": ""}
    command = ["pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--target", tmp_path / "out"]
    result = run(sys.executable, "-m", *command, source, cwd=tmp_path, **changes)
    assert result.returncode != 0
    # pip frames what the build printed; its own lines before the frame say only that the build failed
    printed = re.search(r"lines? of output\]\n(.*?)\n", result.stderr + result.stdout)
    assert printed and "pagedkv: a C compiler is needed" in printed[1], result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
