"""A child of a fork has none of the other threads: nothing waits for them, counts them, or keeps pages for them."""

import os
import signal
import threading
import traceback

import numpy as np
import pytest
from kv import fill, make
from raw_api import RawApi, field

from pagedkv import Arena, BadInput

FORKS = 10


def child(work):
    """Fork, run work() in the child, wait for it; its exit status, 0 when all went well."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def beside():
    """beside(call) repeats call() in a thread until the test ends."""
    stop, threads = threading.Event(), []

    def start(call):
        def work():
            while not stop.is_set():
                call()

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join()


def test_calls_of_other_threads_do_not_keep_a_cache_open(beside):
    kv = make(n_pages=40)
    seq = kv.sequence()
    fill(seq, 600)
    q = np.ones((600, 3, 20), np.float32)
    beside(lambda: kv.attend(0, q, [seq], [600]))

    def work():
        assert kv.is_valid()
        kv.close()
        assert not kv.is_valid()

    assert [child(work) for _ in range(FORKS)] == [0] * FORKS


def test_a_child_counts_its_own_calls():
    """Begun before the fork or after it, each is counted where it runs."""
    kv = make(n_pages=4)
    seq = kv.sequence()
    fill(seq, 30)
    kv.attend(0, np.ones((1, 3, 20), np.float32), [seq], [1])

    def work():
        kv.attend(0, np.ones((1, 3, 20), np.float32), [seq], [1])
        seq.gather(0)
        kv.close()

    assert child(work) == 0


def test_views_are_objects_and_live_on_in_the_child():
    arena = Arena(1, 64)
    view = arena.page(arena.sequence().append_page())

    def work():
        with pytest.raises(BadInput, match="1 page views"):
            arena.close()
        view.release()
        arena.close()

    assert child(work) == 0
    view.release()


def test_copies_of_other_threads_are_undone(beside):
    arena = Arena(8, 8 << 20, guard=True)
    seq = arena.sequence()
    seq.append_page()
    beside(lambda: seq.snapshot().write_page(0))
    copying = field(arena.address, "pkv_arena.n_copies")

    def work():
        assert arena.check(3) == []
        assert copying.value == 0 == arena.stats()["n_pages"] - arena.n_free - arena.n_in_use
        arena.close()

    for _ in range(FORKS):
        while not copying.value:
            pass
        assert child(work) == 0


def test_a_lock_that_another_thread_holds_is_free_in_the_child(beside):
    api = RawApi()
    _, arena = api.make(api.arena_new, 200_000, 64, 0, 0, 0)
    beside(lambda: api.check(arena, 3, None, 0))
    beside(lambda: api.check(arena, 2, None, 0))

    def work():
        assert api.arena_n_pages(arena) == 200_000
        assert api.check(arena, 3, None, 0) == 0
        assert api.arena_destroy(arena) == 0

    assert [child(work) for _ in range(FORKS)] == [0] * FORKS
