"""`pagedkv serve` in a process of its own: starting, stopping, options, and one line for each failure."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import command_line
import httpx
import pytest

from pagedkv import cli
from pagedkv.commands.serve import api_keys, model_name

ENDLESS = {"prompt": "x", "max_tokens": 200_000, "ignore_eos": True, "logit_bias": {"0": -100}}


@contextmanager
def running(directory, model, *options, **changes):
    """(process, client) of a server on a free port; killed behind the block if it still runs."""
    command = [*command_line.COMMAND, "serve", "--model", str(model), "--port", "0", *map(str, options)]
    process = subprocess.Popen(
        command, cwd=directory, env=command_line.environment(**changes), stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        line = process.stderr.readline()
        match = re.fullmatch(r"pagedkv: serving (\S+) at (http://\S+) \(Ctrl-C stops\)\n", line)
        assert match, line + process.stderr.read()
        with httpx.Client(base_url=match[2], timeout=60) as client:
            assert client.get("/ready").status_code == 200  # the line promises it
            client.model = match[1]
            yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_it_serves_and_ends(tmp_path, tiny_path):
    with running(tmp_path, tiny_path, "--threads", 1, "--max-model-len", 100, "--max-n", 3) as (process, client):
        assert client.model == "tiny" == client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5, "ignore_eos": True}).json()
        assert answer["usage"]["completion_tokens"] == 5 and answer["model"] == "tiny"
        assert client.get("/v1/models/tiny").json()["max_model_len"] == 100
        assert "at most 3" in client.post("/v1/completions", json={"prompt": "x", "n": 4}).json()["error"]["message"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr.read() == "" == process.stdout.read()


def test_ctrl_c_has_its_status(tmp_path, tiny_path):
    with running(tmp_path, tiny_path) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130 and process.stderr.read() == ""


@pytest.mark.parametrize("twice", [False, True], ids=["deadline", "second signal"])
def test_a_signal_meets_running_requests(tmp_path, smollm2_path, twice):
    """The first signal lets them run until the deadline, with 503 for others; the second ends all at once."""
    options = ["--kv-pages", 600, "--shutdown-timeout", 600 if twice else 1.5]
    with (
        running(tmp_path, smollm2_path, *options) as (process, client),
        client.stream("POST", "/v1/completions", json={**ENDLESS, "max_tokens": 7000, "stream": True}) as stream,
        httpx.Client(base_url=client.base_url) as other,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {") and other.get("/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        while other.get("/ready").status_code == 200:
            assert time.monotonic() < deadline
        refused = other.post("/v1/completions", json=ENDLESS)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        if twice:
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                list(lines)
        else:
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert process.wait(30) == 0


def test_keys_from_everywhere(tmp_path, tiny_path):
    file = tmp_path / "keys"
    file.write_text("from-file\n\n  second-line \n")
    options = ["--api-key", "from-option", "--api-key-file", file]
    with running(tmp_path, tiny_path, *options, PAGEDKV_API_KEY="from-environment other") as (_, client):
        assert client.get("/version").status_code == 401
        for key in ("from-file", "second-line", "from-option", "from-environment", "other"):
            assert client.get("/version", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_what_is_a_key(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    assert api_keys(["a", "b"], None, "b  c\n") == ("a", "b", "c") and api_keys([], None, None) == ()
    kept = tmp_path / "keys"
    kept.write_text("# old\n#gone\n  k1  \n\n # k2\nk3#\n")
    assert api_keys([], str(kept), None) == ("k1", "k3#")
    for given in ([""], ["a b"], ["ä"], ["a\n"]):
        with pytest.raises(ValueError, match="API key"):
            api_keys(given, None, None)
    with pytest.raises(ValueError, match="holds no key"):
        api_keys([], str(empty), None)


def test_what_a_model_is_called(tmp_path):
    (tmp_path / "Some.Model.gguf").touch()
    assert model_name(str(tmp_path / "Some.Model.gguf")) == "Some.Model"
    assert model_name(str(tmp_path)) == tmp_path.name and model_name("smollm2-135m-instruct") == "smollm2-135m-instruct"


def test_failures_are_one_line(pagedkv_command, tmp_path, tiny_path):
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    for options, status, part in (
        (["--model", "absent.gguf", "--port", 0], 1, "absent.gguf"),
        (["--port", port], 1, f"127.0.0.1:{port}"),
        (["--host", "no.such.host.invalid", "--port", 0], 1, "no.such.host.invalid"),
        (["--api-key", "a b"], 2, "API key"),
        (["--port", 70000], 2, "--port"),
        (["--max-body", "much"], 2, "--max-body"),
        (["--kv-memory", "-1"], 2, "--kv-memory"),
        (["--max-n", 0], 2, "--max-n"),
        (["--api-key-file", tmp_path / "absent"], 2, "--api-key-file"),
        (["--model", tiny_path, "--kv-memory", "1MiB", "--kv-pages", 3, "--port", 0], 2, "--kv-pages"),
    ):
        result = pagedkv_command("serve", *options)
        assert result.returncode == status, (options, result)
        assert result.stdout == "" and len(result.stderr.splitlines()) == 1 and part in result.stderr, result.stderr
    taken.close()


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "pydantic", "prometheus_client"])
def test_a_missing_package_names_the_extra(tmp_path, missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom pagedkv.cli import main\nsys.exit(main(['serve']))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=command_line.environment(), capture_output=True, text=True
    )
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert missing in result.stderr and "pip install 'pagedkv[server]'" in result.stderr


def test_every_option_arrives(monkeypatch, tmp_path):
    from pagedkv.commands import serve

    got = {}
    monkeypatch.setattr(serve, "run", lambda model, **options: got.update(options, model=model))
    file = tmp_path / "keys"
    file.touch()
    words = f"""serve --model m --host ::1 --port 1 --api-key k --api-key-file {file} --served-model-name a
        --served-model-name b --max-body 2KB --max-queue 3 --max-prompts 4 --max-n 5 --max-logprobs 6 --cors-origin *
        --shutdown-timeout 7 --access-log --threads 2 --kv-format int8 --kv-memory 8MiB --page-tokens 32
        --max-model-len 9 --max-num-seqs 10 --max-num-batched-tokens 11 --no-prefix-caching --quantization q8_0
        --activations int12 --speculative-config {{"method":"ngram","num_speculative_tokens":4}}"""
    assert cli.main(words.split()) == 0
    assert got == {
        "model": "m", "host": "::1", "port": 1, "keys": ("k",), "key_file": str(file), "access_log": True,
        "settings": {
            "served_model_names": ("a", "b"), "cors_origins": ("*",), "max_body": 2000, "max_prompts": 4, "max_n": 5,
            "max_logprobs": 6, "shutdown_timeout": 7.0,
        },
        "llm_options": {
            "threads": 2, "kv_format": "int8", "kv_memory": 8 << 20, "kv_pages": None, "page_tokens": 32,
            "max_model_len": 9, "max_num_seqs": 10, "max_num_batched_tokens": 11, "enable_prefix_caching": False,
            "quantization": "q8_0", "activations": "int12", "max_waiting": 3,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        },
    }  # fmt: skip


def test_other_commands_do_not_need_the_servers_packages(tmp_path):
    code = (
        "import sys\nfor name in ('starlette', 'uvicorn', 'pydantic', 'prometheus_client'): sys.modules[name] = None\n"
        "import pagedkv, pagedkv.cli\n[getattr(pagedkv, name) for name in pagedkv.__all__]\n"
        "sys.exit(pagedkv.cli.main(['serve', '--help']))"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=command_line.environment(), capture_output=True, text=True
    )
    assert result.returncode == 0 and "--max-queue" in result.stdout, result.stderr
