"""A translator that is a rule, which can be told what to get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import nn

from regard.config import DecodeConfig
from regard.inference.translator import Translation, Translator
from regard.model_folder import ModelPackage
from regard.models.model import TranslationModel
from regard.text.language_identification import learn_profile
from regard.text.special_tokens import EOS_TEMPLATE

TEXTS = {
    "en": "the man who went to the horse of his friend said that I would not come with them hello how are you",
    "de": "der Mann ging in das Haus und sagte nicht, dass sie sich mit ihm auf der Straße treffen wie geht",
    "fr": "le garçon est allé à la maison de son ami et il a dit que nous ne sommes pas là pour vous bonjour",
}
PROFILES = {language: learn_profile([text]) for language, text in TEXTS.items()}
DIRECTIONS = tuple(d for lang in ("de", "fr", "zh", "zh-Hant") for d in (f"en>{lang}", f"{lang}>en"))


class Model(TranslationModel):
    """A model of which only the longest row is known."""

    def __init__(self, max_len: int) -> None:
        nn.Module.__init__(self)
        self.config: Any = SimpleNamespace(max_len=max_len)


class Fake(Translator):
    """A translator that returns each sentence in capitals, after `spoil`, and keeps the sentences it was given."""

    def __init__(
        self,
        spoil: Callable[[str], str] = str,
        max_len: int = 50,
        directions: Sequence[str] = DIRECTIONS,
        **decode: Any,
    ):
        tokenizers: Any = SimpleNamespace(source=SimpleNamespace(encode=lambda text: list(text)))
        package = ModelPackage(
            Model(max_len),
            tokenizers,
            "translation",
            DecodeConfig(beam=4, **decode),
            "en",
            "de",
            tuple(directions),
            token_template=EOS_TEMPLATE,
            languages=PROFILES,
        )
        super().__init__(package)
        self.spoil = spoil
        self.asked: list[tuple[str | None, list[str]]] = []
        self.settings: list[dict[str, Any]] = []  # the options of each call of `translate_sentences`

    def translate_sentences(
        self,
        sentences: Sequence[str],
        *,
        to: str | None = None,
        progress: Callable[[int], None] = lambda n: None,
        **options: Any,
    ) -> list[Translation]:
        if not self.directions:
            self.encode_sources([], to)  # refuses another language
        self.asked.append((to, list(sentences)))
        self.settings.append(options)
        assert all(len(text) <= self.model.config.max_len - 2 for text in sentences)
        progress(len(sentences))
        return [self.one(text, options.get("nbest", 1)) for text in sentences]

    def one(self, text: str, nbest: int) -> Translation:
        """The second hypothesis is `spoil`ed twice, the third three times."""
        found = []
        for i in range(nbest):
            text = self.spoil(text)
            found.append(Translation(text.upper(), -1.0 - i, -2.0 - i, (), ended="endless" not in text))
        return replace(found[0], nbest=tuple(found) if nbest > 1 else ())

    def said(self) -> list[str]:
        return [text for _, texts in self.asked for text in texts]
