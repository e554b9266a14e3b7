"""What is fuzzed: each target takes any bytes and raises nothing but what it finds wrong.

Bounds of one input: one second of processor time, Python memory of a small multiple of the input, and a fixed part of
address space over what the process had at its start.
"""

import contextlib
import json
import os
import resource
import signal
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from pagedkv.models.config import ModelConfig
from pagedkv.models.errors import ModelError
from pagedkv.models.gguf_split import open_gguf
from pagedkv.models.tokenizer import Tokenizer
from pagedkv.models.vocabulary import CONTROL

SECONDS = 1.0
ADDRESS_SPACE = 512 << 20
TEXTS = [
    "", "a", "hello world  1234\n\n", "▁ab  ba<|im_end|><s></s><0x41>", "\x00\ud7ff\ufdd0é☕\U0001f600日本", "ab" * 300,
]  # fmt: skip


class Fault(Exception):
    """A bound that was not held, or a promise broken."""


def gguf(raw: bytes) -> str:
    """Open a file of these bytes; describe it, build its tokenizer, use that. Returns what was refused, or "good"."""
    with _file(raw) as path:
        try:
            with open_gguf(path) as file:
                for name, tensor in file.tensors.items():
                    if len(file.data(name)) != tensor.n_bytes or tensor.offset + tensor.n_bytes > len(raw):
                        raise Fault(f"tensor {name}: {tensor} in a file of {len(raw)} bytes")
                metadata = file.metadata
                outcome = [_refused(lambda: ModelConfig.from_gguf(file))]
        except ModelError as error:
            return _line(error)
    return "; ".join([*outcome, _refused(lambda: _use(Tokenizer(metadata)))])


def tokenizer_json(raw: bytes) -> str:
    """Build the tokenizer of a directory whose tokenizer.json is these bytes, and use it. Returns as `gguf`."""
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        Path(directory, "tokenizer.json").write_bytes(raw)
        Path(directory, "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        return _refused(lambda: _use(Tokenizer.from_directory(Path(directory))))


def hub(raw: bytes) -> str:
    """Pull from a hub that is this document, twice; see fake_hub. Returns the outcomes."""
    import fake_hub

    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return "no document"
    if not isinstance(document, dict):
        return "no document"
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        outcomes, wrong = fake_hub.pulls(document, Path(directory), _refused)
    if wrong:
        raise Fault(wrong)
    return "; ".join(outcomes)


TARGETS = {"gguf": gguf, "tokenizer_json": tokenizer_json, "hub": hub}


def check(target: str, raw: bytes, traced: bool = False) -> str:
    """Run one input within its bounds; `traced` also counts its Python memory, which takes three times as long.

    Raises what the target must not raise.
    """
    if traced:
        tracemalloc.start()
    signal.setitimer(signal.ITIMER_PROF, SECONDS * (4 if traced else 1))
    try:
        outcome = TARGETS[target](raw)
        if traced and (peak := tracemalloc.get_traced_memory()[1]) > (bound := 64 * len(raw) + (1 << 20)):
            raise Fault(f"{peak} bytes for an input of {len(raw)}, at most {bound}")
        return outcome
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        tracemalloc.stop()


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """Arm the limits of time and address space in this process, whose main thread this must be."""

    def late(signum, frame):
        raise Fault(f"more than {SECONDS} s of processor time")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)


def _use(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, allow_special=special)
            if any(not 0 <= i < tokenizer.vocab_size for i in ids):
                raise Fault(f"{text!r} became {ids} of {tokenizer.vocab_size} tokens")
            tokenizer.decode(ids)
        types = tokenizer._vocabulary.types[tokenizer.encode(text, add_special_tokens=False)]
        if (types == CONTROL).any():
            raise Fault(f"{text!r} became a control token")
    tokenizer.decode(range(tokenizer.vocab_size), skip_special_tokens=False)


def _refused(work) -> str:
    try:
        work()
    except ModelError as error:
        return _line(error)
    return "good"


def _line(error: ModelError) -> str:
    text = str(error)
    if len(text) > 500 or not text.isprintable():
        raise Fault(f"not one short line: {text!r}")
    return text


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextlib.contextmanager
def _file(raw: bytes) -> Iterator[Path]:
    number = os.memfd_create("fuzz")
    try:
        os.write(number, raw)
        yield Path(f"/proc/self/fd/{number}")
    finally:
        os.close(number)
