"""What a request may ask of sampling and stopping."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .checks import INT32_MAX, check_bool, check_int, check_real, is_text, refuse
from .structured import StructuredOutputsParams

MAX_N = 1024
MAX_LOGPROBS = 1024
MAX_STOPS = 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
SEED_MAX = 2**64 - 1


class LogitsMask(Protocol):
    """Says which tokens an output may go on with."""

    def allowed(self, token_ids: Sequence[int]) -> Any:
        """What may follow `token_ids`, the output so far without the prompt: a uint32 array of at least
        ceil(vocab_size / 32), token i being bit i % 32 of word i // 32; None allows everything. The answer must depend
        on token_ids alone. Called in a thread of its own while other requests are computed."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample and when to stop; immutable, checked when made.

    Order of operations on a row of logits: logit_bias is added; repetition, frequency and presence penalties; stop ids
    are banned below min_tokens, and so is all that is not allowed; temperature; then candidates in the order (logit
    descending, token id ascending) are cut by min_p, top_k, top_p and typical_p, in that order, each on what the one
    before left over; one is drawn.

    n: outputs per prompt, [1, 1024]. Output i equals what it would be with any other n.
    max_tokens: at most this many new tokens, >= 1; None: up to the end of the context (or of the pool).
    min_tokens: no stop id and no stop string before this many tokens, [0, max_tokens].
    temperature: 0 is greedy (the lowest id wins a tie), otherwise in [1e-6, 1e6].
    top_k: keep the k best candidates; 0 keeps all.
    top_p: keep the shortest run of best candidates whose probability reaches top_p, (0, 1].
    min_p: keep candidates at least min_p times as likely as the best, [0, 1].
    typical_p: keep the candidates whose surprise is nearest the entropy, until their probability reaches typical_p,
    (0, 1] (Meister et al., 2022).
    seed: [0, 2**64); None draws a fresh one per request.
    stop: a text or texts that end the output; the leftmost match is cut out with everything behind it.
    stop_token_ids: ids that end the output besides the model's own; the id is kept in token_ids, not in text.
    ignore_eos: the model's own stop ids do not stop.
    logprobs: report this many best tokens beside the chosen one, [0, 1024]; None reports none.
    prompt_logprobs: the same for every prompt token but the first.
    presence_penalty, frequency_penalty: [-2, 2], over the output.
    repetition_penalty: [0.01, 100], over prompt and output.
    logit_bias: token id -> [-100, 100].
    allowed_token_ids: nothing but these ids, at least one, is ever drawn; None: no limit.
    logits_mask: an object whose allowed(token_ids) says what may follow the output's tokens so far, see docs/engine.md.
    structured_outputs: the form the output must have, as a StructuredOutputsParams. ignore_eos does not hold for it.
    skip_special_tokens: leave special tokens out of the text.

    Raises ValueError naming the field, the value and the range; wrong types and NaN included.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    typical_p: float = 1.0
    allowed_token_ids: Sequence[int] | None = None
    logits_mask: LogitsMask | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        put = self._put
        put("n", check_int("n", self.n, 1, MAX_N))
        if self.max_tokens is not None:
            put("max_tokens", check_int("max_tokens", self.max_tokens, 1))
        put("min_tokens", check_int("min_tokens", self.min_tokens, 0, self.max_tokens or INT32_MAX))
        put("temperature", self._checked_temperature())
        put("top_k", check_int("top_k", self.top_k, 0))
        put("top_p", check_real("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put("min_p", check_real("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            put("seed", check_int("seed", self.seed, 0, SEED_MAX))
        put("stop", self._checked_stop())
        put("stop_token_ids", self._checked_ids("stop_token_ids") or ())
        check_bool("ignore_eos", self.ignore_eos)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                put(field, check_int(field, getattr(self, field), 0, MAX_LOGPROBS))
        put("presence_penalty", check_real("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put("repetition_penalty", check_real("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        put("logit_bias", self._checked_bias())
        check_bool("skip_special_tokens", self.skip_special_tokens)
        put("typical_p", check_real("typical_p", self.typical_p, 0.0, 1.0, open_low=True))
        put("allowed_token_ids", self._checked_ids("allowed_token_ids"))
        if self.allowed_token_ids == ():
            raise refuse("allowed_token_ids", [], f"at least one token id in [0, {INT32_MAX}]")
        if self.logits_mask is not None and not callable(getattr(self.logits_mask, "allowed", None)):
            raise refuse("logits_mask", self.logits_mask, "an object with a method allowed(token_ids)")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise refuse("structured_outputs", self.structured_outputs, "a StructuredOutputsParams")

    def _put(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _checked_temperature(self) -> float:
        allowed = f"0 (greedy) or a number in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]"
        try:
            value = check_real("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        except ValueError:
            raise refuse("temperature", self.temperature, allowed) from None
        if 0.0 < value < MIN_TEMPERATURE:
            raise refuse("temperature", self.temperature, allowed)
        return value

    def _checked_stop(self) -> tuple[str, ...]:
        allowed = f"a non-empty text without lone surrogates or at most {MAX_STOPS} of them"
        if self.stop is None:
            return ()
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, Sequence) or len(texts) > MAX_STOPS:
            raise refuse("stop", self.stop, allowed)
        if any(not is_text(text) or not text for text in texts):
            raise refuse("stop", self.stop, allowed)
        return tuple(texts)

    def _checked_ids(self, field: str) -> tuple[int, ...] | None:
        ids = getattr(self, field)
        if ids is None:
            return None
        if isinstance(ids, (str, bytes, Mapping)) or not isinstance(ids, Iterable):
            raise refuse(field, ids, f"token ids in [0, {INT32_MAX}]")
        return tuple(sorted({check_int(field, token, 0) for token in ids}))

    def _checked_bias(self) -> dict[int, float]:
        if self.logit_bias is None:
            return {}
        if not isinstance(self.logit_bias, Mapping):
            raise refuse("logit_bias", self.logit_bias, "a mapping of token ids to numbers in [-100, 100]")
        return {
            check_int("logit_bias key", token, 0): check_real(f"logit_bias[{token}]", bias, -100.0, 100.0)
            for token, bias in self.logit_bias.items()
        }
