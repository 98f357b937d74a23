"""BLEU of sentences in lower case without full stops or in capitals, before and after restoring their casing.

    python recipes/translator/score_casing.py MODEL WORK [--sentences 200]

It translates validation sentences from English, greedily, as they are and after `regard.text.casing`. BLEU is lower-cased
and ignores the last punctuation mark, which the inputs lack.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from sacrebleu.metrics import BLEU

import regard
from regard.data.parallel_corpus import read_lines
from regard.text.casing import add_full_stop, to_sentence_case

MARKS = ".?!。？！ "
VARIANTS: dict[str, Callable[[str], str]] = {
    "as it was": str,
    "no capital, no stop": lambda text: text.rstrip(MARKS)[:1].lower() + text.rstrip(MARKS)[1:],
    "IN CAPITALS": str.upper,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("--sentences", type=int, default=200)
    given = parser.parse_args()
    translator = regard.load(given.model, "cpu", "int8")
    for language in ("de", "fr", "zh"):
        sides = [given.work / f"tatoeba-en-{language}.val.{side}.xz" for side in ("en", language)]
        english, references = (list(islice(read_lines(path), given.sentences)) for path in sides)
        bleu = BLEU(lowercase=True, tokenize="zh" if language == "zh" else "13a")
        for name, change in VARIANTS.items():
            changed = [change(text) for text in english]
            for suffix, texts in (
                ("", changed),
                (", with care", [add_full_stop(to_sentence_case(t, "en"), "en") for t in changed]),
            ):
                outputs = [t.text.rstrip(MARKS) for t in translator.translate_sentences(texts, to=language, beam=1)]
                score = bleu.corpus_score(outputs, [[text.rstrip(MARKS) for text in references]]).score
                print(f"en>{language} {name}{suffix}: {score:.1f}", flush=True)


if __name__ == "__main__":
    main()
