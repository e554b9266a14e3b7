"""`pagedkv chat`: a conversation in the terminal."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pagedkv.commands.generate import Completion, speed_line

if TYPE_CHECKING:
    from pagedkv import LLM

HELP = """\
/reset        forget the conversation
/stats        tokens, speed and memory so far
/save FILE    write the conversation to FILE as JSON
/exit         leave, as does Ctrl-D
\"\"\"           begin and end a message of several lines
Ctrl-C        stop the answer, or drop the line being typed"""
FENCE = '"""'
MAX_ANSWER = 1024  # tokens, for models that do not find an end
TEMPERATURE, TOP_P = 0.7, 0.95


def run(model: str) -> None:
    """Load the model and talk until the input ends. ValueError for a model without a chat template."""
    from pagedkv.llm import LLM

    with LLM(model, max_num_seqs=1) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ValueError(f"{model}: the model has no chat template; use 'pagedkv generate'")
        Chat(llm).loop()


class Chat:
    """One conversation. `messages` is what the model sees: dicts with role and content."""

    def __init__(self, llm: "LLM"):
        self.llm = llm
        self.messages: list[dict[str, str]] = []
        self.last: Completion | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/reset": self._reset,
            "/stats": self._stats,
            "/save": self._save,
        }

    def loop(self) -> None:
        """Read messages and commands from standard input until it ends or /exit."""
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            print(f"{self.llm.model.name}. /help lists the commands.")
        for text in _messages(interactive):
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

        A message that does not fit the context is refused in one line and not remembered.
        """
        from pagedkv import SamplingParams

        messages = [*self.messages, {"role": "user", "content": text}]
        params = SamplingParams(max_tokens=None, temperature=TEMPERATURE, top_p=TOP_P)
        submitted = time.perf_counter()
        first_token = 0.0
        shown = ""
        with _interrupt_noted() as interrupted:
            try:
                stream = self.llm.stream({"prompt_token_ids": self.llm.tokenizer.encode_chat(messages)}, params)
            except ValueError as error:
                print(f"{error}; /reset starts anew", file=sys.stderr)
                return
            with contextlib.closing(stream):
                for output in stream:
                    first_token = first_token or time.perf_counter()
                    whole = output.outputs[0].text
                    print(whole[len(shown) :], end="", flush=True)
                    shown = whole
                    if interrupted() or len(output.outputs[0].token_ids) >= MAX_ANSWER:
                        break
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
            Path(name).expanduser().write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            print(f"{name}: {error.strerror}", file=sys.stderr)

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


def _messages(interactive: bool) -> Iterator[str]:
    """Messages typed: a line each, or the lines between two lines of three quotes. Blank ones are left out."""
    while True:
        try:
            text = _read_line("> " if interactive else "")
            if text.startswith(FENCE):
                lines = [text[len(FENCE) :]]
                while not lines[-1].endswith(FENCE):
                    lines.append(_read_line("  " if interactive else ""))
                text = "\n".join([*lines[:-1], lines[-1][: -len(FENCE)]])
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        if text.strip():
            yield text.strip()


def _read_line(prompt: str) -> str:
    if prompt:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


@contextlib.contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C only makes the yielded function return True, so that no step is cut in the middle."""
    noted = False

    def note(*_: object) -> None:
        nonlocal noted
        noted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
