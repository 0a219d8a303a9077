"""How endpoints are put into the application, with what the OpenAPI document says of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response

from tiny_vllm.serving.schemas import Body

JSON, SSE = "application/json", "text/event-stream"
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


class DirectRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response: nothing is to be solved for it."""

    def get_route_handler(self) -> Any:
        return self.endpoint


class Routes:
    """Adds endpoints to an application. bodies: those of the endpoints added so far."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.bodies: list[type[Body]] = []

    def get(self, path: str, endpoint: Any, summary: str, media_type: str = JSON) -> None:
        self._add(path, endpoint, summary, (media_type,), methods=["GET"])
        if media_type != SSE:  # a stream has no end to tell
            self._app.add_api_route(
                path, endpoint, methods=["HEAD"], include_in_schema=False, response_class=Response
            )

    def post(self, path: str, endpoint: Any, body: type[Body], summary: str, *more_types: str) -> None:
        """more_types: media types of the answer beside JSON. The endpoint reads the body itself."""
        self.bodies.append(body)
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        extra = {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}
        self._add(
            path,
            endpoint,
            summary,
            (JSON, *more_types),
            methods=["POST"],
            openapi_extra=extra,
            route_class_override=DirectRoute,
        )

    def _add(
        self, path: str, endpoint: Any, summary: str, media_types: tuple[str, ...], **options: Any
    ) -> None:
        content: dict[str, Any] = {media_type: {"schema": {}} for media_type in media_types}
        answers = {200: {"description": "Success", "content": content}, **ERRORS}
        self._app.router.add_api_route(
            path, endpoint, summary=summary, responses=answers, response_class=Response, **options
        )
