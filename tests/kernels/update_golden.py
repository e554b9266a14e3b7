"""Pin the kernels' hashes anew: python tests/kernels/update_golden.py

For a deliberate change of the specification only; it needs a "Numerics" line in CHANGELOG.md.
Refuses to write when the ISAs of this machine disagree.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path

import golden
from native import build_hash_program, require, run_hash_program


def main():
    table = "ARM_ISA_FLAGS" if platform.machine() in ("aarch64", "arm64") else "X86_ISA_FLAGS"
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "kernel_hashes"
        build_hash_program(*require("cc"), table, program)
        hashes = run_hash_program(program)
    scalar = hashes["scalar"]
    wrong = [f"{isa} {k}" for isa, found in hashes.items() for k in scalar if found.get(k) != scalar[k]]
    if wrong:
        sys.exit(f"nothing written, these differ from scalar: {', '.join(wrong)}")
    golden.PATH.write_text(json.dumps(scalar, indent=2, sort_keys=True) + "\n")
    print(f"{golden.PATH}: {len(scalar)} kernels, equal on {', '.join(hashes)}")


if __name__ == "__main__":
    main()
