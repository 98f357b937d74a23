"""Formal sentences and dates, put together from a phrasebook of our own (phrasebook.tsv).

Tatoeba has next to none, and Europarl is in English and German only: nothing else says in French or Chinese what a treaty is
about, or when it was signed. A few patterns with some hundred terms teach how such sentences are built; terms that are not
among them are then built alike.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Pair = tuple[str, str]
LANGUAGES = ("en", "de", "fr", "zh")
COUNT = 12_000  # sentences drawn for a language; half as many in capitals
ORIGIN = 0.4  # how often something is said to be European, ...
SIMPLIFIED = (
    "业东为丽举义书争亚产亲会伦债关养内军农决则务动劳势区协单卫参发员团国场学审宪对将币庆应开总战护报数暂权条来样欢欧毕汤济渔玛环电税竞签约纽组织"
    "经结统续缔罗职联胀药览计认讨训议论评识语财败货贩贫贸费资赛车输边过运进选遗钢铁银长闻阳际顿预领馆马变尔与于体党划据机气游确种网"
)
TRADITIONAL = (
    "業東為麗舉義書爭亞產親會倫債關養內軍農決則務動勞勢區協單衛參發員團國場學審憲對將幣慶應開總戰護報數暫權條來樣歡歐畢湯濟漁瑪環電稅競簽約紐組織"
    "經結統續締羅職聯脹藥覽計認討訓議論評識語財敗貨販貧貿費資賽車輸邊過運進選遺鋼鐵銀長聞陽際頓預領館馬變爾與於體黨劃據機氣遊確種網"
)
Entry = dict[str, str]  # what it is called in each language


def formal(lang: str, in_capitals: bool = False) -> list[Pair]:
    """English sentences and the same in another language; with terms in capitals they are to be read, not to be written."""
    draw = Draw(random.Random(0), in_capitals)
    made = [draw.sentence() for _ in range(COUNT // 2 if in_capitals else COUNT)]
    pairs = [(said["en"], traditional(said["zh"]) if lang == "zh-Hant" else said[lang]) for said in made]
    return list(dict.fromkeys(pairs))


def traditional(text: str) -> str:
    for words in (("准则", "準则"), ("制药", "製药")):  # whose characters have another form elsewhere
        text = text.replace(*words)
    return text.translate(str.maketrans(SIMPLIFIED, TRADITIONAL))


def phrasebook() -> dict[str, list[Entry]]:
    """The entries of each kind."""
    book: dict[str, list[Entry]] = defaultdict(list)
    for line in Path(__file__).with_name("phrasebook.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            kind, *forms = line.split("\t")
            book[kind].append(dict(zip(LANGUAGES, forms, strict=True)))
    return book


@dataclass
class Phrase:
    """A noun with its article, as subject (and, where German tells them apart, as object)."""

    en: str
    de: str
    de_object: str
    fr: str
    zh: str
    feminine: bool  # in French

    def agreed(self, participle: str) -> str:
        return participle + "e" * self.feminine


# ---- nouns -----------------------------------------------------------------------------------------------------------


def noun(entry: Entry, origin: Entry | None, in_capitals: bool) -> Phrase:
    """The thing itself, not one of its kind: the European labour market, der europäische Arbeitsmarkt, ..."""
    article, term = split_article(entry["en"])
    if origin:
        term = f"{origin['en']} {term}"
    if in_capitals:
        term = " ".join(
            word if word in ("of", "the", "for") else word[0].upper() + word[1:] for word in term.split(" ")
        )
    whose = origin["de"].split("/")[-1 if in_capitals else 0] if origin else ""
    gender, french = entry["fr"].split(" ", 1)
    return Phrase(
        en=article + term,
        de=german(entry["de"], whose, "der"),
        de_object=german(entry["de"], whose, "den"),
        fr=definite(f"{french} {origin['fr'].split('/')[gender == 'f']}" if origin else french, gender),
        zh=(origin["zh"] if origin else "") + entry["zh"],
        feminine=gender == "f",
    )


def split_article(term: str) -> tuple[str, str]:
    return ("the ", term[4:]) if term.startswith("the ") else ("", term)


def german(term: str, whose: str, masculine: str) -> str:
    """Subject and object differ where the noun is masculine."""
    article, word = term.split(" ", 1)
    if article == "der":
        article = masculine
    ending = "en" if article == "den" else "e"
    return f"{article} {whose}{ending} {word}" if whose else f"{article} {word}"


def definite(term: str, gender: str) -> str:
    if term[0].lower() in "aeiouéèêâîœ":
        return f"l'{term}"
    return f"{'la' if gender == 'f' else 'le'} {term}"


# ---- sentences -------------------------------------------------------------------------------------------------------


class Draw:
    """Sentences at random."""

    def __init__(self, rng: random.Random, in_capitals: bool) -> None:
        self.rng, self.in_capitals, self.book = rng, in_capitals, phrasebook()

    def sentence(self) -> Entry:
        official = (
            self.done,
            self.done,
            self.done_about,
            self.done_about,
            self.does,
            self.in_force,
            self.since,
            self.matters,
        )
        patterns: tuple[Callable[[], Entry], ...] = official
        if not self.in_capitals:
            patterns += (self.life, self.life, self.life, self.event)
        said = self.rng.choice(patterns)()
        return {lang: text[0].upper() + text[1:] for lang, text in said.items()}

    def pick(self, *kinds: str) -> Entry:
        return self.rng.choice([entry for kind in kinds for entry in self.book[kind]])

    def thing(self, *kinds: str, article: str = "") -> Phrase:
        """Of these kinds; `article` for those that always have one in English."""
        entry = self.pick(*kinds)
        placed = entry in self.book["topic.named"] or self.rng.random() > ORIGIN
        origin = None if placed else self.pick("origin")
        capitals = self.in_capitals and ("topic" in kinds or origin is not None)
        return noun({**entry, "en": article + entry["en"]}, origin, capitals)

    def topic(self) -> Phrase:
        return self.thing("topic", "topic.named")

    def document(self, *, named: bool = False) -> tuple[Phrase, Entry, Entry]:
        """What was done to it, and what somebody did to it; the named ones need no more words about them."""
        kind = self.rng.choice(("pact", "text"))
        verb = {lang: forms.split("/") for lang, forms in self.pick("verb", f"verb.{kind}").items()}
        was, did = ({lang: forms[i] for lang, forms in verb.items()} for i in (0, -1))
        return self.thing(kind, *[f"{kind}.named"] * named, article="the "), was, did

    def done(self) -> Entry:
        """The peace treaty was signed in May 1987."""
        (what, verb, _), when = self.document(named=True), self.date(past=True)
        return {
            "en": f"{what.en} was {verb['en']} {when['en']}.",
            "de": f"{what.de} wurde {when['de']} {verb['de']}.",
            "fr": f"{what.fr} a été {what.agreed(verb['fr'])} {when['fr']}.",
            "zh": f"{what.zh}于{when['zh']}{verb['zh']}。",
        }

    def done_about(self) -> Entry:
        """The report on the labour market was published in 1987."""
        (what, verb, _), about, when = self.document(), self.topic(), self.date(past=True)
        return {
            "en": f"{what.en} on {about.en} was {verb['en']} {when['en']}.",
            "de": f"{what.de} über {about.de_object} wurde {when['de']} {verb['de']}.",
            "fr": f"{what.fr} sur {about.fr} a été {what.agreed(verb['fr'])} {when['fr']}.",
            "zh": f"关于{about.zh}的{what.zh}于{when['zh']}{verb['zh']}。",
        }

    def does(self) -> Entry:
        """The parliament rejected the bill on free trade."""
        who, (what, _, verb), about = self.thing("body", article="the "), self.document(), self.topic()
        return {
            "en": f"{who.en} {verb['en']} {what.en} on {about.en}.",
            "de": f"{who.de} hat {what.de_object} über {about.de_object} {verb['de']}.",
            "fr": f"{who.fr} a {verb['fr']} {what.fr} sur {about.fr}.",
            "zh": f"{who.zh}{verb['zh']}了关于{about.zh}的{what.zh}。",
        }

    def in_force(self) -> Entry:
        what, about, when = self.thing("pact", article="the "), self.topic(), self.date(past=False)
        return {
            "en": f"{what.en} on {about.en} will enter into force {when['en']}.",
            "de": f"{what.de} über {about.de_object} tritt {when['de']} in Kraft.",
            "fr": f"{what.fr} sur {about.fr} entrera en vigueur {when['fr']}.",
            "zh": f"关于{about.zh}的{what.zh}将于{when['zh']}生效。",
        }

    def since(self) -> Entry:
        what, year = self.topic(), self.rng.randint(1950, 2025)
        return {
            "en": f"{what.en} has changed since {year}.",
            "de": f"{what.de} hat sich seit {year} verändert.",
            "fr": f"{what.fr} a changé depuis {year}.",
            "zh": f"自{year}年以来，{what.zh}发生了变化。",
        }

    def matters(self) -> Entry:
        what, which = self.topic(), self.topic()
        return {
            "en": f"{what.en} is important for {which.en}.",
            "de": f"{what.de} ist wichtig für {which.de_object}.",
            "fr": f"{what.fr} est {what.agreed('important')} pour {which.fr}.",
            "zh": f"{what.zh}对{which.zh}很重要。",
        }

    def life(self) -> Entry:
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

    def event(self) -> Entry:
        what, when = self.thing("event", article="the "), self.date(past=False)
        return {
            "en": f"{what.en} will take place {when['en']}.",
            "de": f"{what.de} findet {when['de']} statt.",
            "fr": f"{what.fr} aura lieu {when['fr']}.",
            "zh": f"{what.zh}将于{when['zh']}举行。",
        }

    def date(self, past: bool) -> Entry:
        """A day, a month or a year; the coming ones also without their year."""
        month, day = self.pick("month"), self.rng.randint(1, 28)
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
