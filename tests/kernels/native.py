"""Compiles csrc without Python, for this machine or for another, by the tables of setup.py."""

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def setup_table(name):
    """The literal that setup.py assigns to `name`; importing it would start a build."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"setup.py assigns no {name}")


def require(*tools):
    """Paths of programs; where one is missing the test is skipped, or fails where CI says that all must be there."""
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        reason = f"needs {', '.join(missing)}"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, which a CI machine must have")
        pytest.skip(reason)
    return [shutil.which(tool) for tool in tools]


def compile_source(compiler, source, output, flags):
    """Compile one file with these flags only."""
    subprocess.run([compiler, *flags, str(source), "-o", str(output)], check=True)


def compile_csrc(compiler, sources, output, flags=()):
    """Compile sources (name -> extra flags) with the build's strict flags and -Werror into `output`."""
    strict = [*setup_table("STRICT_FLAGS"), "-O3", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "csrc"), *flags]
    objects = []
    for source, extra in sources.items():
        objects.append(str(output.parent / f"{output.name}-{Path(source).stem}.o"))
        subprocess.run([compiler, *strict, *extra, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run([compiler, *flags, *objects, "-o", str(output), "-lm"], check=True)


def build_program(compiler, main, isa_table, output, flags=(), more=(), left_out=()):
    """Build `main` of this directory with the ISA files of a setup.py table but those left out, and `more` of csrc."""
    isas = {name: extra for name, extra in setup_table(isa_table).items() if (ROOT / "csrc" / name).exists()}
    isas = {name: extra for name, extra in isas.items() if name not in left_out}
    have = [f"-DPKV_HAVE_{Path(name).stem[2:].upper()}=1" for name in isas]
    sources = {ROOT / "csrc" / name: extra for name, extra in isas.items()}
    sources |= {ROOT / "csrc" / name: [] for name in ("cpu.c", "dispatch.c", "k_scalar.c", *more)}
    compile_csrc(compiler, sources | {HERE / main: []}, output, [*have, *flags])


def build_hash_program(compiler, isa_table, output, flags=()):
    """Build kernel_hashes.c with every ISA file of a setup.py table."""
    build_program(compiler, "kernel_hashes.c", isa_table, output, flags)


def run_program(*command):
    """What a program that succeeds prints."""
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def run_hash_program(*command):
    """{isa: {kernel: sha256}} of one run."""
    hashes = {}
    for line in run_program(*command).splitlines():
        isa, kernel, digest = line.split()
        hashes.setdefault(isa, {})[kernel] = digest
    return hashes
