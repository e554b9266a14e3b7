"""A conversation through pipes and through a terminal."""

import json
import os
import re
import select
import signal

import command_line
import pytest

from pagedkv import LLM
from pagedkv.commands import chat as chat_module
from pagedkv.commands.chat import HELP, Chat


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(smollm2_path, threads=1, kv_pages=64, max_num_seqs=1) as llm:
        yield llm


def test_messages_and_commands_from_a_pipe(pagedkv_command, smollm2_path, tmp_path):
    lines = ["Say hi.", "", '"""', "Two", "lines", '"""', "/stats", "/save talk.json", "/reset", "/stats", "/cook"]
    result = pagedkv_command("chat", stdin="\n".join(lines) + "\n/help\n/exit\nNever read.\n")
    assert result.returncode == 0
    assert result.stderr == "no command /cook; /help lists them\n"
    assert "4 messages" in result.stdout and "0 messages, 0 of 8192 tokens" in result.stdout and HELP in result.stdout
    talk = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in talk] == ["user", "assistant"] * 2
    assert [message["content"] for message in talk[::2]] == ["Say hi.", "Two\nlines"]
    assert all(message["content"] and message["content"] in result.stdout for message in talk[1::2])


def test_the_model_sees_the_history(llm, capsys, monkeypatch):
    monkeypatch.setattr(chat_module, "MAX_ANSWER", 20)
    chat = Chat(llm)
    chat.answer("My name is Ada.")
    first = len(chat.last.output.prompt_token_ids)
    chat.answer("What is my name?")
    told = llm.tokenizer.decode(chat.last.output.prompt_token_ids)
    assert "My name is Ada." in told and chat.messages[1]["content"] in told
    assert len(chat.last.output.prompt_token_ids) > first
    assert chat.last.output.num_cached_tokens > 0  # the beginning was not computed again
    assert llm.engine.stats()["pages_in_use"] == 0 and llm.check() == []


def test_a_rambling_answer_is_cut_and_kept(llm, capsys, monkeypatch):
    monkeypatch.setattr(chat_module, "MAX_ANSWER", 3)
    chat = Chat(llm)
    chat.answer("Tell me a long story.")
    assert len(chat.last.output.outputs[0].token_ids) == 3
    assert capsys.readouterr().out == chat.messages[1]["content"] + " ...\n"
    assert llm.engine.stats()["pages_in_use"] == 0 and not llm.engine.has_unfinished()


def test_control_tokens_in_a_message_stay_text(llm, capsys, monkeypatch):
    monkeypatch.setattr(chat_module, "MAX_ANSWER", 3)
    chat = Chat(llm)
    chat.answer("<|im_end|> x")
    ids = chat.last.output.prompt_token_ids
    end = llm.tokenizer.encode("<|im_end|>", allow_special=True)
    assert len(end) == 1 and ids.count(end[0]) == 2  # the system message and this one


def test_a_message_too_long_is_refused_and_forgotten(llm, capsys):
    chat = Chat(llm)
    chat.answer("a " * 9000)
    assert chat.messages == [] and chat.last is None
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "8192" in errors and "/reset" in errors


def test_save_that_fails_is_one_line(llm, capsys, tmp_path):
    chat = Chat(llm)
    chat._save(str(tmp_path / "absent" / "x.json"))
    chat._save("")
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "No such file" in errors[0] and "file name" in errors[1]


def test_a_model_without_a_template_is_refused(pagedkv_command, smollm2_path, tmp_path):
    raw = bytearray(smollm2_path.read_bytes())
    at = raw.index(b"tokenizer.chat_template")
    raw[at : at + 23] = b"tokenizer.that_template"
    (tmp_path / "plain.gguf").write_bytes(raw)
    result = pagedkv_command("chat", "--model", "plain.gguf", stdin="hi\n")
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "chat template" in result.stderr


def read_until(terminal, wanted, meanwhile=lambda: None):
    """What the terminal shows up to and including a match of `wanted`; each second without news calls `meanwhile`."""
    shown = b""
    for _ in range(60):
        while select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096)
            if re.search(wanted, shown):
                return shown
        meanwhile()
    pytest.fail(f"no {wanted!r} in {shown!r}")


def test_interrupts_on_a_terminal(smollm2_path, tmp_path):
    """Ctrl-C stops an answer and drops a typed line, and the conversation goes on; Ctrl-D leaves."""
    terminal, other = os.openpty()
    process = command_line.start(tmp_path, "chat", stdin=other, stdout=other, stderr=other)
    os.close(other)
    try:
        read_until(terminal, rb"/help lists the commands.*\n.*> ")
        os.write(terminal, b"Count from 1 to 10000, one number a line, and do not stop.\n")
        read_until(terminal, rb"\n.*\w")  # the echo, then the answer begins
        process.send_signal(signal.SIGINT)
        read_until(terminal, rb"> $")
        os.write(terminal, b"half a li")
        read_until(terminal, rb"half a li")
        # a signal that comes just before input() waits is seen only at the next one, so press like a person
        read_until(terminal, rb"\n.*> $", lambda: process.send_signal(signal.SIGINT))
        os.write(terminal, b"/stats\n")
        assert b"2 messages" in read_until(terminal, rb"messages.*\n(.*\n)*.*> $")
        os.write(terminal, b"\x04")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
