"""Speed of single kernels on one thread: multiply-accumulates and bytes per second, per ISA, as JSON lines.

Every figure is the median of samples of a few milliseconds, taken in turns over the ISAs (A B A B ...) so that drift
hits all alike. Weights of "stream" shapes exceed the caches, the others stay in them.

    python bench/micro_kernels.py --isa vnni,avx2 --only gemm --write

`--clock cpu` counts the thread's processor time instead of the time on the wall, for a machine that has other work too.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import results

from pagedkv.core import _testing_kernels as kernels
from pagedkv.core._kernels import isa_names
from pagedkv.core.matmul import PANEL_LAYOUT, WEIGHT_TYPES

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
TOKENS = (1, 2, 4, 8, 32, 128)
SHAPES = {"576x576": (576, 576), "1536x576": (1536, 576), "576x1536": (576, 1536)}
SUPER_SHAPES = {"640x512": (640, 512), "640x2048": (640, 2048)}
STREAM = (65536, 1536)


@dataclass
class Work:
    """One kernel on one shape: `run(isa, n_calls)`, and what one call does."""

    kernel: str
    shape: str
    run: Callable[[str, int], object]
    macs: int
    n_bytes: int

    def sample(self, isa: str, seconds: float, clock: Callable[[], float]) -> float:
        """Seconds per call by `clock`, over about `seconds`."""
        n_calls = 1
        while True:
            start = clock()
            self.run(isa, n_calls)
            elapsed = clock() - start
            if elapsed >= seconds / 2:
                return elapsed / n_calls
            n_calls = max(2 * n_calls, int(n_calls * seconds / max(elapsed, 1e-7)))


def aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros on a 64-byte boundary."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(n_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + n_bytes].view(dtype).reshape(shape)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def gemm(type_name: str, activations: str, label: str, rows: int, cols: int, n_tokens: int) -> Work:
    """`activations`: int8 or int12 for block types, float otherwise."""
    block, data_bytes, scale_bytes = PANEL_LAYOUT[type_name]
    n_panels, n_blocks = rows // 16, cols // block
    data, scales = (aligned((n_panels, n_blocks * size), "u1") for size in (data_bytes, scale_bytes))
    data[...], scales[...] = 0x11, 0x11
    x, out = aligned((n_tokens, cols), "f4"), aligned((n_tokens, rows), "f4")
    q, low = (aligned((n_tokens, -(-cols // 64) * 64), "i1") for _ in range(2))
    scale, total = (aligned((n_tokens, cols // 32), "f4") for _ in range(2))
    isum, half = (aligned((n_tokens, cols // 32), "i4") for _ in range(2))
    q[...], scale[...] = 3, 0.5

    def run(isa: str, n_calls: int) -> None:
        kernels.gemm(isa, type_name, address(out), address(data), address(scales), cols, n_panels, address(x), cols,
                     address(q), q.shape[1], address(scale), address(total), address(isum), address(half), cols // 32,
                     0, n_panels, 0, n_tokens, rows, False, n_calls, address(low) if activations == "int12" else 0)

    name = f"gemm {type_name} {activations}"
    return Work(name, f"{label} x {n_tokens}", run, rows * cols * n_tokens, data.nbytes + scales.nbytes)


def attention(format_name: str, head_dim: int, n_q: int, n_tiles: int = 16, page_tokens: int = 16) -> Iterator[Work]:
    n, size = n_tiles * page_tokens, kernels.tile_layout(format_name, head_dim, page_tokens)[2]
    tiles = [aligned((size,), "u1") for _ in range(n_tiles)]
    pointers = np.array([address(tile) for tile in tiles], np.uintp)
    q, s, o = aligned((n_q, head_dim), "f4"), aligned((n_q, n), "f4"), aligned((n_q, head_dim), "f4")

    def qk(isa: str, n_calls: int) -> None:
        kernels.qk(isa, format_name, address(s), address(q), address(pointers), n_q, n_tiles, head_dim, page_tokens, n,
                   head_dim, 0.125, n_calls)

    def pv(isa: str, n_calls: int) -> None:
        kernels.pv(isa, format_name, address(o), address(s), address(pointers), n_q, 0, n, head_dim, page_tokens,
                   head_dim, n, n_calls)

    shape, macs, n_bytes = f"head {head_dim}, {n} tokens x {n_q} q", n_q * n * head_dim, n_tiles * size // 2
    yield Work(f"qk {format_name}", shape, qk, macs, n_bytes)
    yield Work(f"pv {format_name}", shape, pv, macs, n_bytes)


def rows(n: int) -> Iterator[Work]:
    """Kernels over one row of n values; bytes are what they must read and write."""
    rng = np.random.default_rng(n)
    x, w, y = aligned((n,), "f4"), aligned((n,), "f4"), aligned((n,), "f4")
    q, low = aligned((n,), "i1"), aligned((n,), "i1")
    blocks = [aligned((n // 32,), kind) for kind in ("f4", "f4", "i4", "i4")]
    x[...], w[...] = rng.standard_normal(n), rng.random(n)
    px, pw, py, pq = address(x), address(w), address(y), address(q)
    calls: dict[str, tuple[int, Callable[[str, int], object]]] = {
        "quant_i8": (5, lambda isa, c: kernels.quant_i8(isa, pq, *map(address, blocks), px, n, c)),
        "quant_i12": (6, lambda isa, c: kernels.quant_i12(isa, pq, address(low), *map(address, blocks[1:]), px, n, c)),
        "softmax": (8, lambda isa, c: kernels.softmax(isa, py, px, n, 4.0, 1.0, c)),
        "softcap": (8, lambda isa, c: kernels.softcap(isa, py, n, 30.0, c)),
        "rmsnorm": (12, lambda isa, c: kernels.rmsnorm(isa, py, px, pw, n, 1e-5, c)),
        "silu_mul": (12, lambda isa, c: kernels.silu_mul(isa, py, px, pw, n, c)),
        "rope": (12, lambda isa, c: kernels.rope(isa, py, pw, n // 2, c)),
        "add": (12, lambda isa, c: kernels.add(isa, py, pw, n, c)),
        "scale": (8, lambda isa, c: kernels.scale(isa, py, n, 1.0, c)),
        "vmax": (4, lambda isa, c: kernels.vmax(isa, px, n, c)),
        "argmax": (4, lambda isa, c: kernels.argmax(isa, px, n, c)),
    }
    for name, (bytes_per_value, run) in calls.items():
        yield Work(name, str(n), run, 0, bytes_per_value * n)


def everything() -> Iterator[Work]:
    for type_name in WEIGHT_TYPES:
        super_block = PANEL_LAYOUT[type_name][0] == 256
        for activations in ("int8", "int12") if type_name.startswith("Q") else ("float",):
            for label, (n_rows, n_cols) in (SUPER_SHAPES if super_block else SHAPES).items():
                for n_tokens in TOKENS:
                    yield gemm(type_name, activations, label, n_rows, n_cols, n_tokens)
            yield gemm(type_name, activations, "stream", *STREAM, 1)
    for format_name in kernels.KV_FORMATS:
        for head_dim, n_q in ((64, 1), (64, 3), (64, 8), (64, 24), (128, 4)):
            yield from attention(format_name, head_dim, n_q)
    for n in (64, 576, 1536, 49152):
        yield from rows(n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="comma separated; default: all this machine runs but scalar")
    parser.add_argument("--only", default="", help="kernels whose name and shape contain this text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.003, help="length of a sample")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--write", action="store_true", help="append to bench/results/micro_kernels.jsonl")
    options = parser.parse_args()
    isas = options.isa.split(",") if options.isa else [isa for isa in isa_names() if isa != "scalar"]
    found = []
    for work in everything():
        if options.only not in f"{work.kernel} {work.shape}":
            continue
        samples: dict[str, list[float]] = {isa: [] for isa in isas}
        for _ in range(options.repeats):
            for isa in isas:
                samples[isa].append(work.sample(isa, options.seconds, CLOCKS[options.clock]))
        for isa, seconds in samples.items():
            row = {"kernel": work.kernel, "shape": work.shape, "isa": isa, "clock": options.clock,
                   "us": results.summary([s * 1e6 for s in seconds]),
                   "gbytes_per_s": round(work.n_bytes / float(np.median(seconds)) / 1e9, 2)}
            if work.macs:
                row["gmacs_per_s"] = round(work.macs / float(np.median(seconds)) / 1e9, 2)
            print(json.dumps(row), flush=True)
            found.append(row)
    if options.write:
        print(results.write("micro_kernels", found, threads=1).name)


if __name__ == "__main__":
    main()
