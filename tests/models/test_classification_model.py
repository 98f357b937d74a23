"""The classification head: which vectors it reads, and that padding and other rows do not change its output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokens import EOS, SOS
from torch import Tensor

from regard.errors import RegardError
from regard.models.architectures import make_model, preset
from regard.models.classification_model import ClassificationModel
from regard.text.special_tokens import PAD

SIZES = {"d_model": 16, "n_heads": 2, "d_ff": 16, "max_len": 16, "dropout": 0.0}
BERT = {"preset": "bert-tiny", "n_encoder_layers": 1, "source_vocab": 20, "token_types": 2}
GPT = {"preset": "gpt-tiny", "n_decoder_layers": 1, "target_vocab": 20}


def classifier(body: dict[str, Any], head: str = "sequence") -> ClassificationModel:
    torch.manual_seed(0)
    settings = {**SIZES, **body, "prediction_head": head, "n_classes": 3}
    model = make_model(preset(settings.pop("preset"), **settings))
    assert isinstance(model, ClassificationModel)
    return model.eval()


ROW = torch.tensor([[SOS, 7, 8, 9, EOS]])


def types_of(ids: Tensor) -> Tensor:
    return torch.zeros_like(ids)


@pytest.mark.parametrize("body", [BERT, GPT], ids=["bert", "gpt"])
@pytest.mark.parametrize("head", ["sequence", "token"])
def test_padding_and_other_rows_change_no_prediction(body: dict[str, Any], head: str) -> None:
    model = classifier(body, head)
    batch = torch.tensor([[SOS, 7, 8, 9, EOS, PAD, PAD], [SOS, 10, 11, 12, 13, 14, EOS]])
    alone, together = model(ROW, types_of(ROW)), model(batch, types_of(batch))
    assert alone.shape == ((1, 3) if head == "sequence" else (1, 5, 3))
    torch.testing.assert_close(together[:1] if head == "sequence" else together[:1, :5], alone)


def test_bert_answers_from_its_first_token_through_the_pooler() -> None:
    model = classifier(BERT)
    hidden = model.body.hidden(ROW, types_of(ROW))
    inner = model.body.pooler.inner
    pooled = torch.tanh(hidden[:, 0] @ inner.weight.T + inner.bias)  # type: ignore[union-attr,operator]
    expected = pooled @ model.prediction_head.weight.T + model.prediction_head.bias
    torch.testing.assert_close(model(ROW, types_of(ROW)), expected)


def test_gpt_answers_from_the_last_token_of_each_row() -> None:
    model = classifier(GPT)
    ids = torch.tensor([[SOS, 7, EOS, PAD], [SOS, 8, 9, EOS]])
    hidden = model.hidden(ids, types_of(ids))
    expected = torch.stack([hidden[0, 2], hidden[1, 3]]) @ model.prediction_head.weight.T + model.prediction_head.bias
    torch.testing.assert_close(model(ids, types_of(ids)), expected)


def test_bert_tells_the_two_texts_of_a_pair_apart_and_gpt_does_not_look() -> None:
    pair = torch.tensor([[0, 0, 0, 1, 1]])
    bert, gpt = classifier(BERT), classifier(GPT)
    assert not torch.allclose(bert(ROW, pair), bert(ROW, types_of(ROW)))
    assert torch.equal(gpt(ROW, pair), gpt(ROW, types_of(ROW)))


def test_a_bert_without_kinds_of_tokens_takes_pairs_too() -> None:
    model = classifier({**BERT, "token_types": 0})
    assert torch.equal(model(ROW, torch.ones_like(ROW)), model(ROW, types_of(ROW)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("transformer-tiny", "a transformer model cannot be given a head for classes: use a gpt, bert or rnn preset"),
        ("bert-tiny", "n_classes must be at least 1"),
    ],
)
def test_heads_that_cannot_be(name: str, words: str) -> None:
    with pytest.raises(RegardError, match=words):
        make_model(preset(name, **SIZES, prediction_head="sequence", n_classes=0, source_vocab=20, target_vocab=20))
