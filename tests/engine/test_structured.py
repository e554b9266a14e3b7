"""Structured output on a tiny model whose tokens are bytes: masks, ends, refusals, and parity with a solo run."""

import asyncio
import functools
import json
import re
import sys
import threading

import numpy as np
import pytest
from fakes import FakeKV, fake_model

from pagedkv import AsyncEngine
from pagedkv.core.sampler import Sampler
from pagedkv.core.sampling_state import SamplingState
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.structured import Grammars, StructuredOutputsParams

PIECES = [b"", *(bytes([i]) for i in range(256)), b'{"', b'": ', b'", "', b"true", "é".encode(), b"12", b"  ", b"ab"]
VOCAB = len(PIECES) + 3  # three ids have no token
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

TRUTHS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 9}


class ByteTokenizer:
    """Token 0 is the end of text, 1 + b the byte b, then a few longer ones. first_space: as SentencePiece has it."""

    vocab_size = len(PIECES)
    special_ids = frozenset([0])

    def __init__(self, first_space=False):
        self.strips_first_space = first_space

    def token_bytes(self, token, skip_special_tokens=True):
        if token == 0:
            return b"" if skip_special_tokens else b"<end>"
        return PIECES[token] if token < len(PIECES) else b""

    def encode(self, text, add_special_tokens=True, allow_special=False):
        return [1 + byte for byte in (" " if self.strips_first_space else "").encode() + text.encode()]

    def decode(self, ids, skip_special_tokens=True):
        raw = b"".join(self.token_bytes(i, skip_special_tokens) for i in ids)
        return (raw.removeprefix(b" ") if self.strips_first_space else raw).decode("utf-8", "replace")


def make_model(first_space=False, **settings):
    model = fake_model(vocab_size=VOCAB, context_length=200, **settings)
    model.tokenizer = ByteTokenizer(first_space)
    return model


def make_engine(model=None, n_pages=400, **settings):
    return LLMEngine(model or make_model(), FakeKV(n_pages), max_model_len=200, enable_prefix_caching=False, **settings)


def run(engine, prompts, params):
    ids = [engine.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    done = {}
    while engine.has_unfinished():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
    assert engine.stats()["pages_in_use"] == 0
    return [done[request_id] for request_id in ids]


@functools.cache
def common_engine():
    return make_engine()


def generate(structured, engine=None, **params):
    params = {"seed": 1, "max_tokens": 150, **params}
    (output,) = run(
        engine or common_engine(), [[66, 67]], [SamplingParams(structured_outputs=make(structured), **params)]
    )
    return output.outputs[0]


def make(structured):
    return StructuredOutputsParams(**structured)


def bits(mask):
    return [i for i in range(VOCAB) if int(mask[i // 32]) >> (i % 32) & 1]


def solo(model, prompt, params, index):
    """Token ids by drawing alone, the matcher made anew for every token and fed from the start."""
    grammars = Grammars(model)
    state = SamplingState(
        VOCAB, seed=params.seed, index=index, temperature=params.temperature, top_p=params.top_p,
        min_tokens=params.min_tokens, stop_ids=sorted({0, *params.stop_token_ids}),
    )  # fmt: skip
    sampler, tokens = Sampler(VOCAB), []
    while True:
        (mask,) = grammars.masks(params.structured_outputs, 1)
        state.set_mask(mask.allowed(tokens))
        sampler.sample(np.array([model.forward.solo_logits(prompt + tokens)], np.float32), [state], [0])
        tokens.append(state.token)
        state.accept(state.token)
        (mask,) = grammars.masks(params.structured_outputs, 1)
        if state.token in {0, *params.stop_token_ids} or mask.complete(tokens) or len(tokens) == params.max_tokens:
            return tokens


# What comes out


def test_json_follows_its_schema():
    for seed in range(20):
        done = generate({"json": PERSON}, seed=seed)
        value = json.loads(done.text)
        assert done.finish_reason == "stop" and done.stop_reason is None
        assert list(value) == ["name", "age"] and len(value["name"]) <= 6 and 0 <= value["age"] <= 99


@pytest.mark.parametrize("pattern", [r"[a-c]{3}", r"([0-9][0-9]?,){2}x", "é+z", r"a|bb|ccc", r"[^a-z]{2}q"])
def test_a_regex_is_matched_whole(pattern):
    for seed in range(10):
        done = generate({"regex": pattern}, seed=seed)
        if done.finish_reason == "stop":
            assert re.fullmatch(pattern, done.text)
    assert done.finish_reason in ("stop", "length")


@pytest.mark.parametrize("choice", [["yes", "no", "maybe"], ["a", "ab", "abc"], ['"\\', "\n", "é世"], ["only"]])
def test_a_choice_is_one_of_them(choice):
    seen = {generate({"choice": choice}, seed=seed).text for seed in range(40)}
    assert seen <= set(choice) and len(seen) >= min(2, len(choice))


@pytest.mark.parametrize("grammar", ['start: "x" digit+ ";"\ndigit: "0" | "7"', 'root ::= "x" d+ ";"\nd ::= [07]'])
def test_grammars_in_both_syntaxes(grammar):
    for seed in range(5):
        assert re.fullmatch("x[07]+;", generate({"grammar": grammar}, seed=seed).text)


def test_any_json_object():
    for seed in range(8):
        done = generate({"json_object": True}, seed=seed, max_tokens=120)
        assert done.finish_reason == "length" or isinstance(json.loads(done.text), dict)


def test_blanks_in_json_are_bounded_or_none():
    wide = [generate({"json": PERSON}, seed=seed).text for seed in range(10)]
    assert any(re.search(r"\s", text) for text in wide) and not any(re.search(r"\s{21}", text) for text in wide)
    tight = [generate({"json": TRUTHS, "disable_any_whitespace": True}, seed=seed).text for seed in range(10)]
    assert all(re.fullmatch(r"\[(true|false)(,(true|false))+\]", text) for text in tight)
    own = generate({"json": TRUTHS, "whitespace_pattern": "_"}).text
    assert re.fullmatch(r"[a-z\[\],_]+", own) and 2 <= len(json.loads(own.replace("_", ""))) <= 9


# The end


def test_nothing_can_follow_a_complete_text():
    done = generate({"regex": "ab?c"}, min_tokens=40)
    assert (done.finish_reason, done.stop_reason) == ("stop", None) and re.fullmatch("ab?c", done.text)
    assert 0 not in done.token_ids


def test_complete_at_the_last_token_is_stop_not_length():
    full = generate({"regex": "[ab]{7}"})
    again = generate({"regex": "[ab]{7}"}, max_tokens=len(full.token_ids))
    assert (again.finish_reason, again.text) == ("stop", full.text)


def test_the_end_of_text_is_allowed_where_the_text_may_end():
    ends = [generate({"regex": "a{3,}"}, seed=seed) for seed in range(8)]
    assert any(done.finish_reason == "stop" for done in ends)
    for done in ends:
        assert set(done.text) == {"a"} and len(done.text) >= 3
        if done.finish_reason == "stop":
            assert done.stop_reason == 0 and done.token_ids[-1] == 0 and 0 not in done.token_ids[:-1]


def test_ignore_eos_does_not_hold():
    """Past its end a text would not follow its grammar any more."""
    ends = [generate({"regex": "a{3,}"}, seed=seed, ignore_eos=True, skip_special_tokens=False) for seed in range(8)]
    assert any(done.finish_reason == "stop" for done in ends) and all(set(done.text) == {"a"} for done in ends)


def test_min_tokens_keeps_the_end_away():
    for seed in range(8):
        assert len(generate({"regex": "a{3,}"}, seed=seed, min_tokens=30).token_ids) > 29


def test_a_model_without_stop_ids_ends_by_its_grammar():
    engine = make_engine(make_model(stop_token_ids=()))
    done = generate({"json": PERSON}, engine)
    assert done.finish_reason == "stop" and json.loads(done.text)
    done = generate({"regex": "a+"}, engine, max_tokens=20)
    assert done.finish_reason == "length" and set(done.text) == {"a"}


def test_stop_strings_and_stop_ids_cut_as_ever():
    whole = generate({"json": PERSON}).text
    done = generate({"json": PERSON}, stop='"age')
    assert done.stop_reason == '"age' and whole.startswith(done.text) and '"age' not in done.text
    done = generate({"json": PERSON}, stop_token_ids=[1 + ord(":")])
    assert done.finish_reason == "stop" and whole.startswith(done.text)


@pytest.mark.parametrize("n", [1, 2, 5, 11])
def test_a_text_cut_by_max_tokens_is_the_beginning_of_a_whole_one(n):
    whole = generate({"json": PERSON}).text
    done = generate({"json": PERSON}, max_tokens=n)
    assert done.finish_reason == "length" and whole.startswith(done.text) and done.text


def test_the_text_is_what_the_grammar_matched_even_where_a_first_space_is_stripped():
    engine = make_engine(make_model(first_space=True))
    for pattern in (" ab[cd]", "[ x]yz", r"abc[0-9]"):
        for seed in range(5):
            assert re.fullmatch(pattern, generate({"regex": pattern}, engine, seed=seed).text)


# The masks


@pytest.mark.parametrize("structured", [{"regex": r"(?s:.*)"}, {"json_object": True}, {"regex": "<end>[a-z]{5}"}])
def test_only_text_is_allowed(structured):
    """No special token and no id without a token, wherever the text stands; the end only where it may end."""
    grammars = Grammars(make_model())
    for seed in range(3):
        tokens = generate(structured, seed=seed, max_tokens=30).token_ids
        for n in range(len(tokens)):
            (mask,) = grammars.masks(make(structured), 1)
            allowed = bits(mask.allowed(tokens[:n]))
            assert not set(allowed) & set(range(len(PIECES), VOCAB))
            assert (0 in allowed) == ("(?s" in str(structured) and not cut_character(tokens[:n]))


def cut_character(tokens):
    try:
        b"".join(PIECES[token] for token in tokens).decode()
    except UnicodeDecodeError:
        return True
    return False


def test_masks_allow_what_a_choice_can_go_on_with():
    """Against all texts written out: nothing else is allowed, and every choice stays within reach."""
    choice = ["abba", "abe", "aé", "12", "true", "truth"]
    grammars = Grammars(make_model())
    whole = [text.encode() for text in choice]
    todo, seen = [()], 0
    while todo:
        tokens = list(todo.pop())
        done = b"".join(PIECES[token] for token in tokens)
        (mask,) = grammars.masks(make({"choice": choice}), 1)
        allowed = set(bits(mask.allowed(tokens)))
        reach = {text for text in whole if text.startswith(done)}
        assert (0 in allowed) == (done in whole)
        nexts = {token: done + PIECES[token] for token in allowed - {0}}
        assert all(any(text.startswith(more) for text in reach) for more in nexts.values())
        assert all(any(text.startswith(more) for more in nexts.values()) for text in reach - {done})
        todo += [(*tokens, token) for token in nexts]
        seen += 1
    assert seen > 15


def test_outputs_equal_their_solo_run_in_a_batch_with_forks_and_preemption():
    model = make_model()
    engine = make_engine(model, n_pages=60, max_num_batched_tokens=9, max_num_seqs=7)
    forms = [{"json": PERSON}, {"regex": "[a-f]{20}"}, {"choice": ["yes", "no"]}, {"json_object": True}, None]
    params = [
        SamplingParams(
            seed=i,
            n=1 + i % 3,
            max_tokens=40,
            temperature=0.5 + i % 2,
            top_p=0.9,
            min_tokens=i % 4,
            structured_outputs=None if forms[i % 5] is None else make(forms[i % 5]),
        )
        for i in range(15)
    ]
    prompts = [[70 + i, *range(30, 40 + i)] for i in range(15)]
    for prompt, each, output in zip(prompts, params, run(engine, prompts, params), strict=True):
        for done in output.outputs:
            if each.structured_outputs is not None:
                assert done.token_ids == solo(model, prompt, each, done.index)
    assert engine.stats()["preemptions"] > 0


def test_guesses_do_not_change_a_structured_output():
    params = [
        SamplingParams(seed=i, max_tokens=60, structured_outputs=make({"regex": "(abcabd|12)+"})) for i in range(4)
    ]
    plain = run(make_engine(), [[66, 67]] * 4, params)
    config = {"method": "ngram", "num_speculative_tokens": 5}
    engine = make_engine(speculative_config=config)
    guessed = run(engine, [[66, 67]] * 4, params)
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in guessed]


# Beside allowed ids


A, B, C = 1 + ord("a"), 1 + ord("b"), 1 + ord("c")


def test_allowed_ids_and_a_form_are_both_followed():
    output = generate({"regex": "[a-c]{9}"}, allowed_token_ids=[0, B, C, 1 + ord("z")])
    assert output.finish_reason == "stop" and set(output.text) <= {"b", "c"} and len(output.text) == 9


@pytest.mark.parametrize("allowed", [[B], [0], [0, B, VOCAB - 1]])
def test_allowed_ids_that_the_form_cannot_begin_with_are_refused(allowed):
    with pytest.raises(ValueError) as caught:
        generate({"regex": "a[bc]"}, allowed_token_ids=allowed)
    told = "allowed_token_ids must be ids with one that structured_outputs.regex can begin with, not ("
    assert str(caught.value).startswith(told)


def test_allowed_ids_that_the_form_cannot_go_on_with_end_the_output():
    """What can be known only behind the tokens drawn: an error that names the field, for this output alone."""
    output = generate({"regex": "a[bc]"}, allowed_token_ids=[A], n=2)
    assert (output.token_ids, output.text, output.finish_reason) == ([A], "a", "error")
    assert output.stop_reason == (
        "structured_outputs: no token that can come next is among those the other parameters allow"
    )
    assert generate({"regex": "a"}, allowed_token_ids=[A]).finish_reason == "stop"


# Refusals and faults


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": PERSON, "regex": "a"},
        {"regex": "a", "json_object": True},
        {"json": "{"},
        {"json": "[1]"},
        {"json": 5},
        {"json": {"a": float("nan")}},
        {"json": {"a": {1, 2}}},
        {"json": ""},
        {"json": "[" * 100000},
        {"regex": ""},
        {"regex": 5},
        {"regex": "\ud800"},
        {"regex": "a" * ((1 << 17) + 1)},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", ""]},
        {"choice": ["a", 3]},
        {"choice": ["a" * (1 << 16)] * 3},
        {"grammar": b"x"},
        {"json_object": 1},
        {"json_object": True, "disable_any_whitespace": None},
        {"regex": "a", "disable_any_whitespace": True},
        {"regex": "a", "whitespace_pattern": " "},
        {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
        {"json_object": True, "whitespace_pattern": ""},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_bad_fields_are_refused_when_made(fields):
    with pytest.raises(ValueError) as caught:
        make(fields)
    message = str(caught.value)
    assert message.startswith("structured_outputs") and " must be " in message and ", not " in message
    assert "\n" not in message and len(message) < 300


def loop():
    schema = {}
    schema["a"] = schema
    return schema


def test_a_schema_that_holds_itself_is_refused():
    with pytest.raises(ValueError, match=r"^structured_outputs\.json must be a JSON schema"):
        make({"json": loop()})


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "nothing"}},
        {"json": {"not": {"type": "string"}}},
        {"json": {"type": "string", "minLength": 5, "maxLength": 2}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "https://example.com/schema"}},
        {"json": '{"type": "integer", "minimum": ' + "1" * 400 + "}"},
        {"json": '{"items": ' * 400 + "{}" + "}" * 400},
        {"regex": "("},
        {"regex": "(" * 5000 + ")" * 5000},
        {"regex": r"(a)\1"},
        {"regex": "(?=a)b"},
        {"grammar": "start: missing"},
        {"grammar": "nothing like a grammar"},
        {"grammar": "start: start"},
        {"grammar": 'root ::= "a'},
        {"grammar": "root ::= " + "(" * 5000},
        {"grammar": "start: " + "(" * 5000},
        {"json_object": True, "whitespace_pattern": "("},
    ],
    ids=lambda fields: str(fields)[:50],
)
def test_what_cannot_be_followed_is_refused_at_submission_in_one_line(fields):
    engine = make_engine()
    with pytest.raises(ValueError) as caught:
        engine.add_request([66], SamplingParams(structured_outputs=make(fields)))
    message = str(caught.value)
    kind = next(iter(fields))
    assert message.startswith(f"structured_outputs.{kind} cannot be followed: ") and len(message) < 360
    assert "\n" not in message and not engine.has_unfinished()


def test_without_the_library_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError) as caught:
        make_engine().add_request([66], SamplingParams(structured_outputs=make({"regex": "a"})))
    assert str(caught.value) == "structured outputs need the llguidance library: pip install 'pagedkv[structured]'"
    assert caught.value.__cause__ is None


def test_a_grammar_that_grows_too_complex_ends_its_own_request_alone():
    engine = make_engine()
    hard = make({"grammar": 'start: ("a"{1000}){1000}'})
    params = [SamplingParams(seed=i, max_tokens=20, structured_outputs=hard if i == 1 else None) for i in range(3)]
    free = run(make_engine(), [[66]] * 3, [SamplingParams(seed=i, max_tokens=20) for i in range(3)])
    outputs = run(engine, [[66]] * 3, params)
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [free[i].outputs[0].token_ids for i in (0, 2)]
    failed = outputs[1].outputs[0]
    assert failed.finish_reason == "error" and "Too many items" in failed.stop_reason and "\n" not in failed.stop_reason


def test_params_are_immutable_hashable_and_compared_by_value():
    schema = {"type": "object"}
    params = make({"json": schema})
    schema["type"] = "string"
    assert params == make({"json": {"type": "object"}}) and hash(params) == hash(make({"json": '{"type": "object"}'}))
    assert params.kind == "json" and json.loads(params.json) == {"type": "object"}
    with pytest.raises(AttributeError):
        params.regex = "a"


def test_the_table_of_tokens_is_made_once_by_whichever_thread_comes_first():
    grammars = Grammars(make_model())
    found = []
    threads = [threading.Thread(target=lambda: found.append(grammars.tokenizer())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1


def test_a_coroutine_waits_for_its_grammar_beside_the_event_loop():
    engine = make_engine()
    threads, prepare = [], engine.prepare

    def watched(*arguments, **options):
        threads.append(threading.current_thread())
        return prepare(*arguments, **options)

    engine.prepare = watched
    params = SamplingParams(seed=4, max_tokens=150, structured_outputs=make({"json": PERSON}))

    async def main():
        async with AsyncEngine(engine) as stream_engine:
            outputs = [output async for output in stream_engine.generate([66, 67], params)]
            with pytest.raises(ValueError, match=r"structured_outputs\.regex cannot be followed"):
                await stream_engine.submit([66], SamplingParams(structured_outputs=make({"regex": "("})))
            return outputs[-1].outputs[0]

    done = asyncio.run(main())
    assert done.text == generate({"json": PERSON}, seed=4).text and done.finish_reason == "stop"
    assert len(threads) == 2 and threading.current_thread() not in threads
