"""What a person sets about the server."""

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names; every field is an option of `pagedkv serve`.

    served_model_names: what clients may call the model, the first one in answers; empty: the name it was loaded by.
    api_keys: any of them opens every route; empty: no key is asked for. cors_origins: origins whose pages may read
    answers, "*" for all; empty: CORS is off. max_body: bytes of a request. max_prompts: prompts, inputs or tools of one
    request. max_n: outputs per prompt. max_logprobs: alternatives per token. shutdown_timeout: seconds that running
    requests get to finish once the server is told to stop.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8 * MIB
    max_prompts: int = 256
    max_n: int = 128
    max_logprobs: int = 20
    shutdown_timeout: float = 30.0
