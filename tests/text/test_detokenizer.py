from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tiny_vllm.text.gguf_tokenizer import tokenizer_from_gguf
from tiny_vllm.text.gguf_vocabulary import GGUFVocabulary
from tiny_vllm.text.pieces import BYTE_ALPHABET
from tiny_vllm.text.tokenizer import Tokenizer

KINDS = ("byte_level", "sentencepiece")
BEYOND = 40
"""Ids past the vocabulary, as a model with padded rows may produce them."""

TRICKY_TEXT = (
    "naïve 😀👍🏽 👨‍👩‍👧 🇩🇪 안녕하세요 한글 你好，世界 日本語 e\u0301 ก็กำ ١٢٣ \u200d \ufeff \x00\x7f ﬁ"
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(f"{request.param}_tokenizer")


def stream(tokenizer: Tokenizer, token_ids: Sequence[int], **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens that stand for single bytes."""
    characters = {byte: character for character, byte in BYTE_ALPHABET.items()}
    ids = []
    for byte in data:
        token_id = tokenizer.token_id(f"<0x{byte:02X}>")
        if token_id is None:
            token_id = tokenizer.token_id(characters[byte])
        assert token_id is not None
        ids.append(token_id)
    return ids


@given(data=st.data())
def test_joined_deltas_are_the_decoded_sequence(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + BEYOND)))
    skip, continues = data.draw(st.booleans()), data.draw(st.booleans())
    deltas = stream(tokenizer, ids, skip_special_tokens=skip, continues=continues)
    decoded = tokenizer.decode(ids, skip_special_tokens=skip, continues=continues)
    assert "".join(deltas) == decoded
    kept = [token_id for token_id in ids if not (skip and token_id in tokenizer.special_token_ids)]
    expected = b"".join(tokenizer.token_bytes(token_id) for token_id in kept)
    if tokenizer.drops_leading_space and not continues:
        expected = expected.removeprefix(b" ")
    assert decoded == expected.decode("utf-8", "replace")


@given(data=st.binary())
def test_random_bytes_give_the_replacement_character_only_where_they_are_invalid(
    tokenizer: Tokenizer, data: bytes
) -> None:
    ids = byte_ids(tokenizer, data)
    assert "".join(stream(tokenizer, ids, continues=True)) == data.decode("utf-8", "replace")


@given(text=st.text())
def test_text_split_into_bytes_comes_back_whole(tokenizer: Tokenizer, text: str) -> None:
    deltas = stream(tokenizer, byte_ids(tokenizer, text.encode()), continues=True)
    assert "".join(deltas) == text
    # Each delta is one whole character, or nothing: none is ever split or shown early.
    assert [delta for delta in deltas if delta] == list(text)


def test_tricky_text_comes_back_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TRICKY_TEXT)
    assert "".join(stream(tokenizer, ids)) == TRICKY_TEXT
    assert "".join(stream(tokenizer, byte_ids(tokenizer, TRICKY_TEXT.encode()))) == TRICKY_TEXT


def test_an_unfinished_character_is_held_back_and_released_at_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a😀".encode()[:-1])
    assert stream(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


def test_an_unfinished_character_does_not_swallow_the_next(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"\xe4\xbd" + "é".encode())
    assert "".join(stream(tokenizer, ids)) == "\ufffdé"


@given(data=st.data())
def test_decoding_is_that_of_the_tokenizers_library(
    byte_level_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level_tokenizer.vocab_size + BEYOND)))
    skip = data.draw(st.booleans())
    expected = byte_level_tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert byte_level_tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(data=st.data())
def test_sentencepiece_decoding_is_that_of_the_tokenizers_library_for_whole_characters(
    sentencepiece_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    tokenizer = sentencepiece_tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + BEYOND)))
    text = data.draw(st.text())
    ids += tokenizer.encode(text, add_special_tokens=False)
    skip = data.draw(st.booleans())
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in decoded:
        assert decoded == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_special_tokens_are_skipped_only_when_asked(tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_token_ids)
    ids = [*tokenizer.encode("ab", add_special_tokens=False), special]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab" + tokenizer.token_text(special)


def test_a_special_token_between_the_bytes_of_a_character_is_no_part_of_it(tokenizer: Tokenizer) -> None:
    first, second = byte_ids(tokenizer, "é".encode())
    ids = [first, min(tokenizer.special_token_ids), second]
    assert tokenizer.decode(ids) == "é"


def test_added_tokens_are_plain_text(byte_level_vocabulary: GGUFVocabulary) -> None:
    """Characters of ordinary byte-level pieces stand for bytes: "é" for a byte that is no character."""
    tokens = [*byte_level_vocabulary.tokens, "<é>", "<｜end▁of▁turn｜>"]
    types = [*(byte_level_vocabulary.token_types or ()), 4, 4]
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, tokens=tokens, token_types=types))
    ids = tokenizer.encode("<é><｜end▁of▁turn｜>é")
    assert ids[:2] == [len(tokens) - 2, len(tokens) - 1]
    assert tokenizer.decode(ids) == "<é><｜end▁of▁turn｜>é"


def test_ids_without_a_token_leave_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 1, 2**31, 2**70, -1]) == ""


def test_sentencepiece_drops_one_leading_space_at_the_start_of_a_text(
    sentencepiece_tokenizer: Tokenizer,
) -> None:
    ids = sentencepiece_tokenizer.encode("is", add_special_tokens=False)
    assert sentencepiece_tokenizer.decode(ids) == "is"
    assert sentencepiece_tokenizer.decode(ids, continues=True) == " is"
    assert sentencepiece_tokenizer.decode([1, *ids]) == "is"


WORDS = {"[UNK]": 0, "play": 1, "##ing": 2, "hello": 3, ",": 4}
OTHER_DECODERS = {"wordpiece": decoders.WordPiece(), "none": None, "metaspace": decoders.Metaspace()}


@pytest.mark.parametrize("name", OTHER_DECODERS)
@given(ids=st.lists(st.integers(0, len(WORDS) + 2), max_size=8))
def test_other_decoders_stream_what_they_decode(name: str, ids: list[int]) -> None:
    backend = Backend(models.WordLevel(WORDS, unk_token="[UNK]"))
    if (decoder := OTHER_DECODERS[name]) is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == backend.decode(ids)
