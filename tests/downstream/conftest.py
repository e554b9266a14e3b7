"""An installed pagedkv, as strangers get it, and their projects built against it in a temporary directory."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pagedkv", "csrc")


def run(*command, **kwargs):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def installed_elsewhere():
    """Directory of an installed wheel: PAGEDKV_INSTALLED, else one in this environment; None when there is none."""
    if "PAGEDKV_INSTALLED" in os.environ:
        return Path(os.environ["PAGEDKV_INSTALLED"])
    for found in importlib.metadata.distributions(name="pagedkv"):
        package = Path(str(found.locate_file("pagedkv")))
        if package.resolve() != ROOT / "pagedkv" and list(package.glob("core/arena.*.so")):
            return package.parent
    return None


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Directory that holds an installed wheel of pagedkv: this environment's, or one built for this run."""
    found = installed_elsewhere()
    if found is not None:
        return found
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source tree"
    ignore = shutil.ignore_patterns("*.so", "*.o", "__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        elif (ROOT / name).exists():
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    for generated in source.glob("pagedkv/core/*.c"):
        generated.unlink()
    jobs = str(os.cpu_count() or 1)
    setup = (sys.executable, "setup.py", "-q", "build_ext", "-j", jobs, "bdist_wheel", "-d", work / "dist")
    run(*setup, cwd=source)
    (wheel,) = (work / "dist").glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", work / "site", wheel)
    return work / "site"


@pytest.fixture(scope="session")
def build(installed, tmp_path_factory):
    """build(project) compiles a project of this directory against the installed package; returns a way to run code."""

    def build(project):
        target = tmp_path_factory.mktemp("downstream") / project
        shutil.copytree(Path(__file__).parent / project, target)
        env = {**os.environ, "PYTHONPATH": f"{target}{os.pathsep}{installed}"}
        env.pop("CFLAGS", None)
        run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=target, env=env)

        def python(code):
            """Run code in a fresh interpreter that sees the project and the installed package only."""
            return run(sys.executable, "-c", code, cwd=target, env=env)

        return python

    return build
