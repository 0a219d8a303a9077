"""From outputs to the JSON of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiny_vllm.outputs import Logprob, RequestOutput
from tiny_vllm.serving.formats import Heading, is_plain, merge, usage, usage_chunks, with_usage
from tiny_vllm.serving.generation import PromptUpdate
from tiny_vllm.serving.logprob_format import (
    finite,
    is_asked_for,
    paired,
    shown_prompt_logprobs,
    token_name,
)
from tiny_vllm.serving.schemas import ChatBody
from tiny_vllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """/v1/chat/completions."""

    body: ChatBody
    heading: Heading
    tokenizer: Tokenizer | None

    @property
    def is_plain(self) -> bool:
        return is_plain(self.body) and not self.body.logprobs

    def opening(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Who speaks, for each choice."""
        (output,) = outputs
        chunks = []
        for made in output.outputs:
            delta = {"role": "assistant", "content": ""}
            choice: dict[str, Any] = {
                "index": made.index,
                "delta": delta,
                "logprobs": None,
                "finish_reason": None,
            }
            if self.body.return_token_ids:
                choice["prompt_token_ids"] = output.prompt_token_ids
            chunks.append(self._chunk([choice], outputs))
        return chunks

    def chunks(
        self, outputs: Sequence[RequestOutput], updates: Sequence[PromptUpdate]
    ) -> list[dict[str, Any]]:
        chunks = []
        for _, delta in merge(updates):
            shows_ids = self.body.return_token_ids and delta.token_ids
            if not (delta.text or delta.logprobs or delta.finish_reason or shows_ids):
                continue
            choice: dict[str, Any] = {
                "index": delta.index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            if self.body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            chunks.append(self._chunk([choice], outputs))
        return chunks

    def closing(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        return usage_chunks(self.heading.of("chat.completion.chunk", choices=[]), self.body, outputs)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = []
        for made in output.outputs:
            message = {"role": "assistant", "content": made.text, "refusal": None}
            choice: dict[str, Any] = {
                "index": made.index,
                "message": message,
                "logprobs": self._logprobs(made.token_ids, made.logprobs),
                "finish_reason": made.finish_reason,
                "stop_reason": made.stop_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = made.token_ids
            choices.append(choice)
        answer = self.heading.of("chat.completion", choices=choices, usage=usage(outputs))
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = shown_prompt_logprobs(output)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _chunk(self, choices: list[dict[str, Any]], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return with_usage(self.heading.of("chat.completion.chunk", choices=choices), self.body, outputs)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]] | None
    ) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        content = []
        for token_id, position in paired(token_ids, logprobs):
            assert position is not None
            tops = sorted(position.items(), key=lambda item: item[1].rank)
            content.append(
                {
                    **self._token(token_id, position[token_id]),
                    "top_logprobs": [
                        self._token(other_id, entry)
                        for other_id, entry in tops
                        if is_asked_for(entry, self.body.top_logprobs or 0)
                    ],
                }
            )
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        name = token_name(token_id, entry.decoded_token, bool(self.body.return_tokens_as_token_ids))
        bytes_ = [] if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))
        return {"token": name, "logprob": finite(entry.logprob), "bytes": bytes_}
