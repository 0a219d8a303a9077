"""A tokenizer.json in the form that Gemma's has: SentencePiece BPE without a space put before the text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tiny_vllm.text.gguf_tokenizer import tokenizer_from_gguf
from tiny_vllm.text.gguf_vocabulary import GGUFVocabulary
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.text.tokenizer_directory import load_tokenizer_directory


def merges_of(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Pairs in the order of the scores of what they become."""
    assert vocabulary.scores is not None and vocabulary.token_types is not None
    pieces = {
        token: score
        for token, score, kind in zip(
            vocabulary.tokens, vocabulary.scores, vocabulary.token_types, strict=True
        )
        if kind == 1
    }
    pairs = [
        (-score, (piece[:split], piece[split:]))
        for piece, score in pieces.items()
        for split in range(1, len(piece))
        if piece[:split] in pieces and piece[split:] in pieces
    ]
    return [pair for _, pair in sorted(pairs, key=lambda item: item[0])]


@pytest.fixture(scope="module")
def published(
    sentencepiece_vocabulary: GGUFVocabulary, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    ids = {token: index for index, token in enumerate(sentencepiece_vocabulary.tokens)}
    merges = merges_of(sentencepiece_vocabulary)
    backend = Backend(
        models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=None, special_tokens=[("<s>", ids["<s>"])]
    )
    directory = tmp_path_factory.mktemp("gemma")
    backend.save(str(directory / "tokenizer.json"))
    roles: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (Path(directory) / "tokenizer_config.json").write_text(json.dumps(roles))
    return load_tokenizer_directory(directory)


def test_ids_are_those_of_sentencepiece(published: Tokenizer, sentencepiece_data: dict[str, Any]) -> None:
    for text, ids in zip(
        sentencepiece_data["texts"], sentencepiece_data["ids_without_space_prefix"], strict=True
    ):
        assert published.encode(text, add_special_tokens=False) == ids, text


def test_it_is_the_tokenizer_that_a_gguf_file_of_the_model_describes(
    published: Tokenizer, sentencepiece_vocabulary: GGUFVocabulary, sentencepiece_data: dict[str, Any]
) -> None:
    described = tokenizer_from_gguf(
        replace(sentencepiece_vocabulary, add_space_prefix=False, add_bos_token=True)
    )
    assert not published.drops_leading_space and not described.drops_leading_space
    for text in sentencepiece_data["texts"]:
        ids = published.encode(text)
        assert ids == described.encode(text)
        assert published.decode(ids) == described.decode(ids)
        if not any(token in text for token in ("<s>", "</s>", "<unk>")):
            assert published.decode(ids) == text
