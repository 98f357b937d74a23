"""Scores of translations: BLEU, chrF and exact matches of a corpus, each with a signature that says how it was computed.

`bleu` and `chrf` are sacreBLEU's and the ones to report. `bleu_tokenized` is computed on text that is prepared with Moses
(moses_tokenizer.py), and is comparable only with the scores of papers that do the same.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from regard.errors import RegardError
from regard.metrics.moses_tokenizer import moses_tokenize, normalize_punctuation

LENGTH_BOUNDS = (10, 20, 30, 40, 50)
# sacreBLEU's tokenizer for languages without spaces between words: characters ("zh" keeps foreign words whole).
UNSPACED = {"zh": "zh", "ja": "char", "th": "char", "km": "char", "lo": "char", "my": "char"}


@dataclass(frozen=True)
class Score:
    """A corpus score, in percent."""

    name: str
    value: float
    signature: str


@dataclass(frozen=True)
class LengthScore:
    """The cased BLEU of sentences whose source has up to `longest` words, and more than the bucket before."""

    longest: int
    sentences: int
    bleu: float


@dataclass(frozen=True)
class TranslationScores:
    """All scores of a set of translations."""

    bleu: Score
    chrf: Score
    bleu_lower: Score
    bleu_tokenized: Score
    exact: Score
    by_length: tuple[LengthScore, ...]

    @property
    def scores(self) -> tuple[Score, ...]:
        return self.bleu, self.chrf, self.bleu_lower, self.bleu_tokenized, self.exact

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as dictionaries, lists, strings and numbers for JSON."""
        return asdict(self) | {"by_length": [asdict(bucket) for bucket in self.by_length]}

    def table(self) -> str:
        """Return aligned lines of name, value and signature, then BLEU by source length."""
        rows = [(score.name, score.value, score.signature) for score in self.scores]
        rows += [(f"BLEU, up to {b.longest} words", b.bleu, f"sentences:{b.sentences}") for b in self.by_length]
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{width}}  {value:6.2f}  {signature}" for name, value, signature in rows)


def score_translations(
    hypotheses: Sequence[str], references: Sequence[str], sources: Sequence[str], language: str
) -> TranslationScores:
    """Return all scores of `hypotheses` in `language` (a code such as "de" or "zh-CN") with one reference each."""
    _check_counts(hypotheses, references, sources)
    tokenizer = UNSPACED.get(_base(language), "13a")
    lower = _bleu("BLEU lower-cased", hypotheses, references, tokenize=tokenizer, lowercase=True)
    return TranslationScores(
        bleu=_bleu("BLEU", hypotheses, references, tokenize=tokenizer),
        chrf=_chrf(hypotheses, references),
        bleu_lower=lower,
        bleu_tokenized=_bleu_tokenized(hypotheses, references, language, lower),
        exact=_exact(hypotheses, references),
        by_length=_by_length(hypotheses, references, sources, tokenizer),
    )


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> float:
    """Return cased sacreBLEU alone, for validation during training."""
    return _bleu("BLEU", hypotheses, references, tokenize=UNSPACED.get(_base(language), "13a")).value


@functools.cache
def bleu_tokenizer(language: str) -> Callable[[str], str]:
    """Return sacreBLEU's tokenizer for a language: a function that puts spaces between the tokens of a text."""
    from sacrebleu.metrics import BLEU

    found: Callable[[str], str] = BLEU(tokenize=UNSPACED.get(_base(language), "13a")).tokenizer
    return found


def tokenize_lower(text: str, language: str) -> str:
    """Return the text as `bleu_tokenized` prepares it: lower-cased, normalized, then tokenized, in Multi30k's order."""
    language = _base(language)
    return moses_tokenize(normalize_punctuation(text.lower(), language), language)


def perplexity(total_negative_log_likelihood: float, tokens: int) -> float:
    """Return `exp` of the mean negative log-likelihood (in nats) per token, or infinity where a float overflows."""
    if tokens < 1:
        raise RegardError(f"Perplexity needs at least one token, got {tokens}: check that the data is not empty.")
    try:
        return math.exp(total_negative_log_likelihood / tokens)
    except OverflowError:
        return math.inf


def _base(language: str) -> str:
    """Return the language of a code with or without a region: zh for zh-CN."""
    return re.split("[-_]", language.lower())[0]


def _check_counts(hypotheses: Sequence[str], references: Sequence[str], sources: Sequence[str]) -> None:
    counts = len(hypotheses), len(references), len(sources)
    if len(set(counts)) > 1:
        raise RegardError(
            "Scoring needs one reference and one source per hypothesis, got {} hypotheses, {} references and {} "
            "sources: check that the files are aligned line by line.".format(*counts)
        )
    if not hypotheses:
        raise RegardError("Scoring needs at least one sentence, got none: check that the files are not empty.")


def _bleu(name: str, hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> Score:
    from sacrebleu.metrics import BLEU

    metric = BLEU(**options)
    value = metric.corpus_score(hypotheses, [references]).score
    return Score(name, value, str(metric.get_signature()))


def _chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    value = metric.corpus_score(hypotheses, [references]).score
    return Score("chrF", value, str(metric.get_signature()))


def _bleu_tokenized(hypotheses: Sequence[str], references: Sequence[str], language: str, lower: Score) -> Score:
    """Return BLEU of Moses tokens as fairseq computes it: four orders, no smoothing (zero if an order has no match).

    Moses does not segment languages without spaces; for them it is the lower-cased BLEU, as the signature says.
    """
    name, base = "BLEU tokenized lower-cased", _base(language)
    if base in UNSPACED:
        return replace(lower, name=name)
    prepared = [[tokenize_lower(text, base) for text in texts] for texts in (hypotheses, references)]
    plain = _bleu(name, *prepared, tokenize="none", force=True, smooth_method="none")
    steps = f"lowercase,moses-normalise-{base},moses-tokenize-{base}(hyphens:whole,escape:no)"
    return replace(
        plain, signature=plain.signature.replace("case:mixed", "case:lc").replace("tok:none", f"tok:{steps}")
    )


def _exact(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    same = sum(hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True))
    return Score("Exact match", 100 * same / len(hypotheses), f"nrefs:1|case:mixed|sentences:{len(hypotheses)}")


def _by_length(
    hypotheses: Sequence[str], references: Sequence[str], sources: Sequence[str], tokenizer: str
) -> tuple[LengthScore, ...]:
    """Return BLEU by source length in space-separated words; the last, open bucket ends at the longest source."""
    lengths = [len(source.split()) for source in sources]
    bounds = (-1, *LENGTH_BOUNDS, max(*LENGTH_BOUNDS, *lengths))
    buckets = []
    for above, longest in pairwise(bounds):
        chosen = [i for i, length in enumerate(lengths) if above < length <= longest]
        if chosen:
            pairs = [hypotheses[i] for i in chosen], [references[i] for i in chosen]
            buckets.append(LengthScore(longest, len(chosen), _bleu("BLEU", *pairs, tokenize=tokenizer).value))
    return tuple(buckets)
