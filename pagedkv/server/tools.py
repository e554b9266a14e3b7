"""Calls of tools: how a model writes them, and where they are in what it wrote."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .errors import bad_request
from .protocol import Message, NamedToolChoice, Tool

Call = tuple[str, str]  # name, arguments as JSON text

# For models whose template knows nothing of tools: the form most templates that do know them ask for.
INSTRUCTIONS = """You can call functions. These are the functions, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags:
<tool_call>
{{"name": "the name", "arguments": {{"parameter": "value"}}}}
</tool_call>"""


@dataclass
class Written:
    """A text divided up. content: what is no call, as far as it is certain; only ever grows at its end.
    calls: whole calls in order."""

    content: str
    calls: list[Call] = field(default_factory=list)


class TaggedCalls:
    """Calls between two marks, each a JSON object with name and arguments. What is between the marks but no call of a
    known function stays text."""

    def __init__(self, names: Iterable[str], start: str = "<tool_call>", end: str = "</tool_call>") -> None:
        self.marks = (start, end)
        self._names = frozenset(names)

    def split(self, text: str, final: bool) -> Written:
        """Divide the text so far; `final`: nothing more will come."""
        start, end = self.marks
        kept: list[str] = []
        calls: list[Call] = []
        done = 0
        while (at := text.find(start, done)) >= 0:
            body_at = at + len(start)
            stop = text.find(end, body_at)
            if stop < 0 and not final:
                kept.append(text[done:at])
                return Written("".join(kept).rstrip(), calls)
            body = text[body_at : len(text) if stop < 0 else stop]
            after = len(text) if stop < 0 else stop + len(end)
            call = _call(body, self._names)
            kept.append(text[done:at])
            if call is None:
                kept.append(text[at:after])
            else:
                calls.append(call)
            done = after
        rest = text[done:]
        if not final:
            rest = rest[: len(rest) - _overlap(rest, start)]
        content = "".join([*kept, rest])
        return Written(content.rstrip() if calls or not final else content, calls)


class ListedCalls:
    """Calls as one JSON list, behind a mark or from the start of the text."""

    def __init__(self, names: Iterable[str], mark: str = "", key: str = "arguments") -> None:
        self.marks = (mark,) if mark else ()
        self._mark = mark
        self._key = key
        self._names = frozenset(names)

    def split(self, text: str, final: bool) -> Written:
        """As TaggedCalls.split."""
        at = text.find(self._mark)
        if at < 0:
            held = 0 if final else _overlap(text, self._mark)
            return Written(text if final else text[: len(text) - held].rstrip())
        before, listed = text[:at], text[at + len(self._mark) :]
        calls, rest = _elements(listed, self._names, self._key)
        if final and rest is not None:
            # what was handed out stays a call, what cannot be read is text
            return Written(before + rest if calls else text, calls)
        return Written(before.rstrip(), calls)


class ObjectCalls:
    """A single call, which is the whole text: a JSON object, perhaps behind a mark."""

    def __init__(self, names: Iterable[str], mark: str, key: str) -> None:
        self.marks = (mark,)
        self._mark = mark
        self._key = key
        self._names = frozenset(names)

    def split(self, text: str, final: bool) -> Written:
        """As TaggedCalls.split. Nothing is certain of a text that begins like a call before it is whole."""
        body = text.removeprefix(self._mark).lstrip()
        if not body.startswith("{") and not (self._mark.startswith(text) or not body):
            return Written(text)
        if not final:
            return Written("")
        call = _call(body, self._names, self._key)
        return Written(text) if call is None else Written("", [call])


Parser = TaggedCalls | ListedCalls | ObjectCalls


def _call(body: str, names: frozenset[str], key: str = "arguments") -> Call | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return _call_of(value, names, key)


def _call_of(value: Any, names: frozenset[str], key: str) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get(key, {})
    if isinstance(arguments, str):
        return value["name"], arguments
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _elements(text: str, names: frozenset[str], key: str) -> tuple[list[Call], str | None]:
    """The calls of a JSON list so far, and what follows the last of them; None when the list is whole and all."""
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        return calls, text
    at = _skip(text, at + 1)
    while text[at : at + 1] == "{":
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        call = _call_of(value, names, key)
        if call is None:
            break
        calls.append(call)
        at = _skip(text, end)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
    whole = bool(calls) and text[at : at + 1] == "]" and not text[at + 1 :].strip()
    return calls, None if whole else text[at:]


def _skip(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that begins the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


@dataclass(frozen=True)
class ToolUse:
    """How one chat request uses tools. parser: None when no calls are looked for. named: the one function whose
    arguments are the whole output. structure: what sampling is bound to. keep_special: marks are special tokens."""

    tools: tuple[dict[str, Any], ...] = ()
    instructions: str | None = None
    parser: Parser | None = None
    named: str | None = None
    structure: dict[str, Any] | None = None
    keep_special: bool = False


def tool_use(
    given: list[Tool] | None,
    choice: str | NamedToolChoice | None,
    template: str | None,
    special_texts: frozenset[str] = frozenset(),
    *,
    one_call: bool = False,
) -> ToolUse:
    """Decide from a request's tools and tool_choice and the model's chat template. special_texts: texts of special
    tokens. one_call: parallel_tool_calls is false."""
    if not given or choice == "none":
        return ToolUse()
    tools = tuple(tool.model_dump(exclude_none=True) for tool in given)
    names = [tool.function.name for tool in given]
    knows = template is not None and "tools" in template
    instructions = None if knows else INSTRUCTIONS.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if isinstance(choice, NamedToolChoice):
        chosen = next(tool for tool in given if tool.function.name == choice.function.name)
        return ToolUse(tools, instructions, named=choice.function.name, structure={"json": _parameters(chosen)})
    if choice == "required":
        calls = [_call_schema(tool) for tool in given]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if one_call:
            schema["maxItems"] = 1
        return ToolUse(tools, instructions, ListedCalls(names), structure={"json": schema})
    parser = _parser_for(template if knows else None, names)
    keep = parser is not None and any(mark in special_texts for mark in parser.marks)
    return ToolUse(tools, instructions, parser, keep_special=keep)


def _parser_for(template: str | None, names: list[str]) -> Parser | None:
    """What reads the calls of a model with this template; None if its template shows no known form."""
    if template is None or "<tool_call>" in template:
        return TaggedCalls(names)
    if "[TOOL_CALLS]" in template:
        return ListedCalls(names, "[TOOL_CALLS]")
    if '"parameters":' in template or "<|python_tag|>" in template:
        return ObjectCalls(names, "<|python_tag|>", "parameters")
    return None


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def template_messages(given: list[Message], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as chat templates read it: plain dicts, arguments of calls as objects, developer as system."""
    messages = []
    for index, message in enumerate(given):
        plain = message.model_dump(exclude_none=True, exclude={"refusal", "annotations", "audio", "function_call"})
        if plain["role"] == "developer":
            plain["role"] = "system"
        for number, call in enumerate(plain.get("tool_calls", ())):
            where = f"messages.{index}.tool_calls.{number}.function.arguments"
            try:
                arguments = json.loads(call["function"]["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise bad_request(f"{where}: not JSON", param=where) from None
            if not isinstance(arguments, dict):
                raise bad_request(f"{where}: must be the JSON text of an object", param=where)
            call["function"]["arguments"] = arguments
        messages.append(plain)
    if instructions is not None:
        if messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
            messages[0]["content"] += "\n\n" + instructions
        else:
            messages.insert(0, {"role": "system", "content": instructions})
    return messages
