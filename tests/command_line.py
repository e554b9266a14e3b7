"""Runs the command line in processes of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pagedkv

PACKAGES = Path(pagedkv.__file__).parent.parent
COMMAND = [sys.executable, "-P", "-m", "pagedkv"]


def environment(**changes):
    """Environment for a child that imports the same pagedkv from any directory; `changes` with None are unset."""
    dropped = ("PAGEDKV_ISA", "PAGEDKV_THREADS", "PYTHONUNBUFFERED")  # the last hides what is left in buffers
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    changed = inherited | {"PYTHONPATH": str(PACKAGES)} | changes
    return {name: value for name, value in changed.items() if value is not None}


def run(directory, *arguments, stdin="", **changes):
    """The finished process, with text in stdout and stderr; `changes` of the environment."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=directory,
        env=environment(**changes),
    )


def start(directory, *arguments, **streams):
    """The running process, which Ctrl-C reaches also when the tests run in the background; `streams` as of Popen."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=directory,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **streams,
    )
