"""The real arena beside the model of arena_model.py, after every step the level 3 checker.

By hand, for longer: PAGEDKV_MODEL_STEPS=5000000 PAGEDKV_MODEL_SEED=7 pytest tests/core/test_arena_model.py
"""

import os
import random

import pytest
from arena_model import PAGE_TOKENS, Pair, random_step, run
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedkv.core._testing import layout, peek, poke
from pagedkv.core.errors import Tampered

STEPS = int(os.environ.get("PAGEDKV_MODEL_STEPS", "200000"))
SEED = int(os.environ.get("PAGEDKV_MODEL_SEED", "20240501"))
OFFSETS = {name: offset for name, offset, _ in layout()}


@pytest.mark.parametrize("seed", [SEED + k for k in range(4)])
def test_seeded_steps(seed):
    print(f"seed {seed}, {STEPS // 4} steps")
    run(seed, STEPS // 4, random.Random(seed))


class ArenaMachine(RuleBasedStateMachine):
    """The same driver with steps chosen, and failures shrunk, by Hypothesis. An example begins with a burst of one
    seed, where most steps are: half of the bursts suffice for STEPS.
    """

    n_steps = 0  # of all examples

    def __init__(self):
        super().__init__()
        self.pair = Pair()

    @initialize(seed=st.integers(0, 2**32 - 1), n=st.sampled_from((20, STEPS // 15)))
    def burst(self, seed, n):
        rng = random.Random(seed)
        for k in range(n):
            random_step(self.pair, rng)
            self.pair.compare(deep=k % 8 == 0)
            ArenaMachine.n_steps += 1

    def pick(self, k):
        names = list(self.pair.seqs)
        return names[k % len(names)]

    has_sequence = precondition(lambda self: self.pair.seqs)

    @rule(limit=st.sampled_from((1, 3, 20)))
    def new(self, limit):
        if len(self.pair.seqs) < 8:
            self.pair.new(limit)

    @has_sequence
    @rule(k=st.integers(0, 7), n=st.integers(0, 4))
    def append(self, k, n):
        self.pair.append(self.pick(k), n)

    @has_sequence
    @rule(k=st.integers(0, 7), pages=st.lists(st.integers(-1, 13), min_size=1, max_size=3))
    def share(self, k, pages):
        self.pair.share(self.pick(k), pages)

    @has_sequence
    @rule(k=st.integers(0, 7))
    def snapshot(self, k):
        if len(self.pair.seqs) < 8:
            self.pair.snapshot(self.pick(k))

    @has_sequence
    @rule(k=st.integers(0, 7), i=st.integers(-1, 20), value=st.integers(0, 255))
    def write(self, k, i, value):
        self.pair.write(self.pick(k), i, value)

    @has_sequence
    @rule(k=st.integers(0, 7), n=st.integers(-1, 20))
    def truncate(self, k, n):
        self.pair.truncate(self.pick(k), n)

    @has_sequence
    @rule(k=st.integers(0, 7))
    def free(self, k):
        self.pair.free(self.pick(k))

    @has_sequence
    @rule(k=st.integers(0, 7))
    def destroy(self, k):
        self.pair.destroy(self.pick(k))

    @has_sequence
    @rule(k=st.integers(0, 7))
    def exhaust(self, k):
        self.pair.exhaust(self.pick(k))

    @rule(n=st.integers(0, 13))
    def grow(self, n):
        self.pair.reserve(n)

    @rule()
    def trim(self):
        self.pair.trim()

    @has_sequence
    @rule(k=st.integers(0, 7), tokens=st.lists(st.integers(0, 1), max_size=4 * PAGE_TOKENS))
    def match(self, k, tokens):
        self.pair.match(self.pick(k), tokens)

    @has_sequence
    @rule(k=st.integers(0, 7), tokens=st.lists(st.integers(0, 1), max_size=4 * PAGE_TOKENS))
    def insert(self, k, tokens):
        self.pair.insert(self.pick(k), tokens)

    @has_sequence
    @rule(k=st.integers(0, 7), field=st.sampled_from(("canary_pre", "canary_post")), byte=st.integers(0, 7))
    def poke(self, k, field, byte):
        """Damage a canary, see the arena refuse for good, and go on with a new one."""
        seq, arena = self.pair.seqs[self.pick(k)], self.pair.arena
        address = arena.address + OFFSETS[f"pkv_arena.{field}"] + byte
        original = peek(address, 1)
        poke(address, bytes([original[0] ^ 0x10]))
        for call in (seq.append_page, seq.snapshot, arena.trim):
            with pytest.raises(Tampered):
                call()
        poke(address, original)
        with pytest.raises(Tampered):
            seq.append_page()
        self.pair = Pair()

    @invariant()
    def equal(self):
        ArenaMachine.n_steps += 1
        self.pair.compare(deep=True)
        self.pair.compare_contents()


class TestArenaMachine(ArenaMachine.TestCase):
    settings = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )

    @classmethod
    def tearDownClass(cls):
        """What ran is what was asked for."""
        print(f"{ArenaMachine.n_steps} steps")
        assert ArenaMachine.n_steps >= STEPS
