"""Recurrent language models: torch's own LSTM as the oracle, ragged prompts, steps, writing without end, both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokens import EOS, MASK, SETTINGS, SOS, UNK
from torch import Tensor, nn

from regard.config import DecodeConfig
from regard.decode.generation import generate, token_log_probs
from regard.errors import RegardError
from regard.models.architectures import make_model, preset
from regard.models.classification_model import ClassificationModel
from regard.models.rnn import RNN
from regard.models.weights import SkipInit, load_weights, weights_of
from regard.text.special_tokens import PAD

V = 23
CELLS = ["rnn", "lstm", "gru", "gru-cho", "mut1", "mut2", "mut3"]
SMALL: dict[str, Any] = {
    "d_model": 8,
    "recurrent.d_hidden": 12,
    "n_decoder_layers": 3,
    "target_vocab": V,
    "dropout": 0.0,
    **SETTINGS,
}
close: dict[str, Any] = {"atol": 1e-10, "rtol": 1e-8}


def make(**changes: Any) -> RNN:
    """In float64, none of its weights at a special value such as 0 or 1."""
    torch.manual_seed(0)
    model = RNN(preset("lstm-small", **{**SMALL, **changes})).double().eval()
    shaken(model)
    return model


@torch.no_grad()
def shaken(model: nn.Module) -> None:
    for p in model.parameters():
        p.add_(0.2 * torch.randn_like(p))


def ids(*lengths: int) -> Tensor:
    """Random rows of these lengths, padded on the right."""
    torch.manual_seed(1)
    rows = [torch.randint(5, V, (n,)) for n in lengths]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


# ---- torch's own -----------------------------------------------------------------------------------------------------


class Peer(nn.Module):
    """nn.Embedding, one nn.LSTM a layer and nn.Linear, with the model's weights."""

    def __init__(self, model: RNN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(*model.embedding.weight.shape)
        cells = [layer["forward_"] for layer in model.recurrent.layers]  # type: ignore[index]
        self.layers = nn.ModuleList(nn.LSTM(c.weight_ih.shape[1], c.d_hidden, batch_first=True) for c in cells)
        self.head = nn.Linear(model.recurrent.d_out, V, bias=model.head.bias is not None)
        self.double()
        if model.head.weight is model.embedding.weight:
            self.head.weight = self.embedding.weight
        with torch.no_grad():
            for own, theirs in self.pairs(model):
                own.copy_(theirs)
            for layer in self.layers:
                layer.bias_hh_l0.zero_()

    def pairs(self, model: RNN) -> list[tuple[Tensor, Tensor]]:
        found = [(self.embedding.weight, model.embedding.weight), (self.head.weight, model.head.weight)]
        for layer, own in zip(self.layers, model.recurrent.layers, strict=True):
            cell = own["forward_"]  # type: ignore[index]
            found += [(layer.weight_ih_l0, cell.weight_ih), (layer.weight_hh_l0, cell.weight_hh)]
            found += [(layer.bias_ih_l0, cell.bias)]
        return found + ([(self.head.bias, model.head.bias)] if model.head.bias is not None else [])

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


@pytest.mark.parametrize("tie", ["all", "none"])
@pytest.mark.parametrize("head_bias", [False, True])
def test_logits_and_gradients_are_those_of_torchs_lstm(tie: str, head_bias: bool) -> None:
    model = make(tie=tie, head_bias=head_bias)
    peer, rows = Peer(model), ids(9, 9, 9)
    torch.testing.assert_close(model(rows), peer(rows), **close)
    for net in (model, peer):
        nn.functional.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    for theirs, own in peer.pairs(model):
        torch.testing.assert_close(own.grad, theirs.grad, **close)


def test_the_last_layer_is_as_wide_as_the_embeddings_where_these_are_the_head() -> None:
    """AWD-LSTM: 400-1150-1150-400. Published with 33,556,078 weights: torch has two biases a layer, and one for the head."""
    with torch.device("meta"):
        model = RNN(preset("awd-lstm", head_bias=True))
    cells = [layer["forward_"] for layer in model.recurrent.layers]  # type: ignore[index]
    assert [(c.weight_ih.shape[1], c.d_hidden) for c in cells] == [(400, 1150), (1150, 1150), (1150, 400)]
    second_biases = 4 * (1150 + 1150 + 400)
    assert sum(p.numel() for p in model.parameters()) + second_biases == 33_556_078
    assert model.head.weight is model.embedding.weight
    assert make(tie="none").head.weight.shape == (V, 12)


def test_a_model_whose_weights_are_about_to_be_loaded_draws_none() -> None:
    before = torch.get_rng_state()
    with SkipInit():
        model = RNN(preset("lstm-small", **SMALL))
    assert torch.equal(torch.get_rng_state(), before)
    load_weights(model, weights_of(make().float()), Path("there"))
    torch.testing.assert_close(model(ids(5)), make().float()(ids(5)))


# ---- one token at a time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_prompts_of_any_lengths_and_steps_give_the_logits_of_each_row_alone(cell: str) -> None:
    model, lengths = make(cell=cell), (7, 2, 5, 1)
    prompts = ids(*lengths)
    with torch.no_grad():
        logits, state = model.begin(prompts)
        rows = [prompts[i, :n] for i, n in enumerate(lengths)]
        for _ in range(4):
            for found, row in zip(logits, rows, strict=True):
                torch.testing.assert_close(found, model(row[None])[0, -1], **close)
            tokens = torch.randint(5, V, (len(rows),))
            rows = [torch.cat([row, token[None]]) for row, token in zip(rows, tokens, strict=True)]
            logits = model.step(tokens, state)


def test_rows_of_the_state_multiply_move_and_leave() -> None:
    model, prompts = make(cell="gru"), ids(4, 6)
    with torch.no_grad():
        _, state = model.begin(prompts)
        rows = [prompts[0, :4], prompts[1]]
        for chosen in ([1, 0, 1], [2, 1], [1]):
            state.select(torch.tensor(chosen))
            tokens = torch.randint(5, V, (len(chosen),))
            rows = [torch.cat([rows[i], token[None]]) for i, token in zip(chosen, tokens, strict=True)]
            for found, row in zip(model.step(tokens, state), rows, strict=True):
                torch.testing.assert_close(found, model(row[None])[0, -1], **close)


def test_padding_at_the_end_changes_nothing_before_it() -> None:
    model, lengths = make(), (8, 3, 5)
    rows = ids(*lengths)
    together = model(rows)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(together[i, :n], model(rows[i : i + 1, :n])[0], **close)


def test_a_text_in_two_parts_is_the_text() -> None:
    model, rows = make(), ids(11, 11)
    first, state = model.hidden(rows[:, :4])
    second, _ = model.hidden(rows[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), model.hidden(rows)[0], **close)


# ---- writing ---------------------------------------------------------------------------------------------------------


def naive(model: RNN, prompt: list[int], n: int) -> list[int]:
    """Return greedy tokens, with a full forward pass for each."""
    row = list(prompt)
    for _ in range(n):
        logits = model(torch.tensor([row]))[0, -1]
        logits[[0, SOS, UNK, MASK]] = -torch.inf
        token = int(logits.argmax())
        if token == EOS:
            break
        row.append(token)
    return row[len(prompt) :]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn", "mut1"])
def test_what_is_written_is_what_a_naive_loop_writes(cell: str) -> None:
    """Further than max_len, which bounds no recurrent model."""
    model = make(cell=cell, max_len=4)
    prompts = [[5, 9, 13], [7], [6, 6, 6, 6, 6, 20]]
    with torch.no_grad():
        expected = [naive(model, prompt, 15) for prompt in prompts]
        found = generate(model, prompts, DecodeConfig(beam=1, max_new_tokens=15))
    assert [row.tokens for row in found] == expected
    assert max(map(len, expected)) == 15
    assert {row.end for row in found} <= {"end", "length"}


def test_texts_of_any_length_are_scored() -> None:
    model = make(max_len=4)
    texts = [[5, 9, 13, 22, 7, 8, 9], [6, 7], [11] * 30]
    for text, scored in zip(texts, token_log_probs(model, texts, DecodeConfig()), strict=True):
        log_p = model(torch.tensor([text]))[0, :-1].log_softmax(-1)
        expected = log_p.gather(1, torch.tensor(text[1:])[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(scored), expected.float(), atol=1e-5, rtol=1e-5)


# ---- dropout ---------------------------------------------------------------------------------------------------------


RATES = ["dropout", *(f"recurrent.{rate}_dropout" for rate in ("hidden", "output", "weight", "word"))]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("variational", [True, False])
def test_each_kind_of_dropout_is_there_in_training_alone(rate: str, variational: bool) -> None:
    model, rows = make(**{rate: 0.5, "recurrent.variational": variational}), ids(6, 6)
    plain = make()(rows)
    torch.testing.assert_close(model(rows), plain, **close)
    model.train()
    assert (model(rows) - plain).abs().max() > 1e-3


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_a_language_model_reads_in_one_direction() -> None:
    with pytest.raises(RegardError, match=r"model\.recurrent\.bidirectional is for models with a prediction head"):
        make(**{"recurrent.bidirectional": True})


def classifier(**changes: Any) -> ClassificationModel:
    torch.manual_seed(0)
    model = make_model(preset("lstm-small", **{**SMALL, "n_classes": 3, "prediction_head": "sequence", **changes}))
    assert isinstance(model, ClassificationModel)
    shaken(model.double().eval())
    return model


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("head", ["sequence", "token"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn", "mut3"])
def test_padding_and_other_rows_change_no_prediction(cell: str, head: str, bidirectional: bool) -> None:
    model, lengths = (
        classifier(cell=cell, prediction_head=head, **{"recurrent.bidirectional": bidirectional}),
        (6, 2, 4),
    )
    rows = ids(*lengths)
    together = model(rows, torch.zeros_like(rows))
    for i, n in enumerate(lengths):
        row = rows[i : i + 1, :n]
        alone = model(row, torch.zeros_like(row))[0]
        torch.testing.assert_close(together[i] if head == "sequence" else together[i, :n], alone, **close)


def test_both_directions_answer_where_they_end() -> None:
    """torch's bidirectional LSTM gives its final states: the forward one after the last token, the other after the first."""
    model = classifier(**{"recurrent.bidirectional": True}, n_decoder_layers=1)
    body, row = model.body, ids(7)
    assert isinstance(body, RNN)
    peer = nn.LSTM(8, 12, batch_first=True, bidirectional=True).double()
    with torch.no_grad():
        for name, end in (("forward_", ""), ("backward_", "_reverse")):
            cell = body.recurrent.layers[0][name]  # type: ignore[index]
            getattr(peer, f"weight_ih_l0{end}").copy_(cell.weight_ih)
            getattr(peer, f"weight_hh_l0{end}").copy_(cell.weight_hh)
            getattr(peer, f"bias_ih_l0{end}").copy_(cell.bias)
            getattr(peer, f"bias_hh_l0{end}").zero_()
    _, (final, _) = peer(body.embedding.weight[row])  # (2, 1, H)
    expected = torch.cat([final[0], final[1]], -1) @ model.prediction_head.weight.T + model.prediction_head.bias
    torch.testing.assert_close(model(row, torch.zeros_like(row)), expected, **close)
    assert not any(name.startswith("body.head") for name, _ in model.named_parameters())


@pytest.mark.parametrize("cell", CELLS)
def test_token_0_is_a_piece_like_any_other(cell: str) -> None:
    """Also where a row ends with it and others are longer."""
    model = make(cell=cell)
    rows = [torch.tensor(row) for row in ([0, 5, 0], [7, 0, 0, 0, 9, 0], [0])]
    together = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    begun, _ = model.begin(together)
    for row, found in zip(rows, begun, strict=True):
        torch.testing.assert_close(found, model(row[None])[0, -1], **close)
