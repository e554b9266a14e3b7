"""Forks of the process: they wait for what must be whole in the child, and tell it that it is one."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol


class Forked(Protocol):
    """What watch() takes. The three are called by the forking thread, around every fork of the process."""

    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...
    def after_fork_in_child(self) -> None: ...


_registry = threading.Lock()
_watched: "weakref.WeakKeyDictionary[Forked, int]" = weakref.WeakKeyDictionary()
_n_watched = 0
_held: list[Forked] = []


def watch(thing: Forked) -> None:
    """Call the three methods of `thing` around forks, for as long as it lives. Who came last is asked first before a
    fork and told last after it, so what stands on others may take its lock before theirs."""
    global _n_watched
    with _registry:
        _watched[thing] = _n_watched
        _n_watched += 1


def _before() -> None:
    _registry.acquire()
    for thing in sorted(_watched, key=lambda thing: -_watched[thing]):
        thing.before_fork()
        _held.append(thing)


def _after(tell: Callable[[Forked], None]) -> None:
    try:
        while _held:
            tell(_held.pop())
    finally:
        _held.clear()
        _registry.release()


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(lambda thing: thing.after_fork_in_parent()),
    after_in_child=lambda: _after(lambda thing: thing.after_fork_in_child()),
)
