"""Arguments of what `regard.load` returns: texts and options of decoding, with errors for those of a wrong type."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal, TypedDict, get_args, get_origin

from regard.config import DecodeConfig
from regard.config.recipes import build, type_hints
from regard.text.glossary import Glossary

Formality = Literal["auto", "formal", "familiar"]  # how a translation addresses people


class TranslateOptions(TypedDict, total=False):
    """Keyword arguments of `Translator.translate`: settings of `[decode]` for one call. None keeps the model's own."""

    beam: int | None  # beam width; 1 = greedy
    nbest: int | None  # number of translations of each text
    length_penalty: float | None  # exponent a in log p(y) / |y|^a
    length_norm: Literal["power", "gnmt"] | None  # |y|^a, or ((5 + |y|) / 6)^a
    coverage_penalty: float | None  # weight of the attention that source tokens lack
    prune: float | None  # drop hypotheses whose log p is this much below the best of their length
    min_len: int | None  # least number of tokens
    max_len_a: float | None  # at most a * source length + b tokens
    max_len_b: int | None
    beam_stop: Literal["likely", "proven"] | None  # early stopping of beam search
    temperature: float | None  # above 0: sample instead of searching
    top_k: int | None  # sample among the k likeliest tokens
    top_p: float | None  # sample among the likeliest tokens that hold this probability
    min_p: float | None  # sample among tokens with this share of the top probability
    epsilon: float | None  # sample among tokens with this probability
    repetition_penalty: float | None  # above 1: penalize tokens that are already there
    seed: int | None  # random seed for sampling
    mbr: int | None  # number of candidates of minimum-Bayes-risk decoding
    mbr_metric: Literal["chrf", "bleu", "gleu"] | None  # how two candidates are compared
    mbr_candidates: Literal["epsilon", "ancestral", "beam"] | None  # where they are from
    ensemble: Literal["mean", "log"] | None  # how the probabilities of several models are averaged
    batch_tokens: int | None  # padded source tokens x beam decoded at a time
    replace_unknown: Literal["none", "copy"] | None  # what stands for words that the vocabulary lacks
    unknown_dictionary: str | None  # a file of translations for these words


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `Generator.generate`: settings of `[decode]` for one call. None keeps the model's own."""

    n: int | None  # number of samples of each prompt
    stop: str | list[str] | tuple[str, ...] | None  # the text ends before the first of these strings
    temperature: float | None  # 0 = greedy decoding
    top_k: int | None
    top_p: float | None
    min_p: float | None
    epsilon: float | None
    repetition_penalty: float | None
    max_new_tokens: int | None
    min_len: int | None  # least number of new tokens
    seed: int | None
    batch_tokens: int | None


def decode_config(own: DecodeConfig, options: Mapping[str, Any]) -> DecodeConfig:
    """Return a model's own decode settings, changed by options; None changes nothing.

    An unknown name or a value of the wrong type is a TypeError, a value out of range a RegardError.
    """
    hints = type_hints(DecodeConfig)
    for name, value in options.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            raise TypeError(f"unexpected keyword argument '{name}'" + (f": did you mean '{near[0]}'?" if near else ""))
        if value is not None and not has_type(value, hints[name]):
            raise TypeError(f"{name} must be {type_name(hints[name])}, not {value!r} ({type(value).__name__})")
    given = {name: value for name, value in options.items() if value is not None}
    if "beam" not in given and given.get("nbest", 0) > own.beam:
        given["beam"] = given["nbest"]  # as many hypotheses as are asked for
    return build({**asdict(own), **given}, DecodeConfig, "decode.")


def has_type(value: Any, hint: Any) -> bool:
    """Return whether a value is of the declared type of a setting; whole numbers are numbers too, truth values are not."""
    if get_origin(hint) is tuple:
        return isinstance(value, (list, tuple)) and all(has_type(item, get_args(hint)[0]) for item in value)
    kinds: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
    return isinstance(value, kinds.get(hint, hint)) and (hint is bool or not isinstance(value, bool))


def type_name(hint: Any) -> str:
    """Return the declared type of a setting in words."""
    if get_origin(hint) is tuple:
        return "a list of strings"
    return {int: "a whole number", float: "a number", str: "a string"}[hint]


def check_string(value: Any, name: str) -> None:
    """Raise a TypeError if an argument is neither a string nor None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} takes a string, not {value!r} ({type(value).__name__})")


def check_formality(value: Any) -> None:
    """Raise a TypeError if an argument is no form of address."""
    if value not in get_args(Formality):
        raise TypeError(f"formality is one of {', '.join(get_args(Formality))}, not {value!r}")


def check_glossary(value: Any) -> Glossary | None:
    """Return a glossary, also for a mapping of terms to translations; anything else is a TypeError."""
    if value is None or isinstance(value, Glossary):
        return value
    if isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair):
        return Glossary(value)
    raise TypeError(f"glossary takes a Glossary (Glossary.load(FILE)) or a dict of strings, not {type(value).__name__}")


def check_texts(texts: Any, method: str, what: str = "strings") -> list[str]:
    """Return texts as a list; anything but strings is a TypeError that says which item it is."""
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
        raise TypeError(f"{method} takes a string or a list of {what}, not {type(texts).__name__}")
    found = list(texts)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise TypeError(f"{method} takes a string or a list of {what}, but item {i} is a {type(text).__name__}")
    return found
