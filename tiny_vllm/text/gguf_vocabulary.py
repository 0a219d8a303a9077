"""A tokenizer as a GGUF file describes it: plain data, read by `weights` and turned into a Tokenizer here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class GGUFTokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


DEFAULT_UNK_ID, DEFAULT_BOS_ID, DEFAULT_EOS_ID = 0, 1, 2
"""What SentencePiece models mean when the file names no such token."""

END_OF_TURN_TOKENS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>"}
)
"""Control tokens that end a reply. Many files name only the token that ends a document."""

END_OF_MESSAGE, END_OF_REPLY = "<|end|>", "<|return|>"
"""Where there is the second, as in gpt-oss, the first ends one of a reply's messages, and more follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFVocabulary:
    """The metadata under `tokenizer.*`. A field is None where the file has no such key.

    model: `tokenizer.ggml.model`; "gpt2" is byte-level BPE, "llama" is SentencePiece BPE.
    pre: `tokenizer.ggml.pre`, the name of the rule that splits text before the merges (byte-level BPE only).
    tokens: piece of each token id. token_types: a GGUFTokenType of each (None: all are normal).
    scores: priority of each piece (SentencePiece only). merges: "left right" in order of rank (BPE only).
    add_bos_token, add_eos_token: `tokenizer.ggml.add_bos_token`, `tokenizer.ggml.add_eos_token`.
    add_space_prefix: `tokenizer.ggml.add_space_prefix` (SentencePiece only).
    chat_template: `tokenizer.chat_template`.
    """

    model: str
    tokens: Sequence[str]
    pre: str | None = None
    token_types: Sequence[int] | None = None
    scores: Sequence[float] | None = None
    merges: Sequence[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None
    pad_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_space_prefix: bool | None = None
    chat_template: str | None = None
