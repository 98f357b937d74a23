"""Translation of texts of any length by a model that was trained on sentences.

`Translator.translate` detects the language of each text, splits it into sentences, translates all sentences of one direction
together (inference/sentence_translation.py), and joins their translations with the white space of the source. The model gets
each sentence in standard casing and punctuation (text/casing.py). Where the model has no direction from the language of a
text to the language asked for, the sentences are translated to a third language first (pivoting).

`Translator.align` links the words of given texts and translations. `Translator.translate_sentences` does none of all this:
it decodes each sentence as it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from regard import model_folder
from regard.config import DecodeConfig
from regard.data.multilingual import language_token
from regard.decode.batch_decoding import check_lengths, decode
from regard.decode.constrained_beam_search import OutputConstraints, Phrase, decode_constrained
from regard.decode.constraints import Hypothesis, check_options, searching
from regard.decode.minimum_bayes_risk import candidate_options, rank_by_risk
from regard.decode.sampling import part_seed, text_seed
from regard.decode.source_attention import has_cross_attention
from regard.decode.unknown_words import allow_unknown, replace_unknown
from regard.device import pick_device
from regard.errors import RegardError
from regard.inference.arguments import (
    Formality,
    TranslateOptions,
    check_formality,
    check_glossary,
    check_string,
    check_texts,
    decode_config,
)
from regard.inference.attention_alignment import align_pairs
from regard.inference.confidence import token_probability
from regard.inference.ensemble_loading import load_ensemble
from regard.inference.sentence_translation import UNSPACED, Advance, SentenceTranslator, split_clauses
from regard.inference.translation_results import Translation, copy_text, join_nbest, join_parts, map_text
from regard.models.ensemble import Ensemble
from regard.models.model import TranslationModel
from regard.pretrained import DEFAULT, bundled_models, bundled_path
from regard.terminal import progress_bar
from regard.text.alignment import Link, compose_links
from regard.text.casing import capitalize_first, is_upper_case, normalize_typography, to_sentence_case, to_upper_case
from regard.text.formality import detect_form, forms_of_address, split_form
from regard.text.glossary import Glossary
from regard.text.language_identification import Direction, DirectionDetector, LanguageCounts
from regard.text.language_names import language_name
from regard.text.placeholders import has_words, insert_placeholders, protected_pattern
from regard.text.sentence_splitting import Sentence, join_with_begins, split_sentences
from regard.text.tokenizer_training import SPACE

__all__ = ["Translation", "Translator", "bundled_translator", "translate"]

# For sentences with required words. The places of their beam are shared among the numbers of words said so far. Their
# hypotheses are ranked by probability alone: a required word beside the model's own, "der Server Rechner", is unlikely, but
# a length penalty makes up for that.
CONSTRAINED_BEAM, CONSTRAINED_LENGTH_PENALTY = 16, 0.0
CUT = "cut off at the length limit (--decode.max_len_b N raises it)"
UNUSED_TERMS = "terms of the glossary are not used: by way of another language, they need lines for both directions"
SPARE = 8  # tokens that a sentence may get before it is decoded: of its language, a full stop, or a longer time of day
SENTENCE_PUNCTUATION = re.compile("[.!?…。！？]")


Decode = Callable[..., list[list[Hypothesis]]]  # a function like regard.decode.batch_decoding.decode


class Translator:
    """A translation model with its tokenizers. `regard.load` and `Translator.load` return one.

    Examples:
        >>> import regard
        >>> translator = regard.load("en-de-fr-zh")
        >>> translator.translate("I ate an apple.").text
        'Ich habe einen Apfel gegessen.'
        >>> found = translator.translate(["The weather is very nice today.", "Wo ist der Bahnhof?"])
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
        forms: The forms of address that it can be asked for in each target language: {"de": ("formal", "familiar")}.
        options: The model's own decode settings.
    """

    def __init__(self, package: model_folder.ModelPackage) -> None:
        """Take a loaded model folder."""
        if not isinstance(package.model, TranslationModel):
            raise RegardError(
                f"this model learned {package.task}; translating needs an encoder-decoder (generate, classify and embed are "
                f"commands for others)"
            )
        if package.tokenizers is None:
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        self.model, self.tokenizers, self.token_template = package.model, package.tokenizers, package.token_template
        self.source, self.target, self.options = package.source, package.target, package.decode
        self.forms = forms_of_address(package.directions)
        self.directions = tuple(d for d in package.directions if not split_form(d)[1])
        self.languages = package.languages
        self.detector = DirectionDetector(self.directions, self.languages)
        self.decode: Decode = (
            decode  # a server puts a function here that decodes the sentences of many requests together
        )
        # Room for the special tokens, the language token and a full stop that may be added.
        readers = self.model.readers if isinstance(self.model, Ensemble) else ()
        templates = [self.token_template, *(reader.own_template for reader in readers if reader)]
        around = max(len(template.wrap(())) for template in templates) + bool(self.directions) + 1
        self.max_sentence_tokens = min(self.options.max_sentence_tokens, self.model.config.max_len - around)

    @classmethod
    def load(cls, path: str | Path | Sequence[str | Path], device: str = "auto", weights: str = "auto") -> Translator:
        """Load a translator from a run or model folder, or a bundled model by its name. A list of them is an ensemble.

        `device`: auto, cpu, cuda or cuda:N. `weights`: auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16; on a CPU also
        int8 and fp16.
        """
        paths = [path] if isinstance(path, (str, Path)) else path
        return cls(load_ensemble(paths, pick_device(device), weights))

    # ---- texts -------------------------------------------------------------------------------------------------------

    @overload
    def translate(  # type: ignore[overload-overlap]  # a string is an iterable of strings too
        self,
        texts: str,
        to: str | None = None,
        source: str | None = None,
        *,
        glossary: Glossary | Mapping[str, str] | None = None,
        alignment: bool = False,
        formality: Formality = "auto",
        seen: LanguageCounts | None = None,
        progress: Advance | None = None,
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
        glossary: Glossary | Mapping[str, str] | None = None,
        alignment: bool = False,
        formality: Formality = "auto",
        seen: LanguageCounts | None = None,
        progress: Advance | None = None,
        quiet: bool = True,
        **options: Unpack[TranslateOptions],
    ) -> list[Translation]: ...
    def translate(
        self,
        texts: str | Iterable[str],
        to: str | None = None,
        source: str | None = None,
        *,
        glossary: Glossary | Mapping[str, str] | None = None,
        alignment: bool = False,
        formality: Formality = "auto",
        seen: LanguageCounts | None = None,
        progress: Advance | None = None,
        quiet: bool = True,
        **options: Unpack[TranslateOptions],
    ) -> Translation | list[Translation]:
        """Translate one text, or several: a string gives a `Translation`, a list of strings a list.

        Args:
            texts: A text, or several.
            to: Language of the translations, such as "fr"; by default German for English, English for other languages.
            source: Language of the texts; by default it is detected, from all texts together.
            glossary: Terms and the words that a translation must have for them: `Glossary.load("terms.tsv")`, or a dict.
            alignment: True links the words of each translation to those of its text (`Translation.alignment`).
            formality: How a German or French translation addresses people, where the model was trained with forms of
                address: formal (Sie, vous), familiar (du, tu), or auto: as the text does, and formal where it does not say.
            seen: The languages of earlier texts of a stream, which these are added to; then the language of a text is
                detected from it and those before it, so that it does not depend on how the stream is divided.
            progress: A function that is called with the number of sentences done since its last call.
            quiet: False shows a progress bar on a terminal.
            options: beam, nbest, length_penalty, length_norm, coverage_penalty, prune, min_len, max_len_a, max_len_b,
                beam_stop, temperature, top_k, top_p, min_p, epsilon, repetition_penalty, seed, mbr, mbr_metric,
                mbr_candidates, ensemble, batch_tokens, replace_unknown, unknown_dictionary; by default the model's own
                (`self.options`).
        """
        if isinstance(texts, str):
            (only,) = self.translate(
                [texts],
                to,
                source,
                glossary=glossary,
                alignment=alignment,
                formality=formality,
                seen=seen,
                progress=progress,
                quiet=quiet,
                **options,
            )
            return only
        texts = check_texts(texts, "translate")
        check_string(to, "to")
        check_string(source, "source")
        glossary = check_glossary(glossary)
        check_formality(formality)
        if formality != "auto" and not self.forms:
            raise RegardError("this model was not trained with forms of address: leave formality out")
        if not self.directions:
            return self._translate_lines(texts, to, source, glossary, alignment, progress, quiet, options)
        directions = self.detector.detect(texts, to, source, seen)
        parts = [self._split(text, direction) for text, direction in zip(texts, directions, strict=True)]
        forms = [self._form(text, direction, formality) for text, direction in zip(texts, directions, strict=True)]
        chosen = decode_config(self.options, options)
        seeds = [text_seed(chosen.seed, i) for i in range(len(texts))]
        with progress_bar("translating", sum(map(len, parts)), quiet) as advance:
            given = parts, directions, forms, seeds, glossary
            found, between = self._translate_parts(*given, progress or advance, options)
        n = chosen.nbest if options.get("nbest") is not None else 1
        made = [self._join(*one, n) for one in zip(parts, found, directions, strict=True)]
        if alignment:
            links = self._align_parts(parts, found, between, directions)
            made = [replace(each, alignment=tuple(own)) for each, own in zip(made, links, strict=True)]
        return made

    def _translate_lines(
        self,
        texts: list[str],
        to: str | None,
        source: str | None,
        glossary: Glossary | None,
        alignment: bool,
        progress: Advance | None,
        quiet: bool,
        options: TranslateOptions,
    ) -> list[Translation]:
        """Translate texts by a model of one direction, which reads each as one sentence."""
        if source not in (None, self.source):
            raise RegardError(f"this model translates from {self.source} to {self.target}, not from {source}")
        terms = [glossary.find(text, self.source, self.target) for text in texts] if glossary else None
        extra: dict[str, Any] = {"force_words": terms} if terms and any(terms) else {}
        with progress_bar("translating", len(texts), quiet) as advance:
            found = self.translate_sentences(texts, to=to, progress=progress or advance, **extra, **options)
        if alignment:
            pairs = [(text, each.text) for text, each in zip(texts, found, strict=True)]
            links = self.align_sentences(pairs, [(self.source, self.target)] * len(pairs))
            found = [replace(each, alignment=tuple(own)) for each, own in zip(found, links, strict=True)]
        return found

    def _translate_parts(
        self,
        parts: list[list[Sentence]],
        directions: Sequence[Direction],
        forms: Sequence[str],
        seeds: Sequence[int],
        glossary: Glossary | None,
        advance: Advance,
        options: TranslateOptions,
    ) -> tuple[list[list[Translation]], dict[tuple[int, int], Translation]]:
        """Return the translations of the sentences of each text, and those into a third language by text and sentence.

        `forms` are the forms of address of the translations, empty where it does not matter, and `seeds` the random seeds
        of the texts."""
        found = [[copy_text(part.text) for part in own] for own in parts]
        between: dict[tuple[int, int], Translation] = {}
        keys = [(*d.pair, d.via, form) for d, form in zip(directions, forms, strict=True)]
        for key in dict.fromkeys(key for key in keys if key[0]):
            source, target, via, form = key
            places = [(i, j) for i, own in enumerate(keys) if own == key for j in range(len(parts[i]))]
            given = [parts[i][j].text for i, j in places]
            upper = [n for n, (i, j) in enumerate(places) if parts[i][j].is_upper_case]
            own_seeds = [part_seed(seeds[i], j) for i, j in places]
            if not via:
                translated = SentenceTranslator(self, (source, target), options, glossary, form).translate(
                    given, advance, upper, own_seeds
                )
            else:
                own = glossary.with_directions() if glossary else None
                best = {**options, "nbest": 1}
                first = SentenceTranslator(self, (source, via), best, own)  # type: ignore[arg-type]
                middle = first.translate(given, advance, upper, own_seeds)
                between |= dict(zip(places, middle, strict=True))
                onward = given, middle, Direction(via, target), form, own_seeds
                translated = self._translate_onward(*onward, own, options)
                if glossary:
                    unused = [glossary.find(text, source, target) for text in given]
                    noted = zip(translated, unused, strict=True)
                    translated = [replace(t, notes=(*t.notes, UNUSED_TERMS)) if terms else t for t, terms in noted]
            for (i, j), each in zip(places, translated, strict=True):
                found[i][j] = match_casing(parts[i][j], each)
        return found, between

    def _translate_onward(
        self,
        texts: list[str],
        middle: list[Translation],
        direction: Direction,
        form: str,
        seeds: Sequence[int],
        glossary: Glossary | None,
        options: TranslateOptions,
    ) -> list[Translation]:
        """Translate sentences that were translated into a third language; those that were not stay in the first.

        Log-probabilities are sums of both steps and confidences products. Of n best translations, the hypotheses are those
        of the second step, from the best of the first."""
        n = decode_config(self.options, options).nbest if options.get("nbest") is not None else 1
        goes_on = [i for i, (text, each) in enumerate(zip(texts, middle, strict=True)) if each.confidence > 0 and text]
        parts = [self._split(middle[i].text, direction) for i in goes_on]
        directions, forms = [direction] * len(parts), [form] * len(parts)
        own_seeds = [seeds[i] for i in goes_on]
        found, _ = self._translate_parts(parts, directions, forms, own_seeds, glossary, lambda done: None, options)
        made = list(middle)
        for i, own, translations in zip(goes_on, parts, found, strict=True):
            last = self._join(own, translations, direction, n)

            def add(t: Translation, first: Translation = middle[i]) -> Translation:
                return replace(
                    t,
                    score=t.score + first.score,
                    log_prob=t.log_prob + first.log_prob,
                    confidence=t.confidence * first.confidence,
                    ended=t.ended and first.ended,
                )

            notes = tuple(dict.fromkeys((*middle[i].notes, *last.notes)))
            made[i] = replace(add(last), nbest=tuple(map(add, last.nbest)), notes=notes)
        return made

    def _form(self, text: str, direction: Direction, formality: Formality) -> str:
        """Return the form of address of a translation, or nothing where the model has none for its language."""
        if direction.target not in self.forms or not direction.source:
            return ""
        form = detect_form([text], direction.source) if formality == "auto" else formality
        return form if form in self.forms[direction.target] else ""

    def _join(self, parts: list[Sentence], found: list[Translation], direction: Direction, n: int) -> Translation:
        """Return the translation of a text, given those of its sentences, with its languages and warnings."""
        spaced = is_spaced(direction)
        made = join_nbest(parts, found, spaced, n) if n > 1 else join_parts(parts, found, spaced)
        via = direction.via if direction.source else ""
        way = f"translated by way of {language_name(via)}" if via else ""
        notes = dict.fromkeys(filter(None, (direction.note, way, *made.notes, "" if made.ended else CUT)))
        return replace(made, source=direction.source, target=direction.target, notes=tuple(notes), via=via)

    def _split(self, text: str, direction: Direction) -> list[Sentence]:
        """Return the sentences of a text, in standard casing and short enough for the model, with the space before each."""
        if not direction.source:
            return [Sentence(text, "", True)]
        kept = protected_pattern(direction.source, direction.target)
        found = []
        for sentence in split_sentences(text):
            if has_words(sentence.text):
                cased = to_sentence_case(sentence.text, direction.source)
                upper = is_upper_case(sentence.text)
                sentence = replace(sentence, text=cased, is_upper_case=upper, written=sentence.text)
            fits = self.fits(insert_placeholders(sentence.text, kept)[0])
            found += [sentence] if fits else split_clauses(replace(sentence, written=""), kept, self.fits)
        return found

    def fits(self, text: str) -> bool:
        """Return whether a sentence has at most `max_sentence_tokens` tokens, and all members of an ensemble can read it."""
        # A token has at least one byte, so short texts need no tokenizer; some tokenizers add a space in front.
        if len(text.encode()) < self.max_sentence_tokens:
            return True
        ids = self.tokenizers.source.encode(normalize_typography(text, ""))
        if len(ids) > self.max_sentence_tokens:
            return False
        return not isinstance(self.model, Ensemble) or not self.model.find_overlong(
            self.token_template.wrap(ids), SPARE
        )

    # ---- alignment ---------------------------------------------------------------------------------------------------

    def align(
        self, sources: Sequence[str], targets: Sequence[str], to: str | None = None, source: str | None = None
    ) -> list[list[Link]]:
        """Link the words of texts and their translations by the cross-attention of the model.

        Args:
            sources: Texts.
            targets: The translation of each.
            to: Language of the translations; by default the one that `translate` would choose.
            source: Language of the texts; by default it is detected.

        Returns:
            For each pair of texts its links, in the order of the translation. Texts with equal numbers of sentences are
            aligned sentence by sentence, others as a whole, up to the model's longest input.

        Examples:
            >>> import regard
            >>> translator = regard.load("en-de-fr-zh")
            >>> text, translation = "The house is red.", "Das Haus ist rot."
            >>> (links,) = translator.align([text], [translation], to="de")
            >>> sorted({translation[link.target_begin : link.target_end] for link in links})
            ['.', 'Das', 'Haus', 'ist', 'rot']
        """
        sources, targets = check_texts(sources, "align"), check_texts(targets, "align")
        if len(sources) != len(targets):
            raise RegardError(f"align takes as many texts as translations, not {len(sources)} and {len(targets)}")
        check_string(to, "to")
        check_string(source, "source")
        if not has_cross_attention(self.model):
            raise RegardError("this model has no attention over its source, so it cannot align words")
        if self.directions:
            languages = [d.pair for d in self.detector.detect(sources, to, source)]
        else:
            languages = [(self.source, self.target)] * len(sources)
        parts = [[split_sentences(text) for text in pair] for pair in zip(sources, targets, strict=True)]
        places: list[tuple[int, int, int]] = []  # text, and where the two sentences begin
        pairs: list[tuple[str, str]] = []
        for i, (text, translation) in enumerate(zip(sources, targets, strict=True)):
            spans = [sentence_offsets(own) for own in parts[i]]
            if len(spans[0]) != len(spans[1]):
                spans = [[(0, text)], [(0, translation)]]
            for (begin, one), (other_begin, other) in zip(*spans, strict=True):
                places.append((i, begin, other_begin))
                pairs.append((to_sentence_case(one, languages[i][0]), other))
        found = self.align_sentences(pairs, [languages[i] for i, _, _ in places])
        made: list[list[Link]] = [[] for _ in sources]
        for (i, begin, other_begin), own in zip(places, found, strict=True):
            made[i] += [link.shift(begin, other_begin) for link in own]
        return made

    def align_sentences(
        self, pairs: Sequence[tuple[str, str]], languages: Sequence[tuple[str, str]]
    ) -> list[list[Link]]:
        """Return the links of pairs of sentences with these languages; none if the model does not attend to its source.

        The direction need not be one of the model's: attention finds words between any two of its languages."""
        if not has_cross_attention(self.model):
            return [[] for _ in pairs]
        tokens = self.tokenizers.source.language_tokens() if self.directions else {}
        tags = [[tokens[target]] if target in tokens else [] for _, target in languages]
        return align_pairs(
            self.model, self.tokenizers, self.token_template, pairs, languages, tags, self.model.config.max_len
        )

    def _align_parts(
        self,
        parts: list[list[Sentence]],
        found: list[list[Translation]],
        between: dict[tuple[int, int], Translation],
        directions: Sequence[Direction],
    ) -> list[list[Link]]:
        """Return the links of each text and its translation, given their sentences."""
        steps: list[tuple[tuple[int, int], str, str, tuple[str, str]]] = []
        for i, own in enumerate(parts):
            source, target = directions[i].pair
            for j, part in enumerate(own):
                if not source or part.ends_line or not part.text:
                    continue
                text = to_sentence_case(found[i][j].text, target) if part.is_upper_case else found[i][j].text
                if (i, j) in between:
                    via, middle = directions[i].via, between[i, j].text
                    steps.append(((i, j), part.text, middle, (source, via)))
                    steps.append(((i, j), middle, text, (via, target)))
                else:
                    steps.append(((i, j), part.text, text, (source, target)))
        links = self.align_sentences([step[1:3] for step in steps], [step[3] for step in steps])
        of_sentence: dict[tuple[int, int], list[Link]] = {}
        for (place, _, _, _), own_links in zip(steps, links, strict=True):
            of_sentence[place] = compose_links(of_sentence[place], own_links) if place in of_sentence else own_links
        made = []
        for i, own in enumerate(parts):
            _, begins = join_with_begins(own, [each.text for each in found[i]], is_spaced(directions[i]))
            offsets, at = [], 0
            for part in own:
                offsets.append(at + len(part.before))
                at = offsets[-1] + len(part.text)
            made.append(
                [link.shift(offsets[j], begins[j]) for j in range(len(own)) for link in of_sentence.get((i, j), [])]
            )
        return made

    # ---- sentences ---------------------------------------------------------------------------------------------------

    def translate_sentences(
        self,
        sentences: Sequence[str],
        *,
        to: str | None = None,
        force_words: Sequence[Sequence[str]] | None = None,
        no_repeat_ngram_size: int = 0,
        seeds: Sequence[int] | None = None,
        progress: Advance | None = None,
        **options: Unpack[TranslateOptions],
    ) -> list[Translation]:
        """Decode each sentence as it is, without what `translate` does for texts.

        `force_words` are, for each sentence, words that its translation must contain; with `no_repeat_ngram_size` no
        sequence of so many tokens occurs twice in a translation. `seeds` are the random seeds of the sentences; by default
        sentence i has the setting `seed` + i. The other arguments are those of `translate`."""
        if isinstance(sentences, str):
            raise TypeError("translate_sentences takes a list of strings, not a string: translate takes both")
        sentences = check_texts(sentences, "translate_sentences")
        check_string(to, "to")
        chosen = allow_unknown(decode_config(self.options, options), self.model, self.tokenizers)
        sources, languages = self.encode_sources(sentences, to)
        check_options(chosen)
        device = next(self.model.parameters()).device
        limit = self.model.config.max_len
        advance = progress or (lambda done: None)
        check_lengths(sources, limit, self.token_template, self.model)  # here, where sentences have their numbers
        constraints = self._output_constraints(sentences, languages, force_words, no_repeat_ngram_size)
        plain = [i for i in range(len(sources)) if i not in constraints]
        given = [sources[i] for i in plain]
        of_all = seeds if seeds is not None else range(chosen.seed, chosen.seed + len(sources))
        own_seeds = [of_all[i] for i in plain]
        how = candidate_options(chosen) if chosen.mbr else chosen
        decoded = self.decode(self.model, given, how, limit, device, advance, self.token_template, own_seeds)
        if chosen.mbr:
            texts = self.texts_of([sentences[i] for i in plain], given, decoded, chosen)
            decoded = [
                rank_by_risk(own, its_texts, chosen, languages[i])
                for i, own, its_texts in zip(plain, decoded, texts, strict=True)
            ]
        found = dict(zip(plain, decoded, strict=True))
        if constraints:
            found |= self._decode_constrained(sources, languages, constraints, chosen)
            advance(len(constraints))
        ranked = [found[i] for i in range(len(sources))]
        written = self.texts_of(sentences, sources, ranked, chosen)
        if chosen.replace_unknown != "none":
            samples = frozenset(plain if chosen.temperature and not chosen.mbr else ())
            found, written = without_repetitions(found, written, samples)
        translations = [  # an empty line stays empty, whatever the model makes of it
            self._translation(found[i], written[i]) if ids and text.strip() else copy_text("")
            for i, (text, ids) in enumerate(zip(sentences, sources, strict=True))
        ]
        return [self._with_languages(each, to) for each, to in zip(translations, languages, strict=True)]

    def _decode_constrained(
        self,
        sources: Sequence[list[int]],
        languages: Sequence[str],
        constraints: dict[int, OutputConstraints],
        chosen: DecodeConfig,
    ) -> dict[int, list[Hypothesis]]:
        """Return the hypotheses of the sentences that have constraints; those that need the same settings are decoded
        together."""
        device, limit = next(self.model.parameters()).device, self.model.config.max_len
        groups = defaultdict(list)
        for i, each in constraints.items():
            groups[bool(each.phrases), languages[i].startswith(UNSPACED)].append(i)
        found: dict[int, list[Hypothesis]] = {}
        for (is_forced, unspaced), own in groups.items():
            how = searching(chosen, beam=max(chosen.beam, chosen.nbest), repetition_penalty=1.0)
            if is_forced:
                beam = max(how.beam, CONSTRAINED_BEAM)
                how = replace(how, beam=beam, length_penalty=CONSTRAINED_LENGTH_PENALTY)
            given = [sources[i] for i in own], [constraints[i] for i in own]
            ends = None if unspaced else self._continues_word
            ranked = decode_constrained(self.model, *given, how, limit, device, self.token_template, ends)
            found |= dict(zip(own, ranked, strict=True))
        return found

    def _output_constraints(
        self,
        sentences: Sequence[str],
        languages: Sequence[str],
        force_words: Sequence[Sequence[str]] | None,
        no_repeat_ngram_size: int,
    ) -> dict[int, OutputConstraints]:
        """Return the constraints of sentences that have any.

        The translation of a sentence without a full stop inside has none before all required words, which would
        otherwise often follow it like a second sentence."""
        words = force_words or [()] * len(languages)
        made = {}
        for i, (own, to) in enumerate(zip(words, languages, strict=True)):
            if own or no_repeat_ngram_size:
                phrases = tuple(self._phrase(word, to) for word in own)
                is_one = not SENTENCE_PUNCTUATION.search(sentences[i].rstrip()[:-1])
                only_after = self._full_stops if own and is_one else frozenset()
                made[i] = OutputConstraints(phrases, only_after, no_repeat_ngram_size)
        return made

    def _phrase(self, words: str, language: str) -> Phrase:
        """Return words as the tokens that stand for them inside a sentence of this language and at its beginning.

        Words that the vocabulary cannot spell are refused: a search for `<unk>` would find nothing, or another word."""
        target = self.tokenizers.target
        before = "，" if language.startswith(UNSPACED) else "x "
        context, whole = (target.encode(text) for text in (before.strip(), before + words))
        begin = target.encode(capitalize_first(words))
        inside = whole[len(context) :] if whole[: len(context)] == context else begin
        if not inside or target.special.unk in inside:
            raise RegardError(
                f"the vocabulary of this model has no tokens for the required words {words!r}: take the term out of the "
                f"glossary, or write its translation in words that the model knows"
            )
        is_spelt = begin != inside and target.special.unk not in begin  # a capital letter may be missing
        return Phrase(tuple(inside), tuple(begin) if is_spelt else ())

    @cached_property
    def _full_stops(self) -> frozenset[int]:
        """The tokens of the target vocabulary that end a sentence."""
        pieces = self.tokenizers.target.pieces(range(len(self.tokenizers.target)))
        return frozenset(i for i, piece in enumerate(pieces) if SENTENCE_PUNCTUATION.search(piece))

    @cached_property
    def _continues_word(self) -> Tensor:
        """Which tokens of the target vocabulary continue the word before them, (V,)."""
        pieces = self.tokenizers.target.pieces(range(len(self.tokenizers.target)))
        spaced = any(piece.startswith(SPACE) for piece in pieces)  # else pieces inside a word begin with "##"
        continues = [
            bool(piece) and (piece[0].isalnum() or piece.startswith("\\x")) if spaced else piece.startswith("##")
            for piece in pieces
        ]
        return torch.tensor(continues, device=next(self.model.parameters()).device)

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

    def texts_of(
        self,
        sentences: Sequence[str],
        sources: Sequence[list[int]],
        ranked: Sequence[list[Hypothesis]],
        chosen: DecodeConfig,
    ) -> list[list[str]]:
        """Return the texts of the hypotheses of each sentence; unknown words are replaced where `chosen` says so."""
        places = [(i, h.tokens) for i, own in enumerate(ranked) for h in own]
        flat = [tokens for _, tokens in places]
        if chosen.replace_unknown == "none":
            texts = self.tokenizers.target.decode_batch(flat)
        else:
            given = [sentences[i] for i, _ in places], [sources[i] for i, _ in places]
            texts = replace_unknown(self.model, self.tokenizers, self.token_template, chosen, *given, flat)
        following = iter(texts)
        return [[next(following) for _ in own] for own in ranked]

    def _translation(self, hypotheses: list[Hypothesis], texts: list[str]) -> Translation:
        """Return the ranked hypotheses of a sentence, given their texts, as its translation.

        A search whose constraints leave no hypothesis gives an empty text that did not end, of confidence 0."""
        if not hypotheses:
            return Translation("", 0.0, 0.0, (), ended=False, confidence=0.0)
        target = self.tokenizers.target
        ranked = []
        for h, text in zip(hypotheses, texts, strict=True):
            tokens = tuple(target.pieces(h.tokens))
            value = token_probability(h.log_prob, len(h.tokens) + h.ended)
            ranked.append(Translation(text, h.score, h.log_prob, tokens, h.ended, confidence=value))
        return replace(ranked[0], nbest=tuple(ranked)) if len(ranked) > 1 else ranked[0]


# ---- directions and sentences ----------------------------------------------------------------------------------------


def is_spaced(direction: Direction) -> bool:
    """Return whether the target language has spaces between sentences."""
    return not direction.target.startswith(UNSPACED)


def without_repetitions(
    found: Mapping[int, list[Hypothesis]], texts: Sequence[list[str]], samples: Collection[int] = ()
) -> tuple[dict[int, list[Hypothesis]], list[list[str]]]:
    """Return the hypotheses of each sentence and their texts; of those that are one text only the first is kept.

    Hypotheses differ in their unknown words, which may be replaced by the same words of the source. All `samples`, the
    sentences whose hypotheses were sampled, are kept: equal ones are results too."""
    kept = [
        [*range(len(own))] if i in samples else [own.index(text) for text in dict.fromkeys(own)]
        for i, own in enumerate(texts)
    ]
    return (
        {i: [found[i][at] for at in places] for i, places in enumerate(kept)},
        [[own[at] for at in places] for own, places in zip(texts, kept, strict=True)],
    )


def match_casing(sentence: Sentence, translation: Translation) -> Translation:
    """Return a translation in capitals where its sentence was, and a copy of the sentence as that was written."""
    if sentence.is_upper_case:
        return map_text(translation, to_upper_case)
    if sentence.written and translation.text == sentence.text:
        return replace(translation, text=sentence.written)
    return translation


def sentence_offsets(parts: Sequence[Sentence]) -> list[tuple[int, str]]:
    """Return where each sentence of a text begins, and the sentence."""
    found, at = [], 0
    for part in parts:
        at += len(part.before)
        if not part.ends_line:
            found.append((at, part.text))
        at += len(part.text)
    return found


# ---- a function of the package ---------------------------------------------------------------------------------------


@overload
def translate(  # type: ignore[overload-overlap]  # a string is an iterable of strings too
    texts: str,
    to: str | None = None,
    source: str | None = None,
    *,
    model: str | Path | Sequence[str | Path] | None = None,
    device: str = "auto",
    weights: str = "auto",
    glossary: Glossary | Mapping[str, str] | None = None,
    alignment: bool = False,
    formality: Formality = "auto",
    **options: Unpack[TranslateOptions],
) -> Translation: ...
@overload
def translate(
    texts: Iterable[str],
    to: str | None = None,
    source: str | None = None,
    *,
    model: str | Path | Sequence[str | Path] | None = None,
    device: str = "auto",
    weights: str = "auto",
    glossary: Glossary | Mapping[str, str] | None = None,
    alignment: bool = False,
    formality: Formality = "auto",
    **options: Unpack[TranslateOptions],
) -> list[Translation]: ...
def translate(
    texts: str | Iterable[str],
    to: str | None = None,
    source: str | None = None,
    *,
    model: str | Path | Sequence[str | Path] | None = None,
    device: str = "auto",
    weights: str = "auto",
    glossary: Glossary | Mapping[str, str] | None = None,
    alignment: bool = False,
    formality: Formality = "auto",
    **options: Unpack[TranslateOptions],
) -> Translation | list[Translation]:
    """Translate with the bundled model, or with the model in the folder `model`; a list of folders is an ensemble.

    Examples:
        >>> import regard
        >>> print(regard.translate("Thank you very much.", to="fr"))
        Merci beaucoup.

    The bundled model is loaded once; for more than one call with another, use `Translator.load`. Arguments are those of
    `Translator.translate` and of `Translator.load`.
    """
    checked = texts if isinstance(texts, str) else check_texts(texts, "translate")
    translator = bundled_translator(device, weights) if model is None else Translator.load(model, device, weights)
    return translator.translate(
        checked, to, source, glossary=glossary, alignment=alignment, formality=formality, **options
    )


@lru_cache(maxsize=2)
def bundled_translator(device: str = "auto", weights: str = "auto") -> Translator:
    """Return the bundled model, whose weights stay quantized on a CPU."""
    if DEFAULT not in bundled_models():
        raise RegardError(
            "no model given: train one (`regard train toy-en-de`) and pass it with --model FOLDER (model=)"
        )
    on_cpu = pick_device(device).type == "cpu"
    return Translator.load(bundled_path(DEFAULT), device, "int8" if weights == "auto" and on_cpu else weights)
