"""JSON by msgspec, which is several times as fast as the framework's."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
