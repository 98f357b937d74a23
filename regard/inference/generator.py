"""Text generation, chat and scoring with a language model."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, overload

from regard import model_folder
from regard.config import DecodeConfig
from regard.decode.generation import (
    GenerationRequest,
    GenerationSteps,
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
from regard.inference.arguments import GenerateOptions, check_texts, decode_config
from regard.layers.hooks import is_observed, paused
from regard.models.model import LanguageModel, names_where
from regard.text.chat_template import DEFAULT_CHAT_TEMPLATE, ChatTemplate, Turn, keep_last_turns

log = logging.getLogger("regard")


@dataclass(frozen=True)
class Generation:
    """The continuation of a prompt."""

    prompt: str
    text: str  # the continuation, without the prompt
    log_prob: float  # log p(tokens | prompt), the end token included where there is one
    tokens: tuple[str, ...]  # the subword pieces of the continuation, those of a stop string too
    end: (
        str  # why it ended: end (end token), stop (stop string), length (max_new_tokens), context (the model's max_len)
    )
    samples: tuple[
        Generation, ...
    ] = ()  # all samples of this prompt, this one first, where more than one was asked for

    @property
    def ended(self) -> bool:
        """Whether the text ended by itself; otherwise it was cut off."""
        return self.end in ("end", "stop")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TextScore:
    """The log-probability of a text under a language model, token by token."""

    text: str
    tokens: tuple[str, ...]  # without the first one where the model has no start token to predict it from
    log_probs: tuple[float, ...]  # log p(token | tokens before it)
    total: float  # sum of log_probs
    perplexity: float  # exp(-mean of log_probs)
    bits_per_character: float


@dataclass(frozen=True)
class Ranked:
    """A continuation of a prefix, with its probability among several."""

    text: str
    log_prob: float  # log p(text | prefix)
    probability: float  # normalized over the continuations that were compared
    per_token: float  # log_prob / number of tokens, since log_prob falls with length


class Generator:
    """A language model with its tokenizer. `regard.load` and `Generator.load` return one.

    Examples:
        >>> import regard
        >>> generator = regard.load("runs/gpt")
        >>> generator.generate("Once upon a time", temperature=0.8, max_new_tokens=5, seed=1).prompt
        'Once upon a time'
        >>> [len(each.tokens) <= 5 for each in generator.generate(["One", "Two"], max_new_tokens=5)]
        [True, True]
        >>> "".join(generator.stream("Once", max_new_tokens=5)) == generator.generate("Once", max_new_tokens=5).text
        True
        >>> generator.score("Once upon a time").total < 0
        True
        >>> [ranked.text for ranked in generator.rank("Once upon a", [" time", " stone"])]
        [' time', ' stone']

    Attributes:
        model: The model, a torch module.
        tokenizer: Its tokenizer.
        options: The model's own decode settings.
    """

    def __init__(self, package: model_folder.ModelPackage) -> None:
        """Take a loaded model folder."""
        if not isinstance(package.model, LanguageModel):
            raise RegardError(
                f"writing needs a language model (architecture {names_where('generates')}), and this one is a "
                f"{package.config.architecture} trained for {package.task}"
            )
        if package.tokenizers is None:
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        self.model, self.tokenizer = package.model, package.tokenizers.target
        self.token_template, self.options = package.token_template, package.decode
        self.steps: GenerationSteps = (
            generation_steps  # a server puts a function here that writes the texts of many requests together
        )

    @classmethod
    def load(cls, path: str | Path, device: str = "auto", weights: str = "auto") -> Generator:
        """Load a language model from a run or model folder.

        `device`: auto, cpu, cuda or cuda:N. `weights`: auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16; on a CPU also
        int8 and fp16.
        """
        return cls(load_model(Path(path), pick_device(device), weights))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a string is an iterable of strings too
        self, prompts: str, progress: Callable[[int], None] = ..., **options: Unpack[GenerateOptions]
    ) -> Generation: ...
    @overload
    def generate(
        self, prompts: Iterable[str], progress: Callable[[int], None] = ..., **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...
    def generate(
        self,
        prompts: str | Iterable[str],
        progress: Callable[[int], None] = lambda done: None,
        **options: Unpack[GenerateOptions],
    ) -> Generation | list[Generation]:
        """Continue one prompt, or several: a string gives a `Generation`, a list of strings a list.

        Args:
            prompts: A prompt, or several.
            progress: A function that is called with the number of prompts done since its last call.
            options: n (samples of each prompt), stop (strings before which the text ends), temperature, top_k, top_p,
                min_p, epsilon, repetition_penalty, max_new_tokens, min_len, seed, batch_tokens; by default the model's own
                (`self.options`).
        """
        if isinstance(prompts, str):
            return self.generate([prompts], progress=progress, **options)[0]
        prompts = check_texts(prompts, "generate")
        chosen = self.decode_options(**options)
        n = chosen.nbest
        ids = [self.framed(prompt) for prompt in prompts]
        written = generate_texts(self.model, self.tokenizer, ids, chosen, progress, self.steps)
        found = [self._generation(prompts[i // n], text, row) for i, (text, row) in enumerate(written)]
        groups = [tuple(found[i : i + n]) for i in range(0, len(found), n)]
        return [dataclasses.replace(group[0], samples=group) if n > 1 else group[0] for group in groups]

    def stream(self, prompt: str, **options: Unpack[GenerateOptions]) -> Iterator[str]:
        """Return an iterator over the text that `generate` would return, in pieces while it is generated."""
        (prompt,) = check_texts([prompt], "stream")
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
            for _ in self.steps(self.model, [row], options):
                yield from filter(None, fresh)
                fresh.clear()
        if is_observed(self.model):
            record_forced_forward(self.model, [0], [row])
        yield from filter(None, [teller.flush()])

    def chat(
        self, system: str = "", template: ChatTemplate = DEFAULT_CHAT_TEMPLATE, **options: Unpack[GenerateOptions]
    ) -> Conversation:
        """Return a new conversation, to be continued by its method `say`; `system` is the system prompt."""
        return Conversation(self, system, template, options)

    @overload
    def score(self, texts: str) -> TextScore: ...  # type: ignore[overload-overlap]  # a str is a sequence of str too
    @overload
    def score(self, texts: Sequence[str]) -> list[TextScore]: ...
    def score(self, texts: str | Sequence[str]) -> TextScore | list[TextScore]:
        """Score a text, or several: the log-probability of every token. The end token is not counted."""
        if isinstance(texts, str):
            return self.score([texts])[0]
        texts = check_texts(texts, "score")
        framed = [self._fitting(text, i) for i, text in enumerate(texts)]
        given = max(1, len(self.token_template.before))
        log_probs = token_log_probs(self.model, framed, self.options)
        parts = zip(texts, framed, log_probs, strict=True)
        return [self._score(text, ids[given:], scored[given - 1 :]) for text, ids, scored in parts]

    def rank(self, prefix: str, continuations: Sequence[str]) -> list[Ranked]:
        """Return the continuations, which are appended to the prefix as they are, by their probability, best first.

        All are scored from the first token in which any of them differs from the prefix alone, since a tokenizer may merge
        the end of the prefix with what follows.
        """
        continuations = check_texts(continuations, "rank")
        if not continuations:
            raise RegardError("nothing to rank: give some continuations")
        framed = [self._fitting(prefix + text, i) for i, text in enumerate(continuations)]
        alone = self.framed(prefix)
        known = min(common_prefix_length(alone, ids) for ids in framed)
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

    def decode_options(self, **options: Any) -> DecodeConfig:
        """Return the decode settings of the model, changed by the options of `generate`; None changes nothing."""
        given = {
            "nbest" if name == "n" else "stop_strings" if name == "stop" else name: v for name, v in options.items()
        }
        if isinstance(given.get("stop_strings"), str):
            given["stop_strings"] = [given["stop_strings"]]
        return decode_config(dataclasses.replace(self.options, beam=1), given)

    def framed(self, text: str) -> list[int]:
        """Return the token ids that the model reads for a text, special tokens included."""
        return [*self.token_template.before, *self.tokenizer.encode(text)]

    def _fitting(self, text: str, number: int) -> list[int]:
        """Return the token ids of a text to be scored, or refuse one that is too short or too long."""
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
    """A chat with a language model.

    Once the conversation outgrows the model's context, the oldest turns are left out; never the system prompt.
    """

    def __init__(self, generator: Generator, system: str, template: ChatTemplate, options: GenerateOptions) -> None:
        """Begin a conversation; `Generator.chat` is the usual way to make one."""
        self.generator, self.system, self.template = generator, system, template
        given = options.get("stop", ())
        self.options: GenerateOptions = {
            **options,
            "stop": (*template.stop, *([given] if isinstance(given, str) else given or ())),
        }
        self.turns: list[Turn] = []
        self.has_forgotten = False  # whether turns were left out since the start or the last reset

    def say(self, text: str, **options: Unpack[GenerateOptions]) -> str:
        """Return the answer to a question."""
        return "".join(self.stream(text, **options))

    def stream(self, text: str, **options: Unpack[GenerateOptions]) -> Iterator[str]:
        """Yield the answer in pieces; an answer that is interrupted stays in the conversation as far as it came."""
        chosen: GenerateOptions = {**self.options, **options}
        turns = self._fitting([*self.turns, Turn("user", text)], self.generator.decode_options(**chosen).max_new_tokens)
        pieces = self.generator.stream(self.template.render(turns, self.system), **chosen)
        said = waiting = ""
        try:
            for piece in pieces:
                waiting += piece if said or waiting else piece.lstrip()
                fresh = waiting.rstrip()  # white space is held back until something follows it
                said, waiting = said + fresh, waiting[len(fresh) :]
                yield from filter(None, [fresh])
        finally:
            self.turns = [*turns, Turn("assistant", said)]

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns, self.has_forgotten = [], False

    def _fitting(self, turns: list[Turn], new: int) -> list[Turn]:
        """Return the newest turns that leave room for an answer of `new` tokens, or of half the context if that is less."""
        most = max_length_of(self.generator.model)
        room = most - min(new, most // 2)

        def fits(some: Sequence[Turn]) -> bool:
            return len(self.generator.framed(self.template.render(some, self.system))) <= room

        kept = keep_last_turns(turns, fits)
        if len(kept) < len(turns) and not self.has_forgotten:
            self.has_forgotten = True
            log.warning(
                "the conversation outgrew the model's %d tokens (model.max_len): the oldest turns are forgotten", most
            )
        return kept


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens that two rows begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
