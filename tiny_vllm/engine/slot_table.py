"""What the device knows of every slot: its page table, its computed length and its last token.

One row per slot, allocated once. A step changes only the rows its plan names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiny_vllm.engine.page_pool import NULL_PAGE
from tiny_vllm.engine.plan import Admission, PageEdit


class SlotTable:
    """page_table [slots, max pages] int64, null pages beyond a sequence's own;
    computed_len [slots] int64; last_token [slots] int64.

    num_pages [slots] is kept on the host, so that a batch's page tables can be cut to the widest row without
    asking the device.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.page_table = torch.full((num_slots, max_pages), NULL_PAGE, dtype=torch.int64, device=device)
        self.computed_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.num_pages = [0] * num_slots

    def admit(self, admission: Admission) -> None:
        """Fill a row for a sequence that takes the slot."""
        row = self.page_table[admission.slot]
        row.fill_(NULL_PAGE)
        row[: len(admission.page_ids)] = torch.tensor(admission.page_ids, device=row.device)
        self.computed_len[admission.slot] = admission.computed_len
        self.num_pages[admission.slot] = len(admission.page_ids)

    def edit_pages(self, edits: Sequence[PageEdit]) -> None:
        """Append pages to rows."""
        if not edits:
            return
        rows, columns, pages = zip(*((edit.slot, edit.index, edit.page_id) for edit in edits), strict=True)
        device = self.page_table.device
        self.page_table[torch.tensor(rows, device=device), torch.tensor(columns, device=device)] = (
            torch.tensor(pages, device=device)
        )
        for edit in edits:
            self.num_pages[edit.slot] = edit.index + 1
