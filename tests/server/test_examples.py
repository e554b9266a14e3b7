"""The examples of docs/server.md, as they stand there, against a live server; each where its package is installed.

The clients beyond curl and openai are no test dependencies: they bring forty packages. `pip install
langchain-openai litellm` beside the others runs theirs, and `.ci/run` does.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import command_line
import pytest
from conftest import served

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"
HERE = "http://127.0.0.1:8000"
NAME = "smollm2-135m-instruct"
PYTHON = {
    "openai": "from openai import",
    "langchain_openai": "from langchain_openai import",
    "litellm": "import litellm",
}


def examples(language):
    """The document's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), flags=re.S)


def test_the_document_has_these_examples_and_no_other():
    found = [name for code in examples("python") for name, line in PYTHON.items() if line in code]
    assert sorted(found) == sorted(PYTHON) and len(examples("python")) == len(PYTHON)
    assert sum("curl " in code for code in examples("sh")) == 1


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=command_line.environment(
        LITELLM_LOCAL_MODEL_COST_MAP="True"))  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("package", PYTHON)
def test_python(documented, package, tmp_path):
    """It prints what the engine says to the same request."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package.replace('_', '-')}")
    (code,) = (code for code in examples("python") if PYTHON[package] in code)
    file = tmp_path / "example.py"
    file.write_text(code.replace(HERE, documented.url))
    shown = run([sys.executable, "-P", str(file)])
    asked = {"messages": [{"role": "user", "content": "What is a page table?"}]}
    if package == "openai":
        asked |= {"max_tokens": 64, "seed": 1, "top_k": 40, "min_p": 0.05}
    else:
        asked |= {"temperature": 0}
    answer = documented.post("/v1/chat/completions", asked).json()
    expected = answer["choices"][0]["message"]["content"]
    if package == "openai":
        expected += " " + answer["system_fingerprint"]
    assert shown == expected + "\n"


def test_curl(documented):
    if shutil.which("curl") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("curl is not installed")
    (code,) = (code for code in examples("sh") if "curl " in code)
    shown = run(["sh", "-c", code.replace(HERE, documented.url)])
    assert shown.startswith("data: {") and shown.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in shown or '"finish_reason":"stop"' in shown


@pytest.fixture(scope="module")
def documented(smollm2_path):
    """A server with the name that the document uses, whose answers end soon."""
    from pagedkv import LLM

    with (
        LLM(smollm2_path, threads=2, kv_pages=64, max_model_len=256) as llm,
        served(llm, served_model_names=(NAME,)) as live,
    ):
        yield live
