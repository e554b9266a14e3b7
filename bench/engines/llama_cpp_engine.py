"""llama.cpp through llama-cpp-python's low-level interface: one llama_decode a step, the largest logit by NumPy."""

import time
from importlib.metadata import version

import llama_cpp as ll
import numpy as np


class Engine:
    """One model; a context for the shape of the current jobs."""

    def __init__(self, model: str, threads: int, *, flash_attention: bool):
        self.version = f"llama-cpp-python {version('llama-cpp-python')}"
        features = ll.llama_print_system_info().decode().partition(":")[2]
        enabled = [part.split("=")[0].strip() for part in features.split("|") if part.strip().endswith("= 1")]
        self.settings = f"KV f16, flash attention {'on' if flash_attention else 'off'}, {' '.join(enabled)}"
        ll.llama_backend_init()
        self._threads, self._flash = threads, flash_attention
        self._model = ll.llama_model_load_from_file(model.encode(), ll.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        self._n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))
        self._context = None
        self._shape: tuple[int, int, int] | None = None

    def measure(self, prompts: list[list[int]], gen_tokens: int) -> tuple[float, float]:
        """Seconds of prefill and of gen_tokens decode steps."""
        n, length = len(prompts), len(prompts[0])
        self._prepare(n, length, gen_tokens)
        ll.llama_memory_clear(ll.llama_get_memory(self._context), True)
        batch = ll.llama_batch_init(n * length, 0, 1)
        try:
            rows = [(token, i, s) for s, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
            start = time.perf_counter()
            self._decode(batch, rows, {(s + 1) * length - 1 for s in range(n)})
            tokens = [self._best((s + 1) * length - 1) for s in range(n)]
            prefill_s = time.perf_counter() - start
            start = time.perf_counter()
            for step in range(gen_tokens):
                self._decode(batch, [(tokens[s], length + step, s) for s in range(n)], set(range(n)))
                tokens = [self._best(s) for s in range(n)]
            return prefill_s, time.perf_counter() - start
        finally:
            ll.llama_batch_free(batch)

    def _prepare(self, n: int, length: int, gen_tokens: int) -> None:
        if (n, length, gen_tokens) == self._shape:
            return
        if self._context:
            ll.llama_free(self._context)
        params = ll.llama_context_default_params()
        params.n_ctx = n * -(-(length + gen_tokens + 1) // 256) * 256
        params.n_seq_max = n
        params.n_batch = max(n * length, 512)
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = (
            ll.LLAMA_FLASH_ATTN_TYPE_ENABLED if self._flash else ll.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp refuses a context of {params.n_ctx} tokens for {n} sequences")
        self._shape = n, length, gen_tokens

    def _decode(self, batch: "ll.llama_batch", rows: list[tuple[int, int, int]], wanted: set[int]) -> None:
        """Compute rows of (token, position, sequence), logits for those in `wanted`."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i in wanted
        status = ll.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, row: int) -> int:
        logits = ll.llama_get_logits_ith(self._context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self._n_vocab,))))
