"""Speculative decoding without a draft model: guess a branch's next tokens from what it has read and written before.

A guess is what followed the last occurrence of the branch's latest tokens. Guessed tokens ride along in the step's
forward as rows of their own; the engine draws them one by one and stops at the first that was guessed wrong, so a
guess can only change how many tokens a step gives. Whether it pays is decided from how guesses fared: every guess is
compared with what came, computed or not, so a branch that does not repeat itself costs a lookup a step.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .checks import check_int, refuse
from .pacing import Pacing

if TYPE_CHECKING:
    from .scheduler import Chunk

MAX_DRAFTS = 64  # tokens of one guess
MAX_MATCH = 64  # tokens that are compared
CANDIDATES = 16  # earlier occurrences a lookup looks at
PRIOR = 0.4  # chance that a guess is right, before there is experience
LEARNING = 0.2  # weight of the newest experience
MARGIN = 1.2  # how much better than plain decoding a guessed row must promise to be


@dataclass(frozen=True)
class SpeculativeConfig:
    """num_speculative_tokens: most tokens of a guess. Its occurrence must agree with the last prompt_lookup_min tokens
    and is chosen by how many more agree, up to prompt_lookup_max."""

    num_speculative_tokens: int
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    @classmethod
    def parse(cls, config: Any) -> "SpeculativeConfig | None":
        """From what a person gives, None for None. ValueError naming field, value and range."""
        if config is None:
            return None
        if not isinstance(config, Mapping):
            raise refuse("speculative_config", config, 'None or a mapping such as {"method": "ngram", ...}')
        known = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
        for name in config:
            if name not in known:
                raise refuse("speculative_config key", name, "one of " + ", ".join(sorted(known)))
        if config.get("method") != "ngram":
            raise refuse("speculative_config method", config.get("method"), "'ngram'")
        n = check_int("num_speculative_tokens", config.get("num_speculative_tokens"), 1, MAX_DRAFTS)
        shortest, longest = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
        if shortest is not None:
            check_int("prompt_lookup_min", shortest, 1, MAX_MATCH)
        if longest is None:
            longest = max(cls.prompt_lookup_max, shortest or 1)
        check_int("prompt_lookup_max", longest, shortest or 1, MAX_MATCH)
        return cls(n, longest, min(cls.prompt_lookup_min, longest) if shortest is None else shortest)


class Lookup:
    """Where in a branch's tokens each run of `shortest` of them last ended, and how good guesses were.

    Runs are kept as chains: the last end of a run, and from each end the one before it.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._ends: dict[bytes, int] = {}
        self._before = array("i")
        self._guess = array("i")
        self._guessed_at = 0
        self._matched = 0
        self._chance = [PRIOR] * (config.prompt_lookup_max + 1)

    def guess(self, tokens: array) -> array:
        """What may follow `tokens`, which begin with the tokens of the last call; empty without an occurrence. A run
        that reaches the end of the tokens goes on as a cycle."""
        self._learn(tokens)
        self._extend(tokens)
        n, at = self._find(tokens)
        self._guessed_at, self._matched = len(tokens), n
        guess = array("i")
        if n:
            period = len(tokens) - at
            guess = tokens[at : at + self._config.num_speculative_tokens]
            for i in range(len(guess), self._config.num_speculative_tokens):
                guess.append(guess[i - period])
        self._guess = guess
        return array("i", guess)

    @property
    def chance(self) -> float:
        """How likely each token of the last guess is to be right if those before it are."""
        return self._chance[self._matched]

    def _learn(self, tokens: array) -> None:
        """Compare the last guess with what came."""
        came = tokens[self._guessed_at : self._guessed_at + len(self._guess)]
        for guessed, token in zip(self._guess, came, strict=False):
            right = guessed == token
            self._chance[self._matched] += LEARNING * (right - self._chance[self._matched])
            if not right:
                return

    def _extend(self, tokens: array) -> None:
        """Remember every run that a token follows."""
        n, ends, before = self._config.prompt_lookup_min, self._ends, self._before
        for end in range(len(before), len(tokens)):
            if end < n:
                before.append(0)
                continue
            run = tokens[end - n : end].tobytes()
            before.append(ends.get(run, 0))
            ends[run] = end

    def _find(self, tokens: array) -> tuple[int, int]:
        """Length and end of the longest occurrence of the last tokens, the latest of several; (0, 0) without one."""
        shortest, longest = self._config.prompt_lookup_min, self._config.prompt_lookup_max
        last = len(tokens)
        end = self._ends.get(tokens[max(0, last - shortest) :].tobytes(), 0)
        best = best_end = 0
        for _ in range(CANDIDATES):
            if not end:
                break
            n = shortest
            while n < longest and n < end and tokens[end - n - 1] == tokens[last - n - 1]:
                n += 1
            if n > best:
                best, best_end = n, end
                if n == longest:
                    break
            end = self._before[end]
        return best, best_end


class Speculation:
    """Decides which guesses join a step, and counts them."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.margin = MARGIN
        self.n_drafts = 0
        self.n_drafted = 0
        self.n_accepted = 0
        self.n_accepted_at = [0] * config.num_speculative_tokens  # of the first, second, ... token of a guess

    def plan(self, decoding: "list[Chunk]", beside: int, pacing: Pacing) -> "list[tuple[Chunk, array]]":
        """Guesses worth computing in a step that decodes `decoding` and `beside` rows of prefill.

        A step costs its rows and the reading of the weights, so the next row is worth it while it promises more tokens
        for its cost than the step has so far. Rows go to the likeliest guess first. A guess never reaches past the
        branch's last token.
        """
        tokens = float(len(decoding) + beside)
        cost = pacing.step([chunk.start for chunk in decoding]) / pacing.context_per_row + beside
        if not decoding or self.margin * tokens >= cost:
            return []
        rows: list[tuple[float, int, float]] = []  # minus the chance, place in decoding, cost
        guesses: list[array] = []
        for place, chunk in enumerate(decoding):
            branch = chunk.branch
            room = branch.request.max_new_tokens - branch.n_outputs - 1
            if room <= 0:
                guesses.append(array("i"))
                continue
            if branch.lookup is None:
                branch.lookup = Lookup(self.config)
            guess = branch.lookup.guess(branch.tokens)
            del guess[room:]
            guesses.append(guess)
            own = chance = branch.lookup.chance
            price = pacing.rows(chunk.start, 1) / pacing.context_per_row
            for _ in guess:
                if chance * cost <= self.margin * tokens * price:
                    break
                rows.append((-chance, place, price))
                chance *= own
        rows.sort()
        taken = [0] * len(decoding)
        for loss, place, price in rows:
            if -loss * cost <= self.margin * tokens * price:
                break
            tokens -= loss
            cost += price
            taken[place] += 1
        return [(chunk, guesses[place][: taken[place]]) for place, chunk in enumerate(decoding) if taken[place]]

    def count(self, n_drafted: int, n_accepted: int) -> None:
        """Note how a step's guess fared."""
        self.n_drafts += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        for place in range(n_accepted):
            self.n_accepted_at[place] += 1
