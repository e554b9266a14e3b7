"""`pagedkv bench`: what it counts and prints. Nothing here asserts a speed."""

import json
import re

import pytest

from pagedkv.commands import bench
from pagedkv.models.config import ModelConfig
from pagedkv.models.gguf import GGUFFile


def test_json_rows(pagedkv_command, smollm2_path):
    options = "bench --threads 1 --prompt-tokens 6 --gen-tokens 3 --batch 1,2 --json --model"
    result = pagedkv_command(*options.split(), smollm2_path)
    assert result.returncode == 0 and result.stderr == ""
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["batch"] for row in rows] == [1, 2]
    for row in rows:
        measured = {"batch", "prompt_tokens", "gen_tokens", "prefill_tps", "decode_tps", "ttft_ms", "samples"}
        assert set(row) == measured | {"isa", "threads", "model", "kv_format", "activations", "commit"}
        assert (row["prompt_tokens"], row["gen_tokens"], row["threads"]) == (6, 3, 1)
        assert row["model"] == smollm2_path.name  # not where it lies
        for name in ("prefill_tps", "decode_tps", "ttft_ms"):
            samples = sorted(row["samples"][name])
            assert len(samples) == bench.REPEATS and row[name] == samples[bench.REPEATS // 2] > 0


def test_profile_shares_add_up(pagedkv_command, smollm2_path):
    options = "bench --threads 1 --prompt-tokens 4 --gen-tokens 2 --batch 2 --profile"
    row = json.loads(pagedkv_command(*options.split(), "--json").stdout)
    for phase in ("prefill", "decode"):
        shares = row["profile"][phase]
        assert sum(shares.values()) == pytest.approx(1, abs=0.01) and "attention" in shares
        assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert row["profile"]["kernel_type"] == "Q4_1" and row["profile"]["kernel_macs_per_s"] > 0
    text = pagedkv_command(*options.split()).stdout
    assert re.search(r"attention \d+\.\d%", text) and "GMAC/s" in text and "GB/s of weights" in text


def test_lengths_beyond_the_context_are_refused(pagedkv_command, smollm2_path):
    result = pagedkv_command("bench", "--batch", "1", "--prompt-tokens", 9000)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "9000" in result.stderr and "8192" in result.stderr


def test_counted_steps_must_fit_the_context_beside_the_prompts(pagedkv_command, smollm2_path):
    """Otherwise requests end early and nothing is counted as something."""
    done = pagedkv_command("bench", "--batch", "1", "--prompt-tokens", 8192, "--gen-tokens", 64)
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "prompt_tokens 8192, gen_tokens 64" in done.stderr and "it is 8192" in done.stderr


@pytest.mark.parametrize("batch, prompt_tokens", [(1, 1), (3, 700), (40, 30)])
def test_every_counted_step_advances_every_request(smollm2_path, monkeypatch, batch, prompt_tokens):
    """The counted steps are full, also where early requests decode beside a long prefill; nothing is left behind."""
    with bench.load(str(smollm2_path), 2, prompt_tokens, 4, batch) as llm:
        prompts = bench.random_prompts(llm, batch, prompt_tokens, seed=1)
        assert len({tuple(prompt["prompt_token_ids"]) for prompt in prompts}) == batch
        sizes = []
        step = llm.engine.step

        def counting():
            outputs = step()
            sizes.append(len(outputs))
            return outputs

        monkeypatch.setattr(llm.engine, "step", counting)
        before = []
        sample = bench.measure(llm, prompts, 4, lambda: before.append(len(sizes)))
        assert sizes[before[0] : before[0] + 4] == [batch] * 4
        assert len(sample.ttft_s) == batch and max(sample.ttft_s) <= sample.prefill_s
        stats = llm.engine.stats()
        assert not llm.engine.has_unfinished() and stats["pages_in_use"] == 0 and stats["preemptions"] == 0


def test_macs_are_the_weights_of_matrices(smollm2_path):
    """Every weight but the norms' is multiplied once a token; the tied embedding is the output head."""
    with GGUFFile(smollm2_path) as file:
        weights = sum(t.shape[0] * t.shape[1] for t in file.tensors.values() if len(t.shape) == 2)
        layers, head = bench.macs_per_token(ModelConfig.from_gguf(file))
    assert layers + head == weights and head == 49152 * 576
