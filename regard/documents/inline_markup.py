"""Inline markup of translations: atoms are restored, and spans are moved to the words that they belong to.

A span moves by word alignment: its range in the translation covers the target words whose links lead mostly to words of
the span. Words that are linked elsewhere may lie between them (separable verbs), but an outlier far away is left out. Atoms
stay in the span that they are in. Whatever the translation and the alignment are, nothing is lost, doubled or invented: a
translation with too few words for its spans is refused, and the segment stays in its source language.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from regard.documents.segment import Segment, Span, is_atom
from regard.text.alignment import Link

# Scripts that are written without spaces: Thai, Lao, Khmer, Burmese, kana and Han. Each character counts as a word.
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = rf"[^\W_{UNSPACED}](?:[^\W{UNSPACED}]|[\u0300-\u036f'’.,:·-](?=[^\W_{UNSPACED}]))*"
TOKEN = re.compile(rf"(?P<space>\s+)|(?P<word>[{UNSPACED}]|{WORD})|(?P<other>.)", re.S)
MAJORITY = 0.5  # share of its links with which a target word belongs to a span
GAP_COST = 0.3  # of a target word inside a span's range that is linked elsewhere
FOREIGN_ATOM_COST = 2.0  # of an atom inside a span's range that is outside of the span
NO_BREAK_SPACES = "\u00a0\u2007\u202f"
SPACED_PUNCTUATION = "!?:;»%"  # French puts a space before these


@dataclass(eq=False)
class Token:
    """A word, an atom, white space or a punctuation mark of a text."""

    kind: str  # word, atom, space or punctuation
    text: str
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.text)


@dataclass(eq=False)
class SpanNode:
    """A span of the source, those inside it, and where it lies in the source and in the translation."""

    span: Span | None  # None: the whole segment
    begin: int
    end: int
    children: list[SpanNode] = field(default_factory=list)
    words: tuple[int, int] = (0, 0)  # words of the source
    target: tuple[int, int] = (0, 0)  # tokens of the translation

    @property
    def demand(self) -> int:
        """The number of words that this span needs, so that each span in it has one of its own."""
        return max(1, sum(child.demand for child in self.children))


def finish_segment(source: Segment, translated: str, links: Sequence[Link]) -> Segment:
    """Return the translation of a segment with every atom and span of its source.

    `links` align characters of `source.text` and of `translated`. A translation without any word, or with too few words
    for the spans, is refused: the result is then `source` itself.
    """
    if translated == source.text:
        return source
    text, offsets = restore_atoms(source.text, translated)
    if not any(char.isalnum() for char in text):
        return source

    def moved(at: int) -> int:
        return offsets[max(0, min(at, len(translated)))]

    links = [Link(*link) for link in links]
    return move_spans(
        source, text, [x._replace(target_begin=moved(x.target_begin), target_end=moved(x.target_end)) for x in links]
    )


# ---- atoms -----------------------------------------------------------------------------------------------------------


def restore_atoms(source: str, translated: str) -> tuple[str, list[int]]:
    """Return the translation with each atom of the source exactly once, and the new offset of each of its characters.

    An atom that was not in the source, or is there a second time, is removed; one that is missing is inserted at the
    proportional place between the atoms around it. White space is normalized, and control characters are removed.
    """
    wanted = [char for char in source if is_atom(char)]
    text, offsets, seen = "", [], set()
    for char in translated:
        offsets.append(len(text))
        if is_atom(char):
            if char in wanted and char not in seen:
                seen.add(char)
                text += char
        elif char.isspace():
            is_breaking = char not in NO_BREAK_SPACES
            if is_breaking:
                text = text.rstrip(NO_BREAK_SPACES)
            if text and not text.endswith(" "):
                text += " " if is_breaking else char
        elif unicodedata.category(char) not in ("Cc", "Cs"):
            text += char
    offsets.append(len(text))
    text = text.rstrip(" " + NO_BREAK_SPACES)
    for atom in wanted:
        if atom not in seen:
            at, inserted = _place_for(atom, source, text)
            text = text[:at] + inserted + text[at:]
            offsets = [offset + len(inserted) if offset >= at else offset for offset in offsets]
            seen.add(atom)
    return text, [min(offset, len(text)) for offset in offsets]


def _place_for(atom: str, source: str, text: str) -> tuple[int, str]:
    """Return where in a translation a missing atom belongs, and the atom with the spaces that it needs there."""
    here = source.index(atom)
    left = next((i for i in range(here - 1, -1, -1) if is_atom(source[i]) and source[i] in text), -1)
    right = next((i for i in range(here + 1, len(source)) if is_atom(source[i]) and source[i] in text), len(source))
    low = text.index(source[left]) + 1 if left >= 0 else 0
    high = text.index(source[right]) if right < len(source) else len(text)
    if low > high:
        left, right, low, high = -1, len(source), 0, len(text)
    before, after = source[left + 1 : here], source[here + 1 : right]
    if right == len(source) and after.strip() and not any(char.isalnum() for char in after):
        at = len(text.rstrip("".join({char for char in text if not char.isalnum() and not is_atom(char)}) or " "))
        at = max(at, low)  # before the punctuation at the end
    else:
        wish = low + (high - low) * len(before) / max(1, len(before) + len(after))
        inner = {at for token in split_tokens(text) for at in range(token.begin + 1, token.end) if token.kind == "word"}
        at = min((i for i in range(low, high + 1) if i not in inner), key=lambda i: (abs(i - wish), i))
        if 0 < at < len(text) and text[at] == " ":  # as far from the space as the atom of the source
            at += source[here + 1 : here + 2] != " "
    begins = " " if at > 0 and text[at - 1].isalnum() and (not before or before[-1].isspace()) else ""
    ends = " " if at < len(text) and text[at].isalnum() and (not after or after[0].isspace()) else ""
    return at, begins + atom + ends


# ---- spans -----------------------------------------------------------------------------------------------------------


def move_spans(source: Segment, translated: str, alignment: Sequence[Link]) -> Segment:
    """Return the translation with the spans of `source` around the words that belong to them by the word alignment.

    Spans keep their nesting, never cross, and keep a word each; a span of the whole text stays one. Atoms are moved where
    they would change the span that they are in. Without a usable alignment spans are placed in proportion. Where the
    translation has fewer words than the spans need, the result is `source`.
    """
    if not source.spans:
        return Segment(translated)
    source_tokens, target_tokens = split_tokens(source.text), split_tokens(translated)
    source_words = [token for token in source_tokens if token.kind == "word"]
    target_words = [i for i, token in enumerate(target_tokens) if token.kind == "word"]
    root = _nest(source, source_words)
    if root.demand > len(target_words):
        return source
    weights = _word_weights(source_words, [target_tokens[i] for i in target_words], alignment, source.text, translated)
    atoms = {char: i for i, char in enumerate(source.text) if is_atom(char)}
    root.target = (0, len(target_tokens))
    _place_children(root, source_tokens, target_tokens, target_words, weights, atoms)
    return _assemble(root, source, target_tokens, atoms)


def split_tokens(text: str) -> list[Token]:
    """Return the words, atoms, punctuation marks and white space of a text in order; nothing is left out."""
    found = []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind == "other":
            kind = "atom" if is_atom(match[0]) else "punctuation"
        found.append(Token(kind, match[0], match.start()))
    return found


def _nest(source: Segment, words: list[Token]) -> SpanNode:
    """Return the tree of the spans of a segment."""
    root = SpanNode(None, 0, len(source.text), words=(0, len(words)))
    path = [root]
    for span in source.spans:
        while span.begin >= path[-1].end or span.end > path[-1].end:
            path.pop()
        inside = [i for i, word in enumerate(words) if word.begin < span.end and word.end > span.begin]
        node = SpanNode(span, span.begin, span.end, words=(inside[0], inside[-1] + 1) if inside else (0, 0))
        path[-1].children.append(node)
        path.append(node)
    return root


def _word_weights(
    source_words: list[Token], target_words: list[Token], alignment: Sequence[Link], source: str, target: str
) -> np.ndarray:
    """Return the weights of the links between words: (target words, source words)."""
    weights = np.zeros((len(target_words), len(source_words)))
    begins = [np.array([word.begin for word in words], dtype=int) for words in (source_words, target_words)]
    ends = [np.array([word.end for word in words], dtype=int) for words in (source_words, target_words)]
    for link in alignment:
        if not (math.isfinite(link[4]) and link[4] > 0):
            continue
        rows = (begins[1] < link[3]) & (ends[1] > link[2])
        columns = (begins[0] < link[1]) & (ends[0] > link[0])
        if rows.any() and columns.any():
            weights[np.ix_(rows, columns)] += min(link[4], 1e6) / (rows.sum() * columns.sum())
    return weights


def _place_children(
    parent: SpanNode,
    source_tokens: list[Token],
    tokens: list[Token],
    words: list[int],
    weights: np.ndarray,
    atoms: dict[str, int],
) -> None:
    """Set `target` of every span below `parent`, whose own target is known."""
    if not parent.children:
        return
    low = next(i for i, at in enumerate(words) if at >= parent.target[0])
    high = next((i for i, at in enumerate(words) if at >= parent.target[1]), len(words))
    ranges = _choose_ranges(parent, low, high, tokens, words, weights, atoms)
    placed = sorted(zip(ranges, parent.children, strict=True), key=lambda each: each[0])
    end = parent.target[0]
    for i, ((first, last), child) in enumerate(placed):
        if child.begin <= parent.begin and child.end >= parent.end:
            child.target = parent.target
        else:
            stop = words[placed[i + 1][0][0]] if i + 1 < len(placed) else parent.target[1]
            child.target = _with_punctuation(child, source_tokens, tokens, words[first], words[last - 1] + 1, end, stop)
        end = child.target[1]
        _place_children(child, source_tokens, tokens, words, weights, atoms)


def _choose_ranges(
    parent: SpanNode,
    low: int,
    high: int,
    tokens: list[Token],
    words: list[int],
    weights: np.ndarray,
    atoms: dict[str, int],
) -> list[tuple[int, int]]:
    """Return disjoint ranges of target words for the children of a span, within words `low` to `high`."""
    total = weights.sum(1)
    children = parent.children
    whole = [child.words == parent.words and len(children) == 1 for child in children]
    if any(whole):
        return [(low, high)]
    if not weights[low:high].any():
        return _in_proportion(parent, low, high)
    best: list[tuple[float, int, int, int]] = []  # score, child, range
    scores = []
    for number, child in enumerate(children):
        first, last = child.words
        inside = weights[:, first:last].sum(1)
        share = np.divide(inside, total, out=np.zeros_like(total), where=total > 0)
        score = np.where(share > MAJORITY, share, np.where(total > 0, -GAP_COST, -GAP_COST / 2))
        if not (share[low:high] > MAJORITY).any() and inside[low:high].any():
            score[low + int(inside[low:high].argmax())] = MAJORITY  # linked to other words too, but best to this one
        if not (score[low:high] > 0).any():  # no link at all: the proportional place
            n = parent.words[1] - parent.words[0]
            middle = (first + last) / 2 - parent.words[0]
            score[min(high - 1, low + int(middle / n * (high - low)))] = 0.1
        gaps = np.zeros(len(words) + 1)  # gaps[i]: cost of the atoms between words i - 1 and i
        for i in range(low + 1, high):
            for token in tokens[words[i - 1] + 1 : words[i]]:
                if token.kind == "atom" and token.text in atoms:
                    is_own = child.begin <= atoms[token.text] < child.end
                    gaps[i] += -0.5 if is_own else FOREIGN_ATOM_COST
        scores.append((score, gaps))
        value, begin, end = _best_range(score, gaps, low, high, child.demand)
        best.append((value, number, begin, end))
    found: dict[int, tuple[int, int]] = {}
    free = [(low, high)]
    for _, number, _, _ in sorted(best, key=lambda each: -each[0]):
        score, gaps = scores[number]
        options = [
            (*_best_range(score, gaps, begin, end, children[number].demand), (begin, end))
            for begin, end in free
            if end - begin >= children[number].demand
        ]
        if not options:
            return _in_proportion(parent, low, high)
        _, begin, end, stretch = max(options, key=lambda each: each[0])
        found[number] = (begin, end)
        free.remove(stretch)
        free += [rest for rest in ((stretch[0], begin), (end, stretch[1])) if rest[0] < rest[1]]
    return [found[number] for number in range(len(children))]


def _best_range(score: np.ndarray, gaps: np.ndarray, low: int, high: int, least: int) -> tuple[float, int, int]:
    """Return the range of at least `least` words within low to high with the largest sum of scores less gap costs."""
    n = high - low
    summed = np.concatenate([[0.0], np.cumsum(score[low:high])])
    crossed = np.concatenate([[0.0], np.cumsum(gaps[low + 1 : high + 1])])  # crossed[j]: gaps before word low + j
    begins, ends = np.arange(n)[:, None], np.arange(1, n + 1)[None, :]
    value = summed[ends] - summed[begins] - (crossed[ends - 1] - crossed[begins]) - 1e-6 * (ends - begins)
    value = np.where(ends - begins >= least, value, -np.inf)
    begin, end = np.unravel_index(int(value.argmax()), value.shape)
    return float(value[begin, end]), low + int(begin), low + int(end) + 1


def _in_proportion(parent: SpanNode, low: int, high: int) -> list[tuple[int, int]]:
    """Return ranges for the children in the order and at the proportional places of the source."""
    found, at = [], low
    first, n = parent.words[0], max(1, parent.words[1] - parent.words[0])
    for i, child in enumerate(parent.children):
        needed = sum(other.demand for other in parent.children[i + 1 :])
        wish = low + round((child.words[0] - first) / n * (high - low))
        begin = max(at, min(wish, high - needed - child.demand))
        length = round((child.words[1] - child.words[0]) / n * (high - low))
        at = max(begin + child.demand, min(begin + length, high - needed))
        found.append((begin, at))
    return found


def _with_punctuation(
    child: SpanNode, source_tokens: list[Token], tokens: list[Token], begin: int, end: int, low: int, high: int
) -> tuple[int, int]:
    """Extend a range of tokens over as many punctuation marks at its ends as the span of the source has there."""
    inside = [token for token in source_tokens if child.begin <= token.begin < child.end and token.kind != "space"]
    leading = next((i for i, token in enumerate(inside) if token.kind != "punctuation"), 0)
    trailing = next((i for i, token in enumerate(reversed(inside)) if token.kind != "punctuation"), 0)
    while leading and begin > low and tokens[begin - 1].kind == "punctuation":
        begin, leading = begin - 1, leading - 1
    while trailing and end < high:
        if tokens[end].kind == "punctuation":
            end, trailing = end + 1, trailing - 1
        elif tokens[end].kind == "space" and end + 1 < high and tokens[end + 1].text in SPACED_PUNCTUATION:
            end, trailing = end + 2, trailing - 1
        else:
            break
    return begin, end


def _assemble(root: SpanNode, source: Segment, tokens: list[Token], atoms: dict[str, int]) -> Segment:
    """Return the translation with its spans; atoms that are in the wrong span are moved to the edge of the right one."""
    nodes: list[SpanNode] = []

    def collect(node: SpanNode) -> None:
        nodes.append(node)
        for child in sorted(node.children, key=lambda each: each.target):
            collect(child)

    collect(root)
    owner_in_source = dict.fromkeys(atoms, root)
    for node in nodes[1:]:  # parents come before children
        owner_in_source.update({char: node for char, at in atoms.items() if node.begin <= at < node.end})
    before: dict[int, list[str]] = {}  # atoms moved to the beginning or the end of a span
    behind: dict[int, list[str]] = {}
    after: dict[int, list[str]] = {}  # atoms moved out of a span, to the place after it
    removed = set()
    for i, token in enumerate(tokens):
        if token.kind != "atom" or token.text not in atoms:
            continue
        path = [node for node in nodes if node.target[0] <= i < node.target[1]]
        owner = owner_in_source[token.text]
        if path[-1] is owner:
            continue
        removed.add(i)
        if owner in path:
            after.setdefault(id(path[path.index(owner) + 1]), []).append(token.text)
        elif i < owner.target[0]:
            before.setdefault(id(owner), []).append(token.text)
        else:
            behind.setdefault(id(owner), []).append(token.text)
    text = ""
    found: list[Span] = []

    def put(piece: str, is_moved: bool = False) -> None:
        nonlocal text
        if (is_moved and text and not text[-1].isspace()) or (
            text and piece[0].isalnum() and is_atom(text[-1]) and must_space
        ):
            text += " "
        text += piece if not (piece == " " and (not text or text.endswith(" "))) else ""

    must_space = False

    def write(node: SpanNode) -> None:
        nonlocal must_space
        place = len(found)
        begin = len(text)
        if node.span is not None:
            found.append(node.span)
        for atom in before.get(id(node), ()):
            put(atom, is_moved=True)
            must_space = True
        children = sorted(node.children, key=lambda each: each.target)
        i = node.target[0]
        while i < node.target[1]:
            if children and children[0].target[0] == i:
                child = children.pop(0)
                write(child)
                for atom in after.get(id(child), ()):
                    put(atom, is_moved=True)
                    must_space = True
                i = child.target[1]
                continue
            if i not in removed:
                put(tokens[i].text)
                must_space = False
            i += 1
        for atom in behind.get(id(node), ()):
            put(atom, is_moved=True)
            must_space = True
        if node.span is not None:
            inner = text[begin:]
            end = len(text) - (len(inner) - len(inner.rstrip()))
            found[place] = Span(begin + len(inner) - len(inner.lstrip()), end, node.span.index)

    write(root)
    return Segment(text.rstrip(" "), tuple(found))
