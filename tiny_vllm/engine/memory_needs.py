"""What an engine holds in memory at its fullest, known before anything is allocated.

Left out is what is small beside these parts: what attention on a CPU gathers from the pages for one layer,
and what reading a file holds of it, which is over before there are steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiny_vllm.config import GIB
from tiny_vllm.engine.available_memory import AvailableMemory
from tiny_vllm.engine.runner import PROMPT_LOGPROBS_ROWS
from tiny_vllm.models.experts import MAX_PICKS
from tiny_vllm.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes on the engine's device.

    weights: once. copies: of those that are held in a second layout. step: activations and logits. tables:
    of angles and page numbers; 0 on a GPU, where they are made on the host. spare: what a pool sized by
    memory does not take. pages: the pool.
    """

    weights: int
    copies: int
    step: int
    tables: int
    spare: int
    pages: int

    @property
    def beside_pages(self) -> int:
        return self.weights + self.copies + self.step + self.tables + self.spare

    def shares(self, available: AvailableMemory | None) -> str:
        """In words, to follow another sentence: what of the available memory goes where."""
        parts = [
            ("the weights take", self.weights),
            ("what is held of them twice", self.copies),
            ("a step", self.step),
            ("tables", self.tables),
            ("what stays free", self.spare),
            ("pages", self.pages),
        ]
        shares = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts if size)
        return shares if available is None else f"of {available.size} available{available.reason} {shares}"


def step_bytes(spec: ModelSpec, value_bytes: int, *, num_tokens: int, num_slots: int) -> int:
    """The widest values alive at once in a step of so many tokens: a layer's inputs, outputs and MLP
    activations; logits in FP32, three copies."""
    widest = 4 * spec.hidden_size + 2 * spec.qkv_size + 3 * spec.widest_intermediate_size
    size = num_tokens * widest * value_bytes
    if spec.experts is not None:
        # The outputs of picked experts, before they are summed.
        size += min(num_tokens * spec.experts.num_active, MAX_PICKS) * spec.hidden_size * 4
    return size + 3 * max(num_slots, PROMPT_LOGPROBS_ROWS) * spec.vocab_size * 4


def table_bytes(spec: ModelSpec, *, max_model_len: int, page_size: int, num_slots: int) -> int:
    """Rotary angles and page numbers.

    Angles are FP32, and while the last table is put together its parts, one and a half times its size, are
    held beside it; a page number takes eight bytes.
    """
    num_ropes = len({spec.layer_rope(index) for index in range(spec.num_layers)} | {spec.rope})
    angles = max_model_len * spec.rope.rotary_dim * 2 * (2 * num_ropes + 3)
    return angles + num_slots * -(-max_model_len // page_size) * 8
