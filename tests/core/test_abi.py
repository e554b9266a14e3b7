"""The C ABI moves only with its version. abi.json records, for each version, the struct layout and the function list.

After a change that is meant: raise PKV_ABI_VERSION in pagedkv.h and run `python tests/core/test_abi.py`, which adds the
new version and never rewrites an old one. Functions appended to the end of pkv_api and new structs need no new version,
only the same command.
"""

import hashlib
import json
from pathlib import Path

from raw_api import HEADER, RawApi, functions

from pagedkv.core._testing import abi_version, layout

RECORD = Path(__file__).with_name("abi.json")


def current():
    fields = {}
    for row in layout():
        fields.setdefault(row[0].partition(".")[0], []).append([*row])
    del fields["pkv_api"]
    return {
        "structs": {name: hashlib.sha256(json.dumps(rows).encode()).hexdigest() for name, rows in fields.items()},
        "functions": [f"{result} {name}({', '.join(args)})" for name, result, args in functions()],
    }


def test_layout_and_functions_are_those_of_the_version():
    recorded = json.loads(RECORD.read_text()).get(str(abi_version))
    assert recorded is not None, f"ABI version {abi_version} is not recorded"
    found = current()
    for name, digest in recorded["structs"].items():
        assert found["structs"].get(name) == digest, f"{name} moved: raise PKV_ABI_VERSION"
    assert found["structs"].keys() == recorded["structs"].keys(), "structs were added: record them"
    n = len(recorded["functions"])
    assert found["functions"][:n] == recorded["functions"], "pkv_api may only grow at its end: raise PKV_ABI_VERSION"
    assert found["functions"][n:] == [], "functions were appended: record them"


def test_every_field_is_part_of_the_record():
    """A field missing from layout() would show as a hole where there is no padding."""
    rows = layout()
    for k, (name, size, _) in enumerate(rows):
        if "." in name or name == "pkv_api":
            continue
        end, holes = 0, []
        for member, offset, width in rows[k + 1 :]:
            if not member.startswith(name + "."):
                break
            if offset != end:
                holes.append((member, offset - end))
            end = offset + width
        holes.append(("end", size - end))
        assert [h for h in holes if h[1]] == {"pkv_page": [("end", 2)], "pkv_prefix_entry": [("end", 4)]}.get(
            name, []
        ), name


def test_capsule_carries_version_size_and_all_functions():
    api = RawApi()
    assert api.abi_version == abi_version
    assert api.n_functions == len(functions()) > 30
    assert api.struct_size == next(size for name, size, _ in layout() if name == "pkv_api")
    assert f"#define PKV_ABI_VERSION {abi_version}" in HEADER


def record():
    versions = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    old, new = versions.get(str(abi_version)), current()
    if old is not None and (
        any(new["structs"].get(name) != digest for name, digest in old["structs"].items())
        or new["functions"][: len(old["functions"])] != old["functions"]
    ):
        raise SystemExit(f"ABI version {abi_version} is recorded with another layout: raise PKV_ABI_VERSION")
    versions[str(abi_version)] = new
    RECORD.write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    record()
