"""The response of an endpoint that has the engine compute something: whole or streamed, with one end whatever
happens.

It owns the request from the engine's door to the last byte. When the client goes away, in the middle of a
stream or while it waits for a whole answer, everything is given back at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiny_vllm.errors import EngineDead, TinyVLLMError
from tiny_vllm.outputs import ChoiceDelta, CompletionOutput
from tiny_vllm.serving.admission import Admission
from tiny_vllm.serving.engine_client import EngineClient
from tiny_vllm.serving.errors import ApiError, api_error
from tiny_vllm.serving.formats import Format, StreamFormat
from tiny_vllm.serving.gate import error_response
from tiny_vllm.serving.generation import Generation
from tiny_vllm.serving.protocol import BODY_WRITER
from tiny_vllm.serving.stream_writer import StreamWriter, encoded_events
from tiny_vllm.text.request_builder import PreparedRequest
from tiny_vllm.types import FinishReason

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
LAST_WORD_SECONDS = 1.0
DONE = b"data: [DONE]\n\n"


class GenerationResponse(Response):
    """Runs prepared requests and sends their answer.

    form: how to show it. stream: the same, to send it as server-sent events; None for one whole answer.
    timeout: seconds for all of it, None for as long as it takes.
    """

    def __init__(
        self,
        engine: EngineClient,
        admission: Admission,
        prepared: Sequence[PreparedRequest],
        form: Format,
        *,
        api_key: str,
        timeout: float | None,
        stream: StreamFormat | None = None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._admission = admission
        self._prepared = prepared
        self._form = form
        self._api_key = api_key
        self._stream_form = stream
        self._timeout = timeout
        self._has_started = False
        self._has_left = False
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(wait_for_disconnect(receive))
        watch.add_done_callback(lambda _: self._leave(task))
        # Also cancelled when the server has waited long enough for its requests to finish.
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._answer(scope, receive, send)
        finally:
            self._is_over = True
            watch.cancel()

    def _leave(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for the answer any more, unless it is complete."""
        if not self._is_over:
            self._has_left = True
            task.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._generate(scope, receive, send)
        except ApiError as error:
            await self._send_error(error, scope, receive, send)
        except TinyVLLMError as error:
            prompt_name = scope["state"]["prompt_name"]
            await self._send_error(api_error(error, prompt_name), scope, receive, send)
        except TimeoutError:
            late = ApiError(
                504,
                f"the request took longer than {self._timeout:g} seconds\n"
                "hint: lower max_tokens, or raise the server option request_timeout",
                kind="server_error",
                code="timeout",
            )
            await self._send_error(late, scope, receive, send)
        except asyncio.CancelledError:
            if not self._has_left:
                await self._say_good_bye(scope, receive, send)
            raise

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._admission.entered(self._api_key):
            stream = self._stream_form
            generation = await self._engine.submit(self._prepared, is_streamed=stream is not None)
            scope["state"]["outputs"] = generation.outputs
            with generation:
                if stream is not None:
                    body_writer = scope.get("extensions", {}).get(BODY_WRITER)
                    generation.push = StreamWriter(stream, generation.outputs, body_writer).push
                    await self._stream(generation, stream, send)
                    return
                await generation.finished()
            for output in generation.outputs:
                _check_reasons(output.outputs)
            data = msgspec.json.encode(self._form.whole(generation.outputs))
            self._has_started = True
            await Response(data, media_type="application/json")(scope, receive, send)

    async def _stream(self, generation: Generation, form: StreamFormat, send: Send) -> None:
        """The engine has taken the requests: only now is it certain that the status is 200."""
        self._has_started = True
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        outputs = generation.outputs
        if opening := form.opening(outputs):
            await send({"type": "http.response.body", "body": encoded_events(opening), "more_body": True})
        is_over = False
        while not is_over:
            updates = await generation.updates()
            body = encoded_events(form.chunks(outputs, updates))
            deltas = [delta for _, update in updates for delta in update.deltas]
            is_over = generation.is_over and not any(map(_is_broken, deltas))
            if is_over:  # in one write with what the stream ends with
                body += encoded_events(form.closing(outputs)) + DONE
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": not is_over})
            _check_reasons(deltas)

    async def _say_good_bye(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server stops before the answer is complete."""
        error = api_error(EngineDead("the server is shutting down", hint="try again later"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_SECONDS):
                await self._send_error(error, scope, receive, send)

    async def _send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._has_started:
            await error_response(error)(scope, receive, send)
        elif self._stream_form is not None:
            body = b"data: " + error.encoded() + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": body, "more_body": False})


def _is_broken(choice: ChoiceDelta | CompletionOutput) -> bool:
    return choice.finish_reason == FinishReason.ERROR


def _check_reasons(choices: Iterable[ChoiceDelta | CompletionOutput]) -> None:
    """Raises ApiError if the model broke down on one of the choices."""
    for choice in choices:
        if _is_broken(choice):
            raise ApiError(
                500,
                f"the model gave no usable numbers for choice {choice.index}\nhint: try another prompt",
                kind="server_error",
                code="model_failure",
            )


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
