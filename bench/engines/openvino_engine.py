"""OpenVINO GenAI through its continuous batching pipeline, which converts the GGUF file when it loads."""

import time
from importlib.metadata import version

import numpy as np
import openvino as ov
import openvino_genai as genai

CACHE_GIB = 2
MAX_SEQUENCES = 256
MAX_PREFILL_TOKENS = 8192


class Engine:
    """One pipeline for all jobs; its defaults decide the precision of arithmetic and of K and V."""

    def __init__(self, model: str, threads: int):
        self.version = f"openvino-genai {version('openvino-genai')}"
        self.settings = "default precisions, greedy, prompts in one step"
        config = genai.SchedulerConfig()
        config.cache_size = CACHE_GIB
        config.max_num_seqs = MAX_SEQUENCES
        config.max_num_batched_tokens = MAX_PREFILL_TOKENS
        config.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(model, config, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self._n_requests = 0

    def measure(self, prompts: list[list[int]], gen_tokens: int) -> tuple[float, float]:
        """Seconds of prefill and of gen_tokens decode steps."""
        config = genai.GenerationConfig()
        config.max_new_tokens = gen_tokens + 2 + len(prompts) * len(prompts[0]) // MAX_PREFILL_TOKENS
        config.ignore_eos = True
        config.do_sample = False
        inputs = [ov.Tensor(np.array([ids], np.int64)) for ids in prompts]
        start = time.perf_counter()
        handles = []
        for tensor in inputs:
            handles.append(self._pipeline.add_request(self._n_requests, tensor, config))
            self._n_requests += 1
        waiting = handles
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        prefill_s = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(gen_tokens):
            self._pipeline.step()
        decode_s = time.perf_counter() - start
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        produced = [len(handle.read_all()[0].generated_ids) for handle in handles]
        if min(produced) < gen_tokens + 1:
            raise RuntimeError(f"openvino produced {min(produced)} tokens of {gen_tokens + 1}")
        return prefill_s, decode_s
