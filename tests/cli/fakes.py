"""An LLM without a model: it answers with given words and keeps a diary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from tiny_vllm.config import EngineConfig
from tiny_vllm.models.spec import ModelSpec, RopeSpec
from tiny_vllm.outputs import ChoiceDelta, CompletionOutput, RequestMetrics, RequestOutput, RequestUpdate
from tiny_vllm.types import SamplingParams

SPEC = ModelSpec(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=16),
    tie_word_embeddings=True,
)


@dataclass
class FakeLLM:
    """Answers every prompt with `words`, one word per step. before_word is called before each."""

    words: tuple[str, ...] = ("Hello", " big", " world")
    error: Exception | None = None
    finish_reason: str = "stop"
    before_word: Callable[[int], None] = lambda index: None
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    num_aborted: int = 0
    num_open: int = 0
    is_closed: bool = False
    _sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    spec: ModelSpec = SPEC
    tokenizer: object = "it takes text"
    config: EngineConfig = field(
        default_factory=lambda: EngineConfig(
            device="cpu", dtype="bfloat16", max_model_len=256, max_num_seqs=4, num_pages=32
        )
    )

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def stream(self, prompt: Any, sampling_params: SamplingParams) -> Iterator[RequestUpdate]:
        if self.error:
            raise self.error
        self.asked.append((prompt, sampling_params))
        return self._grow(prompt)

    def _grow(self, prompt: Any) -> Iterator[RequestUpdate]:
        self.num_open += 1
        is_complete = False
        try:
            output = self._output(prompt)
            for index, word in enumerate(self.words):
                self.before_word(index)
                is_last = index == len(self.words) - 1
                choice = output.outputs[0]
                choice.text += word
                choice.finish_reason = self.finish_reason if is_last else None
                is_complete = is_last
                yield RequestUpdate(output, [ChoiceDelta(0, word, finish_reason=choice.finish_reason)])
        finally:
            self.num_open -= 1
            self.num_aborted += not is_complete

    def generate(
        self, prompts: list[Any], sampling_params: SamplingParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        outputs = []
        for prompt in prompts:
            self.asked.append((prompt, sampling_params))
            output = self._output(prompt, "".join(self.words), self.finish_reason)
            output.outputs = [replace(output.outputs[0], index=index) for index in range(sampling_params.n)]
            outputs.append(output)
        return outputs

    def page_map(self) -> list[str]:
        return ["null", *["shared"] * 2, *["used"] * 3, *["cached"] * 4, *["free"] * 22]

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(prefix_hit_tokens=32, prefix_query_tokens=48)

    def _output(self, prompt: Any, text: str = "", finish_reason: str | None = None) -> RequestOutput:
        metrics = RequestMetrics(
            arrival_time=1.0,
            first_scheduled_time=1.25,
            first_token_time=1.5,
            last_token_time=2.5,
            num_generated_tokens=len(self.words),
            num_cached_tokens=2,
        )
        choice = CompletionOutput(0, text=text, token_ids=[7], finish_reason=finish_reason)
        return RequestOutput("r0", prompt if isinstance(prompt, str) else None, [1, 2, 3], [choice], metrics)
