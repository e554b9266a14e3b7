"""Structured output of real models and tokenizers: what comes out validates, whatever the seed."""

import itertools
import json
import re

import jsonschema
import pytest

from pagedkv import LLM, SamplingParams, StructuredOutputsParams
from pagedkv.engine.structured import Grammars
from pagedkv.models.loader import load_model

ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 18, "maximum": 120},
        "vip": {"type": "boolean"},
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"enum": ["apple", "pear", "fig"]},
                    "price": {"type": "number", "minimum": 0, "maximum": 9},
                    "note": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z ]{0,8}$"}]},
                },
                "required": ["name", "note"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "age", "items"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Write down an order of a fruit shop as JSON."}]


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(smollm2_path, max_model_len=512, kv_pages=900) as llm:
        yield llm


def chat(llm, params):
    return [output.outputs[0] for output in llm.chat([ASK] * len(params), params)]


def form(**fields):
    return StructuredOutputsParams(**fields)


def test_json_of_fifty_seeds_validates_and_equals_its_solo_run(llm):
    params = [
        SamplingParams(seed=seed, temperature=1.2, max_tokens=300, structured_outputs=form(json=ORDER))
        for seed in range(50)
    ]
    outputs = chat(llm, params)
    for done in outputs:
        assert done.finish_reason == "stop"
        jsonschema.validate(json.loads(done.text), ORDER)
    assert len({done.text for done in outputs}) > 30
    for seed in (3, 31):
        assert chat(llm, [params[seed]])[0] == outputs[seed]


def test_regex_choice_and_grammar(llm):
    forms = [
        (form(regex=r"[A-Z][a-z]{2,8}, [0-9]{4}-[01][0-9]-[0-3][0-9]"), r"[A-Z][a-z]{2,8}, \d{4}-[01]\d-[0-3]\d"),
        (form(choice=["red", "green", "dark green"]), "red|green|dark green"),
        (form(grammar='start: pair ("," pair){2}\npair: WORD "=" /[0-9]/\nWORD: /[a-z]{1,6}/'), r"([a-z]+=\d,?){3}"),
        (form(grammar='root ::= "<" [a-z] [a-z] ">"'), "<[a-z][a-z]>"),
    ]  # fmt: skip
    params = [SamplingParams(seed=i, max_tokens=80, structured_outputs=forms[i % 4][0]) for i in range(16)]
    for i, done in enumerate(chat(llm, params)):
        assert done.finish_reason == "stop" and re.fullmatch(forms[i % 4][1], done.text)


def test_streams_grow_to_the_whole_and_cuts_are_their_beginnings(llm):
    params = SamplingParams(seed=5, max_tokens=300, structured_outputs=form(json=ORDER))
    prompt = {"prompt_token_ids": llm.tokenizer.encode_chat(ASK)}
    texts = [output.outputs[0].text for output in llm.stream(prompt, params)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    jsonschema.validate(json.loads(texts[-1]), ORDER)
    cuts = [
        SamplingParams(seed=5, max_tokens=n, structured_outputs=form(json=ORDER)) for n in range(1, len(texts) - 1, 7)
    ]
    for done in chat(llm, cuts):
        assert done.finish_reason == "length" and done.text and texts[-1].startswith(done.text)


def test_masked_requests_leave_the_others_as_they_are(llm):
    free = [SamplingParams(seed=seed, max_tokens=24, logprobs=1) for seed in range(4)]
    alone = chat(llm, free)
    mixed = chat(llm, free + [SamplingParams(seed=9, max_tokens=60, structured_outputs=form(json=ORDER))] * 4)
    assert mixed[:4] == alone


@pytest.mark.parametrize("name", ["smollm2_path", "gemma3_path"])
def test_the_table_of_tokens_is_exact(name, request):
    """Bytes of all tokens as decoded; texts that are encoded pass token by token; nothing special is text."""
    model = load_model(request.getfixturevalue(name), threads=1)
    try:
        grammars, tokenizer = Grammars(model), model.tokenizer
        table = grammars.tokenizer()
        stops = set(model.config.stop_token_ids)
        for token in range(0, tokenizer.vocab_size, 7):
            special = token in tokenizer.special_ids or token in stops
            assert table.is_special_token(token) == special
            if not special:
                assert table.decode_bytes([token]) == tokenizer.token_bytes(token)
        assert set(table.eos_tokens) == stops
        for text in (
            " a  b\n\tc",
            "naïve 世界 👩‍👩‍👧 ß",
            '{"k": [1, 2.5e3, "\\u00e9"]}',
            "<|im_end|><end_of_turn></s>",
            "\x00\x7f",
        ):
            ids = tokenizer.encode(text, add_special_tokens=False)
            (mask,) = grammars.masks(form(choice=[text, text + "!"]), 1)
            for n in range(len(ids)):
                words = mask.allowed(ids[:n])
                assert int(words[ids[n] // 32]) >> (ids[n] % 32) & 1
            assert not mask.complete(ids) and mask.complete([*ids, *tokenizer.encode("!", add_special_tokens=False)])
        (mask,) = grammars.masks(form(regex="(?s:.*)"), 1)
        words = mask.allowed([])
        for token in tokenizer.special_ids:
            assert (int(words[token // 32]) >> (token % 32) & 1) == (token in stops)
    finally:
        model.close()
