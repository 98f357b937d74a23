"""Recorded weights against a forward pass in NumPy, against the results of the kernels, and in cached decoding."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configured import SCHEMES
from fused_rows import kv_rows, qkv_rows
from tokens import EOS, SOS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.config import DecodeConfig
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis
from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, Mask, document_mask, prefix, with_window
from regard.layers.attention_kernels import AttentionPlan
from regard.layers.hooks import is_observed, paused
from regard.layers.mixers.attention import Attention
from regard.look.record import AttentionRecord, attention_layers, record
from regard.models.transformer import Transformer
from regard.text.special_tokens import PAD

sys.path.append(str(Path(__file__).parent))
from small import MAX_LEN, C, D, H, V, gpt, ids, transformer

CPU = torch.device("cpu")
close = {"atol": 1e-5, "rtol": 1e-5}
NAMES = ["encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross"]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


SOURCE, TARGET = ids(6, 3, 5), ids(4, 7, 5)


def traces(model: nn.Module) -> list[str]:
    """Attributes that a recording may have left on modules."""
    kept = (m.__dict__.keys() & {"attend", "_compiled_call_impl"} for m in model.modules())
    return [name for names in kept for name in names]


# ---- the numbers -----------------------------------------------------------------------------------------------------


class InNumPy:
    """One sentence pair through a pre-norm Transformer, in fp64, from the parameters alone; `seen` collects the weights."""

    def __init__(self, model: Transformer) -> None:
        self.p = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
        self.layers, self.groups = model.config.n_decoder_layers, model.config.n_kv_heads
        self.seen: dict[str, np.ndarray] = {}  # name -> (H, T, S)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.p[name + ".weight"].T + self.p[name + ".bias"]

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * self.p[name + ".weight"] + self.p[name + ".bias"]

    def embed(self, tokens: list[int]) -> np.ndarray:
        angle = np.arange(len(tokens))[:, None] / 10000 ** (np.arange(0, C, 2) / C)
        places = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(len(tokens), C)
        return self.p["source_embedding.weight"][tokens] * math.sqrt(C) + places

    def attend(self, name: str, q: np.ndarray, kv: np.ndarray, causal: bool = False) -> np.ndarray:
        """q (T, H*D), kv (S, 2*G*D)"""
        heads, share, w = [], H // self.groups, []
        for h in range(H):
            k, v = (kv[:, half + (h // share) * D :][:, :D] for half in (0, self.groups * D))
            scores = q[:, h * D : (h + 1) * D] @ k.T / math.sqrt(D)
            scores = np.where(np.tri(*scores.shape, dtype=bool) | (not causal), scores, -np.inf)
            e = np.exp(scores - scores.max(-1, keepdims=True))
            w.append(e / e.sum(-1, keepdims=True))
            heads.append(w[-1] @ v)
        self.seen[name] = np.stack(w)
        return np.concatenate(heads, -1)

    def stack(self, side: str, x: np.ndarray, memory: np.ndarray | None) -> np.ndarray:
        for i in range(self.layers):
            at = f"{side}.blocks.{i}"
            qkv = self.linear(f"{at}.sublayers.self.qkv", self.norm(f"{at}.norms.self", x))
            qkv = qkv[:, qkv_rows(H, self.groups, D)]
            y = self.attend(f"{side}.{i}.self", qkv[:, : H * D], qkv[:, H * D :], causal=side == "decoder")
            x = x + self.linear(f"{at}.sublayers.self.out", y)
            if memory is not None:
                q = self.linear(f"{at}.sublayers.cross.q", self.norm(f"{at}.norms.cross", x))
                kv = self.linear(f"{at}.sublayers.cross.kv", memory)[:, kv_rows(self.groups, D)]
                y = self.attend(f"{side}.{i}.cross", q, kv)
                x = x + self.linear(f"{at}.sublayers.cross.out", y)
            y = np.maximum(self.linear(f"{at}.sublayers.ff.inner", self.norm(f"{at}.norms.ff", x)), 0)
            x = x + self.linear(f"{at}.sublayers.ff.outer", y)
        return self.norm(f"{side}.norm", x)

    def __call__(self, source: list[int], target: list[int]) -> dict[str, np.ndarray]:
        memory = self.stack("encoder", self.embed(source), None)
        self.stack("decoder", self.embed(target), memory)
        return self.seen


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_weights_of_all_layers_equal_a_forward_written_in_numpy(groups: int) -> None:
    model = transformer(n_kv_heads=groups)
    with record(model) as tape:
        model(SOURCE, TARGET)
    assert tape.names == list(tape) == NAMES
    assert len(tape) == 6
    for b in range(3):
        source, target = (x[b][x[b] != PAD].tolist() for x in (SOURCE, TARGET))
        expected = InNumPy(model)(source, target)
        assert list(expected) == NAMES
        for name, w in expected.items():
            found = tape.weights(name)[b, :, : w.shape[1]]
            np.testing.assert_allclose(found[..., : w.shape[2]], w, atol=1e-5)
            assert (found[..., w.shape[2] :] == 0).all()  # padding is not looked at


@every_scheme
def test_weights_are_those_the_kernel_used(scheme: str) -> None:
    """What entered the output projection is weights times values, for all schemes (Shaw adds vectors of its own)."""
    model, mixed = transformer(positions=scheme, n_kv_heads=2, cross_positions="alibi"), {}
    for name, layer in attention_layers(model).items():
        layer.out.register_forward_pre_hook(lambda _, args, name=name: mixed.update({name: args[0]}))
    with record(model) as tape:
        model(SOURCE, TARGET)
    for name in tape:
        (kept,) = tape[name]
        w, real = kept.weights(), (SOURCE if name.startswith("encoder") else TARGET) != PAD
        expected = w @ kept.v.repeat_interleave(2, 1)
        if scheme == "shaw" and not name.endswith("cross"):
            expected = expected + kept.plan.scheme.values(w, (kept.plan.query_positions, kept.plan.key_positions))  # type: ignore[operator]
        torch.testing.assert_close(expected.transpose(1, 2).flatten(2)[real], mixed[name][real], **close)
        torch.testing.assert_close(w.sum(-1).transpose(1, 2)[real], torch.ones(int(real.sum()), H))
        torch.testing.assert_close(kept.scores()[:, :, 0].softmax(-1), w[:, :, 0])


def test_weights_of_a_model_in_bf16_are_worked_out_in_fp32() -> None:
    model = transformer()
    with torch.autocast("cpu", torch.bfloat16), record(model, "decoder.0.cross") as tape:
        model(SOURCE[:1], TARGET[:1, :4])
        (kept,) = tape["decoder.0.cross"]
        found = kept.weights()
    assert kept.q.dtype == torch.bfloat16
    expected = (kept.q.double() @ kept.k.double().mT / math.sqrt(D)).softmax(-1)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


@every_scheme
def test_the_difference_to_the_kernel_is_the_largest_of_a_real_query(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in whichever part of the queries it is; what is made of padding does not count."""
    monkeypatch.setattr("regard.look.record.QUERIES_AT_A_TIME", 3)
    model = transformer(positions=scheme, n_kv_heads=2)
    with record(model) as tape:
        model(SOURCE, TARGET)
    for name in tape:
        (kept,) = tape[name]
        assert kept.out is not None
        plain = kept.difference()
        assert plain is not None
        assert plain < 1e-4
        for place, expected in (((1, 2, 1, 3), 0.25), ((1, 0, 2, 0), 0.25), ((0, 0, 5, 1), 0.25)):
            off = kept.out.clone()
            off[place] += 0.25
            padded = SOURCE if name.startswith("encoder") else TARGET
            found = replace(kept, out=off).difference()
            assert found == pytest.approx(expected if padded[place[0], place[2]] != PAD else plain, abs=1e-4)


# ---- choosing rows and heads -----------------------------------------------------------------------------------------

CHOICES: list[Any] = [None, [2], [6, 0, 0], range(3), torch.tensor([1, 4]), [-1]]


def assert_rows_and_heads_are_slices(kept: AttentionRecord) -> None:
    whole, scores = kept.weights(), kept.scores()
    for rows in CHOICES:
        for heads in (None, [3], [1, 0]):
            t = slice(None) if rows is None else torch.as_tensor(rows)
            h = slice(None) if heads is None else heads
            torch.testing.assert_close(kept.weights(rows, heads), whole[:, h][:, :, t], atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(kept.scores(rows, heads), scores[:, h][:, :, t], **close)


@every_scheme
def test_rows_and_heads_are_slices_of_the_whole(scheme: str) -> None:
    model = transformer(positions=scheme, cross_positions="t5")
    with record(model, ["decoder.1.*", "encoder.0.self"]) as tape:
        model(ids(8, 7), ids(7, 5))
    for name in tape:
        assert_rows_and_heads_are_slices(tape[name][0])
    torch.testing.assert_close(tape.weights("decoder.1.cross", rows=[1]), tape.weights("decoder.1.cross")[:, :, [1]])


@pytest.mark.parametrize("scheme", ["rope", "alibi", "fire", "cope"])
@pytest.mark.parametrize(
    "mask", [with_window(CAUSAL, 3), prefix(4), prefix(torch.tensor([[2], [5]])), document_mask(CAUSAL)], ids=str
)
def test_rows_under_every_mask(scheme: str, mask: Mask) -> None:
    model, places = gpt(positions=scheme), torch.tensor([[0, 1, 2, 0, 1, 2, 3, -1], [0, 0, 1, 2, 3, 4, 5, 6]])
    if not mask.packed:
        places = torch.tensor([[*range(7), -1], [*range(8)]])
    with record(model, "decoder.1.self") as tape:
        model.hidden(ids(8, 8), places, mask=mask)
    assert_rows_and_heads_are_slices(tape["decoder.1.self"][0])


def test_an_index_out_of_range_is_refused() -> None:
    model = gpt()
    with record(model, "decoder.0.self") as tape:
        model(ids(5))
    with pytest.raises(RegardError, match="5 queries"):
        tape.weights("decoder.0.self", rows=[5])
    with pytest.raises(RegardError, match="4 heads"):
        tape.weights("decoder.0.self", heads=[-5])


# ---- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def elements_of(kept: AttentionRecord) -> int:
    tensors = [kept.q, kept.k, kept.v, *(x for x in vars(kept.plan).values() if isinstance(x, Tensor))]
    return sum(x.untyped_storage().nbytes() // x.element_size() for x in tensors)


def test_one_row_of_4096_needs_nothing_quadratic() -> None:
    n, model = 4096, gpt(positions="rope", n_decoder_layers=1, max_len=4096)
    with torch.no_grad(), record(model) as tape, Largest() as forward:
        model(ids(n))
    (kept,) = tape["decoder.0.self"]
    with Largest() as after:
        w = kept.weights(rows=[n - 1])
    assert w.shape == (1, H, 1, n)
    torch.testing.assert_close(w.sum(-1), torch.ones(1, H, 1))
    assert H * n <= after.elements <= 4 * H * n
    assert max(forward.elements, elements_of(kept)) < n * n / 10


@every_scheme
def test_records_and_rows_are_linear_in_length_whatever_the_scheme(scheme: str) -> None:
    """Also where the kernel itself was given a dense bias: the record does not keep it."""
    n, model = 512, gpt(positions=scheme, n_decoder_layers=1, max_len=512, **{"fire.width": 8})
    with torch.inference_mode(), record(model) as tape:
        model(ids(n))
    (kept,) = tape["decoder.0.self"]
    assert kept.plan.kernel_input is None
    assert elements_of(kept) < 4 * 4 * n * C
    with Largest() as after:
        kept.weights(rows=[3, n - 1])
    assert 0 < after.elements < n * n / 4


# ---- nothing changes -------------------------------------------------------------------------------------------------


@every_scheme
def test_recording_changes_no_bit_of_the_result(scheme: str) -> None:
    model, decoder = transformer(positions=scheme), gpt(positions=scheme)
    expected = model(SOURCE, TARGET), decoder(TARGET)
    with record(model) as tape, record(decoder) as other:
        found = model(SOURCE, TARGET), decoder(TARGET)
    assert all(map(torch.equal, found, expected))
    assert all(len(tape[name]) == 1 for name in NAMES)
    assert other.names == ["decoder.0.self", "decoder.1.self"]
    assert other.weights("decoder.1.self").shape == (3, H, 7, 7)


@pytest.mark.parametrize("scheme", ["sinusoidal", "t5", "fire", "shaw", "cope"])
def test_training_goes_on_as_before_and_the_record_keeps_what_was(scheme: str) -> None:
    """With dropout, with gradients; and the optimizer's step does not reach into the tape."""
    model = transformer(positions=scheme, dropout=0.1, attention_dropout=0.1).train()

    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        model(SOURCE, TARGET).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    with record(model) as tape:
        found = gradients()
    assert len(found) == len(expected) > 40
    assert all(map(torch.equal, found, expected))
    before = [tape.weights(name) for name in NAMES]
    torch.optim.SGD(model.parameters(), lr=10.0).step()
    assert all(torch.equal(tape.weights(name), w) for name, w in zip(NAMES, before, strict=True))
    kept = tape["decoder.0.self"][0]
    assert not any(x.requires_grad for x in (kept.q, kept.k, kept.v, kept.weights(), kept.scores()))


def test_keys_that_decoding_keeps_are_copied() -> None:
    model = transformer()
    state = model.requires_grad_(False).begin(SOURCE)
    with torch.no_grad(), record(model, "decoder.*") as tape:
        for t in range(20):  # past the first room of 16 columns
            model.step(torch.full((3,), 5 + t % 9), state)
    before = [[kept.weights() for kept in tape[name]] for name in tape]
    for _, held in state:
        for x in vars(held).values():
            x.zero_()
    for name, steps in zip(tape, before, strict=True):
        assert [w.shape[-1] for w in steps] == ([6] * 20 if name.endswith("cross") else list(range(1, 21)))
        assert all(torch.equal(kept.weights(), w) for kept, w in zip(tape[name], steps, strict=True))


def test_a_forward_is_a_record_and_only_inside_the_with() -> None:
    model = transformer()
    model(SOURCE, TARGET)
    with record(model, "decoder.0.*") as tape:
        model(SOURCE, TARGET)
        model(SOURCE[:2], TARGET[:2])
    model(SOURCE, TARGET)
    assert tape.names == ["decoder.0.self", "decoder.0.cross"]
    assert [kept.weights().shape[0] for kept in tape["decoder.0.cross"]] == [3, 2]
    assert torch.equal(tape.weights("decoder.0.cross"), tape["decoder.0.cross"][1].weights())
    assert tape["decoder.0.cross"][0].sentences is None
    assert traces(model) == []


# ---- observers -------------------------------------------------------------------------------------------------------


def test_recordings_nest() -> None:
    model = transformer()
    with record(model, "*.cross") as outer:
        model(SOURCE, TARGET)
        with record(model, "decoder.1.*") as inner:
            expected = model(SOURCE, TARGET)
        model(SOURCE, TARGET)
    assert {name: len(outer[name]) for name in outer} == {"decoder.0.cross": 3, "decoder.1.cross": 3}
    assert {name: len(inner[name]) for name in inner} == {"decoder.1.self": 1, "decoder.1.cross": 1}
    assert torch.equal(inner.weights("decoder.1.cross"), outer["decoder.1.cross"][1].weights())
    assert traces(model) == []
    assert torch.equal(model(SOURCE, TARGET), expected)


def test_an_error_inside_restores_everything() -> None:
    model = transformer()
    with pytest.raises(IndexError), record(model), record(model, "*.cross"):
        model(torch.tensor([[V]]), TARGET[:1])  # no such token
    assert traces(model) == []
    with record(model) as tape:
        with pytest.raises(IndexError), paused(model):
            model(torch.tensor([[V]]), TARGET[:1])
        assert is_observed(model)
    assert not is_observed(model)
    assert all(tape[name] == [] for name in tape)


def test_a_pause_ends() -> None:
    model = transformer()
    with record(model, "*.cross") as outer, record(model) as inner:
        with paused(model), paused(model):
            assert not is_observed(model)
            model(SOURCE, TARGET)
        assert is_observed(model)
        model(SOURCE, TARGET)
    assert [len(inner[name]) for name in inner] == [1] * 6
    assert [len(outer[name]) for name in outer] == [1] * 2


def test_somebody_elses_attend_is_called_and_comes_back() -> None:
    model, calls = transformer(), []
    layer = attention_layers(model)["decoder.0.cross"]

    def theirs(*args: Any) -> Tensor:
        calls.append(1)
        return Attention.attend(layer, *args)

    layer.attend = theirs  # type: ignore[method-assign]
    with record(model) as tape:
        model(SOURCE, TARGET)
        with paused(model):
            model(SOURCE, TARGET)
    assert layer.attend is theirs
    assert calls == [1, 1]
    assert len(tape["decoder.0.cross"]) == 1


def test_compiled_blocks_run_as_written_while_they_are_recorded() -> None:
    model, runs = transformer(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable:
        def run(*args: object) -> object:
            runs.append(1)
            return graph(*args)

        return run

    blocks = [*model.encoder.blocks, *model.decoder.blocks]
    for block in blocks:
        block.compile(backend=backend, dynamic=True)
    compiled = [block._compiled_call_impl for block in blocks]
    expected = model(SOURCE, TARGET)
    per_forward = len(runs)
    assert per_forward >= 4
    with record(model) as tape, record(model, "decoder.1.*"):
        found = model(SOURCE, TARGET)
    assert len(runs) == per_forward
    assert [len(tape[name]) for name in tape] == [1] * 6
    torch.testing.assert_close(found, expected, **close)
    assert [block._compiled_call_impl for block in blocks] == compiled
    with record(model, "encoder.*"):  # only what is recorded leaves its compiled form
        assert [block._compiled_call_impl is None for block in blocks] == [True, True, False, False]
    torch.testing.assert_close(model(SOURCE, TARGET), expected, **close)
    assert len(runs) == 2 * per_forward


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    model = transformer()
    with pytest.raises(RegardError, match=r"'decoder\.7\.cross'.* encoder\.0\.self, .*decoder\.1\.cross"):
        record(model, ["encoder.*", "decoder.7.cross"]).__enter__()
    with pytest.raises(RegardError, match="none"):
        record(nn.Linear(2, 2)).__enter__()
    assert traces(model) == []
    with record(model, "encoder.*") as tape:
        pass
    with pytest.raises(RegardError, match=r"'decoder\.0\.self' was not recorded.*encoder\.0\.self"):
        tape["decoder.0.self"]
    with pytest.raises(RegardError, match=r"'encoder\.0\.self' has no records"):
        tape.weights("encoder.0.self")


# ---- decoding --------------------------------------------------------------------------------------------------------

SOURCES = [x[x != PAD].tolist() for x in ids(5, 1, 12, 3, 8, 9, 2, seed=4)]
WAYS = [
    {"beam": 4, "nbest": 2, "length_penalty": 0.6},
    {"beam": 1},
    {"temperature": 1.0, "nbest": 3, "seed": 5, "beam": 1},
]


def run(model: Transformer, **options: object) -> list[list[Hypothesis]]:
    chosen = DecodeConfig(max_len_a=1.0, max_len_b=2, batch_tokens=70, **options)  # type: ignore[arg-type]
    return decode(model, SOURCES, chosen, model.config.max_len, CPU)


def step_by_step(model: Transformer, source: list[int], written: list[int]) -> dict[str, list[np.ndarray]]:
    """The decoder's weights (H, S) at every step of a cached decode of one hypothesis; softmax in fp64, ALiBi by hand."""
    seen: dict[str, list[np.ndarray]] = {}
    slopes = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])  # of four heads
    alibi = model.config.positions == "alibi"

    def spied(name: str, layer: Attention) -> Callable[..., Tensor]:
        def spy(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
            scores = np.einsum("hd,hsd->hs", q[0, :, 0].double(), k[0].double()) / math.sqrt(D)
            if alibi and name.endswith("self"):
                scores = scores - slopes[:, None] * np.arange(k.shape[2])[::-1]
            e = np.exp(scores - scores.max(-1, keepdims=True))
            seen.setdefault(name, []).append(e / e.sum(-1, keepdims=True))
            return Attention.attend(layer, q, k, v, plan)

        return spy

    state = model.begin(torch.tensor([[*source, EOS]]))
    layers = {name: layer for name, layer in attention_layers(model).items() if name.startswith("decoder")}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name, layer in layers.items():
            patch.setattr(layer, "attend", spied(name, layer))
        for token in written[:-1]:
            model.step(torch.tensor([token]), state)
    return seen


@pytest.mark.parametrize("scheme", ["sinusoidal", "rope", "alibi"])
@pytest.mark.parametrize("way", WAYS, ids=["beam", "greedy", "samples"])
def test_after_decoding_the_tape_has_the_weights_along_the_best_hypotheses(way: dict, scheme: str) -> None:
    model = transformer(positions=scheme)
    expected = run(model, **way)
    with record(model, "decoder.*") as tape, record(model, "*.self") as other:
        found = run(model, **way)
    assert found == expected
    order = [kept.sentences for kept in tape["decoder.0.cross"]]
    assert sorted(i for rows in order for i in rows) == list(range(len(SOURCES)))
    assert len(order) > 1  # several batches
    for kept in (tape["decoder.0.self"], other["decoder.0.self"], other["encoder.0.self"]):
        assert [one.sentences for one in kept] == order
    lengths = set()
    for n, rows in enumerate(order):
        for b, i in enumerate(rows):
            written = tape["decoder.0.cross"][n].tokens[b]
            best = found[i][0]
            assert written == [SOS, *best.tokens, *[EOS] * best.ended]
            lengths.add(len(written))
            for name, steps in step_by_step(model, SOURCES[i], written).items():
                assert len(steps) == len(written) - 1
                w = tape[name][n].weights()[b]  # (H, T, S)
                for t, step in enumerate(steps):
                    np.testing.assert_allclose(w[:, t, : step.shape[1]], step, atol=1e-5)
                    assert (w[:, t, step.shape[1] :] == 0).all()
    assert len(lengths) > 2
    assert traces(model) == []


def test_a_hypothesis_cut_off_at_the_last_position_is_read_again() -> None:
    """It fills every position there is; its last token was said, but never read."""
    model = transformer(max_len=16, positions="learned")
    with record(model, "decoder.0.cross") as tape:
        ((best,),) = decode(model, [[5, 6, 7]], DecodeConfig(min_len=16), 16, CPU)
        model(SOURCE, TARGET)
    assert not best.ended
    assert len(best.tokens) == 16
    kept, plain = tape["decoder.0.cross"]
    assert plain.tokens is plain.sentences is None  # the label goes with the decoding
    assert kept.sentences == [0]
    assert kept.tokens == [[SOS, *best.tokens]]
    assert kept.weights().shape == (1, H, 16, 4)


def test_a_search_that_fails_leaves_the_recording_as_it_was() -> None:
    model = transformer()
    with record(model) as tape:
        with pytest.raises(IndexError):
            decode(model, [[V]], DecodeConfig(), MAX_LEN, CPU)  # no such token
        assert is_observed(model)
        model(SOURCE, TARGET)
    assert [len(tape[name]) for name in tape] == [1] * 6
    assert tape["encoder.0.self"][0].tokens is None
    assert traces(model) == []
