"""help() shows how the classes of the core are made, and shows what the stubs promise to type checkers."""

import ast
import inspect
from pathlib import Path

import pytest

import pagedkv
from pagedkv import Arena, PagedKVCache, PrefixIndex, Sequence
from pagedkv.core.kvcache import KVSequence

CLASSES = [Arena, Sequence, PrefixIndex, PagedKVCache, KVSequence]


def stub(cls):
    """(name, whether keyword-only, default or None) of each parameter of __init__ in the class's .pyi file."""
    path = Path(pagedkv.__file__).parent / "core" / f"{cls.__module__.rpartition('.')[2]}.pyi"
    (body,) = [node.body for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == cls.__name__]
    (arguments,) = [node.args for node in body if getattr(node, "name", "") == "__init__"]
    plain = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    found = [(a.arg, False, d) for a, d in zip(arguments.args, plain, strict=True)][1:]
    found += [(a.arg, True, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [(name, keyword, None if default is None else ast.literal_eval(default)) for name, keyword, default in found]


@pytest.mark.parametrize("cls", CLASSES)
def test_the_signature_of_a_class_is_that_of_its_stub(cls):
    parameters = inspect.signature(cls).parameters.values()
    shown = [(p.name, p.kind is p.KEYWORD_ONLY, None if p.default is p.empty else p.default) for p in parameters]
    assert shown == stub(cls)
    assert not inspect.getdoc(cls).startswith(cls.__name__ + "(")


@pytest.mark.parametrize("cls", CLASSES)
def test_every_public_method_shows_its_arguments(cls):
    for name in dir(cls):
        if not name.startswith("_") and callable(getattr(cls, name)):
            assert "self" in inspect.signature(getattr(cls, name)).parameters, name
