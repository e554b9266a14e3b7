"""The README's examples and commands work as written."""

import ctypes
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import command_line
import pytest

import pagedkv
from pagedkv.cli import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run_python(code, tmp_path):
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, env=command_line.environment()
    )


def test_model_example(smollm2_path, tmp_path):
    result = run_python(blocks("python")[0], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "The sea is" in result.stdout and "A page table maps" in result.stdout


def test_arena_example(tmp_path):
    result = run_python(blocks("python")[1], tmp_path)
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr


def test_c_example(tmp_path):
    """The function of the example, called through the capsule; it says itself what it returns."""
    call = "int64_t call(void) { const pkv_api *a = pkv_import(); return a ? shared_pages(a) : -99; }\n"
    (tmp_path / "example.c").write_text(blocks("c")[0] + call)
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", "example.so", "example.c"]
    include = [f"-I{pagedkv.get_include()}", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*command, *include], cwd=tmp_path, check=True)
    library = ctypes.PyDLL(str(tmp_path / "example.so"))
    library.call.restype = ctypes.c_int64
    assert library.call() == 3


def test_commands_exist():
    named = set(re.findall(r"^pagedkv (\w+)", "\n".join(blocks("sh")), re.MULTILINE))
    assert named and named <= set(cli.commands)


def test_the_table_names_what_there_is():
    from pagedkv.core.forward import ACTIVATIONS
    from pagedkv.core.kvcache import FORMATS
    from pagedkv.core.matmul import WEIGHT_TYPES
    from pagedkv.models.architectures import ARCHITECTURES

    table = re.findall(r"^\| (\w[\w ]*) \| (.*) \|$", README, re.MULTILINE)
    rows = {name: set(re.findall(r"\w+", text)) for name, text in table}
    assert rows["architectures"] - {"and", "mistral", "mixtral"} == set(ARCHITECTURES)
    assert rows["weights"] == set(WEIGHT_TYPES) and rows["KV pages"] == set(FORMATS)
    assert set(ACTIVATIONS) <= rows["activations"]


def test_ci_runs_the_test_command_of_the_readme():
    first, tests = blocks("sh")[0].strip(), blocks("sh")[1].strip()
    assert "pip install . && pagedkv generate --prompt" in first
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in tests.split(" && ") if line not in lines] == []


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")
)])  # fmt: skip
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"
