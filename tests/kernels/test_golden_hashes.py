"""Every kernel of every ISA this machine runs gives the pinned bits."""

import hashlib
import platform
import subprocess

import golden
import pytest
from native import HERE, build_hash_program, compile_csrc, require, run_hash_program

from pagedkv.core._kernels import isa_names

TABLE = "ARM_ISA_FLAGS" if platform.machine() in ("aarch64", "arm64") else "X86_ISA_FLAGS"


@pytest.fixture(scope="module")
def hashes(tmp_path_factory):
    program = tmp_path_factory.mktemp("golden") / "kernel_hashes"
    build_hash_program(*require("cc"), TABLE, program)
    return run_hash_program(program)


def test_every_isa_gives_the_pinned_bits(hashes):
    assert not golden.differences(hashes)


def test_every_isa_of_the_package_ran(hashes):
    assert set(hashes) == set(isa_names())


def test_sha256_agrees_with_hashlib(tmp_path):
    (compiler,) = require("cc")
    source = tmp_path / "digest.c"
    source.write_text("""
        #include "sha256.h"
        #include <stdio.h>
        int main(void)
        {
            for (int n = 0; n < 200; n++) {
                sha256 s;
                char hex[65];
                sha256_init(&s);
                for (int i = 0; i < n; i++)
                    sha256_update(&s, (uint8_t[]){(uint8_t)(7 * i)}, 1);
                sha256_finish(&s, hex);
                puts(hex);
            }
            return 0;
        }
    """)
    compile_csrc(compiler, {source: ["-I", str(HERE)]}, tmp_path / "digest")
    digests = subprocess.run([tmp_path / "digest"], check=True, capture_output=True, text=True).stdout.split()
    assert digests == [hashlib.sha256(bytes(7 * i % 256 for i in range(n))).hexdigest() for n in range(200)]
