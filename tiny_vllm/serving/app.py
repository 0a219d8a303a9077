"""The HTTP application: OpenAI's endpoints and vLLM's, health, metrics and the live page."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tiny_vllm.errors import TinyVLLMError
from tiny_vllm.serving.admission import ApiKeys
from tiny_vllm.serving.body import read_body
from tiny_vllm.serving.errors import ApiError, api_error, overloaded
from tiny_vllm.serving.gate import Gate, error_response
from tiny_vllm.serving.generation_response import GenerationResponse
from tiny_vllm.serving.live import MAX_VIEWERS, LiveResponse
from tiny_vllm.serving.openai_requests import Call, amount_of_text, tenant_salt
from tiny_vllm.serving.openai_responses import ChatFormat, CompletionFormat, Format, Heading
from tiny_vllm.serving.openapi import BodyLimits, describe
from tiny_vllm.serving.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from tiny_vllm.serving.service import Service
from tiny_vllm.text.request_builder import PreparedRequest

JSON, SSE = "application/json", "text/event-stream"
PAGE_HEADERS = {
    # Nothing from elsewhere, and no other page around it.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})
NUM_WORKERS = 2
LONG_TEXT = 20_000
"""Characters above which a prompt is tokenised in another thread, so that others do not wait."""


def create_app(service: Service, *, on_engine_end: Callable[[], None] = lambda: None) -> FastAPI:
    """The application. Its lifespan is the engine's: starting it starts the engine process.

    on_engine_end: called when no engine runs any more and none will be started.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        supervisor = asyncio.create_task(service.engine.run())
        supervisor.add_done_callback(lambda task: on_engine_end())
        try:
            yield
        finally:
            await service.engine.close()
            await supervisor
            endpoints.close()

    app = FastAPI(title="tiny-vllm", version=package_version(), lifespan=lifespan)
    endpoints = Endpoints(service)
    endpoints.register(app)
    _handle_errors(app)
    # The last one added is the first to see a request.
    app.add_middleware(
        Gate,
        keys=ApiKeys(service.config.api_key),
        open_paths=OPEN_PATHS,
        count=service.metrics.count_response,
    )
    if service.config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.openapi = partial(_openapi, app, service)  # type: ignore[method-assign]
    return app


class Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        # Few, because each may need a hundred times the memory of its text.
        self._workers = ThreadPoolExecutor(NUM_WORKERS)
        self._run_id = secrets.token_hex(3)
        self._numbers = itertools.count(1)
        self._page = Path(__file__).with_name("page.html").read_bytes()

    def register(self, app: FastAPI) -> None:
        def add(path: str, endpoint: Any, summary: str, media_types: tuple[str, ...], **options: Any) -> None:
            content: dict[str, Any] = {media_type: {"schema": {}} for media_type in media_types}
            answers = {200: {"description": "Success", "content": content}, **ERRORS}
            app.add_api_route(
                path, endpoint, summary=summary, responses=answers, response_class=Response, **options
            )

        def post(path: str, endpoint: Any, body: type[Body], summary: str, *more_types: str) -> None:
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            extra = {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}
            add(path, endpoint, summary, (JSON, *more_types), methods=["POST"], openapi_extra=extra)

        def get(path: str, endpoint: Any, summary: str, media_type: str = JSON) -> None:
            add(path, endpoint, summary, (media_type,), methods=["GET"])

        post("/v1/completions", self.completions, CompletionBody, "Continue prompts", SSE)
        post("/v1/chat/completions", self.chat_completions, ChatBody, "Answer a conversation", SSE)
        post("/tokenize", self.tokenize, TokenizeBody, "Text or messages to token ids")
        post("/detokenize", self.detokenize, DetokenizeBody, "Token ids to text")
        get("/v1/models", self.models, "The served model")
        get("/v1/models/{name:path}", self.model, "One model")
        get("/health", self.health, "Whether the engine runs")
        get("/ready", self.ready, "Whether this server should get requests")
        get("/metrics", self.metrics, "Metrics for Prometheus", "text/plain")
        get("/version", self.version, "The version of tiny-vllm")
        if self._service.config.live_page:
            get("/", self.page, "A chat and a live picture of the engine", "text/html")
            get("/live", self.live, "What the picture is made of, as server-sent events", SSE)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def completions(self, http: Request) -> Response:
        body = await read_body(http, CompletionBody, self._service.config)
        self._service.check_model(body.model)
        call = self._call(http, body, "cmpl")
        maker = self._service.maker
        prepared = await _prepare(
            self._workers, partial(maker.completion, body, call), amount_of_text(body.prompt)
        )
        form = CompletionFormat(body, self._heading(call), self._service.model.tokenizer)
        return self._generation(http, body, prepared, form)

    async def chat_completions(self, http: Request) -> Response:
        body = await read_body(http, ChatBody, self._service.config)
        self._service.check_model(body.model)
        call = self._call(http, body, "chatcmpl")
        maker = self._service.maker
        prepared = await _prepare(
            self._workers, partial(maker.chat, body, call), amount_of_text(body.messages)
        )
        form = ChatFormat(body, self._heading(call), self._service.model.tokenizer)
        return self._generation(http, body, prepared, form)

    async def tokenize(self, http: Request) -> Response:
        body = await read_body(http, TokenizeBody, self._service.config)
        self._service.check_model(body.model)
        maker, tokenizer = self._service.maker, self._service.model.tokenizer
        amount = amount_of_text(body.prompt) + amount_of_text(body.messages)
        token_ids = await _prepare(self._workers, partial(maker.tokens, body), amount)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._service.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            assert tokenizer is not None
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return _json(answer)

    async def detokenize(self, http: Request) -> Response:
        body = await read_body(http, DetokenizeBody, self._service.config)
        self._service.check_model(body.model)
        text = await _prepare(self._workers, partial(self._service.maker.text, body), len(body.tokens))
        return _json({"prompt": text})

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        self._service.check_model(name)
        return _json(self._model_card())

    async def health(self) -> Response:
        self._service.check_health()
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        if self._service.is_draining:
            raise ApiError(503, "the server is shutting down", kind="server_error")
        self._service.check_health()
        return _json({"status": "ready"})

    async def metrics(self) -> Response:
        metrics = self._service.metrics
        return Response(metrics.text(), headers={"content-type": metrics.content_type})

    async def version(self) -> Response:
        return _json({"version": package_version()})

    async def page(self) -> Response:
        return Response(self._page, media_type="text/html", headers=PAGE_HEADERS)

    async def live(self) -> Response:
        if self._service.num_viewers >= MAX_VIEWERS:
            raise overloaded(f"{MAX_VIEWERS} viewers are watching, as many as there may be")
        return LiveResponse(self._service)

    def _model_card(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model.name,
            "object": "model",
            "created": service.created,
            "owned_by": "tiny-vllm",
            "root": service.model.name,
            "parent": None,
            "max_model_len": service.max_model_len,
        }

    def _call(self, http: Request, body: GenerationBody, prefix: str) -> Call:
        """The id is unique whatever the client calls itself."""
        given = body.request_id or http.state.request_id
        salt = tenant_salt(http.state.api_key) if self._service.config.separate_keys else None
        return Call(
            call_id=f"{prefix}-{given}-{self._run_id}{next(self._numbers):x}",
            priority=_priority(http.headers.get("x-priority")),
            salt=salt,
            arrival_time=time.monotonic(),
        )

    def _heading(self, call: Call) -> Heading:
        return Heading(call.call_id, int(time.time()), self._service.model.name)

    def _generation(
        self, http: Request, body: GenerationBody, prepared: list[PreparedRequest], form: Format
    ) -> GenerationResponse:
        self._service.check_num_choices(sum(item.request.sampling.n for item in prepared))
        options = body.stream_options
        return GenerationResponse(
            self._service.engine,
            self._service.admission,
            prepared,
            form,
            api_key=http.state.api_key,
            is_streamed=bool(body.stream),
            sends_usage=options is not None and bool(options.include_usage),
            timeout=self._service.config.request_timeout,
        )


ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "Error", "content": {JSON: {"schema": ERROR_SCHEMA}}},
    "5XX": {"description": "Error", "content": {JSON: {"schema": ERROR_SCHEMA}}},
}


def _handle_errors(app: FastAPI) -> None:
    """One shape for every error, those of the framework included."""

    async def ours(http: Request, error: Exception) -> Response:
        assert isinstance(error, TinyVLLMError)
        return error_response(api_error(error))

    async def api(http: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def framework(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is no {http.url.path[:200]} here",
            405: f"{http.method[:20]} is not possible at {http.url.path[:200]}",
        }.get(error.status_code, str(error.detail))
        return error_response(ApiError(error.status_code, message, headers=error.headers))

    async def gone(http: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def fault(http: Request, error: Exception) -> Response:
        message = f"unexpected {type(error).__name__}; the server's log has more"
        return error_response(ApiError(500, message, kind="server_error"))

    app.add_exception_handler(TinyVLLMError, ours)
    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, fault)


async def _prepare(workers: Executor, work: partial[Any], amount: int) -> Any:
    """Run work on a prompt: here if it is short, else where it holds nobody up."""
    if amount <= LONG_TEXT:
        return work()
    return await asyncio.get_running_loop().run_in_executor(workers, work)


def _priority(header: str | None) -> int | None:
    if header is None:
        return None
    try:
        return int(header[:20])
    except ValueError:
        raise ApiError(
            400, f"the header X-Priority is {header[:20]!r}, but must be an integer", param="priority"
        ) from None


def package_version() -> str:
    try:
        return version("tiny-vllm")
    except PackageNotFoundError:
        return "not installed"


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _openapi(app: FastAPI, service: Service) -> dict[str, Any]:
    if app.openapi_schema is None:
        model, options = service.model, service.engine_config
        tokenizer = model.tokenizer
        limits = BodyLimits(
            model_name=model.name,
            num_ids=model.vocab_size,
            num_text_ids=0 if tokenizer is None else tokenizer.vocab_size,
            takes_empty_prompts=tokenizer is not None and tokenizer.adds_bos,
            max_n=options.max_n,
            max_logprobs=options.max_logprobs,
            max_prompts=service.config.max_prompts,
            max_stop_strings=service.config.max_stop_strings,
        )
        app.openapi_schema = describe(app, (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody), limits)
    return app.openapi_schema
