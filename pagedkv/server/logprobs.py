"""Log-probabilities in the shapes of the OpenAI API."""

from typing import Any

from ..engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from ..models.streaming import StreamDecoder

LOWEST = -9999.0  # JSON has no infinity


def value_of(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(float(logprob), LOWEST)


def best(entries: TokenLogprobs, n: int) -> list[tuple[int, Any]]:
    """The n best tokens, best first. The chosen token is among them only if it is that good."""
    return sorted(((i, entry) for i, entry in entries.items() if entry.rank <= n), key=lambda item: item[1].rank)


def token_label(tokenizer: Any, token: int) -> str:
    """A token's text, or `bytes:\\x..` where its bytes alone are no text, so that different tokens stay different."""
    raw = tokenizer.token_bytes(token, False)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Any, output: CompletionOutput, start: int, n_top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice for its tokens from `start` on."""
    content = []
    for token, entries in zip(output.token_ids[start:], (output.logprobs or [])[start:], strict=True):
        content.append(
            {
                **_chat_entry(tokenizer, token, entries[token]),
                "top_logprobs": [_chat_entry(tokenizer, other, entry) for other, entry in best(entries, n_top)],
            }
        )
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token, False)
    return {"token": raw.decode("utf-8", "replace"), "logprob": value_of(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """`logprobs` of one completion choice, piece by piece; offsets count characters of the whole text."""

    def __init__(self, tokenizer: Any, n_top: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._n_top = n_top
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens)
        self._offset = 0

    def of_prompt(self, output: RequestOutput, text: str) -> dict[str, Any]:
        """Of an echoed prompt; offsets go on behind its text."""
        decoder = StreamDecoder(self._tokenizer, False)
        pieces = self._empty()
        offset = 0
        found = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        for token, entries in zip(output.prompt_token_ids, found, strict=True):
            self._add(pieces, token, entries, min(offset, len(text)))
            offset += len(decoder.push(token))
        self._offset = len(text)
        return pieces

    def of_output(self, output: CompletionOutput, start: int) -> dict[str, Any]:
        """Of the output's tokens from `start` on. Call with rising `start`, each token once."""
        pieces = self._empty()
        for token, entries in zip(output.token_ids[start:], (output.logprobs or [])[start:], strict=True):
            self._add(pieces, token, entries, self._offset)
            self._offset += len(self._decoder.push(token))
        return pieces

    def _empty(self) -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add(self, pieces: dict[str, Any], token: int, entries: TokenLogprobs | None, offset: int) -> None:
        label = token_label(self._tokenizer, token)
        pieces["tokens"].append(label)
        pieces["text_offset"].append(offset)
        pieces["token_logprobs"].append(None if entries is None else value_of(entries[token]))
        top: dict[str, float] | None = None
        if entries is not None:
            top = {}
            for other, entry in best(entries, self._n_top):
                top.setdefault(token_label(self._tokenizer, other), value_of(entry))
        pieces["top_logprobs"].append(top)


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's field of this name."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if entries is None else {
            str(token): {"logprob": value_of(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in entries.items()
        }
        for entries in output.prompt_logprobs
    ]  # fmt: skip
