"""The HTTP application: endpoints, errors, what happens to every request, and its description."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI

from tiny_vllm.serving import access_log
from tiny_vllm.serving.admission import ApiKeys
from tiny_vllm.serving.cors import Cors
from tiny_vllm.serving.endpoints import Endpoints
from tiny_vllm.serving.error_handlers import add_error_handlers
from tiny_vllm.serving.gate import Gate
from tiny_vllm.serving.openapi import BodyLimits, describe
from tiny_vllm.serving.routes import Routes
from tiny_vllm.serving.service import Service
from tiny_vllm.serving.status_endpoints import StatusEndpoints, package_version

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version"})


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
            await service.engine.close(at_once=service.must_end_at_once)
            await supervisor
            endpoints.close()

    # A redirect would have to name a scheme and a host that only a proxy in front of this server knows.
    app = FastAPI(title="tiny-vllm", version=package_version(), lifespan=lifespan, redirect_slashes=False)
    routes = Routes(app)
    endpoints = Endpoints(service)
    endpoints.register(routes)
    StatusEndpoints(service).register(routes)
    add_error_handlers(app)
    # The last one added is the first to see a request.
    app.add_middleware(
        Gate,
        keys=ApiKeys(service.config.api_key),
        open_paths=OPEN_PATHS,
        door=service.door,
        count=service.metrics.count_response,
    )
    if service.config.cors_origin:
        app.add_middleware(
            Cors,
            allow_origins=service.config.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    if access_log.logger.isEnabledFor(logging.INFO):
        app.add_middleware(access_log.AccessLog)
    app.openapi = partial(_openapi, app, service, routes)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI, service: Service, routes: Routes) -> dict[str, Any]:
    if app.openapi_schema is None:
        model, options = service.model, service.engine_config
        tokenizer = model.tokenizer
        limits = BodyLimits(
            model_name=model.name,
            num_ids=model.vocab_size,
            num_text_ids=0 if tokenizer is None else tokenizer.vocab_size,
            takes_empty_prompts=tokenizer is not None and tokenizer.adds_bos,
            hidden_size=model.hidden_size,
            max_n=options.max_n,
            max_logprobs=options.max_logprobs,
            max_prompts=service.config.max_prompts,
            max_stop_strings=service.config.max_stop_strings,
        )
        app.openapi_schema = describe(app, routes.bodies, limits)
    return app.openapi_schema
