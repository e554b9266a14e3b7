"""Style and types of the whole tree, as configured in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("tool", [["ruff", "check", "."], ["mypy"]], ids=lambda tool: tool[0])
def test_nothing_to_complain_about(tool):
    result = subprocess.run([sys.executable, "-P", "-m", *tool], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
