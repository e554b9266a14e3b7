"""From rows of logits to tokens of branches, and to their log-probabilities."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.sampler import Sampler
from .masks import wait_for_any
from .outputs import Logprob, TokenLogprobs
from .request import Branch, Request

GRACE = 0.002  # seconds that a step waits for masks
PATIENCE = 0.05  # seconds that an engine with nothing else to do waits for one


class Drawing:
    """Draws for one engine, one call at a time: it owns the sampler's work space.

    Logits are float32 [rows, vocab_padded], as the forward leaves them; nothing here changes them. A branch whose mask
    is not ready when its turn comes is late: its row is kept, nobody waits for it, and it is drawn from later.
    """

    def __init__(self, model: Any) -> None:
        self._sampler = Sampler(model.forward.vocab_size, getattr(model.forward, "pool", None))
        self._tokenizer = model.tokenizer
        self._text = functools.lru_cache(4096)(self._decode)
        self._late: dict[Branch, np.ndarray] = {}
        self._latest = 0.0  # until when this step waits for masks

    def draw(self, branches: list[Branch], logits: np.ndarray, rows: list[int]) -> None:
        """Draw the next token of each branch from its row and leave it in the branch's state, or let it be late. Once
        in a step. Releases the GIL."""
        self._latest = time.monotonic() + GRACE
        self._draw(branches, logits, rows)

    def _draw(self, branches: list[Branch], logits: np.ndarray, rows: list[int]) -> None:
        states, ready = [], []
        for branch, row in zip(branches, rows, strict=True):
            self._late.pop(branch, None)
            if branch.mask is not None:
                if not branch.mask.ready(self._latest - time.monotonic()):
                    self._late[branch] = logits[row].copy()
                    continue
                branch.state.set_mask(branch.mask.result())
            states.append(branch.state)
            ready.append(row)
        self._sampler.sample(logits, states, ready)

    def draw_late(self) -> list[Branch]:
        """The late branches whose masks have come, each with its next token drawn."""
        found = []
        for branch, row in list(self._late.items()):
            if branch.finish_reason is not None:
                del self._late[branch]
            elif branch.mask is not None and branch.mask.ready():
                self._draw([branch], row[np.newaxis], [0])
                found.append(branch)
        return found

    def wait_late(self) -> bool:
        """Wait a moment for the mask of any late branch; False if none is late."""
        masks = [branch.mask for branch in self._late if branch.mask is not None]
        wait_for_any(masks, PATIENCE)
        return bool(masks)

    def forget(self, branch: Branch) -> None:
        """The branch's row will be computed again."""
        self._late.pop(branch, None)

    def accept(self, branch: Branch) -> None:
        """Take the drawn token into the branch and see whether it ends. Nothing if it is late."""
        if branch in self._late:
            return
        state, request = branch.state, branch.request
        if not state.ok:
            branch.finish("error", state.error if branch.mask is None else branch.mask.explained(state.error))
            return
        token = state.token
        branch.tokens.append(token)
        n_outputs = branch.n_outputs
        state.accept(token)
        branch.cumulative_logprob += state.logprob
        if branch.logprobs is not None:
            branch.logprobs.append(self._logprobs(token, state.logprob, state.rank, state.top))
        if token in request.stop_ids:
            branch.finish("stop", token)
        elif branch.text.push(token, n_outputs >= request.params.min_tokens):
            branch.finish("stop", branch.text.matched)
        elif branch.mask is not None and (end := branch.mask.end(branch.output_token_ids)) is not None:
            branch.finish(*end)
        elif n_outputs >= request.max_new_tokens:
            branch.finish("length")
        elif branch.mask is not None:
            branch.mask.prepare(branch.output_token_ids)

    def accept_drafts(self, branch: Branch, drafts: Sequence[int], logits: np.ndarray, row: int) -> int:
        """Draw on behind the branch's last token, which came from `row`, as long as the drafts guessed what was drawn;
        returns how many did. The next row holds the logits that plain decoding would see, so it is drawn from as
        usual, and nothing is known of later rows before it is."""
        n_right = 0
        while n_right < len(drafts) and branch.tokens[-1] == drafts[n_right]:
            if branch.finish_reason is not None or branch in self._late:
                break
            n_right += 1
            self._draw([branch], logits, [row + n_right])
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
