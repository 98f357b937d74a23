"""From which language to which each of several texts goes.

They are looked at together first: a heading or a name says little by itself, so it is taken to be in the language of most
others, and in one that can be translated as asked, unless it clearly is not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from regard.errors import RegardError
from regard.text.language_identification import LETTERS, Profiles, scores, script, strange
from regard.text.placeholders import KEPT, MACHINE, translatable

CLEAR = 20.0  # e^20 times likelier: 24 sentences of 25 are that in their own language, and a heading in 400 in another


@dataclass(frozen=True)
class Direction:
    source: str  # empty: there is nothing to translate
    target: str
    note: str = ""  # why it may be the wrong one

    @property
    def pair(self) -> tuple[str, str]:
        return self.source, self.target


class DirectionDetector:
    """Those of a model."""

    def __init__(self, directions: Sequence[str], profiles: Profiles) -> None:
        self.directions, self.profiles = directions, profiles
        self.sources, self.targets = (
            list(dict.fromkeys(direction.split(">")[side] for direction in directions)) for side in (0, 1)
        )

    def of(self, texts: Sequence[str], to: str | None, source: str | None) -> list[Direction]:
        """One for each text; refused is what the model does not translate."""
        to = to and self.named("to", to, self.targets)
        source = source and self.named("from", source, self.sources)
        if source or len(self.sources) == 1:
            found = [Direction(source or self.sources[0], to or self.usual(source or self.sources[0]))] * len(texts)
        else:
            evidence = [self.evidence(text) for text in texts]
            common = clear_ones(evidence) or {self.likeliest(total(evidence), to, {}): 1.0}
            found = [self.found(text, own, to, common) for text, own in zip(texts, evidence, strict=True)]
        for number, (text, route) in enumerate(zip(texts, found, strict=True), 1):
            if route.source and f"{route.source}>{route.target}" not in self.directions:
                raise RegardError(
                    f"{f'line {number}: ' if len(texts) > 1 else ''}this model does not translate from {route.source} to "
                    f"{route.target}: it knows {', '.join(self.directions)}"
                    + ("" if source else f" (say --from LANG if this is not {route.source}: {text[:60]!r})")
                )
        return found

    def named(self, side: str, code: str, known: list[str]) -> str:
        """The language that is meant, however its code is written."""
        for name in known:
            if name.lower() == code.lower():
                return name
        raise RegardError(f"this model does not translate {side} {code}: it knows {', '.join(self.directions)}")

    def usual(self, source: str) -> str:
        """German for English, else English, else whatever comes first."""
        targets = [direction.split(">")[1] for direction in self.directions if direction.split(">")[0] == source]
        first = "de" if source == "en" else "en"
        return first if first in targets or not targets else targets[0]

    # ---- found out ---------------------------------------------------------------------------------------------------

    def evidence(self, text: str) -> dict[str, float]:
        """How likely each language is. Empty: there is nothing that the model could read."""
        if not translatable(text):
            return {}
        if not self.profiles:
            raise RegardError("this model cannot tell languages apart (no languages.json): say --from LANG (source=)")
        found = scores(MACHINE.sub(" ", text), self.profiles)
        return {} if "zh" in found and "zh" not in self.sources else found

    def likeliest(self, evidence: dict[str, float], to: str | None, common: dict[str, float]) -> str:
        """The language with most evidence; to be common is some, and to be translated as asked."""

        def weight(name: str) -> float:
            return evidence[name] + CLEAR * (common.get(name, 0.0) + (f"{name}>{to}" in self.directions))

        return max(evidence, key=weight, default="")

    def found(self, text: str, evidence: dict[str, float], to: str | None, common: dict[str, float]) -> Direction:
        if not evidence:
            words = LETTERS.search(MACHINE.sub(" ", text))
            return Direction("", to or "", f"left as it is, being in none of {self.known()}" if words else "")
        if "zh" in evidence:
            simple, traditional = script(text)
            source, note = "zh-Hant" if traditional > simple and "zh-Hant" in self.sources else "zh", ""
        else:
            source, note = self.likeliest(evidence, to, common), ""
            if strange(KEPT.sub(" ", text), self.profiles):
                note = f"taken for {source}, but probably in none of {self.known()}"
        return Direction(source, to or self.usual(source), note)

    def known(self) -> str:
        return ", ".join(dict.fromkeys([*self.profiles, *self.sources]))


def clear_ones(evidence: Sequence[dict[str, float]]) -> dict[str, float]:
    """How common each language is among texts that leave no doubt, beside the one that is most common."""
    counts: Counter[str] = Counter()
    for own in evidence:
        first, *others = sorted(own, key=own.__getitem__, reverse=True) or [""]
        if others and own[first] - own[others[0]] >= CLEAR:
            counts[first] += 1
    return {name: count / max(counts.values()) for name, count in counts.items()}


def total(evidence: Sequence[dict[str, float]]) -> dict[str, float]:
    """That of all texts together, Chinese left out, which is told by its script."""
    added: dict[str, float] = defaultdict(float)
    for own in evidence:
        for name, value in own.items():
            if name != "zh":
                added[name] += value
    return added
