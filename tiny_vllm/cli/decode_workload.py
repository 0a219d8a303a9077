"""Decode steps by themselves: sequences in the middle of their generation, and what computes a next token.

The parts are the engine's own, put together as engine/build.py does, without scheduler and sampling options:
a step goes from the last tokens to the next ones, drawn greedily.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.decode_graphs import DecodeGraphs
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.triton_support import runs_triton
from tiny_vllm.kernels.weight_tape.layout import token_buckets
from tiny_vllm.models.batch import ForwardBatch
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.kv_cache import KVCache
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.tape_decode import TapeDecode, compile_tape, tape_obstacle, tape_shape
from tiny_vllm.models.weights import ModelWeights

Step = Callable[[], Any]


class DecodeModel:
    """A model's weights as the engine arranges them. Takes `weights` over. config: resolved.

    tape_obstacle: why the weight tape cannot run here, or None.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, config: EngineConfig, *, max_model_len: int
    ) -> None:
        self.spec = spec
        self.config = config
        self.device = torch.device(config.device)
        # The decoder takes the weights apart; a GPU's steps go on using the same tensors.
        self.kept_weights = replace(weights, layers=list(weights.layers)) if config.device == "cuda" else None
        self.decoder = Decoder(
            spec, weights, max_model_len=max_model_len, fused_cpu_decode=bool(config.fused_cpu_decode)
        )
        dtype = getattr(torch, config.dtype)
        self.tape_obstacle = tape_obstacle(
            spec, config.page_size, dtype, self.device, kv_cache_dtype=config.kv_cache_dtype
        )

    @property
    def max_tape_rows(self) -> int:
        """Most sequences that the weight tape computes; 0 where it cannot run."""
        if self.tape_obstacle is not None:
            return 0
        return token_buckets(tape_shape(self.spec, self.config.page_size))[-1]


class DecodeWorkload:
    """batch_size sequences whose first step has contexts of `context` tokens, its own included.

    Pages lie in random order and hold random values. There is room for num_steps steps.
    """

    def __init__(self, model: DecodeModel, batch_size: int, context: int, num_steps: int) -> None:
        spec, device, page_size = model.spec, model.device, model.config.page_size
        self.model = model
        self.longest = context + num_steps
        width = -(-self.longest // page_size)
        self.cache = KVCache.allocate(
            spec,
            num_pages=batch_size * width + 1,  # the null page comes on top
            page_size=page_size,
            dtype=getattr(torch, model.config.dtype),
            is_fp8=model.config.kv_cache_dtype == "fp8",
            device=device,
        )
        self.cache.randomise()
        pages = torch.randperm(batch_size * width, device=device) + 1
        self._first_len = context - 1
        self._first_tokens = torch.randint(spec.vocab_size, (batch_size,), device=device)
        self.slots = torch.arange(batch_size, device=device)
        self.temperature = torch.zeros(batch_size, device=device)
        self.state = SlotState(
            page_table=pages.view(batch_size, width),
            computed_len=torch.full((batch_size,), context - 1, device=device),
            last_token=self._first_tokens.clone(),
            stream=torch.arange(batch_size, device=device),
            sample_position=torch.zeros(batch_size, dtype=torch.int64, device=device),
        )

    def rewind(self) -> None:
        """Back to the first step."""
        self.state.computed_len.fill_(self._first_len)
        self.state.last_token.copy_(self._first_tokens)
        self.state.sample_position.zero_()

    def steps(self) -> dict[str, Callable[[], Step]]:
        """Name -> maker, for everything that can compute this workload on this device.

        Calling what it makes computes one step of all sequences or, on a GPU, enqueues it.
        """
        model = self.model
        if model.device.type != "cuda":
            return {
                "operators" if model.decoder.fused_decode is None else "fused": lambda: self._decoder_step
            }
        if not runs_triton(self.cache.k):
            return {"operators": lambda: self._decoder_step}
        steps = {"chain": self._make_chain_step}
        if len(self.slots) <= model.max_tape_rows:
            steps["tape"] = self._make_tape_step
        return steps

    def _make_chain_step(self) -> Step:
        model = self.model
        assert model.kept_weights is not None
        chain = DecodeChain(model.spec, model.kept_weights, model.decoder.cos_sin, self.cache)
        capture = not model.config.enforce_eager
        graphs = DecodeGraphs(chain, self.state, self.temperature, capture=capture)
        tokens = torch.empty_like(self.slots)
        return lambda: graphs.draw(self.slots, self.longest, tokens)

    def _make_tape_step(self) -> Step:
        model = self.model
        assert model.kept_weights is not None
        functions = compile_tape(model.spec, self.cache.page_size, len(self.slots), self.slots.device)
        tape = TapeDecode(
            model.spec,
            model.kept_weights,
            model.decoder.cos_sin,
            self.cache,
            self.state,
            self.temperature,
            functions,
        )
        step = tape.step(len(self.slots))
        # Slots beyond the tables are padding, of which a step may have some.
        step.slots.fill_(len(self.slots))
        step.slots[: len(self.slots)] = self.slots
        return partial(step.draw, torch.empty_like(self.slots))

    @torch.inference_mode()
    def _decoder_step(self) -> None:
        state, page_size = self.state, self.cache.page_size
        positions = state.computed_len.clone()
        pages = state.page_table.gather(1, positions[:, None] // page_size)[:, 0]
        nothing = positions[:0]
        batch = ForwardBatch(
            token_ids=state.last_token.clone(),
            positions=positions,
            cells=pages * page_size + positions % page_size,
            decode_page_table=state.page_table,
            decode_context_lens=positions + 1,
            prefill_page_table=state.page_table[:0],
            prefill_query_starts=positions.new_zeros(1),
            prefill_context_lens=nothing,
        )
        decoder = self.model.decoder
        logits = decoder.logits(decoder.forward(batch, self.cache))
        state.last_token.copy_(logits.argmax(-1))
        state.computed_len.add_(1)
