"""What importing costs: no thread, no library that is not needed yet. Asked of fresh interpreters."""

import subprocess
import sys

import command_line

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
    code = f"import pagedkv; print(threads(), loaded({(*HEAVY, 'numpy', 'subprocess', 'importlib.metadata')!r}))"
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
