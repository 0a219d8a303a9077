"""Pages, prefixes, preemption and the queue, on a real model: what happens to a request changes no token."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers.engines import FakeEngine
from tests.helpers.oracle import greedy_tokens
from tests.scenarios.conftest import Served, Tiny
from tests.serving.support import sent
from tiny_vllm import LLM, SamplingParams


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **options)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, 320) for _ in range(length)]


def assert_pool_is_whole(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_s35_prompts_at_page_edges_sent_three_times(tiny: Tiny, page_size: int) -> None:
    """Between the repeats others extend the shared pages, which must not change them."""
    rng = random.Random(page_size)
    lengths = [max(page_size - 1, 1), page_size, page_size + 1, 2 * page_size]
    prompts = [random_prompt(rng, length) for length in lengths]
    expected = [tiny.greedy(prompt, 6) for prompt in prompts]
    with LLM(
        str(tiny.directory), page_size=page_size, num_pages=max(1024 // page_size, 12), max_num_seqs=4
    ) as llm:
        for repeat in range(3):
            outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            cached = [output.num_cached_tokens for output in outputs]
            if repeat:
                assert cached == [(length - 1) // page_size * page_size for length in lengths]
                assert all(count < length for count, length in zip(cached, lengths, strict=True))
            others = [[*prompt, 300 + repeat] for prompt in prompts]
            llm.generate(others, SamplingParams(seed=repeat, max_tokens=5), use_tqdm=False)
        assert_pool_is_whole(llm)


@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_s36_a_prefix_longer_than_a_chunk_is_shared_in_one_batch(tiny: Tiny, policy: Any) -> None:
    rng = random.Random(1)
    prefix = random_prompt(rng, 70)
    prompts = [[*prefix, 5], [*prefix, 6], prefix, [*prefix[:40], 7]]
    expected = [tiny.greedy(prompt, 8) for prompt in prompts]
    with LLM(
        str(tiny.directory), num_pages=64, max_num_seqs=4, max_num_batched_tokens=9, prefill_policy=policy
    ) as llm:
        outputs = llm.generate(prompts, greedy(8), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [0, 64, 64, 32]
        assert_pool_is_whole(llm)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_s37_streams_under_preemption_say_every_token_once(tiny: Tiny, n: int, caching: bool) -> None:
    """34 prompt tokens with a common prefix, 35 new ones, and a pool a page short of what all need."""
    rng = random.Random(2)
    prefix = random_prompt(rng, 32)
    prompts = [[*prefix, 10 + number, 5] for number in range(4 // n)]
    page_size = 4
    own = -(-(34 + 35 - 1) // page_size) - 32 // page_size  # the last token needs no cell
    shared = 32 // page_size if caching else 32 // page_size * len(prompts)
    num_pages = shared + 4 * own - 1
    sampling = [{"seed": 3, "temperature": 1.0}, {"temperature": 0}]
    params = [SamplingParams(max_tokens=35, ignore_eos=True, n=n, **sampling[i % 2]) for i in range(4 // n)]

    def run(num_pages: int) -> tuple[list[Any], int]:
        with LLM(
            str(tiny.directory),
            page_size=page_size,
            num_pages=num_pages,
            max_num_seqs=4,
            enable_prefix_caching=caching,
        ) as llm:
            streams = [llm.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
            results = []
            for stream in streams:
                token_ids: list[list[int]] = [[] for _ in range(n)]
                texts = [""] * n
                for update in stream:
                    for delta in update.deltas:
                        token_ids[delta.index] += delta.token_ids
                        texts[delta.index] += delta.text
                for choice in update.output.outputs:
                    assert token_ids[choice.index] == choice.token_ids and texts[choice.index] == choice.text
                results.append(token_ids)
            assert_pool_is_whole(llm)
            return results, llm.stats().num_preemptions

    free, none = run(400)
    pressed, some = run(num_pages)
    assert none == 0 and some > 0
    assert pressed == free
    assert all(len(choice) == 35 for request in pressed for choice in request)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_s38_what_can_never_fit_is_refused_and_what_outgrows_the_pool_ends(
    server: Served, is_streamed: bool
) -> None:
    """The pool holds 1600 tokens, the context 2048."""
    with ThreadPoolExecutor(4) as pool:
        growing = pool.submit(
            server.complete, [11] * 1590, max_tokens=400, ignore_eos=True, stream=is_streamed
        )
        refused = server.complete([12] * 1601, max_tokens=1, stream=is_streamed)
        assert refused.status == 400
        assert "1601 tokens" in refused.error["message"] and "1600" in refused.error["message"]
        good = [pool.submit(server.complete, [13 + i] * 9, max_tokens=4) for i in range(3)]
        assert all(answer.result().status == 200 for answer in good)
        answer = growing.result()
    assert answer.status == 200
    last = answer.events()[-1] if is_streamed else answer.json()
    assert last["choices"][0]["finish_reason"] == "length"
    if not is_streamed:
        assert 1 <= last["usage"]["completion_tokens"] <= 11
    server.assert_alive_and_right()


def test_s38_the_largest_prompt_that_fits_runs_with_every_number_of_choices(tiny: Tiny) -> None:
    with LLM(str(tiny.directory), num_pages=5, max_num_seqs=4) as llm:
        for length, n in ((80, 1), (79, 1), (80, 3), (65, 4)):
            (output,) = llm.generate([[9] * length], greedy(30, n=n), use_tqdm=False)
            expected = tiny.greedy([9] * length, 80 - length + 1)
            for choice in output.outputs:
                assert choice.finish_reason == "length"
                assert choice.token_ids == expected[: len(choice.token_ids)]
                assert len(choice.token_ids) >= 1
            assert max(len(choice.token_ids) for choice in output.outputs) == len(expected)
        assert_pool_is_whole(llm)


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize("policy", ["exclusive", "mixed"])
def test_s39_urgent_work_under_pressure(policy: str, num_steps_ahead: int) -> None:
    """Urgent ones first, equals by arrival, nobody twice in a step, the same tokens in the end."""
    fake = FakeEngine(
        num_pages=30,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        prefill_policy=policy,
        num_steps_ahead=num_steps_ahead,
    )
    for number in range(3):
        fake.add(f"patient {number}", [number + 1] * 20, priority=5, max_tokens=40)
    for _ in range(12):
        fake.step()
    for number in range(4):
        fake.add(f"urgent {number}", [number + 10] * 30, priority=0, max_tokens=5)
        fake.clock.now += 0.001
    finished: list[str] = []
    while fake.engine.has_work:
        running = {status.slot: status.state for status in fake.engine.slots()}
        before = len(fake.executor.plans)
        finished += [event.request_id for event in fake.step() if event.finish_reason]
        for plan in fake.executor.plans[before:]:
            slots = [*plan.decode_slots, *(chunk.slot for chunk in plan.chunks)]
            assert len(set(slots)) == len(slots), "a slot twice in a step"
            ids = [*plan.decode_sequence_ids, *(chunk.sequence_id for chunk in plan.chunks)]
            assert len(set(ids)) == len(ids), "a sequence twice in a step"
        assert len(running) <= 3
    assert fake.engine.stats().num_preemptions > 0
    urgent = [name for name in finished if name.startswith("urgent")]
    assert finished[: len(urgent)] == urgent == [f"urgent {number}" for number in range(4)]
    for name in fake.requests:
        fake.assert_correct(name)


@pytest.mark.parametrize("seed", range(2))
def test_s40_random_load_of_a_random_page_size_equals_solo_runs(tiny: Tiny, seed: int) -> None:
    """Shared prefixes, aborts, choices, priorities and a tiny pool; every finished output is the solo one."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8, 16])
    prefixes = [random_prompt(rng, 40) for _ in range(3)]
    work = []
    for _ in range(40):
        prompt = rng.choice(prefixes)[: rng.randrange(41)] + random_prompt(rng, rng.randrange(1, 6))
        work.append((prompt, rng.randrange(1, 14), rng.choice([1, 1, 1, 3]), rng.randrange(3)))
    with LLM(str(tiny.directory), page_size=page_size, num_pages=160 // page_size, max_num_seqs=5) as llm:
        streams: list[Any] = []
        finished: dict[int, Any] = {}
        for number, (prompt, count, n, priority) in enumerate(work):
            streams.append((number, llm.stream(prompt, greedy(count, n=n), priority=priority)))
            while len(streams) > 8:
                place = rng.randrange(len(streams))
                chosen, stream = streams[place]
                if rng.random() < 0.02:
                    stream.close()
                update = next(stream, None)
                if update is None or update.finished:
                    del streams[place]
                    if update is not None:
                        finished[chosen] = update.output
        for chosen, stream in streams:
            for update in stream:
                finished[chosen] = update.output
        assert llm.stats().num_preemptions > 0 and llm.stats().prefix_hit_tokens > 0
        llm.generate([[5]], greedy(1), use_tqdm=False)  # what was closed last is aborted before a step
        assert_pool_is_whole(llm)
    assert len(finished) > 20
    for number, output in finished.items():
        prompt, count, n, _ = work[number]
        assert [choice.token_ids for choice in output.outputs] == [tiny.greedy(prompt, count)] * n


def test_s40_random_calls_over_http_equal_solo_runs(server: Served) -> None:
    """Streamed and whole, choices, priorities, stop tokens, bad requests and clients that leave."""
    rng = random.Random(7)
    prefixes = [random_prompt(rng, 40) for _ in range(3)]

    def one(number: int) -> None:
        own = random.Random(number)
        prompt = own.choice(prefixes)[: own.randrange(41)] + random_prompt(own, own.randrange(1, 6))
        count, n, stream = own.randrange(1, 10), own.choice([1, 1, 3]), own.random() < 0.5
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": count,
            "n": n,
            "temperature": 0,
            "ignore_eos": True,
            "priority": own.randrange(3),
            "stop_token_ids": own.sample(range(384), own.choice([0, 30])),
            "stream": stream,
            "return_token_ids": True,
        }
        match own.randrange(8):
            case 0:
                assert server.complete([*prompt, 384], stream=stream).status == 400
            case 1:
                with sent(server, {**body, "max_tokens": 300}):
                    time.sleep(own.random() * 0.05)
            case _:
                answer = server.post("/v1/completions", body)
                assert answer.status == 200, answer.data
                token_ids: list[list[int]] = [[] for _ in range(n)]
                for part in answer.events() if stream else [answer.json()]:
                    for choice in part["choices"]:
                        token_ids[choice["index"]] += choice["token_ids"]
                expected = greedy_tokens(server.tiny.model, prompt, count, body["stop_token_ids"])
                assert token_ids == [expected] * n

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(one, number) for number in range(80)]:
            future.result()
    server.assert_alive_and_right()
