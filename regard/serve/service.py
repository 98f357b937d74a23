"""What the handlers of all APIs share: the settings, the served models by name and task, and calls of blocking inference.

A handler reads and checks the fields of its request on the event loop, and gives `Service.run` or `Service.stream` a
function that does the rest in a thread, with a model that stays loaded meanwhile.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from regard.errors import RegardError
from regard.serve.api_errors import ApiError, limit_error
from regard.serve.blocking_calls import BlockingCalls, EventStream
from regard.serve.request_bodies import M, RequestBody, RequestModel, validate
from regard.serve.request_context import ServeError
from regard.serve.server_metrics import Metrics
from regard.serve.settings import ServeSettings

if TYPE_CHECKING:
    from regard.serve.model_store import LoadedModel, ModelEntry, ModelStore

log = logging.getLogger("regard.serve")
T = TypeVar("T")

# What a model does, by its task.
VERBS = {
    "translation": "translates",
    "generation": "writes text",
    "classification": "classifies texts",
    "embedding": "embeds texts",
    "images": "classifies images",
    "vectors": "has word vectors",
}


class Service:
    """The settings, models, threads and metrics of one server."""

    def __init__(self, settings: ServeSettings, store: ModelStore) -> None:
        self.settings, self.store = settings, store
        self.metrics = Metrics(store.entries, store.statistics)
        self.calls = BlockingCalls(settings.max_requests, self.metrics.cancelled.inc)
        self.is_draining = False

    # ---- models ------------------------------------------------------------------------------------------------------

    def choose(self, name: str | None, *tasks: str) -> ModelEntry:
        """Return the served model of this name, or the first one of these tasks; one of another task is an error."""
        entries = self.store.entries
        wanted = " or ".join(VERBS[task] for task in tasks)
        if name:
            if name not in entries:
                message = f"the model {name[:100]!r} is not served here: there are {', '.join(entries)}"
                raise ApiError(404, message, code="model_not_found", param="model")
            if tasks and entries[name].task not in tasks:
                own = VERBS[entries[name].task]
                message = f"the model {name!r} {own}, and this needs one that {wanted}"
                raise ApiError(400, message, code="model_not_supported", param="model")
            return entries[name]
        for entry in entries.values():
            if not tasks or entry.task in tasks:
                return entry
        raise ApiError(404, f"no model that {wanted} is served here", code="model_not_found", param="model")

    @contextmanager
    def lease(self, entry: ModelEntry) -> Iterator[LoadedModel]:
        """Hold a loaded model."""
        with ExitStack() as stack:
            with loading(entry):
                loaded = stack.enter_context(self.store.lease(entry.name))
            yield loaded

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def run(self, request: Request, entry: ModelEntry, function: Callable[[Any], T]) -> T:
        """Return what a function returns for what `regard.load` returns for a model, called in a thread."""

        def work() -> T:
            with self.lease(entry) as loaded:
                return function(loaded.inference)

        return await self.calls.run(request, work)

    async def reply(self, request: Request, entry: ModelEntry, function: Callable[[Any], Any]) -> Response:
        """Return what `run` returns as a JSON response, which is written in the thread too."""

        def work() -> bytes:
            with self.lease(entry) as loaded:
                return dump(function(loaded.inference))

        return Response(await self.calls.run(request, work), media_type="application/json")

    async def stream(
        self,
        request: Request,
        entry: ModelEntry,
        function: Callable[[Any], Iterator[bytes]],
        on_error: Callable[[ApiError], bytes],
    ) -> EventStream:
        """Return a stream of the events that a function yields, called in a thread."""

        def events() -> Iterator[bytes]:
            with self.lease(entry) as loaded:
                yield from function(loaded.inference)

        return await self.calls.stream(request, events, on_error, self.metrics.first_event.observe)

    async def read(self, request: Request, model: type[M]) -> M:
        """Return the JSON body of a request as an object of its model."""
        body: RequestBody = request.state.body
        return validate(model, await body.json())

    # ---- limits ------------------------------------------------------------------------------------------------------

    def check_texts(self, texts: Sequence[str], param: str = "") -> None:
        """Refuse too many texts, and those that are too long; count the characters of others."""
        self.check_limit("texts", len(texts), "max_texts", param)
        longest = max(map(len, texts), default=0)
        self.check_limit("characters of a text", longest, "max_characters", param)
        self.metrics.characters.inc(sum(map(len, texts)))

    def check_limit(self, what: str, value: float | None, name: str, param: str = "") -> None:
        """Refuse a value above the limit of this name."""
        limit = getattr(self.settings, name)
        if value is not None and value > limit:
            raise limit_error(what, value, limit, f"--{name.replace('_', '-')}", param or None)


@contextmanager
def loading(entry: ModelEntry) -> Iterator[None]:
    """Turn the error of a model that cannot be loaded into one of the server, whose cause is only logged."""
    try:
        yield
    except ServeError:
        raise
    except (RegardError, OSError) as error:
        log.error("a model cannot be loaded", extra={"fields": {"model": entry.name, "reason": str(error)}})
        message = f"the model {entry.name!r} cannot be loaded; the log of the server says why"
        raise ApiError(503, message, code="model_not_loaded", retry_after=30) from None


def dump(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def add_get(routes: APIRouter | FastAPI, path: str, handler: Callable[..., Any], **about: Any) -> None:
    """Add a route for GET, and for HEAD, which the OpenAPI document need not have."""
    routes.get(path, **about)(handler)
    routes.head(path, include_in_schema=False)(handler)


BODIES: dict[str, type[RequestModel]] = {}  # models of request bodies by their names in the OpenAPI document


def body_schema(model: type[RequestModel], kinds: Iterable[str] = ("application/json",)) -> dict[str, Any]:
    """Return the part of an OpenAPI document that describes the body of a request."""
    BODIES[model.__name__] = model
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}}


def options_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in values.items() if value is not None}
