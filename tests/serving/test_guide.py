from __future__ import annotations

import json
import re

from tests.serving.guide_tables import GUIDE, filled
from tests.serving.support import running_server


def test_the_guides_tables_are_those_of_the_code() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert filled(text) == text, "run python -m tests.serving.guide_tables"


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads(GUIDE.with_name("grafana-dashboard.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"(?:tiny_)?vllm:\w+", text)}
    with running_server() as server:
        assert server.complete([28, 29], max_tokens=3).status == 200
        page = server.get("/metrics").data.decode()
    given = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    assert len(asked) > 10 and asked <= given


def test_every_endpoint_is_in_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    with running_server() as server:
        paths = server.get("/openapi.json").json()["paths"]
    assert len(paths) > 10
    for path in paths:
        assert f"`{path.replace('{name}', 'NAME')}`" in re.sub(r"`(?:GET|POST) ", "`", text), path
