"""The thread pool through real jobs: barriers, claims, forks, several callers, floating-point modes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.core import _testing_threads as hooks
from pagedkv.core._kernels import ThreadPool
from pagedkv.core.matmul import PackedMatrix
from pagedkv.core.sampler import Sampler
from pagedkv.core.sampling_state import SamplingState

NEAREST_KEEPING_SUBNORMALS = 0x1F80 if os.uname().machine == "x86_64" else 0
COUNTS = [1, 2, 3, 8]


def probe(pool, rounds=50, claims=100):
    """One job; every barrier held and every unit was claimed once."""
    modes, late, claimed = hooks.run_probe(pool, rounds, claims)
    assert late == 0
    assert claimed == [1] * claims
    return modes


def attend_once(pool):
    """A job of the product itself: attention over 40 tokens; its bytes."""
    kv = PagedKVCache(1, 2, 16, n_pages=4, threads=pool)
    seq = kv.sequence()
    seq.extend(40)
    x = np.random.default_rng(1).standard_normal((2, 40, 2, 16), dtype=np.float32)
    seq.write_kv(0, 0, x[0], x[1])
    return kv.attend(0, x[0], [seq], [40]).tobytes()


@pytest.mark.parametrize("n", COUNTS)
def test_barriers_and_claims(n):
    pool = ThreadPool(n)
    assert pool.n_threads == n
    for _ in range(20):
        probe(pool)


@pytest.mark.parametrize("n", COUNTS)
def test_a_parked_pool_wakes_up(n):
    pool = ThreadPool(n)
    for _ in range(3):
        probe(pool)
        time.sleep(0.01)  # far beyond the spinning time: the workers are parked now


def count_threads():
    return len(os.listdir("/proc/self/task"))


def settled_threads(expected):
    """Thread count of the process, which the system may lower only a moment after a join."""
    for _ in range(200):
        if count_threads() == expected:
            break
        time.sleep(0.01)
    return count_threads()


def test_threads_start_at_the_first_job_and_end_with_the_pool():
    before = count_threads()
    pool = ThreadPool(4)
    assert count_threads() == before
    probe(pool)
    assert count_threads() == before + 3
    probe(pool)
    assert count_threads() == before + 3
    del pool
    assert settled_threads(before) == before


def test_import_starts_no_thread():
    code = (
        "import os; from pagedkv.core import _kernels, attention, forward, kvcache, matmul;"
        "pool = _kernels.ThreadPool(4); print(len(os.listdir('/proc/self/task')))"
    )
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == "1"


def in_child(work):
    """Fork; the child does work() and reports by its exit status. A child that hangs is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("n", COUNTS)
def test_child_of_a_fork_runs_jobs_too(n):
    pool = ThreadPool(n)
    expected = attend_once(pool)

    def work():
        assert attend_once(pool) == expected
        probe(pool)
        in_child(lambda: probe(pool))
        probe(pool)

    in_child(work)
    probe(pool)
    assert attend_once(pool) == expected


def test_child_frees_a_pool_whose_workers_stayed_behind():
    pools = [ThreadPool(3)]
    probe(pools[0])
    in_child(pools.clear)
    probe(pools[0])


def test_two_threads_of_a_child_rebuild_the_pool_once():
    pool = ThreadPool(3)
    probe(pool)

    def work():
        both_run_jobs(pool, 20)

    for _ in range(10):
        in_child(work)


def test_fork_while_another_thread_runs_jobs():
    pool = ThreadPool(2)
    stop, failures = threading.Event(), []

    def runner():
        try:
            while not stop.is_set():
                probe(pool, 20)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=runner)
    thread.start()
    try:
        for _ in range(20):
            in_child(lambda: probe(pool))
    finally:
        stop.set()
        thread.join()
    assert not failures


def both_run_jobs(pool, n_jobs):
    failures = []

    def runner():
        try:
            for _ in range(n_jobs):
                probe(pool)
        except BaseException as error:
            failures.append(error)

    runners = [threading.Thread(target=runner) for _ in range(2)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert not failures


@pytest.mark.parametrize("n", COUNTS)
def test_two_python_threads_share_a_pool(n):
    both_run_jobs(ThreadPool(n), 100)


def test_workers_take_no_signals():
    """The mask of each worker blocks everything but faults, so handlers run on the application's own threads."""
    pool = ThreadPool(3)
    others = set(os.listdir("/proc/self/task"))
    probe(pool)
    workers = set(os.listdir("/proc/self/task")) - others
    assert len(workers) == 2
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
    for worker in workers:
        lines = Path(f"/proc/self/task/{worker}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        blocked = int(status["SigBlk"], 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD):
            assert blocked >> (number - 1) & 1
        for number in faults:
            assert not blocked >> (number - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


# --- floating-point mode ----------------------------------------------------------------------------------------------


@pytest.fixture
def strange_mode():
    """The calling thread flushes subnormals and rounds toward zero, as other libraries may leave it."""
    before = hooks.float_mode()
    strange = before ^ hooks.flush ^ hooks.toward_zero
    hooks.set_float_mode(strange)
    yield strange
    hooks.set_float_mode(before)


@pytest.mark.parametrize("n", COUNTS)
def test_jobs_have_their_own_mode_and_the_caller_gets_its_own_back(strange_mode, n):
    pool = ThreadPool(n)
    for _ in range(3):
        assert probe(pool) == [NEAREST_KEEPING_SUBNORMALS] * n
        assert hooks.float_mode() == strange_mode


def arithmetic(k, v, tiny):
    """Bytes of everything that computes outside a model step."""
    results = []
    for kv_format in ("f32", "f16", "int8"):
        kv = PagedKVCache(1, 2, 16, n_pages=4, format=kv_format, threads=2)
        seq = kv.sequence()
        seq.extend(40)
        seq.write_kv(0, 0, k, v)
        results += [x.tobytes() for x in seq.gather(0)]
        results.append(kv.attend(0, k, [seq], [40]).tobytes())
        seq.write_kv(0, 0, k, tiny)
        results += [x.tobytes() for x in seq.gather(0)]
    block = b"\xec\x35\x11\x00" + bytes(range(16))  # scale 0.37, minimum 1e-6
    results.append(bytes(PackedMatrix.pack(ThreadPool(1), "Q4_1", block, 1, 32).row(0)))
    logits = k.reshape(1, -1) * np.float32(16)
    states = [SamplingState(logits.shape[1], seed=i, top_p=0.9, logprobs=3) for i in range(40)]
    sampler = Sampler(logits.shape[1])
    for state in states:
        sampler.sample(logits, [state], [0])
    results += [(state.token, state.logprob, state.top) for state in states]
    results += sampler.score(logits, [0] * 40, range(40), 3)
    return results


def test_no_arithmetic_depends_on_the_callers_mode():
    k = np.random.default_rng(3).standard_normal((40, 2, 16), dtype=np.float32)
    inputs = k, k[::-1] * np.float32(3e-6), k * np.float32(1e-40)  # subnormal as halves, subnormal as floats
    expected = arithmetic(*inputs)
    before = hooks.float_mode()
    for bits in (hooks.flush, hooks.toward_zero, hooks.flush | hooks.toward_zero):
        hooks.set_float_mode(before ^ bits)
        try:
            found, after = arithmetic(*inputs), hooks.float_mode()
        finally:
            hooks.set_float_mode(before)
        assert after == before ^ bits
        assert found == expected
