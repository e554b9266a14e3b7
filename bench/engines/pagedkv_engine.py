"""pagedkv through its engine: scheduler, sampling and text included."""

from pagedkv.commands import bench
from pagedkv.version import version


class Engine:
    """One LLM, made anew when a job does not fit the pool of the last."""

    def __init__(self, model: str, threads: int, activations: str = "int8"):
        self.version = f"pagedkv {version()}"
        self.settings = f"KV {bench.KV_FORMAT}, activations {activations}, greedy, text decoded"
        self._model, self._threads, self._activations = model, threads, activations
        self._shape: tuple[int, int, int] | None = None
        self._llm = None

    def measure(self, prompts: list[list[int]], gen_tokens: int) -> tuple[float, float]:
        """Seconds of prefill and of gen_tokens decode steps."""
        shape = len(prompts), len(prompts[0]), gen_tokens
        if shape != self._shape:
            if self._llm is not None:
                self._llm.close()
            self._llm = bench.load(
                self._model, self._threads, len(prompts[0]), gen_tokens, len(prompts), activations=self._activations
            )
            self._shape = shape
        sample = bench.measure(self._llm, [{"prompt_token_ids": ids} for ids in prompts], gen_tokens)
        return sample.prefill_s, sample.decode_s
