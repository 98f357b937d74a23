"""Regard's own API, which the web page uses: translation by sentences, alternatives, and looking into models, live.

Offsets into texts are counted in UTF-16 code units, as JavaScript counts them. A change of a model (`/regard/change`) is
made to a copy of it in fp32, which is used by one request at a time: nothing that anybody else asks for is affected.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import Field, StrictBool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from regard import __version__
from regard.decode.constraints import Hypothesis, mask_disallowed, pad_rows, with_allowed_tokens
from regard.decode.generation import TextStreamer, check_generation, choose_tokens, make_request
from regard.decode.unknown_words import allow_unknown
from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.inference.classifier import Classifier
from regard.inference.generator import Generator
from regard.inference.translator import Translation, Translator, is_spaced
from regard.look.interventions import parse
from regard.look.model_trace import Trace
from regard.look.page.document import make_document
from regard.look.tracers import trace
from regard.model_folder import ModelPackage, find
from regard.serve.api_errors import ApiError, error_body
from regard.serve.image_input import classify_items, write_image
from regard.serve.openai_api import Completion, GenerationFields, Message, generation_options, read_messages
from regard.serve.request_bodies import RequestModel
from regard.serve.request_context import current_request
from regard.serve.service import Service, body_schema, dump, loading, options_of
from regard.text.alignment import Link, word_spans
from regard.text.chat_template import DEFAULT_CHAT_TEMPLATE
from regard.text.formality import detect_form, forms_of_address, split_form
from regard.text.language_identification import Direction, identify_language
from regard.text.language_names import language_name
from regard.text.sentence_splitting import Sentence, join_with_begins, split_sentences
from regard.vectors.word_vectors import WordVectors

GROUP = 16  # sentences that are translated together when results are streamed; the first is translated alone
MAX_CHANGES = 32
MAX_TERMS = 500  # of a glossary
LOOK_KINDS = ("translation", "generation", "classification", "embedding", "images")


class TranslateRequest(RequestModel):
    """The fields of POST /regard/translate."""

    text: str
    to: str | None = None
    source: str | None = None
    model: str | None = None
    formality: str | None = None
    glossary: dict[str, str] | None = None
    beam: Annotated[int, Field(ge=1)] | None = None
    stream: StrictBool | None = None


class AlternativesRequest(RequestModel):
    """The fields of POST /regard/alternatives: a source sentence and the beginning of its translation."""

    text: str
    prefix: str = ""
    to: str | None = None
    source: str | None = None
    formality: str | None = None
    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 5


class LookRequest(RequestModel):
    """The fields of POST /regard/look; `text` is a data URL for a model of images."""

    text: str
    to: str | None = None
    model: str | None = None
    beam: Annotated[int, Field(ge=1)] | None = None


class Change(RequestModel):
    """An intervention, as `regard look --KIND VALUE` takes it."""

    kind: str
    value: str


class ChangeRequest(LookRequest):
    """The fields of POST /regard/change."""

    changes: Annotated[list[Change], Field(min_length=1, max_length=MAX_CHANGES)]


class GenerateRequest(GenerationFields):
    """The fields of POST /regard/generate: a prompt or a conversation, and how the answer begins."""

    prompt: str | None = None
    messages: list[Message] | None = None
    prefix: str = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    top: Annotated[int, Field(ge=0, le=20)] = 5


class ClassificationRequest(RequestModel):
    """The fields of POST /regard/classify; `text` is a data URL for a model of images."""

    text: str
    pair: str | None = None
    model: str | None = None


class NeighboursRequest(RequestModel):
    """The fields of POST /regard/neighbours: a word, or the three of an analogy a : b :: c : ?"""

    word: str | None = None
    analogy: Annotated[list[str], Field(min_length=3, max_length=3)] | None = None
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=100)] = 10


def make_router(service: Service) -> APIRouter:
    """Return the routes of Regard's own API."""
    router, copies = APIRouter(prefix="/regard", tags=["Regard"]), ModelCopies(service)

    @router.get("/models", summary="Describe the served models")
    async def models(request: Request) -> Response:
        def work() -> dict[str, Any]:
            described = [describe_model(entry) for entry in service.store.entries.values()]
            default = next(iter(service.store.entries), None)
            limits = service.settings.numbers()
            return {"models": described, "default": default, "limits": limits, "version": __version__}

        return JSONResponse(await service.calls.run(request, work))

    @router.post("/translate", summary="Translate by sentences", openapi_extra=body_schema(TranslateRequest))
    async def translate(request: Request) -> Response:
        asked = await service.read(request, TranslateRequest)
        service.check_texts([asked.text], "text")
        service.check_limit("beam", asked.beam, "max_beam", "beam")
        check_formality(asked.formality)
        if asked.glossary and (len(asked.glossary) > MAX_TERMS or not all(map(str.strip, asked.glossary))):
            raise ApiError(400, f"a glossary has at most {MAX_TERMS} terms, and none is empty", param="glossary")
        entry = service.choose(asked.model, "translation")
        if asked.stream:
            return await service.stream(
                request, entry, lambda translator: translation_events(TextTranslation(translator, asked)), error_event
            )

        def work(translator: Translator) -> dict[str, Any]:
            made = TextTranslation(translator, asked)
            sentences = list(made.sentences(len(made.parts) or 1))
            return made.summary() | {"sentences": [{k: v for k, v in s.items() if k != "before"} for s in sentences]}

        return await service.reply(request, entry, work)

    @router.post("/alternatives", summary="Continue a translation", openapi_extra=body_schema(AlternativesRequest))
    async def alternatives(request: Request) -> Response:
        asked = await service.read(request, AlternativesRequest)
        service.check_texts([asked.text, asked.prefix], "text")
        service.check_limit("n", asked.n, "max_alternatives", "n")
        check_formality(asked.formality)
        entry = service.choose(asked.model, "translation")
        return await service.reply(
            request, entry, lambda translator: {"alternatives": find_alternatives(translator, asked)}
        )

    @router.post("/look", summary="Record what a model does", openapi_extra=body_schema(LookRequest))
    async def look(request: Request) -> Response:
        asked = await service.read(request, LookRequest)
        return await look_into(request, asked, [])

    @router.post("/change", summary="Compare before and after changes", openapi_extra=body_schema(ChangeRequest))
    async def change(request: Request) -> Response:
        asked = await service.read(request, ChangeRequest)
        return await look_into(request, asked, asked.changes)

    async def look_into(request: Request, asked: LookRequest, changes: Sequence[Change]) -> Response:
        entry = service.choose(asked.model, *LOOK_KINDS)
        if entry.task != "images":
            service.check_limit("characters of a text", len(asked.text), "max_look_characters", "text")
        service.check_limit("beam", asked.beam, "max_beam", "beam")
        interventions = [parse(each.kind, each.value) for each in changes]

        def work() -> bytes:
            begun = time.monotonic()
            options = look_options(entry, asked)
            with copies.use(entry) as copy, TemporaryDirectory(prefix="regard-") as folder:
                text = asked.text
                if entry.task == "images":
                    text = str(write_image(asked.text, Path(folder) / "image"))
                views = [copy.trace(text, options)]
                if changes:
                    before = views[0]
                    views.append(trace(copy.package, text, interventions, before, unchanged=before, **options))
            content = make_document(views)
            found: dict[str, Any] = {"document": content.tree, "blobs": content.base64()}
            if changes:
                seconds = round(time.monotonic() - begun, 3)
                found = {"before": views[0].output, "after": views[1].output, "seconds": seconds, **found}
            return dump(found)

        return Response(await service.calls.run(request, work), media_type="application/json")

    @router.post("/generate", summary="Write text, token by token", openapi_extra=body_schema(GenerateRequest))
    async def generate(request: Request) -> Response:
        asked = await service.read(request, GenerateRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give a prompt or messages", param="prompt")
        entry = service.choose(asked.model, "generation")
        options = generation_options(service, asked, asked.max_tokens)
        if asked.messages is not None:
            system, turns = read_messages(asked.messages)
            prompt = DEFAULT_CHAT_TEMPLATE.render(turns, system)
            options["stop"] = [*DEFAULT_CHAT_TEMPLATE.stop, *(options.get("stop") or ())]
        else:
            prompt = asked.prompt or ""
        prompt += asked.prefix
        service.check_texts([prompt], "prompt")
        return await service.stream(
            request, entry, lambda generator: token_events(generator, prompt, options, asked.top), error_event
        )

    @router.post("/classify", summary="Classify a text", openapi_extra=body_schema(ClassificationRequest))
    async def classify(request: Request) -> Response:
        asked = await service.read(request, ClassificationRequest)
        entry = service.choose(asked.model, "classification", "images")
        item: Any = asked.text if asked.pair is None else [asked.text, asked.pair]

        def work(classifier: Classifier) -> dict[str, Any]:
            (found,) = classify_items(service, classifier, [item])
            ranked = sorted(found.probabilities.items(), key=lambda pair: -pair[1])
            classes = [{"label": label, "probability": p} for label, p in ranked]
            return {"label": found.label, "classes": classes, "value": found.value, "tags": [*map(list, found.tags)]}

        return await service.reply(request, entry, work)

    @router.post("/neighbours", summary="Find similar words", openapi_extra=body_schema(NeighboursRequest))
    async def neighbours(request: Request) -> Response:
        asked = await service.read(request, NeighboursRequest)
        if (asked.word is None) == (asked.analogy is None):
            raise ApiError(400, "give a word, or an analogy of three words", param="word")
        service.check_texts([asked.word] if asked.word is not None else asked.analogy or [], "word")
        entry = service.choose(asked.model, "vectors")

        def work(vectors: WordVectors) -> dict[str, Any]:
            if asked.word is not None:
                found = vectors.nearest(asked.word, asked.n)
            else:
                a, b, c = asked.analogy or ("", "", "")
                found = vectors.analogy(a, b, c, asked.n)
            return {"neighbours": [{"word": word, "similarity": round(value, 4)} for word, value in found]}

        return await service.reply(request, entry, work)

    return router


def event(name: str, value: Any) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + dump(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return an error as the last event of a stream."""
    return event("error", error_body("/regard/", error))


# ---- models ----------------------------------------------------------------------------------------------------------


def describe_model(entry: Any) -> dict[str, Any]:
    """Return what a page needs to know of a model, read from its configuration without loading its weights."""
    task, known = entry.task, read_config(entry.path)
    pairs = known.get("directions") or ([f"{known['source']}>{known['target']}"] if known.get("source") else [])
    directions = [pair for pair in pairs if not split_form(pair)[1]] if task == "translation" else []
    codes = dict.fromkeys(code for pair in directions for code in pair.split(">"))
    return {
        "name": entry.name,
        "task": task,
        "directions": directions,
        "languages": [{"code": code, "name": language_name(code)} for code in codes],
        "formality": {code: list(forms) for code, forms in forms_of_address(pairs).items()} if directions else {},
        "beam": known.get("decode", {}).get("beam"),
        "chat": task == "generation",
        "labels": list(known.get("labels", ())),
    }


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a model folder; nothing for one of another format."""
    try:
        found = json.loads((find(Path(path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RegardError):
        return {}
    return found if isinstance(found, dict) and "format" in found else {}


@dataclass
class ModelCopy:
    """A copy of a model to look into, with the last trace of it without changes, which further changes are compared to."""

    name: str
    package: ModelPackage
    _last: tuple[tuple[Any, ...], Trace] | None = None

    def trace(self, text: str, options: Mapping[str, Any]) -> Trace:
        """Return the trace of a text without changes."""
        key = text, *sorted(options.items())
        if self._last is None or self._last[0] != key:
            self._last = key, trace(self.package, text, **options)
        return self._last[1]


class ModelCopies:
    """A copy of one model in fp32 that requests look into and change, one at a time.

    The copy of the model that was asked for last is kept, because its reader tries one change after the other."""

    def __init__(self, service: Service) -> None:
        self._device = service.settings.device
        self._lock = threading.Lock()
        self._kept: ModelCopy | None = None

    @contextmanager
    def use(self, entry: Any) -> Iterator[ModelCopy]:
        """Hold the copy of a model, as long as nobody else does."""
        while not self._lock.acquire(timeout=0.2):
            check_request()
        try:
            if self._kept is None or self._kept.name != entry.name:
                self._kept = None
                gc.collect()
                with loading(entry):
                    package = load_model(Path(entry.path), pick_device(self._device), "fp32")
                self._kept = ModelCopy(entry.name, package)
            yield self._kept
        finally:
            self._lock.release()


def look_options(entry: Any, asked: LookRequest) -> dict[str, Any]:
    """Return the options of a trace: the language and the beam of models that write."""
    if entry.task == "translation":
        return options_of({"to": asked.to, "beam": asked.beam})
    if asked.to is not None:
        raise ApiError(400, "to is for models that translate", param="to")
    return {}


# ---- translation -----------------------------------------------------------------------------------------------------


def check_formality(value: str | None) -> None:
    """Refuse what is no form of address."""
    if value not in (None, "auto", "formal", "familiar"):
        raise ApiError(400, "formality is auto, formal or familiar", param="formality", code="invalid_value")


class TextTranslation:
    """A text that is translated sentence by sentence, with the places of sentences and words in text and translation."""

    def __init__(self, translator: Translator, asked: TranslateRequest) -> None:
        """Detect the languages and the form of address of the whole text, and split it into sentences."""
        self.translator, self.text = translator, asked.text
        if translator.directions:
            source = None if asked.source in (None, "", "auto") else asked.source
            (self.direction,) = translator.detector.detect([asked.text], asked.to or None, source)
        else:
            self.direction = Direction(translator.source, translator.target)
            if asked.to not in (None, "", translator.target) or asked.source not in (
                None,
                "",
                "auto",
                translator.source,
            ):
                pair = f"{translator.source} to {translator.target}"
                raise ApiError(400, f"this model translates from {pair} alone", param="to")
        self.options: dict[str, Any] = options_of({"beam": asked.beam, "glossary": asked.glossary})
        if translator.forms:
            form = asked.formality or "auto"
            # Decided by the whole text, since one sentence alone may not say.
            self.options["formality"] = detect_form([asked.text], self.direction.source) if form == "auto" else form
        elif asked.formality in ("formal", "familiar"):
            raise ApiError(
                400, "this model was not trained with forms of address: leave formality out", param="formality"
            )
        self.parts = split_sentences(asked.text) if self.direction.source else []
        self.places = utf16_offsets(asked.text)
        self.notes = dict.fromkeys(filter(None, [self.direction.note]))
        self.made, self.made_units, self.weights = "", 0, [0.0, 0.0]  # translation so far; confidence, and its weight

    def sentences(self, group: int, first: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield each sentence when it is translated, `group` at a time; `first` of them to begin with."""
        waiting, at, gap, index = list(self.parts), 0, "", 0
        size = first or group
        while waiting:
            some, waiting, size = waiting[:size], waiting[size:], group
            spoken = [part for part in some if not part.ends_line]
            found = iter(self._translate([part.text for part in spoken]))
            for part in some:
                before, begin = self._gap(part), at + len(part.before)
                at = begin + len(part.text)
                self._append(before)
                gap += before
                if part.ends_line:
                    continue
                one = next(found)
                yield self._describe(part, one, begin, index, gap)
                gap, index = "", index + 1
        if not self.parts:
            self._append(self.text)

    def summary(self) -> dict[str, Any]:
        """Return what is known of the whole text, after all sentences."""
        return {
            "text": self.made,
            "source": self.direction.source,
            "target": self.direction.target,
            "via": self.direction.via if self.direction.source else "",
            "confidence": round(self.weights[0] / self.weights[1], 4) if self.weights[1] else 1.0,
            "notes": list(self.notes),
            "detected": self.detected(),
        }

    def detected(self) -> dict[str, Any]:
        """Return the language that the text seems to be in by itself."""
        found = identify_language(self.text)
        return {"language": found.language, "probability": round(found.probability, 4), "certain": found.is_certain}

    def _translate(self, texts: list[str]) -> list[Translation]:
        if not texts:
            return []
        check_request()
        to, source = self.direction.target, self.direction.source
        return self.translator.translate(texts, to, source, alignment=True, **self.options)

    def _gap(self, part: Sentence) -> str:
        """Return what stands before a sentence in the translation."""
        if not self.made:
            return join_with_begins([part], [""], is_spaced(self.direction))[0]
        last = self.made[-1]
        joined, _ = join_with_begins([Sentence("", last), part], [last, ""], is_spaced(self.direction))
        return joined[1:]

    def _append(self, text: str) -> None:
        self.made += text
        self.made_units += utf16_length(text)

    def _describe(self, part: Sentence, one: Translation, begin: int, index: int, before: str) -> dict[str, Any]:
        """Add a sentence to the translation, and return it with its places."""
        target, own = self.made_units, utf16_offsets(one.text)
        self._append(one.text)
        self.notes.update(dict.fromkeys(one.notes))
        self.weights[0] += one.confidence * len(part.text)
        self.weights[1] += len(part.text)
        links = [
            [
                self.places.at(begin + link.source_begin),
                self.places.at(begin + link.source_end),
                target + own.at(link.target_begin),
                target + own.at(link.target_end),
            ]
            for link in one.alignment or ()
        ]
        return {
            "index": index,
            "source": {"begin": self.places.at(begin), "end": self.places.at(begin + len(part.text))},
            "target": {"begin": target, "end": self.made_units},
            "before": before,
            "text": one.text,
            "confidence": round(one.confidence, 4),
            "notes": list(one.notes),
            "alignment": links,
        }


def translation_events(made: TextTranslation) -> Iterator[bytes]:
    """Yield the events of a streamed translation; the first sentence is translated before the first event."""
    count = sum(not part.ends_line for part in made.parts)
    direction = made.direction
    begin = {"source": direction.source, "target": direction.target, "detected": made.detected(), "count": count}
    sentences = made.sentences(GROUP, first=2)
    waiting = next(sentences, None)
    yield event("begin", begin)
    while waiting is not None:
        yield event("sentence", waiting)
        waiting = next(sentences, None)
    yield event("end", made.summary())


@dataclass(frozen=True)
class Utf16Offsets:
    """Places of characters in a text, counted in UTF-16 code units."""

    wide: list[int]  # the characters that have two units

    def at(self, place: int) -> int:
        """Return the place of a character that Python counts as `place`."""
        return place + bisect_right(self.wide, place - 1)


def utf16_offsets(text: str) -> Utf16Offsets:
    """Return how to count the characters of a text in UTF-16 code units."""
    return Utf16Offsets([] if text.isascii() else [i for i, char in enumerate(text) if ord(char) > 0xFFFF])


def utf16_length(text: str) -> int:
    """Return the length of a text in UTF-16 code units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


# ---- alternatives ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def find_alternatives(translator: Translator, asked: AlternativesRequest) -> list[dict[str, Any]]:
    """Return translations that begin with a given prefix and differ in their next word, likeliest word first.

    The likeliest next tokens are each followed by the greedy continuation, all in one batch. Tokens that lead to the same
    next word count together."""
    model: Any = translator.model
    device = next(model.parameters()).device
    like = TranslateRequest(text=asked.text, to=asked.to, source=asked.source, formality=asked.formality)
    whole = TextTranslation(translator, like)
    direction, text = whole.direction, asked.text
    if not direction.source:
        return []
    if direction.via:  # the last step of the way decides the words
        text = translator.translate(text, direction.via, direction.source).text
    form = whole.options.get("formality", "")
    to = f"{direction.target}-{form}" if form in translator.forms.get(direction.target, ()) else direction.target
    (ids,), _ = translator.encode_sources([text], to)
    options = allow_unknown(translator.options, model, translator.tokenizers)
    tokenizer, config = translator.tokenizers.target, with_allowed_tokens(model.config, options)
    if not ids:
        return []
    source = translator.token_template.wrap(ids)
    prefix = tokenizer.encode(asked.prefix.strip()) if asked.prefix.strip() else []
    limit = min(int(options.max_len_a * len(source) + options.max_len_b), config.max_len)
    if len(source) > config.max_len or len(prefix) + 2 > limit:
        raise ApiError(400, "the sentence or its beginning is too long for the model: give one sentence", param="text")
    state = model.begin(pad_rows([source], device))
    logits = torch.zeros(0)
    for token in [*translator.token_template.start, *prefix]:
        check_request()
        logits = model.step(torch.tensor([token], device=device), state)
    log_p = mask_disallowed(logits.float().log_softmax(-1), False, config)[0]  # (V,)
    top = log_p.topk(min(3 * asked.n, len(log_p)))
    state.select(torch.zeros(len(top.indices), dtype=torch.long, device=device))
    rows = [[int(token)] for token in top.indices]
    last, is_open = top.indices, [int(token) != config.eos_token_id for token in top.indices]
    for _ in range(limit - len(prefix) - 1):
        if not any(is_open):
            break
        check_request()
        last = mask_disallowed(model.step(last, state).float(), False, config).argmax(-1)
        for i, token in enumerate(last.tolist()):
            if is_open[i]:
                is_open[i] = token != config.eos_token_id
                rows[i] += [token] * is_open[i]
    tokens = [prefix, *([*prefix, *(token for token in row if token != config.eos_token_id)] for row in rows)]
    hypotheses = [Hypothesis(each, 0.0, 0.0, True) for each in tokens]
    ((written, *texts),) = translator.texts_of([text], [ids], [hypotheses], options)
    begin = asked.prefix.strip()
    texts = [with_prefix(begin, written, one, is_spaced(direction)) for one in texts]
    found = group_by_word(begin, texts, top.values.exp().tolist(), asked.n)
    links = translator.align_sentences([(asked.text, one["text"]) for one in found], [direction.pair] * len(found))
    return [
        one | {"alignment": place_links(asked.text, one["text"], own)} for one, own in zip(found, links, strict=True)
    ]


def with_prefix(prefix: str, written: str, text: str, spaced: bool) -> str:
    """Return a translation whose prefix stays as it was given, also where the vocabulary lacks a word of it.

    `written` is what the model makes of the prefix, nothing where it knows no word of it. `spaced`: words have spaces."""
    if not text.startswith(written):
        return text
    rest = text[len(written) :]
    separate = prefix and not written and spaced and rest[:1].isalnum()
    return f"{prefix} {rest}" if separate else prefix + rest


def place_links(source: str, target: str, links: Sequence[Link]) -> list[list[int]]:
    """Return links between words of two texts, counted in UTF-16 code units."""
    a, b = utf16_offsets(source), utf16_offsets(target)
    return [[a.at(x.source_begin), a.at(x.source_end), b.at(x.target_begin), b.at(x.target_end)] for x in links]


def group_by_word(prefix: str, texts: Sequence[str], probabilities: Sequence[float], n: int) -> list[dict[str, Any]]:
    """Return the best of the texts, which are sorted, for each next word after the prefix, with the probability of that
    word."""
    found: dict[str, dict[str, Any]] = {}
    for text, p in zip(texts, probabilities, strict=True):
        rest = text.removeprefix(prefix)
        words = word_spans(rest)
        word = rest[words[0][0] : words[0][1]] if words else ""
        if word in found:
            found[word]["probability"] += p
        else:
            found[word] = {"next": word, "text": text, "probability": p}
    ranked = sorted(found.values(), key=lambda one: -one["probability"])[:n]
    return [{**one, "probability": round(one["probability"], 6)} for one in ranked]


def check_request() -> None:
    """Stop where nobody waits for the answer any more."""
    if context := current_request.get():
        context.check()


# ---- tokens of a language model --------------------------------------------------------------------------------------


@torch.inference_mode()
def token_events(generator: Generator, prompt: str, options: Mapping[str, Any], top: int) -> Iterator[bytes]:
    """Yield an event for each token: its text, its probability, and the likeliest tokens in its place.

    It is generated alone, outside of the common batch, since only here all logits are needed."""
    completion = Completion(generator, prompt, {**options, "n": 1})
    config, model = completion.config, generator.model
    check_generation(config)
    row = make_request(completion.ids, config.seed, config, model)
    streamer = TextStreamer(generator.tokenizer, completion.ids, config.stop_strings)
    row.on_token = lambda token: False
    logits, state = model.begin(pad_rows([row.ids], model.embedding.weight.device))
    while not row.end:
        check_request()
        plain = logits[0].float().softmax(-1)
        best = plain.topk(min(top, len(plain)))
        tokens, gained = choose_tokens(logits, [row], config, model.config)
        token = int(tokens[0])
        row.add(token, float(gained[0]))
        text = "" if row.end == "end" else streamer.push(token)
        if streamer.stopped:
            row.end = "stop"
        others = generator.tokenizer.pieces(best.indices.tolist())
        shown = [
            {"text": piece, "probability": round(float(p), 6)} for piece, p in zip(others, best.values, strict=True)
        ]
        (piece,) = generator.tokenizer.pieces([token])
        known = {"text": text, "token": piece, "probability": round(float(plain[token]), 6), "top": shown}
        yield event("token", known)
        if not row.end:
            logits = model.step(tokens, state)
    yield event("end", {"text": streamer.flush(), "reason": row.end, "tokens": len(row.tokens)})
