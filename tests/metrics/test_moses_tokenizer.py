"""The Moses pipeline against hand-worked sentences, `sacremoses`, and the token counts Multi30k publishes."""

import lzma
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.metrics.moses_tokenizer import moses_tokenize, normalize_punctuation

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "multi30k"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"Multi30k not found in {DATA} (set REGARD_DATA)")


def multi30k(split: str, language: str) -> list[str]:
    with lzma.open(DATA / f"{split}.{language}.xz", "rt", encoding="utf-8") as lines:
        return [line.rstrip("\n") for line in lines]


TOKENS = [
    ("en", "I ate an apple.", "I ate an apple ."),
    ("en", "Wait ... what?", "Wait ... what ?"),
    ("en", "And then...he fell....", "And then ... he fell ...."),
    ("en", "Dr. Smith met Mrs. Jones.", "Dr. Smith met Mrs. Jones ."),
    ("en", "She lives in St. Louis, Mo.", "She lives in St. Louis , Mo ."),
    ("en", "J. R. R. Tolkien wrote it.", "J. R. R. Tolkien wrote it ."),
    ("en", "He moved to the U.S. Then he left.", "He moved to the U.S. Then he left ."),
    ("en", "fruit, e.g. apples, and No. 5", "fruit , e.g. apples , and No. 5"),
    ("en", "He said No. Then he left.", "He said No . Then he left ."),
    ("en", "a stop. the next word is lower", "a stop. the next word is lower"),
    ("en", "It's John's, isn't it?", "It 's John 's , isn 't it ?"),
    ("en", "the dogs' bowls", "the dogs ' bowls"),
    ("en", "rock'n'roll in the 1990's", "rock 'n'roll in the 1990 's"),
    ("en", "he said 'hello' twice", "he said ' hello ' twice"),
    ("en", "he said 'go.'", "he said ' go . '"),
    ("en", "1,000 boys,10 girls,and 2,5", "1,000 boys , 10 girls , and 2,5"),
    ("en", "in 2016, they won 3.5 points", "in 2016 , they won 3.5 points"),
    ("en", "a,b,c", "a , b , c"),
    ("en", "it ends with 5,", "it ends with 5 ,"),
    ("en", "$5 & 10% (about)", "$ 5 & 10 % ( about )"),
    ("en", "and/or <tag> [x] | y", "and / or < tag > [ x ] | y"),
    ("en", 'a "quoted" word', 'a " quoted " word'),
    ("en", "a well-known T-shirt", "a well-known T-shirt"),
    ("en", "snake_case and a@b.org", "snake _ case and a @ b.org"),
    ("en", "20 m² or ½ of it", "20 m ² or ½ of it"),
    ("en", "  many \t spaces\u00a0here ", "many spaces here"),
    ("en", "bell\x07rings", "bellrings"),
    ("en", "", ""),
    ("en", ".", "."),
    ("de", "Ein Mann schläft in der Straße.", "Ein Mann schläft in der Straße ."),
    ("de", "Obst, z.B. Äpfel", "Obst , z.B. Äpfel"),
    ("de", "Prof. Dr. Müller wohnt ca. 3 km entfernt.", "Prof. Dr. Müller wohnt ca. 3 km entfernt ."),
    ("de", "Der 3. Mann und Heinrich VIII. von England.", "Der 3. Mann und Heinrich VIII. von England ."),
    ("de", "Das Trikot mit der Nummer 10.", "Das Trikot mit der Nummer 10."),
    ("de", "im Jahr 1999. Danach", "im Jahr 1999 . Danach"),
    ("de", "Äpfel, Birnen usw. Danach", "Äpfel , Birnen usw. Danach"),
    ("de", "Wie geht's?", "Wie geht ' s ?"),
    ("de", "Er zahlte 1.000,50 €!", "Er zahlte 1.000,50 € !"),
    ("fr", "L'eau n'est pas là, aujourd'hui.", "L' eau n' est pas là , aujourd' hui ."),
    ("fr", "M. Dupont, cf. Voltaire, vol. Paris", "M. Dupont , cf. Voltaire , vol. Paris"),
    ("nl", "Zo'n foto, Mr. Jansen.", "Zo ' n foto , Mr. Jansen ."),
]


@pytest.mark.parametrize(("language", "text", "expected"), TOKENS)
def test_tokens(language: str, text: str, expected: str) -> None:
    assert moses_tokenize(text, language) == expected


PUNCTUATION = [
    ("en", "He said “no”, twice.", 'He said "no," twice.'),
    ("en", 'the word "end".', 'the word "end."'),
    ("de", "„Nein,“ sagte er.", '"Nein", sagte er.'),
    # At the end of the line too: the script reads the line break after the quotation mark.
    ("de", "Er sagte: „Komm.“", 'Er sagte: "Komm".'),
    ("cs", 'to je "ano,"', 'to je "ano,"'),
    ("en", "it’s John‘s", "it's John's"),
    ("en", "the dogs’ bowls", 'the dogs" bowls'),
    ("en", "``quoted''", '" quoted "'),
    ("en", "1990–1995 — a time…", "1990-1995 - a time..."),
    ("en", "text( inside )and (more ) .", "text (inside) and (more)."),
    ("en", "5 % : yes ; no", "5%: yes; no"),
    ("fr", "«\u00a0Oui\u00a0»\u00a0: vraiment\u00a0?", '"Oui" : vraiment?'),
    ("fr", "10\u00a0000 m", "10,000 m"),
    ("en", "10\u00a0000 m", "10.000 m"),
    ("en", "a\r", "a"),
]


@pytest.mark.parametrize(("language", "text", "expected"), PUNCTUATION)
def test_punctuation(language: str, text: str, expected: str) -> None:
    assert normalize_punctuation(text, language) == expected


@given(st.text(st.characters(exclude_categories=["C"])), st.sampled_from(["en", "de", "fr", "nl"]))
def test_tokenizing_moves_spaces_only(text: str, language: str) -> None:
    tokens = moses_tokenize(text, language)
    assert tokens == " ".join(tokens.split())
    assert tokens.replace(" ", "") == "".join(text.split())


def sacremoses_prepare(lines: list[str], language: str) -> list[str]:
    sacremoses = pytest.importorskip("sacremoses")
    normaliser = sacremoses.MosesPunctNormalizer(language, perl_parity=True)
    tokenizer = sacremoses.MosesTokenizer(language)
    return [" ".join(tokenizer.tokenize(normaliser.normalize(line), escape=False)) for line in lines]


@needs_data
@pytest.mark.parametrize("language", ["en", "de"])
def test_agrees_with_sacremoses_on_multi30k(language: str) -> None:
    lines = [line.lower() for line in multi30k("val", language)]
    ours = [moses_tokenize(normalize_punctuation(line, language), language) for line in lines]
    theirs = sacremoses_prepare(lines, language)
    different = {i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b}
    # One German line ends in a period and a quotation mark: sacremoses sees no line break there, the script did, and
    # Multi30k's own tokenized file has the order below.
    assert different == ({655} if language == "de" else set())
    assert language == "en" or ours[655].endswith('tea " .')


@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_agrees_with_sacremoses_on_the_hand_made_sentences(language: str) -> None:
    lines = [text for code, text, _ in TOKENS if code == language]
    ours = [moses_tokenize(normalize_punctuation(line, language), language) for line in lines]
    assert ours == sacremoses_prepare(lines, language)


PUBLISHED_COUNTS = {  # words of the tokenized files, from the statistics in the README of multi30k/dataset
    "val": {"en": 13308, "de": 12828, "fr": 14381},
    "test_2016_flickr": {"en": 12968, "de": 12103, "fr": 13988},
    "test_2017_flickr": {"en": 11376, "de": 10758, "fr": 12596},
}


@needs_data
@pytest.mark.parametrize("split", PUBLISHED_COUNTS)
@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_counts_the_published_number_of_tokens(split: str, language: str) -> None:
    lines = multi30k(split, language)
    counts = [len(moses_tokenize(normalize_punctuation(line.lower(), language), language).split()) for line in lines]
    assert sum(counts) == PUBLISHED_COUNTS[split][language]
