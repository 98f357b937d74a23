"""Data augmentation: pairs with names and numbers replaced on both sides, and pairs with English words in title case.

A name or number that both sides share is replaced by another one or by a placeholder, so that the model learns to copy it
whatever it is. `regard.text.placeholders` puts placeholders in place of links and the like. Words in title case occur in
headings and terms, but hardly in everyday sentences.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

Pair = tuple[str, str]
NUMBER, NAME = re.compile(r"\d[\d.,:]*\d|\d"), re.compile(r"\b[A-Z][a-z]{2,}\b")
LOWER = re.compile(r"\b[a-z]{3,}\b")
OTHER = r"[^\W\u3400-\u9fff]"  # a letter or digit that is not Chinese, since Chinese has no spaces around names
# A whole word: not a part of CO2, 9/11, Anna-Lena or d'Anna.
WHOLE = rf"(?<!{OTHER})(?<!['’])(?<!{OTHER}[-./:,]){{}}(?!{OTHER})(?![-./:,]{OTHER})"
NAMES = {  # names and their Chinese spellings
    "Tom": ("汤姆", "湯姆"),
    "Mary": ("玛丽", "瑪麗", "瑪莉"),
    "John": ("约翰", "約翰"),
    "Boston": ("波士顿", "波士頓"),
    "Japan": ("日本",),
    "Tokyo": ("东京", "東京"),
    "China": ("中国", "中國"),
    "America": ("美国", "美國"),
}
COPY_SHARE, COPY_SHARE_ZH = 0.2, 0.5  # of the pairs with a shared name or number; Chinese has few of these
OFTEN = 5  # times in lower case, from which a word is no name
REAL_NAMES = (  # with letters and signs that names in the corpora seldom have
    "Yıldız Nürnberg Göttingen Jürgen Lefèvre Chloé O'Neill McAllister Moreau D'Angelo Müller Schäfer Françoise "
    "Łukasz García Núñez Øystein Çelik Şahin Dvořák Kovačević Nguyễn O'Connor MacDonald DuPont Björk Zoë Renée Köln "
    "Würzburg Düsseldorf Zürich Genève Besançon Orléans Málaga São Tomé Reykjavík Gdańsk Brno Plzeň Györ Małgorzata "
    "Siobhán Seán Niamh Aoife Håkon Sørensen Jönsson Äkäslompolo Hämäläinen Papadopoulos Ivanova Petrović Szabó "
    "Horváth Tóth Kaya Öztürk Erdoğan Fernández Muñoz Peña João Gonçalves Araújo Conceição Beauchêne Gagné Bélanger "
    "Côté Thérèse Benoît Anaïs Noémie Weiß Groß Strauß Krämer Böhm Grünwald Kühn Hölderlin Anne-Marie Jean-Luc "
    "Hans-Peter Karl-Heinz Smith-Jones Lévi-Strauss Bergen-Belsen Stratford Edinburgh Toronto Melbourne Chicago "
    "Houston Seattle Denver Glasgow Dublin Patel Singh Kumar Okafor Mbeki Adeyemi Tanaka Yamamoto Kim Park Nakamura "
    "Hassan Rahman Al-Masri Haddad Cohen Levy Goldberg Rosenthal iPhone YouTube LinkedIn PayPal eBay GitHub Windows "
    "Android Bluetooth Siemens Bosch Renault Michelin Airbus Toyota Samsung Huawei"
)
SYLLABLES = ("ka", "ro", "min", "tel", "da", "su", "vor", "lin", "be", "xa", "jo", "wen", "pri", "gu", "ny")
TITLE_SHARE, TITLE_WORDS = 0.05, 3  # share of the pairs; longest run of capitalized words


# ---- copies ----------------------------------------------------------------------------------------------------------


def make_copies(pairs: list[Pair], lang: str, ordinary: set[str]) -> list[Pair]:
    """Return some of the pairs with one or two names or numbers replaced on both sides."""
    rng, made = random.Random(0), []
    share = COPY_SHARE_ZH if lang.startswith("zh") else COPY_SHARE
    for source, target in pairs:
        found = find_shared(source, target, ordinary)
        if found and rng.random() < share:
            chosen = rng.sample(found, min(len(found), rng.choice((1, 1, 2))))
            new = [
                make_substitute(english, mark, rng)
                for (english, _), mark in zip(chosen, rng.sample(range(1, 5), 2), strict=False)
            ]
            english, foreign = (dict(zip(side, new, strict=True)) for side in zip(*chosen, strict=True))
            made.append((replace_words(source, english), replace_words(target, foreign)))
    return made


def find_ordinary_words(texts: Iterable[str]) -> set[str]:
    """Return the words that often occur in lower case and so are no names, such as Union, Minister, The."""
    counts = Counter(word for text in texts for word in LOWER.findall(text))
    return {word for word, n in counts.items() if n >= OFTEN}


def find_shared(source: str, target: str, ordinary: set[str]) -> list[Pair]:
    """Return names and numbers that occur once on either side, in the spelling of each; none is a part of another."""
    words = [word for pattern in (NUMBER, NAME) for word in dict.fromkeys(pattern.findall(source))]
    both = [
        (word, foreign)
        for word in words
        for foreign in (word, *NAMES.get(word, ()))
        if word.lower() not in ordinary and occurs_once(word, source) and occurs_once(foreign, target)
    ]
    return [pair for pair in both if not any(pair != rest and pair[0] in rest[0] for rest in both)]


def occurs_once(word: str, text: str) -> bool:
    """Return whether a word occurs as a whole word and nowhere else.

    The Tom in "Toms" would not be replaced, so neither is a Tom beside it.
    """
    return text.count(word) == 1 and bool(whole_word_pattern(word).search(text))


@cache
def whole_word_pattern(word: str) -> re.Pattern[str]:
    return re.compile(WHOLE.format(re.escape(word)))


def replace_words(text: str, new: dict[str, str]) -> str:
    """Replace all words in one pass, so that the 2 of an inserted placeholder is not taken for a number of the text."""
    return re.sub("|".join(map(re.escape, new)), lambda found: new[found[0]], text)


def make_substitute(word: str, mark: int, rng: random.Random) -> str:
    """Return a placeholder, or a random number or name."""
    if rng.random() < 0.3:
        return f"⟦{mark}⟧"
    if word[0].isdigit():
        return re.sub(r"\d", lambda _: str(rng.randrange(10)), word)
    if rng.random() < 0.5:
        return rng.choice(REAL_NAMES.split())
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(2, 4))).capitalize()


# ---- title case ------------------------------------------------------------------------------------------------------


def title_case_pairs(pairs: list[Pair]) -> list[Pair]:
    """Return some of the pairs with a run of one to three English words in title case; the other side stays as it is."""
    rng = random.Random(0)
    chosen = [pair for pair in pairs if rng.random() < TITLE_SHARE]
    made = [(capitalize_run(source, rng), target) for source, target in chosen]
    return [new for new, old in zip(made, chosen, strict=True) if new != old]


def capitalize_run(text: str, rng: random.Random) -> str:
    """Capitalize a run of words that are in lower case and not the first of the sentence."""
    first, *words = text.split(" ")
    starts = [i for i, word in enumerate(words) if word[0].islower()]
    if not starts:
        return text
    begin = rng.choice(starts)
    for i in range(begin, min(begin + rng.randint(1, TITLE_WORDS), len(words))):
        if not words[i][0].islower():
            break
        words[i] = words[i][0].upper() + words[i][1:]
    return " ".join([first, *words])
