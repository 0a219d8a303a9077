"""What the device knows of every slot: its page table, its computed length and its last token.

One row per slot, allocated once. A step changes only the rows its plan names.
"""

from __future__ import annotations

import torch

from tiny_vllm.engine.page_pool import NULL_PAGE
from tiny_vllm.engine.plan import StepPlan
from tiny_vllm.engine.transfers import Upload


class SlotTable:
    """page_table [slots, max pages] int64, null pages beyond a sequence's own;
    computed_len [slots] int64; last_token [slots] int64.

    num_pages [slots] is kept on the host, so that a batch's page tables can be cut to the widest row without
    asking the device. all_page_table, all_computed_len, all_last_token: the same tensors with one row more,
    `padding_slot`, which stays an empty sequence of null pages.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        rows = num_slots + 1
        self.padding_slot = num_slots
        self.all_page_table = torch.full((rows, max_pages), NULL_PAGE, dtype=torch.int64, device=device)
        self.all_computed_len = torch.zeros(rows, dtype=torch.int64, device=device)
        self.all_last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = self.all_page_table[:num_slots]
        self.computed_len = self.all_computed_len[:num_slots]
        self.last_token = self.all_last_token[:num_slots]
        self.num_pages = [0] * num_slots

    def edit(self, plan: StepPlan, upload: Upload) -> None:
        """Make the plan's edits when the upload arrives: rows of admitted sequences, new pages, and the
        lengths its chunks will have computed, but for the last token of those that sample: whoever draws the
        next one counts it."""
        if plan.admissions:
            self._clear(plan, upload)
        places: list[int] = []
        pages: list[int] = []
        width = self.page_table.shape[1]
        for admission in plan.admissions:
            first = admission.slot * width
            places.extend(range(first, first + len(admission.page_ids)))
            pages.extend(admission.page_ids)
            self.num_pages[admission.slot] = len(admission.page_ids)
        for edit in plan.page_edits:
            places.append(edit.slot * width + edit.index)
            pages.append(edit.page_id)
            self.num_pages[edit.slot] = max(self.num_pages[edit.slot], edit.index + 1)
        if places:
            sent_places, sent_pages = upload.integers(places), upload.integers(pages)
            upload.then(
                lambda: self.page_table.view(-1).index_copy_(0, sent_places.tensor, sent_pages.tensor)
            )
        lengths = {admission.slot: admission.computed_len for admission in plan.admissions}
        lengths.update(
            (chunk.slot, chunk.start + len(chunk.token_ids) - int(chunk.samples)) for chunk in plan.chunks
        )
        if lengths:
            slots, values = upload.integers(list(lengths)), upload.integers(list(lengths.values()))
            upload.then(lambda: self.computed_len.index_copy_(0, slots.tensor, values.tensor))

    def _clear(self, plan: StepPlan, upload: Upload) -> None:
        slots = upload.integers([admission.slot for admission in plan.admissions])
        upload.then(lambda: self.page_table.index_fill_(0, slots.tensor, NULL_PAGE))
