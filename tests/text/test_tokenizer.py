from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tiny_vllm.errors import PromptTooLong, RequestError
from tiny_vllm.text.gguf_tokenizer import tokenizer_from_gguf
from tiny_vllm.text.gguf_vocabulary import GGUFVocabulary
from tiny_vllm.text.pieces import byte_alphabet
from tiny_vllm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def bos_tokenizer(byte_level_vocabulary: GGUFVocabulary) -> Tokenizer:
    return tokenizer_from_gguf(replace(byte_level_vocabulary, add_bos_token=True))


def test_encoding_adds_bos_once(bos_tokenizer: Tokenizer) -> None:
    word = bos_tokenizer.encode("hi", add_special_tokens=False)
    assert bos_tokenizer.encode("hi") == [0, *word]
    assert bos_tokenizer.encode("<s>hi") == [0, *word]
    assert bos_tokenizer.encode("") == [0]
    assert bos_tokenizer.encode("<s>") == [0]


def test_bos_written_twice_by_the_client_stays(bos_tokenizer: Tokenizer) -> None:
    assert bos_tokenizer.encode("<s><s>hi", add_special_tokens=False)[:3] != [0, 0, 0]
    assert bos_tokenizer.encode("<s><s>hi")[:2] == [0, 0]


@pytest.mark.parametrize("rendered", ["<s>hi", "hi"])
def test_a_conversation_gets_exactly_one_bos_on_every_path(bos_tokenizer: Tokenizer, rendered: str) -> None:
    ids = bos_tokenizer.encode_chat(rendered)
    assert ids == bos_tokenizer.encode(rendered)
    assert ids.count(0) == 1


def test_no_bos_without_the_tokenizers_wish(byte_level_tokenizer: Tokenizer) -> None:
    assert not byte_level_tokenizer.adds_bos
    assert byte_level_tokenizer.encode("") == []
    assert byte_level_tokenizer.encode_chat("hi") == byte_level_tokenizer.encode("hi")


def test_a_conversation_gets_no_eos(byte_level_vocabulary: GGUFVocabulary) -> None:
    tokenizer = tokenizer_from_gguf(replace(byte_level_vocabulary, add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("hi")[-1] == byte_level_vocabulary.eos_token_id
    assert tokenizer.encode_chat("hi") == tokenizer.encode("hi")[:-1]


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00", None, 5, b"bytes"])
def test_what_is_not_text_is_refused(byte_level_tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(RequestError, match=r"not valid Unicode: U\+D.*\nhint: .*not UTF-8|must be a string"):
        byte_level_tokenizer.encode(text)  # type: ignore[arg-type]


def test_the_vocabulary_reaches_to_the_highest_id() -> None:
    tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a")))
    assert tokenizer.vocab_size == 8


def test_limits_of_the_checkpoint_do_not_cut_prompts(byte_level_tokenizer: Tokenizer) -> None:
    backend = Backend.from_str(byte_level_tokenizer._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert Tokenizer(backend).encode("some longer text") == byte_level_tokenizer.encode("some longer text")


def test_token_text_keeps_spaces_and_marks_parts_of_characters(
    byte_level_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer
) -> None:
    (spaced,) = sentencepiece_tokenizer.encode("is", add_special_tokens=False)
    assert sentencepiece_tokenizer.token_text(spaced) == " is"
    first_byte = byte_level_tokenizer.token_id("ð")
    assert first_byte is not None
    assert byte_level_tokenizer.token_text(first_byte) == "\ufffd"
    assert byte_level_tokenizer.token_text(0) == "<s>"
    assert byte_level_tokenizer.token_text(10**6) == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("word", ["is", "import", "x1", "über"])
def test_a_word_has_a_form_after_a_space_and_a_joined_one(
    request: pytest.FixtureRequest, kind: str, word: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(f"{kind}_tokenizer")
    after_space, joined = tokenizer.encode_word(word)
    assert tokenizer.decode(after_space, continues=True) == f" {word}"
    assert tokenizer.decode(joined, continues=True) == word


@pytest.mark.parametrize("length", [0, 1, 3000])
def test_texts_get_the_ids_of_the_librarys_plain_call(bos_tokenizer: Tokenizer, length: int) -> None:
    """They are encoded by a call that works out no offsets."""
    text = "hi, hello\n 12 " * length
    for add in (True, False):
        expected = bos_tokenizer._backend.encode(text, add_special_tokens=add).ids
        assert bos_tokenizer.encode(text, add_special_tokens=add) == expected
    assert bos_tokenizer.encode_chat(text) == bos_tokenizer.encode(text)


def byte_level_backend(**changes: Any) -> Backend:
    """A BPE of bytes and a token of 12 of them."""
    vocabulary = {character: place for place, character in enumerate(byte_alphabet())}
    vocabulary["abcdefghijkl"] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, [], **changes))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_how_many_tokens_a_text_has_at_least_is_known_without_encoding_it() -> None:
    tokenizer = Tokenizer(byte_level_backend())
    assert [tokenizer.fewest_tokens("a" * size) for size in (0, 1, 12, 13, 120)] == [0, 1, 1, 2, 10]
    assert tokenizer.fewest_tokens("é" * 7) == 2
    backend = byte_level_backend()
    backend.add_tokens(["a token of 25 characters.."])
    assert Tokenizer(backend).fewest_tokens("a" * 26) == 1
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    assert Tokenizer(backend).fewest_tokens("e\u0301" * 12) == 1


def test_where_a_token_may_stand_for_any_length_nothing_is_known() -> None:
    backend = byte_level_backend()
    backend.normalizer = normalizers.Strip()
    assert Tokenizer(backend).fewest_tokens(" " * 1000) == 0
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<x>", rstrip=True)])
    assert Tokenizer(backend).fewest_tokens("<x>" + " " * 1000) == 0
    backend = byte_level_backend()
    split = pre_tokenizers.Split(" ", "removed")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert Tokenizer(backend).fewest_tokens("a" + " " * 1000) == 0
    assert Tokenizer(Backend(models.WordLevel({"?": 0}, "?"))).fewest_tokens("a" * 1000) == 0


@pytest.mark.parametrize("parse", [True, False])
def test_what_surely_exceeds_the_context_is_not_encoded(parse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_backend())
    text = "x" * 121
    assert len(tokenizer.encode(text, parse_special_tokens=parse, context_len=12)) == 121
    monkeypatch.setattr(tokenizer, "_ids", None)
    with pytest.raises(PromptTooLong, match=r"has 11 tokens or more, .* maximum context length is 11 tokens"):
        tokenizer.encode(text, parse_special_tokens=parse, context_len=11)
