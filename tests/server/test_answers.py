"""Answers of a live server through the official client, each compared with what the engine gives in this process."""

import re
from pathlib import Path

import pytest
from conftest import MODEL

from pagedkv import SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time, 日本", "def add(a, b):\n"]
MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name three colours."}]


def expected(solo, prompt, **params):
    return solo.generate(prompt, SamplingParams(**params))[0]


def test_models(real):
    client = real.client()
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve("alias").max_model_len == 8192


def test_a_completion_is_the_engines(real, solo):
    answer = real.client().completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=12, temperature=0)
    output = expected(solo, PROMPTS[0], max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert "Paris" in choice.text and choice.text == output.outputs[0].text
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.object == "text_completion" and answer.model == MODEL and answer.id.startswith("cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    assert answer.usage.total_tokens == 17


def test_prompts_of_every_kind(real, solo):
    create = real.client().completions.create
    ids = [solo.tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = [expected(solo, prompt, max_tokens=9, seed=5).outputs[0].text for prompt in PROMPTS]
    for prompt, wanted in ((PROMPTS, texts), (ids, texts), (ids[1], texts[1:2]), ([PROMPTS[2]], texts[2:])):
        answer = create(model="alias", prompt=prompt, max_tokens=9, seed=5)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))


def test_parameters_reach_the_sampler(real, solo):
    common = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": [30],
             "ignore_eos": True}  # fmt: skip
    output = expected(solo, PROMPTS[1], seed=2**64 - 3, logit_bias={260: -100.0, 30: 1.5}, **common, **extra)
    answer = real.client().completions.create(
        model=MODEL, prompt=PROMPTS[1], seed=-3, logit_bias={"260": -100, "30": 1.5},
        extra_body={**extra, "return_token_ids": True}, **common,
    )  # fmt: skip
    assert answer.choices[0].text == output.outputs[0].text
    assert answer.choices[0].token_ids == output.outputs[0].token_ids
    plain = expected(solo, PROMPTS[1], seed=2**64 - 3, max_tokens=20)
    assert plain.outputs[0].token_ids != output.outputs[0].token_ids


@pytest.mark.parametrize("stop", [" United", ["zzz", "ted S"]])
def test_stop_texts(real, solo, stop):
    options = {"max_tokens": 40, "temperature": 0, "stop": stop}
    output = expected(solo, PROMPTS[0], **options).outputs[0]
    choice = real.client().completions.create(model=MODEL, prompt=PROMPTS[0], **options).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (output.text, "stop", output.stop_reason)
    assert "Paris" in choice.text and "United States" not in choice.text


def test_n_outputs_in_order(real, solo):
    output = expected(solo, PROMPTS[0], n=3, max_tokens=10, seed=9)
    answer = real.client().completions.create(model=MODEL, prompt=[PROMPTS[0]] * 2, n=3, max_tokens=10, seed=9)
    texts = [each.text for each in output.outputs]
    assert len(set(texts)) == 3 and [choice.text for choice in answer.choices] == texts * 2
    assert answer.usage.completion_tokens == 60 and answer.usage.prompt_tokens == 10


def test_completion_logprobs(real, solo):
    output = expected(solo, PROMPTS[1], max_tokens=16, seed=3, logprobs=3, prompt_logprobs=3)
    made, tokenizer = output.outputs[0], solo.tokenizer
    create = real.client().completions.create
    found = create(model=MODEL, prompt=PROMPTS[1], max_tokens=16, seed=3, logprobs=3).choices[0].logprobs
    assert found.token_logprobs == [float(entries[token]) for token, entries in
                                    zip(made.token_ids, made.logprobs, strict=True)]  # fmt: skip
    for entries, top in zip(made.logprobs, found.top_logprobs, strict=True):
        best = [float(entry) for entry in entries.values() if entry.rank <= 3]
        assert sorted(top.values(), reverse=True) == sorted(best, reverse=True)
    echoed = create(model=MODEL, prompt=PROMPTS[1], max_tokens=16, seed=3, logprobs=3, echo=True).choices[0]
    assert echoed.text == PROMPTS[1] + made.text
    n = len(output.prompt_token_ids)
    assert echoed.logprobs.token_logprobs[0] is None and echoed.logprobs.top_logprobs[0] is None
    wanted = [float(entries[token]) for token, entries in
              zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)]  # fmt: skip
    assert echoed.logprobs.token_logprobs[1:n] == wanted and echoed.logprobs.token_logprobs[n:] == found.token_logprobs
    assert echoed.logprobs.text_offset[n:] == [offset + len(PROMPTS[1]) for offset in found.text_offset]
    for token, label, offset in zip(made.token_ids, found.tokens, found.text_offset, strict=True):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text:
            assert label == text and made.text[offset : offset + len(label)] == label
        else:
            assert label.startswith("bytes:\\x")
    scored = create(model=MODEL, prompt=PROMPTS[1], max_tokens=0, logprobs=0, echo=True)
    assert scored.choices[0].text == PROMPTS[1] and scored.choices[0].finish_reason == "length"
    assert scored.choices[0].logprobs.token_logprobs == [None, *wanted] and scored.usage.completion_tokens == 0


def test_chat_is_the_engines(real, solo):
    output = solo.chat(MESSAGES, SamplingParams(max_tokens=24, seed=4, n=2, logprobs=2))[0]
    answer = real.client().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=24, seed=4, n=2, logprobs=True, top_logprobs=2
    )
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    for choice, made in zip(answer.choices, output.outputs, strict=True):
        assert choice.message.role == "assistant" and choice.message.content == made.text
        assert choice.finish_reason == made.finish_reason
        assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content) == b"".join(
            solo.tokenizer.token_bytes(token, False) for token in made.token_ids
        )
        for entry, token, entries in zip(choice.logprobs.content, made.token_ids, made.logprobs, strict=True):
            assert entry.logprob == float(entries[token])
            top = sorted((e for e in entries.values() if e.rank <= 2), key=lambda e: e.rank)
            assert [each.logprob for each in entry.top_logprobs] == [float(each) for each in top]


def test_the_end_of_a_chat_answer(real, solo):
    """Without a bound on its length an answer ends with the model's own stop token, or a stop text."""
    create = real.client().chat.completions.create
    output = solo.chat(MESSAGES, SamplingParams(max_tokens=None, min_tokens=6, logit_bias={2: 100.0}, seed=0))[0]
    options = {"logit_bias": {"2": 100}, "extra_body": {"min_tokens": 6}, "seed": 0}
    choice = create(model=MODEL, messages=MESSAGES, **options).choices[0]
    assert (choice.message.content, choice.finish_reason) == (output.outputs[0].text, "stop")
    assert choice.stop_reason == output.outputs[0].stop_reason == 2 and len(output.outputs[0].token_ids) == 7
    output = solo.chat(MESSAGES, SamplingParams(max_tokens=None, stop="e", seed=0))[0].outputs[0]
    choice = create(model=MODEL, messages=MESSAGES, stop="e", seed=0).choices[0]
    assert (choice.message.content, choice.stop_reason) == (output.text, "e")


def test_parts_and_developer_messages(real):
    create = real.client().chat.completions.create
    text = [{"type": "text", "text": "You are "}, {"type": "text", "text": "terse."}]
    parts = [{"role": "developer", "content": text}, MESSAGES[1]]
    answers = [create(model=MODEL, messages=each, max_tokens=12, temperature=0) for each in (MESSAGES, parts)]
    contents = [answer.choices[0].message.content for answer in answers]
    assert contents[0] == contents[1] != ""


# Streams


def test_streamed_text_adds_up(real, solo):
    output = solo.chat(MESSAGES, SamplingParams(max_tokens=40, seed=6, n=2, logprobs=1, stop=["zzz"]))[0]
    stream = real.client().chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=40, seed=6, n=2, logprobs=True, top_logprobs=1, stop="zzz",
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    usage = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usage) == 1 and chunks[-1].usage and chunks[-1].choices == []
    assert usage[0].completion_tokens == sum(len(each.token_ids) for each in output.outputs)
    for index, made in enumerate(output.outputs):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert len(parts) > 5 and parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == made.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [made.finish_reason]
        logprobs = [entry.logprob for part in parts if part.logprobs for entry in part.logprobs.content]
        assert logprobs == [float(entries[token]) for token, entries in zip(made.token_ids, made.logprobs, strict=True)]


def test_streamed_completions_add_up(real, solo):
    create = real.client().completions.create
    options = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 24, "seed": 8, "n": 2, "logprobs": 1, "echo": True}
    whole = create(**options).choices
    chunks = list(create(**options, stream=True))
    for choice in whole:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [value for part in parts if part.logprobs for value in getattr(part.logprobs, field)]
            assert joined == getattr(choice.logprobs, field)
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
    for index, prompt in enumerate(PROMPTS):
        output = expected(solo, prompt, n=2, max_tokens=24, seed=8)
        assert [choice.text for choice in whole[2 * index : 2 * index + 2]] == [
            prompt + each.text for each in output.outputs
        ]


def test_the_wire_format_of_a_stream(real):
    body = {"prompt": "1 2 3", "max_tokens": 3, "stream": True}
    response = real.post("/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream") and response.headers["x-request-id"]
    events = response.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])


# Embeddings and tokens


def test_embeddings(real, solo):
    import base64

    import numpy as np

    texts = ["A cat sat on a mat.", "A kitten rested on a rug.", "Interest rates rose by a quarter point."]
    client = real.client()
    answer = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    vectors = np.array([item.embedding for item in answer.data], np.float32)
    assert vectors.shape == (3, 576) and np.allclose((vectors.astype(float) ** 2).sum(1), 1, atol=1e-6)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far
    assert answer.usage.prompt_tokens == sum(len(solo.tokenizer.encode(text)) for text in texts)
    packed = real.post("/v1/embeddings", {"input": texts[1], "encoding_format": "base64"}).json()["data"][0][
        "embedding"
    ]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == vectors[1].tolist()
    assert (
        client.embeddings.create(model=MODEL, input=solo.tokenizer.encode(texts[2])).data[0].embedding
        == vectors[2].tolist()
    )


def test_tokens_there_and_back(real, solo):
    text = "naïve café 日本 <|im_end|>"
    found = real.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == solo.tokenizer.encode(text) and found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 8192 and len(found["token_strs"]) == found["count"]
    assert real.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = real.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert chat == solo.tokenizer.encode_chat(MESSAGES)


def test_cached_tokens_and_salts(real):
    def cached(salt):
        body = {"prompt": "A rather unusual beginning: " + "x y " * 40, "max_tokens": 1, "cache_salt": salt}
        return real.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("first") == 0 and cached("first") >= 64 and cached("second") == 0


def test_a_deadline_keeps_the_text_so_far(real):
    body = {"prompt": "Count:", "max_tokens": 5000, "ignore_eos": True, "timeout": 0.5}
    choice = real.post("/v1/completions", body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout") and choice["text"]


def test_the_guides_examples(real, capsys):
    """docs/server.md: what it shows for curl and for the official client is answered."""
    guide = (Path(__file__).parent.parent.parent / "docs" / "server.md").read_text()
    guide = guide.replace("http://127.0.0.1:8000", real.url).replace("smollm2-135m-instruct", MODEL)
    url, body = re.search(r"curl (\S+) -H 'Content-Type: application/json' -d '(.*?)'", guide, re.DOTALL).groups()
    response = real.http.post(url, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n")
    code = next(block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "OpenAI(" in block)
    exec(compile(code, "server.md", "exec"), {})
    assert real.service.fingerprint in capsys.readouterr().out
