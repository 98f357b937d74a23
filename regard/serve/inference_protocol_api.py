"""The Open Inference Protocol, version 2 (KServe, Triton): health, metadata, and inference in JSON.

A model has one input, `text`, a tensor of strings (BYTES). Its outputs depend on what it does: see `outputs_of`.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from regard import __version__
from regard.inference.classifier import Classifier
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.serve.api_errors import ApiError
from regard.serve.image_input import classify_items
from regard.serve.libretranslate_api import find_codes
from regard.serve.request_bodies import RequestModel
from regard.serve.service import Service, add_get, body_schema

OUTPUTS = {
    "translation": [("text", "BYTES", [-1]), ("source", "BYTES", [-1])],
    "generation": [("text", "BYTES", [-1])],
    "classification": [("label", "BYTES", [-1]), ("probabilities", "FP32", [-1, -1])],
    "images": [("label", "BYTES", [-1]), ("probabilities", "FP32", [-1, -1])],
    "embedding": [("vector", "FP32", [-1, -1])],
    "vectors": [("vector", "FP32", [-1, -1])],
}


class Tensor(RequestModel):
    """A tensor of strings; images are data URLs."""

    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    datatype: str
    data: list[Any]


class InferRequest(RequestModel):
    """The fields of POST /v2/models/NAME/infer; `parameters` may have `source` and `target` for a translator."""

    id: str | None = None
    parameters: dict[str, Any] | None = None
    inputs: Annotated[list[Tensor], Field(min_length=1, max_length=1)]
    outputs: list[dict[str, Any]] | None = None


def make_router(service: Service, ready: Any) -> APIRouter:
    """Return the routes of the protocol; `ready` is the handler that proves a forward pass."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("", summary="Describe the server")
    async def server() -> Response:
        return JSONResponse({"name": "regard", "version": __version__, "extensions": []})

    async def live() -> Response:
        return JSONResponse({"live": True})

    add_get(router, "/health/live", live, summary="Answer while the server runs")
    add_get(router, "/health/ready", ready, summary="Prove a forward pass")

    async def model_ready(request: Request, name: str) -> Response:
        service.choose(name)
        return JSONResponse({"name": name, "ready": not service.is_draining})

    async def metadata(name: str) -> Response:
        entry = service.choose(name)
        outputs = OUTPUTS.get(entry.task, [])
        return JSONResponse(
            {
                "name": entry.name,
                "versions": ["1"],
                "platform": "regard",
                "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
                "outputs": [{"name": n, "datatype": kind, "shape": shape} for n, kind, shape in outputs],
            }
        )

    async def infer(request: Request, name: str) -> Response:
        entry = service.choose(name)
        if "inference-header-content-length" in request.headers:
            raise ApiError(400, "binary tensors are not supported: send the data of inputs as JSON")
        asked = await service.read(request, InferRequest)
        (tensor,) = asked.inputs
        size = int(np.prod(tensor.shape, dtype=object)) if tensor.shape else 0
        if tensor.datatype != "BYTES" or size != len(tensor.data) or not size:
            raise ApiError(400, "the input is a tensor of strings: datatype BYTES, and as many data as its shape says")
        if not all(isinstance(text, str) for text in tensor.data):
            raise ApiError(400, "the data of a BYTES tensor in JSON are strings")
        service.check_texts(tensor.data if entry.task != "images" else [], "inputs")
        parameters = asked.parameters or {}

        def work(inference: Any) -> dict[str, Any]:
            outputs = outputs_of(service, inference, tensor.data, parameters)
            answer = {"model_name": entry.name, "model_version": "1", "outputs": outputs}
            return answer | ({"id": asked.id} if asked.id else {})

        return await service.reply(request, entry, work)

    async def versioned_ready(request: Request, name: str, version: str) -> Response:
        check_version(version)
        return await model_ready(request, name)

    async def versioned_metadata(name: str, version: str) -> Response:
        check_version(version)
        return await metadata(name)

    async def versioned_infer(request: Request, name: str, version: str) -> Response:
        check_version(version)
        return await infer(request, name)

    place, schema = "/models/{name:path}", body_schema(InferRequest)
    for path, own in ((f"{place}/versions/{{version}}", True), (place, False)):
        router.get(f"{path}/ready", summary="Tell whether a model is served")(versioned_ready if own else model_ready)
        router.post(f"{path}/infer", summary="Run a model", openapi_extra=schema)(versioned_infer if own else infer)
    router.get(f"{place}/versions/{{version}}", summary="Describe a model")(versioned_metadata)
    router.get(place, summary="Describe a model")(metadata)
    return router


def check_version(version: str) -> None:
    """Refuse a version of a model other than the only one."""
    if version != "1":
        raise ApiError(404, "a served model has one version, 1")


def outputs_of(service: Service, inference: Any, texts: list[str], parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the output tensors of a model for texts."""
    if isinstance(inference, Translator):
        target, source = (parameters.get(name) for name in ("target", "source"))
        if not all(value is None or isinstance(value, str) for value in (target, source)):
            raise ApiError(400, "parameters.source and parameters.target are codes of languages", param="parameters")
        to, own = find_codes(inference, target, source) if target else (None, None)
        found = inference.translate(texts, to, own)
        return [strings("text", [each.text for each in found]), strings("source", [each.source for each in found])]
    if isinstance(inference, Generator):
        most = min(service.settings.max_new_tokens, inference.options.max_new_tokens)
        return [strings("text", [each.text for each in inference.generate(texts, max_new_tokens=most)])]
    if isinstance(inference, Classifier):
        predictions = classify_items(service, inference, texts)
        rows = [list(each.probabilities.values()) for each in predictions]
        return [strings("label", [each.label for each in predictions]), numbers("probabilities", rows)]
    if isinstance(inference, Embedder):
        return [numbers("vector", inference.embed(texts).tolist())]
    return [numbers("vector", [inference[text].tolist() for text in texts])]


def strings(name: str, values: list[str]) -> dict[str, Any]:
    """Return strings as a tensor."""
    return {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": values}


def numbers(name: str, rows: list[list[float]]) -> dict[str, Any]:
    """Return rows of numbers as a tensor."""
    shape = [len(rows), len(rows[0]) if rows else 0]
    return {"name": name, "datatype": "FP32", "shape": shape, "data": [value for row in rows for value in row]}
