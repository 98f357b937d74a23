"""Recurrent encoder-decoders: Bahdanau's equations in NumPy, torch's own LSTM and GRU, padding, steps, search, learning."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configured import model_config
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import EOS, SETTINGS, SOS
from torch import Tensor, nn

from regard.config import DecodeConfig, TrainConfig
from regard.data.batches import Batch
from regard.decode.batch_decoding import decode
from regard.decode.beam_search import beam_search
from regard.errors import RegardError
from regard.layers.quantization import convert_weights
from regard.look.record import record
from regard.models.architectures import PRESETS, make_model, preset
from regard.models.seq2seq import Seq2Seq
from regard.text.special_tokens import PAD
from regard.training.objective import Objective
from regard.training.training_step import TrainingStep

sys.path.append(str(Path(__file__).parents[1] / "decode"))
from oracle import every_sequence, log_softmax, padded

V, C, H, MAX_LEN = 19, 6, 8, 64
CPU = torch.device("cpu")
exact: dict[str, Any] = {"atol": 1e-12, "rtol": 0}
SUTSKEVER = {
    "attention_score": "none",
    "seq2seq.reverse_source": True,
    "cell": "lstm",
    "n_encoder_layers": 2,
    "n_decoder_layers": 2,
}
RNNENC = {"attention_score": "constant", "cell": "gru"}
RNNSEARCH = {"recurrent.bidirectional": True, "cell": "gru"}
GNMT = {
    **{"recurrent.bidirectional": True, "recurrent.bidirectional_layers": 1, "recurrent.residual": 3, "cell": "lstm"},
    **{"seq2seq.context": "all", "seq2seq.readout": "concat", "tie": "none"},
    **{"n_encoder_layers": 3, "n_decoder_layers": 3},
}
DEEP_ATT = {
    **{"recurrent.interleaved": True, "recurrent.fast_forward": True, "seq2seq.readout": "linear", "cell": "lstm"},
    **{"n_encoder_layers": 3, "n_decoder_layers": 2},
}
KINDS: dict[str, dict[str, Any]] = {
    "sutskever": SUTSKEVER,
    "as wide as its embeddings": {**SUTSKEVER, "recurrent.d_hidden": C, "cell": "gru"},
    "rnnenc": RNNENC,
    "rnnenc, two LSTM layers": {**RNNENC, "cell": "lstm", "n_encoder_layers": 2, "n_decoder_layers": 2},
    "rnnsearch": RNNSEARCH,
    "rnnsearch, LSTM, three layers": {**RNNSEARCH, "cell": "lstm", "n_encoder_layers": 2, "n_decoder_layers": 3},
    "general, one direction": {"attention_score": "general", "cell": "gru-cho"},
    "dot, reversed": {"attention_score": "dot", "cell": "lstm", "seq2seq.reverse_source": True},
    "normed": {**RNNSEARCH, "cell": "lstm", "recurrent.norm": True},
    "mut1": {**RNNSEARCH, "cell": "mut1"},
    "gnmt": GNMT,
    "gnmt, linear readout": {**GNMT, "seq2seq.readout": "linear", "tie": "all", "cell": "gru"},
    "deep-att": DEEP_ATT,
    "deep-att, even number of layers, GRU": {**DEEP_ATT, "n_encoder_layers": 2, "cell": "gru"},
    "deep-att, scanned cell": {**DEEP_ATT, "cell": "mut2"},
    "feed-forward between layers": {**GNMT, "recurrent_feedforward": "dense", "recurrent.d_ff": 12},
    "feed-forward without attention": {**SUTSKEVER, "recurrent_feedforward": "gated", "recurrent.residual": 2},
    "fast-forward in one direction": {"recurrent.fast_forward": True, "n_encoder_layers": 2, "n_decoder_layers": 2},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str = "", **changes: object) -> Seq2Seq:
    """In float64, in evaluation mode, and none of its weights at a special value."""
    sizes = {"d_model": C, "recurrent.d_hidden": H, "n_encoder_layers": 1, "n_decoder_layers": 1, "max_len": MAX_LEN}
    sizes |= {
        "preset": "rnnsearch-small",
        "source_vocab": V,
        "target_vocab": V,
        "dropout": 0.0,
        "scale_embeddings": False,
    }
    torch.manual_seed(0)
    model = Seq2Seq(model_config(**(SETTINGS | sizes | KINDS.get(kind, {}) | changes))).double().eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def ids(*lengths: int, seed: int = 1, width: int = 0) -> Tensor:
    """Random rows of these lengths, padded on the right."""
    rng, width = np.random.default_rng(seed), max(width, *lengths)
    return torch.tensor([[*rng.integers(5, V, n).tolist(), *[PAD] * (width - n)] for n in lengths])


SOURCE, TARGET = ids(6, 3, 5), ids(4, 7, 5, seed=2)


# ---- the equations ---------------------------------------------------------------------------------------------------


def sigma(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class InNumPy:
    """RNNsearch, from the parameters alone: one layer each, bidirectional, one pair of sentences at a time."""

    def __init__(self, model: Seq2Seq) -> None:
        self.p = {name: p.detach().numpy() for name, p in model.named_parameters()}
        self.lstm = model.config.cell == "lstm"

    def cell(self, name: str, x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
        h = state[0]
        a, u, b = (self.p[f"{name}.{leaf}"] for leaf in ("weight_ih", "weight_hh", "bias"))
        if self.lstm:
            i, f, g, o = np.split(a @ x + u @ h + b, 4)
            c = sigma(f) * state[1] + sigma(i) * np.tanh(g)
            return [sigma(o) * np.tanh(c), c]
        (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(a @ x + b, 3), np.split(u @ h, 3)
        r, z = sigma(x_r + h_r), sigma(x_z + h_z)
        return [z * h + (1 - z) * np.tanh(x_n + r * h_n)]

    def run(self, name: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
        state, outs = [np.zeros(H)] * (1 + self.lstm), []
        for x in inputs:
            state = self.cell(name, x, state)
            outs.append(state[0])
        return outs

    def __call__(self, source: list[int], target: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits (T, V) and alignment (T, S)."""
        p, e = self.p, self.p["source_embedding.weight"]
        words = [e[i] for i in source]
        ahead = self.run("encoder.layers.0.forward_", words)
        back = self.run("encoder.layers.0.backward_", words[::-1])[::-1]
        h = [np.concatenate(pair) for pair in zip(ahead, back, strict=True)]
        first = np.tanh(p["decoder.bridge.weight"] @ back[0] + p["decoder.bridge.bias"])
        state, logits, alignment = np.split(first, 1 + self.lstm), [], []
        score = "decoder.attentive.cross.score"
        for token in target:
            s = state[0]
            energies = [
                p[f"{score}.v"] @ np.tanh(p[f"{score}.W.weight"] @ s + p[f"{score}.U.weight"] @ h_j) for h_j in h
            ]
            a = np.exp(energies) / np.exp(energies).sum()
            c = sum(a_j * h_j for a_j, h_j in zip(a, h, strict=True))
            state = self.cell("decoder.attentive.cell", np.concatenate([e[token], c]), state)
            pairs = p["decoder.readout.pairs.weight"] @ np.concatenate([state[0], e[token], c])
            t = (pairs + p["decoder.readout.pairs.bias"]).reshape(C, 2).max(1)
            logits.append(e @ t)
            alignment.append(a)
        return np.stack(logits), np.stack(alignment)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_rnnsearch_is_what_its_equations_say(cell: str) -> None:
    model = make("rnnsearch", cell=cell)
    with torch.no_grad(), record(model) as tape:
        found = model(SOURCE, TARGET)
    assert tape.names == ["decoder.cross"]
    alignment = tape.weights("decoder.cross")
    assert alignment.shape == (3, 1, 7, 6)
    for b in range(3):
        source, target = (x[b][x[b] != PAD].tolist() for x in (SOURCE, TARGET))
        logits, a = InNumPy(model)(source, target)
        np.testing.assert_allclose(found[b, : len(target)], logits, atol=1e-12)
        np.testing.assert_allclose(alignment[b, 0, : len(target), : len(source)], a, atol=1e-12)
        assert (alignment[b, :, :, len(source) :] == 0).all()


def copy_into(theirs: nn.Module, ours: nn.Module) -> None:
    """Our layers' weights in a `torch.nn` stack, which has two biases."""
    for i, layer in enumerate(ours.layers):  # type: ignore[arg-type, var-annotated]
        cell = layer["forward_"]
        for name, value in (("weight_ih", cell.weight_ih), ("weight_hh", cell.weight_hh), ("bias_ih", cell.bias)):
            getattr(theirs, f"{name}_l{i}").data.copy_(value.data)
        getattr(theirs, f"bias_hh_l{i}").data.zero_()


def torchs(kind: type[nn.Module], d_in: int, layers: int, ours: nn.Module) -> nn.Module:
    theirs = kind(d_in, H, layers, batch_first=True).double()
    copy_into(theirs, ours)
    return theirs


def test_sutskevers_model_is_two_lstms_of_torch_and_a_source_read_from_its_end() -> None:
    model = make("sutskever")
    reads, writes = (torchs(nn.LSTM, C, 2, part) for part in (model.encoder, model.decoder.layers))
    e, found = model.source_embedding.weight, model(SOURCE, TARGET)
    for b in range(3):
        source, target = SOURCE[b][SOURCE[b] != PAD], TARGET[b][TARGET[b] != PAD]
        _, end = reads(e[source.flip(0)][None])
        s, _ = writes(e[target][None], end)
        torch.testing.assert_close(found[b, : len(target)], model.decoder.readout(s)[0] @ e.T, **exact)


def test_rnnenc_gives_its_context_to_every_step_and_to_the_output() -> None:
    model = make("rnnenc")
    reads, writes = torchs(nn.GRU, C, 1, model.encoder), torchs(nn.GRU, C + H, 1, model.decoder.layers)
    e, found, pairs = model.source_embedding.weight, model(SOURCE, TARGET), model.decoder.readout.pairs
    for b in range(3):
        source, target = SOURCE[b][SOURCE[b] != PAD], TARGET[b][TARGET[b] != PAD]
        _, end = reads(e[source][None])
        y, c = e[target][None], end[-1][:, None].expand(1, len(target), H)
        s, _ = writes(torch.cat([y, c], -1), end)
        t = pairs(torch.cat([s, y, c], -1)).view(1, len(target), C, 2).amax(-1)
        torch.testing.assert_close(found[b, : len(target)], t[0] @ e.T, **exact)


@pytest.mark.parametrize("score", ["none", "constant", "additive"])
def test_reading_from_the_end_is_reading_the_words_in_reverse(score: str) -> None:
    backwards = make("rnnenc", attention_score=score, **{"seq2seq.reverse_source": True}, n_decoder_layers=1)
    forwards = make("rnnenc", attention_score=score)
    turned = torch.stack([torch.cat([row[row != PAD].flip(0), row[row == PAD]]) for row in SOURCE])
    torch.testing.assert_close(backwards(SOURCE, TARGET), forwards(turned, TARGET), **exact)
    if score != "additive":
        return
    with torch.no_grad(), record(backwards) as ours, record(forwards) as theirs:
        backwards(SOURCE[:1], TARGET[:1]), forwards(turned[:1], TARGET[:1])
    torch.testing.assert_close(ours.weights("decoder.cross"), theirs.weights("decoder.cross").flip(-1), **exact)


@every_kind
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    """Along a random direction of each parameter."""
    model = make(kind)

    def loss() -> Tensor:
        logits = model(SOURCE[:, :5], TARGET)
        return (logits.log_softmax(-1) * torch.cos(torch.arange(logits.numel())).view_as(logits)).mean()

    loss().backward()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            way, step = torch.randn_like(p), 1e-5
            values = []
            for sign in (1, -1):
                p.add_(sign * step * way)
                values.append(loss())
                p.sub_(sign * step * way)
            assert p.grad is not None, name
            expected = (values[0] - values[1]) / (2 * step)
            torch.testing.assert_close((p.grad * way).sum(), expected, atol=1e-8, rtol=1e-5, msg=name)


# ---- padding, neighbours, order --------------------------------------------------------------------------------------


@every_kind
@settings(max_examples=8)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    more=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_neither_padding_nor_neighbours_change_a_row(
    kind: str, lengths: list[tuple[int, int]], more: tuple[int, int]
) -> None:
    model = make(kind)
    widths = [max(n) + extra for n, extra in zip(zip(*lengths, strict=True), more, strict=True)]
    source = ids(*(s for s, _ in lengths), width=widths[0])
    target = ids(*(t for _, t in lengths), width=widths[1], seed=2)
    with torch.no_grad():
        together = model(source, target)
        for i, (s, t) in enumerate(lengths):
            torch.testing.assert_close(together[i, :t], model(source[i : i + 1, :s], target[i : i + 1, :t])[0], **exact)


@every_kind
def test_a_token_changes_nothing_before_it_and_every_source_token_matters(kind: str) -> None:
    model, source, target = make(kind), ids(5, 5), ids(6, 6, seed=2)
    changed = target.clone()
    changed[:, 3] = (target[:, 3] - 5 + 1) % (V - 5) + 5
    before, after = model(source, target), model(source, changed)
    assert torch.equal(after[:, :3], before[:, :3])
    assert ((after - before)[:, 3:].abs().amax(-1) > 1e-6).all()
    for s in range(5):
        other = source.clone()
        other[:, s] = (source[:, s] - 5 + 1) % (V - 5) + 5
        assert ((model(other, target) - before).abs().amax(-1) > 1e-9).all()


# ---- step by step ----------------------------------------------------------------------------------------------------


@every_kind
@torch.no_grad()
def test_steps_say_what_teacher_forcing_does(kind: str) -> None:
    model = make(kind)
    state, whole = model.begin(SOURCE), model(SOURCE, TARGET)
    for t in range(TARGET.shape[1]):
        torch.testing.assert_close(model.step(TARGET[:, t], state), whole[:, t], **exact)


@every_kind
@torch.no_grad()
def test_hypotheses_multiply_move_and_leave_with_their_sentences(kind: str) -> None:
    model, source = make(kind), ids(7, 3, 5)
    state = model.begin(source)
    prefixes, owner = torch.empty(3, 0, dtype=torch.long), torch.arange(3)
    torch.manual_seed(1)

    def say(tokens: Tensor) -> None:
        nonlocal prefixes
        prefixes = torch.cat([prefixes, tokens[:, None]], 1)
        torch.testing.assert_close(model.step(tokens, state), model(source[owner], prefixes)[:, -1], **exact)

    def become(rows: list[int]) -> None:
        nonlocal prefixes, owner
        prefixes, owner = prefixes[rows], owner[rows]

    say(torch.full((3,), SOS))
    state.reorder(torch.tensor([[0, 0], [0, 0], [0, 0]]))
    become([0, 0, 1, 1, 2, 2])  # two hypotheses each
    say(torch.randint(5, V, (6,)))
    state.reorder(torch.tensor([[1, 1], [0, 1], [1, 0]]))
    become([1, 1, 2, 3, 5, 4])  # survivors, within their sentences
    say(torch.randint(5, V, (6,)))
    state.select(torch.tensor([0, 2]))  # the middle sentence has stopped
    become([0, 1, 4, 5])
    say(torch.randint(5, V, (4,)))
    say(torch.randint(5, V, (4,)))


@pytest.mark.parametrize("kind", ["sutskever", "rnnenc", "rnnsearch"])
@torch.no_grad()
def test_a_beam_as_wide_as_the_language_is_exhaustive_search(kind: str) -> None:
    model, sources = make(kind), [[5, 6, 7], [8], [9, 10]]

    def log_p(source: list[int], said: tuple[int, ...]) -> np.ndarray:
        return log_softmax(model(padded([source]), torch.tensor([[SOS, *said]]))[0, -1].numpy())

    found = beam_search(model, padded(sources), torch.tensor([2] * 3), DecodeConfig(beam=V * V, nbest=V * V))
    for source, ranked in zip(sources, found, strict=True):
        expected = every_sequence(partial(log_p, source), 2, penalty=1.0)
        assert [h.tokens for h in ranked] == [tokens for tokens, *_ in expected]
        np.testing.assert_allclose([h.log_prob for h in ranked], [s[2] for s in expected], atol=1e-5)


WAYS = [{"beam": 4, "nbest": 2}, {"beam": 1}, {"beam": 1, "temperature": 1.0, "nbest": 3, "seed": 5}]


@pytest.mark.parametrize("kind", ["sutskever", "rnnenc", "rnnsearch"])
@pytest.mark.parametrize("way", WAYS, ids=["beam", "greedy", "samples"])
def test_a_translation_does_not_depend_on_its_batch(kind: str, way: dict[str, Any]) -> None:
    model = make(kind)
    sources = [x[x != PAD].tolist() for x in ids(5, 1, 12, 3, 8, 9, 2, seed=4)]
    results = []
    for tokens in (10**6, 60):
        options = DecodeConfig(batch_tokens=tokens, max_len_a=1.0, max_len_b=2, **way)
        results.append(decode(model, sources, options, MAX_LEN, CPU))
    for a, b in zip(*results, strict=True):
        assert [h.tokens for h in a] == [h.tokens for h in b]
        assert len(a) == way.get("nbest", 1)
        np.testing.assert_allclose([h.log_prob for h in a], [h.log_prob for h in b], atol=1e-5)
    with pytest.raises(RegardError, match="at most 63"):
        decode(model, [[5] * 64], DecodeConfig(), MAX_LEN, CPU)


# ---- other precisions ------------------------------------------------------------------------------------------------


@every_kind
def test_products_in_bf16_learn_nearly_the_same(kind: str) -> None:
    model = make(kind).float().train()
    losses, gradients = [], []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = Objective(model)(SOURCE, TARGET, TARGET)[0]
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


@every_kind
@pytest.mark.parametrize("weights", ["bf16", "int8", "fp16"])
def test_rounded_weights_say_nearly_the_same(kind: str, weights: str) -> None:
    """As they are laid out for a CPU; and all parameters in bf16, as for a GPU."""
    exact, rounded = make(kind).float(), convert_weights(make(kind).float(), weights, CPU)
    models = [rounded, make(kind).bfloat16()] if weights == "bf16" else [rounded]
    with torch.no_grad():
        expected = exact(SOURCE, TARGET)
        for model in models:
            assert isinstance(model, Seq2Seq)
            assert torch.cosine_similarity(model(SOURCE, TARGET).float().flatten(), expected.flatten(), 0) > 0.99
            found = decode(model, [[5, 6], [7, 8, 9]], DecodeConfig(beam=2, max_len_b=3), MAX_LEN, CPU)
            assert len(found) == 2
            if model.config.attention_score not in ("none", "constant"):
                with record(model) as tape:
                    model(SOURCE, TARGET)
                sums = tape.weights("decoder.cross").sum(-1)
                torch.testing.assert_close(sums, torch.ones_like(sums), check_dtype=False)


# ---- recording -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind for kind, chosen in KINDS.items() if chosen.get("attention_score") not in ("none", "constant")]
)
def test_recording_changes_no_bit_and_keeps_what_was(kind: str) -> None:
    model = make(
        kind,
        dropout=0.2,
        **{"recurrent.hidden_dropout": 0.1, "recurrent.output_dropout": 0.3, "recurrent.weight_dropout": 0.2},
    ).train()

    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        logits = model(SOURCE, TARGET)
        logits.square().mean().backward()
        return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    with record(model, "*") as tape:
        found = gradients()
    assert all(map(torch.equal, found, expected))
    (kept,) = tape["decoder.cross"]
    before = kept.weights()
    assert before.shape == (3, 1, 7, 6)
    torch.testing.assert_close(before.sum(-1), torch.ones(3, 1, 7).double())
    assert (before[1, :, :, 3:] == 0).all()
    torch.testing.assert_close(kept.weights(rows=[2, 0]), before[:, :, [2, 0]], **exact)
    torch.testing.assert_close(kept.scores().softmax(-1), before, **exact)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.equal(kept.weights(), before)
    assert not model.decoder.attentive.cross.is_observed


@pytest.mark.parametrize("way", WAYS, ids=["beam", "greedy", "samples"])
def test_after_decoding_the_tape_has_the_alignment_of_the_best_hypothesis(way: dict[str, Any]) -> None:
    model = make("rnnsearch")
    sources = [x[x != PAD].tolist() for x in ids(5, 1, 12, 3, seed=4)]
    options = DecodeConfig(max_len_a=1.0, max_len_b=2, **way)
    expected = decode(model, sources, options, MAX_LEN, CPU)
    with record(model, "*") as tape:
        found = decode(model, sources, options, MAX_LEN, CPU)
    assert found == expected
    (kept,) = tape["decoder.cross"]
    assert kept.sentences is not None
    assert kept.tokens is not None
    for b, i in enumerate(kept.sentences):
        best = found[i][0]
        assert kept.tokens[b] == [SOS, *best.tokens, *[EOS] * best.ended]
        _, a = InNumPy(model)([*sources[i], EOS], kept.tokens[b][:-1])
        np.testing.assert_allclose(kept.weights()[b, 0, : len(a), : a.shape[1]], a, atol=1e-12)


def test_steps_can_be_recorded_too() -> None:
    model = make("rnnsearch")
    with torch.no_grad(), record(model) as tape:
        state = model.begin(SOURCE)
        for t in range(3):
            model.step(TARGET[:, t], state)
        model(SOURCE, TARGET[:, :3])
    *steps, whole = tape["decoder.cross"]
    torch.testing.assert_close(torch.cat([kept.weights() for kept in steps], 2), whole.weights(), **exact)


def test_a_model_without_attention_has_nothing_to_record() -> None:
    with pytest.raises(RegardError, match="none"):
        record(make("sutskever")).__enter__()


# ---- dropout, sharing, refusals --------------------------------------------------------------------------------------

RATES = ("dropout", *(f"recurrent.{rate}_dropout" for rate in ("hidden", "output", "weight", "word")))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", ["sutskever", "rnnenc, two LSTM layers", "rnnsearch, LSTM, three layers"])
def test_dropout_is_for_training(kind: str, rate: str) -> None:
    model, quiet = make(kind, **{rate: 0.4}), make(kind)
    torch.testing.assert_close(model(SOURCE, TARGET), quiet(SOURCE, TARGET), **exact)
    model.train()
    assert not torch.allclose(model(SOURCE, TARGET), quiet(SOURCE, TARGET))


@pytest.mark.parametrize(("tie", "matrices"), [("none", 3), ("inputs", 2), ("decoder", 2), ("all", 1)])
def test_embeddings_and_head_are_shared_as_a_transformer_shares_them(tie: str, matrices: int) -> None:
    model = make("rnnsearch", tie=tie)
    shared = {id(x) for x in (model.source_embedding.weight, model.target_embedding.weight, model.head.weight)}
    assert len(shared) == matrices
    assert sum(p.shape == (V, C) for p in model.parameters()) == matrices


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention_score": "none", "recurrent.bidirectional": True},
            "model.recurrent.bidirectional is for encoders that attention looks at",
        ),
        ({"seq2seq.reverse_source": True, "recurrent.bidirectional": True}, "nothing to reverse"),
        ({"attention_score": "none", "n_encoder_layers": 2}, "2 and 1 layers"),
        ({"attention_score": "dot", "recurrent.bidirectional": True}, "model.attention_score general"),
        ({"target_vocab": V + 1}, "tokenizer.joint true"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n_heads", 2), ("n_kv_heads", 1), ("d_head", 4), ("d_ff", 8), ("norm", "post"), ("parallel", True)],
        *[("norm_kind", "rms"), ("norm_eps", 1e-6), ("bias", False), ("activation", "gelu"), ("feedforward", "gated")],
        *[("embedding_norm", True), ("positions", "rope"), ("encoder_positions", "rope"), ("cross_positions", "t5")],
        *[("mixer", "convolution"), ("token_types", 2), ("attention_dropout", 0.1), ("ff_dropout", 0.1)],
    ],
)
def test_settings_of_blocks_are_refused_where_there_are_none(name: str, value: Any) -> None:
    with pytest.raises(RegardError, match=rf"model\.{name} is for transformer, gpt, bert, vit models"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["attention.window", "convolution.kernel", "sinusoidal.base"])
def test_tables_of_blocks_are_refused_where_there_are_none(name: str) -> None:
    with pytest.raises(RegardError, match=r"would do nothing here: it is for transformer, gpt, bert, vit models"):
        preset("rnnsearch-small", **{name: 5})


@pytest.mark.parametrize("name", [name for name, sizes in PRESETS.items() if sizes["architecture"] == "seq2seq"])
def test_every_preset_is_a_model(name: str) -> None:
    sizes = {"source_vocab": V, "target_vocab": V, "d_model": C, "recurrent.d_hidden": H}
    model = make_model(preset(name, **sizes))
    assert isinstance(model, Seq2Seq)
    assert model(SOURCE, TARGET).shape == (3, 7, V)
    assert model.config.value("recurrent.d_hidden") == H


def test_initial_scores_are_soft_and_all_is_learned() -> None:
    torch.manual_seed(0)
    sizes = {
        "d_model": 64,
        "recurrent.d_hidden": 64,
        "source_vocab": V,
        "target_vocab": V,
        "dropout": 0.0,
        "scale_embeddings": False,
    }
    both = {"recurrent.bidirectional": True}
    model = Seq2Seq(model_config(preset="rnnsearch-small", **both, cell="gru", **SETTINGS, **sizes))  # type: ignore[arg-type]
    with record(model) as tape:
        Objective(model)(SOURCE, TARGET, TARGET)[0].backward()
    assert tape.weights("decoder.cross")[0].max() < 0.5
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rnnsearch", "sutskever"])
def test_it_learns_to_write_words_in_reverse(kind: str) -> None:
    sizes = {
        "d_model": 32,
        "recurrent.d_hidden": 48,
        "source_vocab": 13,
        "target_vocab": 13,
        "dropout": 0.0,
        "max_len": 16,
    }
    layers = {"n_encoder_layers": 1, "n_decoder_layers": 1}
    torch.manual_seed(0)
    model = Seq2Seq(model_config(preset="rnnsearch-small", **{**SETTINGS, **sizes, **KINDS[kind], **layers}))
    optimizer, objective = torch.optim.Adam(model.parameters(), lr=1e-2), Objective(model)
    rng = np.random.default_rng(0)

    def rows(n: int) -> list[list[int]]:
        return [rng.integers(5, 13, rng.integers(1, 6)).tolist() for _ in range(n)]

    for step in range(250):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1, (250 - step) / 150)
        sources = rows(64)
        target = padded([row[::-1] for row in sources])
        loss, _, count = objective(padded(sources), torch.cat([torch.full((64, 1), SOS), target[:, :-1]], 1), target)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    tested = rows(100)
    found = decode(model.eval(), tested, DecodeConfig(beam=2), 16, CPU)
    right = sum(best.tokens == source[::-1] for (best, *_), source in zip(found, tested, strict=True))
    assert right >= 97


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_kind
def test_recorded_steps_equal_plain_ones(kind: str) -> None:
    results = []
    for recorded in (True, False):
        model, config = make(kind).float().cuda().train(), TrainConfig(compile=recorded)
        step = TrainingStep(Objective(model), config, torch.device("cuda"), torch.float32)
        for i in range(4):
            for rows, width in ((4, 8), (6, 12)):
                source, target = (ids(*[width] * (rows - 1), width // 2, seed=i + k) for k in (0, 10))
                step([Batch((source, target, target), int((target != PAD).sum()))], lr=1e-3)
        results.append((step.sums, list(model.parameters())))
    (fast, ours), (plain, theirs) = results
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-3)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
