"""Which pagedkv this is: version, commit, compiler and flags of the build."""

import json
import subprocess
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent

# Counts the changes of any bit of any output, each of which has a line under Numerics in CHANGELOG.md.
NUMERICS = 1


def version() -> str:
    """The version: of the checkout where the package runs from one, else of the installed distribution."""
    project = PACKAGE.parent / "pyproject.toml"
    if project.exists():
        import tomllib

        return tomllib.loads(project.read_text())["project"]["version"]
    from importlib.metadata import version as installed

    return installed("pagedkv")


def build() -> dict[str, Any]:
    """What the build recorded about itself: `commit`, `compiler`, `flags`, each None when it could not tell."""
    try:
        record = json.loads((PACKAGE / "build.json").read_text())
    except (OSError, ValueError):
        record = {}
    return {key: record.get(key) for key in ("commit", "compiler", "flags")}


def commit() -> str | None:
    """Commit id of the code that runs, with "-dirty" behind it where files differ from that commit; None if unknown.

    A checkout is asked through git, an installed package through what its build recorded. May start a git process.
    """
    return git_commit(PACKAGE.parent) if (PACKAGE.parent / ".git").exists() else build()["commit"]


def git_commit(checkout: Path) -> str | None:
    """Commit id of a checkout, with "-dirty" where tracked files differ; None without git or a commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
