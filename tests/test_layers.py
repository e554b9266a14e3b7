"""The layer rule, read from the imports: nothing imports upward, and nothing outside tests imports `_testing`."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pagedkv"

# Modules of the core from the bottom up. A module imports only from layers below its own.
CORE_LAYERS = [
    {"errors", "cpus", "structs", "memory", "files", "exclusive"},
    {"arguments"},
    {"_kernels", "internal"},
    {"pages", "quants"},
    {"matmul", "sampling_state", "registry"},
    {"arena", "attention", "probe", "sampler"},
    {"sequence", "check", "page_map", "typed"},
    {"prefix", "kvcache"},
    {"operations", "capi", "layer"},
    {"experts"},
    {"forward"},
]
# The page side of the core knows nothing of kernels and threads.
PAGES = {
    "structs", "arguments", "memory", "internal", "pages", "registry", "arena", "sequence", "check", "page_map",
    "prefix",
}  # fmt: skip
ARITHMETIC = {
    "files", "_kernels", "quants", "matmul", "attention", "sampling_state", "sampler", "probe", "typed", "kvcache",
    "operations", "experts", "layer", "forward",
}  # fmt: skip
# Methods that hand out what is built on their class; imported when called.
FACTORIES = {("arena", "check"), ("arena", "sequence")}

# Parts of the package from the bottom up; `version` stands beside them.
PARTS = ["process", "core", "models", "engine", "llm", "server", "commands", "cli", "__main__"]
# What parts above the core may use of its private module.
PUBLIC_OF_KERNELS = {"ThreadPool", "isa", "isa_names"}

CIMPORT = re.compile(r"^( *)(?:from +([\w.]+) +(?:c?import) +(.+)|c?import +([\w.]+))", re.MULTILINE)


def imports(path):
    """(module, names, deferred) of each import and cimport of pagedkv in a file, module without the `pagedkv.`."""
    here = ("pagedkv", *path.relative_to(PACKAGE).with_suffix("").parts)
    text = path.read_text()
    if path.suffix == ".py":
        found = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found += [(alias.name, [], node.col_offset > 0) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = ".".join([*here[: len(here) - node.level], node.module or ""]) if node.level else node.module
                found.append((base.strip("."), [alias.name for alias in node.names], node.col_offset > 0))
    else:
        found = [
            (match[2] or match[4], re.findall(r"\w+", match[3] or ""), bool(match[1]))
            for match in CIMPORT.finditer(text)
        ]
    for module, names, deferred in found:
        if module == "pagedkv" or module.startswith("pagedkv."):
            yield module.removeprefix("pagedkv").removeprefix("."), names, deferred


def files(*folders):
    found = [path for folder in folders for path in sorted((PACKAGE / folder).glob("*.p*"))]
    return [path for path in found if path.suffix in (".py", ".pyx", ".pxd")]


def layer(name):
    if name.startswith("_testing"):
        return len(CORE_LAYERS)
    found = [i for i, layer in enumerate(CORE_LAYERS) if name in layer]
    assert found, f"core/{name}: give it a place in CORE_LAYERS of {Path(__file__).name}"
    return found[0]


def part(module):
    return module.split(".")[0]


@pytest.mark.parametrize("path", files("core"), ids=lambda path: path.name)
def test_core_imports_downward(path):
    name = path.stem
    if name == "__init__":
        assert not list(imports(path))
        return
    for module, _, deferred in imports(path):
        assert module.startswith("core."), f"core/{path.name} imports pagedkv.{module}"
        other = module.removeprefix("core.")
        if other == name or (deferred and (name, other) in FACTORIES):
            continue
        assert layer(other) < layer(name), f"core/{path.name} imports core/{other}, which is not below it"
        assert not (name in PAGES and other in ARITHMETIC), f"core/{path.name}, of the page side, imports core/{other}"


@pytest.mark.parametrize(
    "path", files("models", "engine", "server", "commands", "."), ids=lambda path: "/".join(path.parts[-2:])
)
def test_parts_import_downward(path):
    own = part(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    if own == "__init__":  # the table of lazy names; what it runs at import is tested in test_import.py
        return
    for module, names, _ in imports(path):
        other = part(module)
        assert "_testing" not in module, f"{path.name} imports {module}"
        if own == "version" or other == "":  # public names through the package itself: for what stands above it
            assert own in ("commands", "cli"), f"{path.name} imports the package"
            continue
        if other == "version":
            continue
        assert PARTS.index(other) <= PARTS.index(own), f"{own} imports pagedkv.{module}"
        if other == "core":
            private = [name for name in names if name.startswith("_")]
            if "._" in module:
                private += [name for name in names if module != "core._kernels" or name not in PUBLIC_OF_KERNELS]
            assert not private, f"{path.name} imports {private} of pagedkv.{module}"


def test_the_reader_sees_imports(tmp_path, monkeypatch):
    """The rules above hold only if imports are found at all: of every kind, in Python and Cython."""
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "engine").mkdir()
    python = tmp_path / "engine" / "a.py"
    python.write_text("import pagedkv.x\nfrom ..core.y import z\nfrom . import b\nif 1:\n    from pagedkv.q import r\n")
    assert list(imports(python)) == [
        ("x", [], False), ("core.y", ["z"], False), ("engine", ["b"], False), ("q", ["r"], True)
    ]  # fmt: skip
    cython = tmp_path / "engine" / "b.pyx"
    cython.write_text("from pagedkv.core.m cimport *\ncimport pagedkv.core.n\n    from pagedkv.core.o import p, q\n")
    assert list(imports(cython)) == [("core.m", [], False), ("core.n", [], False), ("core.o", ["p", "q"], True)]


def test_only_the_kernel_module_reaches_csrc():
    """Other extensions may include a header of inline functions; the sources are linked once."""
    sources = {path.name for path in (ROOT / "csrc").glob("*.c")}
    owned = {"pkv_kernels.h", "threads.h", "cpu.h"}
    assert sources and all((ROOT / "csrc" / name).exists() for name in owned)
    for path in files("core"):
        included = set(re.findall(r'extern from "([\w/.]+)"', path.read_text()))
        if path.stem not in ("_kernels", "_testing_kernels"):
            assert not included & owned, f"core/{path.name} includes {included & owned}"


@pytest.mark.parametrize("path", sorted((ROOT / "csrc").glob("*.[ch]")), ids=lambda path: path.name)
def test_csrc_is_plain_c(path):
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"#ifdef PKV_\w+_EMULATE\n.*?#else\n", "", text, flags=re.DOTALL)  # never in a build, only in tests
    assert "Python.h" not in text
    calls = set(re.findall(r"\b(malloc|calloc|free|printf|fprintf|abort|exit|fopen|assert)\s*\(", text))
    allowed = {"malloc", "calloc", "free"} if path.name == "threads.c" else set()
    assert calls <= allowed, f"{path.name} calls {calls - allowed}"


def test_no_two_test_files_share_a_name():
    """pytest imports them by name alone; with two of one name none at all would run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
