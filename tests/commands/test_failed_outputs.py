"""A model whose logits are NaN for some prompts: the command line says so and fails."""

import json
import sys
from pathlib import Path

import gguf
import pytest

sys.path.append(str(Path(__file__).parent.parent / "models"))
REASON = "the logits hold NaN or infinity"


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A tiny model that cannot read an "x": the embedding of that token is NaN."""
    import gguf_writer
    import tiny

    path = gguf_writer.write(tmp_path_factory.mktemp("broken") / "broken.gguf", tiny.model(tied=False))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    rows = tensors["token_embd.weight"]
    row_bytes = rows.n_bytes // len(tiny.TOKENS)
    raw = bytearray(path.read_bytes())
    at = int(rows.data_offset) + tiny.TOKENS.index("x") * row_bytes
    raw[at : at + 2] = b"\x00\x7e"  # the first block's scale, NaN in half precision
    path.write_bytes(raw)
    return path


OPTIONS = ["--max-tokens", 3, "--temperature", 0]


def test_a_single_prompt(pagedkv_command, broken):
    fine = pagedkv_command("generate", "--model", broken, "--prompt", "ab", *OPTIONS)
    assert (fine.returncode, fine.stderr) == (0, "")
    failed = pagedkv_command("generate", "--model", broken, "--prompt", "axb", *OPTIONS)
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", f"pagedkv: {REASON}\n")


@pytest.mark.parametrize(
    "prompts, told",
    [
        ("ab\nxa\nba", f"prompt 2 of 3: {REASON}"),
        ("xx\nb\nx\nax", f"prompt 1 of 4: {REASON} (and 2 more)"),
        ("x", REASON),
    ],
)
def test_json_rows_of_all_prompts(pagedkv_command, broken, prompts, told):
    result = pagedkv_command("generate", "--json", "--model", broken, *OPTIONS, stdin=prompts)
    assert (result.returncode, result.stderr) == (1, f"pagedkv: {told}\n")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == prompts.split("\n")
    assert [row["finish_reason"] == "error" for row in rows] == ["x" in prompt for prompt in prompts.split("\n")]


def test_several_prompts_as_text(pagedkv_command, broken):
    result = pagedkv_command("generate", "--model", broken, *OPTIONS, stdin="ab\nxa\nba\n")
    assert result.returncode == 1 and result.stderr == f"pagedkv: prompt 2 of 3: {REASON}\n"
    assert "ab" in result.stdout and "ba" in result.stdout


def test_chat_goes_on_and_fails_at_its_end(pagedkv_command, broken):
    """The failed message does not spoil the answers to later ones, as it would by staying in the conversation."""
    result = pagedkv_command("chat", "--model", broken, stdin="axb\n/stats\n/exit\n")
    assert (result.returncode, result.stderr) == (1, f"{REASON}; the message is forgotten\n")
    assert result.stdout.startswith("0 messages")
    assert pagedkv_command("chat", "--model", broken, stdin="/stats\n").returncode == 0


def test_bench_does_not_measure_failures(pagedkv_command, broken, tmp_path):
    raw = broken.read_bytes()
    norm = next(tensor for tensor in gguf.GGUFReader(broken).tensors if tensor.name == "output_norm.weight")
    at = int(norm.data_offset)
    (tmp_path / "nan.gguf").write_bytes(raw[:at] + b"\xff" * norm.n_bytes + raw[at + norm.n_bytes :])
    options = ["--batch", 2, "--prompt-tokens", 4, "--gen-tokens", 2, "--json"]
    result = pagedkv_command("bench", "--model", tmp_path / "nan.gguf", *options)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", f"pagedkv: {REASON}\n")
