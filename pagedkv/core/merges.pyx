"""Merging text by the scores of tokens, as SentencePiece's BPE does: two neighbours join where their text is a token.

The pair whose joined token has the highest score joins first; of equal scores the pair with the longer left part, then
the one with the longer right part, the lower joined id, the place further left. No table of pairs is built: whether two
tokens join is one look into a hash table of the tokens' texts, so that a vocabulary costs its own size and a few
milliseconds.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memset

import os

import numpy as np

PART, WHOLE, MATCHED = _PART, _WHOLE, _MATCHED
MAX_CHARACTERS = _MAX_CHARACTERS

cdef enum:
    _PART = 1               # may stand in a text
    _WHOLE = 2              # two neighbours may join to it
    _MATCHED = 4            # found in a text before anything is merged
    _MAX_CHARACTERS = 512   # of a token
    MAX_TOKENS = 1 << 21
    MAX_TEXT = 1 << 28
    N_LENGTHS = 4 * _MAX_CHARACTERS + 1
    # a key: rank of the score, then the rest of the order; each length is stored as its distance to 1023
    LENGTH_BITS = 10
    ID_BITS = 21

cdef struct Slot:
    uint32_t tag    # high bits of the hash
    int32_t token   # -1: empty

cdef struct Join:
    uint64_t key
    int32_t place

cdef struct Symbol:
    int32_t token       # -1: joined to the one before
    int32_t before      # -1: none
    int32_t after

cdef const char *SPACE = b"\xe2\x96\x81"     # U+2581


cdef inline uint64_t key_of(int64_t rank, int64_t left, int64_t right, int64_t whole) noexcept nogil:
    return (<uint64_t>rank << (ID_BITS + 2 * LENGTH_BITS) | <uint64_t>(1023 - left) << (ID_BITS + LENGTH_BITS)
            | <uint64_t>(1023 - right) << ID_BITS | <uint64_t>whole)


cdef inline bint earlier(const Join *a, const Join *b) noexcept nogil:
    return a.key < b.key or (a.key == b.key and a.place < b.place)


cdef void push(Join *heap, int64_t n, Join one) noexcept nogil:
    """Add to a heap of n."""
    cdef int64_t i = n
    while i and earlier(&one, &heap[(i - 1) >> 1]):
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    heap[i] = one


cdef Join pop(Join *heap, int64_t n) noexcept nogil:
    """Take the first of a heap of n >= 1."""
    cdef Join first = heap[0]
    cdef Join last = heap[n - 1]
    cdef int64_t i = 0, child = 1
    while child < n - 1:
        if child + 1 < n - 1 and earlier(&heap[child + 1], &heap[child]):
            child += 1
        if not earlier(&heap[child], &last):
            break
        heap[i] = heap[child]
        i = child
        child = 2 * i + 1
    heap[i] = last
    return first


@cython.final
cdef class ScoredMerges:
    """The tokens of one vocabulary. Immutable after construction and safe to use from several threads."""

    cdef bytes _text
    cdef const char *_data
    cdef int64_t[::1] _ends
    cdef int32_t[::1] _lengths      # characters
    cdef int32_t[::1] _ranks
    cdef uint8_t[::1] _roles
    cdef uint64_t[::1] _hashes
    cdef object _slots_owner
    cdef Slot *_slots
    cdef uint64_t _mask, _seed, _factor
    cdef int32_t[256] _byte_tokens
    cdef uint8_t[256] _match_starts
    cdef uint8_t[N_LENGTHS] _match_lengths
    cdef int64_t _longest_match
    cdef int32_t _unknown

    def __init__(self, bytes text not None, ends, ranks, roles, int unknown=-1):
        """text: the UTF-8 of all tokens, one after the other. ends: int64 [n], where each ends. ranks: int32 [n], the
        place of each token's score among all scores, highest first, equal for equal scores. roles: uint8 [n] of PART,
        WHOLE, MATCHED. unknown: id of what stands for characters without tokens, -1: they are left out.

        Of equal texts the lowest id with PART counts. Copies what it keeps. ValueError naming id and bound for more
        than 2^21 tokens, a token of more than 512 characters, or arrays that do not fit each other.
        """
        cdef int64_t n, i, start, size
        self._text, self._data = text, PyBytes_AS_STRING(text)
        self._ends = np.array(ends, np.int64)
        self._ranks = np.array(ranks, np.int32)
        self._roles = np.array(roles, np.uint8)
        n = self._ends.shape[0]
        if n > MAX_TOKENS or self._ranks.shape[0] != n or self._roles.shape[0] != n:
            raise ValueError(
                f"ends, ranks, roles: {n}, {len(ranks)} and {len(roles)}, must be as many, at most {MAX_TOKENS}"
            )
        if n and (self._ends[n - 1] != len(text) or self._ends[0] < 0 or np.any(np.diff(self._ends) < 0)):
            raise ValueError(f"ends: do not rise to the {len(text)} bytes of text")
        if n and not (0 <= np.min(self._ranks) and np.max(self._ranks) < MAX_TOKENS):
            raise ValueError(f"ranks: not all in [0, {MAX_TOKENS})")
        if not -1 <= unknown < n:
            raise ValueError(f"unknown: {unknown} is not in [-1, {n})")
        self._unknown = unknown
        self._lengths = np.empty(n, np.int32)
        self._hashes = np.empty(n, np.uint64)
        self._seed, self._factor = np.frombuffer(os.urandom(16), np.uint64)
        self._factor |= 1
        size = 16
        while size < 2 * n:
            size *= 2
        self._mask = size - 1
        self._slots_owner = np.empty(size * sizeof(Slot), np.uint8)
        self._slots = <Slot *><size_t>self._slots_owner.ctypes.data
        memset(self._slots, 0xFF, size * sizeof(Slot))
        memset(self._match_starts, 0, sizeof(self._match_starts))
        memset(self._match_lengths, 0, sizeof(self._match_lengths))
        self._longest_match = 0
        for i in range(n):
            start = self._ends[i - 1] if i else 0
            self._lengths[i] = characters(self._data + start, self._ends[i] - start)
            if self._lengths[i] > _MAX_CHARACTERS:
                raise ValueError(f"tokens[{i}]: {self._lengths[i]} characters, at most {_MAX_CHARACTERS} are allowed")
        with nogil:
            for i in range(n):
                self._add(i)
        for i in range(256):
            name = b"<0x%02X>" % i
            self._byte_tokens[i] = self._find(name, len(name))

    def encode(self, str text not None, bint prefix) -> list:
        """Token ids of `text`. prefix: a space of the tokenizer's own begins each stretch between matched tokens.

        Spaces are looked up as U+2581. Releases the GIL. UnicodeEncodeError for lone surrogates, MemoryError.
        """
        cdef bytes raw = text.encode()
        cdef const char *data = PyBytes_AS_STRING(raw)
        cdef int64_t n = PyBytes_GET_SIZE(raw), found
        # A byte becomes at most the three of U+2581, and as many begin a stretch, which has a byte of its own. Of the
        # joins offered, each symbol is left of one at first, and each join done takes one out and offers two.
        cdef int64_t most = 6 * n + 1
        if n > MAX_TEXT:
            raise ValueError(f"text: {n} bytes, at most {MAX_TEXT} are merged")
        cdef int32_t *ids = <int32_t *>malloc(most * sizeof(int32_t))
        cdef Symbol *symbols = <Symbol *>malloc(most * sizeof(Symbol))
        cdef Join *heap = <Join *>malloc(2 * most * sizeof(Join))
        try:
            if ids == NULL or symbols == NULL or heap == NULL:
                raise MemoryError(f"text: no memory to merge {n} bytes")
            with nogil:
                found = self._encode(data, n, prefix, ids, symbols, heap)
            return [ids[i] for i in range(found)]
        finally:
            free(ids)
            free(symbols)
            free(heap)

    cdef inline uint64_t _hash(self, uint64_t h, const char *data, int64_t n) noexcept nogil:
        """The hash of a text continued by data[n]. Its key is random: no file can make its tokens collide."""
        cdef int64_t i
        for i in range(n):
            h = (h ^ <uint8_t>data[i]) * self._factor
            h ^= h >> 29
        return h

    cdef inline const char *_start(self, int64_t token) noexcept nogil:
        return self._data + (self._ends[token - 1] if token else 0)

    cdef inline int64_t _bytes(self, int64_t token) noexcept nogil:
        return self._ends[token] - (self._ends[token - 1] if token else 0)

    cdef int32_t _seek(self, uint64_t h, const char *left, int64_t n, const char *right, int64_t m,
                       uint64_t *place) noexcept nogil:
        """The token with the text left[n] right[m] of hash h, or -1 and the empty slot where it would stand."""
        cdef uint64_t i = h & self._mask
        cdef int32_t token
        while self._slots[i].token >= 0:
            token = self._slots[i].token
            if self._slots[i].tag == <uint32_t>(h >> 32) and self._bytes(token) == n + m:
                if not memcmp(self._start(token), left, n) and not memcmp(self._start(token) + n, right, m):
                    return token
            i = (i + 1) & self._mask
        place[0] = i
        return -1

    cdef int32_t _find(self, const char *data, int64_t n) noexcept nogil:
        cdef uint64_t place
        return self._seek(self._hash(self._seed, data, n), data, n, data, 0, &place)

    cdef void _add(self, int64_t token) noexcept nogil:
        """Hash a token and, if it may stand in a text, put it into the table."""
        cdef const char *data = self._start(token)
        cdef int64_t n = self._bytes(token)
        cdef uint64_t place
        cdef uint64_t h = self._hash(self._seed, data, n)
        self._hashes[token] = h
        if n == 0 or not self._roles[token] & _PART:
            return
        if self._seek(h, data, n, data, 0, &place) < 0:
            self._slots[place].tag = <uint32_t>(h >> 32)
            self._slots[place].token = <int32_t>token
        if self._roles[token] & _MATCHED:
            self._match_starts[<uint8_t>data[0]] = 1
            self._match_lengths[n] = 1
            self._longest_match = max(self._longest_match, n)

    cdef int32_t _match(self, const char *data, int64_t n) noexcept nogil:
        """The longest matched token that data[n] begins with, or -1."""
        cdef int32_t longest = -1, token
        cdef int64_t k
        cdef uint64_t place, h = self._seed
        if not self._match_starts[<uint8_t>data[0]]:
            return -1
        for k in range(1, min(n, self._longest_match) + 1):
            h = self._hash(h, data + k - 1, 1)
            if self._match_lengths[k]:
                token = self._seek(h, data, k, data, 0, &place)
                if token >= 0 and self._roles[token] & _MATCHED:
                    longest = token
        return longest

    cdef int64_t _encode(self, const char *data, int64_t n, bint prefix, int32_t *ids, Symbol *symbols,
                         Join *heap) noexcept nogil:
        cdef int64_t start = 0, i = 0, found = 0
        cdef int32_t token
        while i < n:
            token = self._match(data + i, n - i)
            if token < 0:
                i += 1
                continue
            found += self._merge(data + start, i - start, prefix, ids + found, symbols, heap)
            ids[found] = token
            found += 1
            i += self._bytes(token)
            start = i
        return found + self._merge(data + start, n - start, prefix, ids + found, symbols, heap)

    cdef int64_t _merge(self, const char *data, int64_t n, bint prefix, int32_t *ids, Symbol *symbols,
                        Join *heap) noexcept nogil:
        """Write the ids of one stretch of text; returns how many. """
        cdef int64_t n_symbols = self._split(data, n, prefix, symbols)
        cdef int64_t n_joins = 0, i, after, found = 0
        cdef Join join
        for i in range(n_symbols - 1):
            n_joins += self._offer(symbols, i, heap, n_joins)
        while n_joins:
            join = pop(heap, n_joins)
            n_joins -= 1
            i = join.place
            # a symbol that joined since it was offered is longer now, or gone
            if symbols[i].token < 0 or symbols[i].after < 0 or self._key(symbols, i) != join.key:
                continue
            after = symbols[i].after
            symbols[i].token = <int32_t>(join.key & ((1 << ID_BITS) - 1))
            symbols[i].after = symbols[after].after
            symbols[after].token = -1
            if symbols[i].after >= 0:
                symbols[symbols[i].after].before = <int32_t>i
                n_joins += self._offer(symbols, i, heap, n_joins)
            if symbols[i].before >= 0:
                n_joins += self._offer(symbols, symbols[i].before, heap, n_joins)
        i = 0 if n_symbols else -1
        while i >= 0:
            ids[found] = symbols[i].token
            found += 1
            i = symbols[i].after
        return found

    cdef uint64_t _key(self, const Symbol *symbols, int64_t i) noexcept nogil:
        """The key of the join of symbol i and the one after it; all ones where they do not join."""
        cdef int32_t left = symbols[i].token, right = symbols[symbols[i].after].token, whole
        cdef uint64_t place
        cdef int64_t n = self._bytes(left), m = self._bytes(right)
        whole = self._seek(self._hash(self._hashes[left], self._start(right), m), self._start(left), n,
                           self._start(right), m, &place)
        if whole < 0 or not self._roles[whole] & _WHOLE:
            return <uint64_t>-1
        return key_of(self._ranks[whole], self._lengths[left], self._lengths[right], whole)

    cdef int64_t _offer(self, const Symbol *symbols, int64_t i, Join *heap, int64_t n) noexcept nogil:
        """Push the join of symbol i and the one after it onto a heap of n; returns 1, or 0 where they do not join."""
        cdef Join join
        join.key, join.place = self._key(symbols, i), <int32_t>i
        if join.key == <uint64_t>-1:
            return 0
        push(heap, n, join)
        return 1

    cdef int64_t _split(self, const char *data, int64_t n, bint prefix, Symbol *symbols) noexcept nogil:
        """The symbols that merging begins with; returns how many."""
        cdef int64_t i = 0, size, found = 0
        cdef bint unknown = False
        if prefix and n:
            found = self._symbol(SPACE, 3, symbols, found, &unknown)
        while i < n:
            size = 1
            while i + size < n and <uint8_t>data[i + size] >> 6 == 2:
                size += 1
            if data[i] == 32:
                found = self._symbol(SPACE, 3, symbols, found, &unknown)
            else:
                found = self._symbol(data + i, size, symbols, found, &unknown)
            i += size
        for i in range(found):
            symbols[i].before, symbols[i].after = <int32_t>(i - 1), <int32_t>(i + 1)
        if found:
            symbols[found - 1].after = -1
        return found

    cdef int64_t _symbol(self, const char *data, int64_t n, Symbol *symbols, int64_t found,
                         bint *unknown) noexcept nogil:
        """Append a character of n bytes: its token, else those of its bytes, else the unknown token, one for a run of
        such characters. Returns the new count; *unknown: whether the character before was unknown."""
        cdef int32_t token = self._find(data, n)
        cdef int64_t i
        cdef bint was_unknown = unknown[0]
        unknown[0] = False
        if token >= 0:
            symbols[found].token = token
            return found + 1
        for i in range(n):
            symbols[found + i].token = self._byte_tokens[<uint8_t>data[i]]
            unknown[0] = unknown[0] or symbols[found + i].token < 0
        if not unknown[0]:
            return found + n
        if self._unknown < 0 or was_unknown:
            return found
        symbols[found].token = self._unknown
        return found + 1


cdef int32_t characters(const char *data, int64_t n) noexcept nogil:
    """Characters of UTF-8 text."""
    cdef int64_t i
    cdef int32_t count = 0
    for i in range(n):
        count += <uint8_t>data[i] >> 6 != 2
    return count
