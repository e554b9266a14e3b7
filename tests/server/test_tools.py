"""How calls of tools are found in what a model writes, whole and piece by piece."""

import json

import pytest

from pagedkv.server.protocol import NamedToolChoice, Tool
from pagedkv.server.tools import ListedCalls, ObjectCalls, TaggedCalls, template_messages, tool_use

NAMES = ["add", "weather"]
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}'
OTHER = '{"name": "weather", "arguments": {}}'
ADD = ("add", '{"a": 1, "b": [2, "é"]}')
WEATHER = ("weather", "{}")

TAGGED = [
    ("no call at all", "no call at all", []),
    ("a < b <tool", "a < b <tool", []),
    (f"<tool_call>{CALL}</tool_call>", "", [ADD]),
    (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.", [ADD]),
    (f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>", "", [ADD, WEATHER]),
    (f"<tool_call>{CALL}", "", [ADD]),  # ended by its stop token
    (f"one <tool_call>{CALL}</tool_call> two", "one  two", [ADD]),
    ("x <tool_call>{not json}</tool_call> y", "x <tool_call>{not json}</tool_call> y", []),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>',) * 2 + ([],),
    ('<tool_call>{"name": "add", "arguments": 3}</tool_call>',) * 2 + ([],),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (f'<tool_call>{CALL}</tool_call><tool_call>{{"name"', '<tool_call>{"name"', [ADD]),
]
LISTED = [
    (f"[TOOL_CALLS][{CALL}, {OTHER}]", "", [ADD, WEATHER]),
    (f"Well: [TOOL_CALLS] [{CALL}]", "Well:", [ADD]),
    ("[TOOL_C", "[TOOL_C", []),
    ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("[TOOL_CALLS]3", "[TOOL_CALLS]3", []),
    (f"[TOOL_CALLS][{CALL}, {{", "{", [ADD]),
]
BARE = [
    (f"[{CALL},{OTHER}]", "", [ADD, WEATHER]),
    (f' [ {CALL} , {{"name": "wea', '{"name": "wea', [ADD]),
    ('[{"name": "add", "argu', '[{"name": "add", "argu', []),
]
OBJECT = [
    ("plain", "plain", []),
    ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ('<|python_tag|>{"name": "add", "parameters": {}}', "", [("add", "{}")]),
    ('{"name": "add", "parameters": {"a"', '{"name": "add", "parameters": {"a"', []),
    ('{"a": 1}', '{"a": 1}', []),
    ("", "", []),
]
CASES = [
    *((TaggedCalls(NAMES), *case) for case in TAGGED),
    *((ListedCalls(NAMES, "[TOOL_CALLS]"), *case) for case in LISTED),
    *((ListedCalls(NAMES), *case) for case in BARE),
    *((ObjectCalls(NAMES, "<|python_tag|>", "parameters"), *case) for case in OBJECT),
]


@pytest.mark.parametrize("parser, text, content, calls", CASES)
def test_calls_and_text_are_told_apart(parser, text, content, calls):
    written = parser.split(text, True)
    assert (written.content, written.calls) == (content, calls)
    for _, arguments in written.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("parser, text, content, calls", CASES)
def test_what_was_handed_out_stays(parser, text, content, calls):
    """While a text grows, content grows at its end and calls stay: what a stream sends adds up to the whole."""
    sent, known = "", []
    for end in range(len(text) + 1):
        for final in (False, True) if end == len(text) else (False,):
            written = parser.split(text[:end], final)
            assert written.content.startswith(sent) and written.calls[: len(known)] == known, text[:end]
            sent, known = written.content, written.calls
    assert (sent, known) == (content, calls)


def tools(**parameters):
    given = {"type": "object", "properties": parameters} if parameters else None
    return [
        Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": given}}),
        Tool.model_validate({"type": "function", "function": {"name": "weather", "description": "of a place"}}),
    ]


def test_the_template_decides_the_form():
    def parser_of(template):
        return tool_use(tools(), "auto", template).parser

    assert isinstance(parser_of("{% if tools %}<tool_call>{% endif %}"), TaggedCalls)
    assert isinstance(parser_of("{{ tools }}[TOOL_CALLS]"), ListedCalls)
    assert isinstance(parser_of("{{ tools }}<|python_tag|>"), ObjectCalls)
    assert parser_of("{{ tools }}") is None
    for ignorant in ("{{ messages }}", None):
        use = tool_use(tools(), "auto", ignorant)
        assert isinstance(use.parser, TaggedCalls) and '"name": "weather"' in use.instructions
    assert tool_use(tools(), "auto", "{{ tools }}").instructions is None
    assert tool_use(tools(), "none", None) == tool_use(None, None, None)


def test_marks_that_are_special_tokens_stay_in_the_text():
    assert tool_use(tools(), "auto", "{{ tools }}[TOOL_CALLS]", frozenset({"[TOOL_CALLS]"})).keep_special
    assert not tool_use(tools(), "auto", "{{ tools }}[TOOL_CALLS]", frozenset({"<s>"})).keep_special


def test_a_forced_call_binds_the_sampling():
    integer = {"a": {"type": "integer"}}
    choice = NamedToolChoice.model_validate({"type": "function", "function": {"name": "add"}})
    named = tool_use(tools(**integer), choice, None)
    assert named.named == "add" and named.structure == {"json": {"type": "object", "properties": integer}}
    required = tool_use(tools(**integer), "required", None, one_call=True).structure["json"]
    assert required["minItems"] == required["maxItems"] == 1
    assert [call["properties"]["name"] for call in required["items"]["anyOf"]] == [{"const": n} for n in NAMES]
    assert "maxItems" not in tool_use(tools(), "required", None).structure["json"]


def test_instructions_join_the_system_message():
    from pagedkv.server.protocol import ChatRequest

    def messages(*given):
        request = ChatRequest.model_validate({"messages": list(given)})
        return template_messages(request.messages, "INSTRUCTIONS")

    user = {"role": "user", "content": "x"}
    assert messages(user) == [{"role": "system", "content": "INSTRUCTIONS"}, user]
    for role in ("system", "developer"):
        found = messages({"role": role, "content": "be brief"}, user)
        assert found == [{"role": "system", "content": "be brief\n\nINSTRUCTIONS"}, user]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answered = messages(user, {"role": "assistant", "tool_calls": [call]},
                        {"role": "tool", "tool_call_id": "1", "content": "3"})  # fmt: skip
    assert answered[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert answered[3] == {"role": "tool", "tool_call_id": "1", "content": "3"}
