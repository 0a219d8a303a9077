"""One step's work as tensors: what the decoder is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(slots=True)
class ForwardBatch:
    """T tokens: first one token of each of B decoding sequences, then the chunks of S prefilling ones.

    Every tensor is int64. A cell is page * page_size + offset. Padding entries of a page table are page 0.
    A context length counts the tokens of this step: it is at least 1, and at least the chunk's length.

    token_ids, positions, cells: [T]
    decode_page_table: [B, W]; decode_context_lens: [B]
    prefill_page_table: [S, W]; prefill_context_lens: [S]
    prefill_query_starts: [S + 1], where each chunk begins, counted from the first prefill token; the last
        entry is the number of prefill tokens. Without padding no chunk is empty.
    is_padded: some rows belong to nobody: decodes at position 0 of the null page; behind all chunks, rows of
        no chunk, with cell 0; and behind the others chunks without tokens, of context 1. What is computed for
        them is finite and means nothing. The last entry of prefill_query_starts counts no padding.
    ends_only: hidden states are wanted of the decodes and of each chunk's last row alone (of a chunk without
        tokens, of any row).
    """

    token_ids: Tensor
    positions: Tensor
    cells: Tensor
    decode_page_table: Tensor
    decode_context_lens: Tensor
    prefill_page_table: Tensor
    prefill_query_starts: Tensor
    prefill_context_lens: Tensor
    is_padded: bool = False
    ends_only: bool = False

    @property
    def num_decodes(self) -> int:
        return self.decode_context_lens.shape[0]

    @property
    def num_prefills(self) -> int:
        return self.prefill_context_lens.shape[0]

    def prefills(self) -> ForwardBatch:
        """The same batch without its decodes."""
        first = self.num_decodes
        return replace(
            self,
            token_ids=self.token_ids[first:],
            positions=self.positions[first:],
            cells=self.cells[first:],
            decode_page_table=self.decode_page_table[:0],
            decode_context_lens=self.decode_context_lens[:0],
        )
