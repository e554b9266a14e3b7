"""From rows of logits to tokens of branches, and to their log-probabilities."""

import functools
from array import array
from typing import Any

import numpy as np

from ..core.sampler import Sampler
from .outputs import Logprob, TokenLogprobs
from .request import Branch, Request


class Drawing:
    """Draws for one engine, one call at a time: it owns the sampler's work space.

    Logits are float32 [rows, vocab_padded], as the forward leaves them; nothing here changes them.
    """

    def __init__(self, model: Any) -> None:
        self._sampler = Sampler(model.forward.vocab_size, getattr(model.forward, "pool", None))
        self._tokenizer = model.tokenizer
        self._text = functools.lru_cache(4096)(self._decode)

    def draw(self, branches: list[Branch], logits: np.ndarray, rows: list[int]) -> None:
        """Draw the next token of each branch from its row and leave it in the branch's state, once its mask is there.
        Releases the GIL."""
        for branch in branches:
            if branch.mask is not None:
                branch.state.set_mask(branch.mask.wait())
        self._sampler.sample(logits, [branch.state for branch in branches], rows)

    def accept(self, branch: Branch) -> None:
        """Take the drawn token into the branch and see whether it ends."""
        state, request = branch.state, branch.request
        if not state.ok:
            branch.finish("error", state.error if branch.mask is None else branch.mask.error or state.error)
            return
        token = state.token
        branch.tokens.append(token)
        state.accept(token)
        branch.cumulative_logprob += state.logprob
        if branch.logprobs is not None:
            branch.logprobs.append(self._logprobs(token, state.logprob, state.rank, state.top))
        if token in request.stop_ids:
            branch.finish("stop", token)
        elif branch.text.push(token, branch.n_outputs >= request.params.min_tokens):
            branch.finish("stop", branch.text.matched)
        elif branch.n_outputs >= request.max_new_tokens:
            branch.finish("length")
        elif branch.mask is not None:
            branch.mask.prepare(branch.output_token_ids)

    def accept_drafts(self, branch: Branch, drafts: array, logits: np.ndarray, row: int) -> int:
        """Draw on behind the branch's last token, which came from `row`, as long as the drafts guessed what was drawn;
        returns how many did. The next row holds the logits that plain decoding would see, so it is drawn from as
        usual, and nothing is known of later rows before it is."""
        n_right = 0
        while branch.finish_reason is None and n_right < len(drafts) and branch.tokens[-1] == drafts[n_right]:
            n_right += 1
            self.draw([branch], logits, [row + n_right])
            self.accept(branch)
        return n_right

    def score(self, request: Request, position: int, logits: np.ndarray, row: int) -> None:
        """Append the prompt logprobs of the token behind `position`."""
        target = request.prompt_token_ids[position + 1]
        found = self._sampler.score(logits, [row], [target], request.params.prompt_logprobs or 0)[0]
        assert request.prompt_logprobs is not None
        request.prompt_logprobs.append(None if found is None else self._logprobs(target, *found))

    def _logprobs(self, token: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprobs:
        entries = {token: Logprob(logprob, rank, self._text(token))}
        for place, (other, value) in enumerate(top, 1):
            entries.setdefault(other, Logprob(value, place, self._text(other)))
        return entries

    def _decode(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)
