"""Text of a growing sequence of tokens, without ever showing half a character."""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedkv.models.tokenizer import Tokenizer


class StreamDecoder:
    """Turns token ids, one at a time, into pieces of text. The pieces joined equal `Tokenizer.decode` of all ids.

    strip_first_space: as decode() does, take off the space that some tokenizers begin a text with.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool = True, strip_first_space: bool = True):
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip_special_tokens
        self._strip = self._strips = strip_first_space and tokenizer.strips_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now; bytes of an unfinished character are held back."""
        raw = self._token_bytes(token_id, self._skip)
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """What was held back, as U+FFFD. The decoder starts afresh afterwards."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._strip = self._strips
        return rest
