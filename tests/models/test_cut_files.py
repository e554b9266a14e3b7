"""Model files that others cut, overwrite, replace or delete while they are loaded: one line or the whole model."""

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import gguf_writer as w
import numpy as np
import pytest
import tiny
import tiny_models

from pagedkv.core._testing import before_reads
from pagedkv.models.errors import ModelError
from pagedkv.models.gguf_split import open_gguf
from pagedkv.models.loader import load_model
from pagedkv.models.safetensors import SafetensorsFiles

LONG_AGO = 1_000_000_000


def one_file(path):
    return w.write(path / "tiny.gguf", tiny.model(tied=False))


def three_parts(path):
    """tiny.model as a split model: the metadata in the first part, a third of the tensors in each."""
    names = list(tiny.tensors())
    for i in range(3):
        keys = [("split.no", w.U16, i), ("split.count", w.U16, 3)]
        table = {name: tiny.tensors()[name] for name in names[i::3]}
        w.write(path / f"tiny-0000{i + 1}-of-00003.gguf", w.model(table, [*(tiny.entries() if i == 0 else []), *keys]))
    return path / "tiny-00001-of-00003.gguf"


MODELS = {
    "gguf": one_file,
    "parts": three_parts,
    "directory": lambda path: tiny_models.directory("llama", path / "one"),
    "shards": lambda path: tiny_models.directory("llama", path / "shards", n_shards=3),
}


class Reads:
    """What reads of a load meet: `act(path)` is called before read number `at`, and all reads are kept.

    Use as a context manager. .reads: (path, bytes, offset) in order; .maps: where nothing acts, lines of the process's
    map that name a file that was read, at any read.
    """

    def __init__(self, at=None, act=None):
        self.at, self.act, self.reads, self.maps, self.numbers = at, act, [], [], itertools.count()

    def __enter__(self):
        before_reads(self)
        return self

    def __exit__(self, *exc):
        before_reads(None)

    def __call__(self, fd, n, offset):
        number, path = next(self.numbers), Path(os.readlink(f"/proc/self/fd/{fd}"))
        self.reads.append((path, n, offset))
        if self.act is None:
            self.maps += [line for line in Path("/proc/self/maps").read_text().splitlines() if path.name in line]
        elif number == self.at:
            self.act(path, n, offset)

    def truncating(self):
        """Cut the file where read number `at` begins; a list that will hold how many reads had begun before."""
        begun = []

        def act(path, n, offset):
            os.truncate(path, offset)
            begun.append(len(self.reads))

        self.act = act
        return begun


class Model:
    """A model on disk that can be damaged and put back."""

    def __init__(self, kind, tmp_path):
        self.path = MODELS[kind](tmp_path)
        self.root = self.path if self.path.is_dir() else self.path.parent
        self.contents = {path: path.read_bytes() for path in self.root.iterdir()}
        self.restore()

    def restore(self):
        for path, raw in self.contents.items():
            path.write_bytes(raw)
            os.utime(path, (LONG_AGO, LONG_AGO))  # a write is then always a change of time

    def load(self, **options):
        return load_model(self.path, threads=1, **options)

    def open_files(self):
        """What this process has open of the model, and copies of it in memory."""
        links = [entry.path for entry in os.scandir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if os.path.lexists(link)]
        return [path for path in found if path.startswith((str(self.root), "/memfd:"))]

    def refused(self, **options):
        with pytest.raises(ModelError) as caught:
            self.load(**options)
        assert not self.open_files(), "every file is closed"
        message = str(caught.value)
        assert "\n" not in message and len(message) < 500
        return message


@pytest.fixture(params=MODELS)
def model(request, tmp_path):
    return Model(request.param, tmp_path)


def n_reads(model, **options):
    with Reads() as whole:
        model.load(**options).close()
    assert whole.maps == [], "no byte of a model is mapped"
    assert {path for path, _, _ in whole.reads} == {path for path in model.contents if path.suffix != ".json"}
    return len(whole.reads)


@pytest.mark.parametrize("options", [{}, {"quantization": "q8_0"}], ids=["as they are", "quantised"])
def test_cut_before_each_read(model, options):
    """To nothing, and into the middle of what the read wants."""
    for at in range(n_reads(model, **options)):
        for part in (None, 0.5):
            cut = []

            def truncate(path, n, offset, part=part, cut=cut):
                cut[:] = [path, n, offset, 0 if part is None else int(offset + part * n)]
                os.truncate(path, cut[3])

            with Reads(at, truncate):
                message = model.refused(**options)
            path, n, offset, size = cut
            found = max(size - offset, 0)
            assert message.startswith(f"{path}: ") and message.endswith("the file was cut short meanwhile"), message
            expected = re.search(r": (\d+) bytes at offset (\d+), found (\d+); ", message)
            assert expected, message
            wanted, start, seen = map(int, expected.groups())
            # a matrix is read in slices: what is missing is told of the whole of it
            assert start <= offset and start + wanted >= offset + n and seen == found + offset - start
            model.restore()


def test_the_tensor_is_named(model):
    """With the sizes that the container's own table has for it."""
    with SafetensorsFiles(model.path, str) if model.path.is_dir() else open_gguf(model.path) as files:
        tensors = {name: (files.file(name).path, *t.shape, t.offset, t.n_bytes) for name, t in files.tensors.items()}
    names = set()
    for at in range(n_reads(model)):
        with Reads(at, lambda path, n, offset: os.truncate(path, offset + 1)) as done:
            message = model.refused()
        path, _, offset = done.reads[at]
        inside = [
            name
            for name, (place, *_, start, size) in tensors.items()
            if place == path and start <= offset < start + size and "tensor" in message
        ]
        if inside:
            start, size = tensors[inside[0]][-2:]
            assert f"{size} bytes at offset {start}, found {offset + 1 - start}; " in message
            names.add(re.search(r": tensor (\S+): ", message)[1])
        model.restore()
    assert len(names) == len(tensors) >= 20
    assert model.path.is_dir() or names == set(tensors)


def test_overwritten_before_each_read(model):
    """The same size, other bytes: what was read before and after are not of one file."""
    for at in range(n_reads(model)):
        with Reads(at, lambda path, n, offset: path.write_bytes(bytes(path.stat().st_size))):
            message = model.refused()
        assert message
        model.restore()

    def same(path, n, offset):
        path.write_bytes(model.contents[path])

    with Reads(n_reads(model) - 1, same) as done:
        message = model.refused()
    size = len(model.contents[done.reads[-1][0]])
    assert message.endswith(f": changed while it was read: {size} bytes when it was opened, {size} now")


def test_grown_while_it_is_read(model):
    def grow(path, n, offset):
        with open(path, "ab") as file:
            file.write(b"more")

    with Reads(n_reads(model) - 1, grow) as done:
        message = model.refused()
    path = done.reads[-1][0]
    size = len(model.contents[path])
    assert message == f"{path}: changed while it was read: {size} bytes when it was opened, {size + 4} now"


@pytest.mark.parametrize("action", ["deleted", "replaced"])
def test_names_may_go_while_files_are_read(model, action, tmp_path):
    """What was opened stays what it was: the whole model comes."""
    ids = [5, 6, 7]
    expected = logits(model.load(), ids)
    for at in range(n_reads(model)):

        def act(path, n, offset):
            if action == "deleted":
                path.unlink()
            else:
                other = w.write(tmp_path / "other", b"another file")
                other.replace(path)

        with Reads(at, act):
            try:
                loaded = model.load()
            except ModelError as error:
                # a part or shard that was not open yet
                assert len(model.contents) > 1 and re.search(r"No such file|not a |12 bytes", str(error)), error
            else:
                assert logits(loaded, ids).tobytes() == expected.tobytes()
        model.restore()


def logits(loaded, ids):
    from pagedkv import PagedKVCache

    config = loaded.config
    kv = PagedKVCache(config.n_layers, config.n_kv_heads, config.head_dim, n_pages=4, format="f32", threads=1)
    seq = kv.sequence()
    seq.extend(len(ids))
    out = np.zeros((len(ids), loaded.forward.vocab_padded), np.float32)
    loaded.forward.run(kv, [seq], ids, [len(ids)], range(len(ids)), out)
    return out


def test_no_thread_goes_on_after_a_short_read(tmp_path):
    """Several threads read one matrix; the first that finds too little ends the work of all."""
    rows = 4096
    changes = {"token_embd.weight": ((rows, tiny.HIDDEN), "F32")}
    tokens = [*tiny.TOKENS, *(f"x{i}" for i in range(rows - len(tiny.TOKENS)))]
    types = [*tiny.TYPES, *[1] * (rows - len(tiny.TYPES))]
    raw = tiny.model(
        tensor_changes=changes,
        tokenizer__ggml__tokens=(w.ARRAY, (w.STRING, tokens)),
        tokenizer__ggml__token_type=(w.ARRAY, (w.I32, types)),
    )
    path = w.write(tmp_path / "tiny.gguf", raw)
    for n_threads in (1, 2, 5):
        with Reads() as whole:
            load_model(path, threads=n_threads)
        big = [i for i, (_, n, _) in enumerate(whole.reads) if n == 64 * tiny.HIDDEN * 4]
        assert len(big) == rows // 64
        message = rf"token_embd\.weight: {rows * tiny.HIDDEN * 4} bytes at offset \d+, found \d+;"
        cut = Reads(big[0])
        begun = cut.truncating()
        with cut, pytest.raises(ModelError, match=message):
            load_model(path, threads=n_threads)
        assert len(cut.reads) <= begun[0] + n_threads - 1  # every other thread has one more, and finds it short
        path.write_bytes(raw)


CHILD = """
import sys
from pagedkv.models.errors import ModelError
from pagedkv.models.loader import load_model
while sys.stdin.readline():
    print("start", flush=True)
    try:
        load_model(sys.argv[1], threads=2).close()
        print("loaded", flush=True)
    except ModelError as error:
        print("refused", error, flush=True)
"""


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_a_process_that_cuts_what_another_loads(tmp_path, kind):
    """At many moments of a real race, none of them the end of the loading process."""
    model = Model(kind, tmp_path)
    victim = max(model.contents, key=lambda path: len(model.contents[path]))
    raw, rng, outcomes = model.contents[victim], random.Random(5), set()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(model.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        for round_ in range(150):
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "start\n"
            for _ in range(rng.randrange(60) * 200):
                pass
            os.truncate(victim, rng.randrange(len(raw)))
            outcome = child.stdout.readline()
            assert outcome == "loaded\n" or re.fullmatch(r"refused \S+\.(gguf|safetensors|json): .+\n", outcome), (
                round_, outcome, child.poll(),
            )  # fmt: skip
            outcomes.add(outcome.split()[0])
            model.restore()
        child.stdin.close()
    assert child.returncode == 0 and "refused" in outcomes
