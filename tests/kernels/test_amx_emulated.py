"""The AMX kernels with their tile operations replaced by plain C give the pinned bits; with AMX the real ones run too.

Needs AVX-512 VNNI, which the rest of those kernels is written in.
"""

import golden
import pytest
from native import build_hash_program, require, run_hash_program

from pagedkv.core._kernels import isa_names

pytestmark = pytest.mark.skipif("vnni" not in isa_names(), reason="this processor has no AVX-512 VNNI")


def test_emulated_amx_gives_the_pinned_bits(tmp_path):
    program = tmp_path / "kernel_hashes"
    build_hash_program(*require("cc"), "X86_ISA_FLAGS", program, ["-DPKV_AMX_EMULATE"])
    hashes = run_hash_program(program, "amx")
    assert list(hashes) == ["amx"]
    assert not golden.differences(hashes)
