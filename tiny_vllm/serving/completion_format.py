"""From outputs to the JSON of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiny_vllm.outputs import ChoiceDelta, CompletionOutput, RequestOutput
from tiny_vllm.serving.formats import Heading, is_plain, merge, usage, usage_chunks, with_usage
from tiny_vllm.serving.generation import PromptUpdate
from tiny_vllm.serving.logprob_format import (
    Entries,
    finite,
    is_asked_for,
    paired,
    shown_prompt_logprobs,
    token_name,
)
from tiny_vllm.serving.schemas import CompletionBody
from tiny_vllm.text.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionFormat:
    """/v1/completions. text_lens: characters of the token texts reported so far, by prompt and choice."""

    body: CompletionBody
    heading: Heading
    tokenizer: Tokenizer | None
    text_lens: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return is_plain(self.body) and self.body.logprobs is None and not self.body.echo

    def opening(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        return []

    def chunks(
        self, outputs: Sequence[RequestOutput], updates: Sequence[PromptUpdate]
    ) -> list[dict[str, Any]]:
        chunks = []
        for place, delta in merge(updates):
            output = outputs[place]
            key = (place, delta.index)
            text, entries = delta.text, paired(delta.token_ids, delta.logprobs)
            is_first = key not in self.text_lens
            if is_first:
                self.text_lens[key] = 0
                if self.body.echo:
                    text = self._prompt_text(output) + text
                    entries = [*self._prompt_entries(output), *entries]
            if not (text or entries or delta.finish_reason or self._shows_ids(delta)):
                continue
            choice = self._choice(place, output, delta.index, text, entries, delta.finish_reason)
            choice["stop_reason"] = delta.stop_reason
            if self.body.return_token_ids:
                choice["token_ids"] = delta.token_ids
                if is_first:
                    choice["prompt_token_ids"] = output.prompt_token_ids
            chunks.append(self._chunk([choice], outputs))
        return chunks

    def closing(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        return usage_chunks(self.heading.of("text_completion", choices=[]), self.body, outputs)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [
            self._whole_choice(place, output, choice)
            for place, output in enumerate(outputs)
            for choice in output.outputs
        ]
        return self.heading.of("text_completion", choices=choices, usage=usage(outputs))

    def _whole_choice(self, place: int, output: RequestOutput, made: CompletionOutput) -> dict[str, Any]:
        text, entries = made.text, paired(made.token_ids, made.logprobs)
        if self.body.echo:
            text = self._prompt_text(output) + text
            entries = [*self._prompt_entries(output), *entries]
        choice = self._choice(place, output, made.index, text, entries, made.finish_reason)
        choice["stop_reason"] = made.stop_reason
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = shown_prompt_logprobs(output)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = made.token_ids
        return choice

    def _choice(
        self,
        place: int,
        output: RequestOutput,
        index: int,
        text: str,
        entries: Entries,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self._logprobs(entries, (place, index))
        return {
            "index": place * len(output.outputs) + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _shows_ids(self, delta: ChoiceDelta) -> bool:
        return bool(self.body.return_token_ids and delta.token_ids)

    def _chunk(self, choices: list[dict[str, Any]], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        chunk = self.heading.of("text_completion", choices=choices)
        return with_usage(chunk, self.body, outputs)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(output.prompt_token_ids)

    def _prompt_entries(self, output: RequestOutput) -> Entries:
        if output.prompt_logprobs is None:
            return []
        return list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))

    def _logprobs(self, entries: Entries, key: tuple[int, int]) -> dict[str, Any]:
        """OpenAI's older format: parallel lists; text_offset counts the characters of the tokens before."""
        number = self.body.logprobs or 0
        as_ids = bool(self.body.return_tokens_as_token_ids)
        offset = self.text_lens.get(key, 0)
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in entries:
            text = self.tokenizer.token_text(token_id) if self.tokenizer is not None else None
            tokens.append(token_name(token_id, text, as_ids))
            offsets.append(offset)
            offset += len(text or "")
            if position is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(finite(position[token_id].logprob))
            top: dict[str, float] = {}
            for other_id, entry in position.items():
                if other_id == token_id or is_asked_for(entry, number):
                    top.setdefault(token_name(other_id, entry.decoded_token, as_ids), finite(entry.logprob))
            tops.append(top)
        self.text_lens[key] = offset
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
