"""The prefix index with its hash patched down to 4 bits: everything collides, and outputs stay right."""

import shutil
import subprocess
import sys
from pathlib import Path

import command_line

ROOT = Path(__file__).parents[2]
SETUP = """
from setuptools import Extension, setup
setup(name="weak", packages=[], ext_modules=[
    Extension(f"pagedkv.core.{name}", [f"pagedkv/core/{name}.pyx"], include_dirs=["pagedkv/include", "csrc"])
    for name in ("prefix", "check")
])
"""
RUNS = """
import sys
import pagedkv.core
pagedkv.core.__path__.insert(0, sys.argv[1])
import pagedkv.core.check, pagedkv.core.prefix
for module in (pagedkv.core.check, pagedkv.core.prefix):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
sys.path.insert(0, sys.argv[2])
import test_parity
group, n_pages, n_hits, n_done = test_parity.Group(0), 0, 0, 0
for seed in range(0, 160, 8):
    run = test_parity.Run(seed, group)
    n_done += run.finish()
    if run.engine.scheduler.prefix is not None:
        n_pages = max(n_pages, run.engine.scheduler.prefix._index.n_pages)
        n_hits += run.engine.stats()["prefix_hit_tokens"]
print(n_done, n_pages, n_hits)
"""


def test_outputs_are_right_when_sixteen_hashes_are_all_there_are(tmp_path):
    shutil.copytree(
        ROOT / "pagedkv/core", tmp_path / "pagedkv/core", ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__")
    )
    shutil.copytree(ROOT / "pagedkv/include", tmp_path / "pagedkv/include")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "pagedkv/__init__.py").touch()
    header = tmp_path / "pagedkv/core/internal.pxd"
    text = header.read_text()
    start = text.index("uint64_t chain_hash(")
    assert "    return h\n" in text[start:]
    header.write_text(text[:start] + text[start:].replace("    return h\n", "    return h & 15\n", 1))
    (tmp_path / "setup.py").write_text(SETUP)
    for command, directory in (
        ([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], tmp_path),
        ([sys.executable, "-P", "-c", RUNS, str(tmp_path / "pagedkv/core"), str(Path(__file__).parent)], ROOT.parent),
    ):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env=command_line.environment())
        assert done.returncode == 0, done.stdout + done.stderr
    n_done, n_pages, n_hits = map(int, done.stdout.split())
    assert n_done > 400 and n_pages > 16 and n_hits > 1000
