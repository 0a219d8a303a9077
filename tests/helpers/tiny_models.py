"""Tiny random Llama models, made and saved by transformers, with a working tokenizer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

BOS, EOS, TURN_START, TURN_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, TURN_START, TURN_END)
BOS_ID, EOS_ID, TURN_START_ID, TURN_END_ID = range(4)

TOKENIZER_TEXT = (
    "The quick brown fox jumps over the lazy dog. Pages of keys and values live in one pool, and a "
    "sequence that ends gives its pages back. Hello, world! One, two, three: what is the answer?"
)
NUM_MERGES = 60
VOCAB_SIZE = 384
"""Rows of the tiny models' embedding: more than the tokenizer has, as in many real checkpoints."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_llama(seed: int = 0, **overrides: Any) -> Any:
    """A random LlamaForCausalLM in FP32, ready to evaluate.

    overrides: fields of LlamaConfig, such as tie_word_embeddings, num_key_value_heads, attention_bias,
    mlp_bias, head_dim, vocab_size, rope_parameters. Weights are spread widely enough that greedy choices
    are no near-ties; norms and biases are random too, because ones and zeros would hide mistakes.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**options, **overrides})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
    return model


def save_tiny_llama(
    directory: Path,
    model: Any,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    old_style: bool = False,
    tokenizer: bool = True,
) -> Path:
    """Write a model as `save_pretrained` does, and return the directory.

    dtype: of the stored tensors. max_shard_size: e.g. "40KB" for a sharded checkpoint with an index.
    old_style: config.json with rope_theta, rope_scaling and torch_dtype, as before transformers 5.
    """
    stored = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    stored.save_pretrained(directory, max_shard_size=max_shard_size)
    if old_style:
        make_config_old_style(directory)
    if tokenizer:
        save_tiny_tokenizer(directory)
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON object; a value of None removes the field."""
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def make_config_old_style(directory: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_scaling"] = None
    if rope["rope_type"] != "default":
        # The oldest configs say `type`; those that came with llama3 and yarn say `rope_type`.
        if rope["rope_type"] in ("linear", "dynamic"):
            rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
    (directory / "config.json").write_text(json.dumps(config))


def make_tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer (`tokenizers.Tokenizer`) with BOS, EOS and two chat tokens as ids 0 to 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL_TOKENS) + 256 + NUM_MERGES,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TOKENIZER_TEXT], trainer)
    return tokenizer


def save_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    make_tiny_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": TURN_END,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
