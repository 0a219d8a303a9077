"""A finished request as plain data for JSON, and as one line of statistics for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiny_vllm.outputs import Logprob, RequestOutput


def output_record(output: RequestOutput) -> dict[str, Any]:
    """Every field of a RequestOutput, with its metrics as durations in seconds."""
    metrics = output.metrics
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "outputs": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "cumulative_logprob": choice.cumulative_logprob,
                "logprobs": _logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ],
        "finished": output.finished,
        "metrics": {
            "queue_time": metrics.queue_time,
            "time_to_first_token": metrics.time_to_first_token,
            "time_per_output_token": metrics.time_per_output_token,
            "num_generated_tokens": metrics.num_generated_tokens,
            "num_cached_tokens": metrics.num_cached_tokens,
        },
    }


def _logprobs(positions: Sequence[dict[int, Logprob] | None] | None) -> list[dict[int, Any] | None] | None:
    if positions is None:
        return None
    return [
        position and {token_id: logprob._asdict() for token_id, logprob in position.items()}
        for position in positions
    ]


def stats_line(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Tokens, rates and waiting times of requests that ran together for `seconds`."""
    generated = sum(output.metrics.num_generated_tokens for output in outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    parts = [f"{generated} tokens", f"{generated / max(seconds, 1e-9):.1f} tokens/s"]
    first = [output.metrics.time_to_first_token for output in outputs]
    waits = [wait for wait in first if wait is not None]
    if waits:
        parts.append(f"first after {sum(waits) / len(waits) * 1000:.0f} ms")
    parts.append(f"prompt {prompt} tokens ({cached} cached)")
    return ", ".join(parts)
