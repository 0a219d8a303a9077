"""What the runner asks of a device's way to compute a step of decodes alone."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DecodeStepper(Protocol):
    """Computes the next token of some slots from the slot tables on the device, without waiting for it.

    slots: [B] int64 on the device, distinct; a tensor that was given before still holds the same slots.
    max_context_len: at least the longest context of the step, this step's tokens included. Logits may be
    overwritten by the next call: the runner reads them on the same stream before.
    """

    @property
    def max_rows(self) -> int:
        """Most slots in a step."""
        ...

    def draw(self, slots: Tensor, max_context_len: int, tokens: Tensor) -> None:
        """Write tokens drawn by temperature alone to `tokens`, -1 where a row's logits were not usable.

        tokens: [B] int64, contiguous, on the device or, on a GPU, in page-locked memory of the host, which
        kernels may write to directly: a copy between two steps would cost some microseconds. last_token
        becomes the token, or any other of the vocabulary instead of -1; computed_len and the position of the
        random stream grow by one.
        """
        ...

    def logits(self, slots: Tensor, max_context_len: int) -> Tensor:
        """FP32 [B, vocab], contiguous, which the sampler may change. The slot tables stay as they are."""
        ...
