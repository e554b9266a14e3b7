"""`pagedkv generate`: continue prompts, streaming one or batching many."""

import io
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedkv.commands.terminal import shown_safely
from pagedkv.process import on_terminal

if TYPE_CHECKING:
    from pagedkv import LLM, RequestOutput, SamplingParams

NOT_TEXT = re.compile("[\udc80-\udcff]")  # a byte that is no character, as Python escapes it in arguments and input


class OutputFailed(Exception):
    """Outputs that ended with finish_reason "error": which, and why. What there is of them has been printed."""


@dataclass
class Completion:
    """A finished prompt. prefill_s: from its submission to its first token; decode_s: from there to its last."""

    output: "RequestOutput"
    prefill_s: float
    decode_s: float

    def row(self) -> dict[str, Any]:
        """What --json prints of it."""
        completion = self.output.outputs[0]
        return {
            "prompt": self.output.prompt,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(self.output.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
            "prefill_s": round(self.prefill_s, 6),
            "decode_s": round(self.decode_s, 6),
        }


def run(
    model: str, prompts: list[str], params: "SamplingParams", *, as_json: bool, llm_options: dict[str, Any]
) -> None:
    """Print what the model writes. No prompts: the lines of standard input are. llm_options: of LLM.

    ValueError, before the model is loaded, for a line that is empty or no text; it is not skipped, so that line n of
    the output belongs to line n of the input. OutputFailed, once all others are printed, for what could not be
    computed.
    """
    if not prompts:
        prompts = read_prompts()
        check_prompts(prompts, "line {i} of standard input")

    from pagedkv.llm import LLM

    with LLM(model, **llm_options) as llm:
        if len(prompts) == 1 and not as_json:
            _stream(llm, prompts[0], params)
            return
        failed = []
        for i, completion in enumerate(complete(llm, prompts, params), 1):
            if reason := failure(completion.output):
                failed.append(f"prompt {i} of {len(prompts)}: {reason}" if len(prompts) > 1 else reason)
            if as_json:
                print(json.dumps(completion.row()), flush=True)
            else:
                print(shown_safely(f"{completion.output.prompt}{completion.output.outputs[0].text}\n"), flush=True)
        if failed:
            raise OutputFailed(failed[0] + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""))


def check_prompts(prompts: Sequence[str], named: str = "prompt {i} of {n}") -> None:
    """ValueError for a prompt that is empty or no text. named: what its number i of n is called."""
    for i, prompt in enumerate(prompts, 1):
        name = named.format(i=i, n=len(prompts))
        if not prompt:
            raise ValueError(f"{name} is empty")
        if escaped := NOT_TEXT.search(prompt):
            byte = ord(escaped[0]) - 0xDC00
            raise ValueError(f"{name} is not text: byte {byte:#04x} at index {escaped.start()}")


def failure(output: "RequestOutput | None") -> str:
    """Why an output could not be computed, as when weights are damaged and logits are NaN; empty when it could."""
    completion = output.outputs[0] if output else None
    return str(completion.stop_reason) if completion and completion.finish_reason == "error" else ""


def read_prompts() -> list[str]:
    """The lines of standard input without their ends. ValueError when there are none."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as in arguments, whatever the locale
    prompts = [line.rstrip("\r\n") for line in sys.stdin]
    if not prompts:
        raise ValueError("no prompt: standard input is empty and --prompt was not given")
    return prompts


def complete(llm: "LLM", prompts: list[str], params: "SamplingParams") -> Iterator[Completion]:
    """Run all prompts in one batch and yield them in order, each as soon as it and all before it are finished.

    ValueError, before anything is computed, names the prompt that was refused.
    """
    submitted: dict[str, float] = {}
    first_token: dict[str, float] = {}
    finished: dict[str, Completion] = {}
    order: list[str] = []
    for i, prompt in enumerate(prompts, 1):
        try:
            order.append(llm.engine.add_request(prompt, params))
        except ValueError as error:
            raise ValueError(f"prompt {i} of {len(prompts)}: {error}" if len(prompts) > 1 else str(error)) from None
        submitted[order[-1]] = time.perf_counter()
    waiting = iter(order)
    current = next(waiting, None)
    while current is not None:
        outputs = llm.engine.step()
        now = time.perf_counter()
        for output in outputs:
            started = first_token.setdefault(output.request_id, now)
            if output.finished:
                finished[output.request_id] = Completion(output, started - submitted[output.request_id], now - started)
        while current in finished:
            yield finished.pop(current)
            current = next(waiting, None)


def _stream(llm: "LLM", prompt: str, params: "SamplingParams") -> None:
    submitted = time.perf_counter()
    first_token = None
    shown = 0
    for output in llm.stream(prompt, params):
        first_token = first_token or time.perf_counter()
        text = output.outputs[0].text
        sys.stdout.write(shown_safely(text[shown:]))
        sys.stdout.flush()
        shown = len(text)
    if reason := failure(output):
        print(end="\n" if shown else "", flush=True)
        raise OutputFailed(reason)
    print()
    if on_terminal() and first_token:
        done = Completion(output, first_token - submitted, time.perf_counter() - first_token)
        print(speed_line(done), file=sys.stderr)


def speed_line(completion: Completion) -> str:
    """Counts and speeds of a finished prompt in words."""
    row = completion.row()
    rate = (row["completion_tokens"] - 1) / completion.decode_s if completion.decode_s > 0 else 0.0
    speed = f", {rate:.0f} tokens/s" if rate else ""
    return (
        f"[{row['prompt_tokens']} prompt tokens, first token after {completion.prefill_s:.2f} s, "
        f"{row['completion_tokens']} new tokens{speed}, {row['finish_reason'] or 'stopped'}]"
    )
