"""The Hopper kernel of prefill attention without a GPU: emulated, and as the compiler leaves it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cubin import resource_usage
from tests.helpers.hopper_prefill import attend_emulated, missing_compiler
from tests.helpers.kernel_compiler import meta, missing_tools
from tests.kernels import test_prefill_attention as reference
from tests.kernels.test_prefill_attention import make_case
from tiny_vllm.kernels import prefill_attention
from tiny_vllm.kernels.cuda.errors import CompileError
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.hopper_prefill import launch
from tiny_vllm.kernels.hopper_prefill.launch import (
    BLOCK_N,
    REGISTERS,
    SMALL_VARIANTS,
    VARIANTS,
    Shape,
    Variant,
    attend,
    choose_variant,
    macros,
    obstacle,
    shared_bytes,
    source,
)

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))

# Of the largest value: weights and the result are rounded once each.
TOLERANCES = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHARED_LIMIT = 232448  # bytes a block of an H200 can have
# (chunk_len, context_len) of each sequence, num_heads, num_kv_heads, head_dim, page_size
CASES = {
    "llama_1b": ([(40, 40), (17, 300), (1, 33), (150, 450)], 8, 2, 64, 16),
    "llama_8b": ([(130, 290), (1, 1), (5, 700)], 8, 2, 128, 16),
    "one_group_large_pages": ([(200, 200), (64, 128), (3, 70)], 2, 2, 64, 64),
    "group_8": ([(33, 260), (20, 20)], 8, 1, 128, 32),
    "group_7": ([(60, 200), (3, 5)], 14, 2, 64, 16),
    "many_sequences": ([(index % 9 + 1, index + 10) for index in range(70)], 4, 1, 64, 16),
    "a_thousand_sequences": ([(index % 3 + 1, index % 7 + 3) for index in range(1100)], 4, 1, 64, 16),
}
EVERYTHING = dict(window=70, sinks=True)
SMALL = SMALL_VARIANTS[64]
RUNS = {
    "llama_1b": ("llama_1b", VARIANTS[64], {}, torch.bfloat16),
    "llama_8b": ("llama_8b", VARIANTS[128], {}, torch.bfloat16),
    "many_sequences": ("many_sequences", VARIANTS[64], dict(sinks=True), torch.bfloat16),
    "window_and_sinks": ("llama_1b", VARIANTS[64], EVERYTHING, torch.bfloat16),
    "half": ("one_group_large_pages", VARIANTS[64], {}, torch.float16),
}
SLOW_RUNS = {
    "group_1": ("one_group_large_pages", VARIANTS[64], {}, torch.bfloat16),
    "group_7": ("group_7", VARIANTS[64], {}, torch.bfloat16),
    "group_7_sinks_half": ("group_7", VARIANTS[64], dict(sinks=True), torch.float16),
    "group_8": ("group_8", VARIANTS[128], dict(window=1), torch.bfloat16),
    "heads_of_128_half": ("llama_8b", VARIANTS[128], {}, torch.float16),
    "heads_of_128_window_and_sinks": ("llama_8b", VARIANTS[128], EVERYTHING, torch.float16),
    "large_window": ("llama_8b", VARIANTS[128], dict(window=400), torch.bfloat16),
    "small": ("llama_1b", SMALL, {}, torch.bfloat16),
    "small_window_and_sinks": ("llama_1b", SMALL, EVERYTHING, torch.float16),
    "three_stages": ("llama_1b", Variant(warpgroups=2, stages=3), {}, torch.bfloat16),
    "two_stages": ("llama_1b", Variant(warpgroups=3, stages=2), {}, torch.bfloat16),
    "a_thousand_sequences": ("a_thousand_sequences", SMALL, {}, torch.bfloat16),
}


@pytest.fixture(autouse=True)
def more_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, case in CASES.items():
        monkeypatch.setitem(reference.CASES, name, case)


def check(
    case: str,
    variant: Variant,
    options: dict[str, Any],
    dtype: torch.dtype,
    *,
    seeds: range = range(3),
    mistake: tuple[str, str] | None = None,
) -> None:
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = 2 * torch.randn(CASES[case][1])
    q, k_cache, v_cache, tables, expected = make_case(case, dtype, float("nan"), **options)
    atol = TOLERANCES[dtype] * float(v_cache[v_cache.isfinite()].abs().max())
    for seed in seeds:
        # Fewer blocks than tiles, another number each time.
        actual = attend_emulated(
            q, k_cache, v_cache, *tables, q.shape[-1] ** -0.5, variant=variant, blocks=2 + seed, seed=seed,
            mistake=mistake, **options,
        )  # fmt: skip
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


@needs_compiler
@pytest.mark.parametrize("run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)])
def test_the_emulated_kernel_is_causal_over_the_own_context(run: str) -> None:
    check(*(RUNS | SLOW_RUNS)[run])


@needs_compiler
def test_tables_of_32_bits() -> None:
    q, k_cache, v_cache, tables, expected = make_case("group_8", torch.bfloat16, float("nan"))
    actual = attend_emulated(
        q, k_cache, v_cache, *(table.int() for table in tables), 128**-0.5, variant=VARIANTS[128]
    )
    atol = TOLERANCES[torch.bfloat16] * float(v_cache[v_cache.isfinite()].abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


@needs_compiler
@pytest.mark.parametrize("padding", [3, 40], ids=["few", "more_than_lanes"])
def test_chunks_without_tokens_and_rows_of_no_chunk_change_nothing(padding: int) -> None:
    """As graphs of small steps pad them: behind the others, with a context of one token on the null page."""
    q, k_cache, v_cache, (table, starts, lens), expected = make_case("llama_1b", torch.bfloat16, float("nan"))
    k_cache[0] = v_cache[0] = 1e30
    table = torch.cat((table, table.new_zeros(padding, table.shape[1])))
    starts = torch.cat((starts, starts[-1:].expand(padding)))
    lens = torch.cat((lens, lens.new_ones(padding)))
    padded = torch.cat((q, torch.full_like(q[:100], torch.nan)))
    # Also with more blocks than tiles.
    for blocks in (3, 20):
        actual = attend_emulated(
            padded, k_cache, v_cache, table, starts, lens, 64**-0.5, variant=SMALL, blocks=blocks
        )
        atol = TOLERANCES[torch.bfloat16] * float(v_cache[1:][v_cache[1:].isfinite()].abs().max())
        torch.testing.assert_close(actual[: len(q)].double(), expected, rtol=0, atol=atol)
        assert actual[len(q) :].isnan().all(), "rows of no chunk stay as they are"


def check_rising(
    case: str, variant: Variant, dtype: torch.dtype, mistake: tuple[str, str] | None = None
) -> None:
    """Scores rise with the position, by more than an exponent of FP32 holds."""
    q, k_cache, v_cache, tables, _ = make_case(case, dtype, float("nan"))
    for column in range(tables[0].shape[1]):
        k_cache[tables[0][:, column]] *= 1 + column / 2
    scale = 2.0
    expected = prefill_attention.prefill_attention_ref(
        q.float(), k_cache.float(), v_cache.float(), *tables, scale
    )
    actual = attend_emulated(q, k_cache, v_cache, *tables, scale, variant=variant, mistake=mistake)
    atol = TOLERANCES[dtype] * float(v_cache[v_cache.isfinite()].abs().max())
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=atol)


@needs_compiler
@pytest.mark.parametrize(
    ("case", "variant", "dtype"),
    [
        ("llama_1b", VARIANTS[64], torch.bfloat16),
        pytest.param("llama_1b", SMALL, torch.float16, marks=pytest.mark.slow),
        pytest.param("llama_8b", VARIANTS[128], torch.float16, marks=pytest.mark.slow),
    ],
)
def test_a_maximum_that_lags_behind_is_noticed(case: str, variant: Variant, dtype: torch.dtype) -> None:
    check_rising(case, variant, dtype)


@needs_compiler
@pytest.mark.parametrize(
    "mistake",
    [
        ("if (votes(max(totals[0], totals[1]) > HIGHEST_WEIGHT))", "if (votes(false))"),
        pytest.param(
            ("      shrink_output(output, rows);\n      pack", "      pack"), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            ("      pack_weights(scores, weights);\n    } else", "    } else"), marks=pytest.mark.exhaustive
        ),
        pytest.param(("(column ^ row % 8 * 16)", "column"), marks=pytest.mark.exhaustive),
        pytest.param(
            ("    products_wait<0>();\n    hold(output), hold(weights), hold(scores);\n"
             "    release(shared.v_empty(v.stage));\n    // Read only",
             "    release(shared.v_empty(v.stage));\n    // Read only"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["not_noticed", "old_outputs_stay", "old_weights_stay", "pieces_are_not_permuted", "early_weights"],
)  # fmt: skip
def test_the_emulation_notices_mistakes_with_lagging_maxima(mistake: tuple[str, str]) -> None:
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_rising("llama_1b", SMALL, torch.bfloat16, mistake)


@needs_compiler
@pytest.mark.parametrize(
    "mistake",
    [
        ("    if (end != 0) wait(shared.k_full(k.stage), k.parity);\n", ""),
        pytest.param(("if (is_masked(tile.begin))", "if (false)"), marks=pytest.mark.exhaustive),
        pytest.param(
            ("    const KeyPlace k(done);\n    wait(shared.q_full(q.stage), q.parity);\n",
             "    const KeyPlace k(done);\n"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("products_wait<1>();\n    hold(output)", "products_wait<2>();\n    hold(output)"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("j < tile.end; ++j) pass_over();", "false;) pass_over();"), marks=pytest.mark.exhaustive
        ),
        pytest.param(("own_end = last_position", "own_end = first_position"), marks=pytest.mark.exhaustive),
    ],
    ids=["early_keys", "no_masks", "early_queries", "early_outputs", "stages_stay", "an_early_end"],
)  # fmt: skip
def test_the_emulation_notices_mistakes_between_joined_tiles(mistake: tuple[str, str]) -> None:
    with pytest.raises((RuntimeError, AssertionError), match=r"deadlock|barrier|Tensor-likes are not close"):
        check("llama_1b", SMALL, {}, torch.bfloat16, mistake=mistake)


MISTAKES = {
    "no_fence": ("  fence_shared();\n  named_sync", "  named_sync"),
    "keys_are_read_before_they_come": (
        "    wait(shared.k_full(k.stage), k.parity);\n    take_turn();",
        "    take_turn();",
    ),
}
MORE_MISTAKES = {
    "scores_are_read_before_they_come": ("    products_wait<1>();\n    hold(scores)", "    hold(scores)"),
    "values_behind_the_context_stay": ("if (left < BLOCK_N)", "if (left < 0)"),
    "a_stage_is_reused_early": (
        "    wait(KEYS ? shared.k_empty(place.stage) : shared.v_empty(place.stage), place.parity ^ 1);\n",
        "",
    ),
    "a_tile_is_replaced_early": ("      wait(shared.q_empty(q.stage), q.parity ^ 1);\n", ""),
    "a_stage_is_never_free": ("    release(shared.v_empty(v.stage));\n    // Read only", "    // Read only"),
    "a_token_is_left": ("    if (warpgroup == 0) take_turn();", ""),
    "nobody_begins": ("    if (warpgroup == WARPGROUPS - 1) pass_turn();", ""),
    "masks_begin_late": ("(j + 1) * BLOCK_N > first_position + 1", "(j + 1) * BLOCK_N > first_position + 40"),
    "no_barrier_behind_the_zeros": ("  named_sync(OWN + warpgroup, 128);", ""),
}
# In steps that look for the maximum first.
WINDOWED_MISTAKES = {
    "weights_change_under_a_product": (
        "    products_wait<0>();\n    hold(output), hold(weights), hold(scores);\n"
        "    release(shared.v_empty(v.stage));\n    shrink",
        "    release(shared.v_empty(v.stage));\n    shrink",
    ),
    "a_stage_is_never_free": ("    release(shared.v_empty(v.stage));\n    shrink", "    shrink"),
    "old_outputs_stay": ("    shrink_output(output, rows);\n    pack", "    pack"),
    "no_maximum_is_none": ("if (WINDOWED && highest == NEG_INF) base = 0;", ""),
}
TWO_STAGES = Variant(warpgroups=2, stages=2)


@needs_compiler
@pytest.mark.parametrize(
    "name", [*MISTAKES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_MISTAKES)]
)
def test_the_emulation_notices_mistakes(name: str) -> None:
    mistake = (MISTAKES | MORE_MISTAKES)[name]
    with pytest.raises((RuntimeError, AssertionError), match=r"deadlock|barrier|Tensor-likes are not close"):
        check("llama_1b", TWO_STAGES, {}, torch.bfloat16, mistake=mistake)


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WINDOWED_MISTAKES)
def test_the_emulation_notices_mistakes_with_windows(name: str) -> None:
    options, mistake = dict(window=200), WINDOWED_MISTAKES[name]
    with pytest.raises((RuntimeError, AssertionError), match=r"deadlock|barrier|Tensor-likes are not close"):
        check("llama_1b", TWO_STAGES, options, torch.bfloat16, mistake=mistake)


def shape(head_dim: int, **changes: Any) -> Shape:
    fields = dict(
        head_dim=head_dim, group=4, num_kv_heads=8, page_size=16, dtype=torch.bfloat16, is_windowed=False,
        has_sinks=False, table=torch.int64, starts=torch.int64, lens=torch.int64,
    )  # fmt: skip
    return Shape(**(fields | changes))


COMPILED = {
    "heads_of_64": (shape(64), VARIANTS[64]),
    "heads_of_64_half_sinks": (shape(64, dtype=torch.float16, has_sinks=True), VARIANTS[64]),
    "heads_of_64_windows": (shape(64, is_windowed=True), VARIANTS[64]),
    "heads_of_64_everything": (
        shape(64, is_windowed=True, has_sinks=True, dtype=torch.float16, group=8),
        VARIANTS[64],
    ),
    "few_tokens": (shape(64), SMALL),
    "few_tokens_windows": (shape(64, is_windowed=True), SMALL),
    "heads_of_128": (shape(128), VARIANTS[128]),
    "heads_of_128_windows": (shape(128, is_windowed=True, has_sinks=True), VARIANTS[128]),
}


def touched_under_way(text: str) -> Iterator[str]:
    """Instructions that use a register which a product under way may still read or write.

    Waits come before every jump back, so the order of the text is enough.
    """
    groups: list[set[int]] = []
    current: set[int] = set()
    for instruction in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", text):
        registers = [int(number) for number in re.findall(r"\bR(\d+)", instruction)]
        if product := re.search(r"HGMMA\.64x(\d+)x16", instruction):
            current |= set(range(registers[0], registers[0] + int(product[1]) // 2))
            if left := re.search(r" R\d+, R(\d+), gdesc", instruction):
                current |= set(range(int(left[1]), int(left[1]) + 4))
            if "gsb0" in instruction:
                groups.append(current)
                current = set()
        elif wait := re.search(r"DEPBAR\.LE gsb0, 0x(\d)", instruction):
            groups = groups[len(groups) - int(wait[1]) :]
        elif current.union(*groups) & set(registers):
            yield instruction


def check_machine_code(own: Shape, variant: Variant, folder: Path) -> str:
    """The instructions; nothing of them spills or touches what a product may still use."""
    import triton

    cubin = compile_cubin(source(), name="prefill", defines=macros(own, variant))
    (usage,) = resource_usage(cubin).values()
    assert usage.stack_bytes == 0
    # What a block starts with is enough for what its warpgroups claim.
    producer, consumer = REGISTERS[variant.warpgroups]
    assert producer + variant.warpgroups * consumer <= usage.registers * (variant.warpgroups + 1)

    (folder / "cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", folder / "cubin"], capture_output=True, text=True, check=True).stdout
    assert not list(touched_under_way(text))
    # Serialised products would each have a wait of their own.
    order = re.findall(r"HGMMA|DEPBAR\.LE gsb0, 0x\d|MUFU\.EX2", text)
    waits = [index for index, word in enumerate(order) if word.startswith("DEPBAR")]
    # A tile's first scores, steps with and without masks, the last output beside the next scores, no tile.
    assert [order[index][-1] for index in waits] == ["0", "1", "0", "1", "0", "1", "0"]
    # Without a window, half of them.
    weights = BLOCK_N // 2 if own.is_windowed else BLOCK_N // 4
    for first, second in ((waits[1], waits[2]), (waits[3], waits[4])):
        between = order[first + 1 : second]
        assert between.count("MUFU.EX2") >= weights and "HGMMA" not in between
    return text


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.parametrize("name", COMPILED)
def test_products_run_beside_the_exponents_and_nothing_spills(name: str, tmp_path: Path) -> None:
    text = check_machine_code(*COMPILED[name], tmp_path)
    assert "E4M3" not in text


def test_few_tokens_get_smaller_tiles() -> None:
    def rows(head_dim: int, num_tokens: int, num_sequences: int) -> int:
        return 64 * choose_variant(head_dim, num_tokens, num_sequences, 4, 8, 132).warpgroups

    # 11 and 17 tiles for each of 8 KV heads
    assert (rows(64, 512, 1), rows(64, 768, 1), rows(64, 512, 16)) == (128, 192, 192)
    assert rows(128, 512, 1) == rows(128, 8192, 1) == 128


@pytest.mark.parametrize("head_dim", VARIANTS)
def test_a_block_fits_into_a_multiprocessor(head_dim: int) -> None:
    variant = VARIANTS[head_dim]
    for is_fp8 in (False, True):
        assert shared_bytes(shape(head_dim, is_fp8=is_fp8), variant) <= SHARED_LIMIT
    producer, consumer = REGISTERS[variant.warpgroups]
    assert 128 * (producer + variant.warpgroups * consumer) <= 65536


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(head_dim=80), "the head size 80"),
        (dict(page_size=8), "the page size 8"),
        (dict(dtype=torch.float32), r"torch\.float32 has no tensor cores"),
        (dict(cache=torch.float8_e4m3fn), "is not that of the queries"),
        (dict(softcap=5.0), r"a soft cap of 5\.0"),
        (dict(scale=-1.0), "the scale -1"),
        (dict(num_heads=256, num_kv_heads=2), "128 query heads per KV head"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(changes: dict[str, Any], reason: str) -> None:
    own: dict[str, Any] = dict(
        head_dim=64, page_size=16, dtype=torch.bfloat16, num_heads=8, num_kv_heads=2, scale=0.1, softcap=None
    )
    assert obstacle(*tensors(**own), own["scale"], None) is None
    own |= changes
    found = obstacle(*tensors(**own), own["scale"], own["softcap"])
    assert found is not None and re.search(reason, found)


def tensors(
    head_dim: int, page_size: int, dtype: torch.dtype, num_heads: int, num_kv_heads: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cache = meta(10, num_kv_heads, page_size, head_dim, dtype=options.get("cache", dtype))
    return meta(5, num_heads, head_dim, dtype=dtype), cache, cache


def test_a_kernel_that_does_not_compile_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CompileError("NVRTC is not here")

    monkeypatch.setattr(launch, "compile_attention", fail)
    monkeypatch.setattr(launch, "count_multiprocessors", lambda device: 132)
    q, k_cache, v_cache, tables, _ = make_case("llama_1b", torch.bfloat16, 0.0)
    arguments = q, k_cache, v_cache, *tables, 0.125
    with pytest.warns(RuntimeWarning, match="NVRTC is not here"):
        assert attend(*arguments) is None
    assert attend(*arguments) is None  # warnings are errors


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_it_can_take_goes_to_it_on_hopper_and_the_rest_to_triton(
    is_compiled: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def hopper(*_: object, **options: object) -> torch.Tensor | None:
        taken.append(f"hopper, window {options['window']}")
        return torch.ones(1) if is_compiled else None

    def triton(*_: object, **options: object) -> torch.Tensor:
        taken.append(f"triton, window {options['window']}, cap {options['softcap']}")
        return torch.zeros(1)

    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(launch, "attend", hopper)
    monkeypatch.setattr(prefill_attention, "attend_chunks", triton)
    q, k_cache, v_cache, tables, _ = make_case("llama_1b", torch.bfloat16, 0.0)
    prefill_attention.attend_fast(q, k_cache, v_cache, *tables, 0.125, window=9, softcap=softcap)
    expected = ["hopper, window 9"] if softcap is None else []
    if softcap is not None or not is_compiled:
        expected.append(f"triton, window 9, cap {softcap}")
    assert taken == expected
