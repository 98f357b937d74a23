"""A trained model with its tokenizers: text in, translations out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from regard import model_folder
from regard.config import DecodeConfig
from regard.config.recipes import build
from regard.data.multilingual import language_token
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis
from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.models.model import TranslationModel


@dataclass(frozen=True)
class Translation:
    text: str
    score: float  # log_prob / tokens^length_penalty: what hypotheses are ranked by
    log_prob: float  # log p(translation | source)
    tokens: tuple[str, ...]  # the pieces it was written in
    ended: bool = True  # False: cut off at the length limit
    nbest: tuple[Translation, ...] = ()  # all that were asked for, this one first, when more than one was

    def __str__(self) -> str:
        return self.text


class Translator:
    """`load` makes one."""

    def __init__(self, package: model_folder.ModelPackage) -> None:
        if not isinstance(package.model, TranslationModel):
            raise RegardError(
                f"this model learned {package.task}; translating needs an encoder-decoder (generate, classify and embed are "
                f"commands for others)"
            )
        if package.tokenizers is None:
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        self.model, self.tokenizers, self.token_template = package.model, package.tokenizers, package.token_template
        self.source, self.target, self.options = package.source, package.target, package.decode
        self.directions = package.directions
        self.languages = package.languages

    @overload
    def translate(self, texts: str, *, to: str | None = None, **options: Any) -> Translation: ...
    @overload
    def translate(self, texts: Sequence[str], *, to: str | None = None, **options: Any) -> list[Translation]: ...
    def translate(
        self,
        texts: str | Sequence[str],
        progress: Callable[[int], None] = lambda done: None,
        *,
        to: str | None = None,
        **options: Any,
    ) -> Translation | list[Translation]:
        """One sentence, or several. Options are those of `[decode]`: beam, nbest, length_penalty, temperature, ...

        `to` is the language to translate to, for a model that knows several."""
        if isinstance(texts, str):
            return self.translate([texts], progress=progress, to=to, **options)[0]
        chosen = self.decode_options(**options)
        sources = self._tagged(self.tokenizers.source.encode_batch(list(texts)), to)
        device = next(self.model.parameters()).device
        found = decode(self.model, sources, chosen, self.model.config.max_len, device, progress, self.token_template)
        nothing = Translation("", 0.0, 0.0, ())  # the translation of an empty line, whatever a model makes of it
        return [
            self._translation(hypotheses) if ids and text.strip() else nothing
            for text, ids, hypotheses in zip(texts, sources, found, strict=True)
        ]

    def read(self, text: str, to: str | None = None) -> list[int]:
        """The tokens that the model reads for a text, those around it included."""
        return self.token_template.wrap(self._tagged([self.tokenizers.source.encode(text)], to)[0])

    def _tagged(self, sources: list[list[int]], to: str | None) -> list[list[int]]:
        """Sources that say which language they go to, where the model wants to be told."""
        if not self.directions:
            if to not in (None, self.target):
                raise RegardError(f"this model translates from {self.source} to {self.target}, not to {to}")
            return sources
        if to is None:
            known = ", ".join(self.directions)
            raise RegardError(f"this model translates {known}: say which language to translate to (--to LANG, to=)")
        tag = language_token(self.tokenizers.source, to)
        return [[tag, *ids] if ids else [] for ids in sources]

    def decode_options(self, **options: Any) -> DecodeConfig:
        given = {k: v for k, v in options.items() if v is not None}
        return build({**dataclasses.asdict(self.options), **given}, DecodeConfig, "decode.")

    def _translation(self, hypotheses: list[Hypothesis]) -> Translation:
        target = self.tokenizers.target
        ranked = tuple(
            Translation(target.decode(h.tokens), h.score, h.log_prob, tuple(target.pieces(h.tokens)), h.ended)
            for h in hypotheses
        )
        return dataclasses.replace(ranked[0], nbest=ranked) if len(ranked) > 1 else ranked[0]


def load(path: str | Path, device: str = "auto", weights: str = "auto") -> Translator:
    """A translator from a run folder or a model folder. `weights` are fp32 on a CPU and bf16 on a GPU, or as asked for."""
    return Translator(load_model(Path(path), pick_device(device), weights))


def translate(
    texts: str | Sequence[str], model: str | Path, device: str = "auto", weights: str = "auto", **options: Any
) -> Any:
    """`load` and `translate` in one call; for more than one call, load once."""
    if not isinstance(texts, str) and not all(isinstance(t, str) for t in texts):
        raise RegardError("translate takes a string or a list of strings")
    return load(model, device, weights).translate(texts, **options)
