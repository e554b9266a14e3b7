"""Every architecture against transformers in float32, from both containers, and the same bits however computed."""

import numpy as np
import pytest
import tiny_models as tiny

from pagedkv import LLM, SamplingParams

EXPECTED = np.load(tiny.HERE / "references.npz")
CASES = sorted(name for name in tiny.REFERENCES if not name.startswith("rope-"))
# GGUF has no dynamic scaling, no window for qwen2
GGUF_CASES = [case for case in CASES if case not in ("llama-dynamic", "qwen2-window")]
WINDOWED = ["mistral", "mixtral", "qwen2-window", "phi3", "gemma2", "gemma3_text"]


def open_llm(path, **options):
    # a pool of 80 tokens and some: what comes out of "longrope" depends on the longest sequence
    options = {"threads": 2, "kv_format": "f32", "kv_pages": 32, "max_model_len": tiny.N_TOKENS + 16} | options
    return LLM(path, **options)


def logits_of(path, **options):
    with open_llm(path, **options) as llm:
        found = llm.logits(tiny.token_ids())
        assert not llm.check()
    return found


@pytest.fixture(scope="module", params=CASES)
def directory(request, tmp_path_factory):
    return request.param, tiny.directory(request.param, tmp_path_factory.mktemp(request.param))


def test_directory_agrees_with_transformers(directory):
    case, path = directory
    found = logits_of(path)[list(tiny.POSITIONS)]
    assert np.abs(EXPECTED[case]).max() > 1
    assert np.abs(found - EXPECTED[case]).max() < 2e-4


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_agrees_with_transformers(tmp_path, case):
    found = logits_of(tiny.gguf_file(case, tmp_path / "m.gguf"))[list(tiny.POSITIONS)]
    assert np.abs(found - EXPECTED[case]).max() < 2e-4


def test_chunks_threads_and_page_sizes_change_no_bit(directory):
    _, path = directory
    whole = logits_of(path)
    with open_llm(path, threads=1, page_tokens=32, max_num_batched_tokens=13) as llm:
        for chunk in (1, 7, 64):
            assert np.array_equal(llm.logits(tiny.token_ids(), chunk=chunk), whole), chunk


def test_neighbours_change_no_token(directory):
    _, path = directory
    ids = tiny.token_ids()
    prompts = [ids[:5], ids[:30], ids[:30] + ids[40:50], ids[3:70]]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with open_llm(path) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with open_llm(path, enable_prefix_caching=False, max_num_batched_tokens=9) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone
    assert len(set(map(tuple, together))) == len(prompts)


@pytest.mark.parametrize("case", WINDOWED)
def test_a_window_is_seen_to_its_last_token_and_no_further(tmp_path, case):
    """Without the window, or with one that is one token longer, the logits past it are others."""
    path = tiny.directory(case, tmp_path)
    whole = logits_of(path)
    for window in (tiny.WINDOW + 1, 200):
        other = logits_of(tiny.directory(case, tmp_path / str(window), sliding_window=window))
        assert np.abs(other[: tiny.WINDOW] - whole[: tiny.WINDOW]).max() == 0
        assert np.abs(other[-1] - whole[-1]).max() > 1e-3


def test_shards_are_one_model(tmp_path):
    one = logits_of(tiny.directory("qwen3", tmp_path / "one"))
    assert np.array_equal(logits_of(tiny.directory("qwen3", tmp_path / "three", n_shards=3)), one)


def test_longrope_chooses_by_the_longest_sequence(tmp_path):
    path = tiny.directory("phi3-short", tmp_path)  # its original context is 96 tokens
    short = logits_of(path, max_model_len=96)
    assert np.abs(short[list(tiny.POSITIONS)] - EXPECTED["phi3-short"]).max() < 2e-4
    assert np.abs(logits_of(path, max_model_len=97) - short).max() > 1e-2


def test_quantization_at_load(tmp_path):
    path = tiny.directory("llama", tmp_path)
    plain, quantised = logits_of(path), logits_of(path, quantization="q8_0")
    assert 1e-3 < np.abs(plain - quantised).mean() < 0.1 * plain.std()
    with pytest.raises(ValueError, match="quantization: 'q3' is not one of q8_0"):
        LLM(path, quantization="q3")
