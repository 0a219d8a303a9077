"""A model family's every difference, as frozen data. The decoder is driven by this alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeScaling = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Names follow the fields of Hugging Face's `rope_parameters`.

    theta: base of the frequencies. rotary_dim: leading dimensions of a head that are rotated.
    scaling: how positions beyond `original_max_position_embeddings` are reached.
    low_freq_factor, high_freq_factor: llama3 only. beta_fast, beta_slow, attention_factor, mscale,
    mscale_all_dim, truncate: yarn only.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One decoder-only transformer.

    vocab_size: rows of the embedding and of the LM head, padding included.
    dtype: the checkpoint's type: "float32", "bfloat16" or "float16".
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

    @property
    def default_model_len(self) -> int:
        """Context to use unless asked otherwise, in tokens.

        Dynamic RoPE scaling stretches all positions as soon as a longer context is allowed, so it is not
        allowed unasked.
        """
        if self.rope.scaling == "dynamic" and self.rope.original_max_position_embeddings:
            return min(self.rope.original_max_position_embeddings, self.max_position_embeddings)
        return self.max_position_embeddings

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
    def kv_values_per_token(self) -> int:
        """Values of K and V that one token keeps in the page pool, over all layers."""
        return 2 * self.kv_size * self.num_layers

    @property
    def num_layer_parameters(self) -> int:
        """Of all layers together: everything but the embedding, the LM head and the final norm."""
        layer = self.hidden_size * (self.qkv_size + self.q_size + 3 * self.intermediate_size + 2)
        layer += self.qkv_bias * self.qkv_size + self.output_bias * self.hidden_size
        layer += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        return self.num_layers * layer

    @property
    def num_parameters(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layer_parameters + self.hidden_size
