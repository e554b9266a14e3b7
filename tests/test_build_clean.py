"""The build says nothing: no C warning for any instruction set, no warning or performance hint of Cython in core."""

import ast
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUP = ast.parse((ROOT / "setup.py").read_text())
CROSS = "aarch64-linux-gnu-gcc"


def constant(name):
    """The value that setup.py assigns to `name`, a literal."""
    assigned = [n.value for n in SETUP.body if isinstance(n, ast.Assign) and n.targets[0].id == name]
    return ast.literal_eval(assigned[0])


def directives():
    """The compiler directives setup.py passes to cythonize."""
    calls = [n for n in ast.walk(SETUP) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "cythonize"]
    return ast.literal_eval(next(k.value for k in calls[0].keywords if k.arg == "compiler_directives"))


def sources(machine):
    """(file, its flags) of everything setup.py compiles on that machine."""
    isa = constant("X86_ISA_FLAGS" if machine == "x86_64" else "ARM_ISA_FLAGS")
    every = {name: [] for name in constant("COMMON_SOURCES")} | isa
    return {name: flags for name, flags in every.items() if (ROOT / "csrc" / name).exists()}


def complaints(compiler, name, flags, out):
    command = [compiler, "-c", f"csrc/{name}", "-o", out, "-O3", "-Wall", "-Wextra", "-Werror"]
    every_isa = [f"-DPKV_HAVE_{Path(n).stem[2:].upper()}=1" for n in flags if n.startswith("k_") and n != "k_scalar.c"]
    result = subprocess.run(
        [*command, *constant("STRICT_FLAGS"), *flags[name], *every_isa], cwd=ROOT, capture_output=True, text=True
    )
    return result.stderr + result.stdout if result.returncode or result.stderr else ""


@pytest.mark.parametrize("name", sorted(sources(platform.machine())))
def test_no_c_warnings(name, tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    assert compiler, "a C compiler is needed"
    assert complaints(compiler, name, sources(platform.machine()), tmp_path / "out.o") == ""


@pytest.mark.skipif(not shutil.which(CROSS), reason=f"{CROSS} is not installed")
@pytest.mark.parametrize("name", sorted(sources("aarch64")))
def test_no_c_warnings_on_arm(name, tmp_path):
    assert complaints(CROSS, name, sources("aarch64"), tmp_path / "out.o") == ""


def test_every_source_is_compiled_somewhere():
    compiled = {*sources("x86_64"), *sources("aarch64")}
    assert {path.name for path in (ROOT / "csrc").glob("*.c")} == compiled


def cythonize(modules, root, build):
    """What Cython prints for some modules of a tree, compiled as setup.py does."""
    code = (
        "import sys\n"
        "from Cython.Build import cythonize\n"
        f"cythonize({modules!r}, include_path=['.'], compiler_directives={directives()!r},\n"
        f"          show_all_warnings=False, force=True, build_dir={str(build)!r})\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def remarks(text):
    return [line for line in text.splitlines() if "performance hint" in line or "warning" in line.lower()]


def test_no_cython_remarks(tmp_path):
    modules = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pagedkv" / "core").glob("*.pyx"))
    assert modules and remarks(cythonize(modules, ROOT, tmp_path)) == []


def test_a_performance_hint_would_be_seen(tmp_path):
    (tmp_path / "slow.pyx").write_text(
        "cdef int careless(int x) except? -1 nogil:\n    return x\n\n"
        "cdef void f(int *x) nogil:\n    x[0] = careless(x[0])\n\n"
        "def call():\n    cdef int x = 1\n    with nogil:\n        f(&x)\n"
    )
    assert remarks(cythonize(["slow.pyx"], tmp_path, tmp_path / "build"))
