"""Chat templates of models, rendered in a sandbox with bounds on time and size."""

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, SecurityError
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 1 << 18
MAX_OUTPUT_CHARS = 1 << 24
MAX_SECONDS = 2.0
_MAX_INT_BITS = 256
_MAX_DIGITS = 300
# str.format is offered through `wrap_str_format`, which the sandboxes of older versions of jinja2 do not ask
_REFUSED_METHODS = ("format", "format_map")
_PADDINGS = ("center", "ljust", "rjust", "zfill")
_CONVERSION = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?[#0 +-]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<kind>.)", re.S
)
_NUMBER = re.compile(r"\d+")
# the names a model's reasoning goes by in messages
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """The chat template is missing, broken, over its bounds, or refuses the messages. One line."""


class _Deadline(BaseException):
    """Raised inside a rendering thread whose time is up; no `except Exception` of a template engine stops it."""


class ChatTemplate:
    """One compiled template, as Hugging Face transformers would run it."""

    def __init__(self, source: str, *, max_seconds: float = MAX_SECONDS, max_chars: int = MAX_OUTPUT_CHARS):
        """Compile `source`. Raises ChatTemplateError for a syntax error or a source longer than MAX_SOURCE_CHARS."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(f"chat template: {len(source)} characters, at most {MAX_SOURCE_CHARS} are allowed")
        self._max_seconds = max_seconds
        environment = _Environment(max_chars)
        try:
            tree = environment.parse(source)
            self._reads_parts = _iterates_over_content(tree)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template line {error.lineno}: {_one_line(error.message or '')}") from None
        except (RecursionError, ValueError, SyntaxError, MemoryError) as error:
            raise ChatTemplateError(f"chat template: cannot be compiled: {_one_line(str(error))}") from None

    def render(self, messages: list, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text made of `messages`, which are not changed.

        A content of None is an empty text; a content of several text parts is joined, unless the template reads parts
        itself. Raises ChatTemplateError, also for the template's own `raise_exception`. Renders in a thread of its own
        and blocks until it is done or out of time.
        """
        if not isinstance(messages, list | tuple) or not all(isinstance(message, dict) for message in messages):
            raise ChatTemplateError("messages: must be a list of dicts with role and content")
        messages = [self._with_content(message) for message in messages]
        # templates test `tools is not none` and iterate over what is there
        variables = {"tools": None, "documents": None, **variables}
        return _run_bounded(
            lambda: self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables),
            self._max_seconds,
        )

    def _with_content(self, message: dict) -> dict:
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
            message.setdefault("thinking", reasoning)
        content = message.get("content")
        if content is None:
            return {**message, "content": ""}
        if isinstance(content, str) or self._reads_parts:
            return message
        if not isinstance(content, list | tuple):
            raise ChatTemplateError(f"content: must be text, a list of parts or null, not {type(content).__name__}")
        texts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ChatTemplateError(
                    f"content: a part of type {kind!r} is not supported by this model, only text is"
                )
            texts.append(text)
        return {**message, "content": "".join(texts)}


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with operators, filters and methods that refuse to grow without end."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_chars: int):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=self._finalize
        )
        self._max_chars = max_chars
        own: dict[str, Callable] = {
            "tojson": self._tojson, "replace": self._replace, "indent": self._indent, "join": self._join,
            "format": lambda form, *args, **kwargs: self._percent(str(form), kwargs or args),
        }  # fmt: skip
        filters = {name: self._measured(name, filter) for name, filter in self.filters.items()} | own
        self.filters = {name: self._bounded(filter) for name, filter in filters.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": self.globals["namespace"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }
        self.concat = self._concat  # type: ignore[method-assign]

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, bytes)):
            raise SecurityError(f"the operator {operator} is not allowed in chat templates")
        if operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_size(len(left) + len(right))
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if hasattr(value, "__len__") and isinstance(times, int):
                    self._check_size(len(value) * times)
            if isinstance(left, int) and isinstance(right, int):
                self._check_bits(left.bit_length() + right.bit_length())
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map, with attributes as the sandbox gives them, and bounded."""
        name, text = getattr(value, "__name__", ""), getattr(value, "__self__", None)
        if not isinstance(text, str) or name not in _REFUSED_METHODS:
            return None
        formatter = _Formatter(self)

        def formatted(*args, **kwargs) -> str:
            return formatter.vformat(str(text), args, kwargs)

        return formatted if name == "format" else lambda mapping: formatted(**mapping)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes) and attr in _REFUSED_METHODS:
            return False
        if isinstance(obj, int) and attr == "to_bytes":
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context, obj, *args, **kwargs):
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str | bytes):
            if name == "replace" and isinstance(owner, str):
                return self._replace(owner, *args, **kwargs)
            if name == "replace":
                raise SecurityError("replace of bytes is not allowed in chat templates")
            if name == "join" and args:
                parts = [part if isinstance(part, bytes) else str(part) for part in args[0]]
                self._check_size(len(owner) * len(parts) + sum(map(len, parts)))
                return owner.join(parts)  # type: ignore[arg-type]
            if name in _PADDINGS and args and isinstance(args[0], int):
                self._check_size(args[0])
            if name == "expandtabs":
                width = args[0] if args else kwargs.get("tabsize", 8)
                self._check_size(len(owner) * (abs(width) if isinstance(width, int) else 1))
            if name == "translate" and args and isinstance(args[0], Mapping):
                longest = max([len(to) for to in args[0].values() if isinstance(to, str)], default=1)
                self._check_size(len(owner) * max(longest, 1))
        return super().call(context, obj, *args, **kwargs)

    def _percent(self, form: str, values: Any) -> str:
        """form % values, measured before it is made."""
        room = self._size_of(values)
        for conversion in _CONVERSION.finditer(form):
            for number in (conversion["width"], conversion["precision"]):
                if number == "*":
                    raise SecurityError("a width of * in the operator % is not allowed in chat templates")
                room += int(number[: len(str(self._max_chars)) + 1] or 0) if number else 0
            # by name one value can be written any number of times
            if conversion["key"] is not None and isinstance(values, Mapping):
                room += self._size_of(values.get(conversion["key"]))
            self._check_size(len(form) + room)
        return form % values

    def _size_of(self, value: Any) -> int:
        """How many characters `value` is about written out as."""
        if isinstance(value, list | tuple | dict):
            return _bounded_walk(value, self._check_size)
        return len(value) if isinstance(value, str) else 32

    def _measured(self, name: str, filter: Callable) -> Callable:
        """`filter`, refusing the arguments of its own that would make much out of little."""
        rules: dict[str, Callable[..., int]] = {
            "center": lambda text, width=80: width,
            "batch": lambda items, linecount, fill_with=None: linecount,
            "slice": lambda items, slices, fill_with=None: slices,
            "wordwrap": lambda text, width=79, break_long_words=True, wrapstring=None, break_on_hyphens=True: (
                (len(str(text)) + 1) * (len(wrapstring or "") + 16)
            ),
            "urlize": lambda text, trim_url_limit=None, nofollow=False, target=None, rel=None, extra_schemes=None: (
                (len(str(text)) + 1) * (64 + len(target or "") + len(rel or ""))
            ),
            "round": lambda value, precision=0, method="common": (
                self._max_chars + 1 if isinstance(precision, int) and abs(precision) > _MAX_DIGITS else 0
            ),
        }
        if name not in rules:
            return filter
        rule, skipped = rules[name], 1 if getattr(filter, "jinja_pass_arg", None) is not None else 0

        @functools.wraps(filter)
        def measured(*args, **kwargs):
            size = rule(*args[skipped:], **kwargs)
            self._check_size(size if isinstance(size, int) else 0)
            return filter(*args, **kwargs)

        return measured

    def _join(self, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        parts, between, n = [], str(d), 0
        for item in value:
            parts.append(str(self._finalize(item)))
            n += len(parts[-1]) + len(between)
            self._check_size(n)
        return between.join(parts)

    def _check_size(self, n: int) -> None:
        if n > self._max_chars:
            raise SecurityError(f"a value of {n} elements, at most {self._max_chars} are allowed")

    def _check_bits(self, n: int) -> None:
        if n > _MAX_INT_BITS:
            raise SecurityError(f"an integer of {n} bits, at most {_MAX_INT_BITS} are allowed")

    def _concat(self, parts) -> str:
        parts = list(parts)
        self._check_size(sum(map(len, parts)))
        return "".join(parts)

    def _parse(self, source, name, filename):
        return _ConcatToCall().visit(super()._parse(source, name, filename))

    def join_texts(self, values: list) -> str:
        """What the operator ~ does, bounded."""
        return self._concat([str(self._finalize(value)) for value in values])

    def _bounded(self, filter: Callable) -> Callable:
        """`filter`, refusing arguments that would be written out without end."""

        @functools.wraps(filter)
        def bounded(*args, **kwargs):
            for value in args:
                self._finalize(value)
            return filter(*args, **kwargs)

        return bounded

    def _finalize(self, value: Any) -> Any:
        """Bound what a container is written out as: lists shared within lists can stand for more than fits anywhere."""
        if isinstance(value, list | tuple | dict):
            _bounded_walk(value, self._check_size)
        return value

    def _tojson(self, value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        if indent is not None:
            self._check_size((indent if isinstance(indent, int) else len(str(indent))) * 1024)
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self._check_size(len(text))
        return text

    def _replace(self, text: Any, old: str, new: str, count: int | None = -1) -> str:
        text, old, new = str(text), str(old), str(new)
        n = text.count(old) if count is None or count < 0 else min(count, text.count(old))
        self._check_size(len(text) + n * len(new))
        return text.replace(old, new, n)

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        if isinstance(width, int):
            self._check_size(width)
        prefix = " " * width if isinstance(width, int) else width
        lines = str(text).split("\n")
        self._check_size(len(lines) * (len(prefix) + 1) + len(text))
        out = [line if not line and not blank else prefix + line for line in lines[1:]]
        return "\n".join([prefix + lines[0] if first else lines[0], *out])


class _ConcatToCall(NodeTransformer):
    """Turns a ~ b, which the sandbox cannot intercept, into a call that it can."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        parts = nodes.List([self.visit(part) for part in node.nodes])
        return nodes.Call(nodes.EnvironmentAttribute("join_texts"), [parts], [], None, None, lineno=node.lineno)


class _Formatter(SandboxedFormatter):
    """What str.format does, each field measured before it is written."""

    def __init__(self, environment: _Environment):
        super().__init__(environment)
        self._environment, self._n = environment, 0

    def format_field(self, value: Any, spec: str) -> str:
        widths = sum(int(number[:12]) for number in _NUMBER.findall(spec))
        self._n += widths + self._environment._size_of(value)
        self._environment._check_size(self._n)
        return super().format_field(value, spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._environment._check_size(self._n + self._environment._size_of(value))
        return super().convert_field(value, conversion)


class _Generation(Extension):
    """The tag {% generation %}, which marks what a model was trained to write: its body is rendered as it is."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _bounded_walk(value: Any, check_size: Callable[[int], None]) -> int:
    """Count the leaves of nested containers, as often as they would be written, against the bound."""
    n, stack = 0, [value]
    while stack:
        item = stack.pop()
        n += 1 + (len(item) if isinstance(item, str) else 0)
        check_size(n)
        if isinstance(item, dict):
            stack += item.values()
            stack += item.keys()
        elif isinstance(item, list | tuple):
            stack += item
    return n


def _raise_exception(message: Any) -> NoReturn:
    raise ChatTemplateError(_one_line(str(message)))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Whether some loop of the template runs over a message's content, that is, over its parts."""
    for loop in tree.find_all(nodes.For):
        source = loop.iter.node if isinstance(loop.iter, nodes.Filter) else loop.iter
        if isinstance(source, nodes.Getattr) and source.attr == "content":
            return True
        if isinstance(source, nodes.Getitem) and isinstance(source.arg, nodes.Const) and source.arg.value == "content":
            return True
    return False


def _run_bounded(work: Callable[[], str], seconds: float) -> str:
    """work() in a thread, interrupted after `seconds`. Whatever it raises comes out as ChatTemplateError."""
    import ctypes

    result: list[str] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="chat-template", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Deadline))
        thread.join(1.0)
    if result:
        return result[0]
    error = failure[0] if failure else None
    if isinstance(error, ChatTemplateError):
        raise error
    if error is None or isinstance(error, _Deadline):
        raise ChatTemplateError(f"chat template: not finished after {seconds:g} seconds")
    raise ChatTemplateError(f"chat template: {_one_line(str(error)) or type(error).__name__}") from None
