"""kv_cache_dtype: what it does to the plan of an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny_vllm import ConfigError, EngineConfig
from tiny_vllm.cli.main import main
from tiny_vllm.config import choose_kv_cache_dtype
from tiny_vllm.engine.build import EnginePlan, plan_engine
from tiny_vllm.models.kv_cache import KVCache, fp8_obstacle
from tiny_vllm.models.tape_decode import tape_obstacle


def plan(**options: Any) -> EnginePlan:
    # More slots than pages can fill, so that memory alone decides.
    return plan_engine(EngineConfig(load_format="dummy", max_num_seqs=256, device="cpu", **options))


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_pool_of_the_same_bytes_holds_nearly_twice_the_pages(dtype: str, name: str) -> None:
    options: dict[str, Any] = dict(dtype=dtype, kv_cache_memory_bytes=1 << 28)
    narrow, wide = plan(kv_cache_dtype=name, **options), plan(**options)
    assert (narrow.config.kv_cache_dtype, wide.config.kv_cache_dtype) == ("fp8", "auto")
    assert narrow.config.num_pages is not None and wide.config.num_pages is not None
    # A head of 64 values takes 66 bytes instead of 128.
    assert narrow.config.num_pages / wide.config.num_pages == pytest.approx(128 / 66, rel=0.001)


def test_the_planned_bytes_are_the_allocated_ones(capsys: pytest.CaptureFixture[str]) -> None:
    spec = plan().checkpoint.spec
    cache = KVCache.allocate(spec, num_pages=3, page_size=16, dtype=torch.bfloat16, is_fp8=True)
    allocated = sum(
        tensor.nbytes for caches in cache.layers for fp8 in caches for tensor in (fp8.codes, fp8.scales)
    )
    assert main(["info", "--load-format", "dummy", "--kv-cache-dtype", "fp8", "--num-pages", "7"]) == 0
    shown = capsys.readouterr().out
    assert f"{allocated / 3 / 1024:.0f} KiB for 16 tokens over all layers" in shown
    assert "fp8  (as asked: e4m3, with a scale per token and KV head)" in shown


def test_every_layer_reads_zeros_of_the_models_type() -> None:
    spec = plan().checkpoint.spec
    cache = KVCache.allocate(spec, num_pages=3, page_size=16, dtype=torch.float16, is_fp8=True)
    assert len(cache.layers) == spec.num_layers
    assert cache.dtype == torch.float16 and (cache.num_pages, cache.page_size) == (3, 16)
    for caches in cache.layers:
        for fp8 in caches:
            assert fp8.dtype == torch.float16 and not fp8.codes.float().any() and not fp8.scales.any()
    cache.layers[2][1].codes[1].fill_(1.0)
    assert cache.v[2, 1].float().eq(1).all() and not cache.k.float().any()


def test_the_kernels_that_cannot_read_it_are_off_and_demanding_them_is_an_error() -> None:
    planned = plan(kv_cache_dtype="fp8")
    assert planned.config.fused_cpu_decode is False
    reasons = [choice.reason for choice in planned.choices if choice.name == "fused_cpu_decode"]
    assert reasons == ["it does not read a KV cache in fp8"]
    with pytest.raises(ConfigError, match="fused_cpu_decode is True, but it does not read a KV cache in fp8"):
        plan(kv_cache_dtype="fp8", fused_cpu_decode=True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties)
    monkeypatch.setattr("tiny_vllm.models.tape_decode.shared_memory_limit", lambda device: 1 << 20)
    return torch.device("cuda")


def test_the_weight_tape_names_it_as_its_obstacle(hopper: torch.device) -> None:
    spec = plan().checkpoint.spec
    obstacle = tape_obstacle(spec, 16, torch.bfloat16, hopper, kv_cache_dtype="fp8")
    assert obstacle == "the kernel does not read a KV cache in fp8"
    assert tape_obstacle(spec, 16, torch.bfloat16, hopper) != obstacle


@pytest.mark.parametrize(
    ("capability", "cuda", "obstacle"),
    [
        ((8, 0), "13.0", "sm_80"),
        ((8, 6), "13.0", "sm_86"),
        ((8, 9), "13.0", None),
        ((9, 0), "13.0", None),
        ((9, 4), None, "NVIDIA"),
    ],
)
def test_gpus_whose_kernels_cannot_read_fp8_refuse_it(
    capability: tuple[int, int], cuda: str | None, obstacle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr("tiny_vllm.models.kv_cache.HAS_TRITON", True)
    found = fp8_obstacle(torch.device("cuda"))
    assert (found is None) if obstacle is None else (found is not None and obstacle in found)
    assert fp8_obstacle(torch.device("cpu")) is None
    assert choose_kv_cache_dtype("auto", "bfloat16", found).value == "auto"
    if found is not None:
        with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8', but .*\nhint: use kv_cache"):
            choose_kv_cache_dtype("fp8", "bfloat16", found)


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8_e5m2', but must be one of auto, fp8"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")  # type: ignore[arg-type]
