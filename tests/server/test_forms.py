"""Answers of a given form on the real model: JSON, schemas, expressions, and calls of tools."""

import json
import re

import pytest
from conftest import MODEL

from pagedkv import SamplingParams, StructuredOutputsParams

USER = [{"role": "user", "content": "Describe a city."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "capital": {"type": "boolean"},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe"]},
    },
    "required": ["name", "population", "capital", "continent"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place",
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["unit", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop_clock"}},
]


def check_city(text):
    city = json.loads(text)
    assert set(city) == set(SCHEMA["properties"]) and isinstance(city["capital"], bool)
    assert type(city["population"]) is int and city["continent"] in SCHEMA["properties"]["continent"]["enum"]


def test_a_schema_is_followed(real, solo):
    create = real.client().chat.completions.create
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    params = SamplingParams(max_tokens=200, seed=2, n=2, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    wanted = [each.text for each in solo.chat(USER, params)[0].outputs]
    answer = create(model=MODEL, messages=USER, max_tokens=200, seed=2, n=2, response_format=form)
    assert [choice.message.content for choice in answer.choices] == wanted
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    for text in wanted:
        check_city(text)
    chunks = create(model=MODEL, messages=USER, max_tokens=200, seed=2, response_format=form, stream=True)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == wanted[0]


def test_the_clients_own_parser(real):
    """A class as the form, and an object of it as the answer."""
    from typing import Literal

    from pydantic import BaseModel

    class Step(BaseModel):
        operation: Literal["add", "take"]
        amount: Literal[1, 2, 3]

    answer = real.client().chat.completions.parse(
        model=MODEL, messages=USER, max_tokens=100, seed=1, response_format=Step
    )
    step = answer.choices[0].message.parsed
    assert isinstance(step, Step) and step.operation in ("add", "take")


def test_other_forms(real):
    create = real.client().completions.create
    prompt = "The best colour is"

    def text(**form):
        return create(model=MODEL, prompt=prompt, max_tokens=60, seed=3, extra_body=form).choices[0].text

    assert re.fullmatch("[0-9]{3}-[a-f]+x", text(structured_outputs={"regex": "[0-9]{3}-[a-f]{1,5}x"}))
    assert text(structured_outputs={"choice": [" violet", " ochre"]}) in (" violet", " ochre")
    assert text(structured_outputs={"grammar": 'start: "a" "b"'}) == "ab"
    assert isinstance(json.loads(text(structured_outputs={"json": '{"type": "integer", "maximum": 9999}'})), int)
    form = {"response_format": {"type": "json_object"}}
    answer = create(model=MODEL, prompt="An object:", max_tokens=200, temperature=0, extra_body=form)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].text), dict)
    else:
        assert answer.choices[0].text.lstrip().startswith("{")


@pytest.mark.parametrize(
    "form",
    [{"regex": "("}, {"grammar": "start: missing"}, {"json": {"type": "nonsense"}}, {"json": "["}, {"regex": ""}],
)
def test_forms_that_cannot_be_followed(real, form):
    for stream in (False, True):
        response = real.post("/v1/completions", {"prompt": "x", "structured_outputs": form, "stream": stream})
        assert response.status_code == 400 and response.json()["error"]["param"].startswith("structured_outputs")


@pytest.mark.parametrize("form", [{"regex": "(a{1000}){1000}"}])
def test_forms_that_grow_too_large_as_they_are_used(real, form):
    """The library finds out at the first token, or later; it is the request's fault all the same."""
    body = {"prompt": "Hi", "max_tokens": 3, "structured_outputs": form}
    response = real.post("/v1/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "structured_outputs"
    events = [line for line in real.post("/v1/completions", body | {"stream": True}).text.splitlines() if line]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["param"] == "structured_outputs" and error["message"].startswith("structured_outputs: ")


# Tools


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_named_function_is_called(real, stream):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    message, finish = ask(real, stream, tool_choice=choice)
    assert message["content"] in (None, "") and finish == "stop"
    ((name, arguments),) = message["calls"]
    found = json.loads(arguments)
    assert name == "get_weather" and found["unit"] in ("celsius", "fahrenheit") and 1 <= found["days"] <= 9


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_some_function_is_called(real, stream):
    message, finish = ask(real, stream, tool_choice="required", parallel_tool_calls=False)
    ((name, arguments),) = message["calls"]
    assert finish == "tool_calls" and name in ("get_weather", "stop_clock") and isinstance(json.loads(arguments), dict)


def test_streamed_calls_are_the_whole_ones(real):
    for choice in ({"type": "function", "function": {"name": "get_weather"}}, "required"):
        assert ask(real, False, tool_choice=choice) == ask(real, True, tool_choice=choice)


def test_calls_a_model_makes_by_itself(real, solo):
    """The output bound to the text of a call, as a model that knows tools would write it: the call is found."""
    call = '<tool_call>{"name": "get_weather", "arguments": {"unit": "celsius", "days": 3}}</tool_call>'
    for before in ("", "Let me look. "):
        for stream in (False, True):
            form = {"structured_outputs": {"choice": [before + call]}}
            message, finish = ask(real, stream, extra_body=form)
            assert message["calls"] == [("get_weather", '{"unit": "celsius", "days": 3}')]
            assert (message["content"] or "") == before.strip() and finish == "tool_calls"
    plain = {"structured_outputs": {"choice": ["<tool_call>nothing</tool_call> I <tool"]}}
    for stream in (False, True):
        message, finish = ask(real, stream, extra_body=plain)
        assert message == {"content": "<tool_call>nothing</tool_call> I <tool", "calls": []} and finish == "stop"


def test_the_functions_are_in_the_prompt(real, solo):
    """This model's template knows nothing of tools: they are described in the system message."""
    ids = real.post("/tokenize", {"messages": USER, "tools": TOOLS}).json()["tokens"]
    text = solo.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n") and '"get_weather"' in text and "<tool_call>" in text
    answer = real.client().chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert answer.prompt_token_ids == ids
    none = real.client().chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, tool_choice="none", max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert none.prompt_token_ids == solo.tokenizer.encode_chat(USER)


def test_an_answer_goes_back_with_the_tools_result(real):
    client = real.client()
    first = client.chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, tool_choice="required", seed=1, max_tokens=100
    ).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "17 degrees"}
    # the client's own objects, as its documentation sends them back
    answer = client.chat.completions.create(model=MODEL, messages=[*USER, first, result], tools=TOOLS, max_tokens=8)
    assert answer.usage.completion_tokens >= 1


def ask(live, stream, **options):
    """({content, calls: [(name, arguments)]}, finish reason) of a chat with TOOLS, put together if it is a stream."""
    create = live.client().chat.completions.create
    asked = {"model": MODEL, "messages": USER, "tools": TOOLS, "max_tokens": 160, "seed": 4, **options}
    if not stream:
        choice = create(**asked).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        return {"content": choice.message.content, "calls": calls}, choice.finish_reason
    content, calls, finish = "", [], None
    for chunk in create(**asked, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert call.id and call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        finish = choice.finish_reason or finish
    return {"content": content if content or not calls else None, "calls": [tuple(call) for call in calls]}, finish
