"""Fixtures shared by all tests."""

import os
import signal
from functools import partial

import command_line
import pytest

import pagedkv.core  # noqa: F401  one error here, not one a file, where nothing is built

# Children import the package these tests import, not one that happens to lie in their working directory.
os.environ.update(PYTHONPATH=str(command_line.PACKAGES), PYTHONSAFEPATH="1")

# A shell's background job is deaf to Ctrl-C, and so would be the children that tests send it to.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pulled(name: str):
    """Path of a catalogue model, pulled as a user would. Without an index to pull from: a skip, but a failure in CI."""
    from pagedkv.models.catalogue import pull
    from pagedkv.models.errors import ModelError

    try:
        return pull(name, progress=False)
    except ModelError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must not go without {name}: {error}")
        pytest.skip(f"{name} is not here and cannot be pulled: {error}")


@pytest.fixture(scope="session")
def smollm2_path():
    """The real SmolLM2-135M-Instruct, Q4_1."""
    return pulled("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_path():
    """The real Gemma 3 270M, Q4_K_M."""
    return pulled("gemma3-270m")


@pytest.fixture
def pagedkv_command(tmp_path):
    """Run the command line in a process of its own, outside the checkout, on the same package the tests import.

    command(*arguments, stdin="", **environment) -> CompletedProcess with text in stdout and stderr
    """
    return partial(command_line.run, tmp_path)
