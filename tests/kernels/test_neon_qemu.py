"""The NEON kernels, cross-compiled and run under qemu-user, give the same pinned bits as x86.

Needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
"""

import golden
import pytest
from native import build_hash_program, require, run_hash_program


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """A function that runs the program on a named CPU model."""
    compiler, qemu = require("aarch64-linux-gnu-gcc", "qemu-aarch64")
    program = tmp_path_factory.mktemp("neon") / "kernel_hashes"
    build_hash_program(compiler, "ARM_ISA_FLAGS", program, ["-static"])
    return lambda cpu: run_hash_program(qemu, "-cpu", cpu, program)


def test_neon_gives_the_pinned_bits(emulated):
    hashes = emulated("max")
    assert list(hashes) == ["neon", "scalar"]
    assert not golden.differences(hashes)


def test_a_processor_without_dot_product_runs_scalar(emulated):
    hashes = emulated("cortex-a53")
    assert list(hashes) == ["scalar"]
    assert not golden.differences(hashes)
