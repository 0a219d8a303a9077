"""The fused decode step against the plain path and against transformers, and what it promises beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.oracle import all_logits
from tests.helpers.tiny_models import save_tiny_llama
from tests.models.reference import PagedDecoder, PagedSequence, make_llama, spec_of, weights_of
from tiny_vllm import LLM, ConfigError, SamplingParams
from tiny_vllm.config import choose_fused_cpu_decode
from tiny_vllm.kernels.cpu_decode import MAX_ROWS, has_numba
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import ModelWeights

pytest.importorskip("numba", reason="the fused step needs numba")

# FP32 dots of up to 200 terms in another order, two layers deep, logits of size 10: see test_decoder.
TOLERANCE = 1e-4

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": dict(num_key_value_heads=4),
    "mqa": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "odd_sizes": dict(
        hidden_size=60, intermediate_size=37, num_attention_heads=6, head_dim=10, attention_bias=True
    ),
    "head_dim_beyond_hidden": dict(head_dim=40),
    "one_layer": dict(num_hidden_layers=1),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_tokens(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(101, (length,), generator=generator).tolist()


def paged_decoder(spec: ModelSpec, weights: ModelWeights, *, fused: bool, **options: Any) -> PagedDecoder:
    """fused: decodes must take the fused step."""
    max_model_len = options.get("max_model_len", 256)
    paged = PagedDecoder(spec, replace(weights, layers=list(weights.layers)), **options)
    paged.decoder = Decoder(spec, weights, max_model_len=max_model_len, fused_cpu_decode=fused)
    return paged


def run_decodes(paged: PagedDecoder, lens: list[int], num_steps: int) -> list[Tensor]:
    """Prefill sequences of these lengths, then decode known tokens together: logits of every step."""
    tokens = [random_tokens(length + num_steps, seed=length) for length in lens]
    sequences = [paged.add(ids, max_len=len(ids)) for ids in tokens]
    prefill(paged, sequences, lens)
    return [torch.cat(paged.step(sequences, [])) for _ in range(num_steps)]


def prefill(paged: PagedDecoder, sequences: list[PagedSequence], lens: list[int]) -> None:
    chunks = [(sequence, length) for sequence, length in zip(sequences, lens, strict=True) if length]
    if chunks:
        paged.step([], chunks)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str) -> None:
    model = make_llama(**VARIANTS[variant])
    paged = paged_decoder(
        spec_of(model.config), weights_of(model), fused=True, page_size=4, poison=float("nan")
    )
    lens = [0, 3, 4, 97][:MAX_ROWS]
    steps = torch.stack(run_decodes(paged, lens, 6), 1)
    for length, logits in zip(lens, steps, strict=True):
        assert_close(logits, all_logits(model, random_tokens(length + 6, seed=length))[length:])


@pytest.mark.parametrize("page_size", [1, 8, 64])
@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
def test_every_number_of_rows_and_page_size_equals_the_plain_path(page_size: int, num_rows: int) -> None:
    model = make_llama()
    lens = [63, 1, 150, 64, 7, 65, 128, 30][:num_rows]
    results = []
    for fused in (True, False):
        paged = paged_decoder(
            spec_of(model.config), weights_of(model), fused=fused, page_size=page_size,
            num_pages=1 + 2000 // page_size, poison=float("nan"),
        )  # fmt: skip
        results.append(torch.stack(run_decodes(paged, lens, 3)))
    assert_close(*results)


def test_rotation_of_a_part_of_each_head_equals_the_plain_path() -> None:
    model = make_llama()
    spec = spec_of(model.config)
    spec = replace(spec, rope=replace(spec.rope, rotary_dim=spec.head_dim // 2))
    results = [
        torch.stack(run_decodes(paged_decoder(spec, weights_of(model), fused=fused, page_size=8), [20, 3], 4))
        for fused in (True, False)
    ]
    assert_close(*results)


def test_long_contexts_of_many_chunks_equal_the_plain_path() -> None:
    model = make_llama(max_position_embeddings=4096)
    results = [
        torch.stack(
            run_decodes(
                paged_decoder(
                    spec_of(model.config), weights_of(model), fused=fused, page_size=16, max_model_len=4096
                ),
                [2300, 5],
                2,
            )
        )
        for fused in (True, False)
    ]
    assert_close(*results)


def test_results_have_the_same_bits_every_time_and_whatever_runs_beside_them() -> None:
    model = make_llama().to(torch.bfloat16)
    paged = paged_decoder(
        spec_of(model.config), weights_of(model), fused=True, page_size=8, dtype=torch.bfloat16
    )
    lens = [70, 5, 33, 1, 12, 100, 64, 9][:MAX_ROWS]
    sequences = [paged.add(random_tokens(n + 1, seed=n), max_len=n + 1) for n in lens]
    prefill(paged, sequences, lens)

    def decode(batch: list[PagedSequence]) -> list[Tensor]:
        for sequence in batch:
            sequence.computed_len = len(sequence.token_ids) - 1
        return paged.step(batch, [])

    expected = [decode([sequence])[0] for sequence in sequences]
    for _ in range(100):
        assert torch.equal(decode(sequences[:1])[0], expected[0])
    for count in range(2, MAX_ROWS + 1):
        for logits, alone in zip(decode(sequences[:count][::-1]), expected[:count][::-1], strict=True):
            assert torch.equal(logits, alone)


def test_the_number_of_threads_does_not_change_bits() -> None:
    model = make_llama()
    paged = paged_decoder(spec_of(model.config), weights_of(model), fused=True, page_size=8)
    results = []
    for num_threads in (1, 2, 3, 5):
        torch.set_num_threads(num_threads)
        results.append(torch.stack(run_decodes(paged, [70, 5], 3)))
    assert all(torch.equal(result, results[0]) for result in results)


def test_bfloat16_follows_float32_within_its_rounding() -> None:
    model = make_llama(initializer_range=0.1).to(torch.bfloat16)
    tokens = random_tokens(80, seed=50)
    exact = all_logits(model.float(), tokens)[50:]
    theirs = all_logits(model.to(torch.bfloat16), tokens)[50:]
    paged = paged_decoder(
        spec_of(model.config), weights_of(model), fused=True, page_size=16, dtype=torch.bfloat16,
        poison=float("nan"),
    )  # fmt: skip
    ours = torch.cat(run_decodes(paged, [50], 30))
    # Fewer roundings than transformers' own BF16, so not worse than it but for chance.
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def test_nan_in_one_sequence_stays_there() -> None:
    model = make_llama()
    paged = paged_decoder(spec_of(model.config), weights_of(model), fused=True, page_size=8)
    lens = [20, 11]
    sequences = [paged.add(random_tokens(n + 1, seed=n), max_len=n + 1) for n in lens]
    prefill(paged, sequences, lens)
    paged.kv_cache.k[:, sequences[0].pages[0]] = float("nan")
    broken, whole = paged.step(sequences, [])
    assert broken.isnan().all()
    assert_close(whole, all_logits(model, sequences[1].token_ids)[-1:])


def test_indices_beyond_the_arrays_are_refused() -> None:
    model = make_llama()
    paged = paged_decoder(spec_of(model.config), weights_of(model), fused=True, page_size=8, num_pages=9)
    for token, page in ((10**6, 1), (-1, 1), (5, 9), (5, -1)):
        with pytest.raises(RuntimeError, match="decode step failed"):
            paged.step([PagedSequence([token], [page])], [])
    sequence = PagedSequence([5], [1])
    assert_close(paged.step([sequence], [])[0], all_logits(model, [5]))


def test_the_engine_writes_the_same_tokens_with_and_without(tmp_path: Path) -> None:
    directory = save_tiny_llama(tmp_path, make_llama(vocab_size=330))
    prompts = [random_tokens(length, seed=length) for length in (3, 17, 40)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    results = []
    for fused in (True, False):
        with LLM(str(directory), fused_cpu_decode=fused, num_pages=64, max_num_seqs=4) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]


def choose(asked: bool | None = None, **changes: Any) -> Any:
    facts: dict[str, Any] = dict(
        device="cpu",
        dtype="bfloat16",
        fits_family=True,
        has_numba=True,
        copied_bytes=100,
        available_bytes=400,
        left_bytes=100,
    )
    return choose_fused_cpu_decode(asked, **{**facts, **changes})


def test_the_second_copy_is_kept_when_a_quarter_of_the_memory_holds_it() -> None:
    assert choose().value is True
    assert choose(available_bytes=396).value is False
    assert choose(True, available_bytes=0, left_bytes=-5).value is True
    assert choose(False).value is False


def test_weights_a_step_and_the_pages_wanted_come_before_the_second_copy() -> None:
    choice = choose(left_bytes=99)
    assert choice.value is False
    assert choice.reason.endswith("more than the 0.00 GiB that weights, steps and pages leave")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(device="cuda"), "cuda"),
        (dict(dtype="float16"), "float16"),
        (dict(fits_family=False), "does not compute this family"),
        (dict(has_numba=False), "numba is not installed"),
        (dict(kv_cache_dtype="fp8"), "does not read a KV cache in fp8"),
    ],
)
def test_where_it_cannot_run_it_is_off_and_demanding_it_an_error(
    changes: dict[str, Any], message: str
) -> None:
    choice = choose(**changes)
    assert choice.value is False and message in choice.reason
    with pytest.raises(ConfigError, match=message):
        choose(True, **changes)


def test_has_numba_tells_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_numba()
    monkeypatch.setattr("tiny_vllm.kernels.cpu_decode.find_spec", lambda name: None)
    assert not has_numba()
