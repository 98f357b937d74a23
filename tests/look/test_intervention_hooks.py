"""Interventions against models with edited weights, against formulas in NumPy, and in every way of running a model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import toy
from small import MAX_LEN, gpt, seq2seq, transformer
from tokens import EOS, SOS
from torch import Tensor, nn

from regard.config import DecodeConfig
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis, pad_rows
from regard.decode.generation import generate, token_log_probs
from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.layers.mixers.attention import Attention
from regard.layers.positions.scheme import NoPositions
from regard.look.beam_search_trace import trace_translation
from regard.look.intervention_hooks import intervene
from regard.look.interventions import Forbid, Force, Intervention, Pin, Replace, ReplacePositions, Uniform, Zero
from regard.look.record import attention_layers, record
from regard.models.gpt import GPT
from regard.models.seq2seq import Seq2Seq

SCHEMES = ["sinusoidal", "rope", "alibi", "t5", "shaw", "fire"]
SOURCES = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]
GREEDY = DecodeConfig(beam=1, max_len_a=0.0, max_len_b=6)
BEAM = DecodeConfig(beam=3, max_len_a=0.0, max_len_b=6, min_len=3)


def rnnsearch(score: str = "additive") -> Seq2Seq:
    return seq2seq(attention_score=score)


def rows() -> tuple[Tensor, Tensor]:
    source = pad_rows([[*ids, EOS] for ids in SOURCES], torch.device("cpu"))
    return source, pad_rows([[SOS, 7, 8, 9, 5], [SOS, 4 + 5, 6], [SOS, 9, 9, 6]], torch.device("cpu"))


def run(model: nn.Module) -> Tensor:
    source, target = rows()
    with torch.no_grad():
        return model(source, target) if not isinstance(model, GPT) else model(target)


def translations(model: Any, options: DecodeConfig) -> list[Hypothesis]:
    found = decode(model, SOURCES, options, MAX_LEN, torch.device("cpu"))
    return [ranked[0] for ranked in found]


def heads_silenced(model: nn.Module, chosen: Sequence[tuple[str, int]]) -> nn.Module:
    """A copy whose output projections have zeros where these heads come in."""
    other = copy.deepcopy(model)
    for name, head in chosen:
        layer = attention_layers(other)[name]
        assert isinstance(layer, Attention)
        with torch.no_grad():
            layer.out.weight[:, head * layer.d_head : (head + 1) * layer.d_head] = 0.0
    return other


# ---- where words come from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["transformer", "rnnsearch"])
@pytest.mark.parametrize("beam", [1, 3])
def test_a_word_changes_when_the_one_it_came_from_is_hidden_and_the_others_stay(kind: str, beam: int) -> None:
    translator, rng = Translator(toy.taught(kind)), random.Random(5)
    for _ in range(3):
        text = toy.sentence(rng)
        right = toy.translated(text).split()
        assert translator.translate(text, beam=beam).text.split() == right
        for place in range(len(right)):
            with intervene(translator.model, [Forbid("*cross", None, place, place)]):
                found = translator.translate(text, beam=beam).text.split()
            assert found[place : place + 1] != right[place : place + 1]
            assert found[:place] == right[:place]


@pytest.mark.parametrize("kind", ["transformer", "rnnsearch"])
def test_a_pinned_word_is_written_from_where_it_is_pinned_to(kind: str) -> None:
    translator, text = Translator(toy.taught(kind)), "elk ape fox hen"
    assert translator.translate(text).text == "Elch Affe Fuchs Henne"
    found = []
    for key in range(4):
        with intervene(translator.model, [Pin(0, key)]):
            found.append(translator.translate(text).text.split()[0])
    assert found == ["Elch", "Affe", "Fuchs", "Henne"]


# ---- zero ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", SCHEMES)
def test_a_zeroed_head_is_one_whose_output_projection_is_gone(positions: str) -> None:
    model = transformer(positions=positions, **({"encoder_positions": "rope"} if positions == "fire" else {}))
    for name in attention_layers(model):
        for head in (0, 3):
            expected = run(heads_silenced(model, [(name, head)]))
            with intervene(model, [Zero(name, (head,))]):
                found = run(model)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
            assert not torch.equal(found, run(model))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("options", [GREEDY, BEAM, DecodeConfig(temperature=1.0, max_len_a=0.0, max_len_b=6)])
def test_so_it_is_in_searches_with_their_caches(norm: str, options: DecodeConfig) -> None:
    model, chosen = (
        transformer(norm=norm, n_kv_heads=2),
        [("decoder.1.cross", 1), ("decoder.0.self", 3), ("encoder.1.self", 0)],
    )
    expected = translations(heads_silenced(model, chosen), options)
    with intervene(model, [Zero(name, (head,)) for name, head in chosen]):
        found = translations(model, options)
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected], abs=1e-5)
    assert [h.log_prob for h in found] != pytest.approx([h.log_prob for h in translations(model, options)], abs=1e-3)


def test_so_it_is_in_a_language_model_that_goes_on_writing() -> None:
    model, options = gpt(positions="rope"), DecodeConfig(max_new_tokens=6, temperature=1.0, seed=3)
    prompts = [[SOS, 5, 6, 7, 8], [SOS, 9]]
    expected = generate(heads_silenced(model, [("decoder.0.self", 1)]), prompts, options)  # type: ignore[arg-type]
    with intervene(model, [Zero("decoder.0.self", (1,))]):
        found = generate(model, prompts, options)
    assert [row.ids for row in found] == [row.ids for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)


def test_a_recurrent_decoder_without_its_one_head_reads_no_source() -> None:
    """Its context is zero: annotations that are all zero give it the same one."""
    model = rnnsearch()
    with intervene(model, [Zero("decoder.cross")]):
        found = run(model)
    with record(model, "*") as tape, intervene(model, [Zero("*cross", (0,))]):
        assert torch.equal(run(model), found)
    assert not tape.weights("decoder.cross").any()


# ---- weights ---------------------------------------------------------------------------------------------------------


def looked(model: nn.Module, name: str, changes: Sequence[Intervention] = ()) -> np.ndarray:
    """Recorded weights (B, H, T, S)."""
    with intervene(model, changes), record(model, name) as tape:
        run(model)
    return tape.weights(name).double().numpy()


def scored(model: nn.Module, name: str) -> np.ndarray:
    with record(model, name) as tape:
        run(model)
    return tape[name][0].scores().double().numpy()


def softmax(scores: np.ndarray) -> np.ndarray:
    """In float64; a row of -inf is zeros."""
    exp = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
    return exp / np.maximum(exp.sum(-1, keepdims=True), 1e-300)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "alibi": lambda: transformer(positions="alibi"),
    "shaw": lambda: transformer(positions="shaw", encoder_positions="shaw"),
    "grouped": lambda: transformer(positions="rope", n_kv_heads=2),
    "additive": rnnsearch,
    "dot": lambda: rnnsearch("dot"),
    "general": lambda: rnnsearch("general"),
}
ALIGNING = ("additive", "dot", "general")
ATTENDING = tuple(kind for kind in MODELS if kind not in ALIGNING)
# in the last layer, so that what it is given is what it was
CROSSES = [(kind, "decoder.cross" if kind in ALIGNING else "decoder.1.cross") for kind in MODELS]
SELVES = [(kind, name) for kind in ATTENDING for name in ("encoder.1.self", "decoder.1.self")]


@pytest.mark.parametrize(("kind", "name"), CROSSES + SELVES)
def test_what_is_forbidden_has_no_weight_and_the_rest_is_the_softmax_without_it(kind: str, name: str) -> None:
    model = MODELS[kind]()
    scores, before = scored(model, name), looked(model, name)
    heads = (0,) if kind in ALIGNING else (0, 2)
    found = looked(model, name, [Forbid(name, heads, 2, (0, 1))])
    scores[:, heads, 2, :2] = -np.inf
    np.testing.assert_allclose(found[:, heads, 2], softmax(scores)[:, heads, 2], atol=1e-6)
    np.testing.assert_allclose(found[:, heads, 2].sum(-1), 1.0, atol=1e-6)
    assert not found[:, heads, 2, :2].any()
    others = np.ones(found.shape[:3], bool)
    others[:, heads, 2] = False
    others[:, :, 3:] &= kind not in ALIGNING  # later states have read something else
    np.testing.assert_array_equal(found[others], before[others])


@pytest.mark.parametrize(("kind", "name"), CROSSES + SELVES)
def test_what_is_forced_has_all_the_weight(kind: str, name: str) -> None:
    model = MODELS[kind]()
    before, found = looked(model, name), looked(model, name, [Force(name, (0,), (1, 2), 1)])
    expected = np.zeros_like(found[:, 0, 1:3])
    expected[..., 1] = 1.0
    np.testing.assert_array_equal(found[:, 0, 1:3], expected)
    np.testing.assert_array_equal(found[:, :, 0], before[:, :, 0])
    if before.shape[1] > 1:
        np.testing.assert_array_equal(found[:, 1:], before[:, 1:])


def test_of_several_keys_that_are_forced_the_scores_decide() -> None:
    model, name = transformer(), "decoder.1.cross"
    scores = scored(model, name)
    found = looked(model, name, [Force(name, None, 1, (0, 2))])
    scores[:, :, 1, [1, *range(3, scores.shape[-1])]] = -np.inf
    np.testing.assert_allclose(found[:, :, 1], softmax(scores)[:, :, 1], atol=1e-6)


def test_a_key_that_is_not_there_or_comes_later_forces_nothing() -> None:
    model = transformer()
    for name, key in (("decoder.1.cross", 50), ("decoder.1.self", 3)):
        np.testing.assert_array_equal(looked(model, name, [Force(name, None, 1, key)]), looked(model, name))


@pytest.mark.parametrize(("kind", "name"), CROSSES + SELVES)
def test_a_head_may_look_alike_at_all_it_sees(kind: str, name: str) -> None:
    model = MODELS[kind]()
    before, found = looked(model, name), looked(model, name, [Uniform(name, (0,))])
    seen = before[:, 0] > 0
    if kind not in ALIGNING:
        np.testing.assert_array_equal(found[:, 1:], before[:, 1:])
    expected = seen / np.maximum(seen.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)
    if name == "decoder.1.self":
        np.testing.assert_allclose(found[0, 0, 3], [0.25, 0.25, 0.25, 0.25, 0.0], atol=1e-6)


@pytest.mark.parametrize(("kind", "name"), [("transformer", "decoder.1.cross"), ("additive", "decoder.cross")])
def test_of_changes_that_contradict_each_other_the_later_holds(kind: str, name: str) -> None:
    model = MODELS[kind]()
    silent = looked(model, name, [Force(name, None, 0, 1), Forbid(name, None, 0, 1)])
    assert not silent[:, :, 0].any()
    one = looked(model, name, [Zero(name), Force(name, None, 0, 1)])
    assert (one[:, :, 0, 1] == 1).all()
    assert one.sum() == one[:, :, 0, 1].sum()
    two = looked(model, name, [Force(name, None, 0, 1), Force(name, None, 0, 2)])
    assert (two[:, :, 0, 2] == 1).all()
    even = looked(model, name, [Uniform(name), Forbid(name, None, 0, 0)])
    lengths = np.array([len(ids) for ids in SOURCES])  # with the end token, and without the one that is hidden
    np.testing.assert_allclose(even[:, 0, 0, 1], 1 / lengths, atol=1e-6)
    level = looked(model, name, [Uniform(name)])
    for earlier in (Zero(name), Force(name, None, 0, 1), Forbid(name, None, 0, 1)):
        np.testing.assert_array_equal(looked(model, name, [earlier, Uniform(name)]), level)


# ---- all ways to run it ----------------------------------------------------------------------------------------------

MANY: dict[str, list[Intervention]] = {
    "zero": [Zero("*cross", (0,))],
    "uniform": [Uniform("*cross")],
    "forbid": [Forbid("*cross", None, (1, 2), (0, 1))],
    "pin": [Pin(1, 2)],
    "self": [
        Forbid("decoder.*.self", None, (2, 3), (0, 1)),
        Force("decoder.0.self", (1,), 4, 2),
        Uniform("encoder.0.self"),
    ],
    "none": [ReplacePositions("none")],
    "rope": [ReplacePositions("rope"), Zero("decoder.1.self", (2,))],
}
USABLE = [(kind, change) for kind in ATTENDING for change in MANY]
USABLE += [(kind, change) for kind in ALIGNING for change in ("zero", "uniform", "forbid", "pin")]


@pytest.mark.parametrize(("kind", "change"), USABLE)
def test_a_search_finds_what_a_forced_forward_of_the_changed_model_confirms(kind: str, change: str) -> None:
    """Sentences of several lengths, hypotheses that change places, and steps that only see their own past."""
    model: Any = MODELS[kind]()
    with intervene(model, MANY[change]):
        for found, ids in zip(translations(model, BEAM), SOURCES, strict=True):
            written = [*found.tokens, *[EOS] * found.ended]
            with torch.no_grad():
                logits = model(torch.tensor([[*ids, EOS]]), torch.tensor([[SOS, *written][:-1]]))
            log_probs = logits[0].log_softmax(-1).gather(1, torch.tensor(written)[:, None])
            assert found.log_prob == pytest.approx(log_probs.sum().item(), abs=2e-5)
        inside = [h.log_prob for h in translations(model, BEAM)]
    outside = [h.log_prob for h in translations(model, BEAM)]
    assert inside != pytest.approx(outside, abs=1e-4)


def test_a_language_model_writes_what_a_forced_forward_confirms() -> None:
    model, options = gpt(positions="alibi"), DecodeConfig(max_new_tokens=8, min_len=8, seed=1, temperature=1.0)
    prompts = [[SOS, 5, 6, 7, 8, 9], [SOS, 10, 11]]
    changes = [
        Forbid("*", None, (4, 5, 6, 7), (0, 1)),
        Force("decoder.1.self", (0, 2), 8, 3),
        Uniform("decoder.0.self", (1,)),
    ]
    with intervene(model, changes):
        found = generate(model, prompts, options)
        forced = token_log_probs(model, [row.ids for row in found], options)
    for row, scored_ in zip(found, forced, strict=True):
        assert row.log_probs == pytest.approx(scored_[len(row.prompt) - 1 :], abs=1e-5)


@pytest.mark.parametrize(("kind", "change"), USABLE)
def test_whoever_records_hears_the_changed_weights_inside_and_outside(kind: str, change: str) -> None:
    model, changes = MODELS[kind](), MANY[change]
    with record(model, "*") as outside, intervene(model, changes):
        first = run(model)
    with intervene(model, changes), record(model, "*") as inside:
        second = run(model)
    with intervene(model, changes):
        assert torch.equal(run(model), first)
    assert torch.equal(first, second)
    with record(model, "*") as unchanged:
        run(model)
    assert any(not torch.equal(unchanged.weights(name), inside.weights(name)) for name in inside)
    for name in inside:
        assert torch.equal(outside.weights(name), inside.weights(name))
        for kept in (outside[name][0], inside[name][0]):
            assert (kept.difference() or 0.0) < 1e-5
            part = kept.weights(rows=[1, 3], heads=[0])
            torch.testing.assert_close(part, kept.weights()[:, :1, [1, 3]], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "layer"), [("transformer", "decoder.1.cross"), ("rnnsearch", "decoder.cross")])
def test_a_search_that_is_followed_live_is_followed_as_changed(kind: str, layer: str) -> None:
    translator, text = Translator(toy.taught(kind)), "owl bee cat jay"
    with intervene(translator.model, [Pin(1, 3), Forbid(layer, None, 2, 2)]):
        translation, search = trace_translation(translator, text, beam=3)
        with record(translator.model, layer) as tape:
            assert translator.translate(text, beam=3).text == translation.text
    torch.testing.assert_close(search.weights[layer], tape.weights(layer)[0], atol=1e-5, rtol=0)
    assert (search.weights[layer][:, 1, 3] == 1).all()


# ---- positions -------------------------------------------------------------------------------------------------------


def test_a_model_without_its_positions_is_one_that_was_built_without_them() -> None:
    model, bare = gpt(positions="sinusoidal"), gpt(positions="none")
    bare.load_state_dict(model.state_dict())
    with intervene(model, [ReplacePositions("none")]):
        assert torch.equal(run(model), run(bare))
    assert not torch.equal(run(model), run(bare))


@pytest.mark.parametrize("name", ["rope", "alibi", "sinusoidal", "yarn"])
def test_it_may_be_given_any_scheme_that_has_nothing_to_learn(name: str) -> None:
    bare, other = gpt(positions="none"), gpt(positions=name)
    other.load_state_dict(bare.state_dict())
    with intervene(bare, [ReplacePositions(name)]):
        torch.testing.assert_close(run(bare), run(other), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned", "rope", "t5", "shaw"])
def test_both_halves_of_a_transformer_lose_theirs(scheme: str) -> None:
    model = transformer(positions=scheme)
    bare = copy.deepcopy(model)
    bare.encoder.schemes = bare.decoder.schemes = nn.ModuleList([NoPositions()])
    with intervene(model, [ReplacePositions("none")]):
        found = run(model)
    torch.testing.assert_close(found, run(bare), atol=1e-6, rtol=0)


def test_attention_over_the_source_loses_its_own_positions_too() -> None:
    model = transformer(positions="alibi", cross_positions="alibi")
    bare = copy.deepcopy(model)
    bare.encoder.schemes = bare.decoder.schemes = nn.ModuleList([NoPositions()])
    bare.decoder.cross_scheme = NoPositions()
    with intervene(model, [ReplacePositions("none")]):
        torch.testing.assert_close(run(model), run(bare), atol=1e-6, rtol=0)


def test_what_must_be_learned_or_is_not_there_is_refused() -> None:
    for name in ("learned", "t5", "shaw"):
        with (
            pytest.raises(RegardError, match=f"'{name}' are learned"),
            intervene(transformer(), [ReplacePositions(name)]),
        ):
            pass
    with pytest.raises(RegardError, match="no position scheme"), intervene(rnnsearch(), [ReplacePositions("none")]):
        pass
    with (
        pytest.raises(RegardError, match="unknown positions 'nosuch'"),
        intervene(transformer(), [ReplacePositions("nosuch")]),
    ):
        pass


# ---- before and after ------------------------------------------------------------------------------------------------


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a model is: attributes, parameters and buffers."""
    found = {f"{path}.{key}": id(value) for path, m in model.named_modules() for key, value in vars(m).items()}
    hooks = {path: len(m._forward_pre_hooks) + len(m._forward_hooks) for path, m in model.named_modules()}
    return {**found, **hooks, **{name: p.detach().clone() for name, p in model.state_dict().items()}}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key] for key in a
    )


@pytest.mark.parametrize(("kind", "change"), USABLE)
def test_afterwards_a_model_is_what_it_was_also_after_a_fault(kind: str, change: str) -> None:
    model = MODELS[kind]()
    before, result = everything(model), run(model)
    with intervene(model, MANY[change]):
        assert not torch.equal(run(model), result)
    assert same(everything(model), before)
    with suppress(ZeroDivisionError), intervene(model, MANY[change]), record(model, "*"):
        run(model)
        raise ZeroDivisionError
    assert same(everything(model), before)
    assert torch.equal(run(model), result)


@pytest.mark.parametrize("kind", ["transformer", "additive"])
def test_changes_inside_of_changes_are_the_changes_of_both(kind: str) -> None:
    model = MODELS[kind]()
    first: list[Intervention] = [
        Forbid("*cross", None, 1, 0),
        Uniform("*cross") if kind == "additive" else Uniform("*cross", (1,)),
    ]
    second: list[Intervention] = [Forbid("*cross", None, 1, 2), Force("*cross", None, 3, 1)]
    with intervene(model, [*first, *second]), record(model, "*cross") as wanted:
        expected = run(model)
    with record(model, "*cross") as outside, intervene(model, first), record(model, "*cross") as between:
        with intervene(model, second), record(model, "*cross") as inside:
            assert torch.equal(run(model), expected)
        alone = run(model)
    for tape in (outside, between, inside):
        for name in tape:
            assert torch.equal(tape[name][0].weights(), wanted.weights(name))
    with intervene(model, first):
        assert torch.equal(run(model), alone)
    with intervene(model, [Force("*cross", None, 1, 0)]), intervene(model, [Force("*cross", None, 1, 2)]):
        (*_, last) = attention_layers(model)
        assert (looked(model, last)[:, :, 1, 2] == 1).all()  # the inner one is the later


def test_rows_and_heads_that_are_not_concerned_stay_as_they_are_to_the_bit() -> None:
    model = transformer()
    with record(model, "decoder.0.cross") as before:
        run(model)
    changes = [Zero("decoder.0.cross", (2,)), Forbid("decoder.0.cross", (0,), 1, 1)]
    with intervene(model, changes), record(model, "decoder.0.cross") as after:
        run(model)
    old, new = before["decoder.0.cross"][0].out, after["decoder.0.cross"][0].out
    assert old is not None
    assert new is not None
    same_rows = (old == new).all(-1)  # (B, H, T)
    expected = torch.ones_like(same_rows)
    expected[:, 2], expected[:, 0, 1] = False, False
    assert torch.equal(same_rows, expected)


def test_what_was_compiled_around_a_layer_is_left_meanwhile() -> None:
    def compiled(*args: object) -> None:
        raise AssertionError("this knows nothing of changes")

    model = transformer()
    blocks = [*model.decoder.blocks]
    for block in blocks:
        block._compiled_call_impl = compiled
    with intervene(model, [Zero("decoder.0.self", (0,))]):
        run(model)
    assert all(block._compiled_call_impl is compiled for block in blocks)


def test_gradients_go_through_a_change_and_not_through_a_head_that_says_nothing() -> None:
    model = transformer()
    source, target = rows()
    with intervene(model, [Zero("decoder.1.cross", (1,)), Forbid("decoder.1.cross", None, 0, 1)]):
        model(source, target).logsumexp(-1).sum().backward()
    layer = attention_layers(model)["decoder.1.cross"]
    assert isinstance(layer, Attention)
    assert layer.out.weight.grad is not None
    by_head = layer.out.weight.grad.unflatten(1, (-1, layer.d_head)).abs().sum((0, 2))
    assert (by_head > 0).tolist() == [True, False, True, True]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_layers_and_heads_that_are_not_there_are_refused() -> None:
    refused: list[tuple[Intervention, str]] = [
        (Zero("decoder.9"), r"no attention layer is called 'decoder\.9'"),
        (Zero("decoder.0.self", (1, 4)), r"decoder\.0\.self has no head 4: its 4 heads"),
        (Pin("Apfel", 1), "'Apfel' is a word"),
        (Forbid("*cross", None, 0, -1), "counted from 0"),
        (Forbid("*cross", None, (), 1), "counted from 0"),
    ]
    for change, why in refused:
        with pytest.raises(RegardError, match=why), intervene(transformer(), [change]):
            pass


def test_other_tokens_are_not_the_models_affair() -> None:
    model = transformer()
    result = run(model)
    with intervene(model, [Replace("source", 1, "dog")]):
        assert torch.equal(run(model), result)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", MANY)
def test_on_a_gpu_changed_searches_find_the_same(change: str) -> None:
    """Recorded decoding knows nothing of changes, and must be left."""
    model, device = transformer(), torch.device("cuda")
    with intervene(model, MANY[change]):
        expected = translations(model, BEAM)
    model.to(device)
    decode(model, SOURCES, BEAM, MAX_LEN, device)  # so that there is a recording
    with intervene(model, MANY[change]):
        found = [ranked[0] for ranked in decode(model, SOURCES, BEAM, MAX_LEN, device)]
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected], abs=1e-3)
