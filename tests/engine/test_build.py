"""What is refused before any weight is read. The bundled model has 0.25 GiB of weights in 16 bits."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_models import edit_json, make_tiny_llama, save_tiny_llama
from tiny_vllm.cli.main import main
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import build
from tiny_vllm.engine.available_memory import AvailableMemory
from tiny_vllm.engine.build import EnginePlan
from tiny_vllm.errors import ConfigError

MIB = 1 << 20


def set_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    memory = None if num_bytes is None else AvailableMemory(num_bytes)
    monkeypatch.setattr(build, "available_memory", lambda: memory)


def refusal(**options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        build.plan_engine(EngineConfig(load_format="dummy", **options))
    return error.value


@pytest.mark.parametrize("num_pages", [None, 1])
@pytest.mark.parametrize(
    ("dtype", "need", "hint"),
    [
        ("bfloat16", "0.25", "use a smaller model"),
        ("float32", "0.50", "use a smaller model, or dtype='bfloat16' (half as much)"),
    ],
)
def test_weights_that_exceed_main_memory_are_refused_in_their_own_words(
    dtype: str, need: str, hint: str, num_pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_memory(monkeypatch, 100 * MIB)
    error = refusal(device="cpu", dtype=dtype, num_pages=num_pages)
    assert error.message == f"the weights need {need} GiB in {dtype}, but 0.10 GiB of memory are available"
    assert error.hint == hint


def test_memory_of_unknown_size_refuses_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, None)
    build.plan_engine(EngineConfig(load_format="dummy", device="cpu"))


def test_weights_that_fit_leave_the_blame_to_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, 500 * MIB)
    error = refusal(device="cpu", dtype="bfloat16", num_pages=1456)
    assert error.message.startswith("the page pool needs")


@pytest.mark.parametrize("pages", [{}, {"num_pages": 1}, {"kv_cache_memory_bytes": 1 << 20}])
@pytest.mark.parametrize(
    ("total", "there", "hint"),
    [
        (100 * MIB, "0.05", "use a smaller model"),
        (400 * MIB, "0.20", "use a smaller model, or raise gpu_memory_utilization"),
    ],
)
def test_weights_that_exceed_the_gpus_memory_are_refused_in_their_own_words(
    total: int, there: str, hint: str, pages: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total, total))
    error = refusal(device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5, **pages)
    assert error.message == (
        f"the weights need 0.25 GiB in bfloat16, but {there} GiB of memory are available "
        "(gpu_memory_utilization is 0.5)"
    )
    assert error.hint == hint


def planned(
    monkeypatch: pytest.MonkeyPatch, *, has_bf16: bool, available: int | None, **options: Any
) -> EnginePlan:
    monkeypatch.setattr(build, "_has_bf16_instructions", lambda: has_bf16)
    set_memory(monkeypatch, available)
    return build.plan_engine(EngineConfig(load_format="dummy", **{"device": "cpu", **options}))


def dtype_and_reason(plan: EnginePlan) -> tuple[str, str]:
    (choice,) = (choice for choice in plan.choices if choice.name == "dtype")
    assert choice.value == plan.config.dtype
    return plan.config.dtype, choice.reason


def test_a_cpu_without_bf16_instructions_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, has_bf16=False, available=8 << 30)
    assert dtype_and_reason(plan) == ("float32", "prompts are faster: this CPU has no BF16 instructions")
    assert plan.needs.weights == 134_515_008 * 4
    # The pool has the same bytes as ever.
    assert plan.config.num_pages == (1 << 30) // (2 * 30 * 3 * 64 * 4 * 16)
    assert dtype_and_reason(planned(monkeypatch, has_bf16=True, available=8 << 30)) == (
        "bfloat16",
        "the checkpoint's own type",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_type_that_is_asked_for_is_taken_without_bf16_instructions(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, has_bf16=False, available=8 << 30, dtype=dtype)
    assert dtype_and_reason(plan) == (dtype, "as asked")


def test_fp32_is_not_taken_where_weights_and_the_pages_asked_for_need_more_memory_than_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "can_pack", lambda dtype, device: False)
    options: dict[str, Any] = dict(has_bf16=False, num_pages=1456, max_model_len=64, max_num_seqs=1)
    weights_and_pages = 134_515_008 * 4 + 1456 * 2 * 30 * 3 * 64 * 4 * 16
    step = 256 * (4 * 576 + 2 * 960 + 3 * 1536) * 4 + 3 * 128 * 49_152 * 4
    enough = weights_and_pages + step + 64 * 64 * 4 * 5 // 2 + 4 * 8  # angles, and page numbers
    assert planned(monkeypatch, available=enough, **options).config.dtype == "float32"
    plan = planned(monkeypatch, available=enough - 1, **options)
    dtype, reason = dtype_and_reason(plan)
    assert (dtype, plan.needs.weights) == ("bfloat16", 134_515_008 * 2)
    assert reason == (
        "the checkpoint's own type, although this CPU has no BF16 instructions: in FP32 the page pool needs "
        "1.00 GiB (1456 pages), but of 1.58 GiB available the weights take 0.50 GiB, a step 0.08 GiB, tables "
        "0.00 GiB"
    )
    # Where not even the weights fit.
    dtype, reason = dtype_and_reason(planned(monkeypatch, **{**options, "num_pages": 9}, available=400 * MIB))
    assert dtype == "bfloat16" and reason.endswith(
        ": in FP32 the weights need 0.50 GiB in float32, but 0.39 GiB of memory are available"
    )


def test_fp32_is_not_taken_where_the_pool_would_hold_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 2 * 30 * 3 * 64 * 2 * 16
    plan = planned(monkeypatch, has_bf16=False, available=8 << 30, kv_cache_memory_bytes=page)
    dtype, reason = dtype_and_reason(plan)
    assert (dtype, plan.config.num_pages) == ("bfloat16", 1)
    assert ": in FP32 no room for the KV cache: " in reason


def test_fp32_is_not_taken_on_a_guess_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dtype_and_reason(planned(monkeypatch, has_bf16=False, available=None)) == (
        "bfloat16",
        "the checkpoint's own type, although this CPU has no BF16 instructions: how much memory is "
        "available is unknown",
    )


def test_what_fits_in_no_type_is_refused_in_the_checkpoints_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        planned(monkeypatch, has_bf16=False, available=100 * MIB)
    assert error.value.message.startswith("the weights need 0.25 GiB in bfloat16")
    assert error.value.__context__ is None


@pytest.mark.parametrize("has_mkldnn", [True, False])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_bf16_instructions_are_those_that_torch_uses(
    has_bf16: bool, has_mkldnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_mkldnn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    assert build._has_bf16_instructions() == (has_bf16 and has_mkldnn)


def test_a_gpu_takes_the_checkpoints_type_whatever_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 20 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    plan = planned(monkeypatch, has_bf16=False, available=8 << 30, device="cuda", weight_tape=False)
    assert dtype_and_reason(plan) == ("bfloat16", "the checkpoint's own type")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(save_tiny_llama(tmp_path / "tiny", make_tiny_llama()))


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError("Unable to allocate 1.00 GiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_while_loading_is_told_with_what_was_planned(
    fault: Exception, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(
        build, "available_memory", lambda: AvailableMemory(3 << 30, "its data is limited, ulimit -d")
    )
    monkeypatch.setattr(build, "load_weights", load)
    plan = build.plan_engine(EngineConfig(model=checkpoint, device="cpu", fused_cpu_decode=True))
    with pytest.raises(ConfigError) as error:
        build.build_engine(plan)
    assert error.value.message.startswith(
        "memory ran out while the engine was built: of 3.00 GiB available (its data is limited, ulimit -d) "
        "the weights take 0.00 GiB, "
    )
    assert error.value.message.endswith(f", pages {plan.needs.pages / (1 << 30):.2f} GiB ({fault})")
    assert error.value.hint == (
        "lower num_pages, max_model_len or max_num_batched_tokens, set fused_cpu_decode=False, or free memory"
    )
    assert error.value.__cause__ is fault


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), OSError(errno.EIO, "broken"), KeyError("x")])
def test_other_faults_while_loading_stay_what_they_are(
    fault: Exception, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(build, "load_weights", load)
    with pytest.raises(type(fault)) as error:
        build.build_engine(build.plan_engine(EngineConfig(model=checkpoint, device="cpu")))
    assert error.value is fault


def test_a_pool_that_the_system_refuses_is_one_error_on_the_command_line(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_memory(monkeypatch, None)
    assert main(["generate", "x", "--model", checkpoint, "--device", "cpu", "--num-pages", str(1 << 36)]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith("error: memory ran out while the engine was built: the weights take 0.00 GiB, ")
    assert "can't allocate memory: you tried to allocate" in message
    assert hint == ("hint: lower --num-pages, --max-model-len or --max-num-batched-tokens, or free memory")


def test_a_model_that_can_end_no_text_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = save_tiny_llama(tmp_path / "tiny", make_tiny_llama(), tokenizer=False)

    def warnings() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tiny_vllm"):
            build.build_engine(build.plan_engine(EngineConfig(model=str(directory), num_pages=9)))
        return caplog.messages

    edit_json(directory / "config.json", eos_token_id=10**6)
    edit_json(directory / "generation_config.json", eos_token_id=[10**7, 1])
    assert warnings() == []
    edit_json(directory / "generation_config.json", eos_token_id=None)
    (warning,) = warnings()
    assert warning.startswith(f"{directory.name}: 1000000 is beyond the model's ids (0 to 383)")
    directory = directory.rename(directory.with_name("tiny\x1b[31m"))
    (warning,) = warnings()
    assert warning.startswith(r"tiny\x1b[31m: 1000000 is beyond")
