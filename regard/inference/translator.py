"""Translation of texts of any length by a model that was trained on sentences.

`Translator.translate` detects the language of each text, splits it into sentences, decodes all sentences of one direction
together, and joins their translations with the white space of the source. The model gets each sentence in standard casing
and punctuation (text/casing.py). Links, addresses and foreign scripts are replaced by placeholders (text/placeholders.py).
A sentence whose translation drops a number is decoded again with that number as a placeholder; where a placeholder or a
long number is dropped even so, the words around it are translated on their own.

`Translator.translate_sentences` does none of this: it decodes each sentence as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Unpack, overload

from regard import model_folder
from regard.data.multilingual import language_token
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis
from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.inference.arguments import TranslateOptions, check_string, check_texts, decode_config
from regard.models.model import TranslationModel
from regard.pretrained import DEFAULT, bundled_models, bundled_path
from regard.terminal import progress_bar
from regard.text.casing import (
    add_full_stop,
    is_upper_case,
    match_final_punctuation,
    normalize_typography,
    to_sentence_case,
    to_upper_case,
)
from regard.text.language_identification import Direction, DirectionDetector
from regard.text.placeholders import (
    MARKED_UP_WORDS,
    MAX_PLACEHOLDERS,
    add_numbers_to_pattern,
    find_missing_numbers,
    has_words,
    insert_placeholders,
    protected_pattern,
    restore_placeholders,
    split_protected,
)
from regard.text.sentence_splitting import Sentence, join_sentences, split_long_sentence, split_sentences

MAX_SENTENCE_TOKENS = 64  # longer sentences are rare in training data, and are translated better in clauses
PRIVATE_USE = 0xF0000  # code points of this plane have no meaning in any text
UNSPACED = ("zh", "ja")  # languages without spaces between sentences
CUT = "cut off at the length limit (--decode.max_len_b N raises it)"
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Translation:
    """The translation of a text. The scores of a text of several sentences are the sums of theirs."""

    text: str
    score: float  # log_prob / tokens^length_penalty, by which hypotheses are ranked
    log_prob: float  # log p(translation | source)
    tokens: tuple[str, ...]  # the subword pieces of the translation
    ended: bool = True  # False: cut off at the length limit
    nbest: tuple[Translation, ...] = ()  # the hypotheses asked for, this one first, where more than one was asked for
    source: str = ""  # language of the text, empty where it is unknown; as the next two not given for each of `nbest`
    target: str = ""  # language of the translation
    notes: tuple[str, ...] = ()  # warnings about this translation

    def __str__(self) -> str:
        return self.text


class Translator:
    """A translation model with its tokenizers. `regard.load` and `Translator.load` return one.

    Examples:
        >>> import regard
        >>> translator = regard.load("en-de-fr-zh")
        >>> translator.translate("I ate an apple.").text
        'Ich habe einen Apfel gegessen.'
        >>> found = translator.translate(["How are you?", "Wo ist der Bahnhof?"])
        >>> [(each.source, each.target) for each in found]
        [('en', 'de'), ('de', 'en')]
        >>> best = translator.translate("How are you?", to="fr", nbest=2)
        >>> len(best.nbest), best.score >= best.nbest[1].score
        (2, True)

    A model of several directions, such as the bundled one, detects the language of each text, and takes texts of any
    length, which it splits into sentences. A model of one direction takes one sentence a text.

    Attributes:
        model: The model, a torch module.
        tokenizers: Its source and target tokenizer.
        source, target: The languages of a model of one direction.
        directions: The directions of a model of several, such as "en>de".
        options: The model's own decode settings.
    """

    def __init__(self, package: model_folder.ModelPackage, max_sentence_tokens: int = MAX_SENTENCE_TOKENS) -> None:
        """Take a loaded model folder; sentences of more than `max_sentence_tokens` tokens are cut into clauses."""
        if not isinstance(package.model, TranslationModel):
            raise RegardError(
                f"this model learned {package.task}; translating needs an encoder-decoder (generate, classify and embed are "
                f"commands for others)"
            )
        if package.tokenizers is None:
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        self.model, self.tokenizers, self.token_template = package.model, package.tokenizers, package.token_template
        self.source, self.target, self.options = package.source, package.target, package.decode
        self.directions, self.languages = package.directions, package.languages
        self.detector = DirectionDetector(self.directions, self.languages)
        # Room for the special tokens, the language token and a full stop that may be added.
        around = len(self.token_template.wrap(())) + bool(self.directions) + 1
        self.max_sentence_tokens = min(max_sentence_tokens, self.model.config.max_len - around)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto", weights: str = "auto") -> Translator:
        """Load a translator from a run or model folder, or a bundled model by its name.

        `device`: auto, cpu, cuda or cuda:N. `weights`: auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16; on a CPU also
        int8 and fp16.
        """
        return cls(load_model(Path(path), pick_device(device), weights))

    # ---- texts -------------------------------------------------------------------------------------------------------

    @overload
    def translate(  # type: ignore[overload-overlap]  # a string is an iterable of strings too
        self,
        texts: str,
        to: str | None = None,
        source: str | None = None,
        *,
        progress: Progress | None = None,
        quiet: bool = True,
        **options: Unpack[TranslateOptions],
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Iterable[str],
        to: str | None = None,
        source: str | None = None,
        *,
        progress: Progress | None = None,
        quiet: bool = True,
        **options: Unpack[TranslateOptions],
    ) -> list[Translation]: ...
    def translate(
        self,
        texts: str | Iterable[str],
        to: str | None = None,
        source: str | None = None,
        *,
        progress: Progress | None = None,
        quiet: bool = True,
        **options: Unpack[TranslateOptions],
    ) -> Translation | list[Translation]:
        """Translate one text, or several: a string gives a `Translation`, a list of strings a list.

        Args:
            texts: A text, or several.
            to: Language of the translations, such as "fr"; by default German for English, English for other languages.
            source: Language of the texts; by default it is detected, from all texts together.
            progress: A function that is called with the number of sentences done since its last call.
            quiet: False shows a progress bar on a terminal.
            options: beam, nbest, length_penalty, min_len, max_len_a, max_len_b, beam_stop, temperature, top_k, top_p,
                min_p, repetition_penalty, seed, batch_tokens; by default the model's own (`self.options`). With `nbest`
                above 1 a text may have only one sentence.
        """
        if isinstance(texts, str):
            return self.translate([texts], to, source, progress=progress, quiet=quiet, **options)[0]
        texts = check_texts(texts, "translate")
        check_string(to, "to")
        check_string(source, "source")
        if not self.directions:
            if source not in (None, self.source):
                raise RegardError(f"this model translates from {self.source} to {self.target}, not from {source}")
            with progress_bar("translating", len(texts), quiet) as advance:
                return self.translate_sentences(texts, to=to, progress=progress or advance, **options)
        directions = self.detector.detect(texts, to, source)
        parts = [self._split(text, direction) for text, direction in zip(texts, directions, strict=True)]
        has_nbest = decode_config(self.options, options).nbest > 1 and options.get("nbest") is not None
        if has_nbest:
            refuse_several_sentences(texts, parts)
        found = [[copy_text(part.text) for part in own] for own in parts]
        with progress_bar("translating", sum(map(len, parts)), quiet) as advance:
            for pair in dict.fromkeys(direction.pair for direction in directions if direction.source):
                places = [(i, j) for i, d in enumerate(directions) if d.pair == pair for j in range(len(parts[i]))]
                given = [parts[i][j].text for i, j in places]
                translated = self._translate_direction(given, pair, progress or advance, options)
                for (i, j), each in zip(places, translated, strict=True):
                    found[i][j] = map_text(each, to_upper_case) if parts[i][j].is_upper_case else each
        join_all = join_nbest if has_nbest else join_translations
        return [join_all(*one) for one in zip(parts, found, directions, strict=True)]

    def _split(self, text: str, direction: Direction) -> list[Sentence]:
        """Return the sentences of a text, in standard casing and short enough for the model, with the space before each."""
        if not direction.source:
            return [Sentence(text, "", True)]
        kept = protected_pattern(direction.source, direction.target)
        found = []
        for sentence in split_sentences(text):
            if has_words(sentence.text):
                cased = to_sentence_case(sentence.text, direction.source)
                sentence = replace(sentence, text=cased, is_upper_case=is_upper_case(sentence.text))
            found += self._split_long(sentence, kept)
        return found

    def _split_long(self, sentence: Sentence, kept: re.Pattern[str]) -> list[Sentence]:
        """Return a sentence, in clauses if it is too long for the model.

        What matches `kept` is one private-use character meanwhile, so that it is never cut.
        """
        if self._fits(insert_placeholders(sentence.text, kept)[0]):
            return [sentence]
        aside = dict(enumerate(kept.findall(sentence.text), PRIVATE_USE))
        each = iter(aside)
        whole = kept.sub(lambda _: chr(next(each)), sentence.text)
        parts = split_long_sentence(
            replace(sentence, text=whole), lambda text: self._fits(text.translate(dict.fromkeys(aside, "⟦1⟧")))
        )
        return [replace(part, text=part.text.translate(aside)) for part in parts]

    def _fits(self, text: str) -> bool:
        """Return whether a sentence has at most `max_sentence_tokens` tokens."""
        # A token has at least one byte, so short texts need no tokenizer; some tokenizers add a space in front.
        if len(text.encode()) < self.max_sentence_tokens:
            return True
        return len(self.tokenizers.source.encode(normalize_typography(text, ""))) <= self.max_sentence_tokens

    # ---- sentences of one direction ----------------------------------------------------------------------------------

    def _translate_direction(
        self, texts: list[str], pair: tuple[str, str], advance: Progress, options: TranslateOptions
    ) -> list[Translation]:
        """Translate sentences from one language to another so that links, numbers and the like are in the translation.

        Every sentence is decoded with placeholders for what must be copied; a sentence that loses numbers once more with
        placeholders for these too; and where something is lost even then, the words around it are translated on their own.
        """
        kept = protected_pattern(*pair)
        patterns = {i: kept for i, text in enumerate(texts) if has_words(text, kept)}
        advance(len(texts) - len(patterns))
        found = self._decode_with_placeholders(texts, patterns, pair, advance, options)
        lost = {i: find_missing_numbers(texts[i], each.text) for i, each in found.items() if each}
        with_numbers = {i: add_numbers_to_pattern(kept, numbers) for i, numbers in lost.items() if numbers}
        again = self._decode_with_placeholders(texts, with_numbers, pair, lambda done: None, options)
        found |= {i: each for i, each in again.items() if each}
        # A number of one or two digits may have been written in words: no reason to take a sentence apart.
        broken = [
            i
            for i, each in found.items()
            if each is None or any(len(number) > 2 for number in find_missing_numbers(texts[i], each.text))
        ]
        found |= self._decode_fragments(texts, {i: with_numbers.get(i, kept) for i in broken}, pair, options)
        return [found.get(i) or copy_text(text) for i, text in enumerate(texts)]

    def _decode_with_placeholders(
        self,
        texts: list[str],
        patterns: dict[int, re.Pattern[str]],
        pair: tuple[str, str],
        advance: Progress,
        options: TranslateOptions,
    ) -> dict[int, Translation | None]:
        """Translate the sentence at each index of `patterns` with placeholders for what the pattern matches.

        A sentence is None where the model has not enough placeholders or tokens, or loses a placeholder.
        """
        source, target = pair
        masked = {i: insert_placeholders(texts[i], pattern) for i, pattern in patterns.items()}
        decodable = {
            i: text
            for i, (text, kept) in masked.items()
            if len(kept) <= MAX_PLACEHOLDERS and not MARKED_UP_WORDS.search(texts[i]) and self._fits(text)
        }
        advance(len(masked) - len(decodable))
        inputs = [add_full_stop(normalize_typography(text, source), source) for text in decodable.values()]
        outputs = self.translate_sentences(inputs, to=target, progress=advance, **options) if inputs else []
        found = {
            i: map_text(each, partial(match_final_punctuation, decodable[i]))
            for i, each in zip(decodable, outputs, strict=True)
        }
        return {i: restore_hypotheses(found[i], kept) if i in found else None for i, (_, kept) in masked.items()}

    def _decode_fragments(
        self, texts: list[str], patterns: dict[int, re.Pattern[str]], pair: tuple[str, str], options: TranslateOptions
    ) -> dict[int, Translation]:
        """Translate, in the sentence at each index of `patterns`, the words between what the pattern matches."""
        source, target = pair
        parts = {i: split_protected(texts[i], pattern) for i, pattern in patterns.items()}
        kept = protected_pattern(source, target)
        places = [(i, k) for i, own in parts.items() for k in range(0, len(own), 2) if has_words(own[k], kept)]
        fragments = [parts[i][k].strip() for i, k in places]
        inputs = [add_full_stop(normalize_typography(text, source), source) for text in fragments]
        outputs = self.translate_sentences(inputs, to=target, **options) if inputs else []
        found = {
            place: map_text(each, partial(match_final_punctuation, text))
            for place, text, each in zip(places, fragments, outputs, strict=True)
        }
        return {
            i: concatenate(
                [keep_space_around(p, found[i, k]) if (i, k) in found else copy_text(p) for k, p in enumerate(own)]
            )
            for i, own in parts.items()
        }

    # ---- sentences ---------------------------------------------------------------------------------------------------

    def translate_sentences(
        self,
        sentences: Sequence[str],
        *,
        to: str | None = None,
        progress: Progress | None = None,
        **options: Unpack[TranslateOptions],
    ) -> list[Translation]:
        """Decode each sentence as it is, without what `translate` does for texts. Arguments are those of `translate`."""
        if isinstance(sentences, str):
            raise TypeError("translate_sentences takes a list of strings, not a string: translate takes both")
        sentences = check_texts(sentences, "translate_sentences")
        check_string(to, "to")
        chosen = decode_config(self.options, options)
        sources, languages = self.encode_sources(sentences, to)
        device = next(self.model.parameters()).device
        limit = self.model.config.max_len
        advance = progress or (lambda done: None)
        found = decode(self.model, sources, chosen, limit, device, advance, self.token_template)
        translations = [  # an empty line stays empty, whatever the model makes of it
            self._translation(hypotheses) if ids and text.strip() else copy_text("")
            for text, ids, hypotheses in zip(sentences, sources, found, strict=True)
        ]
        return [self._with_languages(each, to) for each, to in zip(translations, languages, strict=True)]

    def read(self, text: str, to: str | None = None) -> list[int]:
        """Return the token ids that the model reads for a sentence, special tokens included.

        A text whose language the model does not translate to `to` is refused.
        """
        language = self.target_languages([text], to)[0] if self.directions else to
        return self.token_template.wrap(self.encode_sources([text], language)[0][0])

    def encode_sources(self, texts: Sequence[str], to: str | None) -> tuple[list[list[int]], list[str]]:
        """Return the token ids of each text and its target language.

        Where the model has several directions, the ids begin with the token of the target language. That is `to`, or
        the one that `translate` would choose.
        """
        if not self.directions and to not in (None, self.target):
            raise RegardError(f"this model translates from {self.source} to {self.target}, not to {to}")
        sources = self.tokenizers.source.encode_batch(list(texts)) if texts else []
        if not self.directions:
            return sources, [self.target] * len(sources)
        languages = [to] * len(sources) if to else self.target_languages(texts)
        tokens = {language: language_token(self.tokenizers.source, language) for language in set(languages)}
        return [[tokens[to], *ids] if ids else [] for ids, to in zip(sources, languages, strict=True)], languages

    def target_languages(self, texts: Sequence[str], to: str | None = None) -> list[str]:
        """Return the language that `translate` would translate each text to; a direction it does not have is an error."""
        if not self.directions:
            return [self.target] * len(texts)
        default = self.directions[0].split(">")[1]  # where there is no word to translate
        return [direction.target or default for direction in self.detector.detect(texts, to, None)]

    def _with_languages(self, translation: Translation, to: str) -> Translation:
        """Return the translation with its languages; a model of several directions is not told the source language."""
        return replace(translation, source="" if self.directions else self.source, target=to)

    def _translation(self, hypotheses: list[Hypothesis]) -> Translation:
        target = self.tokenizers.target
        ranked = tuple(
            Translation(target.decode(h.tokens), h.score, h.log_prob, tuple(target.pieces(h.tokens)), h.ended)
            for h in hypotheses
        )
        return replace(ranked[0], nbest=ranked) if len(ranked) > 1 else ranked[0]


# ---- translations of the sentences of a text -------------------------------------------------------------------------


def join_translations(parts: list[Sentence], found: list[Translation], direction: Direction) -> Translation:
    """Return the translation of a text, given those of its sentences."""
    text = join_sentences(parts, [each.text for each in found], not direction.target.startswith(UNSPACED))
    tokens = tuple(token for each in found for token in each.tokens)
    return annotate(replace(concatenate(found), text=text, tokens=tokens), direction)


def join_nbest(parts: list[Sentence], found: list[Translation], direction: Direction) -> Translation:
    """Return the translation of a text of one sentence, with all its hypotheses and what stands around the sentence."""
    best = next((each for part, each in zip(parts, found, strict=True) if not part.ends_line), copy_text(""))
    best = map_text(best, lambda text: "".join(part.before + ("" if part.ends_line else text) for part in parts))
    return annotate(replace(best, nbest=best.nbest or (best,)), direction)


def annotate(translation: Translation, direction: Direction) -> Translation:
    """Return a translation with its languages and warnings."""
    notes = tuple(filter(None, (direction.note, "" if translation.ended else CUT)))
    return replace(translation, source=direction.source, target=direction.target, notes=notes)


def refuse_several_sentences(texts: Sequence[str], parts: list[list[Sentence]]) -> None:
    """Raise an error for a text of several sentences, each of which would have hypotheses of its own."""
    for number, (text, own) in enumerate(zip(texts, parts, strict=True), 1):
        if sum(not part.ends_line for part in own) > 1:
            where = f"line {number}: " if len(texts) > 1 else ""
            raise RegardError(
                f"{where}several translations (nbest) are for one sentence, not for {text[:60]!r}: "
                f"put each sentence on a line of its own"
            )


def concatenate(found: list[Translation]) -> Translation:
    """Return the translations of consecutive parts as one, whose tokens are left out: some parts were not translated."""
    score, log_prob = sum((each.score for each in found), 0.0), sum((each.log_prob for each in found), 0.0)
    return Translation("".join(each.text for each in found), score, log_prob, (), all(each.ended for each in found))


def copy_text(text: str) -> Translation:
    """Return a text that needs no translation as its own translation."""
    return Translation(text, 0.0, 0.0, ())


def map_text(translation: Translation, change: Callable[[str], str]) -> Translation:
    """Return a translation with `change` applied to the text of every hypothesis."""
    nbest = tuple(map_text(each, change) for each in translation.nbest)
    return replace(translation, text=change(translation.text), nbest=nbest)


def restore_hypotheses(translation: Translation, kept: list[str]) -> Translation | None:
    """Return a translation with its placeholders replaced by what they stand for.

    Hypotheses that lost a placeholder are left out, and None is returned if all did. Of hypotheses with one text, which
    differ only in their subword pieces, the first is taken.
    """
    whole: dict[str, Translation] = {}
    for each in translation.nbest or (translation,):
        if (text := restore_placeholders(each.text, kept)) is not None:
            whole.setdefault(text, replace(each, text=text))
    found = tuple(whole.values())
    return replace(found[0], nbest=found if translation.nbest else ()) if found else None


def keep_space_around(part: str, translation: Translation) -> Translation:
    """Return a translation with the white space around its source."""
    before, after = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
    return replace(translation, text=before + translation.text + after)


# ---- a function of the package ---------------------------------------------------------------------------------------


@overload
def translate(  # type: ignore[overload-overlap]  # a string is an iterable of strings too
    texts: str,
    to: str | None = None,
    source: str | None = None,
    *,
    model: str | Path | None = None,
    device: str = "auto",
    weights: str = "auto",
    **options: Unpack[TranslateOptions],
) -> Translation: ...
@overload
def translate(
    texts: Iterable[str],
    to: str | None = None,
    source: str | None = None,
    *,
    model: str | Path | None = None,
    device: str = "auto",
    weights: str = "auto",
    **options: Unpack[TranslateOptions],
) -> list[Translation]: ...
def translate(
    texts: str | Iterable[str],
    to: str | None = None,
    source: str | None = None,
    *,
    model: str | Path | None = None,
    device: str = "auto",
    weights: str = "auto",
    **options: Unpack[TranslateOptions],
) -> Translation | list[Translation]:
    """Translate with the bundled model, or with the model in the folder `model`.

    Examples:
        >>> import regard
        >>> print(regard.translate("Thank you very much.", to="fr"))
        Merci beaucoup.

    The bundled model is loaded once; for more than one call with another, use `Translator.load`. Arguments are those of
    `Translator.translate` and of `Translator.load`.
    """
    checked = texts if isinstance(texts, str) else check_texts(texts, "translate")
    translator = bundled_translator(device, weights) if model is None else Translator.load(model, device, weights)
    return translator.translate(checked, to, source, **options)


@lru_cache(maxsize=2)
def bundled_translator(device: str = "auto", weights: str = "auto") -> Translator:
    """Return the bundled model, whose weights stay quantized on a CPU."""
    if DEFAULT not in bundled_models():
        raise RegardError(
            "no model given: train one (`regard train toy-en-de`) and pass it with --model FOLDER (model=)"
        )
    on_cpu = pick_device(device).type == "cpu"
    return Translator.load(bundled_path(DEFAULT), device, "int8" if weights == "auto" and on_cpu else weights)
