"""What importing costs: no thread, no library that is not needed yet. Asked of fresh interpreters."""

import shutil
import subprocess
import sys

import command_line
import pytest

HEAVY = ("tokenizers", "jinja2", "click", "tqdm", "concurrent.futures", "multiprocessing", "llguidance")


def fresh(tmp_path, code):
    """What a new interpreter prints when it runs `code`, with names `threads` and `loaded` at hand."""
    helpers = (
        "import os, sys\n"
        "threads = lambda: len(os.listdir('/proc/self/task'))\n"
        "loaded = lambda names: [name for name in names if name in sys.modules]\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", helpers + code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=command_line.environment(),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_package_alone_imports_nothing_heavy(tmp_path):
    light = (*HEAVY, "numpy", "subprocess", "importlib.metadata", "typing", "pathlib", "re")
    code = f"before = loaded({light!r}); import pagedkv; print(threads(), loaded(set({light!r}) - {{*before}}))"
    assert fresh(tmp_path, code) == "1 []"


def test_every_public_name_loads_without_a_thread_or_a_heavy_library(tmp_path):
    code = (
        "import numpy; before = threads(); import pagedkv\n"
        "values = [getattr(pagedkv, name) for name in pagedkv.__all__]\n"
        f"print(len(values) > 10, threads() - before, loaded({HEAVY!r}))"
    )
    assert fresh(tmp_path, code) == "True 0 []"


def test_the_command_line_waits_with_what_only_some_commands_need(tmp_path):
    code = "import pagedkv.cli; print(threads(), loaded(('numpy', 'tokenizers', 'jinja2', 'tqdm')))"
    assert fresh(tmp_path, code) == "1 []"


def test_a_pool_starts_its_threads_at_the_first_job(tmp_path):
    code = (
        "from pagedkv.core._kernels import ThreadPool\n"
        "from pagedkv.core.probe import read_bandwidth\n"
        "before = threads(); pool = ThreadPool(3); made = threads()\n"
        "read_bandwidth(pool, 1 << 20, 1); print(made - before, threads() - before)"
    )
    assert fresh(tmp_path, code) == "0 2"


def test_dir_lists_the_public_names_once_and_nothing_else(tmp_path):
    code = (
        "import pagedkv; pagedkv.Arena, pagedkv.LLM; names = dir(pagedkv)\n"
        "modules = {name.split('.')[1] for name in sys.modules if name.startswith('pagedkv.')}\n"
        "print(sorted(names) == sorted(set(names)), set(pagedkv.__all__) - {*names},\n"
        "      {name for name in names if not name.startswith('__')} - {*pagedkv.__all__} - modules)"
    )
    assert fresh(tmp_path, code) == "True set() set()"


# A source tree that is not built hides an installed package


@pytest.fixture
def unbuilt(tmp_path):
    """A directory with the package as a fresh checkout has it: sources, nothing compiled."""
    tree = tmp_path / "a checkout"
    package = command_line.PACKAGES / "pagedkv"
    built = shutil.ignore_patterns("*.so", "*.c", "__pycache__", "build.json")
    shutil.copytree(package, tree / "pagedkv", ignore=built)
    (tree / "pagedkv" / "core" / "_kernels.pyx").touch()  # sources are not installed
    (tree / "pyproject.toml").write_text('[project]\nversion = "7.0"\n')
    return tree


@pytest.mark.parametrize(
    "code",
    [
        *(f"from pagedkv import {name}" for name in ("LLM", "Arena", "PagedKVError", "AsyncEngine")),
        *(f"import pagedkv.{name}" for name in ("llm", "core.arena", "core.errors", "engine.engine", "models.loader")),
    ],
)
def test_where_nothing_is_built_the_error_says_what_to_do(unbuilt, code):
    command = [sys.executable, "-c", code]
    environment = command_line.environment(PYTHONPATH=None, PYTHONSAFEPATH=None)
    result = subprocess.run(command, capture_output=True, text=True, cwd=unbuilt, env=environment)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and last.startswith(f"ImportError: {unbuilt} holds the source of pagedkv"), last
    assert "`python -P`" in last and "`python setup.py build_ext --inplace`" in last


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["chat"], ["bench"], ["info", "x"]])
def test_where_nothing_is_built_commands_fail_in_one_line(unbuilt, arguments):
    command = [sys.executable, "-m", "pagedkv", *arguments]
    environment = command_line.environment(PYTHONPATH=None, PYTHONSAFEPATH=None)
    result = subprocess.run(command, capture_output=True, text=True, cwd=unbuilt, env=environment)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.stderr
    assert "`python -P`" in result.stderr


def test_doctor_reports_to_the_end_where_nothing_is_built(unbuilt):
    command = [sys.executable, "-m", "pagedkv", "doctor"]
    environment = command_line.environment(PYTHONPATH=None, PYTHONSAFEPATH=None)
    result = subprocess.run(command, capture_output=True, text=True, cwd=unbuilt, env=environment)
    assert result.returncode == 0 and result.stderr == "" and "model cache:" in result.stdout
    assert "problem: " + str(unbuilt) in result.stdout and "install pagedkv again" not in result.stdout


def test_a_build_older_than_a_source_says_what_to_do(unbuilt):
    """As after pulling a change that adds a module."""
    core = unbuilt / "pagedkv" / "core"
    for path in (command_line.PACKAGES / "pagedkv" / "core").glob("*.so"):
        (core / path.name).symlink_to(path)
    command = [sys.executable, "-c", "import pagedkv.core.arena"]
    environment = command_line.environment(PYTHONPATH=None, PYTHONSAFEPATH=None)
    assert subprocess.run(command, cwd=unbuilt, env=environment).returncode == 0
    (core / "brand_new.pyx").touch()
    result = subprocess.run(command, capture_output=True, text=True, cwd=unbuilt, env=environment)
    assert "build_ext --inplace" in result.stderr.splitlines()[-1]


def test_an_installation_without_its_compiled_part_says_so(unbuilt):
    for path in (unbuilt / "pagedkv" / "core").glob("*.pyx"):
        path.unlink()
    command = [sys.executable, "-c", "import pagedkv.core"]
    environment = command_line.environment(PYTHONPATH=None, PYTHONSAFEPATH=None)
    result = subprocess.run(command, capture_output=True, text=True, cwd=unbuilt, env=environment)
    assert "has no modules built for this Python: install pagedkv again" in result.stderr.splitlines()[-1]
