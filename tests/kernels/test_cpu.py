"""Feature detection as a function of made-up registers: the processor has it and the system saves its state."""

import ctypes

import pytest
from native import ROOT, compile_csrc, require

AVX2, AVX512, VNNI, AMX, DOTPROD, I8MM = (1 << i for i in range(6))
YMM, ZMM, TILES = 0x6, 0xE0, 0x60000


class Registers(ctypes.Structure):
    _fields_ = [
        ("max_leaf", ctypes.c_uint32),
        ("leaf1_ecx", ctypes.c_uint32),
        ("leaf7_ebx", ctypes.c_uint32),
        ("leaf7_ecx", ctypes.c_uint32),
        ("leaf7_edx", ctypes.c_uint32),
        ("xcr0", ctypes.c_uint64),
    ]


def bits(*numbers):
    return sum(1 << n for n in numbers)


HASWELL = {
    "max_leaf": 13,
    "leaf1_ecx": bits(12, 27, 28, 29),
    "leaf7_ebx": bits(5),
    "leaf7_ecx": 0,
    "leaf7_edx": 0,
    "xcr0": YMM | 1,
}
SKYLAKE_X = HASWELL | {"leaf7_ebx": bits(5, 16, 17, 30, 31), "xcr0": YMM | ZMM | 1}
ICE_LAKE = SKYLAKE_X | {"leaf7_ecx": bits(11)}
SAPPHIRE_RAPIDS = ICE_LAKE | {"leaf7_edx": bits(24, 25), "xcr0": YMM | ZMM | TILES | 1}
EVERYTHING = AVX2 | AVX512 | VNNI | AMX


def without(registers, name, bit):
    return registers | {name: registers[name] & ~(1 << bit)}


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    (compiler,) = require("cc")
    library = tmp_path_factory.mktemp("cpu") / "libcpu.so"
    compile_csrc(compiler, {ROOT / "csrc" / "cpu.c": ["-fvisibility=default"]}, library, ["-shared", "-fPIC"])
    loaded = ctypes.CDLL(str(library))
    loaded.pkv_features_x86.restype = loaded.pkv_features_arm.restype = ctypes.c_uint64
    loaded.pkv_features_arm.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    return loaded


@pytest.mark.parametrize(
    ("registers", "expected"),
    [
        (dict.fromkeys(HASWELL, 0), 0),
        (HASWELL, AVX2),
        (SKYLAKE_X, AVX2 | AVX512),
        (ICE_LAKE, AVX2 | AVX512 | VNNI),
        (SAPPHIRE_RAPIDS, EVERYTHING),
        (HASWELL | {"max_leaf": 6}, 0),
        # the system saves less than the processor has
        (SAPPHIRE_RAPIDS | {"xcr0": 0}, 0),
        (SAPPHIRE_RAPIDS | {"xcr0": 0x3}, 0),
        (SAPPHIRE_RAPIDS | {"xcr0": YMM | 1}, AVX2),
        (SAPPHIRE_RAPIDS | {"xcr0": YMM | 0x60 | 1}, AVX2),
        (SAPPHIRE_RAPIDS | {"xcr0": ZMM | TILES | 1}, 0),
        (SAPPHIRE_RAPIDS | {"xcr0": YMM | ZMM | 1}, AVX2 | AVX512 | VNNI),
        (SAPPHIRE_RAPIDS | {"xcr0": YMM | ZMM | 0x20000 | 1}, AVX2 | AVX512 | VNNI),
        (SAPPHIRE_RAPIDS | {"xcr0": YMM | ZMM | 0x40000 | 1}, AVX2 | AVX512 | VNNI),
        # a virtual machine masks one feature
        (without(SAPPHIRE_RAPIDS, "leaf1_ecx", 27), 0),
        (without(SAPPHIRE_RAPIDS, "leaf1_ecx", 28), 0),
        (without(SAPPHIRE_RAPIDS, "leaf1_ecx", 12), 0),
        (without(SAPPHIRE_RAPIDS, "leaf1_ecx", 29), 0),
        (without(SAPPHIRE_RAPIDS, "leaf7_ebx", 5), 0),
        (without(SAPPHIRE_RAPIDS, "leaf7_ebx", 16), AVX2),
        (without(SAPPHIRE_RAPIDS, "leaf7_ebx", 17), AVX2),
        (without(SAPPHIRE_RAPIDS, "leaf7_ebx", 30), AVX2),
        (without(SAPPHIRE_RAPIDS, "leaf7_ebx", 31), AVX2),
        (without(SAPPHIRE_RAPIDS, "leaf7_ecx", 11), AVX2 | AVX512),
        (without(SAPPHIRE_RAPIDS, "leaf7_edx", 24), AVX2 | AVX512 | VNNI),
        (without(SAPPHIRE_RAPIDS, "leaf7_edx", 25), AVX2 | AVX512 | VNNI),
    ],
)
def test_x86_features(cpu, registers, expected):
    assert cpu.pkv_features_x86(ctypes.byref(Registers(**registers))) == expected


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "expected"),
    [
        (0, 0, 0),
        (bits(9, 10, 20), 0, DOTPROD),
        (bits(9, 10, 20), bits(13), DOTPROD | I8MM),
        (bits(9, 10), bits(13), 0),
        (bits(10, 20), bits(13), 0),
        (bits(9, 20), bits(13), 0),
        (2**64 - 1 & ~bits(20), 2**64 - 1, 0),
    ],
)
def test_arm_features(cpu, hwcap, hwcap2, expected):
    assert cpu.pkv_features_arm(hwcap, hwcap2) == expected
