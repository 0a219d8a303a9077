"""What all kernel tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
