"""Which tokens each slot has seen, and how often it generated them: what penalties need to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from tiny_vllm.engine.transfers import Upload

INITIAL_WIDTH = 256


class SeenTokens:
    """Per slot, a list of distinct tokens with their counts, as rows of tensors on the device.

    Unused entries of a row are copies of its first entry and are updated with it, so that no length is needed
    to read the row. Rows widen together, by doubling; nothing is allocated before the first `assign`.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._width = 0
        self.token_ids = torch.empty(num_slots, 0, dtype=torch.int64, device=device)
        self.counts = torch.empty(num_slots, 0, dtype=torch.int32, device=device)
        self.in_prompt = torch.empty(num_slots, 0, dtype=torch.bool, device=device)
        self._lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # Upper bounds of the lengths, so that growing never has to wait for the device.
        self._max_lengths = [0] * num_slots

    def assign(
        self, slot: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], upload: Upload
    ) -> None:
        """Start the slot's list anew when the upload arrives."""
        counts = Counter(output_token_ids)
        prompt = set(prompt_token_ids)
        distinct = sorted(prompt | counts.keys())
        length = len(distinct)
        self._max_lengths[slot] = length
        if not distinct:
            distinct = [0]
        sent_ids = upload.integers(distinct)
        sent_counts = upload.integers([counts[token] for token in distinct])
        sent_in_prompt = upload.integers([token in prompt for token in distinct])

        def write() -> None:
            self._widen(length + 1)
            for rows, sent in (
                (self.token_ids, sent_ids),
                (self.counts, sent_counts),
                (self.in_prompt, sent_in_prompt),
            ):
                row, values = rows[slot], sent.tensor
                row[len(values) :].copy_(values[:1].expand(len(row) - len(values)))
                row[: len(values)].copy_(values)
            self._lengths[slot].fill_(length)

        upload.then(write)

    def record(self, slots: Sequence[int], rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count one generated token in each of the given slots. rows: the slots as [len(slots)] I64 on the
        device. token_ids: [len(slots)] I64."""
        for slot in slots:
            self._max_lengths[slot] += 1
        self._widen(max([self._max_lengths[slot] for slot in slots]) + 1)
        tokens = token_ids[:, None]
        is_match = self.token_ids[rows] == tokens
        is_new = ~is_match.any(-1)
        self.counts[rows] += is_match.int()
        ends = self._lengths[rows]
        self.token_ids[rows, ends] = torch.where(is_new, token_ids, self.token_ids[rows, ends])
        self.counts[rows, ends] = torch.where(is_new, 1, self.counts[rows, ends])
        self.in_prompt[rows, ends] &= ~is_new
        self._lengths[rows] += is_new.long()

    def _widen(self, width: int) -> None:
        if width <= self._width:
            return
        new_width = max(INITIAL_WIDTH, self._width)
        while new_width < width:
            new_width *= 2
        for name in ("token_ids", "counts", "in_prompt"):
            old = getattr(self, name)
            new = old.new_zeros(self._num_slots, new_width)
            if self._width:
                new[:, : self._width] = old
                new[:, self._width :] = old[:, :1]
            setattr(self, name, new)
        self._width = new_width
