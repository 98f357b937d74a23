"""A small server with the routes that the page uses and answers that are known: no model, no inference.

    python tests/serve/fake_service.py        # http://127.0.0.1:8123

Translation is word by word from a dictionary; words that are not in it are written in capitals. So tests know every answer,
and the links between the words.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

sys.path.append(str(Path(__file__).parent.parent / "look"))
from browser import Sample, strip

ROOT = Path(__file__).parent.parent.parent / "regard"
PAGE, LOOK = ROOT / "serve" / "page", ROOT / "look" / "page" / "files"
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self' blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
GERMAN = {
    "the": "die", "cat": "Katze", "sat": "saß", "on": "auf", "mat": "Matte", "dog": "Hund", "barked": "bellte",
    "old": "alte", "woman": "Frau", "gave": "gab", "children": "Kindern", "two": "zwei", "red": "rote", "apples": "Äpfel",
    "weather": "Wetter", "is": "ist", "very": "sehr", "nice": "schön", "today": "heute", "we": "wir", "are": "sind",
    "going": "gehen", "for": "für", "a": "einen", "walk": "Spaziergang", "along": "entlang", "river": "Fluss",
}  # fmt: skip
LANGUAGES = [{"code": "en", "name": "English"}, {"code": "de", "name": "German"}, {"code": "fr", "name": "French"}]
MODELS = [
    {
        "name": "en-de-fr",
        "task": "translation",
        "directions": ["en>de", "de>en", "en>fr", "fr>en"],
        "languages": LANGUAGES,
        "formality": {"de": ["formal", "familiar"]},
        "beam": 2,
    },
    {"name": "story", "task": "generation", "chat": True},
    {"name": "mood", "task": "classification", "labels": ["calm", "cheerful", "sad"]},
    {"name": "words", "task": "vectors"},
]
SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s|$)|$)", re.S)
WORD = re.compile(r"[^\W_]+")


class Fake:
    """The state that a test sets, and what it reads: `asked` are the bodies of all requests by route."""

    def __init__(self) -> None:
        self.models = MODELS
        self.key = ""  # the API key, if one is wanted
        self.busy = 0  # so many requests are refused first
        self.limit = 5000
        self.pause = 0.0  # seconds before each sentence or token, as it is when a translation begins
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.given_up = 0  # streams whose client was gone before they ended

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]

    # ---- translation ------------------------------------------------------------------------------------------------

    async def translate(self, request: Request) -> Response:
        body = await self.read(request)
        if len(body["text"]) > self.limit:
            return error(413, "the text is too long", limit=self.limit, value=len(body["text"]))
        return StreamingResponse(self.translate_stream(body), media_type="text/event-stream")

    async def translate_stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        text, pause = body["text"], self.pause
        found = list(SENTENCE.finditer(text))
        is_german = bool(set(WORD.findall(text)) & set(GERMAN.values()))
        source = body.get("source") or ("de" if is_german else "en")
        target = body.get("to") or ("en" if source == "de" else "de")
        detected = {"language": source, "probability": 0.98, "certain": len(text) > 12}
        yield event("begin", source=source, target=target, detected=detected, count=len(found))
        whole, ended = "", False
        try:
            for i, sentence in enumerate(found):
                await asyncio.sleep(pause)
                before = text[found[i - 1].end() if i else 0 : sentence.start()]
                written, links = word_by_word(sentence[0], body.get("formality"))
                begin = len(whole) + len(before)
                whole += before + written
                alignment = [[sentence.start() + a, sentence.start() + b, begin + c, begin + d] for a, b, c, d in links]
                yield event(
                    "sentence",
                    index=i,
                    before=before,
                    text=written,
                    confidence=0.2 if "?" in written else 0.8,
                    notes=["repeats itself"] if "again again" in sentence[0] else [],
                    source=span(text, sentence.start(), sentence.end()),
                    target=span(whole, begin, len(whole)),
                    alignment=alignment,
                )
            whole += text[found[-1].end() :] if found else text
            known = {"text": whole, "source": source, "target": target, "detected": detected}
            yield event("end", **known, via="", confidence=0.8, notes=[])
            ended = True
        finally:
            self.given_up += not ended

    async def alternatives(self, request: Request) -> Response:
        body = await self.read(request)
        prefix = body["prefix"]
        rest = word_by_word(body["text"])[0][len(prefix) :]
        after = WORD.sub("", rest, count=1)
        found = [
            {"next": word, "text": prefix + word + after, "probability": p}
            for word, p in [((WORD.search(rest) or [""])[0], 0.6), ("Anders", 0.25), ("Neu", 0.1)]
        ]
        return JSONResponse({"alternatives": found})

    # ---- looking ----------------------------------------------------------------------------------------------------

    async def look(self, request: Request) -> Response:
        body = await self.read(request)
        output = word_by_word(body["text"])[0]
        if body.get("beam") == 1:
            output = output.upper()
        return JSONResponse(self.document(body["text"], [(output, [])]))

    async def change(self, request: Request) -> Response:
        body = await self.read(request)
        if any(change["value"] == "none" for change in body["changes"]):
            return error(400, "this model has no positions that can be taken away")
        before = word_by_word(body["text"])[0]
        after = before.replace("Katze", "Hund").replace("rote", "grüne")
        changes = [f"{change['kind']} {change['value']}" for change in body["changes"]]
        document = self.document(body["text"], [(before, []), (after, changes)])
        return JSONResponse({"before": before, "after": after, "seconds": 0.04, **document})

    def document(self, text: str, outputs: list[tuple[str, list[str]]]) -> dict[str, Any]:
        """Return a document of two layers of two heads with random weights, one view for each output."""
        target = word_by_word(text)[0]
        strips = {
            "source": strip("source (en)", [*text.split(), "<eos>"]),
            "target": strip("target (de)", ["<sos>", *target.split()]),
        }
        sample = Sample("translation", strips)
        views = []
        for output, changes in outputs:
            sample.parts.clear()
            for layer in range(2):
                sample.attend(f"encoder.{layer}.self", "encoder", "source", "source")
                sample.attend(f"decoder.{layer}.self", "decoder", "target", "target")
                sample.attend(f"decoder.{layer}.cross", "cross", "target", "source")
            sample.predict("target", [*target.split(), "<eos>"])
            views.append(json.loads(json.dumps(sample.view(input=text, output=output, changes=changes))))
        sample.document.views = views
        return {"document": sample.document.tree, "blobs": sample.document.base64()}

    # ---- other models -----------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        await self.read(request)

        async def stream() -> AsyncIterator[str]:
            for i in range(6):
                await asyncio.sleep(self.pause)
                top = [{"text": f" {name}{i}", "probability": p} for name, p in (("word", 0.7), ("other", 0.2))]
                yield event("token", text=f" word{i}", probability=0.7 - 0.1 * i, top=top)
            yield event("end", text="", reason="length")

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def classify(self, request: Request) -> Response:
        await self.read(request)
        labels = [("calm", 0.2), ("cheerful", 0.7), ("sad", 0.1)]
        return JSONResponse({"label": "cheerful", "classes": [{"label": name, "probability": p} for name, p in labels]})

    async def neighbours(self, request: Request) -> Response:
        body = await self.read(request)
        found = [{"word": f"{body['word']}{ending}", "similarity": s} for ending, s in (("s", 0.9), ("ing", 0.7))]
        return JSONResponse({"neighbours": found})

    # ---- files ------------------------------------------------------------------------------------------------------

    async def translate_file(self, request: Request) -> Response:
        form = await request.form()
        upload: Any = form["file"]
        content = (await upload.read()).decode()
        self.asked.append(("/translate_file", {"source": form["source"], "target": form["target"]}))
        if "unreadable" in upload.filename:
            return JSONResponse({"error": "this file cannot be read"}, 400)
        self.file = word_by_word(content)[0]
        return JSONResponse({"translatedFileUrl": "http://elsewhere.invalid/download_file/1_de.txt"})

    async def download_file(self, request: Request) -> Response:
        return PlainTextResponse(self.file)

    # ---- application ------------------------------------------------------------------------------------------------

    async def served_models(self, request: Request) -> Response:
        limits = {"max_characters": self.limit}
        return JSONResponse(
            {"models": self.models, "default": self.models[0]["name"], "limits": limits, "version": "0"}
        )

    async def settings(self, request: Request) -> Response:
        return JSONResponse({"charLimit": self.limit, "supportedFilesFormat": [".txt", ".md", ".html", ".po", ".srt"]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def index(self, request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def read(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.asked.append((request.url.path, body))
        return body

    def app(self) -> Starlette:
        """Return the application, with the content policy of the real one."""
        posts = ("translate", "alternatives", "look", "change", "generate", "classify", "neighbours")
        app = Starlette(
            routes=[
                Route("/", self.index),
                Route("/health", self.health),
                Route("/frontend/settings", self.settings),
                Route("/regard/models", self.served_models),
                *(Route(f"/regard/{name}", getattr(self, name), methods=["POST"]) for name in posts),
                Route("/translate_file", self.translate_file, methods=["POST"]),
                Route("/download_file/{name}", self.download_file),
                Mount("/static/look", StaticFiles(directory=LOOK)),
                Mount("/static", StaticFiles(directory=PAGE)),
            ]
        )
        app.add_middleware(BaseHTTPMiddleware, dispatch=self.guard)
        return app

    async def guard(self, request: Request, answer: Any) -> Response:
        path = request.url.path
        is_open = path == "/" or path.startswith(("/static", "/health"))
        if self.key and not is_open and request.headers.get("authorization") != f"Bearer {self.key}":
            response: Response = error(401, "an API key is needed")
        elif self.busy and request.method == "POST":
            self.busy -= 1
            response = error(429, "too many requests", headers={"Retry-After": "1"})
        else:
            response = await answer(request)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response


def word_by_word(text: str, formality: str | None = None) -> tuple[str, list[tuple[int, int, int, int]]]:
    """Return the translation of a sentence, and links from each word to its own as positions in both."""
    written, links, end = "", [], 0
    for word in WORD.finditer(text):
        written += text[end : word.start()]
        other = GERMAN.get(word[0].lower(), word[0].upper())
        if word.start() == 0:
            other = other[0].upper() + other[1:]
        links.append((word.start(), word.end(), len(written), len(written) + len(other)))
        written += other
        end = word.end()
    return written + text[end:] + (f" ({formality})" if formality else ""), links


def units(text: str, *places: int) -> list[int]:
    """Return places in a text in UTF-16 code units."""
    return [len(text[:place].encode("utf-16-le")) // 2 for place in places]


def span(text: str, *places: int) -> dict[str, int]:
    return dict(zip(("begin", "end"), units(text, *places), strict=True))


def event(name: str, **data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def error(status: int, message: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error", "code": status, **more}}, status, headers)


class Running:
    """A fake service in a thread, at a port of its own that stays the same when it is started again."""

    def __init__(self, port: int = 0) -> None:
        self.fake = Fake()
        with socket.socket() as free:
            free.bind(("127.0.0.1", port))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self) -> None:
        config = uvicorn.Config(self.fake.app(), port=self.port, log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


if __name__ == "__main__":
    service = Running(8123)
    service.fake.pause = 0.15
    print(service.url)
    service.thread.join()
