"""ForwardModel: a whole model against float64, and one result however work is cut, batched, threaded and vectorised."""

import itertools
import threading

import numpy as np
import pytest
from isas import assert_one_result, on_every_isa
from kv import poison
from tiny_llama import TinyLlama, step

from pagedkv import BadInput, Tampered
from pagedkv.core._kernels import ThreadPool
from pagedkv.core._testing import let_pass
from pagedkv.core.forward import ForwardModel
from pagedkv.core.kvcache import PAGE_TOKENS
from pagedkv.core.layer import Layer
from pagedkv.core.matmul import PackedMatrix


@pytest.fixture(scope="module")
def pool():
    return ThreadPool(2)


SHAPES = [
    {},
    {"tied": True},
    {"n_heads": 4, "n_kv_heads": 4},
    {"n_heads": 5, "n_kv_heads": 1},
    {"n_heads": 26, "n_kv_heads": 1, "head_dim": 4},
    {"head_dim": 20, "rope_dim": 6},
    {"head_dim": 7, "rope_dim": 4},
    {"head_dim": 6, "rope_dim": 0},
    {"hidden": 33, "ffn": 17, "vocab": 19},
    {"hidden": 16, "ffn": 32, "vocab": 16, "n_layers": 1},
    {"ffn": 100, "vocab": 129, "n_layers": 3},
    {"ffn": 1, "vocab": 1},
]


def error(found, expected):
    """Root mean square of the difference, relative to that of what is expected."""
    return np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float_models_against_float64(pool, shape):
    """A prompt, then single tokens; float32 throughout loses a few 2^-24 per operation."""
    model = TinyLlama(**shape)
    forward, kv = model.forward(pool), model.cache()
    assert (forward.vocab_size, forward.vocab_padded) == (model.vocab, -(-model.vocab // 16) * 16)
    assert (forward.n_layers, forward.n_threads) == (model.n_layers, 2)
    poison(kv)
    ids, seq = model.tokens(50), kv.sequence()
    found = [step(forward, kv, [(seq, ids[:40])])]
    found += [step(forward, kv, [(seq, ids[i : i + 1])]) for i in range(40, 50)]
    expected, exact_kv = model.logits(ids)
    assert error(np.concatenate(found), expected) < 3e-6
    for layer, exact in enumerate(exact_kv):
        for stored, wanted in zip(seq.gather(layer), exact, strict=True):
            np.testing.assert_allclose(stored, wanted, rtol=1e-4, atol=1e-5)


QUANTISED = {"hidden": 64, "n_heads": 6, "n_kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 75}


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize(("activations", "limit"), [("int8", 0.02), ("int12", 0.002)])
@pytest.mark.parametrize("head_dim", [16, 32])
def test_quantised_models_against_float64(pool, type_name, activations, limit, head_dim):
    """Only the rounding of activations is lost. Slices of heads end on quantisation blocks or not."""
    model = TinyLlama(**{**QUANTISED, "head_dim": head_dim}, types=type_name)
    kv = model.cache()
    found = step(model.forward(pool, activations), kv, [(kv.sequence(), model.tokens(40))])
    limit = 3e-6 if type_name in ("F16", "BF16") else limit
    assert error(found, model.logits(model.tokens(40))[0]) < limit


def test_types_may_be_mixed(pool):
    types = {"": "Q8_0", "q": "F32", "v": "Q5_1", "o": "F16", "up": "Q4_1", "down": "F32", "embedding": "BF16"}
    model = TinyLlama(**QUANTISED, types=types)
    kv = model.cache()
    for activations in ("int8", "int12"):
        found = step(model.forward(pool, activations), kv, [(kv.sequence(), model.tokens(40))])
        assert error(found, model.logits(model.tokens(40))[0]) < 0.02


@pytest.mark.parametrize(("kv_format", "limit"), [("f32", 3e-6), ("f16", 1e-3), ("int8", 0.02)])
def test_kv_formats(pool, kv_format, limit):
    model = TinyLlama()
    kv = model.cache(format=kv_format)
    found = step(model.forward(pool), kv, [(kv.sequence(), model.tokens(60))])
    assert error(found, model.logits(model.tokens(60))[0]) < limit


def test_a_context_over_several_splits(pool):
    model = TinyLlama(n_layers=1)
    kv = model.cache(n_pages=60)
    seq, ids = kv.sequence(), model.tokens(800)
    forward = model.forward(pool)
    found = [step(forward, kv, [(seq, ids[:790])])]
    found += [step(forward, kv, [(seq, ids[i : i + 1])]) for i in range(790, 800)]
    assert error(np.concatenate(found), model.logits(ids)[0]) < 3e-6


# --- one result -------------------------------------------------------------------------------------------------------

MODELS = {
    "F32": TinyLlama(),
    "Q4_1": TinyLlama(**QUANTISED, types="Q4_1"),
    "Q8_0": TinyLlama(**{**QUANTISED, "head_dim": 32}, types="Q8_0", tied=True),
    "mixed": TinyLlama(**QUANTISED, types={"": "Q4_0", "v": "Q8_0", "down": "F16", "embedding": "Q8_0"}),
}
EXACT = [(name, activations) for name in MODELS for activations in ("int8", "int12")]


def solo(model, ids, n_threads=1, page_tokens=16, activations="int8", kv_format="f16", chunk=None):
    """Bytes of all logits of one prompt computed alone in chunks."""
    forward = model.forward(ThreadPool(n_threads), activations)
    kv = model.cache(n_pages=1024 // page_tokens, page_tokens=page_tokens, format=kv_format)
    poison(kv)
    seq = kv.sequence()
    chunk = chunk or len(ids)
    return b"".join(step(forward, kv, [(seq, ids[i : i + chunk])]).tobytes() for i in range(0, len(ids), chunk))


@pytest.mark.parametrize(("name", "activations"), EXACT)
def test_one_result_on_every_isa_thread_count_page_size_and_chunk(name, activations):
    model, ids = MODELS[name], MODELS[name].tokens(300)
    results = on_every_isa(lambda: solo(model, ids, activations=activations))
    results |= {f"{n} threads": solo(model, ids, n_threads=n, activations=activations) for n in (2, 3, 8)}
    results |= {f"pages of {n}": solo(model, ids, page_tokens=n, activations=activations) for n in PAGE_TOKENS}
    for n in (1, 7, 16, 17, 100, 256):
        results[f"chunks of {n}"] = solo(model, ids, n_threads=2, chunk=n, activations=activations)
    assert_one_result(results)


@pytest.mark.parametrize("kv_format", ["f32", "int8"])
def test_other_kv_formats_are_as_exact(kv_format):
    model, ids = MODELS["Q4_1"], MODELS["Q4_1"].tokens(280)
    results = on_every_isa(lambda: solo(model, ids, kv_format=kv_format))
    results |= {f"chunks of {n}": solo(model, ids, n_threads=2, chunk=n, kv_format=kv_format) for n in (1, 33)}
    assert_one_result(results)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_batches_equal_each_sequence_alone(pool, seed):
    """Sequences join at random, advance by random chunks or single tokens, in random order, asking for random rows."""
    rng = np.random.default_rng(seed)
    name, activations = EXACT[seed % len(EXACT)]
    model = MODELS[name]
    forward = model.forward(pool, activations)
    kv = model.cache(n_pages=200, format="f16", page_tokens=(16, 32)[seed % 2])
    poison(kv)
    prompts = [model.tokens(int(n), seed=i) for i, n in enumerate(rng.integers(1, 330, 8))]
    expected = [
        np.frombuffer(solo(model, ids, activations=activations), np.float32).reshape(len(ids), -1) for ids in prompts
    ]
    seqs, checked = {}, 0
    while any(i not in seqs or len(seqs[i]) < len(prompts[i]) for i in range(8)):
        work, wanted, rows, row = [], [], [], 0
        for i in rng.permutation(8):
            if i not in seqs:
                if rng.random() < 0.7:
                    continue
                seqs[i] = kv.sequence(int(i))
            start = len(seqs[i])
            n = min(int(rng.choice([1, 1, 1, 5, 16, 60, 300])), len(prompts[i]) - start)
            if n == 0:
                continue
            work.append((seqs[i], prompts[i][start : start + n]))
            for j in range(n):
                if rng.random() < 0.4:
                    rows.append(row + j)
                    wanted.append(expected[i][start + j])
            row += n
        if work:
            found = step(forward, kv, work, rows)
            assert found.tobytes() == np.array(wanted, np.float32).reshape(found.shape).tobytes(), seed
            checked += len(rows)
    assert checked > 100
    assert kv.check() == []


def test_shared_prefixes_and_snapshots_do_not_change_a_bit(pool):
    """Eight continuations of one prompt on shared pages, as a batch, equal eight prompts computed alone."""
    model = MODELS["Q4_1"]
    forward, kv = model.forward(pool), model.cache(n_pages=200, format="f16")
    poison(kv)
    prefix, base = model.tokens(300), kv.sequence()
    step(forward, kv, [(base, prefix)], [])
    tails = [model.tokens(20, seed=50 + i) for i in range(8)]
    branches = [base.snapshot() for _ in tails]
    found = [
        step(forward, kv, [(branch, tail[i : i + 1]) for branch, tail in zip(branches, tails, strict=True)])
        for i in range(20)
    ]
    assert len({page for branch in branches for page in branch.page_table}) < 18 + 8 * 4
    for i, tail in enumerate(tails):
        alone = np.frombuffer(solo(model, np.concatenate([prefix, tail])), np.float32).reshape(320, -1)
        assert np.array([rows[i] for rows in found]).tobytes() == alone[300:].tobytes()


def test_truncating_and_computing_again_gives_the_same(pool):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache()
    ids, seq = model.tokens(60), kv.sequence()
    expected = step(forward, kv, [(seq, ids)])
    for n in (59, 33, 32, 16, 1, 0):
        seq.truncate(n)
        step(forward, kv, [(seq, model.tokens(60 - n, seed=9))])
        seq.truncate(n)
        assert step(forward, kv, [(seq, ids[n:])]).tobytes() == expected[n:].tobytes()


def test_many_sequences_at_once(pool):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache(n_pages=150)
    work = [(kv.sequence(i), model.tokens(1, seed=i)) for i in range(150)]
    found = step(forward, kv, work)
    for (_, ids), row in zip(work, found, strict=True):
        assert error(row, model.logits(ids)[0][0]) < 1e-6


def test_no_rows_asked_for_still_writes_kv(pool):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache()
    seq, ids = kv.sequence(), model.tokens(30)
    assert step(forward, kv, [(seq, ids)], []).shape == (0, 75)
    np.testing.assert_allclose(seq.gather(1)[0], model.logits(ids)[1][1][0], rtol=1e-4, atol=1e-5)


# --- life of a model --------------------------------------------------------------------------------------------------


def test_close_frees_the_workspace_and_a_run_brings_it_back(pool):
    model = MODELS["Q8_0"]
    forward, kv = model.forward(pool), model.cache()
    expected = step(forward, kv, [(kv.sequence(), model.tokens(20))])
    for _ in range(2):
        forward.close()
    assert step(forward, kv, [(kv.sequence(), model.tokens(20))]).tobytes() == expected.tobytes()


def test_the_model_keeps_its_weights_alive(pool):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache()
    noise = [PackedMatrix.pack(pool, "F32", bytes(4 * 75 * 48), 75, 48) for _ in range(50)]  # what freed memory became
    assert error(step(forward, kv, [(kv.sequence(), model.tokens(9))]), model.logits(model.tokens(9))[0]) < 3e-6
    assert len(noise) == 50


def test_nbytes_counts_a_tied_head_once(pool):
    for tied, heads in ((False, 2), (True, 1)):
        forward = TinyLlama(tied=tied, n_layers=1).forward(pool)
        qkvo, gate_up, down = (48 + 16 + 16 + 48) * 48, 2 * 64 * 48, 48 * 50
        assert forward.nbytes == 4 * (qkvo + gate_up + down + heads * 80 * 48)


def test_profile_counts_seconds_of_each_operation(pool):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache()
    step(forward, kv, [(kv.sequence(), model.tokens(20))])
    assert set(forward.profile_seconds().values()) == {0.0}
    forward.profile = True
    step(forward, kv, [(kv.sequence(), model.tokens(20))])
    seconds = forward.profile_seconds()
    assert all(value > 0 for value in seconds.values())
    assert set(forward.profile_seconds().values()) == {0.0}


def test_refused_memory_is_an_error_and_the_next_run_works(pool):
    model = MODELS["Q4_1"]
    expected = solo(model, model.tokens(20), kv_format="f32")
    for n in itertools.count():
        forward, kv = model.forward(pool), model.cache()
        seq, logits = kv.sequence(), np.zeros((20, 80), np.float32)
        seq.extend(20)
        let_pass(n)
        try:
            forward.run(kv, [seq], model.tokens(20), [20], range(20), logits)
            break
        except MemoryError as refusal:
            assert str(refusal).startswith("the system refused")
        finally:
            let_pass(-1)
        forward.run(kv, [seq], model.tokens(20), [20], range(20), logits)
        assert logits[:, :75].tobytes() == expected
    assert n >= 4


def test_two_runs_at_once_are_refused(pool):
    """Whichever thread comes second gets a clear error; the first is not disturbed."""
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache(n_pages=200)
    seqs, ids = [kv.sequence(), kv.sequence()], model.tokens(600)
    for seq in seqs:
        seq.extend(600)
    outputs = [np.zeros((600, 80), np.float32) for _ in seqs]
    refused = []

    def work(i):
        for _ in range(20):
            try:
                forward.run(kv, [seqs[i]], ids, [600], range(600), outputs[i])
            except RuntimeError as refusal:
                refused.append(str(refusal))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(refused) == {"run: the model is running already, in another thread"}
    forward.run(kv, [seqs[0]], ids, [600], range(600), outputs[0])
    assert error(outputs[0][:, :75], model.logits(ids)[0]) < 3e-6


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_logits", [None, 0, 1, 3, 5])
def test_hidden_states_of_rows_beside_logits_of_the_first_of_them(pool, name, n_logits):
    """The bits of either do not depend on what else was asked for."""
    model = MODELS[name]
    forward, ids, rows = model.forward(pool), model.tokens(40), [0, 3, 16, 17, 39]
    whole = np.zeros((40, forward.hidden_size), np.float32)
    logits = np.zeros((40, forward.vocab_padded), np.float32)

    def compute(*wanted):
        kv = model.cache()
        seq = kv.sequence()
        seq.extend(40)
        forward.run(kv, [seq], ids, [40], *wanted)

    compute(range(40), logits, whole)
    assert logits[:, :75].tobytes() == solo(model, ids, kv_format="f32")
    some = None if n_logits is None else np.full((n_logits, forward.vocab_padded), 7, np.float32)
    hidden = np.zeros((5, forward.hidden_size), np.float32)
    compute(rows, some, hidden)
    assert hidden.tobytes() == whole[rows].tobytes()
    assert n_logits is None or some.tobytes() == logits[rows[:n_logits]].tobytes()
    head = model.exact.get("head", model.exact["embedding"])
    assert error(whole.astype(float) @ head.T, logits[:, :75]) < (3e-6 if name == "F32" else 0.02)


# --- bad input --------------------------------------------------------------------------------------------------------


def logits_for(n):
    return np.zeros((n, 80), np.float32)


HIDDEN = {"hidden": np.zeros((1, 48), np.float32)}
BAD = [
    ({"seqs": []}, "q_lens: [2] for 0 sequences and (2,) token ids"),
    ({"q_lens": [1]}, "q_lens: [1] for 1 sequences and (2,) token ids"),
    ({"q_lens": [2, 1]}, "q_lens: [2, 1] for 1 sequences and (2,) token ids"),
    ({"q_lens": [0], "token_ids": []}, "q_lens: [0] for 1 sequences and (0,) token ids"),
    ({"q_lens": [-1]}, "q_lens: [-1] for 1 sequences and (2,) token ids"),
    ({"q_lens": [2.0]}, "q_lens: float64 values that are not integers of 32 bits"),
    ({"token_ids": [[1, 2]]}, "q_lens: [2] for 1 sequences and (1, 2) token ids"),
    ({"token_ids": [1, 75]}, "token_ids: 75 is outside [0, 75)"),
    ({"token_ids": [1, -1]}, "token_ids: -1 is outside [0, 75)"),
    ({"token_ids": [1, 1 << 32]}, "token_ids: int64 values that are not integers of 32 bits"),
    ({"token_ids": [1.5, 2]}, "token_ids: float64 values that are not integers of 32 bits"),
    ({"token_ids": range(21), "q_lens": [21], "logit_rows": []}, "q_lens: 21 tokens for entry 0, a sequence of 20"),
    ({"logit_rows": [2]}, "logit_rows: [2] do not ascend in [0, 2)"),
    ({"logit_rows": [-1]}, "logit_rows: [-1] do not ascend in [0, 2)"),
    ({"logit_rows": [1, 0]}, "logit_rows: [1, 0] do not ascend in [0, 2)"),
    ({"logit_rows": [0, 0, 0]}, "logit_rows: [0, 0, 0] do not ascend in [0, 2)"),
    ({"logit_rows": [[0]]}, "logit_rows: [[0]] do not ascend in [0, 2)"),
    ({"logits": logits_for(2)}, "logits: float32 (2, 80) is not float32 (1, 80)"),
    ({"hidden": np.zeros((2, 48), np.float32)}, "hidden: float32 (2, 48) is not float32 (1, 48)"),
    (HIDDEN | {"logits": logits_for(2)}, "logits: float32 (2, 80) is not float32 (1, 80)"),
    ({"hidden": np.zeros((1, 48))}, "hidden: float64 (1, 48) is not float32 (1, 48)"),
    ({"hidden": np.zeros((1, 96), np.float32)[:, ::2], "logits": None}, "hidden: not contiguous, or not writable"),
    ({"logits": np.zeros((1, 75), np.float32)}, "logits: float32 (1, 75) is not float32 (1, 80)"),
    ({"logits": np.zeros((1, 80))}, "logits: float64 (1, 80) is not float32 (1, 80)"),
    ({"seqs": [None]}, "seqs: entry 0 is no sequence of this cache"),
    ({"seqs": [7]}, "seqs: entry 0 is no sequence of this cache"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD, ids=str)
def test_bad_input(pool, changes, message):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache()
    seq = kv.sequence()
    step(forward, kv, [(seq, model.tokens(20))])
    before = [x.tobytes() for layer in range(2) for x in seq.gather(layer)]
    call = {"seqs": [seq], "token_ids": [1, 2], "q_lens": [2], "logit_rows": [1], "logits": logits_for(1), **changes}
    if "logits" not in changes and "logit_rows" in changes:
        call["logits"] = logits_for(len(changes["logit_rows"]))
    with pytest.raises(BadInput) as refusal:
        forward.run(kv, **call)
    assert str(refusal.value) == message
    assert [x.tobytes() for layer in range(2) for x in seq.gather(layer)] == before


def test_arrays_that_cannot_be_written_are_refused(pool):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache()
    seq = kv.sequence()
    seq.extend(1)
    frozen = logits_for(1)
    frozen.flags.writeable = False
    for logits in (frozen, np.zeros((1, 160), np.float32)[:, ::2]):
        with pytest.raises((BufferError, ValueError)):
            forward.run(kv, [seq], [1], [1], [0], logits)
    forward.run(kv, [seq], [1], [1], [0], logits_for(1))


def test_a_sequence_twice_or_of_another_cache_is_refused(pool):
    model = MODELS["F32"]
    forward, kv, other = model.forward(pool), model.cache(), model.cache()
    seq, stranger = kv.sequence(), other.sequence()
    seq.extend(2)
    stranger.extend(2)
    with pytest.raises(BadInput, match=r"^seqs: the same sequence twice$"):
        forward.run(kv, [seq, seq], [1, 2], [1, 1], [], logits_for(0))
    with pytest.raises(BadInput, match=r"^seqs: entry 1 is no sequence of this cache$"):
        forward.run(kv, [seq, stranger], [1, 2], [1, 1], [], logits_for(0))


def test_pages_somebody_else_holds_are_not_written(pool):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache()
    seq = kv.sequence()
    step(forward, kv, [(seq, model.tokens(20))])
    twin = seq.snapshot()
    page = seq.page_table[1]
    message = f"^seqs: entry 0 shares page {page}, which this step writes; extend after sharing$"
    with pytest.raises(BadInput, match=message):
        forward.run(kv, [seq], [1], [1], [], logits_for(0))
    step(forward, kv, [(seq, model.tokens(1))])  # extend copied the page
    assert twin.page_table[1] == page != seq.page_table[1]


def test_a_cache_of_another_shape_is_refused(pool):
    forward, kv = MODELS["F32"].forward(pool), TinyLlama(n_layers=3).cache()
    seq = kv.sequence()
    seq.extend(1)
    with pytest.raises(BadInput, match=r"^kv: layers, heads, head_dim \(3, 2, 8\), the model has \(2, 2, 8\)$"):
        forward.run(kv, [seq], [1], [1], [], logits_for(0))
    with pytest.raises(TypeError):
        forward.run(None, [seq], [1], [1], [], logits_for(0))


def test_a_closed_cache_is_refused(pool):
    model = MODELS["F32"]
    forward, kv = model.forward(pool), model.cache()
    seq = kv.sequence()
    seq.extend(1)
    kv.close()
    with pytest.raises(Tampered):
        forward.run(kv, [seq], [1], [1], [], logits_for(0))


def parts(pool, n_layers=1):
    """Arguments of a good ForwardModel and of its Layer: hidden 8, two heads of 4, ffn 6, vocabulary 5."""

    def matrix(rows, cols):
        return PackedMatrix.pack(pool, "F32", bytes(4 * rows * cols), rows, cols)

    layer = {
        "q": matrix(8, 8), "k": matrix(4, 8), "v": matrix(4, 8), "o": matrix(8, 8), "gate": matrix(6, 8),
        "up": matrix(6, 8), "down": matrix(8, 6), "attn_norm": np.ones(8), "ffn_norm": np.ones(8),
    }  # fmt: skip
    model = {
        "layers": [Layer(**layer)] * n_layers, "embedding": matrix(5, 8), "head": matrix(5, 8), "head_norm": np.ones(8),
        "inv_freq": np.ones(2), "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "rms_eps": 1e-5, "pool": pool,
    }  # fmt: skip
    return layer, model, matrix


BAD_MODELS = [
    (lambda m: {"layers": []}, "model: 0 layers, 2 query heads, 1 KV heads, head_dim 4, must be at least 1 each"),
    (lambda m: {"n_kv_heads": 0}, "model: 1 layers, 2 query heads, 0 KV heads, head_dim 4, must be at least 1 each"),
    (lambda m: {"n_heads": 3, "n_kv_heads": 2}, "heads: 3 query heads, 2 KV heads, head_dim 4, rotated 4"),
    (lambda m: {"inv_freq": np.ones(3)}, "heads: 2 query heads, 1 KV heads, head_dim 4, rotated 6"),
    (lambda m: {"head": m(6, 8)}, "head: shape (6, 8) with norm (8,), must be (5, 8)"),
    (lambda m: {"head_norm": np.ones(7)}, "head: shape (5, 8) with norm (7,), must be (5, 8)"),
    (lambda m: {"activations": "int4"}, "activations: 'int4' is not one of int8, int12"),
    (lambda m: {"ffn_activation": "relu"}, "ffn_activation: 'relu' is not one of silu, gelu"),
    (lambda m: {"rope_factors": [1.0, 2.0]}, "rope_factors: shape (2,), must be (1,)"),
]
BAD_LAYERS = [
    (lambda m: {"q": m(7, 8)}, "layer 0 q: shape (7, 8), must be (8, 8)"),
    (lambda m: {"k": m(8, 8)}, "layer 0 k: shape (8, 8), must be (4, 8)"),
    (lambda m: {"down": m(8, 7)}, "layer 0 down: shape (8, 7), must be (8, 6)"),
    (lambda m: {"up": m(7, 8)}, "layer 0 up: shape (7, 8), must be (6, 8)"),
    (lambda m: {"ffn_norm": np.ones(9)}, "layer 0 ffn_norm: shape (9,), must be (8,)"),
    (lambda m: {"post_ffn_norm": np.ones(9)}, "layer 0 post_ffn_norm: shape (9,), must be (8,)"),
    (lambda m: {"q_norm": np.ones(4), "k_norm": np.ones(8)}, "layer 0 k_norm: shape (8,), must be (4,)"),
    (lambda m: {"q_norm": np.ones(5), "k_norm": np.ones(4)}, "layer 0 q_norm: shape (5,), must be (8,)"),
    (lambda m: {"q_norm": np.ones(4)}, "layer 0: biases of q, k and v, and norms of q and k, come together"),
    (lambda m: {"q_bias": np.ones(8)}, "layer 0: biases of q, k and v, and norms of q and k, come together"),
    (lambda m: {"q_bias": np.ones(8), "k_bias": np.ones(4), "v_bias": np.ones(8)},
     "layer 0 v_bias: shape (8,), must be (4,)"),
    (lambda m: {"rope": 1}, "layer 0 rope: 1 is not in [0, 1)"),
    (lambda m: {"window": -1}, "layer 0 window: -1 is negative"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_MODELS)
def test_bad_models(pool, changes, message):
    _, model, matrix = parts(pool)
    with pytest.raises(ValueError) as refusal:
        ForwardModel(**{**model, **changes(matrix)})
    assert str(refusal.value) == message


@pytest.mark.parametrize(("changes", "message"), BAD_LAYERS)
def test_bad_layers(pool, changes, message):
    layer, model, matrix = parts(pool)
    with pytest.raises(ValueError) as refusal:
        ForwardModel(**{**model, "layers": [Layer(**{**layer, **changes(matrix)})]})
    assert str(refusal.value) == message


def test_three_windows(pool):
    layer, model, _ = parts(pool)
    layers = [Layer(**{**layer, "window": window}) for window in (0, 5, 5, 0)]
    ForwardModel(**{**model, "layers": layers})
    with pytest.raises(ValueError, match="layer 4 window: 7 is one more than the 2 different windows of a model"):
        ForwardModel(**{**model, "layers": [*layers, Layer(**{**layer, "window": 7})]})


@pytest.mark.parametrize("name", ["embedding", "head", "pool"])
def test_models_of_nothing(pool, name):
    _, model, _ = parts(pool)
    with pytest.raises(TypeError):
        ForwardModel(**{**model, name: None})


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "gate", "up", "down"])
def test_layers_of_nothing(pool, name):
    layer, model, _ = parts(pool)
    # gate, up and down may be missing together, where there are experts
    with pytest.raises((TypeError, ValueError)):
        Layer(**{**layer, name: None})
    with pytest.raises((TypeError, AttributeError)):
        ForwardModel(**{**model, "layers": [None]})
