"""A conversation through pipes and through a terminal."""

import contextlib
import fcntl
import io
import json
import os
import re
import select
import signal
import subprocess
import termios
import time

import command_line
import pytest

from pagedkv import LLM
from pagedkv.commands import chat as chat_module
from pagedkv.commands.chat import HELP, Chat
from pagedkv.commands.terminal import shown_safely


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


def test_bytes_that_are_no_text_cost_their_line_only(smollm2_path, tmp_path):
    process = command_line.start(
        tmp_path, "chat", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    shown, errors = process.communicate(b"caf\xe9 au lait\n/stats\nSay hi.\n/stats\n", timeout=120)
    assert process.returncode == 0
    assert errors == b"the message is not text: byte 0xe9 at index 3\n"
    assert b"0 messages" in shown and b"2 messages" in shown


def test_the_end_of_input_ends_a_message_of_several_lines(llm, capsys, monkeypatch):
    chat, sent = Chat(llm), []
    monkeypatch.setattr(chat, "answer", sent.append)
    monkeypatch.setattr("sys.stdin", io.StringIO('one\n"""two\nthree"""\n""""""\n"""\nfour\n\nfive\n'))
    chat.loop()
    assert sent == ["one", "two\nthree", "four\n\nfive"]


def test_an_interrupt_while_the_prompt_is_computed(llm, capsys, monkeypatch):
    """Ctrl-C in the first of three steps that a prompt needs: no more of them, and nothing is remembered."""
    pump, steps = llm.engine.pump, []

    def step():
        steps.append(pump())
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine, "pump", step)
    chat = Chat(llm)
    chat.answer("a " * 800)
    assert len(steps) == 1 and chat.messages == [] and chat.last is None
    assert capsys.readouterr().err == "stopped before the first token; the message is forgotten\n"
    assert llm.engine.stats()["pages_in_use"] == 0 and not llm.engine.has_unfinished()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_save_that_fails_is_one_line(llm, capsys, tmp_path):
    chat = Chat(llm)
    for name in (tmp_path / "absent" / "x.json", tmp_path, "", "a\0b", "~nobody-of-this-name/x"):
        chat._save(str(name))
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and len(errors) > 10, name


def test_save_replaces_a_file_whole_or_not_at_all(llm, capsys, tmp_path, monkeypatch):
    path, link = tmp_path / "talk.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    chat = Chat(llm)
    chat.messages = [{"role": "user", "content": "caf\u00e9 \u4e16"}]
    with monkeypatch.context() as patch:
        patch.setattr(chat_module.Path, "replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            chat._save(str(path))
    assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["link.json", "talk.json"]
    chat._save(str(link))
    assert json.loads(path.read_bytes().decode("utf-8")) == chat.messages and link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640 and sorted(os.listdir(tmp_path)) == ["link.json", "talk.json"]
    chat._save("/dev/null")
    assert capsys.readouterr().out == f"saved 1 message to {link}\nsaved 1 message to /dev/null\n"


def test_controls_do_not_reach_a_terminal(monkeypatch):
    wild = "a\tb\nc\x1b]0;title\x07\r\x9b2J\x7f\x00 \u4e16"
    assert shown_safely(wild) == wild  # a pipe gets what there is
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert shown_safely(wild) == "a\tb\nc\ufffd]0;title\ufffd\ufffd\ufffd2J\ufffd\ufffd \u4e16"


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


@contextlib.contextmanager
def on_a_terminal(directory):
    """(process, terminal): `pagedkv chat` on a terminal of its own, so that keys such as Ctrl-C do what they do."""
    terminal, other = os.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(
        [*command_line.COMMAND, "chat"],
        cwd=directory,
        env=command_line.environment(TERM="xterm", INPUTRC="/dev/null"),
        preexec_fn=take_terminal,
        stdin=other,
        stdout=other,
        stderr=other,
    )
    os.close(other)
    try:
        read_until(terminal, rb"/help lists the commands.*\n.*> ")
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_interrupts_on_a_terminal(smollm2_path, tmp_path):
    """Ctrl-C stops an answer and drops a typed line, and the conversation goes on; Ctrl-D leaves."""
    with on_a_terminal(tmp_path) as (process, terminal):
        os.write(terminal, b"Count from 1 to 10000, one number a line, and do not stop.\r")
        read_until(terminal, rb"\n.*\w")  # the echo, then the answer begins
        os.write(terminal, b"\x03")
        read_until(terminal, rb"> $")
        os.write(terminal, b"half a li")
        read_until(terminal, rb"half a li")
        # a signal that comes just before input() waits is seen only at the next one, so press like a person
        read_until(terminal, rb"\n.*> $", lambda: os.write(terminal, b"\x03"))
        os.write(terminal, b"/stats\r")
        assert b"2 messages" in read_until(terminal, rb"messages.*\n(.*\n)*.*> $")
        os.write(terminal, b"\x04")
        assert process.wait(timeout=30) == 0


def test_interrupts_outside_answers(llm, capsys, monkeypatch):
    """At the prompt Ctrl-C drops what was typed; between two prompts it does nothing; afterwards all is as before."""
    keys = iter(["interrupt", "/stats", "interrupt", '"""half', "interrupt", "/exit"])
    asked = []

    def typed(prompt):
        asked.append(prompt)
        key = next(keys)
        return signal.raise_signal(signal.SIGINT) if key == "interrupt" else key

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", typed)
    chat, sent = Chat(llm), []
    monkeypatch.setattr(chat, "answer", sent.append)
    chat._commands["/stats"] = lambda _: signal.raise_signal(signal.SIGINT)
    chat.loop()
    assert sent == [] and asked == ["> ", "> ", "> ", "> ", "  ", "> "]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_that_input_makes_a_system_error_of(llm, capsys, monkeypatch):
    """input() does so when a second Ctrl-C comes as it passes on the first; a SystemError of its own is no Ctrl-C."""
    keys = iter(["interrupts", "/exit", "fault"])

    def typed(prompt):
        key = next(keys)
        if key == "/exit":
            return key
        if key == "fault":
            raise SystemError("a fault")
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as first:
            signal.raise_signal(signal.SIGINT)
            raise SystemError("returned a result with an exception set") from first

    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", typed)
    chat = Chat(llm)
    chat.loop()
    with pytest.raises(SystemError, match="a fault"):
        chat.loop()
    assert next(keys, None) is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def drop_shown(terminal):
    """Read what has come, for 10 ms at most."""
    select.select([terminal], [], [], 0.01)
    while select.select([terminal], [], [], 0)[0]:
        os.read(terminal, 4096)


def answers_and_leaves(process, terminal):
    """Still alive after a storm: it answers a command, and ends when told."""
    read_until(terminal, rb"messages, .* of 8192(.*\n)*.*> $", lambda: os.write(terminal, b"/stats\r"))
    os.write(terminal, b"/exit\r")
    assert process.wait(timeout=30) == 0


def test_interrupts_while_one_ends_the_typing(smollm2_path, tmp_path):
    """The second of two comes after 0 to 0.3 ms, so that some come when input() is about to pass on the first."""
    with on_a_terminal(tmp_path) as (process, terminal):
        for turn in range(1500):
            process.send_signal(signal.SIGINT)
            second = time.perf_counter_ns() + turn % 100 * 3000
            while time.perf_counter_ns() < second:
                pass
            process.send_signal(signal.SIGINT)
            drop_shown(terminal)
        assert process.poll() is None
        answers_and_leaves(process, terminal)


def test_no_number_of_interrupts_ends_the_program(smollm2_path, tmp_path):
    """They come at any moment: amid commands, between two of them, before an answer and as it ends."""
    with on_a_terminal(tmp_path) as (process, terminal):
        for text in (b"/stats\r", b"Say hi.\r", b"/reset\r") * 4:
            os.write(terminal, text)
            for _ in range(12):
                process.send_signal(signal.SIGINT)
                drop_shown(terminal)
            assert process.poll() is None
        answers_and_leaves(process, terminal)


def test_lines_edited_recalled_and_pasted(smollm2_path, tmp_path):
    """A pasted text of several lines is one message; the arrow up brings back what was typed."""
    pytest.importorskip("readline", reason="this Python was built without readline")
    with on_a_terminal(tmp_path) as (process, terminal):
        os.write(terminal, b"\x1b[200~Say\nhi.\x1b[201~")
        read_until(terminal, rb"hi\.")
        os.write(terminal, b"\r")
        read_until(terminal, rb"\n(.*\n)*.*\w(.*\n)*.*> $")
        os.write(terminal, b"/save one.json\r")
        read_until(terminal, rb"saved 2 messages(.*\n)*.*> $")
        os.write(terminal, b"\x1b[A\x7f\x7f\x7f\x7f\x7fx.json\r")  # the line before, its end changed
        read_until(terminal, rb"saved 2 messages to one.*x\.json(.*\n)*.*> $")
        os.write(terminal, b"/exit\r")
        assert process.wait(timeout=30) == 0
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["one.json", "onex.json"]
    assert json.loads((tmp_path / "one.json").read_text())[0] == {"role": "user", "content": "Say\nhi."}
