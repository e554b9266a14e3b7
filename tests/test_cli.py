"""The command line from outside: what is printed where, exit statuses, one line for every bad input."""

import json
import os
import resource
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import command_line
import pytest
from click.testing import CliRunner

from pagedkv import __main__ as entry
from pagedkv import cli
from pagedkv.core.errors import PoolExhausted

HEADER_BYTES = 4 << 20  # all metadata and tensor entries of the model, and some weights


def damaged(model, path, replace=(), size=None):
    """A sparse copy of the model's header with bytes replaced, at full or given size."""
    with open(model, "rb") as file:
        head = file.read(HEADER_BYTES)
    for old, new in replace:
        assert old in head and len(old) == len(new)
        head = head.replace(old, new, 1)
    path.write_bytes(head)
    os.truncate(path, model.stat().st_size if size is None else size)
    return path


def one_line(result, status=1):
    """The only line of standard error of a command that failed as it should."""
    assert result.returncode == status, (result.returncode, result.stderr)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and result.stderr.endswith("\n"), result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


# Generation


def test_greedy_continuation(pagedkv_command, smollm2_path):
    result = pagedkv_command("generate", "--prompt", "The capital of France is", "--max-tokens", 8, "--temperature", 0)
    assert result.returncode == 0 and result.stderr == ""
    assert "Paris" in result.stdout and result.stdout.endswith("\n")


def test_default_model_is_pulled_and_found_by_path_too(pagedkv_command, smollm2_path):
    arguments = ["--prompt", "Water is", "--max-tokens", 6, "--temperature", 0]
    by_name = pagedkv_command("generate", *arguments)
    by_path = pagedkv_command("generate", "--model", smollm2_path, *arguments)
    assert by_name.stdout == by_path.stdout != ""


def test_json_rows_come_in_order_and_add_up(pagedkv_command, smollm2_path):
    prompts = ["Once", "A page table maps virtual addresses to", "1 2 3 4"]
    result = pagedkv_command(
        "generate", "--json", "--max-tokens", 5, "--seed", 3, "--threads", 1, stdin="\n".join(prompts)
    )
    assert result.returncode == 0 and result.stderr == ""
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    for row in rows:
        counted = ["prompt_tokens", "completion_tokens", "prefill_s", "decode_s"]
        assert list(row) == ["prompt", "text", "token_ids", "finish_reason", *counted]
        assert row["completion_tokens"] == len(row["token_ids"]) <= 5
        assert row["finish_reason"] == ("length" if row["completion_tokens"] == 5 else "stop")
        assert row["prefill_s"] > 0 and (row["decode_s"] > 0) == (row["completion_tokens"] > 1)
    assert [row["prompt_tokens"] for row in rows] == [1, 7, 7]


def test_what_is_streamed_is_the_text(pagedkv_command, smollm2_path):
    options = ["generate", "--prompt", "Café, naïve: 日本", "--max-tokens", 40, "--temperature", 1, "--seed", 5]
    streamed, row = pagedkv_command(*options).stdout, json.loads(pagedkv_command(*options, "--json").stdout)
    assert streamed == row["text"] + "\n" and row["completion_tokens"] > 1


def test_memory_is_the_weights_and_the_pages_in_use(smollm2_path, tmp_path):
    """Weights are held once: the peak is at most 1.15 times the file, the pages in use, and 120 MB.

    The process reads its own peak: what the system reports of a child includes the peak of the tests that started it.
    """
    code = (
        "import atexit, re, sys; from pathlib import Path; from pagedkv.cli import main\n"
        "read = lambda: re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]\n"
        "atexit.register(lambda: Path('peak').write_text(read())); sys.exit(main())"
    )
    arguments = ["generate", "--prompt", " a" * 1000, "--max-tokens", "24", "--temperature", "0"]
    command = [sys.executable, "-P", "-c", code, *arguments]
    environment = command_line.environment()
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, timeout=300)
    pages = 1024 * 30 * 3 * 2 * 64 * 2  # tokens, layers, KV heads, K and V, head_dim, bytes of f16
    peak = 1024 * int((tmp_path / "peak").read_text())
    assert smollm2_path.stat().st_size < peak < 1.15 * smollm2_path.stat().st_size + pages + 120e6


def test_options_reach_the_sampler(pagedkv_command, smollm2_path):
    def ids(*options):
        result = pagedkv_command("generate", "--json", "--prompt", "The weather", "--max-tokens", 12, *options)
        return json.loads(result.stdout)["token_ids"]

    greedy = ids("--temperature", 0)
    assert ids("--temperature", 2, "--seed", 7) == ids("--temperature", 2, "--seed", 7) != greedy
    assert ids("--temperature", 2, "--seed", 7) != ids("--temperature", 2, "--seed", 8)
    assert ids("--temperature", 2, "--top-k", 1) == ids("--temperature", 2, "--top-p", 1e-6) == greedy


def test_kv_format_reaches_the_cache(pagedkv_command, smollm2_path):
    options = ["--prompt", "Seven wonders", "--max-tokens", 48, "--seed", 1, "--temperature", 1]
    texts = {kv: pagedkv_command("generate", *options, "--kv-format", kv).stdout for kv in ("f32", "int8")}
    assert texts["f32"] != texts["int8"]


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_speculation_reaches_the_model(command, monkeypatch):
    seen = []

    def run(*arguments, **options):
        seen.append(options.get("llm_options", arguments[-1]))
        return True

    monkeypatch.setattr(f"pagedkv.commands.{command}.run", run)
    prompt = ["--prompt", "x"] if command == "generate" else []
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    assert cli.main([command, *prompt]) == cli.main([command, *prompt, "--speculative-config", json.dumps(config)]) == 0
    assert [options["speculative_config"] for options in seen] == [None, config]


def test_pool_and_activations_reach_the_model(pagedkv_command, smollm2_path):
    options = ["generate", "--prompt", " a b c d" * 20, "--max-tokens", 60, "--temperature", 0]
    line = one_line(pagedkv_command(*options, "--kv-memory", "1MiB"))  # two pages of 16 tokens
    assert "needs room for" in line and "32" in line
    assert "kv_memory must be at least one page" in one_line(pagedkv_command(*options, "--kv-memory", "100KiB"))
    assert "kv_memory must be" in one_line(pagedkv_command("generate", "--prompt", "x", "--kv-memory", "999999TiB"))
    chat = pagedkv_command("chat", "--kv-memory", "1MiB", stdin="/stats\n")
    assert chat.returncode == 0 and "of 2 KV pages" in chat.stdout
    options = ["generate", "--prompt", "Seven wonders", "--max-tokens", 48, "--seed", 1, "--temperature", 1]
    texts = {kind: pagedkv_command(*options, "--activations", kind).stdout for kind in ("int8", "int12")}
    assert texts["int8"] != texts["int12"]


def test_the_default_pool_fits_a_limit_of_address_space(smollm2_path, tmp_path):
    for limit in (1 << 30, 3 << 29, 4 << 30):
        result = subprocess.run(
            [*command_line.COMMAND, "generate", "--prompt", "The capital of France is", "--temperature", "0"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=command_line.environment(PAGEDKV_THREADS="2"),
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )
        assert (result.returncode, result.stderr) == (0, "") and "Paris" in result.stdout


def test_several_prompts_without_json(pagedkv_command, smollm2_path):
    result = pagedkv_command("generate", "--prompt", "Red", "--prompt", "Blue", "--max-tokens", 3, "--temperature", 0)
    red, blue = result.stdout.index("Red"), result.stdout.index("Blue")
    assert result.returncode == 0 and red < blue


def test_stdin_and_option_give_the_same(pagedkv_command, smollm2_path):
    options = ["generate", "--max-tokens", 4, "--temperature", 0]
    assert pagedkv_command(*options, stdin="Hello\r\n").stdout == pagedkv_command(*options, "--prompt", "Hello").stdout


# Bad input


def test_missing_file(pagedkv_command):
    line = one_line(pagedkv_command("generate", "--model", "absent.gguf", "--prompt", "x"))
    assert "absent.gguf: no such file" in line


def test_unknown_model_name_lists_the_catalogue(pagedkv_command):
    assert "smollm2-135m-instruct" in one_line(pagedkv_command("generate", "--model", "gpt-17", "--prompt", "x"))
    assert "smollm2-135m-instruct" in one_line(pagedkv_command("pull", "gpt-17"))


@pytest.mark.parametrize("command", [["generate", "--prompt", "x", "--model"], ["info"]])
def test_files_that_are_no_models(pagedkv_command, smollm2_path, tmp_path, command):
    text = tmp_path / "text.gguf"
    text.write_text("this is not a model at all")
    assert "not a GGUF file" in one_line(pagedkv_command(*command, text))
    for size in (10, 1000, 1 << 20, smollm2_path.stat().st_size - 1):
        cut = damaged(smollm2_path, tmp_path / "cut.gguf", size=size)
        assert "cut.gguf" in one_line(pagedkv_command(*command, cut))
    other = damaged(smollm2_path, tmp_path / "other.gguf", [(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0LLAMA")])
    assert "'LLAMA' is not supported" in one_line(pagedkv_command(*command, other))


def test_unsupported_tensor_type_is_named(pagedkv_command, smollm2_path, tmp_path):
    norm = b"output_norm.weight" + (1).to_bytes(4, "little") + (576).to_bytes(8, "little")
    other = damaged(smollm2_path, tmp_path / "i32.gguf", [(norm + bytes(4), norm + (26).to_bytes(4, "little"))])
    line = one_line(pagedkv_command("generate", "--model", other, "--prompt", "x"))
    assert "output_norm.weight" in line and "I32" in line


def test_unknown_isa_lists_what_there_is(pagedkv_command, smollm2_path):
    for command in (["generate", "--prompt", "x"], ["chat"], ["bench", "--batch", "1"]):
        line = one_line(pagedkv_command(*command, PAGEDKV_ISA="mmx"))
        assert "'mmx'" in line and "scalar" in line


def test_bad_thread_variable(pagedkv_command, smollm2_path):
    line = one_line(pagedkv_command("generate", "--prompt", "x", PAGEDKV_THREADS="many"))
    assert "PAGEDKV_THREADS" in line and "'many'" in line


def test_prompt_longer_than_the_context_names_both_numbers(pagedkv_command, smollm2_path):
    line = one_line(pagedkv_command("generate", "--prompt", " a" * 9000, "--max-tokens", 1))
    assert "9000" in line and "8192" in line
    line = one_line(pagedkv_command("generate", "--json", "--prompt", "x", "--prompt", " a" * 9000))
    assert "prompt 2 of 2" in line and "8192" in line


def test_empty_prompts(pagedkv_command):
    """An option is wrong usage, a line of a file bad input; neither is skipped, and nothing is computed before."""
    for options in ([], ["--json"]):
        line = one_line(pagedkv_command("generate", "--prompt", "", "--model", "absent.gguf", *options), status=2)
        assert "prompt 1 of 1 is empty" in line
        line = one_line(pagedkv_command("generate", "--model", "absent.gguf", *options, stdin="a\n\nb\n"))
        assert line == "pagedkv: line 2 of standard input is empty\n"
        line = one_line(pagedkv_command("generate", "--model", "absent.gguf", *options, stdin="a\r\nb\r\n\r\n"))
        assert line == "pagedkv: line 3 of standard input is empty\n"
    assert "standard input is empty" in one_line(pagedkv_command("generate", stdin=""))


@pytest.mark.parametrize("utf8_mode", ["0", "1"])
def test_prompt_that_is_not_text(tmp_path, utf8_mode):
    for arguments, stdin, status, told in (
        ([], b"fine\ncaf\xe9\n", 1, "line 2 of standard input"),
        (["--prompt", b"fine", "--prompt", b"caf\xe9"], b"", 2, "prompt 2 of 2"),
    ):
        result = subprocess.run(
            [*command_line.COMMAND, "generate", *arguments],
            input=stdin,
            capture_output=True,
            cwd=tmp_path,
            env=command_line.environment(PYTHONUTF8=utf8_mode, LC_ALL="C.UTF-8"),
        )
        assert result.returncode == status and result.stderr.count(b"\n") == 1
        assert f"{told} is not text: byte 0xe9 at index 3".encode() in result.stderr


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["generate", "--prompt", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "--prompt", "x", "--temperature", "nan"], ["temperature", "nan"]),
        (["generate", "--prompt", "x", "--temperature", "warm"], ["temperature", "warm"]),
        (["generate", "--prompt", "x", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["generate", "--prompt", "x", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["generate", "--prompt", "x", "--top-k", "-3"], ["top_k", "-3"]),
        (["generate", "--prompt", "x", "--seed", "-1"], ["seed", "-1"]),
        (["generate", "--prompt", "x", "--threads", "0"], ["threads", "0"]),
        (["generate", "--prompt", "x", "--kv-format", "f64"], ["kv-format", "f64", "int8"]),
        (["generate", "--prompt", "x", "--kv-memory", "lots"], ["kv-memory", "lots", "512MiB"]),
        (["chat", "--kv-memory", "0"], ["kv-memory", "0"]),
        (["generate", "--prompt", "x", "--speculative-config", "ngram"], ["speculative-config", "column 1"]),
        (["chat", "--speculative-config", '{"method": "eagle"}'], ["speculative-config", "method", "eagle", "ngram"]),
        (["serve", "--speculative-config", '{"method": "ngram"}'], ["num_speculative_tokens", "None", "64"]),
        (["serve", "--speculative-config", "[" * 9999], ["speculative-config"]),
        (["bench", "--activations", "f32"], ["activations", "f32", "int12"]),
        (["serve", "--api-key", "a b"], ["api-key", "printable"]),
        (["serve", "--quantization", "q9"], ["quantization", "q9", "q8_0"]),
        (["generate", "--prompt", ""], ["prompt 1 of 1", "empty"]),
        (["generate", "--porridge"], ["--porridge"]),
        (["generate", "x"], ["x"]),
        (["bench", "--batch", "1,zero"], ["batch", "1,zero"]),
        (["bench", "--batch", "0"], ["batch", "0"]),
        (["bench", "--gen-tokens", "0"], ["gen-tokens", "0"]),
        (["info"], ["MODEL"]),
        (["pull"], ["NAME"]),
        (["cook"], ["cook"]),
    ],
)
def test_wrong_usage(pagedkv_command, arguments, named):
    line = one_line(pagedkv_command(*arguments), status=2)
    assert all(word in line for word in named) and "--help" in line


def test_debug_shows_the_traceback(pagedkv_command):
    for arguments in (["--debug", "info", "absent.gguf"], ["info", "--debug", "absent.gguf"]):
        result = pagedkv_command(*arguments)
        assert result.returncode == 1
        assert "Traceback" in result.stderr and "absent.gguf: no such file" in result.stderr


# Streams and signals


def test_interrupt_while_streaming(smollm2_path, tmp_path):
    arguments = ["generate", "--prompt", "1 2 3", "--max-tokens", "8000", "--temperature", "0"]
    process = command_line.start(tmp_path, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1)  # it streams before it is done
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == b""


def test_interrupt_at_any_moment_of_the_start(smollm2_path, tmp_path):
    """From the first line of the entry point on, and through all imports, Ctrl-C ends in 130 without a word.

    The signal comes at the n-th line that runs, wherever that is; Python's own start before them is not ours.
    """
    code = (
        "import re, signal, sys; n = int(sys.argv.pop(1)); from pagedkv.__main__ import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def press(frame, event, argument, seen=[]):\n"
        "    seen.append(0)\n"
        "    if len(seen) == n: sys.settrace(None); signal.raise_signal(signal.SIGINT)\n"
        "    return press\n"
        "sys.settrace(press); sys.exit(main())"
    )
    for n in (4, 30, 1000, 4000, 15_000, 40_000, 90_000, 150_000):
        command = [sys.executable, "-P", "-c", code, str(n), "generate", "--prompt", "1 2 3", "--max-tokens", "9"]
        result = subprocess.run(command, capture_output=True, cwd=tmp_path, env=command_line.environment(), timeout=60)
        assert (result.returncode, result.stdout, result.stderr) == (130, b"", b""), (n, result)


def test_an_import_that_hides_an_interrupt(monkeypatch, capsys):
    """Before Python 3.12 an interrupt in a descriptor's __set_name__ comes out as a RuntimeError."""

    def load(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setattr("pagedkv.commands.doctor.run", load)
    assert cli.main(["doctor"]) == 130
    monkeypatch.setattr(cli, "main", load)
    assert entry.main() == 130
    assert capsys.readouterr() == ("", "")


def closing(descriptors, *arguments, stdin="", code=None):
    """A command run with these of its standard streams closed, through the entry point or `code`."""
    command = [sys.executable, "-P", *(["-c", code] if code else ["-m", "pagedkv"]), *map(str, arguments)]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        env=command_line.environment(),
        preexec_fn=lambda: [os.close(descriptor) for descriptor in descriptors],
        timeout=300,
    )


CLOSED = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_streams(smollm2_path, closed):
    """What would go to a closed stream goes nowhere, above all not to another stream; statuses are as ever."""
    result = closing(closed, "generate", "--prompt", "The capital of France is", "--max-tokens", 8, "--temperature", 0)
    assert (result.returncode, result.stderr) == (0, "")
    assert (" Paris" in result.stdout) == (1 not in closed)
    for arguments in (["info", "absent.gguf"], ["generate"], ["pull", "gpt-17"]):
        result = closing(closed, *arguments)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.count("\n") == (2 not in closed)
    result = closing(closed, "cook")
    assert (result.returncode, result.stdout) == (2, "")
    result = closing(closed, "chat", stdin="/help\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert ("/save FILE" in result.stdout) == (not {0, 1} & {*closed})


@pytest.mark.parametrize("closed", CLOSED)
def test_no_file_takes_the_place_of_a_closed_stream(tmp_path, closed):
    """What a library writes to descriptors 0 to 2 must not land in a model or an answer."""
    code = (
        "import os, sys; from pagedkv.cli import main; sys.argv[0] = 'pagedkv'; name = sys.argv.pop()\n"
        "import pagedkv.commands.doctor as doctor\n"
        "def run():\n"
        "    file = open(name, 'w')\n"
        "    for i in range(3): os.fstat(i), os.get_inheritable(i) or 1 / 0\n"
        "    file.write(str(file.fileno() > 2)); os.write(2, b'warning')\n"
        "doctor.run = run; sys.exit(main(['doctor']))"
    )
    result = closing(closed, tmp_path / "made", code=code)
    assert (result.returncode, (tmp_path / "made").read_text()) == (0, "True")
    assert result.stderr == ("" if 2 in closed else "warning")


def test_a_message_that_cannot_be_written_keeps_its_status(smollm2_path, tmp_path):
    with open("/dev/full", "w") as full:
        for arguments, status in (["info", "absent.gguf"], 1), (["--debug", "info", "absent.gguf"], 1), (["cook"], 2):
            process = command_line.start(tmp_path, *arguments, stdout=subprocess.PIPE, stderr=full)
            assert (process.communicate(timeout=60)[0], process.returncode) == (b"", status)


def test_a_library_user_without_standard_error(smollm2_path):
    code = (
        "from pagedkv import LLM, SamplingParams\n"
        "with LLM('smollm2-135m-instruct', threads=1, kv_pages=9) as llm:\n"
        "    print(len(llm.generate('Hi', SamplingParams(max_tokens=2), use_tqdm=True)))"
    )
    result = closing((2,), code=code)
    assert (result.returncode, result.stdout) == (0, "1\n")


def test_reader_that_goes_away(smollm2_path, tmp_path):
    arguments = ["generate", "--prompt", "1 2 3", "--max-tokens", "8000", "--temperature", "0"]
    process = command_line.start(tmp_path, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "words, typed",
    [("info", ""), ("generate --max-tokens 2 --prompt x --model", ""), ("chat --model", "/help\n"), ("pull", "")],
)
def test_full_disk_is_told(smollm2_path, tmp_path, words, typed):
    model = "smollm2-135m-instruct" if words == "pull" else smollm2_path
    with open("/dev/full", "w") as full:
        process = command_line.start(
            tmp_path, *words.split(), model, stdin=subprocess.PIPE, stdout=full, stderr=subprocess.PIPE
        )
        _, errors = process.communicate(typed.encode(), timeout=60)
    assert process.returncode == 1 and errors.count(b"\n") == 1 and b"No space left on device" in errors


def test_progress_bars_only_on_a_terminal(smollm2_path, tmp_path):
    """A terminal gets a closing line with the speed; the pipes of the tests above get nothing."""
    terminal, slave = os.openpty()
    arguments = ["generate", "--prompt", "Hi", "--max-tokens", "2"]
    process = command_line.start(tmp_path, *arguments, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    process.communicate(timeout=60)
    shown = b""
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # all of it was read and the other side is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(terminal)
    assert process.returncode == 0 and b"2 new tokens" in shown


def test_output_is_streamed_token_by_token(smollm2_path, tmp_path):
    arguments = ["generate", "--prompt", "A B C", "--max-tokens", "400", "--temperature", "0"]
    process = command_line.start(tmp_path, *arguments, stdout=subprocess.PIPE)
    first = os.read(process.stdout.fileno(), 1 << 16)
    assert process.poll() is None and 0 < len(first) < 100
    process.kill()
    process.communicate()


# Parsing and error lines, in this process


def test_version_and_help():
    runner = CliRunner()
    assert runner.invoke(cli.cli, ["--version"], obj=None).output.startswith("pagedkv ")
    shown = runner.invoke(cli.cli, ["--help"]).output
    assert all(name in shown for name in ("generate", "chat", "serve", "bench", "pull", "info", "doctor"))


def test_the_installed_command_is_the_entry_point_that_hears_interrupts():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert EntryPoint("pagedkv", project["scripts"]["pagedkv"], "console_scripts").load() is entry.main


def test_without_a_command_help_goes_to_standard_error(pagedkv_command):
    result = pagedkv_command()
    assert result.returncode == 2 and result.stdout == "" and "generate" in result.stderr


def test_options_of_each_command():
    expected = {
        "generate": "model prompts max_tokens temperature top_k top_p seed threads kv_format kv_memory activations "
        "speculative_config as_json debug",
        "chat": "model kv_memory activations speculative_config debug",
        "bench": "model threads prompt_tokens gen_tokens batch activations profile as_json debug",
        "serve": "model host port keys key_file names max_body max_queue max_prompts max_n max_logprobs origins "
        "shutdown_timeout access_log threads kv_format kv_memory kv_pages page_tokens max_model_len max_num_seqs "
        "max_num_batched_tokens no_prefix_caching quantization activations speculative_config debug",
        "pull": "name debug",
        "info": "model debug",
        "doctor": "debug",
    }
    found = {name: {p.name for p in command.params} for name, command in cli.cli.commands.items()}
    assert found == {name: set(options.split()) for name, options in expected.items()}


@pytest.mark.parametrize(
    "error, line",
    [
        (ValueError("bad\n  thing"), "pagedkv: bad thing"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), "pagedkv: x.gguf: No such file or directory"),
        (MemoryError(), "pagedkv: MemoryError"),
        (PoolExhausted("no page left"), "pagedkv: no page left"),
        (KeyError("x"), "pagedkv: internal error, KeyError: 'x' (--debug shows where)"),
    ],
)
def test_error_lines(error, line):
    assert cli.error_line(error) == line


@pytest.mark.parametrize(
    "error, status",
    [(ValueError("x"), 1), (KeyboardInterrupt(), 130), (RuntimeError("x"), 1), (SystemError("x"), 1)],
)
def test_statuses(monkeypatch, capsys, error, status):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("pagedkv.commands.doctor.run", fail)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err.count("\n") == (0 if status == 130 else 1)
