"""Parameters of OpenAI's and vLLM's API that this server does not have: which are refused, which do nothing.

A parameter that would change the answer is refused unless it has a value that changes nothing. What is in
neither table nor in the schemas is unknown, and refused too. The documentation's compatibility table is made
from here.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tiny_vllm.errors import printable, shown
from tiny_vllm.serving.errors import ApiError


@dataclass(frozen=True, slots=True)
class Refused:
    """reason: why it cannot be honoured. neutral: values, beside null, that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


NO_STRUCTURE = "output is not constrained to a grammar or schema"
NO_TOOLS = "tool calls are not parsed"
NO_MEDIA = "only text goes in and out"
NO_BEAMS = "there is no beam search"
NO_REASONING = "reasoning is not controlled apart from the text"

REFUSED: Mapping[str, Refused] = {
    "add_special_tokens": Refused("the chat template says where conversations have special tokens", (False,)),
    "audio": Refused(NO_MEDIA),
    "best_of": Refused("only as many choices are generated as are returned", (1,)),
    "chat_template": Refused("conversations are rendered by the model's own template"),
    "continue_final_message": Refused("a conversation always ends with a new turn", (False,)),
    "documents": Refused("documents do not reach the prompt", ([],)),
    "echo": Refused("only /v1/completions repeats the prompt", (False,)),
    "embed_dtype": Refused("embeddings are FP32", ("float32",)),
    "endianness": Refused("embeddings are little-endian", ("little",)),
    "function_call": Refused(NO_TOOLS, ("none", "auto")),
    "functions": Refused(NO_TOOLS, ([],)),
    "guided_choice": Refused(NO_STRUCTURE),
    "guided_decoding_backend": Refused(NO_STRUCTURE),
    "guided_grammar": Refused(NO_STRUCTURE),
    "guided_json": Refused(NO_STRUCTURE),
    "guided_regex": Refused(NO_STRUCTURE),
    "guided_whitespace_pattern": Refused(NO_STRUCTURE),
    "kv_transfer_params": Refused("keys and values stay on this machine"),
    "length_penalty": Refused(NO_BEAMS, (1.0,)),
    "logits_processors": Refused("clients cannot run code here", ([],)),
    "media_io_kwargs": Refused(NO_MEDIA, ({},)),
    "mm_processor_kwargs": Refused(NO_MEDIA, ({},)),
    "moderation": Refused("nothing is moderated"),
    "modalities": Refused(NO_MEDIA, (["text"],)),
    "prompt_embeds": Refused("prompts are text or token ids"),
    "reasoning_effort": Refused(NO_REASONING),
    "repetition_detection": Refused("repetitions do not end an answer"),
    "response_format": Refused(NO_STRUCTURE, ({"type": "text"},)),
    "return_prompt_text": Refused("the text of the prompt is not sent back", (False,)),
    "spaces_between_special_tokens": Refused("special tokens are joined as they are", (True,)),
    "structured_outputs": Refused(NO_STRUCTURE),
    "suffix": Refused("text is continued, not filled in", ("",)),
    "thinking_token_budget": Refused(NO_REASONING),
    "tool_choice": Refused(NO_TOOLS, ("none", "auto")),
    "tools": Refused(NO_TOOLS, ([],)),
    "truncate_prompt_tokens": Refused("prompts are never cut"),
    "truncation_side": Refused("prompts are never cut"),
    "use_activation": Refused("normalize says whether embeddings get length 1", (True,)),
    "use_beam_search": Refused(NO_BEAMS, (False,)),
    "verbosity": Refused(NO_REASONING),
    "vllm_xargs": Refused("there are no extension arguments", ({},)),
    "web_search_options": Refused("nothing is looked up elsewhere"),
}

IGNORED: Mapping[str, str] = {
    "include_reasoning": "reasoning, if a model writes any, is part of the text",
    "metadata": "kept for the client's own records; nothing is stored here",
    "parallel_tool_calls": "there are no tool calls",
    "prediction": "could only make an answer faster",
    "prompt_cache_options": "prefixes are cached as far as they are equal",
    "prompt_cache_key": "prefixes are found by content; use cache_salt to keep them apart",
    "prompt_cache_retention": "pages are kept as long as there is room",
    "safety_identifier": "names the end user",
    "service_tier": "there is one tier; use priority",
    "store": "nothing is stored",
    "user": "names the end user",
}


def check_unsupported(
    extras: Mapping[str, Any], known: Collection[str], elsewhere: Collection[str] = ()
) -> None:
    """Refuse what a request brings beside the fields of its schema. Raises ApiError naming the first.

    known: the fields. elsewhere: those of all endpoints.
    """
    for name, value in extras.items():
        if name in IGNORED:
            continue
        refused = REFUSED.get(name)
        if refused is None:
            hint = name_hint(name, [*known, *REFUSED, *IGNORED])
            if name in elsewhere:
                hint = "only other endpoints have it"
            raise ApiError(
                400,
                f"unknown parameter {shown(name)}\nhint: {hint}",
                param=printable(name),
                code="unknown_parameter",
            )
        if value is not None and not _is_among(value, refused.neutral):
            raise ApiError(
                400,
                f"{name} is not supported: {refused.reason}\nhint: leave it out",
                param=name,
                code="unsupported_parameter",
            )


def name_hint(name: str, known: Collection[str]) -> str:
    """What to do about a name that is not among those that are known."""
    close = difflib.get_close_matches(name[:64], known, n=1)
    return f"did you mean {close[0]}?" if close else "leave it out"


def _is_among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equal and of the same kind: True is not 1 here."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
