"""The endpoints that take prompts: OpenAI's, and vLLM's for tokens."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tiny_vllm.serving.body import BodyReader
from tiny_vllm.serving.chat_format import ChatFormat
from tiny_vllm.serving.completion_format import CompletionFormat
from tiny_vllm.serving.embedding_format import EmbeddingFormat, embedding_params
from tiny_vllm.serving.errors import ApiError, shown
from tiny_vllm.serving.formats import Format, Heading, StreamFormat
from tiny_vllm.serving.generation_response import GenerationResponse
from tiny_vllm.serving.json_response import json_response
from tiny_vllm.serving.openai_requests import Call, is_long, tenant_salt
from tiny_vllm.serving.routes import SSE, Routes
from tiny_vllm.serving.schemas import (
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RequestBody,
    TokenizeBody,
)
from tiny_vllm.serving.service import Service
from tiny_vllm.text.request_builder import MAX_PRIORITY, MIN_PRIORITY, PreparedRequest

NUM_WORKERS = 2
PRIORITY = re.compile(r"[+-]?[0-9]{1,10}")
"""As many digits as the limits have: they themselves are looked at where those of bodies are."""


class Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._bodies = BodyReader(service.config)
        # Few, because each may need a hundred times the memory of its text.
        self._workers = ThreadPoolExecutor(NUM_WORKERS)
        self._run_id = secrets.token_hex(3)
        self._numbers = itertools.count(1)

    def register(self, routes: Routes) -> None:
        routes.post("/v1/completions", self.completions, CompletionBody, "Continue prompts", SSE)
        routes.post("/v1/chat/completions", self.chat_completions, ChatBody, "Answer a conversation", SSE)
        routes.post("/v1/embeddings", self.embeddings, EmbeddingBody, "Prompts to vectors")
        routes.post("/tokenize", self.tokenize, TokenizeBody, "Text or messages to token ids")
        routes.post("/detokenize", self.detokenize, DetokenizeBody, "Token ids to text")

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def completions(self, http: Request) -> Response:
        body = await self._read(http, CompletionBody)
        call = self._call(http, body, "cmpl")
        make = partial(self._service.maker.completion, body, call)
        prepared = await self._prepare(make, is_long(body.prompt))
        form = CompletionFormat(body, self._heading(call), self._service.model.tokenizer)
        return self._answer(http, prepared, form, stream=form if body.stream else None)

    async def chat_completions(self, http: Request) -> Response:
        body = await self._read(http, ChatBody)
        call = self._call(http, body, "chatcmpl")
        make = partial(self._service.maker.chat, body, call)
        prepared = await self._prepare(make, is_long(body.messages))
        form = ChatFormat(body, self._heading(call), self._service.model.tokenizer)
        return self._answer(http, prepared, form, stream=form if body.stream else None)

    async def embeddings(self, http: Request) -> Response:
        body = await self._read(http, EmbeddingBody)
        params = embedding_params(body, self._service.config.pooling)
        params.check(self._service.model.hidden_size)
        call = self._call(http, body, "embd")
        make = partial(self._service.maker.embeddings, body, params.pooling, call)
        prepared = await self._prepare(make, is_long(body.input))
        form = EmbeddingFormat(params, body.encoding_format == "base64", self._service.model.name)
        return self._answer(http, prepared, form)

    async def tokenize(self, http: Request) -> Response:
        body = await self._read(http, TokenizeBody)
        make = partial(self._service.maker.tokens, body)
        token_ids = await self._prepare(make, is_long(body.prompt, body.messages))
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._service.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            tokenizer = self._service.model.tokenizer
            assert tokenizer is not None
            answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return json_response(answer)

    async def detokenize(self, http: Request) -> Response:
        body = await self._read(http, DetokenizeBody)
        text = await self._prepare(partial(self._service.maker.text, body), is_long(body.tokens))
        return json_response({"prompt": text})

    async def _read(self, http: Request, body_class: type[AnyBody]) -> AnyBody:
        """The body of a call. Raises ApiError also if it is for another model."""
        http.state.prompt_name = body_class.PROMPT_NAME
        body = await self._bodies.read(http, body_class)
        self._service.check_model(body.model)
        return body

    async def _prepare(self, work: partial[Any], in_thread: bool) -> Any:
        """Run work on prompts: here if they are short, else where it holds nobody up."""
        if not in_thread:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def _call(self, http: Request, body: RequestBody, prefix: str) -> Call:
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

    def _answer(
        self,
        http: Request,
        prepared: list[PreparedRequest],
        form: Format,
        *,
        stream: StreamFormat | None = None,
    ) -> GenerationResponse:
        self._service.check_num_choices(len(prepared), prepared[0].request.sampling.n)
        return GenerationResponse(
            self._service.engine,
            self._service.admission,
            prepared,
            form,
            api_key=http.state.api_key,
            timeout=self._service.config.request_timeout,
            stream=stream,
        )


def _priority(header: str | None) -> int | None:
    if header is None:
        return None
    if PRIORITY.fullmatch(header) is None:
        raise ApiError(
            400,
            f"the header X-Priority is {shown(header)}, but must be an integer from {MIN_PRIORITY} to "
            f"{MAX_PRIORITY}\nhint: smaller is more urgent",
            param="priority",
        )
    return int(header)
