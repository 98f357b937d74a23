"""Translation scores against a few lines of independent arithmetic and hand-worked fractions."""

import json
import math
import subprocess
import sys
from collections import Counter

import pytest

from regard.errors import RegardError
from regard.metrics.translation_scores import (
    LengthScore,
    TranslationScores,
    perplexity,
    score_translations,
    tokenize_lower,
)


def ngrams(items: list[str] | str, n: int) -> Counter:
    return Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1))


def bleu_by_hand(hypotheses: list[str], references: list[str]) -> float:
    """Return the corpus BLEU of texts with tokens separated by spaces; every order must have a match."""
    pairs = [(h.split(), r.split()) for h, r in zip(hypotheses, references, strict=True)]
    logs = []
    for n in range(1, 5):
        matches = sum((ngrams(h, n) & ngrams(r, n)).total() for h, r in pairs)
        logs.append(math.log(matches / sum(ngrams(h, n).total() for h, _ in pairs)))
    ours, theirs = sum(len(h) for h, _ in pairs), sum(len(r) for _, r in pairs)
    return 100 * min(1.0, math.exp(1 - theirs / ours)) * math.exp(sum(logs) / 4)


def chrf_by_hand(hypothesis: str, reference: str) -> float:
    """Return chrF2 of one pair: precision and recall averaged over character orders 1 to 6 without spaces."""
    h, r = hypothesis.replace(" ", ""), reference.replace(" ", "")
    precision = recall = 0.0
    for n in range(1, 7):
        matches = (ngrams(h, n) & ngrams(r, n)).total()
        precision += matches / (len(h) - n + 1) / 6
        recall += matches / (len(r) - n + 1) / 6
    return 100 * 5 * precision * recall / (4 * precision + recall)


HYPOTHESES = ["the cat sat on the mat today", "A man eats an apple in the park"]
REFERENCES = ["the cat sat on the red mat today .", "a man eats an apple in the old park"]


def scored(hypotheses: list[str], references: list[str], language: str = "en") -> TranslationScores:
    return score_translations(hypotheses, references, references, language)


def test_bleu_of_one_sentence_worked_by_hand() -> None:
    # 5 of 6, 4 of 5, 3 of 4 and 2 of 3 n-grams match; six words against seven shorten by exp(1 - 7/6).
    value = scored(["a b c d e x"], ["a b c d e f g"]).bleu.value
    assert value == pytest.approx(100 * math.exp(-1 / 6) * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)


def test_bleu_counts_over_the_corpus_and_case() -> None:
    scores = scored(HYPOTHESES, REFERENCES)
    lower = [[text.lower() for text in texts] for texts in (HYPOTHESES, REFERENCES)]
    assert scores.bleu.value == pytest.approx(bleu_by_hand(HYPOTHESES, REFERENCES))
    assert scores.bleu_lower.value == pytest.approx(bleu_by_hand(*lower))
    assert scores.bleu.value < scores.bleu_lower.value


def test_tokenized_bleu_is_bleu_on_the_tokens_shown() -> None:
    hypotheses = ["Der Mann trägt ein T-Shirt, z.B. am Strand.", "„Nein,“ sagte die Frau dem Kind."]
    references = ["Ein Mann trägt ein T-Shirt, z.B. am See.", "„Nein“, sagte die Frau dem Kind."]
    shown = [[tokenize_lower(text, "de") for text in texts] for texts in (hypotheses, references)]
    assert shown[0] == ["der mann trägt ein t-shirt , z.b. am strand .", '" nein " , sagte die frau dem kind .']
    assert scored(hypotheses, references, "de").bleu_tokenized.value == pytest.approx(bleu_by_hand(*shown))


def test_tokenized_bleu_is_not_smoothed() -> None:
    scores = scored(["a b c x"], ["a b c d"])  # no four words match
    assert scores.bleu_tokenized.value == 0
    assert scores.bleu.value > 0


def test_lower_case_comes_first() -> None:
    # A period before a lower-case word stays; tokenizing before lower-casing would have split it.
    assert tokenize_lower("Im Jahr 1999. Danach.", "de") == "im jahr 1999. danach ."


def test_tokenized_lower_keeps_hyphens_and_takes_regions() -> None:
    assert tokenize_lower("Ein T-Shirt.", "de") == "ein t-shirt ."
    assert tokenize_lower("It’s HERE.", "en-GB") == "it 's here ."


def test_chrf_worked_by_hand() -> None:
    assert scored(["the cat sat"], ["the cats sit"]).chrf.value == pytest.approx(
        chrf_by_hand("the cat sat", "the cats sit")
    )


def test_chinese_is_scored_on_characters() -> None:
    scores = scored(["我喜欢小猫"], ["我喜欢小狗"], "zh-CN")
    expected = bleu_by_hand(["我 喜 欢 小 猫"], ["我 喜 欢 小 狗"])
    assert scores.bleu.value == pytest.approx(expected)
    assert scores.bleu_tokenized.value == pytest.approx(expected)
    assert "tok:zh" in scores.bleu.signature
    assert "tok:zh" in scores.bleu_tokenized.signature


def test_japanese_is_scored_on_characters() -> None:
    assert "tok:char" in scored(["猫が好きです"], ["猫が好きだ"], "ja").bleu.signature


def test_signatures_say_what_was_done() -> None:
    scores = scored(HYPOTHESES, REFERENCES)
    for part in ("nrefs:1", "case:mixed", "tok:13a", "smooth:exp", "version:"):
        assert part in scores.bleu.signature
    for part in ("nc:6", "nw:0", "space:no", "version:"):
        assert part in scores.chrf.signature
    assert "case:lc" in scores.bleu_lower.signature
    for part in ("case:lc", "lowercase,moses-normalise-en,moses-tokenize-en", "hyphens:whole", "smooth:none"):
        assert part in scores.bleu_tokenized.signature
    assert "mixed" not in scores.bleu_tokenized.signature


def test_exact_match_is_a_percentage() -> None:
    exact = scored(["ja", "nein", "Ja", "gut"], ["ja", "nein", "ja", "schlecht"]).exact
    assert exact.value == 50
    assert "sentences:4" in exact.signature


def words(count: int) -> str:
    return " ".join(["wort"] * count)


def test_length_buckets() -> None:
    lengths = [1, 10, 11, 20, 45, 51, 60]
    references = [f"reference number {n} is a sentence" for n in lengths]
    hypotheses = [*references[:2], "something else", *references[3:]]
    buckets = score_translations(hypotheses, references, [words(n) for n in lengths], "en").by_length
    assert [(b.longest, b.sentences) for b in buckets] == [(10, 2), (20, 2), (50, 1), (60, 2)]
    assert buckets[0].bleu == pytest.approx(100)
    assert buckets[1].bleu < 100


def test_fifty_words_are_not_more_than_fifty() -> None:
    buckets = score_translations(["a b c d"], ["a b c d"], [words(50)], "en").by_length
    assert buckets == (LengthScore(50, 1, pytest.approx(100)),)


def test_to_dict_is_json() -> None:
    scores = scored(HYPOTHESES, REFERENCES)
    back = json.loads(json.dumps(scores.to_dict()))
    assert list(back) == ["bleu", "chrf", "bleu_lower", "bleu_tokenized", "exact", "by_length"]
    assert back["chrf"] == {"name": "chrF", "value": scores.chrf.value, "signature": scores.chrf.signature}
    assert back["by_length"] == [{"longest": 10, "sentences": 2, "bleu": scores.by_length[0].bleu}]


def test_table_lines_up() -> None:
    scores = scored(HYPOTHESES, REFERENCES)
    lines = scores.table().splitlines()
    assert len(lines) == 6
    assert lines[0].split()[:2] == ["BLEU", f"{scores.bleu.value:.2f}"]
    assert lines[0].endswith(scores.bleu.signature)
    signatures = [s.signature for s in scores.scores] + ["sentences:2"]
    assert len({line.index(signature) for line, signature in zip(lines, signatures, strict=True)}) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((2, 1, 2), "2 hypotheses, 1 references and 2 sources"), ((1, 1, 3), "3 sources"), ((0, 0, 0), "got none")],
)
def test_counts_must_agree(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(RegardError, match=message) as error:
        score_translations(*(["a"] * size for size in sizes), "de")
    assert "\n" not in str(error.value)


def test_perplexity() -> None:
    assert perplexity(3 * math.log(8), 3) == pytest.approx(8)  # as unsure as between eight equal choices
    assert perplexity(0.0, 5) == 1
    assert perplexity(1e6, 1) == math.inf
    with pytest.raises(RegardError, match="at least one token"):
        perplexity(1.0, 0)


def test_import_is_light() -> None:
    program = (
        "import sys, regard.metrics.translation_scores; print([m for m in ('sacrebleu', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
