"""The API of LibreTranslate, for its clients: translation, language detection, languages, settings and files.

Fields may be in a JSON body, a form or the query string. Errors are {"error": "message"}. Clients exist that send a GET with
a body, an API key that is null, or everything in the query string of a POST; all of them are answered.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from regard.documents import FORMATS, format_of
from regard.inference.document_translation import OutputStyle, read_pieces, translate_pieces
from regard.inference.streaming import ChunkTranslator, read_line_batches
from regard.inference.translator import Translation, Translator
from regard.serve.api_errors import ApiError
from regard.serve.request_bodies import RequestModel, UploadedFile, validate
from regard.serve.service import Service, body_schema
from regard.text.language_identification import identify_language, identify_languages
from regard.text.language_names import find_language, language_name

ALIASES = {"zt": "zh-Hant", "pb": "pt-BR"}  # codes that only LibreTranslate has
FRONTEND_TIMEOUT_MS = 500
KEPT_SECONDS, KEPT_FILES, KEPT_BYTES = 1800.0, 64, 64 << 20  # of translated files until they are fetched
SUFFIXES = [suffix for format in FORMATS.values() for suffix in format.suffixes]
MIN_DETECTED = 0.01  # probability of a language that /detect lists
BODIES = ("application/json", "application/x-www-form-urlencoded")


class LibreTranslateRequest(RequestModel):
    """The fields of POST /translate."""

    q: str | list[str]
    source: str = "auto"
    target: str
    format: str | None = "text"
    alternatives: Annotated[int, Field(ge=0)] | None = 0
    model: str | None = None  # not of LibreTranslate: the name of one of several served models


class DetectRequest(RequestModel):
    """The fields of POST /detect."""

    q: str


class TranslateFileRequest(RequestModel):
    """The fields of POST /translate_file."""

    file: Any
    source: str = "auto"
    target: str
    model: str | None = None


def make_router(service: Service) -> APIRouter:
    """Return the routes of LibreTranslate."""
    router, kept = APIRouter(tags=["LibreTranslate"]), KeptFiles()

    @router.post(
        "/translate", summary="Translate texts", openapi_extra=body_schema(LibreTranslateRequest, kinds=BODIES)
    )
    async def translate(request: Request) -> Response:
        asked = validate(LibreTranslateRequest, await request.state.body.fields())
        texts = [asked.q] if isinstance(asked.q, str) else asked.q
        service.check_texts(texts, "q")
        alternatives = asked.alternatives or 0
        service.check_limit("alternatives", alternatives, "max_alternatives", "alternatives")
        if asked.format not in (None, "", "text", "html"):
            raise ApiError(400, f"Invalid request: format is text or html, not {asked.format[:40]!r}", param="format")
        entry = service.choose(asked.model, "translation")

        def work(translator: Translator) -> dict[str, Any]:
            found = translate_texts(translator, texts, asked.source, asked.target, asked.format == "html", alternatives)
            return found if isinstance(asked.q, list) else {name: values[0] for name, values in found.items()}

        return await service.reply(request, entry, work)

    @router.post("/detect", summary="Detect the language", openapi_extra=body_schema(DetectRequest, kinds=BODIES))
    async def detect(request: Request) -> Response:
        asked = validate(DetectRequest, await request.state.body.fields())
        service.check_texts([asked.q], "q")
        return JSONResponse(await service.calls.run(request, lambda: detect_languages(asked.q)))

    @router.get("/languages", summary="List languages and what each is translated to")
    async def languages(request: Request) -> Response:
        entry = service.choose(request.query_params.get("model"), "translation")
        return await service.reply(request, entry, list_languages)

    @router.get("/frontend/settings", summary="Settings for other front ends")
    async def frontend_settings(request: Request) -> Response:
        entry = service.choose(None, "translation")
        first = (await service.run(request, entry, list_languages))[0]
        target = next((code for code in first["targets"] if code != first["code"]), first["code"])
        source, other = ({"code": code, "name": language_name(code)} for code in (first["code"], target))
        return JSONResponse(
            {
                "apiKeys": service.settings.keys is not None,
                "charLimit": service.settings.max_characters,
                "filesTranslation": True,
                "frontendTimeout": FRONTEND_TIMEOUT_MS,
                "keyRequired": service.settings.keys is not None,
                "language": {"source": source, "target": other},
                "suggestions": False,
                "supportedFilesFormat": SUFFIXES,
            }
        )

    @router.post(
        "/translate_file",
        summary="Translate a file",
        openapi_extra=body_schema(TranslateFileRequest, kinds=("multipart/form-data",)),
    )
    async def translate_file(request: Request) -> Response:
        asked = validate(TranslateFileRequest, await request.state.body.fields())
        if not isinstance(asked.file, UploadedFile):
            raise ApiError(400, "Invalid request: file must be a file of a multipart form", param="file")
        suffix = PurePosixPath(asked.file.name).suffix.lower()
        if suffix not in SUFFIXES:
            known = ", ".join(SUFFIXES)
            raise ApiError(400, f"Invalid request: file format not supported: the formats are {known}", param="file")
        entry = service.choose(asked.model, "translation")
        file = asked.file
        target, text = await service.run(
            request, entry, lambda found: translate_content(found, file, asked.source, asked.target)
        )
        name = kept.add(file.name, target, text.encode(), request.state.context.client)
        return JSONResponse({"translatedFileUrl": str(request.base_url) + f"download_file/{name}"})

    @router.get("/download_file/{name}", summary="Fetch a translated file")
    async def download_file(request: Request, name: str) -> Response:
        content = kept.get(name, request.state.context.client)
        if content is None:
            raise ApiError(404, f"there is no such file; a translated file is kept for {KEPT_SECONDS / 60:g} minutes")
        disposition = f"attachment; filename*=UTF-8''{quote(name.partition('.')[2])}"
        return Response(content, media_type="text/plain", headers={"Content-Disposition": disposition})

    return router


# ---- translation -----------------------------------------------------------------------------------------------------


def translate_texts(
    translator: Translator, texts: list[str], source: str, target: str, is_html: bool, alternatives: int
) -> dict[str, Any]:
    """Return the answer to a list of texts: translations and, where they are asked for, languages and alternatives."""
    to, known_source = find_codes(translator, target, source)
    if is_html:
        made = [translate_text(translator, text, "html", to, known_source) for text in texts]
        found: list[Translation] = []
    elif known_source == to:
        found, made = [], list(texts)
    else:
        options: dict[str, Any] = {"nbest": alternatives + 1} if alternatives else {}
        found = translator.translate(texts, to, known_source, **options)
        made = [each.text for each in found]
    answer: dict[str, Any] = {"translatedText": made}
    if known_source is None:
        answer["detectedLanguage"] = describe_languages(texts, [each.source for each in found])
    if alternatives:
        answer["alternatives"] = [[other.text for other in each.nbest[1:]] for each in found] or [[] for _ in texts]
    return answer


def describe_languages(texts: Sequence[str], sources: Sequence[str]) -> list[dict[str, Any]]:
    """Return the language of each text: the one that it was translated from, else the one that it seems to be in.

    The confidence is that of a text by itself, from 0 to 100; `sources` are empty where nothing was translated."""
    return [
        {"confidence": round(100 * each.probability, 1), "language": source or each.language or "en"}
        for each, source in zip(identify_languages(texts), sources or [""] * len(texts), strict=True)
    ]


def find_codes(translator: Translator, target: str, source: str | None) -> tuple[str, str | None]:
    """Return the target and the source language (None: to be detected) in the codes of the model."""
    known = list_languages(translator)
    names = [each["code"] for each in known]
    wanted = find_language(ALIASES.get(target, target), sorted({code for each in known for code in each["targets"]}))
    if wanted is None:
        raise ApiError(400, f"{target[:40]} is not supported", param="target", code="language_not_supported")
    if not source or source == "auto":
        return wanted, None
    own = find_language(ALIASES.get(source, source), names)
    if own is None:
        raise ApiError(400, f"{source[:40]} is not supported", param="source", code="language_not_supported")
    return wanted, own


def list_languages(translator: Translator) -> list[dict[str, Any]]:
    """Return the source languages of a model with the languages that it translates each to, also via a third one."""
    directions = [tuple(direction.split(">")) for direction in translator.directions]
    directions = directions or [(translator.source, translator.target)]
    found = []
    for code in dict.fromkeys(source for source, _ in directions):
        direct = [target for source, target in directions if source == code]
        via = [target for source, target in directions if source in direct and target != code]
        targets = sorted({*direct, *via, code})
        found.append({"code": code, "name": language_name(code), "targets": targets})
    return found


def detect_languages(text: str) -> list[dict[str, Any]]:
    """Return the likely languages of a text, best first, with confidences up to 100."""
    found = sorted(identify_language(text).probabilities.items(), key=lambda pair: -pair[1])
    likely = [{"confidence": round(100 * p, 1), "language": code} for code, p in found if p >= MIN_DETECTED]
    return likely or [{"confidence": 0.0, "language": "en"}]


def translate_text(translator: Translator, text: str, format: str, to: str | None, source: str | None) -> str:
    """Return the translation of a document of a known format, as `regard translate FILE` would write it."""
    pieces = list(read_pieces(read_line_batches(iter([text.encode()]), name="the text"), format))
    chunks = ChunkTranslator(translator, to, source, is_document=True)
    chunks.look_ahead([each for piece in pieces for each in piece.texts])
    return "".join(translate_pieces(pieces, chunks, OutputStyle()))


def translate_content(translator: Translator, file: UploadedFile, source: str, target: str) -> tuple[str, str]:
    """Return the target language and the translation of a file."""
    try:
        text = file.content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"Invalid request: the file is not UTF-8 ({error.reason} at byte {error.start + 1})"
        raise ApiError(400, message, param="file", code="invalid_utf8") from None
    to, known_source = find_codes(translator, target, source)
    if known_source == to:
        return to, text
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    format = format_of(file.name, text[:100]) if translator.directions else "lines"
    return to, mark + translate_text(translator, text.removeprefix(mark), format, to, known_source)


# ---- translated files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptFile:
    """A translated file until it is fetched."""

    content: bytes
    client: str
    until: float


class KeptFiles:
    """Translated files in memory, by names that cannot be guessed; the oldest are forgotten."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, KeptFile] = OrderedDict()

    def add(self, name: str, target: str, content: bytes, client: str) -> str:
        """Keep a file for the client that sent it, and return its new name."""
        path = PurePosixPath(name.replace("\\", "/"))
        stem = "".join(char if char.isalnum() or char in "-_" else "_" for char in path.stem)[:60]
        new = f"{secrets.token_urlsafe(16)}.{stem}_{target}{path.suffix.lower()}"
        self._files[new] = KeptFile(content, client, time.monotonic() + KEPT_SECONDS)
        while len(self._files) > KEPT_FILES or sum(len(each.content) for each in self._files.values()) > KEPT_BYTES:
            self._files.popitem(last=False)
        return new

    def get(self, name: str, client: str) -> bytes | None:
        """Return a file of this client."""
        found = self._files.get(name)
        if found is None or found.client != client or found.until < time.monotonic():
            return None
        return found.content
