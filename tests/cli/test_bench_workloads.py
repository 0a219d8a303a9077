from __future__ import annotations

import math
import statistics

import pytest

from tiny_vllm.cli.bench_workloads import WorkItem, arrive, make_workload
from tiny_vllm.errors import ConfigError


def test_the_nano_vllm_workload_has_the_totals_of_the_original() -> None:
    workload = make_workload("nano-vllm", 128_256)
    assert len(workload.items) == 256
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (142_827, 133_966)
    assert max(max(item.prompt_token_ids) for item in workload.items) == 10_000
    assert workload.temperature == 0.6


def test_a_tiny_vocabulary_changes_tokens_and_no_length() -> None:
    large, tiny = make_workload("nano-vllm", 128_256), make_workload("nano-vllm", 50)
    assert [len(item.prompt_token_ids) for item in tiny.items] == [
        len(item.prompt_token_ids) for item in large.items
    ]
    assert all(max(item.prompt_token_ids) < 50 for item in tiny.items)


def test_lengths_like_sharegpt_have_the_stated_medians_and_a_long_tail() -> None:
    items = make_workload("sharegpt-like", 1000, num_prompts=4000).items
    prompts = [len(item.prompt_token_ids) for item in items]
    outputs = [item.output_len for item in items]
    # The median of n draws scatters by sigma x sqrt(pi / 2n) in the logarithm: 2.6 % and 2 % here.
    assert statistics.median(prompts) == pytest.approx(90, rel=4 * 0.026)
    assert statistics.median(outputs) == pytest.approx(130, rel=4 * 0.02)
    assert min(prompts + outputs) >= 4 and max(prompts) == max(outputs) == 1024
    assert statistics.mean(prompts) > 1.5 * statistics.median(prompts)


def test_nine_tenths_of_a_shared_prompt_are_shared() -> None:
    workload = make_workload("shared-prefix", 1000)
    prompts = {item.prompt_token_ids for item in workload.items}
    assert len(prompts) == 64 and workload.shares_prefix
    assert len({prompt[:921] for prompt in prompts}) == 1
    assert all(len(prompt) == 1024 for prompt in prompts)


def test_a_shape_says_prompts_and_lengths() -> None:
    workload = make_workload("3x5+7", 100)
    assert [(len(item.prompt_token_ids), item.output_len) for item in workload.items] == [(5, 7)] * 3
    assert (workload.longest, workload.mean_context) == (12, 5 + 4)
    assert len(make_workload("3x5+7", 100, num_prompts=2).items) == 2


def test_seeds_repeat_and_differ() -> None:
    for name in ("nano-vllm", "sharegpt-like", "shared-prefix", "4x9+2"):
        assert make_workload(name, 100, seed=1) == make_workload(name, 100, seed=1)
        assert make_workload(name, 100, seed=1) != make_workload(name, 100, seed=2)


@pytest.mark.parametrize("name", ["", "nano", "0x1+1", "2x3", "2x3+0", "-1x2+3"])
def test_an_unknown_workload_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="256x128"):
        make_workload(name, 100)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    items = [WorkItem((1,), 1)] * 4000
    arriving = arrive(items, 20.0)
    times = [item.arrival for item in arriving]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    # Mean and standard deviation of exponential gaps are the same; both scatter by about 1/sqrt(n).
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=4 / math.sqrt(4000))
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=8 / math.sqrt(4000))
    assert times == sorted(times)
    assert arrive(items, 20.0) == arriving != arrive(items, 20.0, seed=1)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert {item.arrival for item in arrive([WorkItem((1,), 1)] * 5, math.inf)} == {0.0}
