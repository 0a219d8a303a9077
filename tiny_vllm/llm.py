"""The offline API: a model, an engine and text on both sides, in one object.

from tiny_vllm import LLM, SamplingParams

with LLM() as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeGuard

from tqdm import tqdm

from tiny_vllm.config import Choice, EngineConfig
from tiny_vllm.engine.build import build_engine, plan_engine
from tiny_vllm.engine.embedding import EmbeddingParams
from tiny_vllm.engine.engine import Engine, EngineStats
from tiny_vllm.engine.garbage import without_full_collections
from tiny_vllm.engine.page_pool import PAGE_STATES
from tiny_vllm.errors import SWITCH, EngineDead, ModelError, RequestError, shown
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, RequestUpdate
from tiny_vllm.text.output_processor import OutputProcessor
from tiny_vllm.text.request_builder import PreparedRequest, RequestBuilder
from tiny_vllm.text.tokenizer import Tokenizer
from tiny_vllm.types import FinishReason, Pooling, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": text} / {"prompt_token_ids": ids}."""

Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": ..., "content": ...} for every message."""

PROMPT_HINT = "a prompt is a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
CONVERSATION_HINT = "a conversation is a list of {'role': ..., 'content': ...}"

NOT_LISTS = (str, bytes, bytearray, memoryview, Mapping)


class LLM:
    """Loads a model and generates text with it. For one thread at a time, and for the process that made it.

    model: a directory, a .gguf file or a hub id; None is the bundled SmolLM2-135M-Instruct.
    engine_options: the fields of EngineConfig. An unknown one raises ConfigError.
    Raises ConfigError and ModelError. Usable as a context manager; `close` gives the memory back.
    """

    def __init__(self, model: str | None = None, **engine_options: Any) -> None:
        plan = plan_engine(EngineConfig.from_options({"model": model, **engine_options}))
        asked = plan.config.generation_config
        self._sampling_defaults = plan.checkpoint.sampling_defaults(asked)
        plan = replace(plan, choices=(*plan.choices, plan.checkpoint.choose_sampling_defaults(asked)))
        self.config: EngineConfig = plan.config
        self.choices: tuple[Choice, ...] = plan.choices
        self.spec: ModelSpec = plan.checkpoint.spec
        self.model_name: str = plan.checkpoint.name
        self.tokenizer: Tokenizer | None = (
            None if plan.checkpoint.tokenizer is None else plan.checkpoint.load_tokenizer()
        )
        assert self.config.max_model_len is not None
        self._builder = RequestBuilder(
            self.tokenizer,
            vocab_size=self.spec.vocab_size,
            max_model_len=self.config.max_model_len,
            max_logprobs=self.config.max_logprobs,
            max_n=self.config.max_n,
            ids_hint="give {'prompt_token_ids': ids}, or name a tokenizer with tokenizer=",
        )
        self._processor = OutputProcessor(self.tokenizer)
        self._streams: dict[str, deque[RequestUpdate]] = {}
        self._abandoned: list[str] = []
        self._in_use = threading.Lock()
        self._process_id = os.getpid()
        with _loading_bar() as progress:
            self._engine: Engine | None = build_engine(plan, progress=progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        parse_special_tokens: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one or many prompts; the outputs are in the order of the prompts.

        sampling_params, priority: one for all or one each; smaller priorities run first. Without
        sampling_params: get_default_sampling_params().
        cache_salt: only requests with the same salt share pages. use_tqdm: progress on stderr, on a terminal.
        parse_special_tokens: take control tokens that are written out in a text as such.
        Raises RequestError if any prompt is invalid, behind the first step at the latest, and ends the rest.
        """
        _check_flag("parse_special_tokens", parse_special_tokens)
        items = _as_prompts(prompts)
        build = partial(self._build_prompt, parse_special_tokens=parse_special_tokens)
        default = self.get_default_sampling_params()
        return self._run(items, build, sampling_params, default, priority, cache_salt, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        parse_special_tokens: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one or many conversations, rendered by the model's chat template. See `generate`.

        Without sampling_params they are those of get_default_sampling_params, but an answer may be as long as
        the context allows unless the model recommends a limit. Control tokens written out in messages are
        plain text, those of the template alone count, unless parse_special_tokens.
        """
        _check_flag("parse_special_tokens", parse_special_tokens)
        items: Sequence[Any] = [messages]
        if not _is_conversation(messages):
            items = _as_list("messages", messages, "conversation", CONVERSATION_HINT)
        default = self._chat_sampling_params()
        build = partial(self._builder.build_chat, parse_special_tokens=parse_special_tokens)
        return self._run(items, build, sampling_params, default, priority, cache_salt, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        dimensions: int | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        parse_special_tokens: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, from its hidden states after the final norm; see EmbeddingParams.

        The other options are those of `generate`. Raises RequestError as `generate` does, and ModelError if
        the model gives values that are not finite.
        """
        params = EmbeddingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        params.check(self.spec.hidden_size)
        _check_flag("parse_special_tokens", parse_special_tokens)

        def build(prompt: Any, sampling: SamplingParams, **options: Any) -> PreparedRequest:
            return self._builder.build_embedding(
                _plain_prompt(prompt), pooling, parse_special_tokens=parse_special_tokens, **options
            )

        items = _as_prompts(prompts)
        outputs = self._run(items, build, None, SamplingParams(), priority, cache_salt, use_tqdm)
        return [_embedding(output, params) for output in outputs]

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        parse_special_tokens: bool | None = None,
    ) -> Stream:
        """Generate for one prompt or conversation, yielding a RequestUpdate whenever there is something new.

        Several streams may be open at once: they run in one batch. Closing a stream aborts its request.
        Without sampling_params or parse_special_tokens the defaults are those of `generate` or `chat`.
        Raises RequestError at the call, not at the first token.
        """
        engine = self._live_engine()
        build: Callable[..., PreparedRequest] = self._build_prompt
        default = self.get_default_sampling_params()
        if _is_conversation(prompt):
            build, default = self._builder.build_chat, self._chat_sampling_params()
        if parse_special_tokens is not None:
            _check_flag("parse_special_tokens", parse_special_tokens)
            build = partial(build, parse_special_tokens=parse_special_tokens)
        prepared = build(
            prompt,
            default if sampling_params is None else sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=engine.clock(),
        )
        with self._exclusively():
            self._add([prepared])
        return Stream(self, prepared.request.request_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """What calls without sampling_params get: as the model's generation_config.json recommends, where it
        does and the engine option generation_config is not "none"."""
        return SamplingParams(**self._sampling_defaults)

    def stats(self) -> EngineStats:
        """Pages, sequences and totals, now."""
        engine = self._live_engine()
        self._abort_abandoned()
        return engine.stats()

    def page_map(self) -> list[str]:
        """State of every page by number: "null", "free", "cached", "used" or "shared"."""
        engine = self._live_engine()
        self._abort_abandoned()
        return [PAGE_STATES[letter] for letter in engine.page_map()]

    def close(self) -> None:
        """Drop the model and the page pool. Running requests are lost; calling it again does nothing."""
        self._engine = None
        self._streams.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise EngineDead("this LLM has been closed", hint="create a new one")
        if os.getpid() != self._process_id:
            # A fork copies the memory but not the threads that compute: the first product would never end.
            raise EngineDead(
                "this LLM was made in another process", hint="make it after the fork, or start with 'spawn'"
            )
        return self._engine

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Keep other threads out, with an error instead of a mix-up."""
        if not self._in_use.acquire(blocking=False):
            raise RequestError(
                "this LLM is at work in another thread", hint="use one LLM per thread, or a lock around it"
            )
        try:
            yield
        finally:
            self._in_use.release()

    def _build_prompt(self, prompt: Any, params: SamplingParams, **options: Any) -> PreparedRequest:
        return self._builder.build(_plain_prompt(prompt), params, **options)

    def _chat_sampling_params(self) -> SamplingParams:
        return SamplingParams(**{"max_tokens": None, **self._sampling_defaults})

    def _run(
        self,
        items: Sequence[Any],
        build: Callable[..., PreparedRequest],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        default: SamplingParams,
        priority: int | Sequence[int],
        cache_salt: str | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        engine = self._live_engine()
        params = _one_each(
            "sampling_params", default if sampling_params is None else sampling_params, len(items)
        )
        priorities = _one_each("priority", priority, len(items))
        now = engine.clock()
        building = (
            build(item, sampling, priority=level, cache_salt=cache_salt, arrival_time=now)
            for item, sampling, level in zip(items, params, priorities, strict=True)
        )
        request_ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        with self._exclusively(), without_full_collections():
            # The other prompts are tokenised while a GPU computes the first step, unless a more urgent one
            # may be among them.
            has_one_priority = len(set(map(repr, priorities))) <= 1
            new = self._first_prompts(building) if has_one_priority else list(building)
            unfinished: set[str] = set()
            bar = tqdm(total=len(items), desc="requests", unit="req", disable=None if use_tqdm else True)
            try:
                while new or unfinished:
                    if new:
                        self._add(new, follow=False)
                        added = [item.request.request_id for item in new]
                        request_ids += added
                        unfinished.update(added)
                    for update in self._step(new):
                        if update.finished and update.output.request_id in unfinished:
                            unfinished.remove(update.output.request_id)
                            outputs[update.output.request_id] = update.output
                            bar.update()
                    new = list(building)
            finally:
                bar.close()
                self._abandoned.extend(unfinished)
        return [outputs[request_id] for request_id in request_ids]

    def _first_prompts(self, building: Iterator[PreparedRequest]) -> list[PreparedRequest]:
        """As many as fill a step."""
        taken, room = [], self.config.max_num_batched_tokens
        assert room is not None
        for item in building:
            taken.append(item)
            room -= len(item.request.prompt_token_ids)
            if room <= 0:
                break
        return taken

    def _add(self, prepared: Sequence[PreparedRequest], *, follow: bool = True) -> list[RequestOutput]:
        """Queue requests: all of them or, on an error, none.

        follow: make their outputs now; if not, the next `_step` is to be given them.
        """
        engine = self._live_engine()
        queued: list[str] = []
        outputs: list[RequestOutput] = []
        try:
            with _interrupts_deferred():
                self._abort_abandoned()
                for item in prepared:
                    engine.add(item.request)
                    queued.append(item.request.request_id)
                    if follow:
                        outputs.append(self._processor.add(item.request, item.prompt))
        except BaseException:
            self._abandoned.extend(queued)
            raise
        return outputs

    def _step(self, new: Sequence[PreparedRequest] = ()) -> list[RequestUpdate]:
        """One engine step; updates of open streams are kept for them too.

        new: requests that have been queued and are not followed yet. That is done once the step is under way,
        so that a device which computes by itself does not wait for it.
        """
        engine = self._live_engine()
        with _interrupts_deferred():
            self._abort_abandoned()
            events = engine.step()
            for item in new:
                self._processor.add(item.request, item.prompt)
            progress = self._processor.process(events, engine.clock())
            for request_id, index in progress.stops:
                engine.stop(request_id, index)
            for update in progress.updates:
                stream = self._streams.get(update.output.request_id)
                if stream is not None:
                    stream.append(update)
        return progress.updates

    def _abandon(self, request_id: str) -> None:
        """Have a request aborted before the next step: a garbage collector may call this in the middle of
        one."""
        self._abandoned.append(request_id)

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.pop()
            self._processor.remove(request_id)
            if self._engine is not None:
                self._engine.abort(request_id)


class Stream(Iterator[RequestUpdate]):
    """Increments of one request. Leaving it early and closing it aborts the request."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self._request_id = request_id
        self._updates: deque[RequestUpdate] | None = deque()
        llm._streams[request_id] = self._updates

    def __next__(self) -> RequestUpdate:
        if self._updates is None:
            raise StopIteration
        while not self._updates:
            if self._request_id not in self._llm._processor:
                raise StopIteration
            with self._llm._exclusively():
                self._llm._step()
        update = self._updates.popleft()
        if update.finished:
            self._forget()
        return update

    def close(self) -> None:
        """Abort the request if it has not finished. Nothing more is yielded."""
        if self._updates is not None:
            self._forget()
            self._llm._abandon(self._request_id)

    def _forget(self) -> None:
        self._updates = None
        self._llm._streams.pop(self._request_id, None)

    def __del__(self) -> None:
        self.close()


def _plain_prompt(prompt: Any) -> Any:
    """The text or token ids of a prompt in any of its forms. Raises RequestError."""
    if isinstance(prompt, Mapping):
        given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if len(given) != 1 or unknown:
            raise RequestError(
                f"a prompt has the keys {shown(list(prompt))}",
                hint="use either 'prompt' or 'prompt_token_ids'; use chat for messages",
            )
        if isinstance(prompt[given[0]], str) != (given[0] == "prompt"):
            raise RequestError(
                f"{given[0]} is {shown(prompt[given[0]])}",
                hint="'prompt' is text, 'prompt_token_ids' are ids",
            )
        prompt = prompt[given[0]]
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(
            f"the prompt is of type {type(prompt).__name__}, but must be text or a list of token ids",
            hint="decode bytes to text first",
        )
    return prompt


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}, but must be true or false", hint=SWITCH)


def _embedding(output: RequestOutput, params: EmbeddingParams) -> EmbeddingRequestOutput:
    if output.outputs[0].finish_reason == FinishReason.ERROR:
        raise ModelError(
            f"the model gave no usable numbers for {output.request_id}", hint="check its weights"
        )
    assert output.pooled is not None
    return EmbeddingRequestOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        EmbeddingOutput(params.values(output.pooled).tolist()),
        output.metrics,
    )


def _as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, whether one or many were given."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "tolist") and not isinstance(prompts, NOT_LISTS):
        prompts = prompts.tolist()  # numpy arrays and torch tensors
    items = _as_list("prompts", prompts, "prompt", PROMPT_HINT)
    if items and not any(
        isinstance(item, str | Mapping | Sequence) or hasattr(item, "__len__") for item in items
    ):
        return [items]  # the token ids of one prompt
    return items


def _as_list(name: str, value: object, what: str, hint: str) -> list[Any]:
    """what: one of them. hint: how that is written."""
    if isinstance(value, NOT_LISTS) or not isinstance(value, Sequence):
        kind = type(value).__name__
        raise RequestError(f"{name} is of type {kind}, but must be a {what} or a list of {what}s", hint=hint)
    return list(value)


def _is_conversation(value: object) -> TypeGuard[Messages]:
    """Whether this is one list of messages, rather than a prompt or a list of conversations."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, NOT_LISTS)
        and all(isinstance(item, Mapping) for item in value)
    )


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, NOT_LISTS):
        if len(value) != count:
            raise RequestError(
                f"{name} has {len(value)} entries for {count} prompts", hint="give one for all or one each"
            )
        return list(value)
    return [value] * count


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raise a Ctrl-C that comes in here at the end, so that no step is torn apart.

    Only Python's own handler in the main thread is replaced; whoever has set another one decides for himself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt


@contextmanager
def _loading_bar() -> Iterator[Callable[[int, int], None] | None]:
    """Progress of loading on stderr, if that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    with tqdm(desc="loading weights", unit="values", unit_scale=True, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
