"""The arena as plain dicts and lists, and a driver that runs it beside the real one.

The model predicts everything that is documented: verdicts, the page each call returns, reuse and eviction order, page
contents, refcounts, states, the prefix index. It knows nothing of links, locks or memory.
"""

import gc

from pagedkv.core._testing import free_list, lru_list
from pagedkv.core.arena import Arena
from pagedkv.core.errors import PagedKVError, Verdict
from pagedkv.core.prefix import PrefixIndex

PAGE_BYTES = 72
PAGE_TOKENS = 2


class Refused(Exception):
    """The model's refusal."""

    def __init__(self, verdict):
        super().__init__(verdict.name)
        self.verdict = verdict


class Model:
    """Pages are numbers; a sequence is a list of them. Every method mirrors one call of the real arena."""

    def __init__(self, n_pages, max_pages, growth_pages):
        self.n_pages, self.max_pages, self.growth_pages = n_pages, max_pages, growth_pages
        self.free = list(range(n_pages))  # first: next to be taken
        self.cached = []  # first: oldest
        self.refs = {}
        self.content = {}
        self.entries = {}  # page -> (parent page or None, tokens), in order of indexing
        self.tables = {}  # name -> list of pages
        self.limits = {}

    def grow(self, step):
        self.free += range(self.n_pages, self.n_pages + step)
        self.n_pages += step

    def take(self):
        if not self.free and self.n_pages < self.max_pages:
            self.grow(min(self.growth_pages, self.max_pages - self.n_pages))
        if not self.free and self.cached:
            parents = {parent for parent, _ in self.entries.values()}
            leaves = [page for page in self.cached if page not in parents]
            self.forget(leaves[0] if leaves else self.cached[0])
        if not self.free:
            raise Refused(Verdict.POOL_EXHAUSTED)
        page = self.free.pop(0)
        self.refs[page] = 1
        return page

    def hold(self, page):
        if page in self.cached:
            self.cached.remove(page)
        self.refs[page] = self.refs.get(page, 0) + 1

    def drop(self, pages):
        """Drop holders in this order; of the pages freed together, the first is the first to be taken again."""
        freed = []
        for page in pages:
            self.refs[page] -= 1
            if not self.refs[page]:
                del self.refs[page]
                (self.cached if page in self.entries else freed).append(page)
        self.free = freed + self.free

    def forget(self, page):
        """Take a page and all that follow it out of the index, youngest child first, children before parents."""
        for child in [p for p, (parent, _) in reversed(self.entries.items()) if parent == page]:
            self.forget(child)
        del self.entries[page]
        if page in self.cached:
            self.cached.remove(page)
            self.free.insert(0, page)

    def new(self, name, limit):
        self.tables[name], self.limits[name] = [], limit

    def append(self, name, n):
        table = self.tables[name]
        if n > self.limits[name] - len(table):
            raise Refused(Verdict.SEQ_FULL)
        if n > 1 and n > len(self.free):
            short_of = n - len(self.free)
            growable = self.max_pages - self.n_pages
            if short_of > growable + len(self.cached):
                raise Refused(Verdict.POOL_EXHAUSTED)
            if growable:
                self.grow(min(max(min(short_of, growable), self.growth_pages), growable))
        taken = []
        for _ in range(n):
            taken.append(self.take())
            table.append(taken[-1])
        return taken

    def share(self, name, pages):
        if len(pages) > self.limits[name] - len(self.tables[name]):
            raise Refused(Verdict.SEQ_FULL)
        for page in pages:
            if not 0 <= page < self.n_pages:
                raise Refused(Verdict.BAD_INPUT)
            if page not in self.refs:
                raise Refused(Verdict.NOT_FOUND)
        for page in pages:
            self.hold(page)
        self.tables[name] += pages

    def snapshot(self, name, copy):
        for page in self.tables[name]:
            self.hold(page)
        self.tables[copy], self.limits[copy] = list(self.tables[name]), self.limits[name]

    def write(self, name, i, value):
        table = self.tables[name]
        if not 0 <= i < len(table):
            raise Refused(Verdict.BAD_INPUT)
        page = table[i]
        if self.refs[page] == 1:
            if page in self.entries:
                self.forget(page)
        else:
            page = self.take()
            self.drop([table[i]])
            table[i] = page
        self.content[page] = value
        return page

    def truncate(self, name, n):
        table = self.tables[name]
        if not 0 <= n <= len(table):
            raise Refused(Verdict.BAD_INPUT)
        self.drop(table[n:][::-1])
        del table[n:]

    def destroy(self, name):
        self.truncate(name, 0)
        del self.tables[name], self.limits[name]

    def reserve(self, n):
        if n > len(self.free):
            if n - len(self.free) > self.max_pages - self.n_pages:
                raise Refused(Verdict.POOL_EXHAUSTED)
            self.grow(n - len(self.free))

    def find(self, parent, tokens):
        return next((page for page, entry in self.entries.items() if entry == (parent, tokens)), None)

    @staticmethod
    def split(tokens):
        return [tuple(tokens[k : k + PAGE_TOKENS]) for k in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS)]

    def lookup(self, tokens):
        found, parent = [], None
        for chunk in self.split(tokens):
            parent = self.find(parent, chunk)
            if parent is None:
                break
            found.append(parent)
        return found

    def match(self, name, tokens):
        if self.tables[name]:
            raise Refused(Verdict.BAD_INPUT)
        found = self.lookup(tokens)[: self.limits[name]]
        for page in found:
            self.hold(page)
        self.tables[name] += found
        return len(found)

    def insert(self, name, tokens):
        table, parent, dropped, done = self.tables[name], None, [], 0
        chunks = self.split(tokens)
        if len(chunks) > len(table):
            raise Refused(Verdict.BAD_INPUT)
        for k, chunk in enumerate(chunks):
            if table[k] in self.entries:
                if self.entries[table[k]] != (parent, chunk):
                    break
            else:
                known = self.find(parent, chunk)
                if known is None:
                    self.entries[table[k]] = (parent, chunk)
                else:
                    self.hold(known)
                    dropped.append(table[k])
                    self.refs[table[k]] -= 1  # at once: it may be met again further on
                    table[k] = known
                    if not self.refs[dropped[-1]]:
                        del self.refs[dropped[-1]]
                    else:
                        dropped.pop()
            parent, done = table[k], done + 1
        self.free = dropped + self.free
        return done

    def clear(self):
        for page in range(self.n_pages):
            if page in self.entries:
                self.forget(page)


class Pair:
    """Runs each step on the model and on the real arena and compares what they answer and what they hold."""

    def __init__(self, n_pages=5, max_pages=12, growth_pages=2, guard=True):
        self.model = Model(n_pages, max_pages, growth_pages)
        self.arena = Arena(n_pages, PAGE_BYTES, max_pages=max_pages, growth_pages=growth_pages, guard=guard)
        self.index = PrefixIndex(self.arena, PAGE_TOKENS)
        self.seqs = {}
        self.n_names = 0
        self.n_steps = 0

    def both(self, real, model):
        """Run both; equal results, or equal verdicts. The result, or None after a refusal."""
        try:
            expected = model()
        except Refused as refusal:
            try:
                found = real()
            except PagedKVError as error:
                assert error.verdict == refusal.verdict, f"expected {refusal.verdict!r}, got {error.verdict!r}: {error}"
                return None
            raise AssertionError(f"expected {refusal.verdict!r}, got {found!r}") from None
        found = real()
        assert found == expected, f"expected {expected!r}, got {found!r}"
        return found

    def new(self, limit):
        name = self.n_names
        self.n_names += 1
        self.model.new(name, limit)
        self.seqs[name] = self.arena.sequence(name, limit)
        return name

    def append(self, name, n):
        if n == 1:
            return self.both(lambda: [self.seqs[name].append_page()], lambda: self.model.append(name, 1))
        return self.both(lambda: self.seqs[name].append_pages(n), lambda: self.model.append(name, n))

    def share(self, name, pages):
        if len(pages) == 1:
            self.both(lambda: [self.seqs[name].share_page(pages[0])][1:], lambda: self.model.share(name, pages) or [])
        else:
            self.both(lambda: self.seqs[name].share_pages(pages), lambda: self.model.share(name, pages))

    def snapshot(self, name):
        copy = self.n_names
        self.n_names += 1
        self.model.snapshot(name, copy)
        self.seqs[copy] = self.seqs[name].snapshot()
        return copy

    def write(self, name, i, value):
        page = self.both(lambda: self.seqs[name].write_page(i), lambda: self.model.write(name, i, value))
        if page is not None:
            self.arena.page(page)[:] = bytes([value]) * PAGE_BYTES

    def truncate(self, name, n):
        self.both(lambda: self.seqs[name].truncate_pages(n), lambda: self.model.truncate(name, n))

    def free(self, name):
        self.both(self.seqs[name].free, lambda: self.model.truncate(name, 0))

    def destroy(self, name):
        self.model.destroy(name)
        del self.seqs[name]

    def reserve(self, n):
        self.both(lambda: self.arena.reserve(n), lambda: self.model.reserve(n))

    def trim(self):
        assert self.arena.trim() >= 0

    def match(self, name, tokens):
        self.both(lambda: self.index.lookup(tokens), lambda: len(self.model.lookup(tokens)))
        self.both(lambda: self.index.match(self.seqs[name], tokens), lambda: self.model.match(name, tokens))

    def insert(self, name, tokens):
        self.both(lambda: self.index.insert(self.seqs[name], tokens), lambda: self.model.insert(name, tokens))

    def clear(self):
        self.both(self.index.clear, self.model.clear)

    def exhaust(self, name):
        """Append until the model refuses; the real one must refuse at the same page."""
        while self.append(name, 1) is not None:
            pass

    def compare(self, deep):
        """After each step: the level 3 checker and the counts; deep: everything."""
        arena, model = self.arena, self.model
        assert arena.check(3) == []
        stats = arena.stats()
        counts = (model.n_pages, len(model.free), len(model.refs), len(model.cached), len(model.tables))
        names = ("n_pages", "n_free", "n_in_use", "n_cached", "n_sequences")
        assert tuple(stats[n] for n in names) == counts, names
        if not deep:
            return
        assert {name: seq.page_table for name, seq in self.seqs.items()} == model.tables
        assert free_list(arena) == model.free
        assert lru_list(arena) == model.cached
        assert self.index.n_pages == len(model.entries)
        for page in range(model.n_pages):
            state = "IN_USE" if page in model.refs else "CACHED" if page in model.cached else "FREE"
            assert (arena.page_state(page), arena.refcount(page)) == (state, model.refs.get(page, 0)), page
        assert {p for t in model.tables.values() for p in t} == set(model.refs)

    def compare_contents(self):
        """Pages somebody holds carry what was last written to them; a copy carries what its origin did."""
        for page in self.model.refs:
            value = self.model.content.get(page)
            if value is not None:
                assert bytes(self.arena.page(page)) == bytes([value]) * PAGE_BYTES, page


def random_step(pair, rng):
    """One step chosen by rng; its description, for the failure message."""
    names = list(pair.seqs)
    if not names or (len(names) < 6 and rng.random() < 0.03):
        limit = rng.choice((1, 4, 9, 30))
        return f"new {pair.new(limit)} limit {limit}"
    name = rng.choice(names)
    length = len(pair.model.tables[name])
    roll = rng.random()
    if roll < 0.34:
        n = rng.choice((1, 1, 1, 1, 0, 2, 3, 6))
        pair.append(name, n)
        return f"append {name} {n}"
    if roll < 0.44:
        held = list(pair.model.refs)
        pages = [
            rng.choice(held) if held and rng.random() < 0.85 else rng.randrange(-1, 14)
            for _ in range(rng.choice((1, 1, 2, 3)))
        ]
        pair.share(name, pages)
        return f"share {name} {pages}"
    if roll < 0.50 and len(names) < 7:
        return f"snapshot {name} as {pair.snapshot(name)}"
    if roll < 0.66:
        i, value = rng.randrange(-1, length + 1), rng.randrange(256)
        pair.write(name, i, value)
        return f"write {name} {i}"
    if roll < 0.74:
        n = rng.randrange(-1, length + 2)
        pair.truncate(name, n)
        return f"truncate {name} {n}"
    if roll < 0.80:
        pair.free(name)
        return f"free {name}"
    if roll < 0.83:
        pair.destroy(name)
        return f"destroy {name}"
    if roll < 0.84:
        n = rng.randrange(0, 14)
        pair.reserve(n)
        return f"reserve {n}"
    if roll < 0.85:
        pair.trim()
        return "trim"
    if roll < 0.86:
        pair.exhaust(name)
        return f"exhaust {name}"
    if roll < 0.863:
        pair.clear()
        return "clear"
    tokens = [rng.randrange(2) for _ in range(rng.randrange(0, 2 * PAGE_TOKENS * 3))]
    if roll < 0.94:
        tokens = tokens[: length * PAGE_TOKENS + rng.choice((0, 0, 0, 2))]
        pair.insert(name, tokens)
        return f"insert {name} {tokens}"
    if rng.random() < 0.8:
        pair.free(name)
    pair.match(name, tokens)
    return f"match {name} {tokens}"


def run(seed, n_steps, rng):
    """n_steps random steps, a fresh arena of random shape every 2,000; fails with the seed and the last steps."""
    done = 0
    while done < n_steps:
        n_pages = rng.choice((1, 3, 5, 12))
        pair = Pair(
            n_pages, rng.choice((n_pages, 12)) if n_pages < 12 else 12, rng.choice((1, 2, 5)), rng.random() < 0.5
        )
        log = []
        for k in range(min(2000, n_steps - done)):
            try:
                log.append(random_step(pair, rng))
                pair.compare(deep=k % 8 == 0)
            except Exception as error:
                raise AssertionError(f"seed {seed}, step {done + k}, last steps {log[-5:]}: {error}") from error
        pair.compare(deep=True)
        pair.compare_contents()
        done += 2000
    gc.collect()
