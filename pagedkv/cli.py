"""The `pagedkv` command: options, exit statuses and error lines. What each command does is in pagedkv/commands.

Exit status 0: done. 1: a failure, one line on standard error. 2: wrong usage, one line on standard error. 130: Ctrl-C.
141: the reader of standard output went away. `--debug` shows the traceback of a failure. Heavy imports wait until a
command needs them.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from pagedkv.process import flush_or_discard, interrupted, on_terminal, open_standard_streams

DEFAULT_MODEL = "smollm2-135m-instruct"
KV_FORMATS = ["f32", "f16", "int8"]
MAX_THREADS = 1024


class _Options(dict):
    """State shared by the commands of one call: whether a failure shows its traceback."""


def _set_debug(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and isinstance(context.obj, _Options):
        context.obj["debug"] = True


def _show_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        from pagedkv.version import version

        click.echo(f"pagedkv {version()}")
        context.exit()


def _batch_sizes(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    sizes = [int(part) if part.strip().isdigit() else 0 for part in value.split(",")]
    if not all(1 <= size <= 4096 for size in sizes):
        raise click.BadParameter(f"{value!r} is not a list of integers in [1, 4096], such as 1,8,32")
    return sizes


_debug = click.option(
    "--debug", is_flag=True, is_eager=True, expose_value=False, callback=_set_debug, help="Show tracebacks of failures."
)
_model = click.option(
    "--model", default=DEFAULT_MODEL, show_default=True, metavar="M", help="Catalogue name, path or hf:owner/repo."
)
_threads = click.option(
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    metavar="N",
    help="Threads of the computation.  [default: PAGEDKV_THREADS, or what affinity and CPU quota grant]",
)


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    from pagedkv.engine.checks import parse_bytes

    if value is None:
        return None
    try:
        return parse_bytes(parameter.opts[0], int(value) if value.isdigit() else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_kv_format = click.option(
    "--kv-format", type=click.Choice(KV_FORMATS), default="f16", show_default=True, help="Format of K and V."
)
_kv_memory = click.option(
    "--kv-memory",
    callback=_bytes,
    metavar="B",
    help="Size of the KV pool, such as 2GiB.  [default: a quarter of the available memory]",
)
_activations = click.option(
    "--activations",
    type=click.Choice(["int8", "int12"]),
    default="int8",
    show_default=True,
    help="int12 is more exact and slower.",
)


def _speculation(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
    import json

    from pagedkv.engine.speculation import SpeculativeConfig

    if value is None:
        return None
    try:
        config = json.loads(value)
        SpeculativeConfig.parse(config)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(str(error)) from None
    return config


_speculative_config = click.option(
    "--speculative-config",
    callback=_speculation,
    metavar="JSON",
    help='Guess tokens from earlier ones, such as \'{"method": "ngram", "num_speculative_tokens": 8}\'.',
)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@_debug
@click.pass_context
def cli(context: click.Context) -> None:
    """Run language models on the CPU from a paged KV cache."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


def _command(function: Callable[..., Any]) -> click.Command:
    return cli.command()(_debug(function))


@_command
@_model
@click.option("--prompt", "prompts", multiple=True, metavar="P", help="A prompt; may be given several times.")
@click.option("--max-tokens", type=int, default=128, show_default=True, metavar="N", help="New tokens at most.")
@click.option("--temperature", type=float, default=0.8, show_default=True, metavar="T", help="0 is greedy.")
@click.option("--top-k", type=int, default=0, metavar="K", help="Sample from the K best tokens.  [default: all]")
@click.option("--top-p", type=float, default=1.0, show_default=True, metavar="P", help="Sample from this share.")
@click.option("--seed", type=int, metavar="S", help="Same seed, same text.  [default: a fresh one each time]")
@_threads
@_kv_format
@_kv_memory
@_activations
@_speculative_config
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each prompt.")
def generate(
    model: str,
    prompts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    as_json: bool,
    **llm_options: Any,
) -> None:
    """Continue prompts: from --prompt, or from standard input, one a line. Streams the text of a single one."""
    from pagedkv.commands import generate
    from pagedkv.engine.params import SamplingParams

    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        generate.check_prompts(prompts)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not prompts and sys.stdin.isatty():
        raise click.UsageError("no prompt: give --prompt, or prompts on standard input, one a line")
    generate.run(model, list(prompts), params, as_json=as_json, llm_options=llm_options)


@_command
@_model
@_kv_memory
@_activations
@_speculative_config
@click.pass_context
def chat(context: click.Context, model: str, **llm_options: Any) -> None:
    """Talk with a model. /help lists what can be typed; Ctrl-C stops an answer, Ctrl-D leaves."""
    from pagedkv.commands import chat

    if not chat.run(model, llm_options):
        context.exit(1)


_COUNT = click.IntRange(1, 1 << 20)
_WIDTH = click.IntRange(1, 1024)
_FILE = click.Path(exists=True, dir_okay=False)


@_command
@_model
@click.option("--host", default="127.0.0.1", show_default=True, metavar="H", help="Address to listen at; 0.0.0.0: all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, metavar="P", help="0: any.")
@click.option("--api-key", "keys", multiple=True, metavar="K", help="Key clients must send; PAGEDKV_API_KEY adds more.")
@click.option("--api-key-file", "key_file", type=_FILE, metavar="F", help="Keys, one a line; # begins a comment.")
@click.option("--served-model-name", "names", multiple=True, metavar="N", help="What clients call the model.")
@click.option("--max-body", default="8MiB", show_default=True, callback=_bytes, metavar="B", help="Size of a request.")
@click.option("--max-queue", type=_COUNT, default=1024, show_default=True, metavar="N", help="Requests that may wait.")
@click.option("--max-prompts", type=_COUNT, default=256, show_default=True, metavar="N", help="Prompts of a request.")
@click.option("--max-n", type=_WIDTH, default=128, show_default=True, metavar="N", help="Outputs per prompt.")
@click.option("--max-logprobs", type=_WIDTH, default=20, show_default=True, metavar="N", help="Alternatives a token.")
@click.option("--cors-origin", "origins", multiple=True, metavar="O", help="Origin whose pages may ask; * for all.")
@click.option("--shutdown-timeout", type=click.FloatRange(0, 1e6), default=30.0, show_default=True, metavar="S",
              help="Seconds for running requests to finish.")  # fmt: skip
@click.option("--access-log", is_flag=True, help="A line for each request.")
@_threads
@_kv_format
@_kv_memory
@click.option("--kv-pages", type=click.IntRange(1), metavar="N", help="The same in pages.")
@click.option("--page-tokens", type=click.Choice(["16", "32", "64", "128", "256"]), default="16", show_default=True)
@click.option("--max-model-len", type=click.IntRange(1), metavar="N", help="Tokens of prompt and output together.")
@click.option("--max-num-seqs", type=click.IntRange(1, 65536), default=64, show_default=True, metavar="N",
              help="Outputs computed at a time.")  # fmt: skip
@click.option("--max-num-batched-tokens", type=_COUNT, default=512, show_default=True, metavar="N")
@click.option("--no-prefix-caching", is_flag=True, help="Compute equal beginnings each time.")
@click.option("--quantization", type=click.Choice(["q8_0"]), help="Convert float weights to this type.")
@_activations
@_speculative_config
def serve(
    model: str,
    host: str,
    port: int,
    keys: tuple[str, ...],
    key_file: str | None,
    names: tuple[str, ...],
    max_body: int,
    max_queue: int,
    max_prompts: int,
    max_n: int,
    max_logprobs: int,
    origins: tuple[str, ...],
    shutdown_timeout: float,
    access_log: bool,
    no_prefix_caching: bool,
    page_tokens: str,
    **llm_options: Any,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does. Ctrl-C lets running requests finish, a second one does not."""
    from pagedkv.commands import serve

    try:
        serve.check_keys(keys)
    except ValueError as error:
        raise click.UsageError(f"--api-key: {error}") from None
    if llm_options["kv_memory"] is not None and llm_options["kv_pages"] is not None:
        raise click.UsageError("--kv-memory and --kv-pages both bound the pool: give one of them")
    serve.run(
        model,
        host=host,
        port=port,
        keys=keys,
        key_file=key_file,
        access_log=access_log,
        settings={
            "served_model_names": names,
            "cors_origins": origins,
            "max_body": max_body,
            "max_prompts": max_prompts,
            "max_n": max_n,
            "max_logprobs": max_logprobs,
            "shutdown_timeout": shutdown_timeout,
        },
        llm_options={
            **llm_options,
            "max_waiting": max_queue,
            "page_tokens": int(page_tokens),
            "enable_prefix_caching": not no_prefix_caching,
        },
    )


@_command
@_model
@_threads
@click.option("--prompt-tokens", type=click.IntRange(1, 1 << 20), default=128, show_default=True, metavar="N")
@click.option("--gen-tokens", type=click.IntRange(1, 1 << 20), default=64, show_default=True, metavar="N")
@click.option("--batch", default="1,8,32", show_default=True, callback=_batch_sizes, metavar="B,...", help="Sizes.")
@_activations
@click.option("--profile", is_flag=True, help="Show how the time divides among the operations of a step.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each batch size, all samples kept.")
def bench(
    model: str,
    threads: int | None,
    prompt_tokens: int,
    gen_tokens: int,
    batch: list[int],
    activations: str,
    profile: bool,
    as_json: bool,
) -> None:
    """Measure prefill and decode speed at several batch sizes."""
    from pagedkv.commands import bench

    bench.run(
        model,
        threads=threads,
        prompt_tokens=prompt_tokens,
        gen_tokens=gen_tokens,
        batches=batch,
        activations=activations,
        with_profile=profile,
        as_json=as_json,
    )


@_command
@click.argument("name")
def pull(name: str) -> None:
    """Bring NAME, of the catalogue or hf:owner/repo[/file], into the cache directory and print its path. What is
    there already is checked by size and hash and, if damaged, downloaded again."""
    from pagedkv.models.catalogue import pull

    click.echo(pull(name, progress=on_terminal(), verify=True))


@_command
@click.argument("model")
def info(model: str) -> None:
    """Describe MODEL: a catalogue name, a GGUF file, a directory or hf:owner/repo."""
    from pagedkv.commands import info

    info.run(model)


@_command
def doctor() -> None:
    """Tell what this machine offers, what will be used, and what to change."""
    from pagedkv.commands import doctor

    doctor.run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: sys.argv) and return the exit status. Never raises for bad input."""
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character gets a substitute
            stream.reconfigure(errors="replace")
    status = _status_of(list(sys.argv[1:] if arguments is None else arguments))
    flush_or_discard()
    return status


def _status_of(words: list[str]) -> int:
    """Exit status of a command line; an error has been printed."""
    options = _Options(debug=False)
    try:
        with cli.make_context("pagedkv", words, obj=options) as context:
            cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        return 141
    except Exception as error:
        if interrupted(error):
            return 130
        with contextlib.suppress(OSError):  # where even the message cannot be written, the status says it
            if options["debug"] and not isinstance(error, click.ClickException):
                import traceback

                traceback.print_exc()
            else:
                print(error_line(error), file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, click.ClickException) else 1
    return 0


def error_line(error: Exception) -> str:
    """The one line that tells a person what went wrong."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "pagedkv"
        return f"{path}: {_flat(error.format_message())} ('{path} --help' lists the options)"
    if isinstance(error, click.ClickException):
        return f"pagedkv: {_flat(error.format_message())}"
    if isinstance(error, OSError) and error.strerror:
        return f"pagedkv: {f'{error.filename}: ' if error.filename else ''}{error.strerror}"
    ours = type(error).__module__.startswith("pagedkv.")
    if ours or isinstance(error, (ValueError, ImportError, MemoryError, OSError)):
        return f"pagedkv: {_flat(str(error)) or type(error).__name__}"
    return f"pagedkv: internal error, {type(error).__name__}: {_flat(str(error))} (--debug shows where)"


def _flat(text: str) -> str:
    return " ".join(text.split())
