"""Interventions as data, and as the command line writes them; look/intervention_hooks.py applies them to a model.

    parse("forbid", "decoder.*.cross:1,3@Apfel>apple")  # Forbid("decoder.*.cross", (1, 3), "Apfel", "apple")

A place is a position, or a word of the unchanged output or input, which `resolve_words` turns into the positions of its
pieces. In self-attention the position of a word is where it is read. In cross-attention a word of the output stands for
the row that predicted it: row 0 predicted the first token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from regard.errors import RegardError
from regard.text.alignment import Words

Heads = tuple[int, ...] | None  # None: all
LAYER_KINDS = ("encoder", "decoder", "cross")
Places = int | tuple[int, ...] | str  # positions, or a word
CROSS = "*cross"  # all cross-attention: decoder.3.cross, and decoder.cross of a recurrent model


@dataclass(frozen=True)
class Zero:
    """Head ablation: heads whose output is zero."""

    layers: str
    heads: Heads = None

    def __str__(self) -> str:
        return f"zero {self.layers}{format_heads(self.heads)}"


@dataclass(frozen=True)
class Uniform:
    """Heads whose weights are uniform over all visible keys."""

    layers: str
    heads: Heads = None

    def __str__(self) -> str:
        return f"uniform {self.layers}{format_heads(self.heads)}"


@dataclass(frozen=True)
class Forbid:
    """A key that is masked for a query; the other weights are the softmax without it."""

    layers: str
    heads: Heads
    query: Places
    key: Places

    def __str__(self) -> str:
        pair = f"{format_places(self.query)}>{format_places(self.key)}"
        return f"{type(self).__name__.lower()} {self.layers}{format_heads(self.heads)}@{pair}"


@dataclass(frozen=True)
class Force(Forbid):
    """A key, or several, that are the only ones visible to a query; no effect where they are masked anyway."""


@dataclass(frozen=True)
class Pin:
    """Force in all cross-attention."""

    query: Places
    key: Places

    def __str__(self) -> str:
        return f"pin {format_places(self.query)}>{format_places(self.key)}"


@dataclass(frozen=True)
class Replace:
    """Other tokens in the source, or in the output, which is then continued from there."""

    side: str  # source (the prompt of a language model) or target
    place: Places
    text: str

    def __str__(self) -> str:
        return f"replace {self.side}:{format_places(self.place)}={self.text}"


@dataclass(frozen=True)
class ReplacePositions:
    """Another position scheme in the whole model: none, or one without parameters."""

    name: str

    def __str__(self) -> str:
        return f"positions {self.name}"


Intervention = Zero | Uniform | Forbid | Force | Pin | Replace | ReplacePositions
Paired = TypeVar("Paired", Forbid, Pin)


# ---- parsing ----------------------------------------------------------------------------------------------------------

LAYERS = re.compile(r"([\w.*?!\[\]-]+)(?::(\d+(?:,\d+)*))?")
PAIR = re.compile(r'("[^"]*"|<[^<>]*>|[^>"]+)>("[^"]*"|<[^<>]*>|[^>"]+)')
OTHER = re.compile(r'(source|target):("[^"]*"|[^="]+)=(.*)', re.DOTALL)
FORMS = {
    "zero": "LAYER[:HEAD,HEAD], such as decoder.2.cross:3",
    "uniform": "LAYER[:HEAD,HEAD], such as decoder.2.cross:3",
    "force": "[LAYER[:HEADS]@]QUERY>KEY, such as decoder.2.cross:3@4>1 or Apfel>apple",
    "forbid": "[LAYER[:HEADS]@]QUERY>KEY, such as decoder.2.cross:3@4>1 or Apfel>apple",
    "pin": "QUERY>KEY, such as Apfel>apple or 4>1",
    "replace": "source:PLACE=TEXT or target:PLACE=TEXT, such as source:3=dog",
    "positions": "the name of a scheme: none, sinusoidal, rope, yarn or alibi",
}


def parse(kind: str, text: str) -> Intervention:
    """Return the intervention that `--KIND TEXT` of the command line asks for."""
    if kind not in FORMS:
        raise RegardError(f"there is no change '{kind}': choose one of {', '.join(FORMS)}")
    if kind == "positions" and text.strip():
        return ReplacePositions(text.strip())
    if kind == "replace" and (found := OTHER.fullmatch(text)):
        return Replace(found[1], parse_place(found[2]), found[3])
    if kind == "pin" and (found := PAIR.fullmatch(text)):
        return Pin(parse_place(found[1]), parse_place(found[2]))
    if kind in ("zero", "uniform") and (found := LAYERS.fullmatch(text)):
        return (Zero if kind == "zero" else Uniform)(found[1], parse_heads(found[2]))
    if kind in ("force", "forbid"):
        layers, heads, pair = split_layers(text)
        if found := PAIR.fullmatch(pair):
            return (Force if kind == "force" else Forbid)(layers, heads, parse_place(found[1]), parse_place(found[2]))
    raise RegardError(f"--{kind} '{text}' is not understood: write {FORMS[kind]}")


def split_layers(text: str) -> tuple[str, Heads, str]:
    """Split LAYER:HEADS@REST into layers, heads and the rest; without a layer it means all cross-attention.

    The name or pattern of a layer has a dot or a star in it, so words may contain an @."""
    before, at, rest = text.partition("@")
    found = LAYERS.fullmatch(before)
    if at and found and ("." in found[1] or "*" in found[1]):
        return found[1], parse_heads(found[2]), rest
    return CROSS, None, text


def parse_heads(text: str | None) -> Heads:
    return tuple(int(head) for head in text.split(",")) if text else None


def parse_place(text: str) -> Places:
    """Return a position, several, or a word; a word that is a number is written in quotes."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    if re.fullmatch(r"\d+(,\d+)+", text):
        return tuple(int(part) for part in text.split(","))
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def format_places(places: Places) -> str:
    if isinstance(places, str):
        plain = parse_place(places) == places and re.fullmatch(r"<[^<>]*>|[^>=\"]+", places)
        return places if plain else f'"{places}"'
    return ",".join(map(str, positions(places)))


def format_heads(heads: Heads) -> str:
    return "" if heads is None else ":" + ",".join(map(str, heads))


def positions(places: Places) -> tuple[int, ...]:
    """Return places as positions; a word is an error."""
    if isinstance(places, str):
        raise RegardError(f"'{places}' is a word: `resolve_words` turns words into the positions of their pieces")
    found = (places,) if isinstance(places, int) else places
    if not found or min(found) < 0:
        raise RegardError(f"places are counted from 0, and {places} is none")
    return found


# ---- words to positions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputAndOutput:
    """The words of the unchanged input and output of a model, with the positions of their pieces.

    The target begins with the start tokens and ends with the end token; that of a language model is the prompt and its
    continuation."""

    source: Words
    target: Words


def resolve_words(changes: Iterable[Intervention], texts: InputAndOutput, names: Iterable[str]) -> list[Intervention]:
    """Return interventions with positions in place of words, for a model whose attention layers have these names."""
    layers = list(names)
    return [_resolve(change, texts, layers) for change in changes]


def _resolve(change: Intervention, texts: InputAndOutput, names: Sequence[str]) -> Intervention:
    if isinstance(change, Replace):
        words = texts.target if change.side == "target" else texts.source
        return replace(change, place=find_places(change.place, words, change.side))
    if isinstance(change, (Pin, Forbid)):
        kinds = sorted({layer_kind(name) for name in names if fnmatchcase(name, pattern_of(change))})
        if not kinds:
            raise RegardError(no_layer_message(change, names))
        if isinstance(change, Pin):
            return _resolve_pair(change, "cross", texts)
        if len(kinds) > 1 and (isinstance(change.query, str) or isinstance(change.key, str)):
            raise RegardError(f"'{change}' is about layers of several kinds ({', '.join(kinds)}): name those of one")
        return _resolve_pair(change, kinds[0], texts) if len(kinds) == 1 else change
    return change


def pattern_of(change: Pin | Forbid) -> str:
    return CROSS if isinstance(change, Pin) else change.layers


def no_layer_message(change: Pin | Forbid, names: Sequence[str]) -> str:
    """Return the error message for an intervention that concerns no layer of a model."""
    if pattern_of(change) != CROSS or not names:
        there_are = ", ".join(names) or "none"
        return f"no attention layer is called '{pattern_of(change)}': the layers of this model are {there_are}"
    word = "force" if isinstance(change, Pin) else type(change).__name__.lower()
    pair = f"{format_places(change.query)}>{format_places(change.key)}"
    layer = f"{names[0].split('.')[0]}.*.{names[0].split('.')[-1]}"
    return f"'{change}': this model has no attention over a source: name a layer, --{word} '{layer}@{pair}'"


def _resolve_pair(change: Paired, kind: str, texts: InputAndOutput) -> Paired:
    if kind == "encoder":
        query, key = (find_places(side, texts.source, "input") for side in (change.query, change.key))
    elif kind == "decoder":
        query, key = (find_places(side, texts.target, "text") for side in (change.query, change.key))
        if isinstance(change, Force) and min(positions(key)) > max(positions(query)):
            raise RegardError(f"'{change}': that key comes later than the query, which cannot see it")
    else:
        written = [(word, [place - 1 for place in places if place > 0]) for word, places in texts.target]
        query, key = find_places(change.query, written, "output"), find_places(change.key, texts.source, "input")
    return replace(change, query=query, key=key)


def layer_kind(layer: str) -> str:
    """Return the kind of an attention layer by its name: encoder, decoder or cross."""
    parts = layer.split(".")
    return "cross" if parts[-1] == "cross" else "encoder" if "encoder" in parts else "decoder"


def find_places(places: Places, words: Words, what: str) -> Places:
    """Return the positions of a word, or the given positions if the text has them."""
    there = [place for _, own in words for place in own]
    if not isinstance(places, str):
        if missing := [place for place in positions(places) if place not in there]:
            last = max(there, default=-1)
            raise RegardError(f"the {what} has no place {missing[0]}: its places are 0 to {last}")
        return places
    standing = [own for word, own in words if word == places and own]
    standing = standing or [own for word, own in words if word.casefold() == places.casefold() and own]
    if not standing:
        known = " ".join(word for word, own in words if own)
        raise RegardError(f"'{places}' is no word of the {what}, which is: {known}")
    if len(standing) > 1:
        several = " and ".join(",".join(map(str, own)) for own in standing)
        raise RegardError(f"'{places}' stands more than once in the {what}: name a place, {several}")
    return standing[0][0] if len(standing[0]) == 1 else tuple(standing[0])


# ---- replaced tokens --------------------------------------------------------------------------------------------------

Encode = Callable[[str], list[int]]


def replace_in_source(changes: Sequence[Intervention], ids: Sequence[int], encode: Encode) -> list[int]:
    """Return the source ids of a model with the tokens that `Replace` puts into them."""
    return replace_tokens([c for c in changes if isinstance(c, Replace) and c.side == "source"], ids, encode)


def forced_prefix(changes: Sequence[Intervention], ids: Sequence[int], encode: Encode) -> list[int]:
    """Return the ids that a decoder is forced to begin with: its own up to the last that `Replace` puts into the target.

    Without such an intervention there are none."""
    others = [c for c in changes if isinstance(c, Replace) and c.side == "target"]
    end = max((max(positions(c.place)) + 1 for c in others), default=0)
    return replace_tokens(others, ids[:end], encode)


def replace_tokens(changes: Sequence[Replace], ids: Sequence[int], encode: Encode) -> list[int]:
    """Return the ids with other tokens in the places of these replacements."""
    result = list(ids)
    for change in sorted(changes, key=lambda c: -min(positions(c.place))):  # from the end, so that places stay valid
        places = positions(change.place)
        result[min(places) : max(places) + 1] = encode(change.text)
    return result
