"""Closing while other threads are inside calls that touch pages: the call or the close is refused, nothing crashes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import environment
from kv import fill, make, state
from tiny_llama import TinyLlama

from pagedkv.core._kernels import ThreadPool
from pagedkv.core._testing import let_pass, meta_address, poke
from pagedkv.core.arena import Arena
from pagedkv.core.errors import BadInput, PoolExhausted, Tampered

RACE = """
import sys, threading
import numpy as np
from tiny_llama import TinyLlama
from pagedkv.core._kernels import ThreadPool
from pagedkv.core._testing import let_pass
from pagedkv.core.errors import BadInput, Tampered

operation, rounds = sys.argv[1], int(sys.argv[2])
sys.setswitchinterval(1e-5)
llama = TinyLlama(head_dim=64)
n = 1024
forward = llama.forward(ThreadPool(1))
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, n, llama.n_kv_heads, llama.head_dim), np.float32)
q = rng.standard_normal((16, llama.n_heads, llama.head_dim), np.float32)
ids, logits = llama.tokens(8), np.empty((1, forward.vocab_padded), np.float32)
finished = 0
for _ in range(rounds):
    kv = llama.cache(n_pages=2 * n // 16, format="f16")
    seq = kv.sequence()
    seq.extend(n)
    call = {
        "attend": lambda: kv.attend(0, q, [seq], [len(q)]),
        "gather": lambda: seq.gather(1),
        "write_kv": lambda: seq.write_kv(1, 0, k, v),
        "run": lambda: forward.run(kv, [seq], ids, [len(ids)], [7], logits),
        "page": lambda: bytes(kv.page(seq.page_table[0])),
        "check": lambda: kv.check(3),
        "write_page": lambda: [seq.snapshot().write_page(0) for _ in range(10)],
    }[operation]
    call()
    failures = []

    def work():
        global finished
        try:
            while kv.is_valid():
                call()
                finished += 1
                for _ in range(3000):  # outside the call, where close may win
                    pass
        except (Tampered, BadInput):
            pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while True:
        try:
            kv.close()
            break
        except BadInput as error:
            assert "calls are still in use" in str(error)
    thread.join()
    assert not failures, failures
print(finished)
"""


@pytest.mark.parametrize("operation", ["attend", "gather", "write_kv", "run", "page", "check", "write_page"])
def test_close_beside_a_call_of_another_thread(operation):
    here = environment()
    here["PYTHONPATH"] += ":" + str(Path(__file__).parent)
    command = [sys.executable, "-c", RACE, operation, "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=here)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_view_cannot_be_taken_again_after_close():
    arena = Arena(1, 64)
    arena.sequence().append_page()
    view = arena.page(0)
    exporter = view.obj
    view.release()
    again = memoryview(exporter)
    with pytest.raises(BadInput, match="1 page views"):
        arena.close()
    again.release()
    arena.close()
    with pytest.raises(Tampered):
        memoryview(exporter)


def test_refused_calls_do_not_keep_the_cache_open():
    kv = make(n_pages=4)
    seq, twin = kv.sequence(), kv.sequence()
    fill(seq, 64)
    twin.share_prefix(seq.page_table, 64)
    llama = TinyLlama(n_kv_heads=3, n_heads=3, head_dim=20)
    forward = llama.forward(ThreadPool(1))
    k, ids, logits = np.zeros((64, 3, 20), np.float32), np.zeros(1, np.int32), np.zeros((1, 80), np.float32)
    for call in (
        lambda: kv.attend(0, k, [seq], [65]),
        lambda: kv.attend(9, k, [seq], [64]),
        lambda: twin.write_kv(0, 0, k, k),
        lambda: twin.gather(2),
        lambda: forward.run(kv, [seq], ids, [1], [0], logits),
        lambda: forward.run(kv, [seq, seq], ids, [1], [0], logits),
    ):
        with pytest.raises((BadInput, PoolExhausted)):
            call()
    kv.close()
    with pytest.raises(Tampered, match="closed"):
        kv.attend(0, k[:0], [], [])
    with pytest.raises(Tampered, match="closed"):
        forward.run(kv, [], [], [], [], logits[:0])


def test_calls_refused_memory_change_nothing_and_do_not_keep_the_cache_open():
    kv = make(n_pages=60)
    seq = kv.sequence()
    fill(seq, 600)
    twin = seq.snapshot()
    q, k, before = np.ones((40, 3, 20), np.float32), np.ones((600, 3, 20), np.float32), state(kv, seq, twin)
    n = refused = 0
    while n == refused:
        let_pass(n)
        try:
            kv.attend(0, q, [seq, twin], [1, 39])
        except PoolExhausted:
            refused += 1
        finally:
            let_pass(-1)
        n += 1
    assert refused == 4  # scratch, spans, units, partial results
    with pytest.raises(PoolExhausted):
        twin.write_kv(0, 0, k, k)
    assert state(kv, seq, twin) == before
    kv.close()


class Trouble(Exception):
    pass


def test_an_exception_on_its_way_out_is_not_replaced():
    with pytest.raises(Trouble), Arena(1, 64) as arena:
        view = arena.page(arena.sequence().append_page())
        raise Trouble
    assert arena.is_valid()
    view.release()
    arena.close()
    arena = Arena(1, 64)
    seq = arena.sequence()
    with pytest.raises(Trouble), seq:
        seq.append_page()
        poke(meta_address(arena, 0), b"\x00")
        raise Trouble
    with pytest.raises(Tampered):
        seq.free()


def test_without_an_exception_a_view_is_named():
    with pytest.raises(BadInput, match="1 page views"), Arena(1, 64) as arena:
        view = arena.page(arena.sequence().append_page())
    view.release()
    arena.close()
