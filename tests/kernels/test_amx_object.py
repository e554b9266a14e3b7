"""What the compiler makes of k_amx.c, and the question for tiles, on any x86-64 machine: nothing here uses tiles.

gcc 12's own tile intrinsics tell it too little of the memory they read and write, so that it drops stores to the tile
configuration; these tests look for that in the object file.
"""

import platform
import re
import struct

import pytest
from native import HERE, ROOT, compile_source, require, run_program, setup_table

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")
AVX2, AVX512, VNNI, AMX = 1, 2, 4, 8

# Palette 1, start row 0; bytes of a row and rows of eight tiles: two of C, two of A [16][32], two of B [8][64].
# Layout of the 64 bytes by Intel's manual, volume 1, section 18.2.
CONFIGURATION = (
    struct.pack("<BB14x", 1, 0)
    + struct.pack("<16H", 64, 64, 32, 32, 64, 64, *[0] * 10)
    + struct.pack("<16B", 16, 16, 16, 16, 8, 8, *[0] * 10)
)


@pytest.fixture(scope="module", params=[["-O3"], ["-O1", "-fno-omit-frame-pointer"], ["-O0"]], ids=" ".join)
def compiled(request, tmp_path_factory):
    """(bytes of the object file, {function: [(mnemonic, operands)]})"""
    compiler, objdump = require("cc", "objdump")
    path = tmp_path_factory.mktemp("amx") / "k_amx.o"
    flags = [*setup_table("X86_ISA_FLAGS")["k_amx.c"], *setup_table("STRICT_FLAGS"), *request.param]
    compile_source(compiler, ROOT / "csrc" / "k_amx.c", path, ["-c", *flags])
    functions = {}
    for line in run_program(objdump, "-d", "--no-show-raw-insn", path).splitlines():
        if found := re.fullmatch(r"[0-9a-f]+ <(\w+)(?:\.\w+)*>:", line):
            body = functions.setdefault(found[1], [])
        elif found := re.match(r"\s+[0-9a-f]+:\s+(\S+)\s*(.*)", line):
            body.append((found[1], found[2]))
    return path.read_bytes(), functions


def test_the_whole_configuration_is_in_the_object(compiled):
    assert len(CONFIGURATION) == 64
    assert CONFIGURATION in compiled[0]


def tiles_of(operands):
    return re.findall(r"%tmm(\d)", operands)


def test_a_product_is_five_instructions_on_one_set_of_tiles(compiled):
    _, functions = compiled
    products = 0
    for body in functions.values():
        for i, (mnemonic, operands) in enumerate(body):
            if not mnemonic.startswith("tdp"):
                continue
            products += 1
            b, a, c = tiles_of(operands)  # AT&T order: the destination is last
            assert mnemonic == "tdpbssd"
            assert (a, b, c) in {("2", "4", "0"), ("3", "5", "1")}
            assert [(name, tiles_of(ops)) for name, ops in body[i - 3 : i + 2]] == [
                ("tileloadd", [a]), ("tileloadd", [b]), ("tilezero", [c]), ("tdpbssd", [b, a, c]), ("tilestored", [c])
            ]  # fmt: skip
    assert products >= 2


def reached(functions, name):
    """Mnemonics of a function and of those it calls in this file."""
    found, waiting, seen = set(), [name], set()
    while waiting:
        current = waiting.pop()
        if current in functions and current not in seen:
            seen.add(current)
            found |= {mnemonic for mnemonic, _ in functions[current]}
            waiting += re.findall(r"<(\w+)", " ".join(operands for _, operands in functions[current]))
    return found


def test_what_multiplies_also_configures_and_releases(compiled):
    _, functions = compiled
    for name in ("gemm_q4_0", "gemm_q4_1", "gemm_q8_0"):
        assert {"ldtilecfg", "tdpbssd", "tilerelease"} <= reached(functions, name)
    for name in ("gemm_vnni", "gemm_wide_vnni"):
        assert not {"ldtilecfg", "tdpbssd", "tilerelease"} & reached(functions, name)


@pytest.fixture(scope="module")
def permission(tmp_path_factory):
    """ask(*answer) -> [(features left, calls made)] of a processor with tiles and of one without"""
    (compiler,) = require("cc")
    program = tmp_path_factory.mktemp("amx") / "amx_permission"
    compile_source(compiler, HERE / "amx_permission.c", program, [*setup_table("STRICT_FLAGS"), f"-I{ROOT / 'csrc'}"])

    def ask(*answer):
        lines = run_program(program, *answer).splitlines()
        return [(int(left, 16), int(calls)) for left, calls in map(str.split, lines)]

    return ask


def test_tiles_are_asked_for_once_and_only_where_the_processor_has_them(permission):
    assert permission("0") == [(AVX2 | AVX512 | VNNI | AMX, 1), (AVX2 | AVX512 | VNNI, 0)]


@pytest.mark.parametrize("answer", ["-1", "-28", "1"])
def test_a_refusal_leaves_vnni(permission, answer):
    assert permission(answer) == [(AVX2 | AVX512 | VNNI, 1), (AVX2 | AVX512 | VNNI, 0)]
