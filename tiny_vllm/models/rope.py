"""The table of rotary angles: frequencies of each scaling, as cos and sin per position.

Sources: linear, Chen et al. 2023, arXiv 2306.15595; dynamic (NTK by length), bloc97 2023; yarn, Peng et al.
2023, arXiv 2309.00071; llama3, the Llama 3.1 reference; longrope, Ding et al. 2024, arXiv 2402.13753.
Definitions as in Hugging Face's `rope_parameters`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tiny_vllm.models.spec import ModelSpec, RopeSpec


def rope_table(rope: RopeSpec, *, max_len: int) -> Tensor:
    """cos_sin [max_len, rotary_dim] FP32: row p holds the cosines, then the sines, of position p's angles.

    `dynamic` stretches the base with the length in use, and `longrope` changes its frequencies with it. Here
    they are always those for max_len, the longest sequence the engine accepts: a position is rotated the same
    whatever the request's length and neighbours, and cached keys stay valid. The two agree for a sequence of
    max_len tokens, and for all of them when max_len is within the original length.
    """
    frequencies, scale = _frequencies(rope, max_len)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * scale, angles.sin() * scale), -1)


def unrotated_table(rotary_dim: int, *, max_len: int) -> Tensor:
    """As `rope_table`, for layers that do not rotate: every angle is 0."""
    return torch.cat((torch.ones(max_len, rotary_dim // 2), torch.zeros(max_len, rotary_dim // 2)), -1)


def table_of(rope: RopeSpec | None, spec: ModelSpec, cos_sin: Tensor) -> Tensor:
    """The table of a `layer_rope` of the spec, as long as `cos_sin`, which is that of `spec.rope`."""
    if rope == spec.rope:
        return cos_sin
    if rope is None:
        table = unrotated_table(spec.rope.rotary_dim, max_len=len(cos_sin))
    else:
        table = rope_table(rope, max_len=len(cos_sin))
    return table.to(cos_sin.device)


def _frequencies(rope: RopeSpec, max_len: int) -> tuple[Tensor, float]:
    """Angle per position, [rotary_dim / 2] FP32, and the factor on cos and sin."""
    if rope.scaling == "default":
        return _plain(rope.theta, rope), 1.0
    if rope.scaling == "linear":
        return _plain(rope.theta, rope) / rope.factor, 1.0
    if rope.scaling == "dynamic":
        return _plain(_dynamic_theta(rope, max_len), rope), 1.0
    if rope.scaling == "llama3":
        return _llama3(rope), 1.0
    if rope.scaling == "longrope":
        return _longrope(rope, max_len)
    return _yarn(rope)


def _plain(theta: float, rope: RopeSpec) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / (theta**exponents)


def _original_len(rope: RopeSpec) -> int:
    assert rope.original_max_position_embeddings is not None, f"{rope.scaling} needs the original length"
    return rope.original_max_position_embeddings


def _dynamic_theta(rope: RopeSpec, max_len: int) -> float:
    original_len = _original_len(rope)
    length = max(max_len, original_len)
    stretch = rope.factor * length / original_len - (rope.factor - 1)
    return rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _llama3(rope: RopeSpec) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended by their wavelength."""
    frequencies = _plain(rope.theta, rope)
    waves_per_original_len = _original_len(rope) * frequencies / (2 * math.pi)
    blend = (waves_per_original_len - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _longrope(rope: RopeSpec, max_len: int) -> tuple[Tensor, float]:
    """Each frequency has its own divisor, for the original length or for longer ones; cos and sin grow."""
    original_len = _original_len(rope)
    factors = rope.long_factors if max_len > original_len else rope.short_factors
    growth = rope.attention_factor
    if growth is None:
        growth = math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(original_len))
    return _plain(rope.theta, rope) / torch.tensor(factors, dtype=torch.float32), growth


def _yarn(rope: RopeSpec) -> tuple[Tensor, float]:
    """Blend by dimension between kept (fast) and slowed (slow) frequencies; cos and sin grow a little."""
    original_len = _original_len(rope)

    def dimension_turning(rotations: float) -> float:
        """The dimension, as a real number, that turns this often over the original length."""
        wavelength_ratio = original_len / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = _plain(rope.theta, rope)
    return slowed * frequencies / rope.factor + (1 - slowed) * frequencies, _yarn_scale(rope)


def _yarn_scale(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)
