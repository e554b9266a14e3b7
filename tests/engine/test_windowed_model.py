"""The real Gemma 3: windows of 512 beside full layers, two rotations, norms after. Nothing around changes its bits."""

import numpy as np
import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.core import _kernels

# around the window, around pages, and far past both
LENGTHS = [1, 17, 130, 511, 513, 700]
N_NEW = 6


def prompts():
    rng = np.random.default_rng(8)
    return [[2, *rng.integers(300, 200000, n - 1).tolist()] for n in LENGTHS]


def open_llm(path, **options):
    return LLM(path, **{"threads": 2, "kv_pages": 400, "max_model_len": 1024} | options)


def generated(llm, which):
    """Token ids and log-probability bits of the prompts in `which`, one call."""
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=N_NEW, ignore_eos=True, logprobs=0) for i in which]
    outputs = [out.outputs[0] for out in llm.generate([prompts()[i] for i in which], params)]
    return {
        i: (out.token_ids, [entry[t] for entry, t in zip(out.logprobs, out.token_ids, strict=True)])
        for i, out in zip(which, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def solo(gemma3_path):
    with open_llm(gemma3_path, enable_prefix_caching=False) as llm:
        return {i: found for i in range(len(LENGTHS)) for i, found in generated(llm, [i]).items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 100, "threads": 1}, {"page_tokens": 64}, {"max_num_seqs": 2, "kv_pages": 100}],
    ids=str,
)
def test_neighbours_chunks_threads_and_pages(gemma3_path, solo, options):
    with open_llm(gemma3_path, **options) as llm:
        assert generated(llm, range(len(LENGTHS))) == solo
        assert generated(llm, range(len(LENGTHS))) == solo  # prompts out of the prefix cache
        assert not llm.check()


@pytest.mark.parametrize("isa", [name for name in _kernels.isa_names() if name not in ("scalar", _kernels.isa())])
def test_instruction_sets(gemma3_path, solo, isa):
    before = _kernels.isa()
    with open_llm(gemma3_path, enable_prefix_caching=False) as llm:
        try:
            _kernels._use_isa(isa)
            assert llm.engine.stats()["isa"] == isa
            assert generated(llm, [1, 4]) == {i: solo[i] for i in (1, 4)}
        finally:
            _kernels._use_isa(before)
