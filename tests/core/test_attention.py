"""PagedKVCache.attend against float64, and the same bits whatever computes it, however pages and batches are cut."""

import itertools

import numpy as np
import pytest
from attention_reference import attend
from isas import assert_one_result, on_every_isa
from kv import poison, stored

from pagedkv import BadInput, PagedKVCache
from pagedkv.core.kvcache import FORMATS, PAGE_TOKENS

BORDERS = [1, 2, 15, 16, 17, 33, 255, 256, 257, 300, 511, 512, 513, 700]


class Case:
    """Sequences of given lengths with random K and V of one layer, and queries for each of their tokens."""

    def __init__(self, lengths, *, n_heads=4, n_kv_heads=2, dim=32, seed=0):
        rng = np.random.default_rng(seed)
        self.lengths, self.dim, self.n_kv_heads = lengths, dim, n_kv_heads
        self.k, self.v = (
            [rng.standard_normal((n, n_kv_heads, dim), dtype=np.float32) for n in lengths] for _ in range(2)
        )
        self.q = [rng.standard_normal((n, n_heads, dim), dtype=np.float32) for n in lengths]

    def cache(self, kv_format="f32", page_tokens=16, threads=1, dirty=True):
        """A cache that holds the sequences, their pages interleaved, on memory full of NaN."""
        n_pages = sum(-(-n // page_tokens) for n in self.lengths) + 3
        kv = PagedKVCache(
            2, self.n_kv_heads, self.dim, n_pages=n_pages, format=kv_format, page_tokens=page_tokens, threads=threads
        )
        if dirty:
            poison(kv)
        seqs = [kv.sequence(i) for i in range(len(self.lengths))]
        for start in range(0, max(self.lengths), page_tokens):
            for i in reversed(range(len(seqs))):
                n = min(page_tokens, self.lengths[i] - start)
                if n > 0:
                    seqs[i].extend(n)
                    seqs[i].write_kv(1, start, self.k[i][start : start + n], self.v[i][start : start + n])
        return kv, seqs

    def queries(self, q_lens):
        return np.concatenate([q[len(q) - n :] for q, n in zip(self.q, q_lens, strict=True)])

    def run(self, q_lens, kv_format="f32", page_tokens=16, threads=1, dirty=True, **options):
        kv, seqs = self.cache(kv_format, page_tokens, threads, dirty)
        return kv.attend(1, self.queries(q_lens), seqs, q_lens, **options)

    def check(self, found, q_lens, kv_format="f32", **options):
        row = 0
        for k, v, q, n in zip(self.k, self.v, self.q, q_lens, strict=True):
            kept = stored(k, kv_format), stored(v, kv_format)
            expected, bound = attend(q[len(q) - n :], *kept, **options)
            worst = abs(found[row : row + n] - expected).max(initial=0)
            assert worst <= bound, (len(k), n, worst, bound)
            row += n
        assert row == len(found)


# --- against float64 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("length", BORDERS)
def test_whole_prompts_and_single_tokens(kv_format, length):
    case = Case([length], seed=length)
    for n in {1, min(length, 2), length // 2 or 1, length}:
        case.check(case.run([n], kv_format), [n], kv_format)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 15, 16, 17, 31, 48, 64, 80, 100, 128, 200, 256])
def test_head_sizes(kv_format, dim):
    case = Case([270], dim=dim, seed=dim)
    for n in (1, 20):
        case.check(case.run([n], kv_format), [n], kv_format)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (40, 1), (25, 1), (48, 2)])
def test_grouped_heads(n_heads, n_kv_heads):
    """Groups of more heads than one pass takes rows are cut by token."""
    case = Case([290], n_heads=n_heads, n_kv_heads=n_kv_heads, dim=16)
    for n in (1, 7, 30):
        case.check(case.run([n]), [n])


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100, 255, 256, 257, 300, 512, 600, 10_000])
def test_windows(kv_format, window):
    case = Case([650, 300], seed=window)
    for q_lens in ([1, 1], [650, 300], [40, 299]):
        case.check(case.run(q_lens, kv_format, window=window), q_lens, kv_format, window=window)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("scale", [None, 0.02, 1.0, -0.3, 0.0])
def test_scale_and_softcap(scale, softcap):
    case = Case([300])
    for n in (1, 50):
        case.check(case.run([n], scale=scale, softcap=softcap), [n], scale=scale, softcap=softcap)
        case.check(case.run([n], scale=scale), [n], scale=scale)


def test_everything_together():
    case = Case([520, 17, 260, 1, 300], n_heads=6, n_kv_heads=2, dim=24)
    options = {"scale": 0.3, "softcap": 8.0, "window": 200}
    for q_lens in ([1] * 5, [100, 17, 1, 1, 260], [0, 3, 0, 1, 0]):
        case.check(case.run(q_lens, "f16", page_tokens=32, threads=2, **options), q_lens, "f16", **options)


def test_large_scores_do_not_overflow():
    case = Case([300])
    case.q[0] *= np.float32(1000)
    found = case.run([40], scale=10.0)
    case.check(found, [40], scale=10.0)


def test_int8_is_within_one_percent_of_f32():
    for seed in range(5):
        case = Case([400], n_heads=8, n_kv_heads=2, dim=64, seed=seed)
        exact, found = (case.run([100], kv_format).astype(np.float64) for kv_format in ("f32", "int8"))
        error = np.linalg.norm(found - exact, axis=2) / np.linalg.norm(exact, axis=2)
        assert np.sqrt((error**2).mean()) < 0.01


def test_queries_of_every_kind_of_array():
    case = Case([20])
    kv, seqs = case.cache()
    expected = kv.attend(1, case.q[0], seqs, [20])
    assert expected.dtype == np.float32
    for q in (case.q[0].astype(np.float64), np.asfortranarray(case.q[0]), case.q[0].tolist()):
        assert kv.attend(1, q, seqs, np.array([20])).tobytes() == expected.tobytes()
    assert kv.attend(1, case.q[0][:0], [], []).shape == (0, 4, 32)
    assert kv.attend(1, case.q[0][:0], seqs, [0]).shape == (0, 4, 32)


# --- one result -------------------------------------------------------------------------------------------------------

EXACT = [
    {"kv_format": kv_format, "q_lens": q_lens, **options}
    for kv_format in FORMATS
    for q_lens in ([1, 1, 1, 1], [530, 257, 40, 1], [1, 100, 3, 1])
    for options in ({}, {"window": 270, "softcap": 20.0}, {"window": 30})
]


def exact_case():
    return Case([530, 257, 40, 1], n_heads=6, n_kv_heads=2, dim=24)


@pytest.mark.parametrize("call", EXACT, ids=str)
def test_one_result_on_every_isa_thread_count_and_page_size(call):
    case = exact_case()
    results = on_every_isa(lambda: case.run(**call).tobytes())
    results |= {f"{n} threads": case.run(threads=n, **call).tobytes() for n in (2, 3, 8)}
    results |= {f"pages of {p}": case.run(page_tokens=p, threads=2, **call).tobytes() for p in PAGE_TOKENS}
    assert_one_result(results)


@pytest.mark.parametrize("call", EXACT, ids=str)
def test_one_result_whatever_the_memory_held_before(call):
    case = exact_case()
    clean = case.run(dirty=False, **call)
    assert np.isfinite(clean).all()
    assert case.run(dirty=True, **call).tobytes() == clean.tobytes()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"window": 300, "softcap": 10.0}], ids=str)
def test_rows_do_not_depend_on_how_many_are_asked_for(kv_format, options):
    """Each row of a long call equals a call for it alone and calls in chunks, on a sequence cut to that length."""
    case = Case([600], dim=24)
    kv, (seq,) = case.cache(kv_format)
    whole = kv.attend(1, case.q[0], [seq], [600], **options)
    for size in (1, 2, 3, 7, 12, 13, 64, 256, 300):
        starts = range(0, 600, size) if size > 1 else (0, 1, 15, 16, 255, 256, 257, 300, 511, 512, 599)
        for start in starts:
            stop = min(start + size, 600)
            part = seq.snapshot()
            part.truncate(stop)
            found = kv.attend(1, case.q[0][start:stop], [part], [stop - start], **options)
            assert found.tobytes() == whole[start:stop].tobytes(), (size, start)
            part.free()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("options", [{}, {"window": 280}], ids=str)
def test_batches_equal_each_sequence_alone(kv_format, options):
    lengths = [1, 16, 300, 513, 257, 40]
    case = Case(lengths, dim=24)
    kv, seqs = case.cache(kv_format, threads=2)
    for q_lens in ([1] * 6, [1, 16, 1, 1, 200, 40], [1, 5, 300, 513, 1, 1]):
        alone = [
            kv.attend(1, q[len(q) - n :], [seq], [n], **options) for q, seq, n in zip(case.q, seqs, q_lens, strict=True)
        ]
        together = kv.attend(1, case.queries(q_lens), seqs, q_lens, **options)
        assert together.tobytes() == np.concatenate(alone).tobytes()
        for order in itertools.islice(itertools.permutations(range(6)), 1, 720, 97):
            shuffled = kv.attend(
                1,
                np.concatenate([case.q[i][lengths[i] - q_lens[i] :] for i in order]),
                [seqs[i] for i in order],
                [q_lens[i] for i in order],
                **options,
            )
            assert shuffled.tobytes() == np.concatenate([alone[i] for i in order]).tobytes()


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("page_tokens", [16, 256])
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"window": 700}], ids=str)
def test_shared_prefixes_give_the_bits_of_separate_copies(kv_format, page_tokens, options):
    """Sequences that part at 0, 100, 256, 500, 512 or 600 tokens, with single queries and with chunks."""
    rng = np.random.default_rng(1)
    common = [rng.standard_normal((600, 2, 16), dtype=np.float32) for _ in range(2)]
    n_pages = 10_000 // page_tokens + 40
    kv = PagedKVCache(1, 2, 16, n_pages=n_pages, format=kv_format, page_tokens=page_tokens, threads=2)
    poison(kv)
    base = kv.sequence()
    base.extend(600)
    base.write_kv(0, 0, *common)
    shared, separate = [], []
    parts = [(600, 1), (512, 300), (512, 1), (500, 30), (256, 400), (100, 450), (0, 270), (600, 200), (600, 1)]
    for parting, n in parts:
        own = [rng.standard_normal((n, 2, 16), dtype=np.float32) for _ in range(2)]
        a, b = base.snapshot(), kv.sequence()
        a.truncate(parting)
        b.extend(parting)
        b.write_kv(0, 0, *(x[:parting] for x in common))
        for seq in (a, b):
            seq.write_kv(0, seq.extend(n), *own)
        shared.append(a)
        separate.append(b)
    assert len({page for seq in shared for page in seq.page_table}) < sum(seq.n_pages for seq in shared)
    for q_lens in ([1] * 9, [1, 300, 1, 30, 1, 2, 1, 200, 1]):
        q = rng.standard_normal((sum(q_lens), 4, 16), dtype=np.float32)
        found, expected = (kv.attend(0, q, seqs, q_lens, **options) for seqs in (shared, separate))
        assert found.tobytes() == expected.tobytes()
        assert np.isfinite(found).all()


def test_a_freed_and_recycled_page_leaves_no_trace():
    case = Case([300, 300])
    kv, seqs = case.cache("f16")
    expected = kv.attend(1, case.q[1], [seqs[1]], [300])
    seqs[0].free()
    again = kv.sequence()
    again.extend(300)  # recycled pages, then poisoned in every slot that is written
    nan = np.full((300, 2, 32), np.nan, np.float32)
    again.write_kv(1, 0, nan, nan)
    again.truncate(0)
    third = kv.sequence()
    third.extend(300)
    third.write_kv(1, 0, case.k[1], case.v[1])
    assert kv.attend(1, case.q[1], [third], [300]).tobytes() == expected.tobytes()
    third.truncate(290)
    assert kv.attend(1, case.q[1][:290], [third], [290]).tobytes() == expected[:290].tobytes()


# --- bad input --------------------------------------------------------------------------------------------------------


def zeros(*shape):
    return np.zeros(shape, np.float32)


BAD = [
    ({"layer": 2}, "layer: 2 is outside [0, 1]"),
    ({"q_lens": [2, 0]}, "q_lens: 2 lengths for 1 sequences"),
    ({"q_lens": [-1]}, "q_lens: -1 is outside [0, 1099511627775]"),
    ({"q_lens": [3]}, "q: shape (2, 4, 32) is not (3, a multiple of 2, 32)"),
    ({"q": zeros(2, 3, 32)}, "q: shape (2, 3, 32) is not (2, a multiple of 2, 32)"),
    ({"q": zeros(2, 0, 32)}, "q: shape (2, 0, 32) is not (2, a multiple of 2, 32)"),
    ({"q": zeros(2, 4, 31)}, "q: shape (2, 4, 31) is not (2, a multiple of 2, 32)"),
    ({"q": zeros(2, 128)}, "q: shape (2, 128) is not (2, a multiple of 2, 32)"),
    ({"q": zeros(21, 4, 32), "q_lens": [21]}, "q_lens: 21 queries for entry 0, a sequence of 20 tokens"),
    ({"seqs": [None]}, "seqs: entry 0 is no sequence of this cache"),
    ({"window": 0}, "window: 0 is outside [1, 1099511627775]"),
    ({"window": 1.5}, "window: 1.5 is not an integer"),
    ({"scale": float("nan")}, "scale: nan is not 0 and has no magnitude in [2**-126, 2**128)"),
    ({"softcap": -1.0}, "softcap: -1.0 is not 0 and is outside [2**-10, 1000]"),
    ({"softcap": float("inf")}, "softcap: inf is not 0 and is outside [2**-10, 1000]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=str)
def test_bad_input(changes, message):
    kv, seqs = Case([20]).cache()
    call = {"layer": 1, "q": zeros(2, 4, 32), "seqs": seqs, "q_lens": [2], **changes}
    with pytest.raises(BadInput) as error:
        kv.attend(**call)
    assert str(error.value) == message


def test_a_sequence_of_another_cache_is_refused():
    (kv, seqs), (_, strangers) = Case([20]).cache(), Case([20]).cache()
    with pytest.raises(BadInput, match=r"^seqs: entry 1 is no sequence of this cache$"):
        kv.attend(1, zeros(2, 4, 32), [*seqs, *strangers], [1, 1])
