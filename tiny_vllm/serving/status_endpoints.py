"""Endpoints that tell about the server and are no work for the engine: models, health, metrics, the page."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from starlette.responses import Response

from tiny_vllm.serving.errors import overloaded, shutting_down
from tiny_vllm.serving.json_response import json_response
from tiny_vllm.serving.live import MAX_VIEWERS, LiveResponse
from tiny_vllm.serving.routes import SSE, Routes
from tiny_vllm.serving.service import Service

PAGE_HEADERS = {
    # Nothing from elsewhere, and no other page around it.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class StatusEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._page = Path(__file__).with_name("page.html").read_bytes()

    def register(self, routes: Routes) -> None:
        routes.get("/v1/models", self.models, "The served model")
        routes.get("/v1/models/{name:path}", self.model, "One model")
        routes.get("/health", self.health, "Whether the engine runs")
        routes.get("/ready", self.ready, "Whether this server should get requests")
        routes.get("/metrics", self.metrics, "Metrics for Prometheus", "text/plain")
        routes.get("/version", self.version, "The version of tiny-vllm")
        if self._service.config.live_page:
            routes.get("/", self.page, "A chat and a live picture of the engine", "text/html")
            routes.get("/live", self.live, "What the picture is made of, as server-sent events", SSE)

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        self._service.check_model(name)
        return json_response(self._model_card())

    async def health(self) -> Response:
        self._service.check_health()
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        if self._service.is_draining:
            raise shutting_down()
        self._service.check_health()
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        metrics = self._service.metrics
        return Response(metrics.text(), headers={"content-type": metrics.content_type})

    async def version(self) -> Response:
        return json_response({"version": package_version()})

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


def package_version() -> str:
    try:
        return version("tiny-vllm")
    except PackageNotFoundError:
        return "not installed"
