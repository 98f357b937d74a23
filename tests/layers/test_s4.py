"""S4 and S4D: their matrices against NumPy, their discrete systems against SciPy, the convolution against the recurrence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from formula import packed, ragged
from scipy.signal import cont2discrete
from torch import Tensor

from regard.config import ModelConfig, TrainConfig
from regard.errors import RegardError
from regard.kernels.linear_system import as_complex
from regard.kernels.long_convolution import long_convolution
from regard.kernels.masks import CAUSAL, PAD_POSITION, Mask, document_mask, prefix
from regard.layers.context import Context, PrepareRequest, apply_step
from regard.layers.decoding_state import DecodingState
from regard.layers.mixers.s4 import S4, diagonalize_legs, hippo_legs
from regard.layers.mixers.s4d import S4D, discretize_zoh, initial_diagonal
from regard.layers.mixers.state_space_layer import StateSpaceLayer
from regard.layers.part import Place, make_part
from regard.models.architectures import make_model, preset
from regard.models.initialization import initialize
from regard.training.optimizer import make_optimizer

H = 3
LAYERS = {
    "s4": S4.Settings(state=6),
    "s4d": S4D.Settings(state=6),
    "s4d bilinear inv": S4D.Settings(state=4, init="inv", discretization="bilinear"),
    "s4d legs": S4D.Settings(state=6, init="legs"),
    "s4d real": S4D.Settings(state=2, init="real"),
}
layers = pytest.mark.parametrize("name", LAYERS)


def make_layer(name: str, dtype: torch.dtype = torch.double, settings: Any = None) -> StateSpaceLayer:
    kind, settings = name.split()[0], settings or LAYERS[name]
    config = ModelConfig(d_model=H, dropout=0.0, parts={kind: settings})
    layer = make_part("mixer", kind, config, Place("decoder", causal=True))
    torch.manual_seed(1)
    initialize(layer)
    with torch.no_grad():
        layer.log_dt.copy_(torch.tensor([0.002, 0.05, 0.5]).log())  # slow and fast channels
    return layer.to(dtype).eval()


def context(positions: Tensor, mask: Mask = CAUSAL, continues: bool = False, **more: Any) -> Any:
    request = PrepareRequest(positions, positions, mask, None, None, False, continues=continues)  # type: ignore[arg-type]
    return lambda layer: Context(positions, layer.prepare(request), **more)


def step_through(layer: StateSpaceLayer, text: Tensor) -> Tensor:
    """One text (T, C), token by token."""
    state = DecodingState(layer, 1, text.device, text.dtype)
    kept, found = state.parts[layer], []
    for t, x in enumerate(text):
        found.append(layer.step(x[None], Context(torch.tensor([t]), apply=apply_step, state=state), kept)[0])
    return torch.stack(found)


# ---- matrices ------------------------------------------------------------------------------------------------------------


def test_hippo_legs_by_hand() -> None:
    matrix, inputs = hippo_legs(3)
    r3, r5, r15 = 3**0.5, 5**0.5, 15**0.5
    np.testing.assert_allclose(matrix, [[-1, 0, 0], [-r3, -2, 0], [-r5, -r15, -3]])
    np.testing.assert_allclose(inputs, [1, r3, r5])


@pytest.mark.parametrize("n", [2, 8, 64])
def test_the_diagonal_form_of_legs_is_that_matrix(n: int) -> None:
    """Numbers that a change of basis keeps: the eigenvalues of A, and the outputs C exp(A t) B of C = B."""
    matrix, inputs = hippo_legs(n)
    values, p, b = diagonalize_legs(n)
    np.testing.assert_allclose(values.real, -0.5)
    normal = matrix + np.outer(np.sqrt(np.arange(n) + 0.5), np.sqrt(np.arange(n) + 0.5))
    expected = np.linalg.eigvals(normal)
    np.testing.assert_allclose(np.sort(values.imag), np.sort(expected.imag)[n // 2 :], atol=1e-8 * n * n)
    both = [np.concatenate([x, x.conj()]) for x in (values, p, b)]
    ours = np.diag(both[0]) - np.outer(both[1], both[1].conj())
    for power in range(4):  # B^T A^k B
        wanted = inputs @ np.linalg.matrix_power(matrix, power) @ inputs
        found = both[2].conj() @ np.linalg.matrix_power(ours, power) @ both[2]
        np.testing.assert_allclose(found, wanted, rtol=1e-8)


def test_initial_diagonals_by_hand() -> None:
    np.testing.assert_allclose(initial_diagonal("lin", 6), [-0.5, -0.5 + 1j * np.pi, -0.5 + 2j * np.pi])
    np.testing.assert_allclose(initial_diagonal("inv", 4), [-0.5 + 12j / np.pi, -0.5 + 4 / 3 / np.pi * 1j])
    np.testing.assert_allclose(initial_diagonal("real", 6), [-1, -2, -3])
    np.testing.assert_allclose(initial_diagonal("legs", 2).imag, [3**0.5 / 2])


def continuous(layer: StateSpaceLayer, channel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A (N, N), B and C of one channel with all conjugate pairs, in NumPy."""
    a = -np.exp(layer.log_decay[channel].numpy()) + 1j * layer.frequency[channel].numpy()
    c = layer.outputs[channel].numpy() @ [1, 1j]
    b, p = np.ones_like(a), np.zeros_like(a)
    if isinstance(layer, S4):
        b, p = (x[channel].numpy() @ [1, 1j] for x in (layer.inputs, layer.rank_one))
    a, b, c, p = (np.concatenate([x, x.conj()]) for x in (a, b, c, p))
    return np.diag(a) - np.outer(p, p.conj()), b, c


@layers
@torch.no_grad()
def test_the_discrete_system_is_that_of_scipy(name: str) -> None:
    layer = make_layer(name)
    rule = "bilinear" if "bilinear" in name or name == "s4" else "zoh"
    system, length = layer.system(torch.double), 11
    kernel, inputs = system.kernel(length), as_complex(system.inputs)
    for channel in range(H):
        a, b, c = continuous(layer, channel)
        dt, n = layer.log_dt[channel].exp().item(), len(a)
        # SciPy is real: the same matrices in the basis of real and imaginary parts
        basis = np.block([[np.eye(n // 2), 1j * np.eye(n // 2)], [np.eye(n // 2), -1j * np.eye(n // 2)]])
        real = [np.linalg.solve(basis, a @ basis), np.linalg.solve(basis, b[:, None]), (c @ basis)[None]]
        assert max(abs(x.imag).max() for x in real) < 1e-12
        ab, bb, *_ = cont2discrete([*(x.real for x in real), np.zeros((1, 1))], dt, rule)
        np.testing.assert_allclose(inputs[channel].numpy(), basis[: n // 2] @ bb[:, 0], rtol=1e-10)
        wanted = [(real[2].real @ np.linalg.matrix_power(ab, power) @ bb)[0, 0] for power in range(length)]
        np.testing.assert_allclose(kernel[channel].numpy(), wanted, rtol=1e-9, atol=1e-11)


# ---- convolution, recurrence, prompts -------------------------------------------------------------------------------------


@layers
@pytest.mark.parametrize("length", [1, 2, 5, 70])
@torch.no_grad()
def test_the_convolution_is_the_recurrence(name: str, length: int) -> None:
    layer = make_layer(name)
    x = torch.randn(1, length, H, dtype=torch.double)
    found = layer(x, context(ragged(length))(layer))
    torch.testing.assert_close(found[0], step_through(layer, x[0]), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("name", ["s4", "s4d"])
@torch.no_grad()
def test_the_convolution_is_the_recurrence_in_single_precision(name: str) -> None:
    layer = make_layer(name, torch.float32, {"s4": S4, "s4d": S4D}[name].Settings(state=32))
    x = torch.randn(1, 400, H)
    system = layer.system(torch.float32)
    state, ys = torch.zeros(1, H, 32), []
    for u in x[0]:
        state, y = system.step(state, u[None])
        ys.append(y[0])
    found, wanted = long_convolution(x, system.kernel(400))[0], torch.stack(ys)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@layers
@torch.no_grad()
def test_padding_changes_nothing(name: str) -> None:
    layer, lengths = make_layer(name), (9, 1, 6, 12)
    x = torch.randn(4, 14, H, dtype=torch.double)
    positions = ragged(*lengths, width=14)
    x[positions == PAD_POSITION] = torch.inf
    found = layer(x, context(positions)(layer))
    for row, n in enumerate(lengths):
        torch.testing.assert_close(found[row, :n], step_through(layer, x[row, :n]), atol=1e-10, rtol=1e-9)


@layers
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    layer, lengths = make_layer(name), [(5, 1, 60), (38, 2), (1, 1, 1)]
    positions = packed(*lengths)
    x = torch.randn(*positions.shape, H, dtype=torch.double)
    found = layer(x, context(positions, document_mask(CAUSAL))(layer))
    for row, documents in enumerate(lengths):
        ends = np.cumsum([0, *documents])
        for begin, end in pairwise(ends):
            wanted = step_through(layer, x[row, begin:end])
            torch.testing.assert_close(found[row, begin:end], wanted, atol=1e-10, rtol=1e-9)


@layers
@torch.no_grad()
def test_prompts_in_pieces_and_steps_are_one_text(name: str) -> None:
    """Rows of different lengths read two prompts, the second of which continues the first, and then single tokens."""
    layer = make_layer(name)
    pieces = [(7, 3, 1, 9), (2, 5, 0, 4)]
    texts = [torch.randn(sum(n) + 3, H, dtype=torch.double) for n in zip(*pieces, strict=True)]
    wanted = [step_through(layer, text) for text in texts]
    state = DecodingState(layer, 4, torch.device("cpu"), torch.double)
    kept, at = state.parts[layer], [0] * 4
    for lengths in pieces:
        width = max(lengths) + 1
        x = torch.full((4, width, H), torch.nan, dtype=torch.double)
        positions = torch.full((4, width), PAD_POSITION)
        for row, n in enumerate(lengths):
            x[row, :n] = texts[row][at[row] : at[row] + n]
            positions[row, :n] = torch.arange(at[row], at[row] + n)
        found = layer.prefill(x, context(positions, CAUSAL, at[0] > 0, state=state)(layer), kept)
        state.advance(positions, is_prompt=True)
        for row, n in enumerate(lengths):
            here = slice(at[row], at[row] + n)
            torch.testing.assert_close(found[row, :n], wanted[row][here], atol=1e-10, rtol=1e-9)
            at[row] += n
    for _ in range(3):
        x = torch.stack([text[i] for text, i in zip(texts, at, strict=True)])
        found = layer.step(x, Context(torch.tensor(at), apply=apply_step, state=state), kept)
        for row in range(4):
            torch.testing.assert_close(found[row], wanted[row][at[row]], atol=1e-10, rtol=1e-9)
            at[row] += 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["s4", "s4d"])
def test_a_document_that_begins_inside_a_prompt_forgets_the_state(name: str) -> None:
    layer, x = make_layer(name), torch.randn(1, 9, H, dtype=torch.double)
    state = DecodingState(layer, 1, x.device, x.dtype)
    kept = state.parts[layer]
    kept.states.normal_()
    positions = torch.tensor([[5, 6, 7, 8, 0, 1, 2, 3, 4]])
    layer.prefill(x, context(positions, document_mask(CAUSAL), True, state=state)(layer), kept)
    fresh = DecodingState(layer, 1, x.device, x.dtype).parts[layer]
    layer.prefill(x[:, 4:], context(ragged(5), state=state)(layer), fresh)
    torch.testing.assert_close(kept.states, fresh.states)


@pytest.mark.parametrize("name", ["s4", "s4d", "s4d bilinear inv"])
def test_gradients_are_those_of_the_recurrence(name: str) -> None:
    layer = make_layer(name)
    x = torch.randn(2, 9, H, dtype=torch.double, requires_grad=True)
    leaves = [x, *layer.parameters()]
    found = layer(x, context(ragged(9, 9))(layer))
    system, state, ys = layer.system(torch.double), torch.zeros(2, H, layer.n, dtype=torch.double), []
    for u in x.unbind(1):
        state, y = system.step(state, u)
        ys.append(layer.project(y + layer.skip * u))
    wanted = torch.stack(ys, 1)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


# ---- models --------------------------------------------------------------------------------------------------------------

models = pytest.mark.parametrize("name", ["s4-tiny", "s4d-tiny"])


def tiny_model(name: str, **more: Any) -> Any:
    sizes = {"n_decoder_layers": 2, "d_model": 8, "d_ff": 16, "target_vocab": 13, "max_len": 64, "dropout": 0.0}
    torch.manual_seed(2)
    return make_model(preset(name, **sizes, **more))


@models
@torch.no_grad()
def test_a_model_steps_as_it_reads(name: str) -> None:
    model = tiny_model(name).double().eval()
    ids = torch.randint(13, (3, 12))
    whole = model(ids)
    prompts = ids[:, :5].clone()
    prompts[1, 3:] = -1
    logits, state = model.begin(prompts)
    at = [5, 3, 5]
    for _ in range(4):
        for row in range(3):
            torch.testing.assert_close(logits[row], whole[row, at[row] - 1], atol=1e-10, rtol=1e-9)
        logits = model.step(ids[torch.arange(3), at], state)
        at = [i + 1 for i in at]


@models
def test_no_weight_decay_on_the_dynamics(name: str) -> None:
    model = tiny_model(name)
    decayed = {id(p) for p in make_optimizer(model, TrainConfig(weight_decay=0.1)).param_groups[0]["params"]}
    names = {path.rpartition(".")[2] for path, p in model.named_parameters() if "self" in path and id(p) in decayed}
    assert names == {"outputs", "weight"}


@models
def test_bf16_weights_and_autocast_compute_states_in_fp32(name: str) -> None:
    model = tiny_model(name)
    ids = torch.randint(13, (2, 9))
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids)
    torch.testing.assert_close(found.float(), exact, atol=0.1, rtol=0.1)
    low = tiny_model(name).bfloat16()
    assert low(ids).isfinite().all()


@pytest.mark.parametrize("kind", ["s4", "s4d"])
def test_what_makes_no_sense_is_refused(kind: str) -> None:
    with pytest.raises(RegardError, match="reads forwards only"):
        make_part("mixer", kind, ModelConfig(d_model=4), Place("encoder"))
    for wrong, why in (({"state": 3}, "even"), ({"dt_min": 0.5, "dt_max": 0.1}, "above")):
        settings = {"s4": S4, "s4d": S4D}[kind].Settings(**wrong)
        with pytest.raises(RegardError, match=why):
            make_part("mixer", kind, ModelConfig(d_model=4, parts={kind: settings}), Place("decoder", causal=True))
    with pytest.raises(RegardError, match="prefix"):
        context(ragged(4), prefix(2))(make_layer(kind))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@models
@torch.no_grad()
def test_the_gpu_computes_the_same_and_steps_in_graphs(name: str) -> None:
    """Kernels and steps on a GPU against fp64 on the CPU, where training lets other products run in TF32."""
    model = tiny_model(name).eval()
    ids = torch.randint(13, (3, 60))
    wanted = tiny_model(name).double().eval()(ids)
    torch.set_float32_matmul_precision("highest")
    model = model.cuda()
    torch.testing.assert_close(model(ids.cuda()).double().cpu(), wanted, atol=1e-4, rtol=1e-4)
    logits, state = model.begin(ids[:, :30].cuda())
    for t in range(30, 60):
        torch.testing.assert_close(logits.double().cpu(), wanted[:, t - 1], atol=1e-4, rtol=1e-4)
        logits = model.step(ids[:, t].cuda(), state)


def test_states_that_vanish_within_a_step_do_not_overflow() -> None:
    a = torch.complex(torch.tensor([-0.5, -300.0, -1e4, -1e-6]), torch.tensor([1e-5, 3.0, 0.0, 2.0])).to(
        torch.complex128
    )
    dt = torch.tensor([[0.001], [1.0]], dtype=torch.float64)
    log, inputs = discretize_zoh(a.to(torch.complex64), dt.float())
    assert torch.isfinite(torch.view_as_real(inputs)).all()
    exact = torch.from_numpy(np.expm1((a * dt).numpy())) / a
    torch.testing.assert_close(inputs.to(torch.complex128), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(log.to(torch.complex128), a * dt, rtol=1e-6, atol=0)
