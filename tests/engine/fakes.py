"""A tiny deterministic model over a paged cache in pure Python, to test the engine without the core.

The K/V cell of a token mixes the token, its position and every cell before it, read through the page table; logits are
drawn from the fold of all cells. A wrong, stale, shared or missing page therefore changes what comes out.
"""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

from pagedkv.core.errors import PoolExhausted, SequenceFull

MASK = 2**64 - 1


def mix(x):
    """SplitMix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class FakeKV:
    """The contract of PagedKVCache: pages of `page_tokens` cells, refcounts, copy on write, freed pages poisoned."""

    def __init__(self, n_pages, page_tokens=4, max_pages=None):
        self.n_pages = n_pages
        self.page_tokens = page_tokens
        self.page_bytes = page_tokens * 8
        self.max_pages = max_pages or n_pages
        self.cells = [[0xDEAD] * page_tokens for _ in range(n_pages)]
        self.refs = [0] * n_pages
        self.free_list = list(range(n_pages))
        self.live = set()

    @property
    def n_free(self):
        return len(self.free_list)

    n_cached = 0

    @property
    def n_in_use(self):
        return self.n_pages - len(self.free_list)

    def sequence(self, max_pages=None):
        return FakeSequence(self, max_pages or self.max_pages)

    def refcount(self, page):
        return self.refs[page]

    def take(self):
        page = self.free_list.pop(0)
        self.refs[page] = 1
        return page

    def drop(self, page):
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self.cells[page] = [0xDEAD + page] * self.page_tokens
            self.free_list.append(page)

    def check(self, level=3):
        found = []
        held = [0] * self.n_pages
        for seq in self.live:
            for page in seq.page_table:
                held[page] += 1
        if held != self.refs:
            found.append(f"refcounts {self.refs} but page tables hold {held}")
        if sorted(self.free_list) != [page for page, count in enumerate(held) if count == 0]:
            found.append(f"free list {sorted(self.free_list)} is not the pages nobody holds")
        return found

    def close(self):
        self.live.clear()


class FakeSequence:
    def __init__(self, kv, max_pages):
        self.kv = kv
        self.max_pages = max_pages
        self.page_table = []
        self.n = 0
        kv.live.add(self)

    def __len__(self):
        return self.n

    def extend(self, n):
        kv, size = self.kv, self.kv.page_tokens
        copy = self.n % size != 0 and kv.refs[self.page_table[-1]] > 1
        total = -(-(self.n + n) // size)
        if total > self.max_pages:
            raise SequenceFull("full")
        if total - len(self.page_table) + copy > kv.n_free:
            raise PoolExhausted("exhausted")
        if copy:
            page = kv.take()
            kv.cells[page] = list(kv.cells[self.page_table[-1]])
            kv.drop(self.page_table[-1])
            self.page_table[-1] = page
        while len(self.page_table) < total:
            self.page_table.append(kv.take())
        start, self.n = self.n, self.n + n
        return start

    def truncate(self, n):
        keep = -(-n // self.kv.page_tokens)
        for page in self.page_table[keep:]:
            self.kv.drop(page)
        del self.page_table[keep:]
        self.n = n

    def snapshot(self):
        twin = FakeSequence(self.kv, self.max_pages)
        twin.page_table, twin.n = list(self.page_table), self.n
        for page in self.page_table:
            self.kv.refs[page] += 1
        return twin

    def free(self):
        self.truncate(0)
        self.kv.live.discard(self)

    def cell(self, i):
        return self.kv.cells[self.page_table[i // self.kv.page_tokens]][i % self.kv.page_tokens]

    def put(self, i, value):
        page = self.page_table[i // self.kv.page_tokens]
        assert self.kv.refs[page] == 1, f"write to page {page}, which {self.kv.refs[page]} tables hold"
        self.kv.cells[page][i % self.kv.page_tokens] = value


def successor(token):
    """1 to 5 in a circle, 6 to 10 in a circle, and so on."""
    return token - 4 if token % 5 == 0 and token else token + 1


class FakeForward:
    """The contract of ForwardModel. `sharpness` spreads the logits; `poison` maps a token to the value its row gets;
    `echo` is added to the logit of one token that depends on the last alone, so that outputs run in cycles of five."""

    isa = "fake"
    n_threads = 1
    hidden_size = 4

    def __init__(self, vocab_size=61, sharpness=2.0):
        self.vocab_size = vocab_size
        self.vocab_padded = -(-vocab_size // 16) * 16
        self.sharpness = sharpness
        self.poison = {}
        self.echo = 0.0
        self.interrupt_at = None
        self.steps = []

    def run(self, kv, seqs, token_ids, q_lens, logit_rows, logits, hidden=None):
        assert token_ids.dtype == q_lens.dtype == logit_rows.dtype == np.int32 and logits.dtype == np.float32
        assert len(seqs) == len(q_lens) and q_lens.sum() == len(token_ids) and (q_lens > 0).all()
        n_logits = len(logit_rows) if hidden is None else len(logits)
        assert logits.shape == (n_logits, self.vocab_padded) and logits.flags.c_contiguous
        assert hidden is None or (hidden.shape == (len(logit_rows), self.hidden_size) and n_logits < len(hidden))
        assert list(logit_rows) == sorted(set(logit_rows.tolist())) and len({id(s) for s in seqs}) == len(seqs)
        self.steps.append([int(n) for n in q_lens])
        if self.interrupt_at == len(self.steps):
            raise KeyboardInterrupt
        wanted = {int(row): i for i, row in enumerate(logit_rows)}
        row = 0
        for seq, n in zip(seqs, q_lens, strict=True):
            start = len(seq) - int(n)
            fold = 0
            for i in range(len(seq)):
                if i >= start:
                    token = int(token_ids[row])
                    seq.put(i, mix(fold ^ (token * 1000003 + i)))
                fold = (fold * 0x100000001B3 + seq.cell(i)) & MASK
                if i >= start:
                    at = wanted.get(row, len(logit_rows))
                    if at < n_logits:
                        logits[at] = self.row(fold, token)
                        if token in self.poison:
                            logits[at, 3] = self.poison[token]
                    if hidden is not None and at < len(hidden):
                        hidden[at] = self.hidden_row(fold, token)
                    row += 1

    def row(self, fold, token):
        bits = np.random.default_rng(fold).normal(0, self.sharpness, self.vocab_padded).astype(np.float32)
        bits[successor(token)] += self.echo
        bits[self.vocab_size :] = np.nan
        return bits

    def hidden_row(self, fold, token):
        """Four numbers of very different size, so that the order in which they are added up shows in their sum."""
        digits = [(mix(fold) >> shift & 0xFFFF) - 32768.0 for shift in (0, 16, 32, 48)]
        return np.float32(digits) * np.float32(1.7 ** (fold % 61 - 30)) + np.float32(self.poison.get(token, 0.0))

    def solo_embedding(self, tokens):
        """The mean of the rows of all `tokens` in float64, added up in order, divided by its length."""
        fold, total = 0, [0.0] * self.hidden_size
        for i, token in enumerate(tokens):
            fold = (fold * 0x100000001B3 + mix(fold ^ (token * 1000003 + i))) & MASK
            total = [a + float(b) for a, b in zip(total, self.hidden_row(fold, token), strict=True)]
        mean = [value / len(tokens) for value in total]
        length = sum(Fraction(value * value) for value in mean)
        return np.array([value / math.sqrt(length) for value in mean], np.float32)

    def solo_logits(self, tokens):
        """Logits behind the last of `tokens`, without any cache."""
        fold = 0
        for i, token in enumerate(tokens):
            fold = (fold * 0x100000001B3 + mix(fold ^ (token * 1000003 + i))) & MASK
        return self.row(fold, tokens[-1])[: self.vocab_size]

    def close(self):
        pass


class FakeTokenizer:
    """Token i is the i-th of a few short texts, one of them half a character; 0 is the end of text."""

    strips_first_space = False
    max_token_chars = 3
    alphabet = "abcdefghijklmnopqrstuvwxyz .,é世"

    def __init__(self, vocab_size=61):
        pieces = [b"", *(c.encode() for c in self.alphabet), "é".encode()[:1], "é".encode()[1:], b"ab", b"abc", b"xyz"]
        self.pieces = list(itertools.islice(itertools.chain(pieces, (b"q%d" % i for i in range(1000))), vocab_size))
        self.vocab_size = vocab_size
        self.special_ids = frozenset([0])

    def token_bytes(self, token, skip_special_tokens=True):
        return b"" if token == 0 and skip_special_tokens else (b"<end>" if token == 0 else self.pieces[token])

    def encode(self, text, add_special_tokens=True, allow_special=False):
        return [1 + self.alphabet.index(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode("utf-8", "replace")

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return "".join(f"{m['role']}. {m['content']}." for m in messages)

    def encode_chat(self, messages, add_generation_prompt=True):
        return self.encode(self.apply_chat_template(messages))


def fake_model(vocab_size=61, context_length=64, stop_token_ids=(0,), sharpness=2.0):
    return SimpleNamespace(
        name="fake",
        config=SimpleNamespace(
            context_length=context_length,
            stop_token_ids=tuple(stop_token_ids),
            n_layers=1,
            n_heads=36,
            n_kv_heads=1,
            head_dim=16,
            ropes=(),
            vocab_size=vocab_size,
        ),
        tokenizer=FakeTokenizer(vocab_size),
        forward=FakeForward(vocab_size, sharpness),
        close=lambda: None,
    )


class PagedForward(FakeForward):
    """The same model over a real PagedKVCache (f32, one layer, one head of 16): a cell is four 16-bit digits of K."""

    def run(self, kv, seqs, token_ids, q_lens, logit_rows, logits, hidden=None):
        n_logits = len(logit_rows) if hidden is None else len(logits)
        self.steps.append([int(n) for n in q_lens])
        wanted = {int(row): i for i, row in enumerate(logit_rows)}
        row = 0
        for seq, n in zip(seqs, q_lens, strict=True):
            start = len(seq) - int(n)
            for page in seq.page_table[start // kv.page_tokens :]:
                assert kv.refcount(page) == 1, f"page {page} is written and held by {kv.refcount(page)} tables"
            digits = seq.gather(0)[0][:, 0, :4]
            fold, new = 0, np.zeros((int(n), 1, 16), np.float32)
            for i in range(len(seq)):
                if i >= start:
                    cell = mix(fold ^ (int(token_ids[row]) * 1000003 + i))
                    new[i - start, 0, :4] = [cell >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
                else:
                    cell = sum(int(digit) << shift for digit, shift in zip(digits[i], (0, 16, 32, 48), strict=True))
                fold = (fold * 0x100000001B3 + cell) & MASK
                if i >= start:
                    at = wanted.get(row, len(logit_rows))
                    if at < n_logits:
                        logits[at] = self.row(fold, int(token_ids[row]))
                    if hidden is not None and at < len(hidden):
                        hidden[at] = self.hidden_row(fold, int(token_ids[row]))
                    row += 1
            seq.write_kv(0, start, new, new)


def paged_model(**settings):
    """fake_model() computing over a PagedKVCache(1, 1, 16, format="f32", ...)."""
    model = fake_model(**settings)
    model.forward = PagedForward(model.forward.vocab_size, model.forward.sharpness)
    return model
