"""What the server tells about itself: metrics that add up, fingerprints, health; and embeddings of the engine."""

import dataclasses
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import MODEL, TINY, served
from prometheus_client.parser import text_string_to_metric_families

from pagedkv import LLM
from pagedkv.engine.embedding import embed
from pagedkv.server.fingerprint import fingerprint, model_hash
from pagedkv.version import NUMERICS

COMPLETIONS = "/v1/completions"


def test_health_version_and_openapi(small):
    assert small.http.get("/health").json() == {"status": "ok"}
    assert small.http.get("/ready").json() == {"status": "ready"}
    version = small.http.get("/version").json()
    assert version["version"].count(".") == 2 and version["system_fingerprint"] == small.service.fingerprint
    assert small.post(COMPLETIONS, {"prompt": "x"}).json()["system_fingerprint"] == small.service.fingerprint
    assert small.http.head("/health").status_code == 200
    assert small.http.get("/health").headers.get("server") != "pagedkv"


def test_metrics_count_what_was_done(small):
    small.wait_idle()
    before = small.metrics()
    body = {"prompt": ["abc", "abcdef"], "n": 2, "max_tokens": 6, "ignore_eos": True, "logit_bias": {"0": -100}}
    assert small.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 24
    small.post(COMPLETIONS, {"prompt": "x", "max_tokens": 9, "stop_token_ids": [5], "logit_bias": {"5": 100}})
    small.post(COMPLETIONS, {"prompt": "x", "temperature": -1})
    after = small.metrics()
    grown = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    assert grown["vllm:prompt_tokens_total"] == 10 and grown["vllm:generation_tokens_total"] == 25
    assert grown['vllm:request_success_total{finished_reason="length"}'] == 2
    assert grown['vllm:request_success_total{finished_reason="stop"}'] == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown[f"vllm:{name}_count"] == 3 == grown[f'vllm:{name}_bucket{{le="+Inf"}}']
        assert grown[f"vllm:{name}_sum"] > 0
    assert grown["vllm:iteration_tokens_total_count"] == grown["pagedkv:engine_steps_total"] > 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    pages = [after[f'pagedkv:pages{{state="{state}"}}'] for state in ("free", "cached", "in_use")]
    assert sum(pages) == small.llm.kv.n_pages and pages[2] == 0 and pages[1] > 0
    assert after["process_open_fds"] > 3 and after["process_resident_memory_bytes"] > 1 << 20


def test_metrics_of_guesses(tiny_path, small):
    """Equal logits make an output of one token over and over, which is guessed from its second on."""
    name = "vllm:spec_decode_num_"
    assert {small.metrics()[f"{name}{what}_total"] for what in ("drafts", "draft_tokens", "accepted_tokens")} == {0}
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(tiny_path, threads=1, kv_pages=40, speculative_config=config) as llm, served(llm) as live:
        llm.engine.scheduler.speculation.margin = 0  # guess whenever there is a guess
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        assert live.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 60
        found = live.metrics()
    places = [found[f'{name}accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)]
    accepted, steps = found[f"{name}accepted_tokens_total"], found["pagedkv:engine_steps_total"]
    assert accepted + steps == 60 and sum(places) == accepted > 40
    assert places == sorted(places, reverse=True) and places[0] <= found[f"{name}drafts_total"] <= steps
    assert accepted <= found[f"{name}draft_tokens_total"] <= 3 * found[f"{name}drafts_total"]


def test_metrics_are_prometheus_text(small):
    response = small.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["vllm:num_requests_running"].type == "gauge" and families["vllm:prompt_tokens"].type == "counter"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            if family.name.startswith("vllm:"):
                assert sample.labels["model_name"] == TINY
    openmetrics = small.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


# Fingerprints


def llm_like(path, **changes):
    settings = {"activations": "int8", "quantization": None, "context": None} | changes
    kv_format = settings.pop("kv_format", "f16")
    return SimpleNamespace(
        model=SimpleNamespace(path=path), kv=SimpleNamespace(format=kv_format), settings=settings
    )


def test_a_fingerprint_names_model_numerics_and_settings(real, smollm2_path):
    from pagedkv.models.catalogue import CATALOGUE

    digest = CATALOGUE["smollm2-135m-instruct"].sha256
    assert model_hash(smollm2_path) == digest
    assert real.service.fingerprint == f"{digest[:16]}-n{NUMERICS}-f16-int8"
    assert fingerprint(real.llm) == fingerprint(llm_like(smollm2_path))


def test_whatever_changes_bytes_changes_the_fingerprint(tiny_path, tmp_path):
    other = tmp_path / "other.gguf"
    raw = bytearray(tiny_path.read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    changes = [{}, {"activations": "int12"}, {"quantization": "q8_0"}, {"kv_format": "int8"}, {"context": "c4096"}]
    found = [fingerprint(llm_like(tiny_path, **change)) for change in changes] + [fingerprint(llm_like(other))]
    assert len(set(found)) == len(found)
    copy = tmp_path / "renamed.gguf"
    shutil.copy(tiny_path, copy)
    assert fingerprint(llm_like(copy)) == found[0]


def test_what_settings_an_llm_names(tiny_path):
    with LLM(tiny_path, kv_pages=8, threads=1, kv_format="int8", activations="int12") as llm:
        assert fingerprint(llm).endswith("-int8-int12")
        assert llm.settings == {"activations": "int12", "quantization": None, "context": None}


def test_parts_and_directories_count_whole(tmp_path):
    for number in (1, 2):
        (tmp_path / f"m-{number:05}-of-00002.gguf").write_bytes(b"part %d" % number)
    first = tmp_path / "m-00001-of-00002.gguf"
    before = model_hash(first)
    (tmp_path / "m-00003-of-00009.gguf").write_bytes(b"of another")
    assert model_hash(first) == before
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"changed")
    assert model_hash(first) != before
    folder = tmp_path / "directory"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(name)
    before = model_hash(folder)
    (folder / "README.md").write_text("no part of the model")
    assert model_hash(folder) == before
    os.rename(folder / "tokenizer.json", folder / "other.json")
    assert model_hash(folder) != before


# Embeddings


@pytest.fixture(scope="module")
def texts(solo):
    rng = np.random.default_rng(3)
    return [rng.integers(3, 40_000, n).tolist() for n in (1, 2, 16, 33, 70)]


def test_embeddings_are_the_mean_of_what_the_head_reads(solo, texts):
    """Hidden states times the embedding matrix, which this model's head is, are its logits."""
    engine = solo.engine
    for ids in texts:
        n, forward = len(ids), engine.model.forward
        hidden = np.empty((n, forward.hidden_size), np.float32)
        logits = np.empty((n, forward.vocab_padded), np.float32)
        seq = solo.kv.sequence()
        seq.extend(n)
        forward.run(solo.kv, [seq], np.array(ids, np.int32), np.array([n], np.int32), np.arange(n, dtype=np.int32),
                    logits, hidden)  # fmt: skip
        seq.free()
        assert np.array_equal(logits[:, : forward.vocab_size], solo.logits(ids))
        mean = hidden.astype(np.float64).mean(axis=0)
        assert np.allclose(embed(engine, ids), mean / np.linalg.norm(mean), atol=1e-6)
    # hidden states of the last text explain its logits: a linear map fits them all
    weights, _, rank, _ = np.linalg.lstsq(hidden.astype(np.float64), logits[:, :50].astype(np.float64), rcond=None)
    assert rank == n and np.abs(hidden @ weights - logits[:, :50]).max() < 1e-2


def test_embeddings_have_the_same_bits_however_computed(real, solo, smollm2_path, texts):
    wanted = [embed(solo.engine, ids).tobytes() for ids in texts]
    with LLM(smollm2_path, threads=2, kv_pages=40, max_num_batched_tokens=7, page_tokens=32) as other:
        assert [embed(other.engine, ids).tobytes() for ids in texts] == wanted
        assert other.check() == []
    body = {"prompt": ["A b c", "1 2 3"], "max_tokens": 40, "ignore_eos": True, "seed": 1}
    alone = [choice["text"] for choice in real.post(COMPLETIONS, body).json()["choices"]]
    answer = real.client().embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [np.array(item.embedding, np.float32).tobytes() for item in answer.data] == wanted
    assert [choice["text"] for choice in real.post(COMPLETIONS, body).json()["choices"]] == alone


def test_embeddings_wait_their_turn_in_a_full_pool(tiny_path):
    """Whoever came before goes on undisturbed; the vector is the same."""
    from pagedkv import SamplingParams

    with LLM(tiny_path, threads=1, kv_pages=12) as llm:
        prompts = [[5] * 60, [6] * 60, [7] * 60]
        params = SamplingParams(max_tokens=4, ignore_eos=True, seed=3)
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        vector = embed(llm.engine, [9] * 150)
        names = [llm.engine.add_request(prompt, params) for prompt in prompts]
        done = {output.request_id: output for output in llm.engine.step()}
        assert llm.engine.stats()["pages_in_use"] >= 8
        assert embed(llm.engine, [9] * 150).tobytes() == vector.tobytes()
        assert llm.engine.stats()["preemptions"] == 0
        while llm.engine.has_unfinished():
            done |= {output.request_id: output for output in llm.engine.step()}
        assert [done[name].outputs[0].token_ids for name in names] == wanted
        assert llm.engine.stats()["pages_in_use"] == 0 and llm.check() == []
        first, _ = llm.embed([[9] * 150, [9]])
        assert first.outputs.embedding.tobytes() == vector.tobytes()
        for ids, part in (([], "empty"), ([10**6], "1000000"), ([1] * 257, "257 tokens"), ([1] * 193, "193 tokens")):
            with pytest.raises(ValueError, match=part):
                embed(llm.engine, ids)


def test_settings_do_not_show_keys():
    from pagedkv.server.settings import ServerSettings

    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerSettings().max_n = 3
