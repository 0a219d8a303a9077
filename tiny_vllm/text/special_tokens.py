"""Which tokens are put around a prompt."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import processors


def set_bos_and_eos(backend: Backend, *, bos_token: str | None, eos_token: str | None) -> None:
    """Make encoding start with bos_token and end with eos_token; None adds nothing there."""
    around = [token for token in (bos_token, eos_token) if token is not None]
    if not around:
        backend.post_processor = None
        return
    template = [bos_token] * (bos_token is not None) + ["$A"] + [eos_token] * (eos_token is not None)
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
    backend.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=ids)
