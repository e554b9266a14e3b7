"""The examples of docs/pages.md run, and those of docs/embedding.md are the code of the downstream projects."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECTS = ROOT / "tests" / "downstream"


def blocks(document, language):
    text = (ROOT / "docs" / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", blocks("pages.md", "python"))
def test_python_examples_run(code):
    exec(compile(code, "pages.md", "exec"), {})


def test_c_examples_are_the_projects_code():
    sources = [path.read_text() for path in PROJECTS.glob("*/*.c")]
    found = blocks("embedding.md", "c")
    assert len(found) == 6
    for block in found:
        assert any(block in source for source in sources), block


def test_cython_examples_are_the_projects_code():
    source = (PROJECTS / "cython_project" / "rows.pyx").read_text()
    imports, *rest = blocks("embedding.md", "cython")
    for module, names in re.findall(r"from ([\w.]+) cimport (.*)", imports):
        assert f"from {module} cimport" in source
        assert all(name in source for name in names.split(", "))
    assert rest
    for block in rest:
        assert block in source, block
