"""`pagedkv serve`: one model behind an HTTP server."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEY_VARIABLE = "PAGEDKV_API_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def run(
    model: str,
    *,
    host: str,
    port: int,
    keys: Sequence[str],
    key_file: str | None,
    access_log: bool,
    settings: dict[str, Any],
    llm_options: dict[str, Any],
) -> None:
    """Serve until SIGTERM or Ctrl-C. settings: fields of ServerSettings without api_keys; llm_options: of LLM.

    The first signal ends the taking of requests, gives running ones `shutdown_timeout` seconds, then cancels them; a
    second one stops at once. Raises KeyboardInterrupt after Ctrl-C, OSError when the address cannot be taken,
    ImportError naming the extra that is missing.
    """
    all_keys = api_keys(keys, key_file, os.environ.get(KEY_VARIABLE))
    try:
        from pagedkv.server.app import create_app
        from pagedkv.server.running import serve
        from pagedkv.server.settings import ServerSettings
    except ImportError as error:
        if (error.name or "pagedkv").startswith("pagedkv"):
            raise
        raise ImportError(f"pagedkv serve needs {error.name}: pip install 'pagedkv[server]'") from None
    from pagedkv.llm import LLM

    with _listen(host, port) as listener, LLM(model, **llm_options) as llm:
        names = settings.pop("served_model_names") or (model_name(model),)
        chosen = ServerSettings(served_model_names=tuple(names), api_keys=all_keys, **settings)
        app = create_app(llm, chosen)
        app.state.service.warm_up()
        address = listener.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        lines = [f"pagedkv: serving {names[0]} at http://{shown}:{address[1]} (Ctrl-C stops)"]
        if not all_keys and host not in LOOPBACK:
            lines.append(f"pagedkv: anybody who reaches {host} may use it: no --api-key")

        def announce() -> None:
            print(*lines, sep="\n", file=sys.stderr, flush=True)

        interrupted = serve(app, listener, access_log=access_log, on_ready=announce)
    if interrupted:
        raise KeyboardInterrupt


def model_name(model: str) -> str:
    """What a model is called by default: the catalogue name, or the name of its file or directory."""
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def api_keys(given: Sequence[str], file: str | None, environment: str | None) -> tuple[str, ...]:
    """All keys: options, lines of a file but its comments, words of the environment variable. ValueError for what
    cannot be sent."""
    found = list(given)
    if file is not None:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if not lines:
            raise ValueError(f"--api-key-file: {file} holds no key")
        found += lines
    found += (environment or "").split()
    check_keys(found)
    return tuple(dict.fromkeys(found))


def check_keys(keys: Sequence[str]) -> None:
    """ValueError, which does not show the key, for one that cannot be sent."""
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError("an API key must be printable ASCII without spaces, and is not")


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket: the address is taken, or refused, before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"--host {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port}: {error.strerror or error}") from None
    return listener
