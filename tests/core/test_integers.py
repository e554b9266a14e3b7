"""Where pages, counts and ids are asked for, only integers are taken; what else comes is refused by name."""

import numpy as np
import pytest

from pagedkv import Arena, BadInput, PrefixIndex

CALLS = {
    "n_pages": lambda w, x: Arena(x, 64),
    "page_bytes": lambda w, x: Arena(4, x),
    "max_pages of an arena": lambda w, x: Arena(1, 64, max_pages=x),
    "growth_pages": lambda w, x: Arena(1, 64, max_pages=4, growth_pages=x),
    "refcount": lambda w, x: w.arena.refcount(x),
    "page": lambda w, x: w.arena.page(x),
    "reserve": lambda w, x: w.arena.reserve(x),
    "max_pages of a sequence": lambda w, x: w.arena.sequence(1, max_pages=x),
    "seq_id": lambda w, x: w.arena.sequence(x),
    "append_pages": lambda w, x: w.seq.append_pages(x),
    "share_page": lambda w, x: w.seq.share_page(x),
    "share_pages": lambda w, x: w.seq.share_pages([0, x]),
    "write_page": lambda w, x: w.seq.write_page(x),
    "truncate_pages": lambda w, x: w.seq.truncate_pages(x),
    "page_tokens": lambda w, x: PrefixIndex(w.arena, x),
    "seed": lambda w, x: PrefixIndex(w.arena, 4, seed=x),
}


class World:
    def __init__(self):
        self.arena = Arena(8, 64)
        self.seq = self.arena.sequence(7)
        self.seq.append_pages(2)

    def state(self):
        return self.seq.page_table, [self.arena.refcount(i) for i in range(8)], self.arena.n_free


@pytest.mark.parametrize("value", [1.0, 0.5, "1", None, [1], float("nan")], ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_integer_is_refused(call, value):
    if value is None and call in ("max_pages of an arena", "growth_pages"):
        return  # which mean: as many as there are
    world = World()
    before = world.state()
    with pytest.raises(BadInput, match=r"^\w[\w ]*: .* is not an integer$"):
        CALLS[call](world, value)
    assert world.state() == before and world.arena.check() == []


@pytest.mark.parametrize("call", CALLS)
def test_integers_of_other_kinds_are_taken(call):
    CALLS[call](World(), np.int64(1))
