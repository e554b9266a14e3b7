"""The trace generator, its replay, and the scripts that serve, on requests too small to measure anything."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import command_line
import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def serve_trace(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("serve_trace")


def test_a_trace_is_its_seed_and_half_of_it_shares_texts(serve_trace):
    shape = serve_trace.Shape(text_tokens=50, own_tokens=(2, 9), new_tokens=(3, 5))
    trace = shape.trace(2000, list(range(100, 400)), seed=5)
    assert trace == shape.trace(2000, list(range(100, 400)), seed=5) != shape.trace(2000, list(range(100, 400)), seed=6)
    shared = [asked for asked in trace if len(asked.prompt) > 9]
    assert 900 < len(shared) < 1100
    assert len({tuple(asked.prompt[:50]) for asked in shared}) == shape.n_texts
    assert {len(asked.prompt) - 50 for asked in shared} == set(range(2, 10))
    assert {asked.params.max_tokens for asked in trace} == {3, 4, 5}
    assert all(100 <= token < 400 for asked in trace for token in asked.prompt)


def test_replay_keeps_so_many_requests_on_the_way(serve_trace):
    """An engine that answers the oldest request in every third step."""
    open_requests, most, asked = [], [], []

    def add_request(prompt, params):
        open_requests.append(prompt)
        asked.append(prompt["prompt_token_ids"])

    def step():
        most.append(len(open_requests))
        done = len(most) % 3 == 0
        if done:
            open_requests.pop(0)
        return [SimpleNamespace(finished=done)]

    llm = SimpleNamespace(engine=SimpleNamespace(add_request=add_request, step=step))
    trace = serve_trace.Shape().trace(10, [1, 2, 3], seed=0)
    clock = iter([10.0, 12.5])
    assert serve_trace.replay(llm, trace, 4, lambda: next(clock)) == 2.5
    assert asked == [each.prompt for each in trace] and not open_requests
    assert max(most) == 4 and len(most) == 30


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (
            "serve_trace.py",
            ["--requests", "8", "--concurrent", "4", "--slices", "1", "--readers", "2", "--long-prompts", "2",
             "--long-tokens", "40", "--every", "3"],
        ),
        ("speculation.py", ["--rounds", "1", "--only", "quote", "--clock", "cpu"]),
        ("shared_prefix.py", ["--batch", "3", "--prefix-tokens", "300", "--gen-tokens", "2", "--rounds", "2"]),
    ],
)  # fmt: skip
def test_scripts_write_what_they_measured(script, arguments, smollm2_path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCH / script), "--model", str(smollm2_path), "--results", str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=command_line.environment(PYTHONSAFEPATH=None),
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / f"{script.removesuffix('.py')}.jsonl").read_text().splitlines()]
    assert all(row["commit"] and row["threads"] >= 1 for row in rows)
    if script == "serve_trace.py":
        prefix, gaps, shares = rows
        assert prefix["requests"] == 8 and prefix["ratio"] > 0
        assert len(gaps["bounded"]["waits_s"]) == len(gaps["unbounded"]["waits_s"]) == 2
        assert gaps["bounded"]["gaps"] > gaps["unbounded"]["gaps"] > 2 * 2 * 3  # a prompt takes more steps, with gaps
        assert 0 < shares["scheduler"] + shares["sampling"] + shares["forward"] <= 1
    elif script == "shared_prefix.py":
        shared, copies = rows
        assert (shared["pages"], copies["pages"]) == ("shared", "copies")
        assert copies["pages_in_use"] - shared["pages_in_use"] == 2 * (300 // 16)
        assert all(len(row["samples"]) == 2 and min(row["samples"]) > 0 for row in rows)
    else:
        (row,) = rows
        assert row["drafted"] >= row["accepted"] > 20
