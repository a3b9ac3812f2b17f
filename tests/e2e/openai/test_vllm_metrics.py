"""The `vllm:*` metrics of a whole server after requests of known sizes."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.clients import vllm_metrics
from support.servers.live_server import Shop

pytestmark = pytest.mark.slow
BASE = "tiny"


def scrape(shop: Shop) -> dict[str, float]:
    """The `vllm:*` samples by name; of a histogram its count and sum. "accepted": the drafted tokens that were."""
    text = httpx.get(f"{shop.server.admin_url}/metrics", timeout=60).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {
        sample.name: sample.value
        for sample in samples
        if not sample.labels.keys() & {"le", "finished_reason"} and sample.name.startswith("vllm:")
    }
    drafts = [sample for sample in samples if sample.name == "loraplex_speculation_tokens_total"]
    accepted = sum(sample.value for sample in drafts if sample.labels["outcome"] == "accepted")
    return found | {"vllm:accepted": accepted}


def test_requests_of_known_sizes(tiny: Shop) -> None:
    before = scrape(tiny)
    client = tiny.openai()
    usages = []
    for model, n, max_tokens in (("a", 1, 12), ("a", 3, 8), (BASE, 1, 1)):
        answer = client.completions.create(
            model=model, prompt="Once", n=n, max_tokens=max_tokens, extra_body={"ignore_eos": True}
        )
        usages.append(answer.usage)

    def is_counted() -> bool:
        """An answer is counted after it was sent."""
        now = scrape(tiny)
        return all(
            now[f"vllm:{name}_count"] - before[f"vllm:{name}_count"] >= count
            for name, count in (("request_params_n", 3), ("request_inference_time_seconds", 5))
        )

    tiny.server.wait(is_counted)
    after = scrape(tiny)

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before[f"vllm:{name}"]

    generated = 12 + 3 * 8 + 1
    assert sum(usage.completion_tokens for usage in usages if usage is not None) == generated
    for histogram in (
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_num_preemptions",
        "request_prefill_kv_computed_tokens",
    ):
        assert grown(f"{histogram}_count") == 5, histogram
    prefill, decode = grown("request_prefill_time_seconds_sum"), grown("request_decode_time_seconds_sum")
    assert prefill > 0
    assert decode > 0
    assert grown("request_inference_time_seconds_sum") == pytest.approx(prefill + decode)
    assert grown("e2e_request_latency_seconds_sum") >= prefill + decode
    assert grown("request_params_max_tokens_sum") == 12 + 3 * 8 + 1
    assert (grown("request_params_n_count"), grown("request_params_n_sum")) == (3, 1 + 3 + 1)
    assert grown("request_max_num_generation_tokens_count") == 3
    assert grown("request_max_num_generation_tokens_sum") == 12 + 8 + 1
    computed = grown("request_prefill_kv_computed_tokens_sum")
    assert computed == grown("prompt_tokens_total") - grown("prompt_tokens_cached_total")
    # Every step draws what it can, so all prompts and outputs are in the steps, and the steps hold nothing else.
    assert grown("iteration_tokens_total_sum") == computed + generated
    # A drafted token that was accepted saves a step at most.
    assert 12 + 8 + 1 - grown("accepted") <= grown("iteration_tokens_total_count") <= computed + generated


def test_the_queries_of_its_dashboards_find_their_metrics(tiny: Shop) -> None:
    text = httpx.get(f"{tiny.server.admin_url}/metrics", timeout=60).text
    label = f'model_name="{BASE}"'
    for name in vllm_metrics.DASHBOARDS:
        assert any(line.startswith(f"{name}{{") and label in line for line in text.splitlines()), name
