"""The API of OpenAI, for its clients: completions, chat and embeddings, also streamed; and scores and classes of texts.

Everything is checked before the first byte is sent, and an error after it is an event of the stream. Options that no model
here has (tools, logit_bias, penalties by frequency) are refused rather than ignored, since their result would be another.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter
from pydantic import Field, StrictBool, StrictInt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from regard.decode.generation import GenerationRequest, TextStreamer, check_generation, make_request, max_length_of
from regard.inference.classifier import Classifier
from regard.inference.embedder import Embedder
from regard.inference.generator import Generation, Generator
from regard.look.model_trace import package_of
from regard.serve.api_errors import ApiError, error_body
from regard.serve.image_input import classify_items
from regard.serve.request_bodies import RequestModel, finite
from regard.serve.service import Service, body_schema, dump, options_of
from regard.text.chat_template import DEFAULT_CHAT_TEMPLATE, Turn

Tokens = Annotated[list[StrictInt], Field(max_length=1 << 20)]
Texts = str | list[str] | Tokens | list[Tokens]
EMBEDDING_KINDS = ("embedding", "translation", "generation")  # any model that reads text, best first
REASONS = {"end": "stop", "stop": "stop", "length": "length", "context": "length"}
DONE = b"data: [DONE]\n\n"


class GenerationFields(RequestModel):
    """The fields that completions and chat completions share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 24)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: int | None = None
    stream: StrictBool | None = None
    stream_options: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None

    def unsupported(self) -> dict[str, Any]:
        """Return values that no model here can use."""
        names = ("frequency_penalty", "presence_penalty", "logit_bias")
        return {name: getattr(self, name) for name in names}


class CompletionRequest(GenerationFields):
    """The fields of POST /v1/completions."""

    prompt: Texts
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    echo: StrictBool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def unsupported(self) -> dict[str, Any]:
        """Return values that no model here can use."""
        own = {"suffix": self.suffix, "logprobs": self.logprobs}
        return (
            super().unsupported() | own | ({"best_of": self.best_of} if self.best_of not in (None, 1, self.n) else {})
        )


class Message(RequestModel):
    """A message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(GenerationFields):
    """The fields of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def unsupported(self) -> dict[str, Any]:
        """Return values that no model here can use."""
        format = self.response_format if (self.response_format or {}).get("type", "text") != "text" else None
        own = {"logprobs": self.logprobs, "tools": self.tools, "functions": self.functions, "response_format": format}
        return super().unsupported() | own


class EmbeddingRequest(RequestModel):
    """The fields of POST /v1/embeddings."""

    model: str | None = None
    input: Texts
    encoding_format: str | None = "float"
    dimensions: int | None = None


class ScoreRequest(RequestModel):
    """The fields of POST /v1/score: texts to score, or two texts (or a text and several) to compare."""

    model: str | None = None
    input: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class ClassifyRequest(RequestModel):
    """The fields of POST /v1/classify: texts, pairs of texts, or images as data URLs."""

    model: str | None = None
    input: str | list[str | Annotated[list[str], Field(min_length=2, max_length=2)]]


def make_router(service: Service) -> APIRouter:
    """Return the routes of OpenAI's API."""
    router, begun = APIRouter(prefix="/v1", tags=["OpenAI"]), int(time.time())

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": begun, "owned_by": "regard"}

    @router.get("/models", summary="List the served models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [describe(name) for name in service.store.entries]})

    @router.get("/models/{name:path}", summary="Describe a served model")
    async def model(name: str) -> Response:
        return JSONResponse(describe(service.choose(name or "/").name))

    @router.post("/completions", summary="Continue prompts", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        asked = await service.read(request, CompletionRequest)
        entry = service.choose(asked.model, "generation")
        options = generation_options(service, asked, asked.max_tokens)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        head["model"] = entry.name
        given = text_inputs(service, asked.prompt, "prompt")

        def prepare(generator: Generator) -> list[Completion]:
            texts = [to_text(generator.tokenizer, each) for each in given]
            return [Completion(generator, text, options) for text in texts]

        def choice(completion: Completion, index: int, text: str, reason: str | None) -> dict[str, Any]:
            return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

        if asked.stream:

            def events(generator: Generator) -> Iterator[bytes]:
                made = prepare(generator)
                echoed = [each.prompt if asked.echo else "" for each in made]
                yield from stream_events(service, made, asked, head, choice, echoed)

            return await service.stream(request, entry, events, error_event)

        def work(generator: Generator) -> dict[str, Any]:
            made = prepare(generator)
            found = generate_all(generator, made)
            choices: list[dict[str, Any]] = []
            for completion, generation in zip(made, found, strict=True):
                before = completion.prompt if asked.echo else ""
                for sample in generation.samples or (generation,):
                    choices.append(choice(completion, len(choices), before + sample.text, REASONS[sample.end]))
            return {**head, "choices": choices, "usage": usage_of(service, made, found)}

        return await service.reply(request, entry, work)

    @router.post("/chat/completions", summary="Answer a conversation", openapi_extra=body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        asked = await service.read(request, ChatRequest)
        entry = service.choose(asked.model, "generation")
        system, turns = read_messages(asked.messages)
        service.check_texts([system, *(turn.text for turn in turns)], "messages")
        options = generation_options(service, asked, asked.max_completion_tokens or asked.max_tokens)
        template = DEFAULT_CHAT_TEMPLATE
        options["stop"] = [*template.stop, *(options.get("stop") or ())]
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": entry.name}

        def prepare(generator: Generator) -> Completion:
            return Completion(generator, template.render(turns, system), options)

        if asked.stream:

            def choice(completion: Completion, index: int, text: str, reason: str | None) -> dict[str, Any]:
                delta = {"content": text} if text else {}
                return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

            def events(generator: Generator) -> Iterator[bytes]:
                begin = {"role": "assistant", "content": ""}
                yield from stream_events(service, [prepare(generator)], asked, head, choice, [""], begin)

            return await service.stream(request, entry, events, error_event)

        def work(generator: Generator) -> dict[str, Any]:
            made = [prepare(generator)]
            (found,) = generate_all(generator, made)
            choices = [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": sample.text.strip(), "refusal": None},
                    "logprobs": None,
                    "finish_reason": REASONS[sample.end],
                }
                for i, sample in enumerate(found.samples or (found,))
            ]
            return {**head, "choices": choices, "usage": usage_of(service, made, [found])}

        return await service.reply(request, entry, work)

    @router.post("/embeddings", summary="Embed texts as vectors", openapi_extra=body_schema(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        asked = await service.read(request, EmbeddingRequest)
        if asked.encoding_format not in (None, "float", "base64"):
            raise ApiError(400, "encoding_format is float or base64", param="encoding_format")
        entry = choose_embedder(service, asked.model)
        given = text_inputs(service, asked.input, "input")

        def work(inference: Any) -> dict[str, Any]:
            embedder = as_embedder(inference)
            texts = [to_text(embedder.tokenizer, each) for each in given]
            if asked.dimensions not in (None, embedder.model.width):
                message = f"dimensions: this model has vectors of {embedder.model.width} numbers"
                raise ApiError(400, message, param="dimensions")
            vectors = embedder.embed(texts)
            data = [
                {"object": "embedding", "index": i, "embedding": encode_vector(vector, asked.encoding_format)}
                for i, vector in enumerate(vectors)
            ]
            return {"object": "list", "model": entry.name, "data": data, "usage": read_usage(embedder.tokenizer, texts)}

        return await service.reply(request, entry, work)

    @router.post("/score", summary="Score texts by a model", openapi_extra=body_schema(ScoreRequest))
    async def score(request: Request) -> Response:
        asked = await service.read(request, ScoreRequest)
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        if asked.text_1 is not None and asked.text_2 is not None:
            first, second = as_list(asked.text_1), as_list(asked.text_2)
            if len(first) not in (1, len(second)) or not second:
                raise ApiError(400, "text_1 is one text, or has as many as text_2", param="text_1")
            service.check_texts([*first, *second], "text_1")
            entry = choose_embedder(service, asked.model)

            def compare(inference: Any) -> dict[str, Any]:
                embedder = as_embedder(inference)
                a, b = embedder.embed(first), embedder.embed(second)
                data = [
                    {"index": i, "object": "score", "score": float(value)}
                    for i, value in enumerate((np.broadcast_to(a, b.shape) * b).sum(1))
                ]
                usage = read_usage(embedder.tokenizer, [*first, *second])
                return {**head, "model": entry.name, "data": data, "usage": usage}

            return await service.reply(request, entry, compare)
        texts = as_list(asked.input or [])
        if not texts:
            raise ApiError(400, "Invalid request: missing input parameter (or text_1 and text_2)", param="input")
        service.check_texts(texts, "input")
        entry = service.choose(asked.model, "generation")

        def work(generator: Generator) -> dict[str, Any]:
            data = [
                {
                    "index": i,
                    "object": "score",
                    "score": each.total,
                    "tokens": each.tokens,
                    "log_probs": each.log_probs,
                    "perplexity": finite(each.perplexity),
                    "bits_per_character": each.bits_per_character,
                }
                for i, each in enumerate(generator.score(texts))
            ]
            return {**head, "model": entry.name, "data": data, "usage": read_usage(generator.tokenizer, texts)}

        return await service.reply(request, entry, work)

    @router.post("/classify", summary="Classify texts or images", openapi_extra=body_schema(ClassifyRequest))
    async def classify(request: Request) -> Response:
        asked = await service.read(request, ClassifyRequest)
        items = [asked.input] if isinstance(asked.input, str) else asked.input
        entry = service.choose(asked.model, "classification", "images")
        head = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}

        def work(classifier: Classifier) -> dict[str, Any]:
            found = classify_items(service, classifier, items)
            data = []
            for i, each in enumerate(found):
                probs = [each.probabilities[label] for label in each.probabilities]
                own = {"index": i, "label": each.label, "probs": probs, "num_classes": len(probs)}
                own |= {"value": each.value} if each.value is not None else {}
                own |= {"tags": [list(pair) for pair in each.tags]} if each.tags else {}
                data.append(own)
            texts = [part for item in items for part in as_list(item)]
            tokenizers = classifier.package.tokenizers
            usage = read_usage(tokenizers.source, texts) if tokenizers else read_usage(None, [])
            return {**head, "model": entry.name, "data": data, "usage": usage}

        return await service.reply(request, entry, work)

    return router


# ---- inputs ----------------------------------------------------------------------------------------------------------


def as_list(value: str | list[str]) -> list[str]:
    """Return one text or several as a list."""
    return [value] if isinstance(value, str) else value


def text_inputs(service: Service, value: Texts, param: str) -> list[str] | list[list[int]]:
    """Return a prompt or an input as a list of texts, or of token ids; check its size."""
    given: Any = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value
    if not given:
        raise ApiError(400, f"{param} is empty: give at least one text", param=param, code="invalid_value")
    service.check_texts([each if isinstance(each, str) else "x" * len(each) for each in given], param)
    return given


def to_text(tokenizer: Any, value: str | list[int]) -> str:
    """Return a text that may be given as token ids."""
    if isinstance(value, str):
        return value
    if wrong := [token for token in value if not 0 <= token < len(tokenizer)]:
        message = f"there is no token {wrong[0]}: the tokens of this model are 0 to {len(tokenizer) - 1}"
        raise ApiError(400, message, code="invalid_value")
    return tokenizer.decode(value)


def read_messages(messages: Sequence[Message]) -> tuple[str, list[Turn]]:
    """Return the system prompt and the turns of a conversation, the last of which is the user's."""
    system: list[str] = []
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            parts = [part.get("text") for part in message.content if part.get("type") == "text"]
            if len(parts) < len(message.content) or not all(isinstance(part, str) for part in parts):
                raise ApiError(400, "a message has text alone: other parts are not supported", param=f"messages.{i}")
            text = "".join(str(part) for part in parts)
        else:
            text = message.content or ""
        if message.role in ("system", "developer"):
            system.append(text)
        elif message.role in ("user", "assistant"):
            turns.append(Turn(message.role, text))
        else:
            raise ApiError(400, "the role of a message is system, developer, user or assistant", param=f"messages.{i}")
    if not turns or turns[-1].role != "user":
        raise ApiError(400, "the last message must be the user's, which is answered", param="messages")
    return "\n\n".join(filter(None, system)), turns


def generation_options(service: Service, asked: GenerationFields, max_tokens: int | None) -> dict[str, Any]:
    """Return the options of `Generator.generate` that a request asks for, within the limits of the server."""
    for name, value in asked.unsupported().items():
        if value:
            raise ApiError(400, f"{name} is not supported by this server: leave it out", param=name, code="unsupported")
    stop = as_list(asked.stop or [])
    if any(not text for text in stop):
        raise ApiError(400, "stop has an empty string, before which every text would end", param="stop")
    service.check_limit("stop strings", len(stop), "max_stop", "stop")
    service.check_limit("characters of a stop string", max(map(len, stop), default=0), "max_characters", "stop")
    service.check_limit("max_tokens", max_tokens, "max_new_tokens", "max_tokens")
    service.check_limit("n", asked.n, "max_samples", "n")
    greedy = asked.top_p == 0 or asked.temperature == 0
    given = {
        "n": asked.n,
        "stop": stop or None,
        "temperature": 0.0 if greedy else asked.temperature,
        "top_p": asked.top_p or None,
        "top_k": None if asked.top_k is None else max(0, asked.top_k),
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "seed": None if asked.seed is None else asked.seed % (1 << 32),
        "max_new_tokens": max_tokens,
    }
    return options_of({**given, "limit": service.settings.max_new_tokens})


# ---- completions -----------------------------------------------------------------------------------------------------


class Completion:
    """A prompt that is about to be continued, with checked options."""

    def __init__(self, generator: Generator, prompt: str, options: dict[str, Any]) -> None:
        """Check a prompt and options; one that leaves no room for a new token is a 400 that names limit and value."""
        chosen = dict(options)
        limit = chosen.pop("limit")
        if "max_new_tokens" not in chosen:
            chosen["max_new_tokens"] = min(limit, generator.options.max_new_tokens)
        self.generator, self.prompt, self.options = generator, prompt, chosen
        self.config = generator.decode_options(**chosen)
        check_generation(self.config)
        self.ids = generator.framed(prompt)
        most = max_length_of(generator.model)
        if len(self.ids) >= most:
            message = f"the prompt has {len(self.ids)} tokens, and this model reads at most {most - 1}"
            known: dict[str, Any] = {"param": "prompt", "limit": most - 1, "value": len(self.ids)}
            raise ApiError(400, message, code="context_length_exceeded", **known)
        if not self.ids:
            raise ApiError(400, "the prompt is empty, and this model needs a word to begin with", param="prompt")

    def stream(self, number: int, sample: int) -> Iterator[tuple[str, GenerationRequest]]:
        """Yield the new text after every step, and the request, which knows its tokens and why it ended.

        `number` is that of the prompt; the random seed is the one that `Generator.generate` would use."""
        generator, config = self.generator, self.config
        n = config.nbest
        row = make_request(self.ids, (config.seed + number) * n + sample, config, generator.model)
        streamer = TextStreamer(generator.tokenizer, self.ids, config.stop_strings)
        fresh: list[str] = []

        def on_token(token: int) -> bool:
            fresh.append(streamer.push(token))
            return streamer.stopped

        row.on_token = on_token
        for _ in generator.steps(generator.model, [row], config):
            yield "".join(fresh), row
            fresh.clear()
        yield streamer.flush(), row


def generate_all(generator: Generator, made: Sequence[Completion]) -> list[Generation]:
    """Return the continuations of all prompts."""
    return generator.generate([each.prompt for each in made], **made[0].options)


def usage_of(service: Service, made: Sequence[Completion], found: Sequence[Generation]) -> dict[str, int]:
    """Return the numbers of tokens that were read and written."""
    written = sum(len(sample.tokens) for each in found for sample in each.samples or (each,))
    return count_usage(service, sum(len(each.ids) for each in made), written)


def count_usage(service: Service, read: int, written: int) -> dict[str, int]:
    """Return numbers of tokens as the API has them, and add them to the metrics."""
    service.metrics.tokens.labels("prompt").inc(read)
    service.metrics.tokens.labels("generated").inc(written)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def stream_events(
    service: Service,
    made: Sequence[Completion],
    asked: GenerationFields,
    head: dict[str, Any],
    choice: Callable[[Completion, int, str, str | None], dict[str, Any]],
    before: Sequence[str],
    begin: dict[str, Any] | None = None,
) -> Iterator[bytes]:
    """Yield the events of streamed completions, sample after sample; `begin` is the first delta of a chat message.

    The first token is generated before the first event, so that an error until then is an ordinary response."""
    include_usage = bool((asked.stream_options or {}).get("include_usage"))
    more = {"usage": None} if include_usage else {}

    def event(choices: list[dict[str, Any]]) -> bytes:
        return b"data: " + dump({**head, "choices": choices, **more}) + b"\n\n"

    index = written = 0
    for number, completion in enumerate(made):
        for sample in range(completion.config.nbest):
            if begin is not None:
                pieces = strip_pieces(completion.stream(number, sample))
            else:
                pieces = completion.stream(number, sample)
            for i, (text, row) in enumerate(pieces):
                if i == 0 and begin is not None:
                    yield event([{"index": index, "delta": begin, "logprobs": None, "finish_reason": None}])
                text = before[number] + text if i == 0 else text
                if text:
                    yield event([choice(completion, index, text, None)])
                ended = row.end
            written += len(row.tokens)
            yield event([choice(completion, index, "", REASONS[ended])])
            index += 1
    usage = count_usage(service, sum(len(each.ids) for each in made), written)
    if include_usage:
        yield b"data: " + dump({**head, "choices": [], "usage": usage}) + b"\n\n"
    yield DONE


def strip_pieces(pieces: Iterator[tuple[str, GenerationRequest]]) -> Iterator[tuple[str, GenerationRequest]]:
    """Yield pieces of a text without the white space around it: what may be at its end is held back until more follows."""
    said = waiting = ""
    for text, row in pieces:
        waiting += text if said or waiting else text.lstrip()
        fresh = waiting.rstrip()
        said, waiting = said + fresh, waiting[len(fresh) :]
        yield fresh, row


def error_event(error: ApiError) -> bytes:
    """Return an error as the last events of a stream."""
    return b"data: " + dump(error_body("/v1/", error)) + b"\n\n" + DONE


# ---- vectors ---------------------------------------------------------------------------------------------------------


def choose_embedder(service: Service, name: str | None) -> Any:
    """Return the served model of this name, or the first that embeds texts, of its own or by its encoder."""
    if name:
        return service.choose(name, *EMBEDDING_KINDS)
    for kind in EMBEDDING_KINDS:
        try:
            return service.choose(None, kind)
        except ApiError:
            continue
    return service.choose(None, "embedding")


def as_embedder(inference: Any) -> Embedder:
    """Return a model as an embedder; a translator's encoder and a language model embed texts too."""
    return inference if isinstance(inference, Embedder) else Embedder(package_of(inference)[0])


def encode_vector(vector: np.ndarray, format: str | None) -> list[float] | str:
    """Return a vector as numbers, or as base64 of little-endian fp32."""
    if format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()


def read_usage(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """Return the number of tokens of texts that were only read."""
    count = sum(map(len, tokenizer.encode_batch(list(texts)))) if tokenizer and texts else 0
    return {"prompt_tokens": count, "total_tokens": count}
