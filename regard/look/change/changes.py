"""What may be changed in a model, as data and as the command line writes it; `look.change.intervene` does it.

    parse("forbid", "decoder.*.cross:1,3@Apfel>apple")  # Forbid("decoder.*.cross", (1, 3), "Apfel", "apple")

A place is a position, or a word of the unchanged output or input, which `resolved` turns into the positions of its pieces.
In self-attention a word stands where it is read. In attention over the source a word of the output is the row that wrote
it: row 0 wrote the first token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from regard.errors import RegardError

Heads = tuple[int, ...] | None  # None: all
Places = int | tuple[int, ...] | str  # positions, or a word
Words = list[tuple[str, list[int]]]  # each word, and the positions of its pieces
CROSS = "*cross"  # every attention over a source: decoder.3.cross, and decoder.cross of a recurrent model


@dataclass(frozen=True)
class Zero:
    """These heads say nothing."""

    layers: str
    heads: Heads = None

    def __str__(self) -> str:
        return f"zero {self.layers}{spelled_heads(self.heads)}"


@dataclass(frozen=True)
class Mean:
    """These heads look alike at all that they may see."""

    layers: str
    heads: Heads = None

    def __str__(self) -> str:
        return f"mean {self.layers}{spelled_heads(self.heads)}"


@dataclass(frozen=True)
class Forbid:
    """The query does not see the key, and looks at the others as it would without it."""

    layers: str
    heads: Heads
    query: Places
    key: Places

    def __str__(self) -> str:
        pair = f"{spelled(self.query)}>{spelled(self.key)}"
        return f"{type(self).__name__.lower()} {self.layers}{spelled_heads(self.heads)}@{pair}"


@dataclass(frozen=True)
class Force(Forbid):
    """The query sees the key alone; of several keys, those. Nothing happens where the key is hidden from it."""


@dataclass(frozen=True)
class Pin:
    """Force in all attention over the source."""

    query: Places
    key: Places

    def __str__(self) -> str:
        return f"pin {spelled(self.query)}>{spelled(self.key)}"


@dataclass(frozen=True)
class Replace:
    """Other tokens in the source, or in the output, which then goes on from there."""

    strip: str  # source (of a language model: its prompt) or target
    place: Places
    text: str

    def __str__(self) -> str:
        return f"replace {self.strip}:{spelled(self.place)}={self.text}"


@dataclass(frozen=True)
class Positions:
    """Another scheme in the whole model: none, or one that has nothing to learn."""

    name: str

    def __str__(self) -> str:
        return f"positions {self.name}"


Change = Zero | Mean | Forbid | Force | Pin | Replace | Positions
Paired = TypeVar("Paired", Forbid, Pin)


# ---- words to changes -------------------------------------------------------------------------------------------------

LAYERS = re.compile(r"([\w.*?!\[\]-]+)(?::(\d+(?:,\d+)*))?")
PAIR = re.compile(r'("[^"]*"|<[^<>]*>|[^>"]+)>("[^"]*"|<[^<>]*>|[^>"]+)')
OTHER = re.compile(r'(source|target):("[^"]*"|[^="]+)=(.*)', re.DOTALL)
FORMS = {
    "zero": "LAYER[:HEAD,HEAD], such as decoder.2.cross:3",
    "mean": "LAYER[:HEAD,HEAD], such as decoder.2.cross:3",
    "force": "[LAYER[:HEADS]@]QUERY>KEY, such as decoder.2.cross:3@4>1 or Apfel>apple",
    "forbid": "[LAYER[:HEADS]@]QUERY>KEY, such as decoder.2.cross:3@4>1 or Apfel>apple",
    "pin": "QUERY>KEY, such as Apfel>apple or 4>1",
    "replace": "source:PLACE=TEXT or target:PLACE=TEXT, such as source:3=dog",
    "positions": "the name of a scheme: none, sinusoidal, rope, yarn or alibi",
}


def parse(kind: str, text: str) -> Change:
    """`--KIND TEXT` of the command line."""
    if kind not in FORMS:
        raise RegardError(f"there is no change '{kind}': choose one of {', '.join(FORMS)}")
    if kind == "positions" and text.strip():
        return Positions(text.strip())
    if kind == "replace" and (found := OTHER.fullmatch(text)):
        return Replace(found[1], place(found[2]), found[3])
    if kind == "pin" and (found := PAIR.fullmatch(text)):
        return Pin(place(found[1]), place(found[2]))
    if kind in ("zero", "mean") and (found := LAYERS.fullmatch(text)):
        return (Zero if kind == "zero" else Mean)(found[1], heads_of(found[2]))
    if kind in ("force", "forbid"):
        layers, heads, pair = layered(text)
        if found := PAIR.fullmatch(pair):
            return (Force if kind == "force" else Forbid)(layers, heads, place(found[1]), place(found[2]))
    raise RegardError(f"--{kind} '{text}' is not understood: write {FORMS[kind]}")


def layered(text: str) -> tuple[str, Heads, str]:
    """Layers, heads and the rest of LAYER:HEADS@REST; without a layer all attention over the source. A layer's name or
    pattern has a dot or a star in it, so that words may have an @."""
    before, at, rest = text.partition("@")
    found = LAYERS.fullmatch(before)
    if at and found and ("." in found[1] or "*" in found[1]):
        return found[1], heads_of(found[2]), rest
    return CROSS, None, text


def heads_of(text: str | None) -> Heads:
    return tuple(int(head) for head in text.split(",")) if text else None


def place(text: str) -> Places:
    """A number, several, or a word; a word that is a number stands in quotes."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    if re.fullmatch(r"\d+(,\d+)+", text):
        return tuple(int(part) for part in text.split(","))
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def spelled(places: Places) -> str:
    if isinstance(places, str):
        plain = place(places) == places and re.fullmatch(r"<[^<>]*>|[^>=\"]+", places)
        return places if plain else f'"{places}"'
    return ",".join(map(str, positions(places)))


def spelled_heads(heads: Heads) -> str:
    return "" if heads is None else ":" + ",".join(map(str, heads))


def positions(places: Places) -> tuple[int, ...]:
    if isinstance(places, str):
        raise RegardError(f"'{places}' is a word: `resolved` turns words into the positions of their pieces")
    found = (places,) if isinstance(places, int) else places
    if not found or min(found) < 0:
        raise RegardError(f"places are counted from 0, and {places} is none")
    return found


# ---- words to positions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strips:
    """What a model read and wrote, unchanged, word by word. In the target the tokens that begin it stand first, and the end
    token last; of a language model it is the prompt and what was written."""

    source: Words
    target: Words


def resolved(changes: Iterable[Change], strips: Strips, names: Iterable[str]) -> list[Change]:
    """The same with positions in the place of words, for a model whose attention layers have these names."""
    layers = list(names)
    return [_resolved(change, strips, layers) for change in changes]


def _resolved(change: Change, strips: Strips, names: Sequence[str]) -> Change:
    if isinstance(change, Replace):
        words = strips.target if change.strip == "target" else strips.source
        return replace(change, place=found(change.place, words, change.strip))
    if isinstance(change, (Pin, Forbid)):
        kinds = sorted({kind_of(name) for name in names if fnmatchcase(name, layers_of(change))})
        if not kinds:
            raise RegardError(nowhere(change, names))
        if isinstance(change, Pin):
            return _paired(change, "cross", strips)
        if len(kinds) > 1 and (isinstance(change.query, str) or isinstance(change.key, str)):
            raise RegardError(f"'{change}' is about layers of several kinds ({', '.join(kinds)}): name those of one")
        return _paired(change, kinds[0], strips) if len(kinds) == 1 else change
    return change


def layers_of(change: Pin | Forbid) -> str:
    return CROSS if isinstance(change, Pin) else change.layers


def nowhere(change: Pin | Forbid, names: Sequence[str]) -> str:
    """What to say of a change that is about no layer of a model."""
    if layers_of(change) != CROSS or not names:
        there_are = ", ".join(names) or "none"
        return f"no attention layer is called '{layers_of(change)}': the layers of this model are {there_are}"
    word = "force" if isinstance(change, Pin) else type(change).__name__.lower()
    pair = f"{spelled(change.query)}>{spelled(change.key)}"
    layer = f"{names[0].split('.')[0]}.*.{names[0].split('.')[-1]}"
    return f"'{change}': this model has no attention over a source: name a layer, --{word} '{layer}@{pair}'"


def _paired(change: Paired, kind: str, strips: Strips) -> Paired:
    if kind == "encoder":
        query, key = (found(side, strips.source, "input") for side in (change.query, change.key))
    elif kind == "decoder":
        query, key = (found(side, strips.target, "text") for side in (change.query, change.key))
        if isinstance(change, Force) and min(positions(key)) > max(positions(query)):
            raise RegardError(f"'{change}': that key comes later than the query, which cannot see it")
    else:
        written = [(word, [place - 1 for place in places if place > 0]) for word, places in strips.target]
        query, key = found(change.query, written, "output"), found(change.key, strips.source, "input")
    return replace(change, query=query, key=key)


def kind_of(layer: str) -> str:
    """encoder, decoder or cross"""
    parts = layer.split(".")
    return "cross" if parts[-1] == "cross" else "encoder" if "encoder" in parts else "decoder"


def found(places: Places, words: Words, what: str) -> Places:
    """The positions of a word; of positions, whether they are there."""
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


# ---- other tokens -----------------------------------------------------------------------------------------------------

Encode = Callable[[str], list[int]]


def other_source(changes: Sequence[Change], ids: Sequence[int], encode: Encode) -> list[int]:
    """The ids that a model reads, with all that `Replace` puts in their place."""
    return with_others([c for c in changes if isinstance(c, Replace) and c.strip == "source"], ids, encode)


def forced_target(changes: Sequence[Change], ids: Sequence[int], encode: Encode) -> list[int]:
    """What a decoder is made to have read before it goes on by itself: the ids `Replace` puts into its own, and all before
    them; without such a change nothing."""
    others = [c for c in changes if isinstance(c, Replace) and c.strip == "target"]
    end = max((max(positions(c.place)) + 1 for c in others), default=0)
    return with_others(others, ids[:end], encode)


def with_others(changes: Sequence[Replace], ids: Sequence[int], encode: Encode) -> list[int]:
    result = list(ids)
    for change in sorted(changes, key=lambda c: -min(positions(c.place))):  # from the end, so that places stay
        places = positions(change.place)
        result[min(places) : max(places) + 1] = encode(change.text)
    return result
