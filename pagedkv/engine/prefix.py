"""The one place where the scheduler meets the prefix cache."""

from typing import Any, Protocol

from .request import Branch


class PrefixCache(Protocol):
    """Finds pages that already hold the K/V of a branch's first tokens."""

    n_hit_tokens: int
    n_query_tokens: int

    def attach(self, branch: Branch) -> int:
        """Put cached full pages under the branch's fresh, empty sequence; returns how many tokens they hold. At least
        one token is left to compute, so a shared page is never written to."""
        ...

    def publish(self, branch: Branch) -> None:
        """Make the full pages of the branch's computed tokens findable. Never changes the pages."""
        ...

    def n_available(self, kv: Any, branch: Branch) -> int:
        """Pages the branch can count on when admitted: free ones, idle cached ones, and cached ones it reuses."""
        ...


class NoPrefixCache:
    """Every prompt is computed."""

    n_hit_tokens = 0
    n_query_tokens = 0

    def attach(self, branch: Branch) -> int:
        """0: nothing is cached."""
        return 0

    def publish(self, branch: Branch) -> None:
        """Nothing is kept."""

    def n_available(self, kv: Any, branch: Branch) -> int:
        """The free pages."""
        return kv.n_free
