"""An engine process without a model: it says each prompt's tokens over and over, so a test writes the answer
into the prompt. Everything around it is the real thing: process, messages, loop. Only the warm-up is left
out, which imports torch: that takes eight times as long as all else that this process does to start.

Token i of choice c is prompt[(i + c) % length]. A pooled hidden state repeats the prompt's ids, or the
last one alone. STUB_STEP_SECONDS makes steps slow. A prompt that begins with two of the ids EXIT, FAIL, HANG
or BAD_LOGITS does what it says.

STUB_HOLD names a file. While that is there, neither loading nor a step of HANG comes to its end, and no
choice ends by its length: a test can look at what goes on for as long as it needs.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.engine import EngineStats, SequenceStatus
from tiny_vllm.engine.sequence import SequenceState
from tiny_vllm.errors import CapacityError, ConfigError, EngineDead, PromptTooLong
from tiny_vllm.serving import engine_process
from tiny_vllm.types import FinishReason, PromptInfo, Request, TokenEvent, TokenLogprobs

EOS = 2
EXIT, FAIL, HANG, BAD_LOGITS = 101, 102, 103, 104
PAGE_SIZE = 16
HIDDEN_SIZE = 576


@dataclass
class StubSequence:
    request: Request
    index: int
    num_generated: int = 0
    is_running: bool = False

    @property
    def num_pages(self) -> int:
        return -(-(len(self.request.prompt_token_ids) + self.num_generated) // PAGE_SIZE)


def is_held() -> bool:
    path = os.environ.get("STUB_HOLD")
    return path is not None and os.path.exists(path)


def wait_while_held() -> None:
    """Two minutes at most: the test may have been killed."""
    deadline = time.monotonic() + 120
    while is_held() and time.monotonic() < deadline:
        time.sleep(0.005)


class StubEngine:
    def __init__(self, config: EngineConfig) -> None:
        assert config.max_num_seqs and config.num_pages
        self.config = config
        self.sequences: list[StubSequence] = []
        self.ended: list[TokenEvent] = []
        self.num_steps = 0
        self.step_seconds = float(os.environ.get("STUB_STEP_SECONDS", "0"))

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or self.ended)

    def add(self, request: Request) -> None:
        assert self.config.num_pages
        if len(request.prompt_token_ids) > self.config.num_pages * PAGE_SIZE:
            raise PromptTooLong("the prompt can never fit", hint="shorten it")
        limit = self.config.max_queue_len
        assert self.config.max_num_seqs
        # As in the engine, those that find a free slot do not count as a queue.
        num_waiting = len(self.sequences) - self.config.max_num_seqs
        if limit is not None and num_waiting + request.sampling.n > limit:
            raise CapacityError("the queue is full", hint="try again later")
        self.sequences += [StubSequence(request, index) for index in range(request.sampling.n)]

    def abort(self, request_id: str) -> None:
        for sequence in [s for s in self.sequences if s.request.request_id == request_id]:
            self.end(sequence, FinishReason.ABORT)

    def stop(self, request_id: str, index: int) -> None:
        for sequence in [s for s in self.sequences if (s.request.request_id, s.index) == (request_id, index)]:
            self.end(sequence, FinishReason.STOP)

    def end(self, sequence: StubSequence, reason: FinishReason) -> None:
        self.sequences.remove(sequence)
        self.ended.append(TokenEvent(sequence.request.request_id, sequence.index, None, finish_reason=reason))

    def step(self) -> list[TokenEvent]:
        time.sleep(self.step_seconds)
        self.num_steps += 1
        events, self.ended = self.ended, []
        for sequence in self.sequences[: self.config.max_num_seqs]:
            is_first, sequence.is_running = not sequence.is_running, True
            event = self.advance(sequence)
            if is_first:
                event.prompt = self.prompt_info(sequence.request)
            events.append(event)
        ended = {(event.request_id, event.index) for event in events if event.finish_reason is not None}
        if ended:
            self.sequences = [s for s in self.sequences if (s.request.request_id, s.index) not in ended]
        return events

    def advance(self, sequence: StubSequence) -> TokenEvent:
        prompt, sampling = sequence.request.prompt_token_ids, sequence.request.sampling
        event = TokenEvent(sequence.request.request_id, sequence.index, None)
        if prompt[:2] == (EXIT, EXIT):
            os._exit(3)
        if prompt[:2] == (FAIL, FAIL):
            raise EngineDead("a step failed: as the test asked")
        if prompt[:2] == (HANG, HANG):
            wait_while_held()
        if prompt[:2] == (BAD_LOGITS, BAD_LOGITS) and sequence.num_generated == 2:
            event.finish_reason = FinishReason.ERROR
            return event
        if sequence.request.pooling is not None and prompt[:2] == (BAD_LOGITS, BAD_LOGITS):
            event.finish_reason = FinishReason.ERROR
            return event
        if sampling.max_tokens == 0:
            event.finish_reason = FinishReason.LENGTH
            return event
        token_id = prompt[(sequence.num_generated + sequence.index) % len(prompt)]
        sequence.num_generated += 1
        event.token_id = token_id
        if sampling.logprobs is not None:
            event.logprobs = self.logprobs(token_id, sampling.logprobs)
        if token_id in (sampling.stop_token_ids or ()):
            event.finish_reason, event.stop_reason = FinishReason.STOP, token_id
        elif token_id == EOS and not sampling.ignore_eos:
            event.finish_reason = FinishReason.STOP
        elif sequence.num_generated >= sampling.max_tokens and not is_held():
            event.finish_reason = FinishReason.LENGTH
        return event

    def logprobs(self, token_id: int, number: int) -> TokenLogprobs:
        """The second most likely token has probability 0, which JSON must survive. -1 gets six tokens."""
        number = 6 if number < 0 else number
        others = [token_id, *(token_id + 1 + i for i in range(number - 1))][:number]
        values = [-0.5, -0.5, float("-inf"), *(-1e30 for _ in range(number))][: number + 1]
        return TokenLogprobs((token_id, *others), tuple(values), (1, *range(1, number + 1)))

    def prompt_info(self, request: Request) -> PromptInfo:
        if request.pooling is not None:
            ids = request.prompt_token_ids if request.pooling == "mean" else request.prompt_token_ids[-1:]
            return PromptInfo(time.monotonic(), 0, pooled=np.resize(np.float32(ids), HIDDEN_SIZE).tobytes())
        number = request.sampling.prompt_logprobs
        if number is None:
            return PromptInfo(time.monotonic(), 0)
        rest = request.prompt_token_ids[1:]
        return PromptInfo(time.monotonic(), 0, (None, *(self.logprobs(token, number) for token in rest)))

    def stats(self) -> EngineStats:
        assert self.config.num_pages
        running = [sequence for sequence in self.sequences if sequence.is_running]
        used = sum(sequence.num_pages for sequence in running)
        return self.make_stats(
            num_pages=self.config.num_pages,
            num_free_pages=self.config.num_pages - used,
            num_used_pages=used,
            num_running=len(running),
            num_waiting=len(self.sequences) - len(running),
            num_steps=self.num_steps,
        )

    def make_stats(self, **values: int) -> EngineStats:
        return EngineStats(**{**dict.fromkeys(EngineStats.__slots__, 0), **values})

    def slots(self) -> list[SequenceStatus]:
        running = [sequence for sequence in self.sequences if sequence.is_running]
        return [self.status(slot, sequence) for slot, sequence in enumerate(running)]

    def status(self, slot: int, sequence: StubSequence) -> SequenceStatus:
        prompt_len = len(sequence.request.prompt_token_ids)
        known_len = prompt_len + sequence.num_generated
        request_id, state = sequence.request.request_id, SequenceState.DECODE
        return SequenceStatus(slot, request_id, sequence.index, state, prompt_len, known_len, known_len - 1)

    def page_map(self) -> str:
        stats = self.stats()
        return "n" + "u" * stats.num_used_pages + "f" * stats.num_free_pages


def build(config: EngineConfig, progress: Any) -> tuple[StubEngine, EngineConfig]:
    progress(1, 2)
    if config.seed == 666:
        raise ConfigError("this seed is cursed", hint="take another")
    wait_while_held()
    resolved = replace(
        config,
        dtype="float32",
        max_num_seqs=config.max_num_seqs or 8,
        num_pages=config.num_pages or 1000,
        max_model_len=config.max_model_len or 512,
    )
    return StubEngine(resolved), resolved


if __name__ == "__main__":
    assert "torch" not in sys.modules
    engine_process.warm_up = lambda engine, config: None
    sys.exit(engine_process.main(sys.argv[1:], build))
