"""LLM: a model, its cache and its engine behind one object."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .core.errors import BadInput, PoolExhausted
from .core.kvcache import FORMATS, PAGE_TOKENS, PagedKVCache, tile_bytes
from .engine.checks import INT32_MAX, check_bool, check_choice, check_int, parse_bytes, refuse, shown
from .engine.engine import LLMEngine, Prompt
from .engine.memory import DEFAULT_SHARE, available_memory
from .engine.outputs import EmbeddingRequestOutput, RequestOutput
from .engine.params import SamplingParams
from .engine.speculation import SpeculativeConfig
from .models.loader import load_model
from .process import on_terminal

Message = Mapping[str, Any]


class OutputStream:
    """Iterator over the outputs of one request, each with all the text so far. close() aborts the request; so do an
    exception out of the iteration and dropping the iterator."""

    def __init__(self, engine: LLMEngine, prompt: Prompt, params: SamplingParams | None) -> None:
        self._engine = engine
        self._open = False
        self.request_id, self._box = engine.subscribe(prompt, params)
        self._open = True

    def __iter__(self) -> "OutputStream":
        return self

    def __next__(self) -> RequestOutput:
        if not self._open:
            raise StopIteration
        try:
            while not self._box:
                self._engine.pump()
            output = self._box.popleft()
        except BaseException:
            self.close()
            raise
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        if self._open:
            self._open = False
            self._engine.unsubscribe(self.request_id)

    def __del__(self) -> None:
        self.close()


class LLM:
    """A model ready to generate.

    model: a catalogue name (`smollm2-135m-instruct`), a .gguf file, a model directory or hf:owner/repo[/file].
    threads: worker threads, None: what the machine grants. kv_format: "f32", "f16" or "int8".
    kv_memory: bound of the KV pool, bytes or a text such as "512MiB"; kv_pages: the same in pages; give at most one.
    Neither: a quarter of the available memory, and no more than max_num_seqs whole contexts. Address space is reserved,
    memory is taken as pages are first used. page_tokens: tokens per page: 16, 32, 64, 128 or 256.
    max_model_len: tokens of prompt and output together, None: the model's context. max_num_seqs: outputs computed at a
    time. max_num_batched_tokens: tokens computed in one step, decodes first. enable_prefix_caching: reuse the pages of
    equal prompt beginnings. quantization: weight type to convert float weights to, None: as in the file.
    activations: "int8" or "int12". max_waiting: most requests that may wait in the queue, None: any number; beyond it
    engine.add_request() and AsyncEngine raise QueueFull; generate(), chat() and stream() queue what they are given.
    speculative_config: None, or {"method": "ngram", "num_speculative_tokens": 8} to guess tokens from earlier ones and
    verify them together, which is faster where an output repeats its prompt or itself; "prompt_lookup_max" (4) and
    "prompt_lookup_min" (2) bound how many tokens must agree.

    Raises ValueError naming field, value and range; ModelError for a file that cannot be used. No setting but model,
    kv_format, quantization and activations changes any output; where a model has several rotation tables,
    max_model_len chooses between them (docs/models.md). `settings` holds those of them that are not the cache's, by
    name, None where a setting changes nothing.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        threads: int | None = None,
        kv_format: str = "f16",
        kv_memory: int | str | None = None,
        kv_pages: int | None = None,
        page_tokens: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        quantization: str | None = None,
        activations: str = "int8",
        max_waiting: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, (str, Path)) or not str(model):
            raise refuse("model", model, "a catalogue name, a .gguf file or a model directory")
        if threads is not None:
            check_int("threads", threads, 1, 1024)
        check_choice("kv_format", kv_format, FORMATS)
        if kv_memory is not None and kv_pages is not None:
            raise ValueError("kv_memory and kv_pages both bound the pool: give one of them")
        memory = None if kv_memory is None else parse_bytes("kv_memory", kv_memory)
        if kv_pages is not None:
            check_int("kv_pages", kv_pages, 1)
        if isinstance(page_tokens, bool) or page_tokens not in PAGE_TOKENS:
            raise refuse("page_tokens", page_tokens, "one of " + ", ".join(map(str, PAGE_TOKENS)))
        if max_model_len is not None:
            check_int("max_model_len", max_model_len, 1)
        check_int("max_num_seqs", max_num_seqs, 1, 65536)
        check_int("max_num_batched_tokens", max_num_batched_tokens, 1, 1 << 20)
        check_bool("enable_prefix_caching", enable_prefix_caching)
        if max_waiting is not None:
            check_int("max_waiting", max_waiting, 0)
        SpeculativeConfig.parse(speculative_config)

        self._closed = False
        self.model = load_model(
            model,
            threads=threads,
            quantization=quantization,
            activations=activations,
            context=max_model_len,
            progress=on_terminal(),
        )
        try:
            config = self.model.config
            context = config.context_length
            length = context if max_model_len is None else check_int("max_model_len", max_model_len, 1, context)
            self.settings = {
                "activations": activations,
                "quantization": quantization,
                "context": f"c{length}" if any(rope.kind in ("dynamic", "longrope") for rope in config.ropes) else None,
            }
            shape = (config.n_layers, config.n_kv_heads, config.head_dim)
            page_bytes = config.n_layers * config.n_kv_heads * tile_bytes(kv_format, config.head_dim, page_tokens)
            if kv_pages is not None:
                n_pages = kv_pages
            elif memory is not None:
                if memory < page_bytes:
                    raise refuse("kv_memory", kv_memory, f"at least one page of {page_bytes} bytes")
                n_pages = min(memory // page_bytes, INT32_MAX)
            else:
                useful = max_num_seqs * -(-length // page_tokens)
                n_pages = max(1, min(useful, available_memory() // DEFAULT_SHARE // page_bytes, INT32_MAX))
            field, value = ("kv_memory", kv_memory) if kv_pages is None else ("kv_pages", kv_pages)
            try:
                self.kv = PagedKVCache(
                    *shape,
                    n_pages=n_pages,
                    format=kv_format,
                    page_tokens=page_tokens,
                    threads=self.model.forward.pool,
                )
            except BadInput as error:
                raise ValueError(f"{field} must be smaller, not {shown(value)}: {error}") from None
            except PoolExhausted as error:
                raise PoolExhausted(f"{error}; {field} sets a smaller pool") from None
            self.engine = LLMEngine(
                self.model,
                self.kv,
                max_model_len=length,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_prefix_caching=enable_prefix_caching,
                max_waiting=max_waiting,
                speculative_config=speculative_config,
            )
        except BaseException:
            self.model.close()
            raise

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: encode, decode, apply_chat_template."""
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Run prompts to their end; outputs in input order.

        A prompt is a text, a list of token ids, or {"prompt_token_ids": [...]}; one params object for all or one each.
        Raises ValueError before anything is computed if any prompt is refused. Blocks; releases the GIL in each step.
        """
        todo = self._listed(prompts)
        params = self._params_for(todo, sampling_params)
        return self._run_all(
            todo, lambda i, prompt: self.engine.subscribe(prompt, params[i], final_only=True), use_tqdm
        )

    def _listed(self, prompts: Any) -> list[Any]:
        return [prompts] if _is_one_prompt(prompts) else list(prompts)

    def _run_all(self, prompts: list[Any], subscribe: Callable[[int, Any], Any], use_tqdm: bool) -> list[Any]:
        """The last output of each prompt. subscribe(number, prompt) queues one."""
        boxes: list[tuple[str, deque[Any]]] = []
        try:
            for i, prompt in enumerate(prompts):
                boxes.append(subscribe(i, prompt))
            self._run(boxes, use_tqdm)
            return [box[-1] for _, box in boxes]
        finally:
            for request_id, _ in boxes:
                self.engine.unsubscribe(request_id)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """generate() on one conversation or several, after the chat template. A message has role and content."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise refuse("messages", messages, "a list of messages with role and content")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self.tokenizer
        prompts = [
            {
                "prompt": tokenizer.apply_chat_template(list(conversation)),
                "prompt_token_ids": tokenizer.encode_chat(list(conversation)),
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = False) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, in input order: the mean of the hidden states of all its tokens behind the final
        norm, divided by its length. `.outputs.embedding` is float32 [hidden]. Prompts as generate() takes them, raises
        as that does. Blocks; releases the GIL in each step."""
        return self._run_all(self._listed(prompts), lambda i, prompt: self.engine.subscribe_embedding(prompt), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> OutputStream:
        """Iterate over the request's outputs as they grow, each with the text so far; the last has finished=True.
        Raises ValueError here, before the first step."""
        return OutputStream(self.engine, prompt, sampling_params)

    def logits(self, token_ids: Iterable[int], *, chunk: int | None = None) -> np.ndarray:
        """Next-token logits at each position, float32 [n, vocab], from one paged prefill in chunks of `chunk`."""
        return self.engine.logits(token_ids, chunk=chunk)

    def check(self) -> list[Any]:
        """Invariant violations found by the level 3 checker; empty when sound. RuntimeError after close()."""
        self.engine.intake.refuse_closed()
        return self.kv.check(level=3)

    def close(self) -> None:
        """Abort what runs and free everything. Idempotent; the object is unusable afterwards."""
        if not self._closed:
            self.engine.close()
            self.kv.close()
            self.model.close()
            self._closed = True

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except BadInput:  # a view of a page lives on; it must not replace an exception on its way out
            if kind is None:
                raise

    def _params_for(self, prompts: Sequence[Prompt], params: Any) -> list[SamplingParams | None]:
        if params is None or isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if not isinstance(params, Sequence) or len(params) != len(prompts):
            raise refuse("sampling_params", params, f"one SamplingParams or one for each of {len(prompts)} prompts")
        return list(params)

    def _run(self, boxes: list[tuple[str, deque[Any]]], use_tqdm: bool) -> None:
        pending = [box for _, box in boxes]
        bar = None
        if use_tqdm and sys.stderr is not None:
            from tqdm import tqdm

            bar = tqdm(total=len(pending), desc="Prompts", unit="prompt")
        try:
            while pending:
                left = [box for box in pending if not box]
                if bar is not None:
                    bar.update(len(pending) - len(left))
                pending = left
                if pending:
                    self.engine.pump()
        finally:
            if bar is not None:
                bar.close()


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence):
        raise refuse("prompts", prompts, "a prompt or a list of prompts")
    return len(prompts) > 0 and not isinstance(prompts[0], (str, Mapping, Sequence, np.ndarray))
