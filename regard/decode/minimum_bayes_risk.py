"""Minimum-Bayes-risk decoding: of several candidates, the one that is most like all of them (Kumar and Byrne 2004).

A model gives N candidates y_1 ... y_N of a sentence, usually samples (Eikema and Aziz 2020), and each is scored by its
expected utility, the candidates standing for what the reference may be:

    score(y) = 1/N * sum over i of utility(y, y_i)

The utility is sentence-level chrF, BLEU or GLEU (metrics/sentence_scores.py). The most probable translation can be an odd
one, such as an empty one; one that agrees with many probable translations is not. Samples are best taken by epsilon sampling
(Freitag et al. 2023), which never draws a token that has less than 2 % of the probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from regard.config import DecodeConfig
from regard.decode.constraints import Hypothesis, searching
from regard.metrics.sentence_scores import pairwise_scores

EPSILON = 0.02  # of candidates by epsilon sampling, where decode.epsilon is not set


def candidate_options(options: DecodeConfig) -> DecodeConfig:
    """Return the settings by which the candidates are decoded: `decode.mbr` samples, or hypotheses of so wide a beam.

    A temperature and top-k, top-p and min-p that are set are those of the samples."""
    n = options.mbr
    if options.mbr_candidates == "beam":
        kept = {"coverage_penalty": options.coverage_penalty, "prune": options.prune}
        return searching(options, beam=n, nbest=n, **kept)
    epsilon = (options.epsilon or EPSILON) if options.mbr_candidates == "epsilon" else 0.0
    return searching(options, beam=1, nbest=n, temperature=options.temperature or 1.0, epsilon=epsilon)


def rank_by_risk(
    candidates: Sequence[Hypothesis], texts: Sequence[str], options: DecodeConfig, language: str
) -> list[Hypothesis]:
    """Return the `nbest` candidates with the highest expected utilities, which are their scores, best first.

    `texts` are those of the candidates, in the target language `language`. Of candidates with the same text the first is
    returned; all of them count. Of equal utilities the candidate that comes first is better."""
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    first = {text: candidate for candidate, text in zip(reversed(candidates), reversed(texts), strict=True)}
    shares = np.array([count / len(texts) for count in counts.values()])
    utilities = pairwise_scores(list(counts), options.mbr_metric, language) @ shares
    ranked = np.argsort(-utilities, kind="stable")[: options.nbest]
    distinct = [first[text] for text in counts]
    return [replace(distinct[i], score=float(utilities[i])) for i in ranked]
