"""The one place where requests meet the prefix index."""

import hashlib
from array import array
from typing import Any

from ..core.errors import PoolExhausted
from ..core.prefix import PrefixIndex
from .request import Branch

INT32_STOP = 2**31


class PrefixCache:
    """Full pages of finished and running branches, findable by the tokens that made them (and their request's salt).

    Every hit compares tokens, so a page is only ever used for the very tokens it was computed from; since K/V of equal
    tokens are equal bit for bit, whether a prefix was cached never changes an output.
    """

    def __init__(self, kv: Any, vocab_size: int) -> None:
        self._index = PrefixIndex(kv, kv.page_tokens)
        self._page_tokens = kv.page_tokens
        self._vocab_size = vocab_size

    def attach(self, branch: Branch) -> int:
        """Put known full pages under the branch's fresh, empty sequence; returns how many tokens of them it has. At
        least one token is left to compute: where the pages hold all, the last one is copied, since a shared page is
        never written to. A prompt whose logprobs are still wanted is computed whole."""
        request, n = branch.request, len(branch.tokens)
        if request.prompt_rows_wanted(0, n):
            return 0
        found = self._index.match(branch.seq, self._keys(branch, n)) * self._page_tokens
        return found if found < n else self._without_last(branch.seq, n)

    def _without_last(self, seq: Any, n: int) -> int:
        """Cut the last of n tokens off `seq`, whose pages are all shared, and give it a last page of its own; without
        room for a copy, cut off the whole page. Returns the tokens that stay. A second holder keeps the shared page,
        and the pages indexed behind it, from being forgotten as one that is about to change."""
        holder = seq.snapshot()
        seq.truncate(n - 1)
        try:
            seq.extend(1)
            seq.truncate(n - 1)
        except PoolExhausted:
            seq.truncate(n - self._page_tokens)
        finally:
            holder.free()
        return len(seq)

    def publish(self, branch: Branch) -> None:
        """Make the full pages of the branch's computed tokens findable. A page that is known already under another
        number is exchanged for that one, which frees it."""
        n_full = len(branch.seq) // self._page_tokens
        if n_full > branch.n_published:
            self._index.insert(branch.seq, self._keys(branch, n_full * self._page_tokens))
            branch.n_published = n_full

    def _keys(self, branch: Branch, n: int) -> array:
        """The branch's first n tokens. A salt is written above the vocabulary into the first page's tokens, which keeps
        all pages that follow apart as well."""
        keys = branch.tokens[:n]
        salt = branch.request.salt
        if salt:
            number = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=16).digest())
            base = INT32_STOP // self._vocab_size
            for i in range(min(n, self._page_tokens)):
                number, digit = divmod(number, base)
                keys[i] += digit * self._vocab_size
        return keys
