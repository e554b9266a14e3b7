"""A picture of the page pool: what every page is, and which request holds which pages."""

import base64
import time
from typing import TYPE_CHECKING, Any

from ..core.page_map import page_map

if TYPE_CHECKING:
    from .engine import LLMEngine

# From the arena's order (free, in use, cached) to one that rises with how much a page is needed.
FREE, CACHED, IN_USE = 0, 1, 2
_STATES = bytes([FREE, IN_USE, CACHED]) + bytes([IN_USE]) * 253


def arena_map(engine: "LLMEngine") -> dict[str, Any]:
    """The state of the pool between two steps, made of what JSON can hold. Changes nothing.

    time         seconds on a clock that never goes back
    pages_total  number of pages; page_tokens: tokens of each
    states       base64 of one byte a page: 0 free, 1 cached, 2 in use
    refs         base64 of one byte a page: how many page tables hold it, 255 for that many or more
    owners       for each branch that holds pages, in the scheduler's order: request_id, index (of the output), pages
                 (its page table), tokens (with K/V in them)
    queue        the same without pages for each branch that waits; tokens is what it has to compute
    stats        engine.stats() of the same moment

    Any thread; waits for the end of a running step. O(pages), about 3 ms for 100,000 of them.
    """
    return engine.between_steps(_picture, engine)


def _picture(engine: "LLMEngine") -> dict[str, Any]:
    states, refs = page_map(engine.kv)
    owners = [
        {**_name(branch), "pages": branch.seq.page_table, "tokens": len(branch.seq)}
        for branch in engine.scheduler.running
        if branch.seq is not None
    ]
    with engine.intake.lock:  # others may be adding
        waiting = [*engine.scheduler.waiting, *(request.branches[0] for request in engine.intake.incoming)]
        stats = engine.stats()
    return {
        "time": time.monotonic(),
        "pages_total": len(states),
        "page_tokens": engine.kv.page_tokens,
        "states": base64.b64encode(states.translate(_STATES)).decode("ascii"),
        "refs": base64.b64encode(refs).decode("ascii"),
        "owners": owners,
        "queue": [{**_name(branch), "tokens": len(branch.tokens)} for branch in waiting],
        "stats": stats,
    }


def _name(branch: Any) -> dict[str, Any]:
    return {"request_id": branch.request.request_id, "index": branch.index}
