"""GET /metrics: the engine's counters under vLLM's names where they mean the same, `pagedkv:` for the rest."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .service import Service

GAUGES = {
    "running": ("vllm:num_requests_running", "Outputs that hold pages and are being computed."),
    "waiting": ("vllm:num_requests_waiting", "Outputs that wait for pages or a slot."),
}
COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "Times an output gave its pages up to be computed again later."),
    "prefix_query_tokens": ("vllm:prefix_cache_queries", "Tokens that were looked up in the prefix cache."),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits", "Tokens of them that were found there."),
    "steps": ("pagedkv:engine_steps", "Batches computed."),
}
TOTALS: dict[str, tuple[str, str]] = {
    "prompt_tokens": ("vllm:prompt_tokens", "Tokens of prompts, cached ones included."),
    "generation_tokens": ("vllm:generation_tokens", "Tokens made."),
    "spec_drafts": ("vllm:spec_decode_num_drafts", "Guesses of prompt lookup."),
    "spec_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens of them."),
    "spec_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right."),
    "requests_timeout": ("pagedkv:requests_timeout", "Requests that their deadline ended."),
    "requests_refused": ("pagedkv:requests_refused", "Requests refused because the queue was full."),
}
REASONS = ("stop", "length", "abort", "error")
HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from arrival to the first token.",
    "inter_token_latency_seconds": "Seconds between one token and the next.",
    "e2e_request_latency_seconds": "Seconds from arrival to the last token.",
    "request_queue_time_seconds": "Seconds from arrival to the first computation.",
    "request_prefill_time_seconds": "Seconds from there to the first token.",
    "request_decode_time_seconds": "Seconds from there to the last.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens made for a request.",
    "iteration_tokens_total": "Tokens computed in a step.",
}
PAGE_STATES = ("free", "cached", "in_use")


class EngineCollector(Collector):
    """One reading of the engine's counters."""

    def __init__(self, service: "Service", stats: dict[str, Any]) -> None:
        self._service = service
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All families."""
        service, stats = self._service, self._stats
        labels, values = ["model_name"], [service.names[0]]
        for key, (name, text) in GAUGES.items():
            yield _one(GaugeMetricFamily(name, text, labels=labels), values, stats[key])
        for key, (name, text) in (COUNTERS | TOTALS).items():
            yield _one(CounterMetricFamily(name, text, labels=labels), values, stats[key])
        right = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by place in the guess.",
            labels=[*labels, "position"],
        )
        for position, n in enumerate(stats["spec_accepted_tokens_per_pos"]):
            right.add_metric([*values, str(position)], n)
        yield right
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*labels, "finished_reason"]
        )
        for reason in REASONS:
            ended.add_metric([*values, reason], stats[f"requests_{reason}"])
        yield ended
        for key, text in HISTOGRAMS.items():
            found = getattr(service.llm.engine.metrics, key)
            family = HistogramMetricFamily(f"vllm:{key}", text, labels=labels)
            buckets = [(_bound(bound), n) for bound, n in found.cumulative()]
            family.add_metric(values, buckets, found.sum)
            yield family
        pages = GaugeMetricFamily("pagedkv:pages", "Pages of the KV pool by state.", labels=[*labels, "state"])
        for state in PAGE_STATES:
            pages.add_metric([*values, state], stats[f"pages_{state}"])
        yield pages
        usage = stats["pages_in_use"] / stats["pages_total"]
        text = "Share of the KV pool that running outputs hold, 0 to 1."
        yield _one(GaugeMetricFamily("vllm:kv_cache_usage_perc", text, labels=labels), values, usage)
        info = GaugeMetricFamily("pagedkv:build_info", "Always 1.", labels=["system_fingerprint", "isa", "threads"])
        info.add_metric([service.fingerprint, str(stats["isa"]), str(stats["threads"])], 1)
        yield info


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else str(value)


def _one(family: Any, labels: list[str], value: float) -> Any:
    family.add_metric(labels, value)
    return family


def render(service: "Service", stats: dict[str, Any], accept: str) -> tuple[bytes, str]:
    """The text and its media type, in the format that `accept` asks for. stats: engine.stats() between two steps."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(service, stats))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type
