"""The picture of the pool: counts, owners, shared and cached pages, copy on write."""

import base64
import json
import threading
from collections import Counter

import pytest
from fakes import paged_model

from pagedkv.core.kvcache import PagedKVCache
from pagedkv.engine.arena_map import CACHED, FREE, IN_USE, arena_map
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.params import SamplingParams

PAGE = 16


def make(n_pages=24, **settings):
    settings = {"max_model_len": 200, **settings}
    kv = PagedKVCache(1, 1, 16, n_pages=n_pages, format="f32", page_tokens=PAGE)
    return LLMEngine(paged_model(context_length=200, stop_token_ids=()), kv, **settings)


def params(max_tokens=20, **more):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **more)


def prompt(n, first=1):
    return [first + i % 5 for i in range(n)]


def picture(engine):
    """The map with its bytes decoded, after what must hold of every map was checked."""
    found = json.loads(json.dumps(arena_map(engine)))
    states, refs = (base64.b64decode(found[name], validate=True) for name in ("states", "refs"))
    stats = engine.stats()
    assert found["stats"] == stats
    assert found["pages_total"] == len(states) == len(refs) == stats["pages_total"]
    assert states.count(FREE) == stats["pages_free"]
    assert states.count(CACHED) == stats["pages_cached"]
    assert states.count(IN_USE) == stats["pages_in_use"]
    held = Counter(page for owner in found["owners"] for page in owner["pages"])
    assert [min(held[i], 255) for i in range(len(refs))] == list(refs)
    assert all((state == IN_USE) == (count > 0) for state, count in zip(states, refs, strict=True))
    assert len(found["queue"]) == stats["waiting"]
    assert sum(1 for owner in found["owners"]) == stats["running"]
    for owner in found["owners"]:
        assert len(owner["pages"]) == -(-owner["tokens"] // PAGE)
    return found | {"states": states, "refs": refs}


def run_out(engine):
    while engine.has_unfinished():
        engine.step()


def test_an_idle_pool_is_free():
    found = picture(make(n_pages=5))
    assert found["states"] == bytes(5) and found["refs"] == bytes(5)
    assert (found["owners"], found["queue"], found["page_tokens"]) == ([], [], PAGE)


def test_requests_are_named_with_their_pages():
    engine = make()
    engine.add_request(prompt(20), params(), request_id="short")
    engine.add_request(prompt(40, 9), params(), request_id="long")
    assert [(each["request_id"], each["tokens"]) for each in picture(engine)["queue"]] == [("short", 20), ("long", 40)]
    engine.step()
    found = picture(engine)
    owners = {owner["request_id"]: owner for owner in found["owners"]}
    assert [(name, owner["index"], owner["tokens"]) for name, owner in owners.items()] == [
        ("short", 0, 20), ("long", 0, 40)
    ]  # fmt: skip
    assert not set(owners["short"]["pages"]) & set(owners["long"]["pages"])
    assert found["states"].count(IN_USE) == 2 + 3 and max(found["refs"]) == 1
    run_out(engine)
    picture(engine)


def test_outputs_of_a_request_share_pages_until_they_write():
    """Three outputs stand on the two full pages of their prompt and on their own copies of the page they write to."""
    engine = make(enable_prefix_caching=False)
    engine.add_request(prompt(40), params(n=3), request_id="r")
    engine.step()
    found = picture(engine)
    assert sorted(found["refs"], reverse=True)[:4] == [3, 3, 3, 0]  # nobody has written behind the prompt yet
    engine.step()
    found = picture(engine)
    tables = [owner["pages"] for owner in found["owners"]]
    assert [owner["index"] for owner in found["owners"]] == [0, 1, 2]
    assert len({tuple(table[:2]) for table in tables}) == 1 and len({table[2] for table in tables}) == 3
    assert sorted(found["refs"], reverse=True)[:6] == [3, 3, 1, 1, 1, 0]
    run_out(engine)
    assert picture(engine)["states"] == bytes(24)


def test_cached_pages_and_their_second_life():
    engine = make()
    engine.add_request(prompt(40), params(4))
    run_out(engine)
    idle = picture(engine)
    cached = {i for i, state in enumerate(idle["states"]) if state == CACHED}
    assert len(cached) == 2 and idle["owners"] == []
    for name in "ab":
        engine.add_request([*prompt(40), 7], params(), request_id=name)
    engine.step()
    again = picture(engine)
    assert all(cached < set(owner["pages"]) for owner in again["owners"])
    assert {again["refs"][i] for i in cached} == {2} and {again["states"][i] for i in cached} == {IN_USE}


def test_preempted_requests_wait_without_pages():
    engine = make(n_pages=6, enable_prefix_caching=False)
    for name in ("first", "second"):
        engine.add_request(prompt(30), params(60), request_id=name)
    seen = set()
    while engine.has_unfinished():
        engine.step()
        found = picture(engine)
        if found["stats"]["preemptions"]:
            seen.add((tuple(o["request_id"] for o in found["owners"]), tuple(q["request_id"] for q in found["queue"])))
    assert (("first",), ("second",)) in seen


def test_an_abort_shows_at_once():
    engine = make()
    engine.add_request(prompt(30), params(), request_id="gone")
    engine.step()
    assert picture(engine)["owners"]
    engine.abort("gone")
    assert picture(engine)["owners"] == []


def test_it_changes_nothing():
    """Outputs, with a map taken before and after every step, are those without."""
    outputs = []
    for watched in (False, True):
        engine = make(n_pages=8)
        for first in (1, 5, 9):
            engine.add_request(prompt(30, first), params(30))
        done = {}
        while engine.has_unfinished():
            if watched:
                picture(engine)
            done |= {output.request_id: output.outputs for output in engine.step() if output.finished}
        outputs.append((done, engine.stats()))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("n_pages", [1, 100_000])
def test_sizes(n_pages):
    found = picture(make(n_pages=n_pages, max_model_len=16))
    assert len(found["states"]) == n_pages


def test_time_goes_forward():
    engine = make()
    times = [arena_map(engine)["time"] for _ in range(3)]
    assert times == sorted(times)


def test_others_may_queue_meanwhile():
    engine = make()
    adding = threading.Thread(
        target=lambda: [engine.add_request([1, 2], params(), request_id=str(i)) for i in range(500)]
    )
    adding.start()
    seen = []
    while not seen or seen[-1] < 500:
        found = arena_map(engine)
        assert len(found["queue"]) == found["stats"]["waiting"]
        assert [each["request_id"] for each in found["queue"]] == [str(i) for i in range(len(found["queue"]))]
        seen.append(len(found["queue"]))
    adding.join()
    assert seen == sorted(seen)
