"""The recorded stream obeys the equations of the model, in float64 from its parameters, and recording it changes nothing."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fused_rows import gate_rows
from test_record_formula import SOURCE, STYLES, TARGET, classifier, linear, run
from tokens import EOS
from torch import Tensor, nn

from regard.config import DecodeConfig
from regard.decode.batch_decoding import decode
from regard.look.record import record
from regard.text.special_tokens import PAD

sys.path.append(str(Path(__file__).parent))
from small import C, bert, gpt, transformer

KINDS = ["transformer", "gpt", "bert", "classifier", "vit"]


def normed(norm: Any, x: np.ndarray) -> np.ndarray:
    w, b = (None if p is None else p.detach().double().numpy() for p in (norm.weight, getattr(norm, "bias", None)))
    if isinstance(norm, nn.LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)
    return x * w + (0 if b is None else b)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)


def check_sublayer(v: dict[str, np.ndarray], name: str, sublayer: Any) -> None:
    if name.endswith("ff"):
        close(v[f"{name}.inner"], np.maximum(linear(sublayer.inner, v[f"{name}.input"]), 0))
        close(v[f"{name}.output"], linear(sublayer.outer, v[f"{name}.inner"]))
    else:
        close(v[f"{name}.output"], linear(sublayer.out, v[f"{name}.mix"]))


def check_stack(stack: Any, v: dict[str, np.ndarray], side: str) -> None:
    x = v[f"{side}.input"]
    for i, block in enumerate(stack.blocks):
        if hasattr(block, "norm"):  # parallel: one norm and one sum
            for kind, place in block.sublayers.items():
                close(v[f"{side}.{i}.{kind}.input"], normed(block.norm, x))
                check_sublayer(v, f"{side}.{i}.{kind}", place)
            outputs = sum(v[f"{side}.{i}.{kind}.output"] for kind in block.sublayers)
            close(v[f"{side}.{i}.ff.stream"], x + outputs)
            assert f"{side}.{i}.self.stream" not in v
            x = v[f"{side}.{i}.ff.stream"]
            continue
        for kind, place in block.sublayers.items():
            name = f"{side}.{i}.{kind}"
            after = x + v[f"{name}.output"]
            close(v[f"{name}.input"], x if stack.norm is None else normed(block.norms[kind], x))
            close(v[f"{name}.stream"], normed(block.norms[kind], after) if stack.norm is None else after)
            check_sublayer(v, name, place)
            x = v[f"{name}.stream"]
    close(v[f"{side}.output"], x if stack.norm is None else normed(stack.norm, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_the_stream_obeys_the_equations(kind: str, style: str) -> None:
    model, tape, there = run(kind, activation="relu", feedforward="dense", **STYLES[style])
    assert {len(kept) for kept in tape.vectors.values()} == {1}
    v = {name: kept[0].detach().double().numpy() for name, kept in tape.vectors.items()}
    body: Any = getattr(model, "body", model)
    for side in ("encoder", "decoder"):
        if hasattr(body, side):
            real = there[side].numpy()
            rows = {name: x[real] for name, x in v.items() if name.startswith(side)}
            close(rows[f"{side}.embedding"] + rows[f"{side}.position"], rows[f"{side}.input"])
            check_stack(getattr(body, side), rows, side)
    if kind == "gpt":
        close(v["logits"], v["decoder.output"] @ body.head.weight.detach().double().numpy().T)
    if kind == "vit":
        close(v["logits"], linear(body.head, v["encoder.output"][:, 0]))
    assert v["logits"].shape[-1] == (3 if kind in ("vit", "classifier") else 23)


def test_embeddings_and_positions_are_those_of_the_model() -> None:
    model, tape, _ = run("transformer")
    embedding, place = (tape.vectors[f"encoder.{name}"][0][0].double().numpy() for name in ("embedding", "position"))
    close(embedding, model.source_embedding.weight.detach().double().numpy()[SOURCE[0]] * math.sqrt(C))  # type: ignore[union-attr,index,operator]
    angle = np.arange(6)[:, None] / 10000 ** (np.arange(0, C, 2) / C)
    np.testing.assert_allclose(place, np.stack([np.sin(angle), np.cos(angle)], -1).reshape(6, C), atol=1e-6)


def test_a_scheme_that_adds_nothing_has_no_positions_there_and_an_embedding_norm_stands_between() -> None:
    model = bert(positions="rope", embedding_norm=True, token_types=2, feedforward="gated", activation="silu")
    with record(model, stream=True) as tape:
        model(SOURCE, torch.ones_like(SOURCE))
    v = {name: kept[0].detach().double().numpy() for name, kept in tape.vectors.items()}
    assert "encoder.position" not in v
    close(v["encoder.input"], normed(model.embedding_norm, v["encoder.embedding"]))
    table = model.types.weight.detach().double().numpy()  # type: ignore[union-attr]
    words = model.embedding.weight.detach().double().numpy()[SOURCE.clamp(min=0)] * model.embedding.scale
    close(v["encoder.embedding"], words + table[1])
    block: Any = model.encoder.blocks[0]
    both = linear(block.sublayers["ff"].inner, v["encoder.0.ff.input"])
    gate, value = np.split(both[..., gate_rows(both.shape[-1] // 2)], 2, -1)
    close(v["encoder.0.ff.inner"], gate / (1 + np.exp(-gate)) * value)


@pytest.mark.parametrize(
    "changes", [{}, {"norm": "post"}, {"parallel": True}, {"mixer": "convolution", "convolution.kernel": 3}]
)
def test_recording_the_stream_changes_no_bit_and_leaves_nothing_behind(changes: dict[str, Any]) -> None:
    model = transformer(**changes)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    expected = model(SOURCE, TARGET)
    with record(model, stream=True) as outer:
        model(SOURCE, TARGET)
        with record(model, stream=True) as inner:
            assert torch.equal(model(SOURCE, TARGET), expected)
    assert torch.equal(model(SOURCE, TARGET), expected)
    assert set(inner.vectors) == set(outer.vectors)
    assert {len(kept) for kept in outer.vectors.values()} == {2}
    for name, kept in inner.vectors.items():
        assert torch.equal(kept[0], outer.vectors[name][1])
        assert not kept[0].requires_grad
    for name, m in model.named_modules():
        assert m.__dict__.keys() == before[name].keys()
        assert not m._forward_hooks
        assert not m._forward_pre_hooks


def test_an_error_inside_leaves_nothing_behind() -> None:
    model = gpt()
    with pytest.raises(IndexError), record(model, stream=True):
        model(torch.tensor([[99]]))
    assert "embed" not in model.decoder.__dict__
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with record(model, stream=True) as tape:
        model(TARGET)
    assert {len(kept) for kept in tape.vectors.values()} == {1}


def test_without_being_asked_no_vectors_are_kept() -> None:
    model = gpt()
    with record(model) as tape:
        model(TARGET)
    assert tape.vectors == {}


def test_decoding_leaves_the_stream_of_the_best_hypothesis_alone() -> None:
    model = transformer()
    with record(model, stream=True) as tape:
        ((best,),) = decode(model, [[5, 6, 7]], DecodeConfig(max_len_b=4), 64, torch.device("cpu"))
    written = len(best.tokens) + best.ended
    assert {len(kept) for kept in tape.vectors.values()} == {1}
    assert tape.vectors["decoder.1.ff.stream"][0].shape == (1, written, C)
    assert tape.vectors["encoder.output"][0].shape == (1, 4, C)
    log_p = tape.vectors["logits"][0][0].log_softmax(-1)
    said = [*best.tokens, *[EOS] * best.ended]
    assert math.isclose(sum(float(log_p[t, i]) for t, i in enumerate(said)), best.log_prob, abs_tol=1e-4)


def test_compiled_blocks_run_as_written_while_the_stream_is_recorded() -> None:
    model, graphs = gpt(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    for block in model.decoder.blocks:
        block.compile(backend=backend, dynamic=True)
    expected = model(TARGET)
    made = len(graphs)
    with record(model, "decoder.0.self", stream=True) as tape:
        torch.testing.assert_close(model(TARGET), expected, atol=1e-5, rtol=1e-5)
    assert "decoder.1.ff.stream" in tape.vectors
    torch.testing.assert_close(model(TARGET), expected, atol=1e-5, rtol=1e-5)
    assert len(graphs) == made > 0  # and afterwards compiled as before


def test_in_training_the_sums_are_those_that_dropout_left() -> None:
    model = gpt(dropout=0.5).train()
    torch.manual_seed(0)
    with record(model, stream=True) as tape:
        model(TARGET)
    v = {name: kept[0] for name, kept in tape.vectors.items()}
    real = TARGET != PAD
    added = (v["decoder.0.self.stream"] - v["decoder.input"])[real]
    kept = added.abs() > 1e-6
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(added[kept], 2 * v["decoder.0.self.output"][real][kept], atol=1e-4, rtol=1e-4)


def test_names_of_a_classifier_are_those_of_its_body() -> None:
    model = classifier()
    with record(model, "encoder.1.self", stream=True) as tape:
        outputs = model(SOURCE, torch.zeros_like(SOURCE))
    assert tape.names == ["encoder.1.self"]
    assert torch.equal(tape.vectors["logits"][0], outputs)


def test_the_backward_of_recomputed_blocks_is_not_recorded_again() -> None:
    model = gpt().train()
    model.decoder.activation_checkpointing = True
    with record(model, stream=True) as tape:
        model(TARGET).square().mean().backward()
    assert [len(tape[name]) for name in tape] == [1, 1]
    assert {len(kept) for kept in tape.vectors.values()} == {1}
    gradient: Tensor | None = model.embedding.weight.grad
    assert gradient is not None
