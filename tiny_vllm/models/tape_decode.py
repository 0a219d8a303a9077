"""Decode steps of few slots as one launch each: the weight-tape kernel over a model's weights and pages.

The tape is a second copy of the matrices, in the kernel's own order: the products of prefill and of larger batches
read plain rows. It costs the model's weights once more in memory (2.5 GB for Llama-3.2-1B).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import architecture
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.weight_tape.layout import NUM_BLOCKS, TapeLayout, TapeShape, token_buckets, unsupported
from tiny_vllm.kernels.weight_tape.pack import TapeMatrices, pack_tape
from tiny_vllm.kernels.weight_tape.step import TapeModel, TapeStep
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
    )


def tape_obstacle(spec: ModelSpec, page_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the weight tape cannot run this model here, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "there is no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"the GPU ({architecture(device)}) is older than sm_90"
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    if num_processors < NUM_BLOCKS:
        return f"the GPU has {num_processors} multiprocessors of {NUM_BLOCKS} needed"
    if dtype != torch.bfloat16:
        return f"the weights are {dtype}, not bfloat16"
    return spec_obstacle(spec, page_size)


def spec_obstacle(spec: ModelSpec, page_size: int) -> str | None:
    """The part of `tape_obstacle` that needs no GPU."""
    if spec.rope.rotary_dim != spec.head_dim:
        return f"only {spec.rope.rotary_dim} of {spec.head_dim} dimensions of a head are rotated"
    if spec.output_bias or spec.mlp_bias:
        return "the output or the feed-forward projections have biases"
    return unsupported(tape_shape(spec, page_size))


class TapeDecode:
    """Decode steps of up to `max_rows` slots. Kernels are compiled when a number of rows first needs them.

    weights: plain matrices, BF16. cos_sin: see `rope_table`. state, temperature: columns of the slot tables.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        cos_sin: Tensor,
        kv_cache: KVCache,
        state: SlotState,
        temperature: Tensor,
    ) -> None:
        layout = TapeLayout.of(tape_shape(spec, kv_cache.page_size))
        norms = [norm for layer in weights.layers for norm in (layer.input_norm, layer.post_attention_norm)]
        matrices = (
            TapeMatrices(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in weights.layers
        )
        biases = [layer.qkv_bias for layer in weights.layers if layer.qkv_bias is not None]
        self.layout = layout
        self._model = TapeModel(
            layout,
            tape=pack_tape(layout, matrices, weights.lm_head),
            norms=torch.stack([*norms, weights.final_norm]),
            embedding=weights.embedding,
            cos_sin=cos_sin,
            k_cache=kv_cache.k,
            v_cache=kv_cache.v,
            rms_norm_eps=spec.rms_norm_eps,
            scale=spec.head_dim**-0.5,
            qkv_bias=torch.stack(biases) if biases else None,
        )
        self._state = state
        self._temperature = temperature
        self._buckets = token_buckets(layout.shape)
        self._steps: dict[int, TapeStep] = {}
        self.max_rows = self._buckets[-1]

    def step(self, num_rows: int) -> TapeStep:
        """The kernel for a number of rows up to `max_rows`, compiled and loaded if it is new."""
        bucket = next(bucket for bucket in self._buckets if bucket >= num_rows)
        if bucket not in self._steps:
            self._steps[bucket] = TapeStep(self._model, self._state, self._temperature, bucket)
        return self._steps[bucket]
