"""The writer of results, and a comparison of pagedkv with itself from beginning to end."""

import json
import subprocess
import sys
from pathlib import Path

import command_line
import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import results

    return results


def test_rows_are_appended_with_what_made_them(results, tmp_path):
    for figure in (1.0, 2.0):
        results.write("x", [{"job": "a", **results.summary([figure, 3.0])}], threads=2, directory=tmp_path)
    path = tmp_path / "x.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["samples"] for row in rows] == [[1.0, 3.0], [2.0, 3.0]]
    assert [row["median"] for row in rows] == [2.0, 2.5]
    assert [row["spread"] for row in rows] == [1.0, 0.4]
    for row in rows:
        assert row["threads"] == 2 and row["cpu"] and row["isa"] and row["time"].startswith("20")
        assert {"commit", "compiler", "flags", "pagedkv", "python", "system"} <= set(row)


def test_what_a_row_says_itself_stays(results, tmp_path):
    path = results.write("x", [{"isa": "other", "threads": 9}], threads=2, directory=tmp_path)
    row = json.loads(path.read_text())
    assert (row["isa"], row["threads"]) == ("other", 9) and row["cpu"]


def test_paths_of_the_machine_are_refused(results, tmp_path):
    with pytest.raises(ValueError, match=r"model: '/home/me/x\.gguf'"):
        results.write("x", [{"model": "/home/me/x.gguf"}], threads=1, directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_compare_runs_an_engine_in_turns(smollm2_path, tmp_path):
    options = "--engines pagedkv --batch 1,3 --prompt-tokens 5 --gen-tokens 2 --prefill 20 --rounds 2 --threads 1"
    result = subprocess.run(
        [sys.executable, BENCH / "compare.py", *options.split(), "--model", smollm2_path, "--results", tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=command_line.environment(PYTHONSAFEPATH=None),  # scripts import their neighbours
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "compare.jsonl").read_text().splitlines()]
    assert [row["job"] for row in rows] == ["decode 1", "decode 3", "prefill 20"]
    for row in rows:
        assert row["engine"] == "pagedkv" and row["threads"] == 1 and row["model"] == smollm2_path.name
        assert len(row["samples"]) == 2 and row["median"] > 0
    assert str(smollm2_path.parent) not in (tmp_path / "compare.jsonl").read_text()
