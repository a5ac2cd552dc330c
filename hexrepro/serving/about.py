"""What the gateway answers besides calls: models, health, metrics, the end of a query, and that there is no such path."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web

from hexrepro.serving import headers as names
from hexrepro.serving.access import Access
from hexrepro.serving.coordinator import Coordinator
from hexrepro.serving.metrics import CONTENT_TYPE, Metrics
from hexrepro.serving.protocol import CHAT, COMPLETIONS, Refused

_MODELS, _HEALTH, _METRICS = "/v1/models", "/health", "/metrics"
_ALLOWED = {CHAT: "POST", COMPLETIONS: "POST", _MODELS: "GET", _HEALTH: "GET", _METRICS: "GET"}


class About:
    """Its handlers raise Refused. `models`: what clients may ask for; `is_draining()`: whether new calls are turned away."""

    def __init__(
        self,
        models: tuple[str, ...],
        coordinator: Coordinator,
        metrics: Metrics,
        access: Access,
        is_draining: Callable[[], bool],
    ) -> None:
        self._coordinator, self._metrics = coordinator, metrics
        self._access, self._is_draining = access, is_draining
        self._models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "hexrepro"} for name in models
        ]

    def routes(self) -> list[tuple[str, str, Callable]]:
        """(method, path, handler); the last takes all that nobody else does."""
        return [
            ("GET", _MODELS, self._list),
            ("GET", _MODELS + "/{model:.+}", self._model),
            ("GET", _HEALTH, self._health),
            ("GET", _METRICS, self._text),
            ("DELETE", "/hexrepro/queries/{query}", self._end_query),
            ("*", "/{anything:.*}", self._unknown),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        self._access.authorise(request.headers)
        return web.json_response({"object": "list", "data": self._models})

    async def _model(self, request: web.Request) -> web.Response:
        self._access.authorise(request.headers)
        for model in self._models:
            if model["id"] == request.match_info["model"]:
                return web.json_response(model)
        raise Refused(404, "There is no such model.", param="model", code="model_not_found")

    async def _health(self, request: web.Request) -> web.Response:
        of = self._coordinator
        up = {spec.name: bool(of.is_open[m]) for m, spec in enumerate(of.cluster.instances)}
        if self._is_draining():
            status = "draining"
        elif all(up.values()):
            status = "ok"
        else:
            status = "degraded" if any(up.values()) else "down"
        return web.json_response(
            {"status": status, "instances": up}, status=200 if status in ("ok", "degraded") else 503
        )

    async def _text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _end_query(self, request: web.Request) -> web.Response:
        tenant = self._access.authorise(request.headers)
        name = self._access.tenant_name(request.headers.get(names.TENANT, ""), tenant)
        if not self._coordinator.query_finished((name, request.match_info["query"]), time.monotonic()):
            raise Refused(404, "There is no such query under way.", param="query", code="query_not_found")
        return web.json_response({"ended": True})

    async def _unknown(self, request: web.Request) -> web.Response:
        method = _ALLOWED.get(request.path)
        if method is None:
            raise Refused(404, "There is no such path.", code="not_found")
        raise Refused(
            405,
            f"{request.path} takes {method}.",
            code="method_not_allowed",
            more_headers={"Allow": method},
        )
