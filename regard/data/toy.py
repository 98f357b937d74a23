"""The embedded corpus `toy`: as many English-German sentence pairs as asked, from a small grammar with a large reach.

`toy_lexicon` holds some 250 English words, `toy_grammar` the rules; this file draws sentences and divides them. Every
English sentence has exactly one German translation, so exact match is a fair score.

The splits test generalisation, not memory. What is held out are *combinations*: a verb with its object noun (eat,
apple) or an adjective with its noun (red, apple), in any number, case or tense. A checksum of the two words gives about
5% of the combinations to `test`, 5% to `valid` and the rest to `train`. A training sentence has only training
combinations; a test sentence has at least one of test's and none of valid's, and the other way round. So whatever the
seed, training data hold no test sentence, nor any other with its combination, but every single word. (eat, apple)
belongs to `test`: who translates *I ate an apple.* has not seen anybody eat one.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from regard.data import toy_lexicon as lexicon
from regard.data.toy_grammar import Clause, NounPhrase, Phrase, Place, Sentence
from regard.data.toy_lexicon import BE, IT, Adjective, Noun, Pronoun, Time, Verb
from regard.errors import RegardError

SPLITS = ("train", "valid", "test")
_HELD_OUT_PERCENT = 5
_POSSESSIVES = tuple(lexicon.POSSESSIVES)
_PINNED = {("eat", "apple"): "test"}


def pairs(n: int, split: str = "train", seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield n pairs (English, German); the first k of them are `pairs(k)`. Valid and test never repeat a sentence."""
    if split not in SPLITS:
        raise RegardError(f"toy corpus: unknown split {split!r}; use one of {', '.join(SPLITS)}")
    if n < 1:
        raise RegardError(f"toy corpus: {n} pairs asked for; ask for at least 1")
    return _pairs(n, split, seed)


def _pairs(n: int, split: str, seed: int) -> Iterator[tuple[str, str]]:
    writer = _Writer(random.Random(f"{split} {seed}"))
    seen: set[str] = set()
    while n:
        sentence = writer.sentence()
        if _split_of(sentence) != split:
            continue
        english = sentence.english()
        if split != "train":
            if english in seen:
                continue
            seen.add(english)
        yield english, sentence.german()
        n -= 1


def _split_of(sentence: Sentence) -> str | None:
    """The split a sentence may appear in; None where it would mix combinations of test and valid."""
    held_out = {_split_of_combination(pair) for pair in sentence.combinations()} - {"train"}
    if len(held_out) > 1:
        return None
    return held_out.pop() if held_out else "train"


@cache
def _split_of_combination(pair: tuple[str, str]) -> str:
    if pair in _PINNED:
        return _PINNED[pair]
    percent = zlib.crc32(" ".join(pair).encode()) % 100
    return "test" if percent < _HELD_OUT_PERCENT else "valid" if percent < 2 * _HELD_OUT_PERCENT else "train"


@cache
def _nouns(classes: str) -> tuple[Noun, ...]:
    return tuple(noun for noun in lexicon.NOUNS if noun.has(*classes.split()))


@cache
def _adjectives(classes: str) -> tuple[Adjective, ...]:
    return tuple(a for a in lexicon.ADJECTIVES if set(a.classes.split()) & set(classes.split()))


@cache
def _verbs(tense: str) -> tuple[Verb, ...]:
    return tuple(verb for verb in lexicon.VERBS if verb.ing or tense != "present")


@cache
def _times(tense: str) -> tuple[Time, ...]:
    return tuple(time for time in lexicon.TIMES if tense in time.tenses.split())


class _Writer:
    """Draws sentences that make sense. `size` scales how much is hung onto a clause: less where there are two."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.used: set[Noun] = set()  # nouns of the clause in hand: no brother visits the brother

    def sentence(self) -> Sentence:
        draw = self.rng.random()
        if draw < 0.60:
            return Sentence(self.fronted(self.clause(self.one_of("past past past present present will can must"))))
        if draw < 0.70:
            return self.question()
        if draw < 0.80:
            return self.report()
        return self.coordination() if draw < 0.84 else self.subordination()

    def question(self) -> Sentence:
        clause = self.clause(self.one_of("past past present present will can must"), negation=0)
        return self.question() if clause.subject.person == 0 else Sentence(clause, question=True)  # who asks, knows

    def report(self) -> Sentence:
        self.used = set()
        main = Clause(self.someone(pronouns=0.6), self.rng.choice(lexicon.REPORTS), "past", self.chance(0.1))
        return Sentence(main, "that", self.clause(self.one_of("past past present will"), size=0.5))

    def coordination(self) -> Sentence:
        tense = self.one_of("past past present will can must")
        main = self.clause(tense, size=0.4)
        other = self.clause(tense if tense == "past" else self.one_of("present will can must"), size=0.4)
        return Sentence(self.fronted(main), self.one_of("and but"), self.fronted(other))

    def subordination(self) -> Sentence:
        """Because, although or when; with when nothing is negated, and a present goes with a main clause to come."""
        tense = self.one_of("past past past present will can must")
        conjunction = self.one_of("because because although" if tense == "present" else "because although when")
        main, negation = self.clause(tense, size=0.5), 0.0 if conjunction == "when" else 0.2
        tense, draw = "past" if tense == "past" else "present", self.rng.random()
        if draw < 0.4:
            other = self.state(tense, negation, things=0)
        else:
            other = self.weather(tense, negation) if draw < 0.5 else self.action(tense, negation, size=0.4)
        if conjunction == "when":
            other = replace(other, time=None)
        fronted = self.chance(0.35)
        return Sentence(main if fronted else self.fronted(main), conjunction, other, fronted)

    def fronted(self, clause: Clause) -> Clause:
        """Now and then begin with the time or the place, which in German puts the subject behind the verb."""
        if clause.time and self.chance(0.6):
            return replace(clause, front="time")
        free = clause.place is not None and not clause.verb.complement and clause.verb is not BE
        if free and clause.place and clause.place.preposition.german == "in" and self.chance(0.3):
            return replace(clause, front="place")
        return clause

    def clause(self, tense: str, negation: float = 0.22, size: float = 1.0) -> Clause:
        draw = self.rng.random()
        if draw < 0.02 and tense not in ("can", "must"):
            return self.weather(tense, negation)
        if draw < 0.25 and tense in ("past", "present"):
            return self.state(tense, negation, things=0.4 * size) if draw < 0.12 else self.whereabouts(tense, negation)
        return self.action(tense, negation, size)

    def action(self, tense: str, negation: float, size: float) -> Clause:
        """Somebody does something: she gave the old man a red book."""
        self.used, verb, negated = set(), self.rng.choice(_verbs(tense)), self.chance(negation)
        subject: Phrase = self.someone(indefinite=not negated, adjective=0.3 * size)
        if verb.base in lexicon.ANIMALS_DO and self.chance(0.15):
            subject = self.noun_phrase("animal", indefinite=not negated, adjective=0.3 * size, bare=False)
        recipient = self.someone(subject, pronouns=0.45, indefinite=not negated, adjective=0.3) if verb.gift else None
        kinds = verb.complement or (verb.adjuncts if self.chance(0.45 * size) else "")
        return Clause(
            subject,
            verb,
            tense,
            negated,
            self.thing(verb, subject, negated) if verb.objects else None,
            recipient,
            self.place(kinds, subject) if kinds else None,
            self.time(tense, 0.4 * size),
        )

    def state(self, tense: str, negation: float, things: float) -> Clause:
        """Somebody or something is somehow: she was tired; this apple is red."""
        self.used, classes = set(), "state"
        if self.chance(things):
            subject: Phrase = self.noun_phrase("animal mass fruit dish text clothing vehicle opening place", False, 0)
        else:
            subject = self.someone(indefinite=False, adjective=0)
        if isinstance(subject, NounPhrase) and not subject.noun.proper:
            classes = subject.noun.classes
        adjective = self.rng.choice(_adjectives(classes))
        time = self.time(tense, 0.25) if "state" in adjective.classes else None
        return Clause(subject, BE, tense, self.chance(negation), predicate=adjective, time=time)

    def whereabouts(self, tense: str, negation: float) -> Clause:
        """Somebody or something is somewhere: she is in the garden; the key was on the table."""
        self.used, negated = set(), self.chance(negation)
        if self.chance(0.4):
            subject, kinds = self.someone(indefinite=False), "in town"
        else:
            things, kinds = "fruit dish staple drink reading clothing key", "on"
            subject = self.noun_phrase(things, indefinite=not negated, adjective=0.6, bare=False)
        return Clause(subject, BE, tense, negated, place=self.place(kinds, subject), time=self.time(tense, 0.3))

    def weather(self, tense: str, negation: float) -> Clause:
        self.used, negated = set(), self.chance(negation)
        if tense in ("past", "present") and self.chance(0.6):
            adjective = self.rng.choice(_adjectives("weather"))
            return Clause(IT, BE, tense, negated, predicate=adjective, time=self.time(tense, 0.5))
        place = self.place("town", IT) if self.chance(0.4) else None
        return Clause(IT, lexicon.RAIN, tense, negated, place=place, time=self.time(tense, 0.5))

    def thing(self, verb: Verb, subject: Phrase, negated: bool) -> Phrase:
        """An object for a verb; what is given always has a determiner, or *gave her apples* would be two things."""
        indefinite = verb.case == "acc" or not negated
        if "person" in verb.objects and self.chance(0.7):
            return self.someone(subject, 0.35, indefinite)
        return self.noun_phrase(verb.objects, indefinite, bare=not verb.gift)

    def someone(
        self, subject: Phrase | None = None, pronouns: float = 0.5, indefinite: bool = True, adjective: float = 0.35
    ) -> Phrase:
        """A person, other than the subject if there is one already."""
        if self.chance(pronouns):
            ours = isinstance(subject, Pronoun) and subject.person in (0, 3)  # I visit neither me nor us
            others = [p for p in lexicon.PRONOUNS if p is not subject and not (ours and p.person in (0, 3))]
            return self.rng.choice(others)
        return self.noun_phrase("person kin name", indefinite, adjective, bare=subject is not None)

    def place(self, kinds: str, subject: Phrase) -> Place:
        preposition = lexicon.PREPOSITIONS[self.one_of(kinds)]
        if "person" in preposition.classes:
            going = preposition.english == "to"  # to the doctor, but not to him or to a man
            someone = self.someone(subject, 0.0 if going else 0.3, indefinite=not going, adjective=0.25)
            return Place(preposition, someone)
        return Place(preposition, self.noun_phrase(preposition.classes, adjective=0.2, bare=False))

    def noun_phrase(
        self,
        classes: str,
        indefinite: bool = True,
        adjective: float = 0.35,
        bare: bool = True,
    ) -> NounPhrase:
        noun = self.rng.choice([noun for noun in _nouns(classes) if noun not in self.used])
        self.used.add(noun)
        if noun.proper:
            return NounPhrase(noun)
        many = bool(noun.english_plural) and self.chance(0.3)
        article = "" if many or noun.has("mass") else "a"
        determiner = self.determiner(noun, article if indefinite and (article or bare) else "the")
        choices = _adjectives(noun.classes) if self.chance(adjective) else ()
        return NounPhrase(noun, determiner, self.rng.choice(choices) if choices else None, many)

    def determiner(self, noun: Noun, article: str) -> str:
        if noun.has("kin"):
            return self.rng.choice(_POSSESSIVES)
        draw = self.rng.random()
        if draw < 0.2 and (noun.has("own") or not noun.has("person", "place")):
            return self.rng.choice(_POSSESSIVES)
        return "the" if draw < 0.5 else "this" if draw < 0.6 else article

    def time(self, tense: str, probability: float) -> Time | None:
        return self.rng.choice(_times(tense)) if self.chance(probability) else None

    def one_of(self, choices: str) -> str:
        return self.rng.choice(choices.split())

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability
