"""A short run of the fuzzer, and what its parts promise. `tests/fuzz/run.py` runs it for longer."""

import contextlib
import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models")]

import document  # noqa: E402
import fake_hub  # noqa: E402
import gguf_writer as w  # noqa: E402
import run  # noqa: E402
import targets  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

TARGETS = ["gguf", "tokenizer_json", "hub"]
RUNS = int(os.environ.get("PAGEDKV_FUZZ_RUNS", "3000"))
SLOWER = {"hub": 3}  # inputs that take so much longer


def alone(target: str, *arguments: str) -> str:
    """What a run in a process of its own prints: it limits its address space, and panics of libraries are loud."""
    command = [sys.executable, str(HERE / "run.py"), target, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout + result.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs(target):
    """Every input that once found something new is refused or used within the bounds, memory counted."""
    with targets.bounds():
        # the first time also imports modules
        outcomes = [run.shape(targets.check(target, raw)) for raw in run.corpus(target)]
        assert outcomes == [run.shape(targets.check(target, raw, traced=True)) for raw in run.corpus(target)]
    assert any("good" in outcome for outcome in outcomes) and any("good" not in outcome for outcome in outcomes)


@pytest.mark.parametrize("target", TARGETS)
def test_seeded_mutations(target, tmp_path):
    runs = RUNS // SLOWER.get(target, 1)
    said = alone(
        target, "--runs", str(runs), "--seed", os.environ.get("PAGEDKV_TEST_SEED", "1"), "--finds", str(tmp_path)
    )
    assert f'"runs": {runs}' in said


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="the seeded mutations above stand in for it")
@pytest.mark.parametrize("target", TARGETS)
def test_guided_by_coverage(target, tmp_path):
    said = alone(target, "--engine", "atheris", "--runs", "1500", "--finds", str(tmp_path / "finds"))
    assert int(re.search(r"Done (\d+) runs", said)[1]) >= 1500


@pytest.mark.parametrize("path", sorted((run.CORPUS / "gguf").glob("seed-*")), ids=lambda path: path.name)
def test_documents_are_written_as_they_were_read(path):
    raw = path.read_bytes()
    assert document.Document.read(raw).write() == raw
    assert targets.gguf(raw) == "good; good"


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**64), data=st.data())
def test_mutations_of_any_kind(seed, data):
    """The same mutator under hypothesis, which shrinks what fails."""
    target = data.draw(st.sampled_from(TARGETS))
    kept = run.corpus(target)
    mutator = run.mutators(target)(random.Random(seed))
    targets.check(target, mutator.mutate(data.draw(st.sampled_from(kept)), data.draw(st.sampled_from(kept))))


def test_mutations_reach_past_the_header():
    """Mutations are neither harmless nor hopeless."""
    rng = random.Random(3)
    mutator, kept = document.Mutator(rng), run.corpus("gguf")
    seeds = [raw for raw in kept if targets.gguf(raw) == "good; good"]
    outcomes = [targets.gguf(mutator.mutate(rng.choice(seeds), rng.choice(kept))) for _ in range(400)]
    assert sum(outcome == "good; good" for outcome in outcomes) in range(10, 300)
    assert sum(";" in outcome for outcome in outcomes) in range(80, 380)
    assert len({run.shape(outcome) for outcome in outcomes}) > 40


class TestBounds:
    """What the bounds catch, on targets that break them."""

    def one(self, monkeypatch, target, raw=b"x", **arguments):
        monkeypatch.setitem(targets.TARGETS, "gguf", target)
        with targets.bounds():
            targets.check("gguf", raw, **arguments)

    def test_time(self, monkeypatch):
        monkeypatch.setattr(targets, "SECONDS", 0.05)

        def hang(raw):
            while True:
                pass

        with pytest.raises(targets.Fault, match="processor time"):
            self.one(monkeypatch, hang)

    def test_memory(self, monkeypatch):
        with pytest.raises(targets.Fault, match="bytes for an input of 1"):
            self.one(monkeypatch, lambda raw: str(len(bytearray(2 << 20))), traced=True)
        with pytest.raises(MemoryError):
            self.one(monkeypatch, lambda raw: str(len(bytearray(1 << 30))))

    def test_messages(self):
        for line in ("two\nlines", "x" * 501):
            with pytest.raises(targets.Fault, match="not one short line"):
                targets._line(ValueError(line))

    def test_control_tokens(self, monkeypatch):
        raw = (run.CORPUS / "gguf" / "seed-spm-llama").read_bytes()
        monkeypatch.setattr(targets, "CONTROL", 1)
        with pytest.raises(targets.Fault, match="became a control token"):
            targets.gguf(raw)


class TestTheWatchOverPulls:
    """The hub target sees what leaves the model cache, by any of the ways there are."""

    SEED = (run.CORPUS / "hub" / "seed-one").read_bytes()

    @pytest.mark.parametrize(
        "harm",
        [
            lambda root: (root / "x").mkdir(),
            lambda root: (root / "secret").write_bytes(b"other"),
            lambda root: (root / "secret").unlink(),
            lambda root: os.rename(root / "secret", root / "home" / "secret"),
            lambda root: os.link(root / "secret", root / "home" / "hub" / "x"),
            lambda root: os.symlink(root / "secret", root / "home" / "hub" / "x"),
            lambda root: (root / "home" / "x").write_bytes(b""),
            lambda root: os.truncate(root / "secret", 0),
        ],
    )  # fmt: skip
    def test_harm(self, monkeypatch, harm):
        pull = fake_hub.hub.pull

        def bad(name, home, *arguments):
            path = pull(name, home, *arguments)
            with contextlib.suppress(PermissionError):
                harm(home.parent)
            return path

        monkeypatch.setattr(fake_hub.hub, "pull", bad)
        with pytest.raises(targets.Fault):
            targets.hub(self.SEED)

    def test_no_harm(self):
        assert targets.hub(self.SEED) == "good; good"

    def test_a_path_elsewhere(self, monkeypatch):
        monkeypatch.setattr(fake_hub.hub, "pull", lambda name, home, *arguments: home.parent / "secret")
        with pytest.raises(targets.Fault, match="returned"):
            targets.hub(self.SEED)


def test_a_file_may_lie_about_kinds():
    """A document keeps a value whose kind says something else, so that mutations can lie."""
    lying = document.Document([[b"k", w.U64, b"\x01\x00\x00\x00"]], [], b"")
    assert lying.write() != document.Document([[b"k", w.U32, b"\x01\x00\x00\x00"]], [], b"").write()
    with pytest.raises(ValueError):
        document.Document.read(lying.write()[:40])
