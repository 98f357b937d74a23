"""A language model with its tokenizer: it goes on with texts, talks, and says how likely texts are."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from regard import model_folder
from regard.config import DecodeConfig
from regard.config.recipes import build
from regard.decode.generation import (
    GenerationRequest,
    TextStreamer,
    check_generation,
    generate_texts,
    generation_steps,
    make_request,
    max_length_of,
    record_forced_forward,
    token_log_probs,
)
from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.layers.hooks import is_observed, paused
from regard.models.model import LanguageModel, names_where
from regard.text.chat_template import PLAIN, Template, Turn, newest

log = logging.getLogger("regard")


@dataclass(frozen=True)
class Generation:
    prompt: str
    text: str  # what was written after it
    log_prob: float  # log p(tokens | prompt), the end token included where there is one
    tokens: tuple[str, ...]  # the pieces written, those of a stop string too
    end: str  # why: end (the model's own), stop (a stop string), length (max_new_tokens), context (the model's max_len)
    samples: tuple[Generation, ...] = ()  # all of this prompt, this one first, when more than one was asked for

    @property
    def ended(self) -> bool:
        """False: cut off."""
        return self.end in ("end", "stop")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TextScore:
    text: str
    tokens: tuple[str, ...]  # a model without a start token cannot score the first one, which is then left out
    log_probs: tuple[float, ...]  # log p(token | those before)
    total: float  # their sum
    perplexity: float  # exp of minus their mean
    bits_per_character: float


@dataclass(frozen=True)
class Ranked:
    text: str
    log_prob: float  # log p(text | prefix)
    probability: float  # among the texts that were compared
    per_token: float  # log_prob / tokens: long texts have more to lose


class Generator:
    """`load_writer` makes one."""

    def __init__(self, package: model_folder.ModelPackage) -> None:
        if not isinstance(package.model, LanguageModel):
            raise RegardError(
                f"writing needs a language model (architecture {names_where('generates')}), and this one is a "
                f"{package.config.architecture} trained for {package.task}"
            )
        if package.tokenizers is None:
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        self.model, self.tokenizer = package.model, package.tokenizers.target
        self.token_template, self.options = package.token_template, package.decode

    @overload
    def generate(self, prompts: str, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[Generation]: ...
    def generate(
        self, prompts: str | Sequence[str], progress: Callable[[int], None] = lambda done: None, **options: Any
    ) -> Generation | list[Generation]:
        """Go on with one prompt, or several. Options are those of `[decode]`: temperature, max_new_tokens, seed, ...; also
        `n`, samples of each prompt, and `stop`, strings before which the text ends."""
        if isinstance(prompts, str):
            return self.generate([prompts], progress=progress, **options)[0]
        chosen = self.decode_options(**options)
        n = chosen.nbest
        written = generate_texts(
            self.model, self.tokenizer, [self.framed(prompt) for prompt in prompts], chosen, progress
        )
        found = [self._generation(prompts[i // n], text, row) for i, (text, row) in enumerate(written)]
        groups = [tuple(found[i : i + n]) for i in range(0, len(found), n)]
        return [dataclasses.replace(group[0], samples=group) if n > 1 else group[0] for group in groups]

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """The text that `generate` would return, in pieces while it is written."""
        chosen = self.decode_options(**options)
        if chosen.nbest > 1:
            raise RegardError(f"one text can be streamed at a time, not {chosen.nbest}: leave out n")
        check_generation(chosen)
        ids = self.framed(prompt)
        row = make_request(ids, chosen.seed, chosen, self.model)
        return self._pieces(row, self._teller(ids, chosen), chosen)

    def _pieces(self, row: GenerationRequest, teller: TextStreamer, options: DecodeConfig) -> Iterator[str]:
        fresh: list[str] = []

        def on_token(token: int) -> bool:
            fresh.append(teller.push(token))
            return teller.stopped

        row.on_token = on_token
        with paused(self.model):
            for _ in generation_steps(self.model, [row], options):
                yield from filter(None, fresh)
                fresh.clear()
        if is_observed(self.model):
            record_forced_forward(self.model, [0], [row])
        yield from filter(None, [teller.flush()])

    def chat(self, system: str = "", template: Template = PLAIN, **options: Any) -> Conversation:
        """A conversation to go on with by `say`; `system` is what the model reads before it."""
        return Conversation(self, system, template, options)

    @overload
    def score(self, texts: str) -> TextScore: ...  # type: ignore[overload-overlap]  # a str is a sequence of str too
    @overload
    def score(self, texts: Sequence[str]) -> list[TextScore]: ...
    def score(self, texts: str | Sequence[str]) -> TextScore | list[TextScore]:
        """How likely a text is, token by token; that it ends where it does is not counted."""
        if isinstance(texts, str):
            return self.score([texts])[0]
        framed = [self._fitting(text, i) for i, text in enumerate(texts)]
        given = max(1, len(self.token_template.before))
        log_probs = token_log_probs(self.model, framed, self.options)
        parts = zip(texts, framed, log_probs, strict=True)
        return [self._score(text, ids[given:], scored[given - 1 :]) for text, ids, scored in parts]

    def rank(self, prefix: str, continuations: Sequence[str]) -> list[Ranked]:
        """The continuations (joined to the prefix as they are) by how likely they are after it, best first.

        All are scored from the first token in which any of them differs from the prefix alone, since a vocabulary may join
        the end of the prefix to what follows."""
        if not continuations:
            raise RegardError("nothing to rank: give some continuations")
        framed = [self._fitting(prefix + text, i) for i, text in enumerate(continuations)]
        alone = self.framed(prefix)
        known = min(shared(alone, ids) for ids in framed)
        if known == 0:
            raise RegardError("this model has no token that begins a text, and needs a longer prefix to rank after")
        if any(len(ids) == known for ids in framed):
            raise RegardError("a continuation is empty: every one needs a token that the prefix does not have")
        scored = [lp[known - 1 :] for lp in token_log_probs(self.model, framed, self.options)]
        totals = [math.fsum(lp) for lp in scored]
        weights = [math.exp(total - max(totals)) for total in totals]
        ranked = [
            Ranked(text, total, weight / sum(weights), total / len(lp))
            for text, total, weight, lp in zip(continuations, totals, weights, scored, strict=True)
        ]
        return sorted(ranked, key=lambda r: -r.log_prob)

    def decode_options(self, n: int | None = None, stop: Any = None, **options: Any) -> DecodeConfig:
        given = {k: v for k, v in options.items() if v is not None}
        given |= {"nbest": n} if n is not None else {}
        given |= {"stop_strings": [stop] if isinstance(stop, str) else list(stop)} if stop is not None else {}
        return build({**dataclasses.asdict(self.options), "beam": 1, **given}, DecodeConfig, "decode.")

    def framed(self, text: str) -> list[int]:
        """The ids the model reads for a text."""
        return [*self.token_template.before, *self.tokenizer.encode(text)]

    def _fitting(self, text: str, number: int) -> list[int]:
        """A text to be scored."""
        ids, most = self.framed(text), max_length_of(self.model)
        if len(ids) <= max(1, len(self.token_template.before)):
            raise RegardError(f"text {number + 1} ({text!r}) is too short: there is no token to score")
        if len(ids) > most:
            raise RegardError(
                f"text {number + 1} has {len(ids)} tokens, but the model was built for at most {most} "
                f"(model.max_len): split it into shorter texts"
            )
        return ids

    def _teller(self, ids: list[int], options: DecodeConfig) -> TextStreamer:
        return TextStreamer(self.tokenizer, ids, options.stop_strings)

    def _generation(self, prompt: str, text: str, row: GenerationRequest) -> Generation:
        return Generation(prompt, text, sum(row.log_probs), tuple(self.tokenizer.pieces(row.tokens)), row.end)

    def _score(self, text: str, ids: list[int], log_probs: list[float]) -> TextScore:
        total = math.fsum(log_probs)
        surprise = -total / len(ids)
        perplexity = math.exp(surprise) if surprise < 700 else math.inf  # beyond, a double overflows
        bits = -total / math.log(2) / max(1, len(text))
        return TextScore(text, tuple(self.tokenizer.pieces(ids)), tuple(log_probs), total, perplexity, bits)


class Conversation:
    """Turns and answers. Once it outgrows the model's context, the oldest turns are forgotten; never the system text."""

    def __init__(self, writer: Generator, system: str, template: Template, options: dict[str, Any]) -> None:
        self.writer, self.system, self.template = writer, system, template
        given = options.get("stop", ())
        self.options = {**options, "stop": (*template.stop, *([given] if isinstance(given, str) else given or ()))}
        self.turns: list[Turn] = []
        self.forgot = False  # whether turns were left out, ever

    def say(self, text: str, **options: Any) -> str:
        """The whole answer."""
        return "".join(self.stream(text, **options))

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """The answer in pieces; one that is broken off stays in the conversation as far as it came."""
        chosen = {**self.options, **options}
        turns = self._fitting([*self.turns, Turn("user", text)], self.writer.decode_options(**chosen).max_new_tokens)
        pieces = self.writer.stream(self.template.render(turns, self.system), **chosen)
        said = waiting = ""
        try:
            for piece in pieces:
                waiting += piece if said or waiting else piece.lstrip()
                fresh = waiting.rstrip()  # white space is told once something follows it
                said, waiting = said + fresh, waiting[len(fresh) :]
                yield from filter(None, [fresh])
        finally:
            self.turns = [*turns, Turn("assistant", said)]

    def reset(self) -> None:
        """Begin again; the system text stays."""
        self.turns, self.forgot = [], False

    def _fitting(self, turns: list[Turn], new: int) -> list[Turn]:
        """The newest turns that leave room for an answer of `new` tokens, or of half the context where that is less."""
        most = max_length_of(self.writer.model)
        room = most - min(new, most // 2)

        def fits(some: Sequence[Turn]) -> bool:
            return len(self.writer.framed(self.template.render(some, self.system))) <= room

        kept = newest(turns, fits)
        if len(kept) < len(turns) and not self.forgot:
            self.forgot = True
            log.warning(
                "the conversation outgrew the model's %d tokens (model.max_len): the oldest turns are forgotten", most
            )
        return kept


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two rows begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def load_generator(path: str | Path, device: str = "auto", weights: str = "auto") -> Generator:
    """A writer from a run folder or a model folder."""
    return Generator(load_model(Path(path), pick_device(device), weights))
