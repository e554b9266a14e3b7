"""Pages of PagedKVCache: taken, shared and copied as promised; a refusal changes nothing."""

import threading

import numpy as np
import pytest
from kv import contents, fill, make, poison, same, state, stored, values

from pagedkv import BadInput, NotFound, PoolExhausted, PrefixIndex, SequenceFull
from pagedkv.core._testing import page_address
from pagedkv.core.kvcache import FORMATS, KVSequence


def test_extend_takes_only_the_pages_it_needs():
    kv = make(4)
    seq = kv.sequence()
    for n, start, pages in ((1, 0, 1), (15, 1, 1), (1, 16, 2), (0, 17, 2), (47, 17, 4)):
        assert seq.extend(n) == start
        assert seq.n_pages == kv.n_in_use == pages
        assert len(seq) == start + n


def test_pool_exhausted_changes_nothing():
    kv = make(4)
    a, b = kv.sequence(1), kv.sequence(2)
    fill(a, 20)
    fill(b, 10)
    before = state(kv, a, b)
    for n in (29, 36, 44):
        with pytest.raises(PoolExhausted):
            a.extend(n)
        assert state(kv, a, b) == before
    assert a.extend(28) == 20


def test_pool_exhausted_by_the_copy_of_a_shared_tail_changes_nothing():
    kv = make(4)
    a = kv.sequence()
    fill(a, 20)
    b = a.snapshot()
    others = kv.sequence()
    others.extend(32)
    before = state(kv, a, b)
    for n in (1, 12, 13):
        with pytest.raises(PoolExhausted):
            b.extend(n)
        assert state(kv, a, b) == before
    others.truncate(16)
    before = state(kv, a, b)
    with pytest.raises(PoolExhausted):  # one page is free: the copy would fit or the new page, not both
        b.extend(13)
    assert state(kv, a, b) == before
    assert b.extend(12) == 20


@pytest.mark.parametrize("n_free", [0, 1, 2])
def test_refused_write_to_several_shared_pages_changes_nothing(n_free):
    kv = make(4 + n_free)
    a = kv.sequence()
    fill(a, 60)
    b = a.snapshot()
    k, v = values(40, kv, 7)  # tokens 10 to 49: four pages
    before = state(kv, a, b)
    with pytest.raises(PoolExhausted, match=r"^no page to be had: 4 of max_pages="):
        b.write_kv(0, 10, k, v)
    assert state(kv, a, b) == before
    b.write_kv(0, 0, k[: 16 * n_free], v[: 16 * n_free])
    assert [x == y for x, y in zip(a.page_table, b.page_table, strict=True)] == [i >= n_free for i in range(4)]
    assert kv.check() == []


def test_refused_extension_over_several_shared_pages_changes_nothing():
    kv = make(5)
    a = kv.sequence()
    fill(a, 20)
    a.append_pages(1)
    b = a.snapshot()  # its tail and the empty page behind it are shared
    before = state(kv, a, b)
    with pytest.raises(PoolExhausted):
        b.extend(29)  # two copies and a new page, two are free
    assert state(kv, a, b) == before
    assert (b.extend(28), kv.n_free) == (20, 0)
    assert kv.check() == []


def test_a_page_named_twice_needs_one_page_less():
    kv = make(2)
    a, b = kv.sequence(), kv.sequence()
    fill(a, 16)
    b.share_pages(a.page_table * 2)
    with pytest.raises(PoolExhausted):  # three hold it: two copies
        b.extend(32)
    a.free()
    b.extend(32)
    assert sorted(b.page_table) == [0, 1]
    assert kv.check() == []


def test_cached_pages_count_as_room_for_copies():
    kv = make(4)
    index = PrefixIndex(kv, 16)
    a, b = kv.sequence(), kv.sequence()
    fill(b, 32)
    index.insert(b, range(32))
    b.free()
    fill(a, 32)
    assert (kv.n_free, kv.n_cached) == (0, 2)
    copy = a.snapshot()
    copy.write_kv(0, 0, *values(32, kv))
    assert (kv.n_in_use, kv.n_cached, kv.check()) == (4, 0, [])


def test_sequence_full_changes_nothing():
    kv = make(8)
    seq = kv.sequence(5, max_pages=2)
    fill(seq, 20)
    before = state(kv, seq)
    with pytest.raises(SequenceFull, match=r"^sequence 5: extend: 13 more tokens exceeds max_pages=2$"):
        seq.extend(13)
    assert state(kv, seq) == before
    assert seq.extend(12) == 20


def test_snapshot_diverges_on_the_tail_page_only():
    kv = make(8)
    a = kv.sequence()
    fill(a, 40)
    b, c = a.snapshot(), a.snapshot()
    assert type(b) is KVSequence
    assert a.page_table == b.page_table == c.page_table
    assert len(b) == 40
    assert kv.n_in_use == 3
    expected = contents(a)
    fill(b, 3, 50)
    fill(c, 3, 60)
    assert kv.stats()["num_copied"] == 2
    assert a.page_table[:2] == b.page_table[:2] == c.page_table[:2]
    assert len({a.page_table[2], b.page_table[2], c.page_table[2]}) == 3
    assert contents(a) == expected
    fill(a, 3, 70)  # nobody else holds its tail now
    assert kv.stats()["num_copied"] == 2
    for seq, seed in ((b, 50), (c, 60), (a, 70)):
        for layer in range(2):
            whole = np.concatenate([values(40, kv, layer), values(3, kv, seed + layer)], axis=1)
            assert same(seq.gather(layer), whole)
    assert kv.check() == []


def test_a_full_tail_page_is_not_copied():
    kv = make(8)
    a = kv.sequence()
    fill(a, 32)
    b = a.snapshot()
    fill(b, 5, 9)
    assert kv.stats()["num_copied"] == 0
    assert b.page_table[:2] == a.page_table


def test_writing_old_tokens_copies_each_shared_page_once():
    kv = make(8)
    a = kv.sequence()
    fill(a, 48)
    b = a.snapshot()
    expected = contents(a)
    k, v = values(10, kv, 5)
    b.write_kv(0, 10, k, v)  # pages 0 and 1
    b.write_kv(1, 10, k, v)
    assert kv.stats()["num_copied"] == 2
    assert contents(a) == expected
    found = b.gather(0)
    original = a.gather(0)
    for got, old, new in zip(found, original, (k, v), strict=True):
        assert same(got, np.concatenate([old[:10], new, old[20:]]))
    assert b.page_table[2] == a.page_table[2]


def test_writing_to_shared_pages_without_room_writes_nothing():
    kv = make(4)
    a = kv.sequence()
    fill(a, 48)
    b = a.snapshot()
    expected = contents(a)
    with pytest.raises(PoolExhausted):
        b.write_kv(0, 0, *values(48, kv, 5))
    assert contents(a) == contents(b) == expected
    assert kv.check() == []


def test_truncate_gives_pages_back_and_keeps_the_rest():
    kv = make(8)
    seq = kv.sequence()
    fill(seq, 70)
    expected = seq.gather(1)
    for n, pages in ((65, 5), (64, 4), (40, 3), (17, 2), (16, 1), (1, 1), (0, 0)):
        seq.truncate(n)
        assert len(seq) == n
        assert seq.n_pages == kv.n_in_use == pages
        assert same(seq.gather(1)[0], expected[0][:n])
    assert seq.extend(3) == 0


def test_truncated_tail_of_a_snapshot_is_copied_before_it_is_written_again():
    kv = make(8)
    a = kv.sequence()
    fill(a, 48)
    b = a.snapshot()
    expected = contents(a)
    b.truncate(20)
    fill(b, 20, 33)
    assert contents(a) == expected
    assert same(b.gather(0)[0][:20], a.gather(0)[0][:20])
    assert same(b.gather(0)[0][20:], values(20, kv, 33)[0])


def test_truncating_pages_drops_their_tokens():
    kv = make(8)
    seq = kv.sequence()
    fill(seq, 40)
    seq.truncate_pages(2)
    assert len(seq) == 32
    assert len(seq.gather(0)[0]) == 32
    seq.truncate_pages(0)
    assert len(seq) == 0


def test_pages_appended_ahead_are_used_and_shared_ones_copied():
    kv = make(8)
    a, b = kv.sequence(), kv.sequence()
    fill(a, 16)
    expected = contents(a)
    b.append_page()
    b.share_page(a.page_table[0])
    fill(b, 32, 5)
    assert b.n_pages == 2
    assert contents(a) == expected
    assert same(b.gather(0), values(32, kv, 5))


def test_free_is_idempotent_and_the_sequence_usable_again():
    kv = make(4)
    seq = kv.sequence()
    fill(seq, 40)
    for _ in range(3):
        seq.free()
        assert len(seq) == 0
        assert kv.n_free == 4
    assert fill(seq, 64) == 0


def test_death_of_a_sequence_frees_its_pages():
    kv = make(4)
    seq = kv.sequence()
    seq.extend(64)
    twin = seq.snapshot()
    del seq
    assert kv.n_free == 0
    del twin
    assert kv.n_free == 4


def test_share_prefix():
    kv = make(8)
    a = kv.sequence()
    fill(a, 40)
    b = kv.sequence()
    b.share_prefix(a.page_table[:2], 32)
    assert len(b) == 32
    assert b.page_table == a.page_table[:2]
    assert same(b.gather(0)[0], a.gather(0)[0][:32])
    c = kv.sequence()
    c.share_prefix(a.page_table, 37)  # a partly used page is copied before it is written
    fill(c, 3, 9)
    assert c.page_table[2] != a.page_table[2]
    assert same(c.gather(0)[0][:37], a.gather(0)[0][:37])
    a.free()
    assert same(b.gather(1)[0], values(40, kv, 1)[0][:32])
    assert kv.check() == []


def test_share_prefix_refuses_what_does_not_fit_and_changes_nothing():
    kv = make(8)
    a = kv.sequence()
    fill(a, 40)
    free_page = next(i for i in range(8) if kv.refcount(i) == 0)
    b = kv.sequence(max_pages=2)
    before = state(kv, a)
    for pages, n_tokens, error in (
        (a.page_table[:2], 16, BadInput), (a.page_table[:2], 33, BadInput), ([], 1, BadInput),
        (a.page_table[:1], 0, BadInput), ([a.page_table[0], free_page], 32, NotFound), ([8], 16, BadInput),
        ([-1], 16, BadInput), (a.page_table, 40, SequenceFull), (a.page_table[:1], -1, BadInput),
    ):  # fmt: skip
        with pytest.raises(error):
            b.share_prefix(pages, n_tokens)
        assert len(b) == b.n_pages == 0
        assert state(kv, a) == before
    b.extend(1)
    with pytest.raises(BadInput, match=r"^share_prefix: the sequence holds 1 tokens already$"):
        b.share_prefix(a.page_table[:1], 16)


def test_growth_keeps_pages_where_they_are():
    kv = make(2, max_pages=64, growth_pages=3)
    seq = kv.sequence()
    fill(seq, 32)
    addresses = [page_address(kv, i) for i in seq.page_table]
    expected = contents(seq)
    other = kv.sequence()
    fill(other, 16 * 62, 5)
    assert kv.n_pages == 64
    assert [page_address(kv, i) for i in seq.page_table] == addresses
    assert contents(seq) == expected
    assert same(other.gather(0), values(16 * 62, kv, 5))
    with pytest.raises(PoolExhausted):
        seq.extend(1)


# --- against a model --------------------------------------------------------------------------------------------------


class Model:
    """Sequences as plain arrays and lists of page names; a page is shared when two lists hold its name."""

    def __init__(self, n_pages, kv_format, layers):
        self.n_pages, self.kv_format, self.layers = n_pages, kv_format, layers
        self.tables, self.data, self.next_name = {}, {}, n_pages  # a page may be named by its index

    def free(self):
        return self.n_pages - len({page for table in self.tables.values() for page in table})

    def holders(self, page):
        return sum(table.count(page) for table in self.tables.values())

    def own(self, key, pages):
        for i in pages:
            if self.holders(self.tables[key][i]) > 1:
                self.tables[key][i] = self.name()

    def name(self):
        self.next_name += 1
        return self.next_name

    def compare(self, page_tables):
        """Real pages and names correspond one to one."""
        pairs = {pair for key, table in page_tables.items() for pair in zip(table, self.tables[key], strict=True)}
        assert len(pairs) == len({real for real, _ in pairs}) == len({name for _, name in pairs})


@pytest.mark.parametrize("seed", range(12))
def test_random_use_against_a_model(seed):
    """Extend, write, snapshot, share, truncate, free in any order; contents, counts and refusals as the model says."""
    rng = np.random.default_rng(seed)
    kv_format, page_tokens = FORMATS[seed % 3], (16, 32)[seed // 3 % 2]
    kv = make(12, format=kv_format, page_tokens=page_tokens, heads=2, dim=5)
    poison(kv)
    model, seqs, refused = Model(12, kv_format, 2), {}, 0

    def random_kv(n):
        return rng.standard_normal((2, n, 2, 5), dtype=np.float32)

    for step in range(600):
        action = rng.choice(["new", "extend", "extend", "extend", "write", "snapshot", "truncate", "free", "share"])
        key = int(rng.choice(list(seqs))) if seqs else None
        if action == "new" or key is None:
            if len(seqs) < 6:
                seqs[step] = kv.sequence(step, max_pages=40)
                model.tables[step], model.data[step] = [], [random_kv(0)] * 2
            continue
        seq, table, n = seqs[key], model.tables[key], len(seqs[key])
        if action == "extend":
            count = int(rng.integers(0, 3 * page_tokens))
            n_new = -(-(n + count) // page_tokens) - len(table)
            tail = [n // page_tokens] if count and n % page_tokens else []
            copies = sum(model.holders(table[i]) > 1 for i in tail)
            if n_new + copies > model.free():
                refused += 1
                with pytest.raises(PoolExhausted):
                    seq.extend(count)
            else:
                assert seq.extend(count) == n
                model.own(key, tail)
                table.extend(model.name() for _ in range(n_new))
                for layer in range(2):
                    new = random_kv(count)
                    seq.write_kv(layer, n, *new)
                    before = model.data[key][layer]
                    model.data[key][layer] = np.concatenate([before, stored_kv(new, kv_format)], axis=1)
        elif action == "write" and n:
            start = int(rng.integers(n))
            new, layer = random_kv(int(rng.integers(0, n - start + 1))), int(rng.integers(2))
            stop = start + new.shape[1]
            pages = range(start // page_tokens, (stop - 1) // page_tokens + 1) if new.shape[1] else []
            if sum(model.holders(table[i]) > 1 for i in pages) > model.free():
                refused += 1
                with pytest.raises(PoolExhausted):
                    seq.write_kv(layer, start, *new)
                model.tables = {k: seqs[k].page_table for k in seqs}  # pages copied before the refusal stay apart
                continue
            seq.write_kv(layer, start, *new)
            model.own(key, pages)
            model.data[key][layer] = model.data[key][layer].copy()
            model.data[key][layer][:, start:stop] = stored_kv(new, kv_format)
        elif action == "snapshot" and len(seqs) < 6:
            seqs[step], model.tables[step] = seq.snapshot(), list(table)
            model.data[step] = list(model.data[key])
        elif action == "truncate":
            keep = int(rng.integers(0, n + 1))
            seq.truncate(keep)
            del table[-(-keep // page_tokens) :]
            model.data[key] = [x[:, :keep] for x in model.data[key]]
        elif action == "free":
            if rng.integers(2):
                del seqs[key], seq
            else:
                seqs.pop(key).free()
            del model.tables[key], model.data[key]
        elif action == "share" and len(seqs) < 6:
            pages = int(rng.integers(0, n // page_tokens + 1))
            seqs[step] = kv.sequence(step, max_pages=40)
            seqs[step].share_prefix(seq.page_table[:pages], pages * page_tokens)
            model.tables[step] = table[:pages]
            model.data[step] = [x[:, : pages * page_tokens] for x in model.data[key]]
        assert kv.n_free == model.free(), (seed, step)
        if step % 10 == 0:
            assert kv.check() == []
            model.compare({k: seqs[k].page_table for k in seqs})
    for k in seqs:
        for layer in range(2):
            assert same(seqs[k].gather(layer), model.data[k][layer]), (seed, k, layer)
    assert kv.check() == []
    assert refused > 0


def stored_kv(x, kv_format):
    return stored(x, kv_format) if x.size else x


def test_threads_write_and_read_their_own_sequences():
    kv = make(64, format="f16")
    failures = []

    def work(seed):
        try:
            for i in range(50):
                seq = kv.sequence(seed)
                fill(seq, 50, seed + 2 * i)
                twin = seq.snapshot()
                fill(twin, 20, seed)
                assert same(seq.gather(0), stored(values(50, kv, seed + 2 * i), "f16"))
                assert same(twin.gather(1)[0][50:], stored(values(20, kv, seed + 1), "f16")[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert kv.n_free == 64
    assert kv.check() == []
