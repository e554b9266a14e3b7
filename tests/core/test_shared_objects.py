"""Objects of the core in the hands of several threads: what one must have alone refuses the second, the rest agrees."""

import contextlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import TinyLlama
from together import in_threads

import pagedkv
from pagedkv import Arena, PagedKVCache
from pagedkv.core._kernels import ThreadPool
from pagedkv.core.errors import PagedKVError
from pagedkv.core.prefix import PrefixIndex
from pagedkv.core.sampler import Sampler
from pagedkv.core.sampling_state import SamplingState

MODULES = sorted(path.name.split(".")[0] for path in Path(pagedkv.__file__).parent.glob("core/*.so"))


def test_importing_every_extension_leaves_the_gil_as_it_was():
    """In an interpreter that can do without one it stays off, unless somebody else turns it on."""
    assert len(MODULES) > 20
    program = (
        "import importlib, sys\nimport numpy\n"
        "before = getattr(sys, '_is_gil_enabled', lambda: True)()\n"
        f"for name in {MODULES}: importlib.import_module('pagedkv.core.' + name)\n"
        "assert getattr(sys, '_is_gil_enabled', lambda: True)() == before\nprint(before)\n"
    )
    root = Path(pagedkv.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=root, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(not sysconfig.get_config_var("Py_GIL_DISABLED"))


class Again(list):
    """A list that calls something, once, while another call reads it."""

    def __init__(self, items, call):
        super().__init__(items)
        self.call, self.raised = call, None

    def __getitem__(self, k):
        return self.seen(super().__getitem__(k))

    def __iter__(self):
        return (self.seen(item) for item in super().__iter__())

    def seen(self, item):
        if self.call is not None:
            call, self.call = self.call, None
            try:
                call()
            except RuntimeError as error:
                self.raised = str(error)
        return item


def test_a_sampler_in_use_refuses_a_second_call():
    sampler, logits = Sampler(16), np.zeros((1, 16), np.float32)
    for call, first in (("sample", lambda rows: sampler.sample(logits, [SamplingState(16)], rows)),
                        ("score", lambda rows: sampler.score(logits, rows, [3], 1))):  # fmt: skip
        for second, refused in (("sample", lambda: sampler.sample(logits, [SamplingState(16)], [0])),
                                ("score", lambda: sampler.score(logits, [0], [3], 1))):  # fmt: skip
            rows = Again([0], refused)
            first(rows)
            assert rows.raised == f"{second}: the sampler is in use, in another thread", call
    sampler.sample(logits, [SamplingState(16)], [0])


def test_a_refused_or_failed_draw_leaves_sampler_and_states_free():
    sampler, logits = Sampler(16), np.zeros((1, 16), np.float32)
    state, other = SamplingState(16), SamplingState(16)
    with pytest.raises(RuntimeError, match="entry 2 is in use, in another thread or twice in this call"):
        sampler.sample(logits, [state, other, state], [0, 0, 0])
    with pytest.raises(ValueError, match="rows"):
        sampler.sample(logits, [state], [7])
    sampler.sample(logits, [state, other], [0, 0])
    for each in (state, other):
        each.accept(each.token)
        with pytest.raises(ValueError, match="token"):
            each.accept(16)
        each.set_mask(None)
        assert each.position == 1


def test_threads_draw_from_and_advance_one_state():
    """Each call is refused or takes place whole, while penalties make the state grow."""
    vocab = 20000
    logits = np.random.default_rng(0).normal(0, 1, (1, vocab)).astype(np.float32)
    state, done = SamplingState(vocab, repetition_penalty=1.1, frequency_penalty=0.1), []

    def work(k):
        sampler = Sampler(vocab)
        todo = 300 if k % 2 else 2000
        while todo:
            try:
                if k % 2:
                    sampler.sample(logits, [state], [0])
                else:
                    state.accept(k * 2000 + todo)
                todo -= 1
                done.append(k)
            except RuntimeError as error:
                assert "is in use" in str(error)

    in_threads(work, 4)
    assert len(done) == 4600 and state.position == 4000


def test_a_model_that_runs_refuses_a_second_run_and_close():
    model = TinyLlama()
    pool = ThreadPool(1)
    forward = model.forward(pool)
    kv = PagedKVCache(2, 2, 8, n_pages=4, format="f32", threads=pool)
    seq = kv.sequence()
    seq.extend(1)

    def run(seqs):
        none = np.array([], np.int32)
        forward.run(kv, seqs, np.array([1], np.int32), np.array([1], np.int32), none, None)

    for second, refused in (("run", lambda: run([seq])), ("close", forward.close)):
        seqs = Again([seq], refused)
        run(seqs)
        assert seqs.raised.startswith(f"{second}: the model is running")
    kv.close()
    with pytest.raises(PagedKVError):
        run([seq])
    forward.close()


def test_threads_append_to_one_sequence_and_each_gets_its_own_pages():
    arena = Arena(4000, 64)
    seq, got = arena.sequence(max_pages=4000), [[] for _ in range(4)]

    def work(k):
        for i in range(100):
            got[k] += seq.append_pages(1 + (i + k) % 9) if i % 3 else [seq.append_page()]

    in_threads(work, 4)
    pages = [i for each in got for i in each]
    assert sorted(pages) == sorted(seq.page_table) == sorted(set(pages))
    assert arena.check(3) == []


def test_threads_read_a_table_that_others_change():
    """A table is of one moment: its pages are distinct, and shared ones come together."""
    arena = Arena(64, 64)
    index = PrefixIndex(arena, 1)
    source, seq = arena.sequence(max_pages=64), arena.sequence(max_pages=64)
    tokens = list(range(8))
    run = source.append_pages(8)
    index.insert(source, tokens)
    allowed = {tuple(run[:n]) for n in range(9)}
    seen = set()

    def work(k):
        for i in range(400):
            if k < 2:
                seen.add(tuple(seq.page_table))
            elif i % 2:
                seq.free()
            elif k == 2:
                seq.share_pages(run[: 1 + i % 8]) if seq.n_pages == 0 else None
            else:
                with contextlib.suppress(PagedKVError):  # another thread has filled it
                    index.match(seq, tokens[: 1 + i % 8])

    in_threads(work, 3)
    assert seen <= allowed
    in_threads(work, 4)
    assert arena.check(3) == []


def test_threads_extend_cut_and_read_one_sequence():
    """Its length is never more than its pages hold, so that whoever reads it stays inside the pool."""
    kv = PagedKVCache(1, 1, 8, n_pages=64, format="f32", threads=1)
    seq = kv.sequence()
    values = np.ones((1, 1, 8), np.float32)

    def work(k):
        for i in range(300):
            try:
                if k == 0:
                    seq.extend(1 + i % 40)
                    seq.write_kv(0, 0, values, values)
                elif k == 1:
                    seq.truncate(0)
                elif k == 2:
                    keys, _ = seq.gather(0)
                    assert np.isin(keys, (0, 1)).all()  # never written, or written whole
                else:
                    kv.attend(0, np.zeros((1, 1, 8), np.float32), [seq], [1])
            except PagedKVError:
                pass

    in_threads(work, 4)
    assert len(seq) <= seq.n_pages * 16
    seq.free()
    assert kv.n_in_use == 0 and kv.check(3) == []
