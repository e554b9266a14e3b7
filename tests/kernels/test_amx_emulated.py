"""The AMX kernels: with tile operations in plain C on any AVX-512 VNNI machine, with real ones where there are some.

The plain C ends the process where a thread multiplies without tiles of its own or leaves them configured behind a call.
"""

import golden
import pytest
from native import build_hash_program, build_program, require, run_hash_program, run_program

from pagedkv.core._kernels import isa_names

EMULATE = ["-DPKV_AMX_EMULATE"]
TILES = {"emulated": EMULATE, **({"real": []} if "amx" in isa_names() else {})}
pytestmark = pytest.mark.skipif("vnni" not in isa_names(), reason="this processor has no AVX-512 VNNI")


def test_emulated_amx_gives_the_pinned_bits(tmp_path):
    program = tmp_path / "kernel_hashes"
    build_hash_program(*require("cc"), "X86_ISA_FLAGS", program, EMULATE)
    hashes = run_hash_program(program, "amx")
    assert list(hashes) == ["amx"]
    assert not golden.differences(hashes)


@pytest.mark.parametrize("tiles", TILES)
def test_threads_forks_and_signals_leave_tiles_alone(tmp_path, tiles):
    program = tmp_path / "amx_stress"
    flags = [*TILES[tiles], "-pthread", "-O1"]
    build_program(*require("cc"), "amx_stress.c", "X86_ISA_FLAGS", program, flags, ["threads.c"], ["k_avx2.c"])
    calls, n_calls, signals, n_signals = run_program(program).split()
    # 40 rounds of 3 threads, in the parent alone and beside 4 children
    assert (calls, signals) == ("calls", "signals")
    assert int(n_calls) >= 40 * 3 * 5
    assert int(n_signals) > 0
