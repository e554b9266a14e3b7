"""Files of a model directory that are no files, or have no end: each is refused in one line, at once, unread."""

import os
import resource
import signal
from pathlib import Path

import pytest
import tiny_models as tiny

from pagedkv.models.catalogue import resolve
from pagedkv.models.errors import ModelError
from pagedkv.models.files import MAX_SMALL_BYTES, read_small
from pagedkv.models.source import open_model

SMALL = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors.index.json",
]  # fmt: skip
WEIGHTS = "model.safetensors"
SECONDS, ROOM = 10, 512 << 20


@pytest.fixture(autouse=True)
def bounds():
    """Waiting for ever, or taking memory without end, fails."""

    def late(signum, frame):
        raise TimeoutError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


def fifo(path):
    os.mkfifo(path)


def zeros(path):
    path.symlink_to("/dev/zero")


def directory(path):
    path.mkdir()


def nowhere(path):
    path.symlink_to(path.with_name("nothing"))


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def unreadable(path):
    path.write_bytes(b"{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user reads everything")


KINDS = [fifo, zeros, directory, nowhere, sparse, unreadable]


def spoiled(path, name, kind) -> Path:
    tiny.directory("llama", path)
    (path / name).unlink(missing_ok=True)
    kind(path / name)
    return path


def load(path):
    with open_model(resolve(path)) as opened:
        return opened.tokenizer


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [*SMALL, WEIGHTS])
def test_files_of_a_directory(tmp_path, name, kind):
    path = spoiled(tmp_path, name, kind)
    if name == "chat_template.jinja":
        tokenizer = load(path)
        with pytest.raises(ValueError, match=r"chat_template\.jinja: ") as caught:
            tokenizer.encode_chat([{"role": "user", "content": "x"}])
    else:
        with pytest.raises(ModelError, match=name.replace(".", r"\.")) as caught:
            load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_shard(tmp_path, kind):
    tiny.directory("llama", tmp_path, n_shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    kind(shard)
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("kind", [fifo, zeros, directory, sparse], ids=lambda kind: kind.__name__)
def test_a_gguf_file(tmp_path, kind):
    path = tmp_path / "m.gguf"
    kind(path)
    with pytest.raises(ModelError):
        load(path)


def test_the_size_is_bounded_before_anything_is_read(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert read_small(path) == read_small(path, 3) == b"abc"
    with pytest.raises(ModelError, match="x: 3 bytes, at most 2 are allowed"):
        read_small(path, 2)
    with open(path, "wb") as file:
        file.truncate(MAX_SMALL_BYTES + 1)
    with pytest.raises(ModelError, match=f"at most {MAX_SMALL_BYTES} are allowed"):
        read_small(path)
