"""The one place where requests meet the prefix index."""

import hashlib
from array import array
from typing import Any

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
        """Put known full pages under the branch's fresh, empty sequence; returns how many tokens they hold. At least
        one token is left to compute, so a shared page is never written to. A prompt whose logprobs are still wanted is
        computed whole."""
        request = branch.request
        if request.prompt_rows_wanted(0, len(branch.tokens)):
            return 0
        return self._index.match(branch.seq, self._keys(branch, len(branch.tokens) - 1)) * self._page_tokens

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
