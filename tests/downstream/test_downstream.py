"""Strangers' projects, one Cython and two plain C, built against the installed wheel; results compared with NumPy."""

import os
import subprocess
import sys
import sysconfig

import pytest

CYTHON_CHECK = """
import numpy as np, pagedkv, rows
rng = np.random.default_rng(0)
WIDTH, PAGE_ROWS = 12, 4
pool = rows.RowPool(24, WIDTH, PAGE_ROWS)

def sums(table):
    out = np.empty(WIDTH, np.float32)
    table.column_sums(out)
    return out

def same(table, data):
    expected = np.zeros(WIDTH, np.float32)
    for row in data:
        expected += row
    assert len(table) == len(data)
    np.testing.assert_array_equal(sums(table), expected)
    flat = b"".join(bytes(pool.page(i)) for i in table.page_table)
    got = np.frombuffer(flat, np.float32).reshape(-1, WIDTH)[: len(data)]
    np.testing.assert_array_equal(got, data)

a, data = pool.table(), rng.standard_normal((10, WIDTH), np.float32)
assert a.extend(data) == 0
same(a, data)

# a fork shares three pages; each side then writes its own third page
b = a.fork()
assert (pool.n_in_use, b.page_table) == (3, a.page_table)
more_a, more_b = rng.standard_normal((5, WIDTH), np.float32), rng.standard_normal((1, WIDTH), np.float32)
assert b.extend(more_b) == 0
assert a.extend(more_a) == 0
same(a, np.concatenate([data, more_a]))
same(b, np.concatenate([data, more_b]))
assert a.page_table[:2] == b.page_table[:2] and a.page_table[2] != b.page_table[2]
assert pool.stats()["num_copied"] == 1

# borrowed pages
c = pool.table()
assert c.borrow(a, 2) == 0
same(c, data[:8])
assert c.borrow(a, 99) == -pagedkv.Verdict.SEQ_FULL
assert c.cut(1) == 0
same(c, data[:4])

# found by key after everybody is gone
index = pagedkv.PrefixIndex(pool, PAGE_ROWS)
keys = np.arange(8, dtype=np.int32)
assert rows.publish(index, a, keys) == 2
for t in (a, b, c):
    t.free()
assert (pool.n_in_use, pool.n_cached) == (0, 2)
d = pool.table()
assert rows.find(index, d, np.append(keys, np.int32(77))) == 2
same(d, data[:8])
assert d.extend(rng.standard_normal((100, WIDTH), np.float32)) == -pagedkv.Verdict.POOL_EXHAUSTED
assert pool.violations() == 0
print("ok", pagedkv.__file__)
"""

C_CHECK = """
import numpy as np, pagedkv, blobs
rng = np.random.default_rng(1)
for page_bytes, n_text in ((64, 300), (100, 300), (7, 50), (4096, 4096)):
    text = rng.integers(0, 256, n_text, np.uint8)
    n = -(-n_text // page_bytes)
    for i in range(n):
        patch = rng.integers(0, 256, min(5, page_bytes), np.uint8)
        result = blobs.fork_and_patch(text.tobytes(), page_bytes, n + 1, i, patch.tobytes())
        status, original, copy, in_use, violations = result
        expected = np.frombuffer(original, np.uint8).copy()
        np.testing.assert_array_equal(expected[:n_text], text)
        expected[i * page_bytes : i * page_bytes + len(patch)] = patch
        np.testing.assert_array_equal(np.frombuffer(copy, np.uint8), expected)
        assert (status, in_use, violations) == (n, n + 1, 0)
assert blobs.fork_and_patch(b"x" * 128, 64, 2, 0, b"")[0] == -pagedkv.Verdict.POOL_EXHAUSTED
assert blobs.fork_and_patch(b"x" * 128, 64, 3, 2, b"")[0] == -pagedkv.Verdict.BAD_INPUT
assert blobs.fork_and_patch(b"x" * 128, 64, 1, 0, b"")[0] == -pagedkv.Verdict.POOL_EXHAUSTED
assert blobs.fork_and_patch(b"", 0, 1, 0, b"")[0] == -pagedkv.Verdict.BAD_INPUT

arena = pagedkv.Arena(4, 16)
seq = arena.sequence()
for i in seq.append_pages(3):
    arena.page(i)[:] = bytes([65 + i]) * 16
assert blobs.share(arena.address, seq.address) == b"A" * 16 + b"B" * 16 + b"C" * 16
assert [arena.refcount(i) for i in range(4)] == [1, 1, 1, 0]
arena.close()
assert blobs.share(arena.address, seq.address) == -pagedkv.Verdict.TAMPER
print("ok", pagedkv.__file__)
"""


ATTENTION_CHECK = """
import numpy as np, pagedkv, ownpages

def attend(q, k, v, window):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    n, t, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = np.einsum("nhd,thd->hnt", q, k) / np.sqrt(q.shape[2])
    position, token = np.arange(t - n, t)[:, None], np.arange(t)
    seen = (token <= position) & ((token > position - window) | (window == 0))
    weights = np.exp(np.where(seen, scores, -np.inf))
    return np.einsum("hnt,thd->nhd", weights / weights.sum(axis=2, keepdims=True), v)

rng = np.random.default_rng(2)
HEADS, KV_HEADS, DIM = 6, 2, 40
for form, tolerance in ((0, 1e-5), (1, 2e-3), (2, 0.05)):
    for page_tokens, window, prefix, own in ((16, 0, 37, 5), (32, 20, 300, 40), (256, 0, 600, 1), (16, 7, 32, 16)):
        k, v = (rng.standard_normal((prefix + 2 * own, KV_HEADS, DIM), np.float32) for _ in range(2))
        q = rng.standard_normal((own, HEADS, DIM), np.float32)
        sizes = form, page_tokens, HEADS, KV_HEADS, DIM, window, prefix, own
        status, *outputs, in_use = ownpages.fork_and_attend(*sizes, k, v, q)
        assert status == 0
        assert in_use == -(-(prefix + own) // page_tokens) * 2 - prefix // page_tokens
        for i, output in enumerate(outputs):
            tail = slice(prefix + i * own, prefix + (i + 1) * own)
            expected = attend(q, *(np.concatenate([x[:prefix], x[tail]]) for x in (k, v)), window)
            found = np.frombuffer(output, np.float32).reshape(q.shape)
            assert abs(found - expected).max() < tolerance
        # the same bits as PagedKVCache
        kv = pagedkv.PagedKVCache(1, KV_HEADS, DIM, n_pages=64, format=("f32", "f16", "int8")[form],
                                  page_tokens=page_tokens, threads=2)
        seq = kv.sequence()
        seq.extend(prefix + own)
        seq.write_kv(0, 0, k[: prefix + own], v[: prefix + own])
        assert kv.attend(0, q, [seq], [own], window=window or None).tobytes() == outputs[0]
k = rng.standard_normal((48, KV_HEADS, DIM), np.float32)
q = np.zeros((16, HEADS, DIM), np.float32)
assert ownpages.fork_and_attend(0, 24, HEADS, KV_HEADS, DIM, 0, 16, 16, k, k, q)[0] == -pagedkv.Verdict.BAD_INPUT
k[47, 1, 39] = np.nan
assert ownpages.fork_and_attend(2, 16, HEADS, KV_HEADS, DIM, 0, 16, 16, k, k, q)[0] == -pagedkv.Verdict.BAD_INPUT
print("ok", pagedkv.__file__)
"""

PROJECTS = [("cython_project", CYTHON_CHECK), ("c_project", C_CHECK), ("attention_project", ATTENTION_CHECK)]


@pytest.mark.parametrize(("project", "code"), PROJECTS)
def test_project(build, installed, project, code):
    output = build(project)(code).split()
    assert output[0] == "ok"
    assert output[1].startswith(str(installed)), "the project did not run against the installed package"


def test_another_abi_version_is_refused_at_import(build):
    python = build("c_project")
    code = """
import ctypes, pagedkv.core.capi as capi
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
version = ctypes.c_int64.from_address(pointer(capi._C_API, b"pagedkv.core.capi._C_API"))
version.value += 1
try:
    import blobs
except ImportError as error:
    print(error)
"""
    assert "needed: version" in python(code)


def test_wheel_carries_what_consumers_compile_against(installed):
    package = installed / "pagedkv"
    assert (package / "include" / "pagedkv" / "pagedkv.h").is_file()
    for name in ("structs", "internal", "arena", "sequence", "prefix", "check", "typed"):
        assert (package / "core" / f"{name}.pxd").is_file(), name
    assert "core/kvcache.pxd" not in {str(path.relative_to(package)) for path in package.rglob("*.pxd")}
    for name in ("arena", "sequence", "prefix", "check"):
        assert (package / "core" / f"{name}.pyi").is_file(), name
    assert not list(package.glob("core/*.c"))


def test_every_installed_pxd_can_be_cimported(installed, tmp_path):
    """Translated and compiled outside the checkout, with the one include directory that is documented."""
    names = [path.stem for path in sorted((installed / "pagedkv" / "core").glob("*.pxd")) if path.stem != "__init__"]
    assert {"arena", "sequence", "prefix", "check", "typed"} <= set(names)
    for name in names:
        (tmp_path / f"use_{name}.pyx").write_text(
            f"# cython: language_level=3\ncimport pagedkv.core.{name}\nfrom pagedkv.core.{name} cimport *\n"
        )
    env = {**os.environ, "PYTHONPATH": str(installed)}
    sources = [f"use_{name}.pyx" for name in names]
    subprocess.run([sys.executable, "-m", "cython", *sources], cwd=tmp_path, env=env, check=True)
    compiler = sysconfig.get_config_var("CC").split()
    include = installed / "pagedkv" / "include", sysconfig.get_path("include")
    for name in names:
        command = [*compiler, "-fsyntax-only", "-w", *[f"-I{path}" for path in include], f"use_{name}.c"]
        subprocess.run(command, cwd=tmp_path, check=True)
