"""Formal sentences and dates, generated from patterns and the terms of a phrasebook (phrasebook.tsv).

Tatoeba has hardly any, and Europarl is in English and German only: nothing else shows how French or Chinese says what a
treaty is about or when it was signed. A few patterns with some 250 terms teach how such sentences are built.
"""

from __future__ import annotations

import calendar
import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

Pair = tuple[str, str]
LANGUAGES = ("en", "de", "fr", "zh")
COUNT = 12_000  # sentences of each language; half as many with capitals
ORIGIN, ABOUT = 0.4, 0.5  # probability of an origin (European, ...), and of a topic (on, for ...)
VERBS = {"pact": "verb.pact", "text": "verb.text", "aim": "verb.text"}
ABOUTS = {"pact": ("on", "über", "sur"), "text": ("on", "über", "sur"), "aim": ("for", "für", "pour")}
INSTITUTIONS = re.compile(
    "(?:raum|union|fonds|bank|agentur|behörde|gericht|ausschuss|rat|parlament|kommission)$", re.IGNORECASE
)
SIMPLIFIED = (
    "业东举义书争亚产亲会伦债关养内军农决务动劳势区协单卫参发员团国场学审宪对将币应开总战护报数权条来样欧汤济渔环电税竞签约纽组织"
    "经结统续缔罗职联胀药览计认讨训议论评识语财败货贩贫贸费资赛车输边过运进选遗钢铁银长闻阳际顿预馆马变尔节于体党划据机气游确种网"
)
TRADITIONAL = (
    "業東舉義書爭亞產親會倫債關養內軍農決務動勞勢區協單衛參發員團國場學審憲對將幣應開總戰護報數權條來樣歐湯濟漁環電稅競簽約紐組織"
    "經結統續締羅職聯脹藥覽計認討訓議論評識語財敗貨販貧貿費資賽車輸邊過運進選遺鋼鐵銀長聞陽際頓預館馬變爾節於體黨劃據機氣遊確種網"
)
Texts = dict[str, str]  # language -> text of the same meaning


def make_formal_pairs(lang: str, in_capitals: bool = False) -> list[Pair]:
    """Return pairs with English. With `in_capitals` English terms are in Title Case, for English as the source only."""
    generator = SentenceGenerator(random.Random(0), in_capitals)
    sentences = [generator.sentence() for _ in range(COUNT // 2 if in_capitals else COUNT)]
    pairs = [(s["en"], to_traditional(s["zh"]) if lang == "zh-Hant" else s[lang]) for s in sentences]
    return list(dict.fromkeys(pairs))


def to_traditional(text: str) -> str:
    text = text.replace("制药", "製药")  # 制 is the same in all other words
    return text.translate(str.maketrans(SIMPLIFIED, TRADITIONAL))


def load_phrasebook() -> dict[str, list[Texts]]:
    """Return the entries of each kind."""
    book: dict[str, list[Texts]] = defaultdict(list)
    for line in Path(__file__).with_name("phrasebook.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            kind, *forms = line.split("\t")
            book[kind].append(dict(zip(LANGUAGES, forms, strict=True)))
    return dict(book)


@dataclass
class Phrase:
    """A noun with its article, as subject and, for German, as object."""

    en: str
    de: str
    de_object: str
    fr: str
    zh: str
    feminine: bool  # in French

    def agree(self, word: str) -> str:
        return word + "e" * self.feminine


# ---- nouns -----------------------------------------------------------------------------------------------------------


def make_phrase(entry: Texts, origin: Texts | None, in_capitals: bool) -> Phrase:
    """Return a term with its definite article and, if given, its origin: the European labour market."""
    article, term = split_article(entry["en"])
    if origin:
        term = f"{origin['en']} {term}"
    if in_capitals:
        term = " ".join(word if word in ("of", "the") else word[0].upper() + word[1:] for word in term.split(" "))
    named = in_capitals and INSTITUTIONS.search(entry["de"])
    adjective_stem = origin["de"].split("/")[-1 if named else 0] if origin else ""
    gender, french = entry["fr"].split(" ", 1)
    return Phrase(
        en=article + term,
        de=make_german_phrase(entry["de"], adjective_stem, "der"),
        de_object=make_german_phrase(entry["de"], adjective_stem, "den"),
        fr=add_french_article(
            place_adjective(french, origin["fr"].split("/")[gender == "f"] if origin else ""), gender
        ),
        zh=(origin["zh"] if origin else "") + entry["zh"],
        feminine=gender == "f",
    )


def split_article(term: str) -> tuple[str, str]:
    return ("the ", term[4:]) if term.startswith("the ") else ("", term)


def make_german_phrase(term: str, adjective_stem: str, masculine: str) -> str:
    """Return the German phrase. Subject and object differ where the noun is masculine (`masculine` is der or den)."""
    article, word = term.split(" ", 1)
    if article == "der":
        article = masculine
    ending = "en" if article == "den" else "e"
    return f"{article} {adjective_stem}{ending} {word}" if adjective_stem else f"{article} {word}"


def place_adjective(term: str, adjective: str) -> str:
    """Return the French term with its adjective at the end, or where the term has a bar: le ministère | des Finances."""
    head, _, rest = term.partition("|")
    return head + (f" {adjective}" if adjective else "") + rest


def add_french_article(term: str, gender: str) -> str:
    if term[0].lower() in "aeiouéèêâîœ":
        return f"l'{term}"
    return f"{'la' if gender == 'f' else 'le'} {term}"


def add_topic(what: Phrase, topic: Phrase, kind: str) -> Phrase:
    """Return the phrase with a topic: the report on the labour market."""
    en, de, fr = ABOUTS[kind]
    return replace(
        what,
        en=f"{what.en} {en} {topic.en}",
        de=f"{what.de} {de} {topic.de_object}",
        de_object=f"{what.de_object} {de} {topic.de_object}",
        fr=f"{what.fr} {fr} {topic.fr}",
        zh=f"关于{topic.zh}的{what.zh}",
    )


# ---- sentences -------------------------------------------------------------------------------------------------------


class SentenceGenerator:
    """A generator of random sentences."""

    def __init__(self, rng: random.Random, in_capitals: bool) -> None:
        self.rng, self.in_capitals, self.book = rng, in_capitals, load_phrasebook()

    def sentence(self) -> Texts:
        patterns: tuple[Callable[[], Texts], ...] = (
            self.passive,
            self.passive,
            self.active,
            self.in_force,
            self.since,
            self.importance,
        )
        if not self.in_capitals:
            patterns += (self.life, self.life, self.event)
        texts = self.rng.choice(patterns)()
        return {lang: text[0].upper() + text[1:] for lang, text in texts.items()}

    def pick(self, *kinds: str) -> Texts:
        return self.rng.choice([entry for kind in kinds for entry in self.book[kind]])

    def thing(self, *kinds: str, article: str = "") -> Phrase:
        """Return a random phrase of these kinds; `article` is for kinds that always have one in English."""
        kind = self.rng.choice([kind for kind in kinds for _ in self.book[kind]])
        without_origin = kind.endswith(".named") or self.rng.random() > ORIGIN
        entry, origin = self.pick(kind), None if without_origin else self.pick("origin")
        return make_phrase({**entry, "en": article + entry["en"]}, origin, self.in_capitals)

    def topic(self) -> Phrase:
        return self.thing("topic", "topic.named")

    def document(self) -> tuple[Phrase, Texts, Texts]:
        """Return a document with or without a topic, a verb in the passive, and the same verb in the active."""
        kind = self.rng.choice(("pact", "text", "aim"))
        verb = {lang: forms.split("/") for lang, forms in self.pick("verb", VERBS[kind]).items()}
        was, did = ({lang: forms[i] for lang, forms in verb.items()} for i in (0, -1))
        if self.rng.random() < ABOUT:
            return add_topic(self.thing(kind, article="the "), self.topic(), kind), was, did
        named = [f"{kind}.named"] if kind != "aim" else []
        return self.thing(kind, *named, article="the "), was, did

    # ---- patterns, each with an example

    def passive(self) -> Texts:
        """The report on the labour market was published in May 1987."""
        (what, verb, _), when = self.document(), self.date(past=True)
        return {
            "en": f"{what.en} was {verb['en']} {when['en']}.",
            "de": f"{what.de} wurde {when['de']} {verb['de']}.",
            "fr": f"{what.fr} a été {what.agree(verb['fr'])} {when['fr']}.",
            "zh": f"{what.zh}于{when['zh']}{verb['zh']}。",
        }

    def active(self) -> Texts:
        """The parliament rejected the bill."""
        who, (what, _, verb) = self.thing("body", article="the "), self.document()
        return {
            "en": f"{who.en} {verb['en']} {what.en}.",
            "de": f"{who.de} hat {what.de_object} {verb['de']}.",
            "fr": f"{who.fr} a {verb['fr']} {what.fr}.",
            "zh": f"{who.zh}{verb['zh']}了{what.zh}。",
        }

    def in_force(self) -> Texts:
        what, when = add_topic(self.thing("pact", article="the "), self.topic(), "pact"), self.date(past=False)
        return {
            "en": f"{what.en} will enter into force {when['en']}.",
            "de": f"{what.de} tritt {when['de']} in Kraft.",
            "fr": f"{what.fr} entrera en vigueur {when['fr']}.",
            "zh": f"{what.zh}将于{when['zh']}生效。",
        }

    def since(self) -> Texts:
        what, year = self.topic(), self.rng.randint(1950, 2025)
        return {
            "en": f"{what.en} has changed since {year}.",
            "de": f"{what.de} hat sich seit {year} verändert.",
            "fr": f"{what.fr} a changé depuis {year}.",
            "zh": f"自{year}年以来，{what.zh}发生了变化。",
        }

    def importance(self) -> Texts:
        """The labour market is important, or important for something."""
        what, which = self.topic(), self.topic()
        if self.rng.random() > ABOUT:
            return {
                "en": f"{what.en} is important.",
                "de": f"{what.de} ist wichtig.",
                "fr": f"{what.fr} est {what.agree('important')}.",
                "zh": f"{what.zh}很重要。",
            }
        return {
            "en": f"{what.en} is important for {which.en}.",
            "de": f"{what.de} ist wichtig für {which.de_object}.",
            "fr": f"{what.fr} est {what.agree('important')} pour {which.fr}.",
            "zh": f"{what.zh}对{which.zh}很重要。",
        }

    def life(self) -> Texts:
        """She was born on 3 May 1987."""
        who, where, when = self.pick("person"), self.pick("place"), self.date(past=True)
        gender, french = who["fr"].split(" ", 1)
        e = "e" if gender == "f" else ""
        means = [
            ("was born", "wurde {} geboren", f"est né{e}", "出生于{}"),
            ("died", "starb {}", f"est mort{e}", "于{}去世"),
            (
                f"moved to {where['en']}",
                f"zog {{}} nach {where['de']}",
                f"a déménagé à {where['fr']}",
                f"于{{}}搬到{where['zh']}",
            ),
            (
                f"came to {where['en']}",
                f"kam {{}} nach {where['de']}",
                f"est venu{e} à {where['fr']}",
                f"于{{}}来到{where['zh']}",
            ),
        ]
        en, de, fr, zh = self.rng.choice(means)
        return {
            "en": f"{who['en']} {en} {when['en']}.",
            "de": f"{who['de']} {de.format(when['de'])}.",
            "fr": f"{french} {fr} {when['fr']}.",
            "zh": f"{who['zh']}{zh.format(when['zh'])}。",
        }

    def event(self) -> Texts:
        what, when = self.thing("event", article="the "), self.date(past=False)
        return {
            "en": f"{what.en} will take place {when['en']}.",
            "de": f"{what.de} findet {when['de']} statt.",
            "fr": f"{what.fr} aura lieu {when['fr']}.",
            "zh": f"{what.zh}将于{when['zh']}举行。",
        }

    def date(self, past: bool) -> Texts:
        """Return a day, a month or a year; future ones also without the year."""
        month = self.pick("month")
        day = self.rng.randint(1, calendar.monthrange(2001, int(month["zh"][:-1]))[1])
        year = self.rng.randint(1850, 2025) if past else self.rng.randint(2026, 2045)
        kind = self.rng.choice(
            ("day", "month", "year") if past else ("day", "month", "year", "day alone", "month alone")
        )
        y, zh_year = ("", "") if "alone" in kind else (f" {year}", f"{year}年")
        if kind == "year":
            return {"en": f"in {year}", "de": f"{year}", "fr": f"en {year}", "zh": zh_year}
        if "month" in kind:
            texts = f"in {month['en']}{y}", f"im {month['de']}{y}", f"en {month['fr']}{y}", f"{zh_year}{month['zh']}"
            return dict(zip(LANGUAGES, texts, strict=True))
        american = f"on {month['en']} {day}" + (f",{y}" if y else "")
        english = self.rng.choice((f"on {day} {month['en']}{y}", american))
        first = "1er" if day == 1 else str(day)
        texts = english, f"am {day}. {month['de']}{y}", f"le {first} {month['fr']}{y}", f"{zh_year}{month['zh']}{day}日"
        return dict(zip(LANGUAGES, texts, strict=True))
