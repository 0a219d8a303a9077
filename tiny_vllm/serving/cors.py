"""Which web pages may call the server: starlette's rules, with its refusals in the form of other errors."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from tiny_vllm.errors import shown
from tiny_vllm.serving.errors import ApiError
from tiny_vllm.serving.gate import error_response


class Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        kept = {name: text for name, text in response.headers.items() if not name.startswith("content-")}
        return error_response(ApiError(response.status_code, self._reason(request_headers), headers=kept))

    def _reason(self, request_headers: Headers) -> str:
        origin, method = request_headers["origin"], request_headers["access-control-request-method"]
        if not self.is_allowed_origin(origin=origin):
            return (
                f"web pages of {shown(origin)} may not call this server\n"
                "hint: origins that may are named by the server option cors_origin"
            )
        if method not in self.allow_methods:
            allowed = " and ".join(self.allow_methods)
            return f"web pages may not use {shown(method)} here, but {allowed}\nhint: use one of these"
        return (
            "web pages of a public network may not call this server\n"
            "hint: serve the page from its own network"
        )
