"""The costs of recurrent and convolutional models against torch's counter, real states and numbers worked by hand."""

from typing import Any

import pytest
import torch
from test_cost import B, L, counted_on, inputs_of, nbytes, preset_of, saved
from torch import Tensor, nn

from regard.config.registry import PARTS
from regard.data.batches import Batch
from regard.layers.recurrent import Recurrent
from regard.models.analysis.cost import (
    activation_bytes,
    decoding_bytes,
    forward_flops,
    report_costs,
    side_lengths,
    training_flops,
    training_memory,
)
from regard.models.architectures import make_model, preset
from regard.training.throughput import ThroughputMeter

S = 9  # tokens of a source; targets and texts have L
H = 24
SIZES = {"d_model": 20, "recurrent.d_hidden": H, "n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0}
DATA = {"source_vocab": 50, "target_vocab": 50, "n_classes": 6}


def scanned(name: str, **settings: Any) -> nn.Module:
    """Return a model whose layers run step by step: torch's counter does not see into fused kernels."""
    torch.manual_seed(0)
    model = make_model(preset(name, **{**SIZES, **DATA, **settings}))
    for module in model.modules():
        if isinstance(module, Recurrent):
            module.fuses = module.fuses_padded = False
    return model


def texts() -> tuple[Tensor, Tensor]:
    return torch.randint(5, 50, (B, S)), torch.randint(5, 50, (B, L))


# ---- arithmetic --------------------------------------------------------------------------------------------------------

CELLS = [*PARTS["cell"]]
LANGUAGE: list[dict[str, Any]] = [{"cell": cell} for cell in CELLS]
LANGUAGE += [{"cell": "lstm-peephole", "lstm-peephole.variant": "gate-recurrence"}]
LANGUAGE += [{"tie": "none", "recurrent.norm": True}, {"n_decoder_layers": 1, "cell": "mut2"}]


@pytest.mark.parametrize("style", LANGUAGE)
def test_a_recurrent_language_model_costs_what_torch_counts(style: dict[str, Any]) -> None:
    net, ids = scanned("lstm-small", **style), texts()[1]
    assert forward_flops(net.config, B, 0, L) == counted_on(net, ids, backward=False)


@pytest.mark.parametrize(("cell", "gates"), [("rnn", 1), ("lstm", 4), ("gru", 3)])
def test_training_costs_three_forwards_but_for_the_gradient_of_the_first_state(cell: str, gates: int) -> None:
    net, ids = scanned("lstm-small", cell=cell), texts()[1]
    not_asked = B * 2 * gates * (24 * 24 + 20 * 20)  # the second layer is as wide as the embeddings
    assert training_flops(net.config, B, 0, L) == counted_on(net, ids, backward=True) + not_asked


@pytest.mark.parametrize("head", ["sequence", "token"])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_predictions_cost_what_torch_counts(head: str, both: bool) -> None:
    net, ids = scanned("lstm-small", prediction_head=head, **{"recurrent.bidirectional": both}), texts()[1]
    expected = counted_on(net, ids, torch.zeros_like(ids), backward=False)
    assert forward_flops(net.config, B, *side_lengths(net.config, L)) == expected


TRANSLATORS: list[tuple[str, dict[str, Any]]] = [
    ("sutskever-small", {}),
    ("sutskever-small", {"recurrent.d_hidden": 20}),
    ("rnnenc-small", {}),
    ("rnnsearch-small", {}),
    ("rnnsearch-small", {"recurrent.bidirectional": False, "attention_score": "dot"}),
    ("rnnsearch-small", {"attention_score": "general", "n_decoder_layers": 3}),
    ("rnnsearch-small", {"cell": "mut1"}),
    ("rnnsearch-small", {"cell": "lstm", "recurrent.norm": True}),
    ("gnmt-small", {"n_encoder_layers": 4, "n_decoder_layers": 3}),
    ("gnmt-small", {"n_encoder_layers": 3, "n_decoder_layers": 3, "recurrent_feedforward": "dense"}),
    ("deep-att-small", {}),
]


@pytest.mark.parametrize(("name", "style"), TRANSLATORS)
def test_a_recurrent_translator_costs_what_torch_counts(name: str, style: dict[str, Any]) -> None:
    net = scanned(name, **style)
    expected = counted_on(net, *texts(), backward=False)
    if net.config.attention_score == "additive":  # v . tanh(...) is no product of matrices to torch
        expected += B * 2 * S * L * H
    assert forward_flops(net.config, B, S, L) == expected
    trained = counted_on(net, *texts(), backward=True)
    assert 0.97 * training_flops(net.config, B, S, L) < trained < training_flops(net.config, B, S, L)


def test_awd_lstm_by_hand_two_flops_for_each_weight_and_token() -> None:
    recurrent = 4 * (1150 * (400 + 1150) + 1150 * (1150 + 1150) + 400 * (1150 + 400))
    assert forward_flops(preset_of("awd-lstm"), 80, 0, 70) == 80 * 70 * 2 * (recurrent + 400 * 33_278)


@pytest.mark.parametrize("task", ["language", "translation", "classification"])
def test_a_meter_counts_the_batches_of_every_recurrent_task(task: str) -> None:
    source, target = texts()
    fresh, classes = torch.ones(B, dtype=torch.bool), torch.zeros(B, dtype=torch.long)
    name, style, inputs, at = {
        "language": ("lstm-small", {}, (target, fresh, target), (0, L)),
        "translation": ("rnnsearch-small", {}, (source, target, target), (S, L)),
        "classification": (
            "lstm-small",
            {"prediction_head": "sequence"},
            (target, torch.zeros_like(target), classes),
            (0, L),
        ),
    }[task]
    net = scanned(name, **style)
    meter = ThroughputMeter(net.config, 1, torch.device("cpu"))
    meter.count(Batch(inputs, tokens=inputs[-1].numel()))
    assert meter.flops == training_flops(net.config, B, *at) > 0


# ---- memory ------------------------------------------------------------------------------------------------------------


def test_activations_of_a_language_model_by_hand() -> None:
    """Bytes a token: what the first layer reads, gates and states of both, and what the head is given, in bf16."""
    lstm = preset_of("lstm-small", target_vocab=50, d_model=20, **{"recurrent.d_hidden": 24})
    assert activation_bytes(lstm, 0, L) == L * 2 * (20 + (4 + 2) * 24 + (4 + 2) * 20 + 20)
    dropped = preset_of(
        "gru-small", target_vocab=50, d_model=20, **{"recurrent.d_hidden": 24, "recurrent.hidden_dropout": 0.1}
    )
    assert activation_bytes(dropped, 0, L) == L * 2 * (20 + (3 + 1) * 24 + 24 + (3 + 1) * 20 + 20)


def test_activations_of_feed_forward_layers_between_recurrent_ones_by_hand() -> None:
    """The inner layer, the sigmoid and the sum; experts keep that of both experts, their inputs and outputs, and the
    router's input in fp32."""
    sizes = {"target_vocab": 50, "d_model": 20, "n_decoder_layers": 3, "recurrent.d_hidden": 24, "recurrent.d_ff": 40}
    dense, experts, plain = (
        activation_bytes(preset_of("lstm-small", **{**sizes, **more}), 0, L)
        for more in (
            {"recurrent_feedforward": "dense"},
            {"recurrent_feedforward": "noisy-experts"},
            {"recurrent_feedforward": "", "recurrent.d_ff": 0},
        )
    )
    assert dense - plain == L * 2 * (2 * 40 + 4 * 24)  # after the first and the second layer
    assert experts - plain == L * 2 * (2 * (2 * 40 + 4 * 24) + 4 * 24 + 4 * 24)


def test_activations_of_rnnsearch_by_hand() -> None:
    config = preset_of("rnnsearch-small", **{**SIZES, **DATA, "n_encoder_layers": 1, "n_decoder_layers": 1})
    source = 20 + (3 + 1) * 48 + 3 * 24 + 24  # what goes in, both ways, what annotations bring to the gates, keys
    target = (20 + 48) + (3 + 1) * 24 + (24 + 20 + 48) + 3 * 20 + 20  # the cell, what the readout reads and makes
    assert activation_bytes(config, S, L) == 2 * (S * source + L * target) + 6 * S * L


def test_activations_of_gnmt_by_hand() -> None:
    """Three layers on each side: what a layer reads besides the state of the one below, gates and states, and the readout.

    The third layers add their input to their output, which is a copy of the annotations and the input of the head."""
    sizes = {**SIZES, **DATA, "n_encoder_layers": 3, "n_decoder_layers": 3}
    config = preset_of("gnmt-small", **sizes)
    source = 20 + 6 * 48 + 6 * 24 + 6 * 24  # the first layer reads both ways; the others read states
    source += 24 + 4 * 24 + 24  # annotations, what they bring to the gates, keys
    target = (20 + 24) + 6 * 24 + 2 * (24 + 24 + 6 * 24)  # [y; c], then twice [s; c]
    target += (24 + 24) + 20  # [s; c] of the readout, and what it makes
    assert activation_bytes(config, S, L) == 2 * (S * source + L * target) + 6 * S * L
    between = preset_of("gnmt-small", recurrent_feedforward="dense", **{**sizes, "recurrent.d_ff": 40})
    source += (40 + 48 + 48) + (40 + 24 + 24)  # the inner layer, the sigmoid and the sum that the next layer reads
    target += (40 + 24) + (40 + 24)  # the next layer reads a copy of the sum, beside c, in any case
    assert activation_bytes(between, S, L) == 2 * (S * source + L * target) + 6 * S * L


def test_activations_of_deep_att_by_hand() -> None:
    """Two columns of two layers, the second of which reads 48 numbers of the first one's input projection beside its
    output; the annotations are a quarter of [x; 96 numbers] of both columns."""
    config = preset_of("deep-att-small", **{**SIZES, **DATA})
    source = 2 * (20 + 6 * 24 + (24 + 48) + 6 * 24)
    source += 2 * (24 + 96) + 60 + 4 * 24 + 24
    target = (20 + 60) + 6 * 24 + (24 + 20 + 60) + (24 + 48) + 6 * 24  # the fast connection reads [s; y; c]
    target += (24 + 60) + 20
    assert activation_bytes(config, S, L) == 2 * (S * source + L * target) + 6 * S * L


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *((f"{name}-small", 2) for name in ("lstm", "gru", "sutskever", "rnnenc", "rnnsearch")),
        *((f"{name}-small", 3) for name in ("gnmt", "deep-att")),
    ],
)
def test_a_scan_that_is_not_compiled_keeps_at_most_twice_of_that(name: str, layers: int) -> None:
    sizes = {"recurrent.d_hidden": 112, "n_encoder_layers": layers, "n_decoder_layers": layers}
    net = scanned(name, d_model=96, **sizes)
    inputs = texts() if net.config.architecture == "seq2seq" else texts()[1:]
    looked = (
        B * S * L * 112 * 2 if net.config.attention_score == "additive" and len(inputs) == 2 else 0
    )  # is not there, compiled
    expected = B * activation_bytes(net.config, *((S, L) if len(inputs) == 2 else (0, L)))
    kept = [x for x in saved(net, *inputs)[1] if x.shape[0] in (B, B * S, B * L)]  # no copies of halves of matrices
    assert 1 < (nbytes(kept) - looked) / expected < 2


@pytest.mark.parametrize(("name", "style"), [("lstm-small", {"cell": "gru"}), *TRANSLATORS])
def test_what_a_recurrent_model_remembers_is_its_state_and_what_attention_reads(
    name: str, style: dict[str, Any]
) -> None:
    net = scanned(name, **style)
    source, target = texts()
    state = net.begin(target)[1] if name == "lstm-small" else net.begin(source)
    assert B * sum(decoding_bytes(net, S, L, torch.float32).values()) == state.nbytes()


def test_a_state_is_as_large_after_a_thousand_tokens_as_after_one() -> None:
    short, long = (report_costs(preset_of("awd-lstm"), 3, n)["memory"]["decoding"] for n in (1, 1000))
    assert short == long
    assert short["state_per_row"] == 4 * 2 * (1150 + 1150 + 400)  # h and c of each layer, in fp32 at least
    assert "cache_bf16" not in short


# ---- convolutions ------------------------------------------------------------------------------------------------------

CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"norm": "post"},
    {"convolution.kernel": 5},
    {"d_ff": 160},
    {"d_ff": 160, "parallel": True},
]


def convolutional(architecture: str, **style: Any) -> nn.Module:
    sizes = {"d_model": 96, "n_encoder_layers": 2, "n_decoder_layers": 3, "dropout": 0.0, "max_len": 64}
    name = {"transformer": "convs2s-small", "gpt": "conv-lm"}[architecture]
    return make_model(preset(name, **{**sizes, **DATA, "positions": "learned", **style}))


@pytest.mark.parametrize("style", CONVOLUTIONS)
@pytest.mark.parametrize("architecture", ["transformer", "gpt"])
def test_convolutions_cost_what_torch_counts_and_keep_what_autograd_keeps(
    architecture: str, style: dict[str, Any]
) -> None:
    net, inputs = convolutional(architecture, **style), inputs_of(architecture)
    at = side_lengths(net.config, L)
    assert forward_flops(net.config, B, *at) == counted_on(net, *inputs, backward=False)
    assert training_flops(net.config, B, *at) == counted_on(net, *inputs, backward=True)
    widths = (96, 160, 24, 2 * 96, net.config.value("convolution.kernel") * 96)
    expected = nbytes(x for x in saved(net, *inputs)[1] if x.shape[-1] in widths)
    assert B * activation_bytes(net.config, *at) == expected


def test_a_convolution_keeps_the_inputs_that_it_still_sees() -> None:
    """Three blocks whose taps stand 1, 2 and 3 apart: 3, 5 and 7 tokens, however many were read."""
    net = convolutional("gpt", **{"convolution.dilations": (1, 2, 3)})
    for n in (16, 40):
        _, state = net.begin(torch.randint(5, 50, (B, n)))
        found = decoding_bytes(net, 0, n, torch.float32)
        assert B * found["state"] == state.nbytes() == 4 * B * (3 + 5 + 7) * 96
        assert found["cache"] == 0


@pytest.mark.parametrize("name", ["conv-lm", "lstm-small", "rnnsearch-small"])
def test_their_weights_gradients_and_copies_are_counted_like_any_others(name: str) -> None:
    net = make_model(preset(name, **DATA))
    found = training_memory(net.config, B, *side_lengths(net.config, L))
    matrices = [p for path, p in net.named_parameters() if p.dim() == 2 and "embedding" not in path]
    tied = net.head.weight  # it is multiplied too
    once = {id(p): p.numel() for p in (*matrices, tied)}
    vectors = sum(p.numel() for path, p in net.named_parameters() if path.endswith("score.v"))
    assert found["weights"] == found["gradients"] == nbytes(net.parameters())
    assert found["bf16 copies"] == 2 * (sum(once.values()) + vectors)
