"""One shape for every error of the application, those of the framework included."""

from __future__ import annotations

import difflib

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tiny_vllm.errors import MAX_PATH_LEN, TinyVLLMError, printable
from tiny_vllm.serving.body import BodyTooLong, EarlyResponse
from tiny_vllm.serving.errors import ApiError, api_error
from tiny_vllm.serving.gate import error_response


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TinyVLLMError, _ours)
    app.add_exception_handler(ApiError, _api)
    app.add_exception_handler(BodyTooLong, _too_long)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _fault)


async def _ours(http: Request, error: Exception) -> Response:
    assert isinstance(error, TinyVLLMError)
    return error_response(api_error(error, getattr(http.state, "prompt_name", None)))


async def _api(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _too_long(http: Request, error: Exception) -> Response:
    assert isinstance(error, BodyTooLong)
    return EarlyResponse(error)


async def _framework(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = printable(http.url.path, MAX_PATH_LEN)
    allowed = (error.headers or {}).get("Allow", "another method")
    message = {
        404: f"there is no {path} here\nhint: {_path_hint(http)}",
        405: f"{printable(http.method)} is not possible at {path}\nhint: use {allowed}",
    }.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=error.headers))


def _path_hint(http: Request) -> str:
    paths = [route.path for route in http.app.routes if isinstance(route, Route) and route.include_in_schema]
    close = difflib.get_close_matches(http.url.path[:64], paths, n=1)
    return f"did you mean {close[0]}?" if close else "/openapi.json lists what is here"


async def _gone(http: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _fault(http: Request, error: Exception) -> Response:
    message = f"unexpected {type(error).__name__}\nhint: the server's log has more"
    return error_response(ApiError(500, message, kind="server_error"))
