"""What a request must give, worked out alone: no batch, no pages, no scheduler, the text decoded afresh each time."""

from dataclasses import dataclass

import numpy as np

from pagedkv.core.sampler import Sampler
from pagedkv.core.sampling_state import SamplingState


@dataclass
class Expected:
    token_ids: list
    logprobs: list
    text: str
    finish_reason: str
    stop_reason: object


def expected_output(model, prompt, params, index, max_total):
    """Output `index` of the request; max_total: tokens of prompt and output together."""
    forward, tokenizer = model.forward, model.tokenizer
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.config.stop_token_ids))
    state = SamplingState(
        forward.vocab_size,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        index=index,
        min_tokens=params.min_tokens,
        stop_ids=sorted(stop_ids),
        logit_bias=params.logit_bias,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        prompt_ids=prompt,
        typical_p=params.typical_p,
        allowed_token_ids=params.allowed_token_ids,
    )
    sampler = Sampler(forward.vocab_size)
    limit = min(params.max_tokens or 10**9, max(1, max_total - len(prompt)))
    tokens, logprobs = list(prompt), []

    def result(reason, why=None, cut=None, drop=0):
        out = tokens[len(prompt) :]
        text = tokenizer.decode(out[: len(out) - drop], params.skip_special_tokens) if cut is None else cut
        return Expected(out, logprobs, text, reason, why)

    while True:
        logits = np.array([forward.solo_logits(tokens)], np.float32)
        if params.logits_mask is not None:
            state.set_mask(params.logits_mask.allowed(tokens[len(prompt) :]))
        sampler.sample(logits, [state], [0])
        state.accept(state.token)
        tokens.append(state.token)
        logprobs.append(state.logprob)
        n_out = len(tokens) - len(prompt)
        if state.token in stop_ids:
            return result("stop", state.token, drop=1)
        if n_out >= params.min_tokens:
            whole = certain_text(tokenizer, tokens[len(prompt) :], params.skip_special_tokens)
            before = len(certain_text(tokenizer, tokens[len(prompt) : -1], params.skip_special_tokens))
            found = [(at, stop) for stop in params.stop if (at := find_ending_after(whole, stop, before)) >= 0]
            if found:
                at, stop = min(found, key=lambda match: match[0])
                return result("stop", stop, cut=whole[:at])
        if n_out >= limit:
            return result("length")


def certain_text(tokenizer, ids, skip):
    """Text of `ids` without an unfinished character at the end (the fake vocabulary splits two-byte ones only)."""
    data = b"".join(tokenizer.token_bytes(i, skip) for i in ids)
    unfinished = data[-1:] and 0xC2 <= data[-1] <= 0xDF
    return (data[:-1] if unfinished else data).decode("utf-8", "replace")


def find_ending_after(text, stop, border):
    """Start of the first occurrence of `stop` that ends behind `border`, or -1."""
    for at in range(len(text) - len(stop) + 1):
        if text[at : at + len(stop)] == stop and at + len(stop) > border:
            return at
    return -1
