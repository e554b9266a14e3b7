"""From token ids to the text a caller sees."""

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """What OutputText needs of a stream decoder."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class OutputText:
    """The text of one output: decoded as tokens arrive, cut at the leftmost stop string, held back where it may change.

    `text` is all that is certain to be output; it only ever grows at its end. `matched` is the stop string found.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._decoded = ""
        self._done = False
        self.text = ""
        self.matched: str | None = None

    def push(self, token_id: int, may_stop: bool) -> bool:
        """Add a token; True when a stop string ends within the text it added (and may_stop)."""
        self._append(self._decoder.push(token_id), may_stop)
        return self.matched is not None

    def finish(self) -> None:
        """No more tokens: decode what the decoder still holds and give out what was held back. Idempotent."""
        if not self._done:
            self._append(self._decoder.flush(), False)
            self._done = True
            self.text = self._decoded

    def _append(self, more: str, may_stop: bool) -> None:
        if self.matched is not None or not more:
            return
        known = len(self._decoded)
        self._decoded += more
        if may_stop:
            starts = [(self._decoded.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stops]
            found = [match for match in starts if match[0] >= 0]
            if found:
                at, self.matched = min(found, key=lambda match: match[0])
                self._decoded = self.text = self._decoded[:at]
                return
        held = self._held() if self._stops else 0
        self.text = self._decoded[:-held] if held else self._decoded

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        tail = self._decoded
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(tail)), longest, -1):
                if tail.endswith(stop[:length]):
                    longest = length
                    break
        return longest
