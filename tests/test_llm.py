"""The whole engine on a tiny random Llama in FP32, against transformers and against itself."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.oracle import all_logits, greedy_tokens
from tests.helpers.tiny_models import TURN_END_ID, VOCAB_SIZE, make_tiny_llama, save_tiny_llama
from tiny_vllm import LLM, CapacityError, ConfigError, EngineDead, RequestError, RequestOutput, SamplingParams

# Largest difference of log-probabilities: FP32 sums of at most 96 terms of size ~10, over two layers, in
# another order: about 10 x sqrt(96) x 2^-24 per product, and a few products deep.
LOGPROB_TOLERANCE = 1e-4
EOS_IDS = (1, TURN_END_ID)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_tiny_llama()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), model)


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), max_num_seqs=4, num_pages=64, max_num_batched_tokens=32, max_logprobs=-1) as llm:
        yield llm


def assert_pool_is_whole(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, **options})


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, 320) for _ in range(length)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("prefill_policy", ["exclusive", "mixed"])
@pytest.mark.parametrize("budget", [5, 200])
def test_greedy_tokens_equal_transformers_at_page_edges_and_on_repeats(
    model: Any, directory: Path, page_size: int, prefill_policy: str, budget: int
) -> None:
    rng = random.Random(page_size)
    lengths = sorted({max(1, n) for n in (page_size - 1, page_size, page_size + 1, 2 * page_size)})
    prompts = [random_prompt(rng, length) for length in lengths]
    expected = [[greedy_tokens(model, prompt, 12, EOS_IDS)] for prompt in prompts]
    with LLM(
        str(directory),
        page_size=page_size,
        num_pages=max(512 // page_size, 12),
        prefill_policy=prefill_policy,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
    ) as llm:
        for repeat in range(3):
            outputs = llm.generate(prompts, greedy(12))
            assert tokens_of(outputs) == expected
            if repeat:
                cached = [output.num_cached_tokens for output in outputs]
                assert cached == [(length - 1) // page_size * page_size for length in lengths]
        assert_pool_is_whole(llm)


def test_preemption_with_shared_prefixes_gives_the_unpressured_tokens(model: Any, directory: Path) -> None:
    rng = random.Random(1)
    prefix = random_prompt(rng, 33)
    prompts = [[*prefix, *random_prompt(rng, 1)] for _ in range(5)]
    with LLM(str(directory), page_size=4, num_pages=30, max_num_seqs=5) as llm:
        outputs = llm.generate(prompts, greedy(35, ignore_eos=True))
        assert llm.stats().num_preemptions > 0
        assert_pool_is_whole(llm)
    assert tokens_of(outputs) == [[greedy_tokens(model, prompt, 35)] for prompt in prompts]


def test_random_load_equals_solo_runs(model: Any, directory: Path) -> None:
    """Shared prefixes, choices, stop tokens, priorities and a small pool; every output as if it ran alone."""
    rng = random.Random(2)
    prefixes = [random_prompt(rng, 40) for _ in range(3)]
    prompts = [
        rng.choice(prefixes)[: rng.randrange(40)] + random_prompt(rng, rng.randrange(1, 9)) for _ in range(40)
    ]
    params = [greedy(rng.randrange(1, 20), n=rng.choice([1, 1, 2])) for _ in prompts]
    with LLM(str(directory), page_size=4, num_pages=40, max_num_seqs=6, max_num_batched_tokens=24) as llm:
        outputs = llm.generate(prompts, params, priority=[rng.randrange(3) for _ in prompts])
        assert llm.stats().num_preemptions > 0
        assert_pool_is_whole(llm)
    for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
        expected = greedy_tokens(model, prompt, sampling.max_tokens, EOS_IDS)
        assert [choice.token_ids for choice in output.outputs] == [expected] * sampling.n


def test_a_seeded_request_gives_the_same_tokens_in_any_company(directory: Path) -> None:
    rng = random.Random(3)
    prompt = random_prompt(rng, 21)
    others = [random_prompt(rng, rng.randrange(1, 30)) for _ in range(6)]
    seeded = SamplingParams(seed=1234, max_tokens=20, n=3, ignore_eos=True, top_p=0.9, top_k=50)
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    runs = []
    for num_pages, company in ((64, []), (64, [free] * 6), (30, [seeded] * 6), (22, [greedy(25)] * 6)):
        with LLM(str(directory), page_size=4, num_pages=num_pages, max_num_seqs=5) as llm:
            outputs = llm.generate([*others[: len(company)], prompt], [*company, seeded])
            runs.append(tokens_of(outputs)[-1])
            if num_pages == 22:
                assert llm.stats().num_preemptions > 0
    assert all(run == runs[0] for run in runs)
    assert len({tuple(tokens) for tokens in runs[0]}) == 3, "choices of one request must differ"


def test_different_seeds_differ_and_unseeded_requests_repeat_from_run_to_run(directory: Path) -> None:
    runs = []
    for _ in range(2):
        with LLM(str(directory), seed=5) as llm:
            params = [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(), SamplingParams()]
            runs.append(tokens_of(llm.generate([[5, 6, 7]] * 4, params)))
    assert runs[0] == runs[1]
    assert len({str(tokens) for tokens in runs[0]}) == 4


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_prompt_logprobs_equal_transformers_with_cold_and_warm_prefix(
    model: Any, directory: Path, budget: int
) -> None:
    prompt = random_prompt(random.Random(4), 37)
    expected = torch.log_softmax(all_logits(model, prompt), dim=-1)
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    with LLM(str(directory), page_size=4, max_num_batched_tokens=budget, max_num_seqs=2) as llm:
        for _ in range(3):
            (output,) = llm.generate(prompt, params)
            scores = output.prompt_logprobs
            assert scores is not None and scores[0] is None and len(scores) == len(prompt)
            assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
            for position, entry in enumerate(scores[1:], start=1):
                row = expected[position - 1]
                top = row.topk(3)
                assert set(entry) == {prompt[position], *top.indices.tolist()}
                for token, logprob in entry.items():
                    assert logprob.logprob == pytest.approx(float(row[token]), abs=LOGPROB_TOLERANCE)
                    assert logprob.rank == 1 + int((row > row[token]).sum())
            llm.generate(prompt, greedy(3))  # warms the cache without logprobs


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0, 2.0])
def test_logprobs_are_the_models_whatever_the_sampling_settings(
    model: Any, llm: LLM, temperature: float
) -> None:
    prompt = random_prompt(random.Random(5), 9)
    params = SamplingParams(
        temperature=temperature,
        top_p=0.5,
        logprobs=2,
        max_tokens=6,
        seed=1,
        ignore_eos=True,
        presence_penalty=1.0,
    )
    (output,) = llm.generate(prompt, params)
    choice = output.outputs[0]
    rows = torch.log_softmax(all_logits(model, [*prompt, *choice.token_ids]), dim=-1)[len(prompt) - 1 :]
    total = 0.0
    assert choice.logprobs is not None
    for row, token, entry in zip(rows, choice.token_ids, choice.logprobs, strict=False):
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=LOGPROB_TOLERANCE)
        assert set(row.topk(2).indices.tolist()) <= set(entry)
        total += entry[token].logprob
    assert choice.cumulative_logprob == pytest.approx(total)


def test_all_logprobs_of_the_vocabulary_sum_to_one(llm: LLM) -> None:
    (output,) = llm.generate([5, 6], SamplingParams(logprobs=-1, max_tokens=1))
    entry = output.outputs[0].logprobs[0]
    assert len(entry) == VOCAB_SIZE
    assert sum(torch.tensor([value.logprob for value in entry.values()]).exp()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("length", [1, 255])
@pytest.mark.parametrize("max_tokens", [None, 1, 10_000])
def test_output_is_clamped_to_the_context(llm: LLM, length: int, max_tokens: int | None) -> None:
    prompt = random_prompt(random.Random(6), length)
    (output,) = llm.generate(prompt, greedy(1, max_tokens=max_tokens, ignore_eos=True))
    expected = 256 - length if max_tokens is None else min(max_tokens, 256 - length)
    assert len(output.outputs[0].token_ids) == expected
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * 256, "256 tokens.*256"),
        ([5] * 2560, "2560 tokens.*256"),
        ("", "empty"),
        ([[]], "empty"),
        ([[5, -1]], "-1"),
        ([[5, VOCAB_SIZE]], str(VOCAB_SIZE)),
        ([[5, 2**63]], str(2**63)),
        ([["a"]], "not a token id"),
        ([[1.5]], "not a token id"),
        ([[True]], "not a token id"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "keys"),
        ({"text": "a"}, "keys"),
        (7, "int"),
        (None, "NoneType"),
    ],
)
def test_bad_prompts_are_refused_and_a_running_request_is_undisturbed(
    model: Any, llm: LLM, prompt: Any, message: str
) -> None:
    running = llm.stream([5, 6, 7], greedy(10, ignore_eos=True))
    next(running)
    with pytest.raises(RequestError, match=message):
        llm.generate(
            ["fine", *prompt] if isinstance(prompt, list) and isinstance(prompt[0], list) else prompt
        )
    for update in running:
        last = update
    assert last.output.outputs[0].token_ids == greedy_tokens(model, [5, 6, 7], 10)
    assert_pool_is_whole(llm)


def test_one_bad_prompt_of_many_runs_nothing(llm: LLM) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(RequestError):
        llm.generate([[5], [6], [10_000]])
    assert llm.stats().num_steps == steps
    assert_pool_is_whole(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, str(VOCAB_SIZE)),
        ({"allowed_token_ids": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
        ({"stop_token_ids": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
        ({"n": 10**6}, "at most 128"),
        ({"stop": ["x"] * 10**4}, "at most 64"),
        ({"min_tokens": 300, "max_tokens": None}, "min_tokens"),
    ],
)
def test_sampling_parameters_beyond_the_models_limits_are_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([5], SamplingParams(**options))


def test_logprobs_above_the_cap_are_refused(directory: Path) -> None:
    with LLM(str(directory), num_pages=8) as llm:
        for value in (21, -1):
            with pytest.raises(RequestError, match="20"):
                llm.generate([5], SamplingParams(logprobs=value))
            with pytest.raises(RequestError, match="20"):
                llm.generate([5], SamplingParams(prompt_logprobs=value))


def test_logit_bias_forces_and_forbids(llm: LLM) -> None:
    (plain,) = llm.generate([5, 6], greedy(1))
    best = plain.outputs[0].token_ids[0]
    (forbidden,) = llm.generate([5, 6], greedy(4, logit_bias={best: -100}, ignore_eos=True))
    assert best not in forbidden.outputs[0].token_ids
    # The last row of the embedding belongs to no token of the tokenizer, and may be chosen all the same.
    (forced,) = llm.generate([5, 6], greedy(3, logit_bias={VOCAB_SIZE - 1: 100}))
    assert forced.outputs[0].token_ids == [VOCAB_SIZE - 1] * 3
    assert forced.outputs[0].text == ""


def test_stop_string_over_several_tokens_never_leaks_while_streaming(llm: LLM) -> None:
    prompt = [5, 6, 7, 8]
    (whole,) = llm.generate(prompt, greedy(40, ignore_eos=True))
    text = whole.outputs[0].text
    assert len(text) > 20
    stop = text[9:15]
    cut = text.index(stop)
    for include, expected in ((False, text[:cut]), (True, text[: cut + len(stop)])):
        params = greedy(
            40, ignore_eos=True, stop=["never", stop, stop + "x"], include_stop_str_in_output=include
        )
        streamed, shown = "", ""
        for update in llm.stream(prompt, params):
            streamed += update.text
            shown = update.output.outputs[0].text
            assert expected.startswith(streamed)
        assert streamed == shown == expected
        (at_once,) = llm.generate(prompt, params)
        assert at_once.outputs[0].text == expected
        assert (at_once.outputs[0].finish_reason, at_once.outputs[0].stop_reason) == ("stop", stop)
    assert_pool_is_whole(llm)


def test_text_held_back_for_a_stop_string_arrives_at_the_end(llm: LLM) -> None:
    (whole,) = llm.generate([5, 6, 7, 8], greedy(12, ignore_eos=True))
    text = whole.outputs[0].text
    (output,) = llm.generate([5, 6, 7, 8], greedy(12, ignore_eos=True, stop=text[-3:] + "never"))
    assert output.outputs[0].text == text
    assert output.outputs[0].finish_reason == "length"


def test_streams_run_together_and_equal_generate(model: Any, llm: LLM) -> None:
    prompts = [random_prompt(random.Random(seed), 5 + seed) for seed in range(6)]
    streams = [llm.stream(prompt, greedy(8, ignore_eos=True)) for prompt in prompts]
    results: list[list[int]] = [[] for _ in prompts]
    pending = list(enumerate(streams))
    while pending:
        for number, stream in list(pending):
            update = next(stream, None)
            if update is None:
                pending.remove((number, stream))
            else:
                results[number] += [token for delta in update.deltas for token in delta.token_ids]
    assert results == [greedy_tokens(model, prompt, 8) for prompt in prompts]
    assert llm.stats().num_steps > 0
    assert_pool_is_whole(llm)


def test_updates_of_several_choices_that_are_read_late_lose_nothing(llm: LLM) -> None:
    """The choices end at different steps, all of them before the stream is read."""
    (whole,) = llm.generate([5, 6, 7, 8], greedy(30, ignore_eos=True))
    stops = [whole.outputs[0].text[12:14]]
    params = SamplingParams(n=3, seed=3, max_tokens=30, ignore_eos=True, stop=stops, logit_bias={9: 2.0})
    stream = llm.stream([5, 6, 7, 8], params)
    llm.generate([[9, 9]], greedy(60, ignore_eos=True))
    texts = ["", "", ""]
    for update in stream:
        for delta in update.deltas:
            texts[delta.index] += delta.text
    assert update.finished
    assert texts == [choice.text for choice in update.output.outputs]


def test_leaving_a_stream_aborts_its_request_and_keeps_its_prefix(llm: LLM) -> None:
    prompt = random_prompt(random.Random(77), 50)
    stream = llm.stream(prompt, greedy(100, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    (output,) = llm.generate(prompt, greedy(2))
    assert output.num_cached_tokens == 48
    unstarted = llm.stream(prompt, greedy(100))
    del unstarted
    llm.generate([5], greedy(1))
    assert_pool_is_whole(llm)


def test_chat_text_and_token_ids_agree_on_the_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (chat,) = llm.chat(messages, greedy(4))
    (text,) = llm.generate(chat.prompt, greedy(4))
    (ids,) = llm.generate(chat.prompt_token_ids, greedy(4))
    assert chat.prompt_token_ids == text.prompt_token_ids == ids.prompt_token_ids
    assert tokens_of([chat]) == tokens_of([text]) == tokens_of([ids])
    many = llm.chat([messages, messages], greedy(4))
    assert tokens_of(many) == tokens_of([chat, chat])


def test_urgent_requests_finish_first(directory: Path) -> None:
    with LLM(str(directory), max_num_seqs=1, num_pages=32) as llm:
        outputs = llm.generate([[5, 6], [7, 8], [9, 10]], greedy(4, ignore_eos=True), priority=[2, 1, 0])
        finished = [output.metrics.finished_time for output in outputs]
        assert finished == sorted(finished, reverse=True)


def test_metrics_are_consistent(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], greedy(5, ignore_eos=True))
    metrics = output.metrics
    assert metrics.queue_time >= 0
    assert metrics.time_to_first_token >= metrics.queue_time
    assert metrics.time_per_output_token > 0
    assert metrics.num_generated_tokens == 5
    assert metrics.finished_time == metrics.last_token_time


def test_prompt_forms_of_vllm_are_accepted(llm: LLM) -> None:
    params = greedy(3)
    expected = tokens_of(llm.generate([[5, 6]], params))
    for prompts in (
        [5, 6],
        {"prompt_token_ids": [5, 6]},
        [{"prompt_token_ids": [5, 6]}],
        torch.tensor([5, 6]),
    ):
        assert tokens_of(llm.generate(prompts, params)) == expected
    assert llm.generate([], params) == []
    with pytest.raises(RequestError, match="2 entries for 1"):
        llm.generate([[5, 6]], [params, params])


def test_nan_logits_fail_only_their_own_request(model: Any, tmp_path: Path) -> None:
    """A checkpoint with one poisoned embedding row: requests that touch it fail, their neighbours do not."""
    poisoned = make_tiny_llama()
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[9] = float("nan")
    directory = save_tiny_llama(tmp_path / "poisoned", poisoned)
    with LLM(str(directory), num_pages=32, page_size=4) as llm:
        bad, good = llm.generate([[5, 9, 6, 7, 8, 10], [5, 6, 7]], greedy(6, ignore_eos=True))
        assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].token_ids == []
        assert tokens_of([good]) == [[greedy_tokens(model, [5, 6, 7], 6)]]
        # The failed request's pages hold NaN and are used again.
        assert_pool_is_whole(llm)
        for length in (9, 30, 60):
            prompt = random_prompt(random.Random(length), length)
            prompt = [token for token in prompt if token != 9]
            assert tokens_of(llm.generate([prompt], greedy(6, ignore_eos=True))) == [
                [greedy_tokens(model, prompt, 6)]
            ]


def test_the_pool_can_be_sized_in_bytes(directory: Path) -> None:
    sizes = []
    for num_bytes in (1 << 20, 1 << 21):
        with LLM(str(directory), kv_cache_memory_bytes=num_bytes, max_num_seqs=512) as llm:
            sizes.append(llm.stats().num_pages)
            assert len(llm.generate([[5, 6]], greedy(3))[0].outputs[0].token_ids) == 3
    assert sizes[0] > 0 and sizes[1] == 2 * sizes[0]


def test_unknown_options_and_a_closed_llm_are_errors(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_length(.|\n)*did you mean max_model_len"):
        LLM(str(directory), max_model_length=5)
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 2"):
        LLM(str(directory), max_num_batched_tokens=2, max_num_seqs=3)
    with pytest.raises(ConfigError, match="no room for the KV cache"):
        LLM(str(directory), kv_cache_memory_bytes=100)
    with pytest.raises(ConfigError, match="512, more than the model's context"):
        LLM(str(directory), max_model_len=512)
    llm = LLM(str(directory), num_pages=8)
    stream = llm.stream([5, 6], greedy(5))
    llm.close()
    llm.close()
    stream.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([[5]])


def test_dummy_weights_run_without_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text((directory / "config.json").read_text())
    runs = []
    for _ in range(2):
        with LLM(str(config), load_format="dummy", num_pages=16, seed=3) as llm:
            runs.append(tokens_of(llm.generate([[5, 6, 7]], greedy(5, ignore_eos=True))))
            with pytest.raises(RequestError, match="tokenizer"):
                llm.generate(["text"])
    assert runs[0] == runs[1]


def test_pool_formula(directory: Path) -> None:
    with LLM(
        str(directory), pool_sizing="formula", mean_sequence_len=100, max_num_seqs=4, page_size=16
    ) as llm:
        assert llm.config.num_pages == -(-4 * 100 * 3 // 2 // 16)
    with pytest.raises(ConfigError, match="mean_sequence_len"):
        LLM(str(directory), pool_sizing="formula")


def test_dynamic_rope_is_not_stretched_unless_a_longer_context_is_asked_for(tmp_path: Path) -> None:
    """Stretching depends on the longest context; transformers' answers to short prompts need it
    unstretched."""
    model = make_tiny_llama(
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    directory = save_tiny_llama(tmp_path / "dynamic", model)
    prompt = random_prompt(random.Random(8), 30)
    with LLM(str(directory), num_pages=32) as llm:
        assert llm.config.max_model_len == 64
        assert tokens_of(llm.generate([prompt], greedy(20, ignore_eos=True))) == [
            [greedy_tokens(model, prompt, 20)]
        ]
    with LLM(str(directory), num_pages=32, max_model_len=128) as llm:
        assert len(llm.generate([prompt], greedy(90, ignore_eos=True))[0].outputs[0].token_ids) == 90


@pytest.mark.parametrize("temperature", [2**63, 2**64 - 1, 10**30, 1e308])
def test_enormous_temperatures_sample_and_hurt_nobody(model: Any, llm: LLM, temperature: float) -> None:
    running = llm.stream([5, 6, 7], greedy(8, ignore_eos=True))
    next(running)
    params = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True)
    assert len(llm.generate([[5]], params)[0].outputs[0].token_ids) == 3
    for update in running:
        last = update
    assert last.output.outputs[0].token_ids == greedy_tokens(model, [5, 6, 7], 8)


def test_a_signal_waits_for_the_end_of_the_step(model: Any, llm: LLM) -> None:
    """Ctrl-C in the middle of a step is raised after it, so that neither pages nor tokens are lost."""
    stream = llm.stream([5, 6, 7], greedy(12, ignore_eos=True))
    interrupted = 0
    engine = llm._live_engine()
    commit = engine.scheduler.commit

    def interrupt_and_commit(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        commit(*arguments)

    tokens: list[int] = []
    engine.scheduler.commit = interrupt_and_commit  # type: ignore[method-assign]
    try:
        while True:
            try:
                update = next(stream)
            except KeyboardInterrupt:
                interrupted += 1
                continue
            except StopIteration:
                break
            tokens += update.deltas[0].token_ids
    finally:
        engine.scheduler.commit = commit  # type: ignore[method-assign]
    assert interrupted == 12
    assert tokens == greedy_tokens(model, [5, 6, 7], 12)
    assert_pool_is_whole(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_threads_at_once_are_told_so(llm: LLM) -> None:
    results: list[object] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait()
        try:
            for _ in range(20):
                results.append(len(llm.generate([[5, 6, 7]], greedy(20, ignore_eos=True))))
        except RequestError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    refused = [result for result in results if isinstance(result, RequestError)]
    assert len(refused) <= 1 and all("another thread" in str(error) for error in refused)
    assert_pool_is_whole(llm)


def test_a_forked_child_is_refused_instead_of_hanging(llm: LLM) -> None:
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            llm.generate([[5]], greedy(1))
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    message = os.read(read_end, 1000).decode()
    os.close(read_end)
    os.close(write_end)
    assert message.startswith("EngineDead") and "another process" in message


def test_unknown_sampling_parameters_are_request_errors() -> None:
    with pytest.raises(RequestError, match=r"max_token'(.|\n)*did you mean max_tokens"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    assert copy.deepcopy(SamplingParams(n=2)) == pickle.loads(pickle.dumps(SamplingParams(n=2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ageing_seconds": float("inf")}, "ageing_seconds is inf"),
        ({"num_pages": 10**9}, "page pool needs"),
        ({"num_pages": 10**30}, "num_pages is"),
        ({"pool_sizing": "formula", "mean_sequence_len": 10**30}, "mean_sequence_len is"),
        ({"mean_sequence_len": 100}, "mean_sequence_len"),
        ({"num_pages": 8, "kv_cache_memory_bytes": 1 << 20}, "kv_cache_memory_bytes"),
        ({"max_model_len": 1}, "max_model_len is 1"),
    ],
)
def test_impossible_or_contradictory_options_are_refused(
    directory: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(directory), **options)


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), {5, 6}, memoryview(b"ab"), {1: 2, "a": 3}])
def test_containers_without_a_meaning_as_prompts_are_refused(llm: LLM, prompt: Any) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError):
            call(prompt)
    for wrong in ({"prompt_token_ids": "abc"}, {"prompt": [5, 6]}):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(wrong)
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([[5]], "abc")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="priority"):
        llm.generate([[5]], priority="")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="role"):
        llm.chat([{}])


def test_bfloat16_decodes_do_not_depend_on_their_company(directory: Path) -> None:
    """With the fused step a row's result is the same in every batch, so seeds hold in 16 bits too."""
    pytest.importorskip("numba", reason="the fused step needs numba")
    rng = random.Random(9)
    prompt = random_prompt(rng, 20)
    params = SamplingParams(seed=5, max_tokens=40, ignore_eos=True)
    others = [random_prompt(rng, 15) for _ in range(11)]
    with LLM(str(directory), dtype="bfloat16", max_num_seqs=12, device="cpu") as llm:
        runs = [tokens_of(llm.generate([prompt, *others[:count]], params))[0] for count in (0, 3, 7, 8, 11)]
    assert all(run == runs[0] for run in runs)


def test_a_batch_that_exceeds_the_queue_leaves_nothing_behind(directory: Path) -> None:
    with LLM(str(directory), max_num_seqs=1, max_queue_len=2, num_pages=16) as llm:
        with pytest.raises(CapacityError, match="max_queue_len"):
            llm.generate([[5], [6], [7], [8]], greedy(2))
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert len(llm.generate([[5], [6], [7]], greedy(2))) == 3
