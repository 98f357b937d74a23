"""The web application: routes of all APIs, health, metrics, the files of the page, and middleware around them.

    app = make_app(settings, store)

Every route but health needs an API key where keys are on (`Admission` in middleware.py decides before any route is chosen).
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import mimetypes
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from regard import __version__
from regard.serve import huggingface_api, inference_protocol_api, libretranslate_api, openai_api, regard_api
from regard.serve.api_errors import ApiError, as_api_error
from regard.serve.api_keys import KeyRing
from regard.serve.middleware import Admission, Observation, error_response, log_error
from regard.serve.server_metrics import CONTENT_TYPE
from regard.serve.service import BODIES, Service, add_get
from regard.serve.settings import ServeSettings

if TYPE_CHECKING:
    from regard.serve.model_store import ModelStore

READY_SECONDS = 2.0  # a forward pass proves readiness for so long
READY_WHILE_CHECKING = 10.0  # and for so long while the next one is in progress
CHECK_TIMEOUT = 10.0
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def make_app(settings: ServeSettings, store: ModelStore) -> FastAPI:
    """Return the application that serves the models of a store, which it drains and closes when it ends."""
    service = Service(settings, store)
    keys = KeyRing(settings.keys) if settings.keys else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.is_draining = True
        await asyncio.to_thread(store.drain, settings.drain)
        service.calls.close()
        await asyncio.to_thread(store.close)

    app = FastAPI(
        redirect_slashes=False,
        title="Regard",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.service = service
    readiness = Readiness(service)
    add_operation_routes(app, service, readiness)
    app.include_router(libretranslate_api.make_router(service))
    app.include_router(openai_api.make_router(service))
    app.include_router(inference_protocol_api.make_router(service, readiness.answer))
    app.include_router(huggingface_api.make_router(service))
    app.include_router(regard_api.make_router(service))
    if settings.page:
        add_page_routes(app)
    app.add_exception_handler(ApiError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    describe_bodies(app)
    app.add_middleware(Admission, settings=settings, metrics=service.metrics, keys=keys)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-API-Key", "X-Request-Id"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    app.add_middleware(Observation, settings=settings, metrics=service.metrics, is_draining=lambda: service.is_draining)
    return app


async def answer_error(request: Request, error: Exception) -> Response:
    """Return an error, also of the router, in the shape of the API that the path belongs to."""
    if isinstance(error, HTTPException):
        messages = {404: "there is nothing at this path", 405: "this path has other methods"}
        found = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))
        response = error_response(request.scope["path"], found)
        response.headers.update(error.headers or {})
        return response
    found = as_api_error(error)
    request.state.outcome = found.code
    log_error(dict(request.scope), error, found)
    return error_response(request.scope["path"], found)


# ---- health ----------------------------------------------------------------------------------------------------------


class Readiness:
    """Whether the server can answer requests, proved by a forward pass of the default model.

    While a check is in progress the result of the last one counts for some time, so that an answer under full load takes
    no longer than at any other time."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._seconds, self._when = 0.0, -READY_WHILE_CHECKING  # of the last successful check
        self._check: asyncio.Future[float] | None = None

    async def answer(self) -> Response:
        """Return 200 if a forward pass was made a moment ago or can be made now, else 503."""
        if self.service.is_draining:
            return self._not_ready("the server is stopping")
        age = time.monotonic() - self._when
        if age > READY_SECONDS:
            if self._check is None:
                self._check = asyncio.ensure_future(asyncio.to_thread(self.service.store.check))
                self._check.add_done_callback(self._note)
            if age > READY_WHILE_CHECKING:
                try:
                    await asyncio.wait_for(asyncio.shield(self._check), CHECK_TIMEOUT)
                except TimeoutError:
                    return self._not_ready("a forward pass takes too long")
                except Exception:  # whatever it is, the model does not work
                    return self._not_ready("a forward pass failed")
        return JSONResponse({"status": "ready", "ready": True, "seconds": round(self._seconds, 4)})

    def _note(self, check: asyncio.Future[float]) -> None:
        self._check = None
        if not check.cancelled() and check.exception() is None:
            self._seconds, self._when = check.result(), time.monotonic()
        else:
            self._when = -READY_WHILE_CHECKING

    def _not_ready(self, reason: str) -> Response:
        content = {"status": "not ready", "ready": False, "error": reason}
        return JSONResponse(content, 503, {"Retry-After": "5"})


def add_operation_routes(app: FastAPI, service: Service, readiness: Readiness) -> None:
    """Add the routes for operation: liveness, readiness, metrics and a list of all routes."""

    async def live() -> Response:
        return JSONResponse({"status": "ok"})

    for path in ("/health", "/health/live"):
        add_get(app, path, live, tags=["Operation"], summary="Answer while the server runs")
    add_get(app, "/health/ready", readiness.answer, tags=["Operation"], summary="Prove a forward pass")

    @app.get("/metrics", tags=["Operation"], summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(service.metrics.render), media_type=CONTENT_TYPE)

    @app.get("/docs", tags=["Operation"], summary="List all routes")
    async def docs() -> Response:
        rows = "".join(
            f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
            f"<td>{html.escape(found.get('summary', ''))}</td></tr>"
            for path, methods in app.openapi()["paths"].items()
            for method, found in methods.items()
        )
        head = "<!doctype html><html lang=en><meta charset=utf-8><title>Regard: HTTP interfaces</title>"
        text = "<h1>HTTP interfaces</h1><p>The OpenAPI document is at <a href=/openapi.json>/openapi.json</a>.</p>"
        return HTMLResponse(f"{head}{text}<table>{rows}</table></html>")


def describe_bodies(app: FastAPI) -> None:
    """Add the models of request bodies to the OpenAPI document: handlers read bodies themselves, for the sake of limits."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        found = make()
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        for name, model in BODIES.items():
            own = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= own.pop("$defs", {})
            schemas[name] = own
        return found

    app.openapi = openapi  # type: ignore[method-assign]


# ---- the page --------------------------------------------------------------------------------------------------------


def add_page_routes(app: FastAPI) -> None:
    """Add the page at / and its files at /static/; those of `regard look` are at /static/look/."""
    files = {name: PageFile.of(name, content) for name, content in page_files()}

    async def serve(request: Request, name: str = "index.html") -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].answer(request.headers.get("if-none-match", ""))

    async def index(request: Request) -> Response:
        return await serve(request)

    add_get(app, "/", index, tags=["Page"], summary="The web page")
    add_get(app, "/static/{name:path}", serve, tags=["Page"], summary="Files of the web page")


def page_files() -> Iterator[tuple[str, bytes]]:
    """Yield the names below /static/ and the contents of all files of the page."""
    for package, folder, prefix in (("regard.serve", "page", ""), ("regard.look.page", "files", "look/")):
        place = resources.files(package) / folder
        if place.is_dir():
            for file in place.iterdir():
                if file.is_file() and "." + file.name.rpartition(".")[2] in (*TYPES, ".png", ".ico", ".woff2", ".json"):
                    yield prefix + file.name, file.read_bytes()


class PageFile:
    """A file of the page in memory, which a browser asks for again only if it has changed."""

    def __init__(self, content: bytes, kind: str) -> None:
        self.content, self.kind = content, kind
        self.tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    @classmethod
    def of(cls, name: str, content: bytes) -> PageFile:
        """Return a file whose type is told by its name."""
        suffix = "." + name.rpartition(".")[2]
        return cls(content, TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream")

    def answer(self, known: str) -> Response:
        """Return the file, or 304 if the client has it (`known` is its If-None-Match)."""
        headers = {"ETag": self.tag, "Cache-Control": "no-cache"}
        if self.tag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)
