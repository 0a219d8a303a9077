"""Oracles of the decoder tests: transformers' Llama, its weights in our form, and sequences over pages."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny_models import make_tiny_llama
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.models.weights import LayerWeights, ModelWeights


def make_llama(seed: int = 0, **overrides: Any) -> Any:
    """A tiny random LlamaForCausalLM in FP32."""
    return make_tiny_llama(seed, **{"vocab_size": 211, "max_position_embeddings": 128, **overrides})


def spec_of(config: Any) -> ModelSpec:
    """The ModelSpec of a LlamaConfig of transformers 5."""
    rope = dict(config.rope_parameters)
    scaling = rope.pop("rope_type")
    theta = rope.pop("rope_theta")
    if scaling == "dynamic":
        rope["original_max_position_embeddings"] = config.max_position_embeddings
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    return ModelSpec(
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope=RopeSpec(theta=theta, rotary_dim=head_dim, scaling=scaling, **rope),
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        dtype="float32",
    )


def weights_of(model: Any) -> ModelWeights:
    """A copy of a transformers Llama's weights."""
    layers = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        layers.append(
            LayerWeights(
                input_norm=_copy(layer.input_layernorm.weight),
                qkv=torch.cat([_copy(projection.weight) for projection in projections]),
                output=_copy(attention.o_proj.weight),
                post_attention_norm=_copy(layer.post_attention_layernorm.weight),
                gate_up=torch.cat([_copy(mlp.gate_proj.weight), _copy(mlp.up_proj.weight)]),
                down=_copy(mlp.down_proj.weight),
                qkv_bias=_cat_biases(projections),
                output_bias=_cat_biases((attention.o_proj,)),
                gate_up_bias=_cat_biases((mlp.gate_proj, mlp.up_proj)),
                down_bias=_cat_biases((mlp.down_proj,)),
            )
        )
    embedding = _copy(model.model.embed_tokens.weight)
    tied = model.config.tie_word_embeddings
    return ModelWeights(
        embedding=embedding,
        layers=layers,
        final_norm=_copy(model.model.norm.weight),
        lm_head=embedding if tied else _copy(model.lm_head.weight),
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _cat_biases(projections: Any) -> Tensor | None:
    if projections[0].bias is None:
        return None
    return torch.cat([_copy(projection.bias) for projection in projections])


class PagedSequence:
    """A sequence with the pages it owns: what a scheduler would know of it."""

    def __init__(self, token_ids: list[int], pages: list[int]) -> None:
        self.token_ids = list(token_ids)
        self.pages = pages
        self.computed_len = 0


class PagedDecoder:
    """A decoder with pages handed out in random order, driven chunk by chunk."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        *,
        page_size: int,
        num_pages: int = 400,
        max_model_len: int = 256,
        dtype: torch.dtype = torch.float32,
        poison: float | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.decoder = Decoder(spec, weights, max_model_len=max_model_len)
        self.kv_cache = KVCache.allocate(
            spec, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device
        )
        if poison is not None:
            self.kv_cache.k.fill_(poison)
            self.kv_cache.v.fill_(poison)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free_pages = order.tolist()

    def add(
        self, token_ids: list[int], *, max_len: int, shared_pages: list[int] | None = None
    ) -> PagedSequence:
        """shared_pages: full pages of another sequence with the same leading tokens."""
        pages = list(shared_pages or [])
        while len(pages) * self.kv_cache.page_size < max_len:
            pages.append(self.free_pages.pop())
        sequence = PagedSequence(token_ids, pages)
        sequence.computed_len = len(shared_pages or []) * self.kv_cache.page_size
        return sequence

    def step(
        self,
        decodes: list[PagedSequence],
        chunks: list[tuple[PagedSequence, int]],
        *,
        ends_only: bool = False,
    ) -> list[Tensor]:
        """Advance decodes by one token and each chunk by its length; logits of each, [tokens, vocab].

        ends_only: of each chunk's last token alone.
        """
        work = [(sequence, 1) for sequence in decodes] + chunks
        spans = [(s, s.computed_len, s.computed_len + length) for s, length in work]
        for sequence, _, end in spans:
            assert end <= len(sequence.token_ids)
            sequence.computed_len = end
        positions = [torch.arange(start, end) for _, start, end in spans]
        lens = [length for _, length in chunks]
        batch = ForwardBatch(
            token_ids=torch.tensor([t for s, start, end in spans for t in s.token_ids[start:end]]),
            positions=torch.cat(positions),
            cells=torch.cat([self._cells(s, p) for (s, _, _), p in zip(spans, positions, strict=True)]),
            decode_page_table=_page_table(decodes),
            decode_context_lens=torch.tensor([s.computed_len for s in decodes], dtype=torch.int64),
            prefill_page_table=_page_table([s for s, _ in chunks]),
            prefill_query_starts=torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)]),
            prefill_context_lens=torch.tensor([s.computed_len for s, _ in chunks], dtype=torch.int64),
            ends_only=ends_only,
        )
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        batch = replace(batch, **{name: tensor.to(self.device) for name, tensor in tensors.items()})
        hidden = self.decoder.forward(batch, self.kv_cache)
        return list(self.decoder.logits(hidden).split([1 if ends_only else length for _, length in work]))

    def _cells(self, sequence: PagedSequence, positions: Tensor) -> Tensor:
        page_size = self.kv_cache.page_size
        return torch.tensor(sequence.pages)[positions // page_size] * page_size + positions % page_size

    def generate(self, token_ids: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy tokens after a prompt computed whole; logits of every position but the last token's."""
        sequence = self.add(token_ids, max_len=len(token_ids) + num_tokens)
        logits = self.step([], [(sequence, len(token_ids))])
        for _ in range(num_tokens - 1):
            sequence.token_ids.append(int(logits[-1][-1].argmax()))
            logits += self.step([sequence], [])
        return [*sequence.token_ids[len(token_ids) :], int(logits[-1][-1].argmax())], torch.cat(logits)


def _page_table(sequences: list[PagedSequence]) -> Tensor:
    """Rows padded with the null page, one entry wider than any sequence needs."""
    width = max((len(s.pages) for s in sequences), default=0) + 1
    rows = [s.pages + [0] * (width - len(s.pages)) for s in sequences]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), width)
