"""The API of Hugging Face's inference servers, for `huggingface_hub.InferenceClient`.

Its clients send all tasks to one address, `POST /`, with {"inputs": ..., "parameters": ...}. What is answered depends on
what the served model does; `POST /models/NAME` chooses among several.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from regard.inference.classifier import Classifier
from regard.inference.embedder import Embedder
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.serve.api_errors import ApiError
from regard.serve.image_input import check_image, classify_items
from regard.serve.libretranslate_api import find_codes
from regard.serve.openai_api import Completion, GenerationFields, generation_options
from regard.serve.request_bodies import RequestModel, validate
from regard.serve.service import Service, body_schema


class TaskRequest(RequestModel):
    """The fields of POST /."""

    inputs: str | list[str] | dict[str, Any]
    parameters: dict[str, Any] | None = None


class TranslationParameters(RequestModel):
    """The parameters of a translation."""

    src_lang: str | None = None
    tgt_lang: str | None = None


class GenerationParameters(GenerationFields):
    """The parameters of text generation."""

    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    do_sample: bool | None = None


def make_router(service: Service) -> APIRouter:
    """Return the routes for Hugging Face's clients."""
    router, schema = APIRouter(tags=["Hugging Face"]), body_schema(TaskRequest)

    async def answer(request: Request, name: str | None) -> Response:
        entry = service.choose(name)
        body = request.state.body
        if body.kind.startswith("image/") or body.kind == "application/octet-stream":
            image = check_image(body.content)
            return await service.reply(request, entry, lambda found: classes_of(service, found, [image])[0])
        asked = await service.read(request, TaskRequest)
        if isinstance(asked.inputs, dict):
            raise ApiError(400, "inputs is a text or a list of texts")
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        if not texts:
            raise ApiError(400, "inputs is empty: give at least one text")
        if entry.task != "images":
            service.check_texts(texts, "inputs")
        is_one = isinstance(asked.inputs, str)
        return await service.reply(
            request, entry, lambda found: run_task(service, found, texts, asked.parameters or {}, is_one)
        )

    @router.post("/", summary="Run the first served model", openapi_extra=schema)
    async def first(request: Request) -> Response:
        return await answer(request, None)

    @router.post("/models/{name:path}", summary="Run a served model", openapi_extra=schema)
    async def named(request: Request, name: str) -> Response:
        return await answer(request, name or "/")

    return router


def run_task(service: Service, inference: Any, texts: list[str], parameters: dict[str, Any], is_one: bool) -> Any:
    """Return what a model makes of texts, in the shape of its task; `is_one`: one text was given, not a list."""
    if isinstance(inference, Translator):
        asked = validate(TranslationParameters, parameters)
        to, source = find_codes(inference, asked.tgt_lang, asked.src_lang) if asked.tgt_lang else (None, asked.src_lang)
        if source is not None and source == to:
            return [{"translation_text": text} for text in texts]
        return [{"translation_text": each.text} for each in inference.translate(texts, to, source)]
    if isinstance(inference, Generator):
        fields = validate(GenerationParameters, parameters)
        if fields.max_new_tokens is not None and fields.max_new_tokens < 1:
            raise ApiError(400, "max_new_tokens must be at least 1")
        options = generation_options(service, fields, fields.max_new_tokens)
        if fields.do_sample is False:
            options["temperature"] = 0.0
        made = [Completion(inference, text, options) for text in texts]
        found = inference.generate(texts, **made[0].options)
        written = [
            {"generated_text": (each.prompt if fields.return_full_text else "") + one.text}
            for each in found
            for one in each.samples or (each,)
        ]
        return written if is_one else [[each] for each in written]
    if isinstance(inference, Classifier):
        return classes_of(service, inference, texts)
    if isinstance(inference, Embedder):
        vectors = inference.embed(texts).tolist()
        return vectors
    neighbours = [inference.nearest(text) for text in texts]
    return [[{"label": word, "score": score} for word, score in own] for own in neighbours]


def classes_of(service: Service, inference: Any, items: list[Any]) -> list[list[dict[str, Any]]]:
    """Return the classes of items, likeliest first; of a regression its number, of tagging the tags of words."""
    if not isinstance(inference, Classifier):
        raise ApiError(400, "the served model does not classify images")
    found = []
    for each in classify_items(service, inference, items):
        if each.tags:
            found.append([{"entity_group": tag, "word": word, "score": 1.0} for word, tag in each.tags])
        elif each.value is not None:
            found.append([{"label": "value", "score": each.value}])
        else:
            ranked = sorted(each.probabilities.items(), key=lambda pair: -pair[1])
            found.append([{"label": label, "score": p} for label, p in ranked])
    return found
