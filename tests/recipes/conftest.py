"""Fixtures for the stages of the translator's recipe, which are scripts that import each other by name."""

from __future__ import annotations

import lzma
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parents[2] / "recipes" / "translator"))


def write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", preset=0) as file:
        file.writelines(line + "\n" for line in lines)


@pytest.fixture
def write() -> Callable[[Path, Sequence[str]], None]:
    return write_lines


class FakeConverter:
    """A stand-in for OpenCC, which is needed to make the training data and for nothing else."""

    def __init__(self, config: str) -> None:
        assert config == "s2twp"  # simplified to traditional Chinese, with the words of Taiwan

    def convert(self, text: str) -> str:
        return text.translate(str.maketrans("马页讲机这里", "馬頁講機這裡"))


def make_sentences(kind: str, numbers: Sequence[int]) -> dict[str, list[str]]:
    """Return numbered sentences of one kind in all languages."""
    patterns = {
        "everyday": {
            "en": "Number {} is what Tom told me.",
            "de": "Nummer {} ist, was Tom mir sagte.",
            "fr": "Le numéro {} est ce que Tom m'a dit.",
        },
        "speech": {
            "en": "Session {} is now open.",
            "de": "Sitzung {} ist eröffnet.",
            "fr": "La séance {} est ouverte.",
        },
        "polite": {
            "en": "I thank you for report {}.",
            "de": "Ich danke Ihnen für Bericht {}.",
            "fr": "Je vous remercie du rapport {}.",
        },
        "php-doc": {
            "en": "Page {} describes the machine.",
            "de": "Seite {} beschreibt die Maschine.",
            "fr": "La page {} décrit la machine.",
            "zh": "第{}页讲机器。",
        },
        "wesnoth": {
            "en": "You have {} horses in the stable.",
            "de": "Du hast {} Pferde im Stall.",
            "fr": "Tu as {} chevaux à l'écurie.",
            "zh": "你有{}匹马在这里。",
        },
    }
    made = {lang: [pattern.format(i) for i in numbers] for lang, pattern in patterns[kind].items()}
    if kind == "everyday":  # Chinese of this corpus mixes the scripts
        made["zh"] = [f"{i}号是汤姆告诉我的。" if i % 2 else f"{i}號是湯姆告訴我的。" for i in numbers]
    return made


@pytest.fixture(scope="session")
def original_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return corpora of a few lines under the names of the real ones; no test may change them."""
    root = tmp_path_factory.mktemp("corpora") / "data"

    def write_sides(path: str, sides: dict[str, list[str]], *languages: str) -> None:
        for lang in languages:
            write_lines(root / path.format(lang), sides[lang])

    for lang in ("de", "fr", "zh"):
        for split, numbers in (("train", range(100, 300)), ("val", range(300, 305)), ("test", range(305, 310))):
            write_sides(f"tatoeba/en-{lang}.{split}.{{}}.xz", make_sentences("everyday", numbers), "en", lang)
    write_lines(root / "tatoeba" / "en-zh.test.script.xz", ["cmn_Hans", "cmn_Hant"] * 2 + ["cmn_Hans"])

    for split, numbers in (("train", range(100, 200)), ("val", range(200, 203))):
        sides = make_sentences("speech", numbers)
        sides["en"] += [f"Same {split}.", "NUMBER 306 - is what Tom told me!"]
        sides["de"] += [f"Same {split}.", "Nummer 7 ist, was Tom sagte."]
        write_sides(f"europarl-en-de/{split}.{{}}.xz", sides, "en", "de")
    write_sides("europarl-en-de-more/train.{}.xz", make_sentences("polite", range(20)), "en", "de")
    write_sides("europarl-en-fr/train.{}.xz", make_sentences("polite", range(20)), "en", "fr")

    news = make_sentences("php-doc", range(500, 503))  # the documentation has one of these sentences too
    write_sides("ntrex/ntrex.{}.xz", news | {"zh-TW": news["zh"]}, "en", "de", "fr", "zh", "zh-TW")
    for lang in ("de", "fr", "zh"):
        kinds = {"php-doc": range(461, 501), "wesnoth": range(600, 640)}
        parts = [(source, make_sentences(source, numbers)) for source, numbers in kinds.items()]
        if lang != "zh":
            parts.append(("europarl", make_sentences("speech", range(700, 710))))
        sources = [source for source, sides in parts for _ in sides["en"]]
        both = {side: [line for _, sides in parts for line in sides[side]] for side in ("en", lang)}
        write_sides(f"docs-en-{lang}/train.{{}}.xz", both | {"src": sources}, "en", lang, "src")
        write_sides(f"docs-en-{lang}/valid.{{}}.xz", make_sentences("php-doc", range(800, 804)), "en", lang)
    text = [
        " = Rivers = ",
        " The river is very long , and deep . It is <unk> to many people here . Here is one more sentence . ",
    ]
    write_lines(root / "lm" / "wikitext2.train.txt.xz", text)
    return root


@pytest.fixture(scope="session")
def original_work(original_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of stage 1 for the corpora; no test may change it."""
    import prepare

    folder = tmp_path_factory.mktemp("prepared") / "work"
    opencc = ModuleType("opencc")
    opencc.OpenCC = FakeConverter  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "opencc", opencc)
        prepare.main(original_data, folder)
    return folder


@pytest.fixture
def data(original_data: Path, tmp_path: Path) -> Path:
    """Return a copy of the corpora that a test may change."""
    return Path(shutil.copytree(original_data, tmp_path / "data"))


@pytest.fixture
def work(original_work: Path, tmp_path: Path) -> Path:
    """Return a copy of the output of stage 1 that a test may change."""
    return Path(shutil.copytree(original_work, tmp_path / "work"))
