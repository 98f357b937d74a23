"""How good translations are: corpus scores, each with a signature that says exactly how it was computed.

`bleu` and `chrf` are sacreBLEU's and the ones to report. `bleu_tokenised` is counted like the scores of papers that
prepare their text with Moses (see `moses.py`), to be set beside those and nothing else.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from regard.errors import RegardError
from regard.metrics.moses_tokenizer import normalise_punctuation, tokenise

LENGTH_BOUNDS = (10, 20, 30, 40, 50)
# Languages written without spaces between words are scored on characters ("zh" keeps foreign words whole).
UNSPACED = {"zh": "zh", "ja": "char", "th": "char", "km": "char", "lo": "char", "my": "char"}


@dataclass(frozen=True)
class Score:
    """A corpus score, in percent."""

    name: str
    value: float
    signature: str


@dataclass(frozen=True)
class LengthScore:
    """Cased BLEU of the sentences whose source has up to `longest` words, and more than the bucket before."""

    longest: int
    sentences: int
    bleu: float


@dataclass(frozen=True)
class TranslationScores:
    bleu: Score
    chrf: Score
    bleu_lower: Score
    bleu_tokenised: Score
    exact: Score
    by_length: tuple[LengthScore, ...]

    @property
    def scores(self) -> tuple[Score, ...]:
        return self.bleu, self.chrf, self.bleu_lower, self.bleu_tokenised, self.exact

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, ready for JSON."""
        return asdict(self) | {"by_length": [asdict(bucket) for bucket in self.by_length]}

    def table(self) -> str:
        """Aligned lines: name, value, signature; then BLEU by source length."""
        rows = [(score.name, score.value, score.signature) for score in self.scores]
        rows += [(f"BLEU, up to {b.longest} words", b.bleu, f"sentences:{b.sentences}") for b in self.by_length]
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{width}}  {value:6.2f}  {signature}" for name, value, signature in rows)


def score(
    hypotheses: Sequence[str], references: Sequence[str], sources: Sequence[str], language: str
) -> TranslationScores:
    """All scores of `hypotheses` in `language` (a code such as "de" or "zh-CN"), one reference each."""
    _check_counts(hypotheses, references, sources)
    tokenizer = UNSPACED.get(_base(language), "13a")
    lower = _bleu("BLEU lower-cased", hypotheses, references, tokenize=tokenizer, lowercase=True)
    return TranslationScores(
        bleu=_bleu("BLEU", hypotheses, references, tokenize=tokenizer),
        chrf=_chrf(hypotheses, references),
        bleu_lower=lower,
        bleu_tokenised=_bleu_tokenised(hypotheses, references, language, lower),
        exact=_exact(hypotheses, references),
        by_length=_by_length(hypotheses, references, sources, tokenizer),
    )


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> float:
    """Cased sacreBLEU alone: what training watches."""
    return _bleu("BLEU", hypotheses, references, tokenize=UNSPACED.get(_base(language), "13a")).value


def tokenize_lower(text: str, language: str) -> str:
    """`text` as `bleu_tokenised` sees it: lower-cased first, then normalised, then tokenised, in Multi30k's order."""
    language = _base(language)
    return tokenise(normalise_punctuation(text.lower(), language), language)


def perplexity(total_negative_log_likelihood: float, tokens: int) -> float:
    """`exp` of the mean negative log-likelihood (in nats) per token; infinite where it exceeds a float."""
    if tokens < 1:
        raise RegardError(f"Perplexity needs at least one token, got {tokens}: check that the data is not empty.")
    try:
        return math.exp(total_negative_log_likelihood / tokens)
    except OverflowError:
        return math.inf


def _base(language: str) -> str:
    """The language of a code with or without a region: zh of zh-CN."""
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


def _bleu_tokenised(hypotheses: Sequence[str], references: Sequence[str], language: str, lower: Score) -> Score:
    """BLEU as fairseq counts it on Moses tokens: four orders, no smoothing (zero if an order has no match).

    Moses finds no words where there are no spaces; there it is the lower-cased BLEU, as its signature says.
    """
    name, base = "BLEU tokenised lower-cased", _base(language)
    if base in UNSPACED:
        return replace(lower, name=name)
    prepared = [[tokenize_lower(text, base) for text in texts] for texts in (hypotheses, references)]
    plain = _bleu(name, *prepared, tokenize="none", force=True, smooth_method="none")
    steps = f"lowercase,moses-normalise-{base},moses-tokenise-{base}(hyphens:whole,escape:no)"
    return replace(
        plain, signature=plain.signature.replace("case:mixed", "case:lc").replace("tok:none", f"tok:{steps}")
    )


def _exact(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    same = sum(hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True))
    return Score("Exact match", 100 * same / len(hypotheses), f"nrefs:1|case:mixed|sentences:{len(hypotheses)}")


def _by_length(
    hypotheses: Sequence[str], references: Sequence[str], sources: Sequence[str], tokenizer: str
) -> tuple[LengthScore, ...]:
    """BLEU per bucket of source length in space-separated words; the open last bucket ends at its longest source."""
    lengths = [len(source.split()) for source in sources]
    bounds = (-1, *LENGTH_BOUNDS, max(*LENGTH_BOUNDS, *lengths))
    buckets = []
    for above, longest in pairwise(bounds):
        chosen = [i for i, length in enumerate(lengths) if above < length <= longest]
        if chosen:
            pairs = [hypotheses[i] for i in chosen], [references[i] for i in chosen]
            buckets.append(LengthScore(longest, len(chosen), _bleu("BLEU", *pairs, tokenize=tokenizer).value))
    return tuple(buckets)
