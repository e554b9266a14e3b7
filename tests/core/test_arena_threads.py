"""All calls from several threads at once: through Python, and through the C API without the GIL."""

import ctypes
import random
import sys

import pytest
from raw_api import RawApi, field
from together import in_threads

from pagedkv.core.arena import Arena
from pagedkv.core.errors import PagedKVError, Tampered
from pagedkv.core.prefix import PrefixIndex

N_THREADS = 4
api = RawApi()


@pytest.fixture(autouse=True)
def switch_often():
    """Hand the GIL around every few calls instead of every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_each_thread_its_own_sequences():
    arena = Arena(40, 300, max_pages=60, growth_pages=1, guard=True)

    def work(k):
        rng = random.Random(k)
        seqs = [arena.sequence(k) for _ in range(3)]
        for step in range(4000):
            seq = rng.choice(seqs)
            try:
                roll = rng.random()
                if roll < 0.5:
                    arena.page(seq.append_page())[:] = bytes([k]) * 300
                elif roll < 0.6:
                    seqs[rng.randrange(3)] = seq.snapshot()
                elif roll < 0.8 and seq.n_pages:
                    arena.page(seq.write_page(rng.randrange(seq.n_pages)))[:] = bytes([k]) * 300
                elif seq.n_pages:
                    seq.truncate_pages(rng.randrange(seq.n_pages))
            except PagedKVError as error:
                assert error.verdict == 2, error  # the pool is allowed to be empty, nothing else
            for i in seq.page_table:
                assert set(bytes(arena.page(i))) == {k}, "a page of this thread was written by another"
            if step % 50 == 0:
                assert arena.check(3) == []

    in_threads(work, N_THREADS)
    assert (arena.n_in_use, arena.check(3)) == (0, [])


def test_one_prefix_from_all_sides():
    """Threads write, index, match and drop the same few prefixes; every hit has the content of its tokens."""
    arena = Arena(24, 64, guard=True)
    index = PrefixIndex(arena, 2)

    def content(tokens, k):
        return bytes([sum(tokens[: 2 * k + 2]) % 251]) * 64

    def work(k):
        rng = random.Random(k)
        for step in range(4000):
            tokens = [rng.randrange(2) + 3 for _ in range(2 * rng.randrange(1, 6))]
            with arena.sequence(k) as seq:
                try:
                    hit = index.match(seq, tokens)
                    for i in range(hit):
                        assert bytes(arena.page(seq.page_table[i])) == content(tokens, i)
                    for i in range(hit, len(tokens) // 2):
                        arena.page(seq.append_page())[:] = content(tokens, i)
                    assert index.insert(seq, tokens) == len(tokens) // 2
                except PagedKVError as error:
                    assert error.verdict == 2, error
            if step % 50 == 0:
                assert arena.check(3) == []

    in_threads(work, N_THREADS)
    assert (arena.n_in_use, arena.check(3)) == (0, [])
    assert arena.stats()["num_evicted"] > 0
    assert index.stats()["num_hit"] > 0


def test_diverging_holders_each_get_the_content_once():
    """Snapshots of one sequence are written by all threads at once, outside the GIL."""
    page_bytes = 1 << 16
    arena = Arena(4 * (N_THREADS + 1), page_bytes)
    origin = arena.sequence()
    for i in origin.append_pages(4):
        arena.page(i)[:] = bytes([100 + i]) * page_bytes
    for _ in range(30):
        copies = [origin.snapshot() for _ in range(N_THREADS)]
        before = arena.stats()["num_copied"]

        def work(k, copies=copies):
            for i in range(4):
                page = copies[k].write_page(i)
                assert bytes(arena.page(page)) == bytes([100 + i]) * page_bytes
                arena.page(page)[:] = bytes([k]) * page_bytes

        in_threads(work, N_THREADS)
        assert arena.stats()["num_copied"] - before == 4 * N_THREADS
        assert [bytes(arena.page(i)[:1]) for i in origin.page_table] == [bytes([100 + i]) for i in range(4)]
        assert arena.check(3) == []


def test_pages_of_one_sequence_copied_at_once():
    """Threads diverge pages of one table together; the checker, run beside them, accounts for pages in flight."""
    page_bytes = 1 << 20
    arena = Arena(2 * N_THREADS, page_bytes)
    origin = arena.sequence()
    for i in origin.append_pages(N_THREADS):
        arena.page(i)[:] = bytes([50 + i]) * page_bytes
    for _ in range(60):
        copy = origin.snapshot()
        before = arena.stats()["num_copied"]

        def work(k, copy=copy):
            if k == N_THREADS:
                for _ in range(50):
                    assert arena.check(3) == []
            else:
                page = copy.write_page(k)
                assert bytes(arena.page(page)) == bytes([50 + k]) * page_bytes

        in_threads(work, N_THREADS + 1)
        assert arena.stats()["num_copied"] - before == N_THREADS
        assert sorted(copy.page_table + origin.page_table) == list(range(2 * N_THREADS))
        copy.free()
        assert arena.check(3) == []


def test_one_sequence_written_and_cut_by_many():
    """Misuse that must stay harmless: several threads change the same table while pages of it are being copied."""
    arena = Arena(64, 1 << 15)
    seq = arena.sequence(0, max_pages=16)

    def work(k):
        rng = random.Random(k)
        for _ in range(3000):
            try:
                roll = rng.random()
                if roll < 0.4:
                    seq.append_page()
                elif roll < 0.6:
                    seq.snapshot().write_page(rng.randrange(16))
                elif roll < 0.9:
                    seq.write_page(rng.randrange(16))
                else:
                    seq.truncate_pages(rng.randrange(16))
            except PagedKVError as error:
                assert error.verdict in (1, 2, 3), error
            assert arena.check(3) == []

    in_threads(work, N_THREADS)
    seq.free()
    assert (arena.n_in_use, arena.check(3)) == (0, [])


def test_closing_while_others_work():
    for round_ in range(20):
        arena = Arena(32, 1 << 14)
        seqs = [arena.sequence(k) for k in range(N_THREADS)]

        def work(k, arena=arena, seqs=seqs, round_=round_):
            if k == 0:
                for _ in range(round_ * 10):
                    arena.is_valid()
                arena.close()
                return
            with pytest.raises(Tampered, match="closed"):
                while True:
                    seqs[k].append_pages(3)
                    seqs[k].snapshot().write_page(1)
                    seqs[k].free()

        in_threads(work, N_THREADS)


def test_c_calls_without_the_gil():
    """ctypes drops the GIL around each call, so these interleave anywhere."""
    status, arena = api.make(api.arena_new, 16, 4096, 64, 3, 1)
    assert status == 0

    def work(k):
        rng = random.Random(k)
        _, seq = api.make(api.seq_new, arena, k, 32)
        for _ in range(4000):
            roll = rng.random()
            if roll < 0.5:
                page = api.seq_append_page(seq)
                if page >= 0:
                    ctypes.memset(api.arena_page(arena, page), k, 4096)
            elif roll < 0.7:
                status, copy = api.make(api.seq_snapshot, seq)
                assert status == 0
                page = api.seq_write_page(copy, 0)
                assert page >= 0 or page in (-1, -2)
                if page >= 0:
                    assert ctypes.string_at(api.arena_page(arena, page), 4096) == bytes([k]) * 4096
                assert api.seq_destroy(copy) == 0
            elif roll < 0.9:
                assert api.seq_truncate_pages(seq, api.seq_n_pages(seq) // 2) == 0
            else:
                assert api.arena_trim(arena) >= 0
                assert api.check(arena, 3, None, 0) == 0
        assert api.seq_destroy(seq) == 0

    in_threads(work, N_THREADS)
    assert api.check(arena, 3, None, 0) == 0
    assert field(arena, "pkv_arena.n_in_use").value == 0
    assert api.arena_destroy(arena) == 0
