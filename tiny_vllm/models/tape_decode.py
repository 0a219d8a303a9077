"""Decode steps of few slots as one launch each: the weight-tape kernel over a model's weights and pages.

The tape is a second copy of the matrices, in the kernel's own order: the products of prefill and of larger
batches read plain rows. It costs the model's weights once more in memory (2.5 GB for Llama-3.2-1B).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import CudaFunction, architecture, shared_memory_limit
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.weight_tape.layout import (
    NUM_BLOCKS,
    SHARED_BYTES,
    TapeLayout,
    TapeShape,
    token_buckets,
    unsupported,
)
from tiny_vllm.kernels.weight_tape.pack import TapeMatrices, pack_tape
from tiny_vllm.kernels.weight_tape.step import TapeModel, TapeStep, compile_step
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.weights import ModelWeights


def tape_shape(spec: ModelSpec, page_size: int) -> TapeShape:
    return TapeShape(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        page_size=page_size,
        qkv_bias=spec.qkv_bias,
        qk_norm=spec.qk_norm == "head",
    )


def tape_obstacle(
    spec: ModelSpec,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_cache_dtype: str = "auto",
) -> str | None:
    """Why the weight tape cannot run this model here, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "there is no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"the GPU ({architecture(device)}) is older than sm_90"
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    if num_processors < NUM_BLOCKS:
        return f"the GPU has {num_processors} multiprocessors of {NUM_BLOCKS} needed"
    available = shared_memory_limit(device)
    if available < SHARED_BYTES:
        return f"a block of the GPU has {available} bytes of shared memory of {SHARED_BYTES} needed"
    if dtype != torch.bfloat16:
        return f"the weights are {dtype}, not bfloat16"
    if kv_cache_dtype != "auto":
        return f"the kernel does not read a KV cache in {kv_cache_dtype}"
    return spec_obstacle(spec, page_size)


def spec_obstacle(spec: ModelSpec, page_size: int) -> str | None:
    """The part of `tape_obstacle` that needs no GPU."""
    if not spec.fits_weight_tape:
        return f"the kernel does not compute the family {spec.family}"
    if spec.rope.rotary_dim != spec.head_dim:
        return f"only {spec.rope.rotary_dim} of {spec.head_dim} dimensions of a head are rotated"
    if spec.output_bias or spec.mlp_bias:
        return "the output or the feed-forward projections have biases"
    return unsupported(tape_shape(spec, page_size))


def tape_bytes(spec: ModelSpec, page_size: int) -> int:
    """Memory of the tape."""
    return TapeLayout.of(tape_shape(spec, page_size)).num_bytes


def compile_tape(
    spec: ModelSpec, page_size: int, num_slots: int, device: torch.device
) -> dict[int, CudaFunction]:
    """The kernels by the rows they take, compiled side by side. Raises CudaKernelError."""
    layout = TapeLayout.of(tape_shape(spec, page_size))
    # No bucket beyond the first that holds all slots.
    buckets = [bucket for bucket in token_buckets(layout.shape) if bucket < 2 * num_slots]
    with ThreadPoolExecutor(len(buckets)) as pool:
        functions = pool.map(lambda bucket: compile_step(layout, bucket, device), buckets)
        return dict(zip(buckets, functions, strict=True))


class TapeDecode:
    """Decode steps of up to `max_rows` slots: a `DecodeStepper`.

    weights: plain matrices, BF16. cos_sin: see `rope_table`. state, temperature: columns of the slot tables.
    functions: of `compile_tape`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        cos_sin: Tensor,
        kv_cache: KVCache,
        state: SlotState,
        temperature: Tensor,
        functions: Mapping[int, CudaFunction],
    ) -> None:
        self.layout = TapeLayout.of(tape_shape(spec, kv_cache.page_size))
        self._state = state
        self._temperature = temperature
        self._functions = functions
        self._buckets = tuple(functions)
        self._model = _tape_model(self.layout, spec, weights, cos_sin, kv_cache)
        self._steps: dict[int, TapeStep] = {}
        self._standing: dict[int, Tensor] = {}

    @property
    def max_rows(self) -> int:
        return self._buckets[-1]

    def step(self, num_rows: int) -> TapeStep:
        """The kernel for a number of rows up to `max_rows`; allocates its buffers when first asked."""
        bucket = next(bucket for bucket in self._buckets if bucket >= num_rows)
        if bucket not in self._steps:
            self._steps[bucket] = TapeStep(
                self.function(bucket), self._model, self._state, self._temperature, bucket
            )
        return self._steps[bucket]

    def function(self, num_rows: int) -> CudaFunction:
        """The compiled kernel for a number of rows up to `max_rows`."""
        return self._functions[next(bucket for bucket in self._buckets if bucket >= num_rows)]

    def draw(self, slots: Tensor, max_context_len: int, tokens: Tensor) -> None:
        self._place(slots).draw(tokens)

    def logits(self, slots: Tensor, max_context_len: int) -> Tensor:
        step = self._place(slots)
        step.compute_logits()
        return step.logits[: slots.shape[0]]

    def _place(self, slots: Tensor) -> TapeStep:
        """The kernel whose slots are these; the last ones given may still stand there."""
        count = slots.shape[0]
        step = self.step(count)
        bucket = step.slots.shape[0]
        if self._standing.get(bucket) is not slots:
            step.slots[:count].copy_(slots)
            step.slots[count:].fill_(self._temperature.shape[0])
            self._standing[bucket] = slots
        return step


def _tape_model(
    layout: TapeLayout, spec: ModelSpec, weights: ModelWeights, cos_sin: Tensor, kv_cache: KVCache
) -> TapeModel:
    norms = [norm for layer in weights.layers for norm in (layer.input_norm, layer.post_attention_norm)]
    qk_norms = [
        torch.stack((layer.q_norm, layer.k_norm))
        for layer in weights.layers
        if layer.q_norm is not None and layer.k_norm is not None
    ]
    biases = [layer.qkv_bias for layer in weights.layers if layer.qkv_bias is not None]
    matrices = (TapeMatrices(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in weights.layers)
    return TapeModel(
        layout,
        tape=pack_tape(layout, matrices, weights.lm_head),
        norms=torch.stack([*norms, weights.final_norm]),
        embedding=weights.embedding,
        cos_sin=cos_sin,
        k_cache=kv_cache.k,
        v_cache=kv_cache.v,
        rms_norm_eps=spec.rms_norm_eps,
        scale=spec.head_dim**-0.5,
        qk_norms=torch.stack(qk_norms) if qk_norms else None,
        qkv_bias=torch.stack(biases) if biases else None,
    )
