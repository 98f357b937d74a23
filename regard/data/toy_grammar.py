"""The grammar of the toy corpus: phrases, clauses and sentences that can be written in English and in German.

A sentence is built once, as a structure, and rendered in both languages. What makes the German side hard to learn:

- determiners and adjectives agree with the noun in gender, number and case (`ENDINGS`);
- the past is the perfect, with *haben* or *sein* and the participle at the end;
- the finite verb is second in a main clause, first in a question or after a clause, last after *weil* and the like;
- between finite verb and end: pronouns and names, time, recipient, definite object, *nicht*, free place, indefinite
  object, place the verb needs, predicate; an indefinite object is negated by *kein*.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from regard.data.toy_lexicon import BE, CASES, POSSESSIVES, Adjective, Noun, Preposition, Pronoun, Time, Verb


def _table(*rows: str) -> dict[tuple[str, str], str]:
    """Return a table of endings by case (row) and m, f, n or plural (column); a dash is no ending."""
    return {
        (case, column): cell.strip("-")
        for case, row in zip(CASES, rows, strict=True)
        for column, cell in zip("mfnp", row.split(), strict=True)
    }


ARTICLE = _table("der die das die", "den die das die", "dem der dem den")
ENDINGS = {
    "strong": _table("er e es e", "en e es e", "em er em en"),  # dieser; adjectives without article
    "weak": _table("e e e en", "en e e en", "en en en en"),  # adjectives after der, dieser
    "mixed": _table("er e es en", "en e es en", "en en en en"),  # adjectives after ein, kein, mein
    "ein": _table("- e - e", "en e - e", "em er em en"),  # ein, kein, mein themselves
}
CONTRACTIONS = {"in dem ": "im ", "in das ": "ins ", "zu dem ": "zum ", "zu der ": "zur "}

AUXILIARIES = {
    "haben": ("habe", "hast", "hat", "haben", "haben"),
    "sein": ("bin", "bist", "ist", "sind", "sind"),
    "war": ("war", "warst", "war", "waren", "waren"),
    "will": ("werde", "wirst", "wird", "werden", "werden"),
    "can": ("kann", "kannst", "kann", "können", "können"),
    "must": ("muss", "musst", "muss", "müssen", "müssen"),
    "must not": ("darf", "darfst", "darf", "dürfen", "dürfen"),
}


@dataclass(frozen=True)
class NounPhrase:
    """A noun phrase: determiner (the, this, a, a possessive, or empty), adjective and noun."""

    noun: Noun
    determiner: str = ""
    adjective: Adjective | None = None
    plural: bool = False

    @property
    def person(self) -> int:
        return 4 if self.plural else 2

    @property
    def indefinite(self) -> bool:
        return self.determiner in ("", "a") and not self.noun.proper

    def english(self, negated: bool = False) -> str:
        noun = self.noun.english_plural if self.plural else self.noun.english
        words = f"{self.adjective.english} {noun}" if self.adjective else noun
        determiner = self.determiner
        if determiner == "a" and words[0] in "aeiou":
            determiner = "an"
        elif determiner == "this" and self.plural:
            determiner = "these"
        elif negated and not determiner and self.indefinite:
            determiner = "any"
        return f"{determiner} {words}".lstrip()

    def german(self, case: str, negated: bool = False) -> str:
        cell = (case, "p" if self.plural else self.noun.gender)
        if self.determiner == "the":
            determiner, kind = ARTICLE[cell], "weak"
        elif self.determiner == "this":
            determiner, kind = "dies" + ENDINGS["strong"][cell], "weak"
        elif self.determiner in POSSESSIVES:
            determiner, kind = POSSESSIVES[self.determiner] + ENDINGS["ein"][cell], "mixed"
        elif self.indefinite and (negated or self.determiner):
            determiner, kind = ("kein" if negated else "ein") + ENDINGS["ein"][cell], "mixed"
        else:
            determiner, kind = "", "strong"
        adjective = self.adjective.stem + ENDINGS[kind][cell] if self.adjective else ""
        return _join(determiner, adjective, self.noun.form(case, self.plural))


Phrase = NounPhrase | Pronoun


@dataclass(frozen=True)
class PrepositionalPhrase:
    """A prepositional phrase."""

    preposition: Preposition
    phrase: Phrase

    def english(self) -> str:
        return f"{self.preposition.english} {self.phrase.english()}"

    def german(self) -> str:
        text = f"{self.preposition.german} {self.phrase.german(self.preposition.case)}"
        for long, short in CONTRACTIONS.items():
            if text.startswith(long):
                return short + text.removeprefix(long)
        return text


@dataclass(frozen=True)
class Clause:
    """A clause. Its tense is past, present, will, can or must; `front` is what it begins with: time, place or ""."""

    subject: Phrase
    verb: Verb
    tense: str
    negated: bool = False
    object: Phrase | None = None
    recipient: Phrase | None = None
    place: PrepositionalPhrase | None = None
    time: Time | None = None
    predicate: Adjective | None = None
    front: str = ""

    def combinations(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of words that a split can hold out: adjective and noun, verb and object."""
        for phrase in (self.subject, self.object, self.recipient, self.place and self.place.phrase):
            if isinstance(phrase, NounPhrase) and phrase.adjective:
                yield phrase.adjective.english, phrase.noun.english
        if isinstance(self.object, NounPhrase):
            yield self.verb.base, self.object.noun.english
        if self.predicate and isinstance(self.subject, NounPhrase):
            yield self.predicate.english, self.subject.noun.english

    def english(self, question: bool = False) -> str:
        subject = self.subject.subject if isinstance(self.subject, Pronoun) else self.subject.english()
        auxiliary, main = _english_verb(self.verb, self.tense, self.subject.person, self.negated or question)
        if self.negated:
            auxiliary = "cannot" if auxiliary == "can" else f"{auxiliary} not"
        time = self.time.english if self.time else ""
        place = self.place.english() if self.place else ""
        return _join(
            {"time": time, "place": place, "": ""}[self.front],
            *((auxiliary, subject) if question else (subject, auxiliary)),
            main,
            self.recipient.english() if self.recipient else "",
            self.object.english(self.negated) if self.object else "",
            self.predicate.english if self.predicate else "",
            place if self.front != "place" else "",
            time if self.front != "time" else "",
        )

    def german(self, verb_at: str = "second") -> str:
        """Return the clause in German, with its finite verb first, second or last."""
        finite, end = _german_verb(self.verb, self.tense, self.subject.person, self.negated)
        subject, middle = self.subject.german("nom"), self._middle()
        if verb_at == "last":
            joint = "" if self.tense == "present" else " "  # aufmacht, but aufgemacht hat
            return _join(subject, middle, f"{end}{joint}{finite}".strip())
        if verb_at == "first":
            return _join(finite, subject, middle, end)
        if self.front == "time" and self.time:
            return _join(self.time.german, finite, subject, middle, end)
        if self.front == "place" and self.place:
            return _join(self.place.german(), finite, subject, middle, end)
        return _join(subject, finite, middle, end)

    def _middle(self) -> str:
        """Return what stands between subject and end of the clause, in German order."""
        obj = self.object.german(self.verb.case, self.negated) if self.object else ""
        recipient = self.recipient.german("dat") if self.recipient else ""
        place = self.place.german() if self.place and self.front != "place" else ""
        indefinite = self.object is not None and self.object.indefinite
        early_object, early_recipient = _early(self.object), _early(self.recipient)
        return _join(
            obj if early_object else "",
            recipient if early_recipient else "",
            self.time.german if self.time and self.front != "time" else "",
            "" if early_recipient else recipient,
            "" if early_object or indefinite else obj,
            "nicht" if self.negated and not indefinite else "",
            "" if self.verb.complement else place,
            obj if indefinite else "",
            place if self.verb.complement else "",
            self.predicate.german if self.predicate else "",
        )


@dataclass(frozen=True)
class ToySentence:
    """A clause, or two with a conjunction between them or, if `fronted`, before both."""

    main: Clause
    conjunction: str = ""
    other: Clause | None = None
    fronted: bool = False
    question: bool = False

    def combinations(self) -> Iterator[tuple[str, str]]:
        yield from self.main.combinations()
        if self.other:
            yield from self.other.combinations()

    def english(self) -> str:
        main = self.main.english(self.question)
        if self.other:
            other = f"{self.conjunction} {self.other.english()}"
            comma = "," if self.conjunction == "but" else ""
            main = f"{other}, {main}" if self.fronted else f"{main}{comma} {other}"
        return _finish(main, self.question)

    def german(self) -> str:
        main = self.main.german("first" if self.question or self.fronted else "second")
        if self.other:
            conjunction = _german_conjunction(self.conjunction, self.other.tense)
            coordinate = self.conjunction in ("and", "but")
            other = f"{conjunction} {self.other.german('second' if coordinate else 'last')}"
            comma = "" if self.conjunction == "and" else ","
            main = f"{other}, {main}" if self.fronted else f"{main}{comma} {other}"
        return _finish(main, self.question)


def _early(phrase: Phrase | None) -> bool:
    """Return whether a phrase comes before the time, as pronouns and names do: weil er ihr gestern ein Buch gegeben hat."""
    return isinstance(phrase, Pronoun) or (phrase is not None and phrase.noun.proper)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _finish(text: str, question: bool) -> str:
    return text[0].upper() + text[1:] + ("?" if question else ".")


def _german_conjunction(english: str, tense: str) -> str:
    """Return the German conjunction: *when* is als for the past and wenn otherwise."""
    when = "als" if tense == "past" else "wenn"
    return {"and": "und", "but": "aber", "because": "weil", "although": "obwohl", "that": "dass", "when": when}[english]


def _english_verb(verb: Verb, tense: str, person: int, needs_auxiliary: bool) -> tuple[str, str]:
    """Return the auxiliary, or "", and the main verb."""
    am = ("am", "are", "is", "are", "are")[person]
    if verb is BE:
        return (am if tense == "present" else "was" if person in (0, 2) else "were"), ""
    if tense == "past":
        return ("did", verb.base) if needs_auxiliary else ("", verb.past)
    return (am, verb.ing) if tense == "present" else (tense, verb.base)


def _german_verb(verb: Verb, tense: str, person: int, negated: bool) -> tuple[str, str]:
    """Return the finite verb and what ends the clause: a participle, an infinitive or a separable prefix."""
    if verb is BE:
        return AUXILIARIES["sein" if tense == "present" else "war"][person], ""
    if tense == "past":
        return AUXILIARIES[verb.aux][person], verb.participle
    if tense == "present":
        ich = verb.infinitive.removesuffix("en") + "e"
        return (ich, verb.du, verb.er, verb.infinitive, verb.infinitive)[person], verb.prefix
    modal = "must not" if tense == "must" and negated else tense  # muss nicht would mean: need not
    return AUXILIARIES[modal][person], verb.prefix + verb.infinitive
