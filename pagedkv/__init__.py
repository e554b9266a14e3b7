"""Language models on CPUs from a paged KV cache. Public names load on first use, so importing the package is cheap."""

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the import

# name -> module that defines it
_EXPORTS = {
    "LLM": "pagedkv.llm",
    "LLMEngine": "pagedkv.engine.engine",
    "AsyncEngine": "pagedkv.engine.async_engine",
    "EngineDeadError": "pagedkv.engine.engine_thread",
    "QueueFull": "pagedkv.engine.admission",
    "SamplingParams": "pagedkv.engine.params",
    "StructuredOutputsParams": "pagedkv.engine.structured",
    "RequestOutput": "pagedkv.engine.outputs",
    "CompletionOutput": "pagedkv.engine.outputs",
    "EmbeddingOutput": "pagedkv.engine.outputs",
    "EmbeddingRequestOutput": "pagedkv.engine.outputs",
    "Logprob": "pagedkv.engine.outputs",
    "PagedKVCache": "pagedkv.core.kvcache",
    "Arena": "pagedkv.core.arena",
    "BadInput": "pagedkv.core.errors",
    "NotFound": "pagedkv.core.errors",
    "PagedKVError": "pagedkv.core.errors",
    "PoolExhausted": "pagedkv.core.errors",
    "PrefixIndex": "pagedkv.core.prefix",
    "Sequence": "pagedkv.core.sequence",
    "SequenceFull": "pagedkv.core.errors",
    "Tampered": "pagedkv.core.errors",
    "Verdict": "pagedkv.core.errors",
    "Violation": "pagedkv.core.check",
    "ModelError": "pagedkv.models.errors",
}

__all__ = [*_EXPORTS, "get_include"]

if TYPE_CHECKING:
    from pagedkv.core.arena import Arena as Arena
    from pagedkv.core.check import Violation as Violation
    from pagedkv.core.errors import BadInput as BadInput
    from pagedkv.core.errors import NotFound as NotFound
    from pagedkv.core.errors import PagedKVError as PagedKVError
    from pagedkv.core.errors import PoolExhausted as PoolExhausted
    from pagedkv.core.errors import SequenceFull as SequenceFull
    from pagedkv.core.errors import Tampered as Tampered
    from pagedkv.core.errors import Verdict as Verdict
    from pagedkv.core.kvcache import PagedKVCache as PagedKVCache
    from pagedkv.core.prefix import PrefixIndex as PrefixIndex
    from pagedkv.core.sequence import Sequence as Sequence
    from pagedkv.engine.admission import QueueFull as QueueFull
    from pagedkv.engine.async_engine import AsyncEngine as AsyncEngine
    from pagedkv.engine.engine import LLMEngine as LLMEngine
    from pagedkv.engine.engine_thread import EngineDeadError as EngineDeadError
    from pagedkv.engine.outputs import CompletionOutput as CompletionOutput
    from pagedkv.engine.outputs import EmbeddingOutput as EmbeddingOutput
    from pagedkv.engine.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from pagedkv.engine.outputs import Logprob as Logprob
    from pagedkv.engine.outputs import RequestOutput as RequestOutput
    from pagedkv.engine.params import SamplingParams as SamplingParams
    from pagedkv.engine.structured import StructuredOutputsParams as StructuredOutputsParams
    from pagedkv.llm import LLM as LLM
    from pagedkv.models.errors import ModelError as ModelError


def get_include() -> str:
    """Directory to put on a C compiler's include path for `#include <pagedkv/pagedkv.h>`."""
    return __path__[0] + "/include"


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'pagedkv' has no attribute '{name}'")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, each once, and the parts imported so far."""
    hidden = ("_EXPORTS", "TYPE_CHECKING")
    return sorted({*__all__, *globals()}.difference(hidden))
