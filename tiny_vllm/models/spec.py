"""A model family's every difference, as frozen data. The decoder is driven by this alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeScaling = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Names follow the fields of Hugging Face's `rope_parameters`.

    theta: base of the frequencies. rotary_dim: leading dimensions of a head that are rotated.
    scaling: how positions beyond `original_max_position_embeddings` are reached.
    low_freq_factor, high_freq_factor: llama3 only. beta_fast, beta_slow, mscale, mscale_all_dim, truncate:
    yarn only. attention_factor: yarn and longrope. short_factors, long_factors: longrope only, a divisor of
    each frequency within the original length and beyond it.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of the MLP: a router picks `num_active` of `num_experts` for each token.

    A token's weights are the softmax over all experts, of which the picked ones keep their share, or are
    brought to a sum of 1 if `normalize`. intermediate_size: of one expert. dense_layers: layers with a plain
    MLP all the same. bias: router and experts have biases.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One decoder-only transformer. The defaults are those of the Llama family.

    vocab_size: rows of the embedding and of the LM head, padding included.
    dtype: the checkpoint's type: "float32", "bfloat16" or "float16".
    activation: of the gate of an MLP or expert. experts: None where every layer has a plain MLP.

    norm_placement: RMSNorm on the input of attention and MLP, on their output, or on both.
    norm_offset: added to every stored norm weight. qk_norm: RMSNorm of queries and keys before the rotation,
    over each head or over all heads together.

    attention_scale: factor of the scores, head_dim ** -0.5 if None. attention_softcap: bends scores s to
    c * tanh(s / c); logit_softcap: the same for logits. attention_sinks: one more score per head, learnt,
    that takes part in the softmax and has no value.
    sliding_window: tokens that a query of the `sliding_layers` sees, itself included.
    sliding_rope: rotation of the sliding layers where it differs. unrotated_layers: layers without rotation.

    embedding_multiplier, residual_multiplier: factors of the embedding, and of what each attention and MLP
    adds to the residual stream. logit_divisor: divides the logits.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "bfloat16"
    activation: Activation = "silu"
    experts: ExpertsSpec | None = None
    norm_placement: Literal["input", "output", "both"] = "input"
    norm_offset: float = 0.0
    qk_norm: Literal["head", "whole"] | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    logit_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    sliding_rope: RopeSpec | None = None
    unrotated_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0

    @property
    def default_model_len(self) -> int:
        """Context to use unless asked otherwise, in tokens.

        Dynamic and longrope scaling change all positions as soon as a longer context is allowed, so it is not
        allowed unasked.
        """
        if self.rope.scaling in ("dynamic", "longrope") and self.rope.original_max_position_embeddings:
            return min(self.rope.original_max_position_embeddings, self.max_position_embeddings)
        return self.max_position_embeddings

    def layer_rope(self, layer: int) -> RopeSpec | None:
        """How a layer rotates queries and keys; None if it does not."""
        if layer in self.unrotated_layers:
            return None
        return self.sliding_rope if self.sliding_rope and layer in self.sliding_layers else self.rope

    def layer_window(self, layer: int) -> int | None:
        return self.sliding_window if layer in self.sliding_layers else None

    @property
    def longest_window(self) -> int | None:
        """Tokens that the layer which sees most of a context sees of it; None if some layer sees it all."""
        return self.sliding_window if len(self.sliding_layers) == self.num_layers else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def fits_fused_cpu_decode(self) -> bool:
        """Whether the fused CPU step computes this model (see kernels/cpu_decode)."""
        return self._is_llama_like and self.qk_norm is None

    @property
    def fits_weight_tape(self) -> bool:
        """Whether the weight-tape kernel computes this family (see models/tape_decode.py)."""
        return self._is_llama_like and self.qk_norm in (None, "head")

    @property
    def _is_llama_like(self) -> bool:
        """Norms of queries and keys, biases, and partial or scaled rotation apart, what the Llama family
        computes, in every layer."""
        is_plain_attention = (
            self.attention_scale is None
            and self.attention_softcap is None
            and not self.attention_sinks
            and not self.sliding_layers
            and not self.unrotated_layers
        )
        is_plain_stream = (
            self.norm_placement == "input"
            and self.norm_offset == 0.0
            and self.embedding_multiplier == 1.0
            and self.residual_multiplier == 1.0
            and self.logit_divisor == 1.0
            and self.logit_softcap is None
        )
        return is_plain_attention and is_plain_stream and self.activation == "silu" and self.experts is None

    @property
    def widest_intermediate_size(self) -> int:
        """Values between the products of one token's MLP: of all experts it picks, where those are more."""
        if self.experts is None:
            return self.intermediate_size
        picked = self.experts.num_active * self.experts.intermediate_size
        return max(picked, self.intermediate_size) if self.experts.dense_layers else picked

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Values of the norm weights of queries and of keys."""
        if self.qk_norm is None:
            return 0, 0
        return (self.head_dim, self.head_dim) if self.qk_norm == "head" else (self.q_size, self.kv_size)

    @property
    def kv_values_per_token(self) -> int:
        """Values of K and V that one token keeps in the page pool, over all layers."""
        return 2 * self.kv_size * self.num_layers

    @property
    def num_layer_parameters(self) -> int:
        """Of all layers together: everything but the embedding, the LM head and the final norm."""
        attention = self.hidden_size * (self.qkv_size + self.q_size) + sum(self.qk_norm_sizes)
        attention += self.qkv_bias * self.qkv_size + self.output_bias * self.hidden_size
        attention += self.attention_sinks * self.num_heads
        norms = self.hidden_size * (4 if self.norm_placement == "both" else 2)
        return self.num_layers * (attention + norms) + self._num_mlp_parameters

    @property
    def _num_mlp_parameters(self) -> int:
        def gated(intermediate_size: int, has_bias: bool) -> int:
            matrices = 3 * self.hidden_size * intermediate_size
            return matrices + has_bias * (2 * intermediate_size + self.hidden_size)

        dense = gated(self.intermediate_size, self.mlp_bias)
        if self.experts is None:
            return self.num_layers * dense
        experts = self.experts
        num_dense = len(experts.dense_layers)
        mixture = experts.num_experts * gated(experts.intermediate_size, experts.bias)
        mixture += experts.num_experts * (self.hidden_size + experts.bias)
        return num_dense * dense + (self.num_layers - num_dense) * mixture

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layer_parameters + self.hidden_size
