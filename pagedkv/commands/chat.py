"""`pagedkv chat`: a conversation in the terminal."""

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.commands.generate import NOT_TEXT, Completion, failure, speed_line
from pagedkv.commands.terminal import shown_safely
from pagedkv.process import interrupted

if TYPE_CHECKING:
    from pagedkv import LLM

HELP = """\
/reset        forget the conversation
/stats        tokens, speed and memory so far
/save FILE    write the conversation to FILE as JSON
/exit         leave, as does Ctrl-D
\"\"\"           begin and end a message of several lines
/help         this list
Ctrl-C        stop the answer, or drop the line being typed"""
FENCE = '"""'
MAX_ANSWER = 1024  # tokens, for models that do not find an end
TEMPERATURE, TOP_P = 0.7, 0.95


def run(model: str, llm_options: dict[str, Any]) -> bool:
    """Load the model and talk until the input ends; whether every answer could be computed. llm_options: of LLM.
    ValueError for a model without a chat template."""
    from pagedkv.llm import LLM

    with LLM(model, max_num_seqs=1, **llm_options) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ValueError(f"{model}: the model has no chat template; use 'pagedkv generate'")
        chat = Chat(llm)
        chat.loop()
    return not chat.n_failed


class Chat:
    """One conversation. `messages` is what the model sees: dicts with role and content; `n_failed` counts answers that
    could not be computed."""

    def __init__(self, llm: "LLM"):
        self.llm = llm
        self.messages: list[dict[str, str]] = []
        self.last: Completion | None = None
        self.n_failed = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/reset": self._reset,
            "/stats": self._stats,
            "/save": self._save,
        }

    def loop(self) -> None:
        """Read messages and commands from standard input until it ends or /exit."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # not to fail amid a conversation
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            print(f"{self.llm.model.name}. /help lists the commands.")
        # At a terminal Ctrl-C never ends the program: outside the prompt it is noted, and only an answer listens.
        with _interrupts() if interactive else contextlib.nullcontext() as interrupts:
            for text in _messages(interrupts):
                command, _, rest = text.partition(" ")
                if command == "/exit":
                    return
                if command in self._commands:
                    self._commands[command](rest.strip())
                elif text.startswith("/") and "\n" not in text and " " not in text:
                    print(f"no command {text}; /help lists them", file=sys.stderr)
                else:
                    self.answer(text)

    def answer(self, text: str) -> None:
        """Send `text`, print the answer as it comes and remember both. Ctrl-C ends the answer; what came of it stays.

        A message that does not fit the context or is not text is refused in one line and not remembered. Neither is one
        whose answer was stopped before its first token, or failed.
        """
        if escaped := NOT_TEXT.search(text):
            byte = ord(escaped[0]) - 0xDC00
            print(f"the message is not text: byte {byte:#04x} at index {escaped.start()}", file=sys.stderr)
            return
        from pagedkv import SamplingParams

        messages = [*self.messages, {"role": "user", "content": text}]
        params = SamplingParams(max_tokens=None, temperature=TEMPERATURE, top_p=TOP_P)
        submitted = time.perf_counter()
        first_token = 0.0
        shown = ""
        output = None
        engine = self.llm.engine
        with _interrupts() as interrupts:
            try:
                request_id, box = engine.subscribe(
                    {"prompt_token_ids": self.llm.tokenizer.encode_chat(messages)}, params
                )
            except ValueError as error:
                print(f"{error}; /reset starts anew", file=sys.stderr)
                return
            try:
                # Step by step, so that Ctrl-C is heard while a long prompt is computed
                while not interrupts.noted and not (output and output.finished):
                    engine.pump()
                    while box:
                        output = box.popleft()
                        first_token = first_token or time.perf_counter()
                        whole = output.outputs[0].text
                        print(shown_safely(whole[len(shown) :]), end="", flush=True)
                        shown = whole
                    if output and len(output.outputs[0].token_ids) >= MAX_ANSWER:
                        break
            finally:
                engine.unsubscribe(request_id)
        if output is None:
            print("stopped before the first token; the message is forgotten", file=sys.stderr)
            return
        if reason := failure(output):
            self.n_failed += 1
            print(end="\n" if shown else "", flush=True)
            print(f"{reason}; the message is forgotten", file=sys.stderr)
            return
        print("" if output.finished else " ...")
        self.messages = [*messages, {"role": "assistant", "content": shown}]
        self.last = Completion(output, first_token - submitted, time.perf_counter() - first_token)

    def _reset(self, _: str) -> None:
        self.messages, self.last = [], None

    def _save(self, name: str) -> None:
        if not name:
            print("/save FILE: the file name is missing", file=sys.stderr)
            return
        try:
            _replace(Path(name).expanduser(), json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            print(f"{name}: {error.strerror}", file=sys.stderr)
        except (RuntimeError, ValueError) as error:  # no such home directory; a NUL in the name
            print(f"{name}: {error}", file=sys.stderr)
        else:
            print(f"saved {len(self.messages)} message{'s' * (len(self.messages) != 1)} to {name}")

    def _stats(self, _: str) -> None:
        stats = self.llm.engine.stats()
        used = len(self.llm.tokenizer.encode_chat(self.messages, add_generation_prompt=False)) if self.messages else 0
        print(f"{len(self.messages)} messages, {used} of {self.llm.engine.max_model_len} tokens of context")
        if self.last is not None:
            print(f"last answer {speed_line(self.last)}, {self.last.output.num_cached_tokens} prompt tokens reused")
        print(
            f"{stats['pages_in_use'] + stats['pages_cached']} of {stats['pages_total']} KV pages hold tokens, "
            f"{stats['threads']} threads, {stats['isa']}"
        )


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: an old one stays until the new one is complete. OSError."""
    if path.exists() and not path.is_file():  # a device, a pipe; a directory fails
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    new = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(new, "x", encoding="utf-8") as file:
            file.write(text)
        if target.exists():
            new.chmod(target.stat().st_mode & 0o7777)
        new.replace(target)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


class _Interrupts:
    """What Ctrl-C does: it is noted, or, once where `raising` is set, a KeyboardInterrupt that ends the typing."""

    noted = False
    raising = False

    def __call__(self, *_: object) -> None:
        if self.raising:
            self.raising = False
            raise KeyboardInterrupt
        self.noted = True


@contextlib.contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    """While inside, the yielded object decides about Ctrl-C, so that no step is cut in the middle."""
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _messages(interrupts: _Interrupts | None) -> Iterator[str]:
    """Messages typed: a line each, or the lines between two lines of three quotes. Blank ones are left out.

    interrupts: of a terminal, where prompts are shown and Ctrl-C drops what was typed; None for a pipe. The end of the
    input also ends a message of several lines.
    """
    ended = False
    while not ended:
        lines: list[str] = []
        try:
            if interrupts:
                interrupts.raising = True
            lines.append(_read_line("> " if interrupts else ""))
            if lines[0].startswith(FENCE):
                lines[0] = lines[0][len(FENCE) :]
                while not lines[-1].endswith(FENCE):
                    lines.append(_read_line("  " if interrupts else ""))
                lines[-1] = lines[-1][: -len(FENCE)]
            if interrupts:
                interrupts.raising = False
        except EOFError:
            ended = True
            if interrupts:
                interrupts.raising = False
                print()
        except (KeyboardInterrupt, SystemError) as error:
            # input() may run the handler once more while the first KeyboardInterrupt is on its way out. The interpreter
            # then finds fault with a handler that returns amid an error, and makes a SystemError of both.
            if not interrupts or not interrupted(error):
                raise
            print()
            continue
        text = "\n".join(lines).strip()
        if text:
            yield text


def _read_line(prompt: str) -> str:
    if prompt:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")
