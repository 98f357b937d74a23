"""The nine stages against loops in float64 NumPy, against each other, against torch, and the page that explains them."""

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configured import model_config
from fused_rows import kv_rows, qkv_rows
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, FULL, Mask, dense_mask, document_mask, prefix, with_window
from regard.layers.attention_kernels import make_plan
from regard.layers.attention_stages import (
    AdditiveAttention,
    CausalHead,
    KeyValueHead,
    MultiHead,
    MultiHeadCross,
    SelfHead,
    causal_mask,
    dot_product,
    many_queries,
    scaled_dot_product,
)
from regard.layers.context import Context
from regard.layers.kernel_selection import Situation, choose
from regard.layers.mixers.attention import Prepared
from regard.layers.positions.scheme import make_positions

B, T, S, C, H = 2, 4, 5, 12, 3
ONE_QUERY = {"dot": dot_product, "scaled": scaled_dot_product}


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Float64 throughout, and the same numbers every time."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mask_of(kind: str, *shape: int) -> Tensor | None:
    """(*shape): nothing hidden; the end of the second row hidden; holes, and a query that may look nowhere."""
    if kind == "none":
        return None
    if kind == "padding":
        mask = torch.ones(shape, dtype=torch.bool)
        mask[1, ..., 3:] = False
        return mask
    mask = torch.from_numpy(np.random.default_rng(0).random(shape) < 0.5)
    mask[0, ..., 0] = True
    mask[(1, 0) if len(shape) == 3 else 1] = False
    return mask


def attend(scores: np.ndarray, values: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """One query by hand: scores (S,), values (S, D). Zeros where nothing may be seen."""
    weights, context = np.zeros(len(scores)), np.zeros(values.shape[1])
    seen = [i for i in range(len(scores)) if mask is None or mask[i]]
    total = sum(math.exp(scores[i]) for i in seen)
    for i in seen:
        weights[i] = math.exp(scores[i]) / total
        context = context + weights[i] * values[i]
    return context, weights


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Scaled dot products of every query (B, T, D), one after the other."""
    context, weights = np.zeros((*q.shape[:2], v.shape[-1])), np.zeros((*q.shape[:2], k.shape[1]))
    for b, t in np.ndindex(*q.shape[:2]):
        scores = np.array([sum(q[b, t] * key) / math.sqrt(len(key)) for key in k[b]])
        hidden = None if mask is None else np.broadcast_to(mask.numpy(), weights.shape)[b, t]
        context[b, t], weights[b, t] = attend(scores, v[b], hidden)
    return context, weights


def assert_look(result: tuple[Tensor, Tensor], expected: Sequence[Any]) -> None:
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours.detach(), torch.as_tensor(theirs).detach(), atol=1e-12, rtol=1e-9)


def projected(x: Tensor, linear: nn.Linear) -> np.ndarray:
    bias = 0.0 if linear.bias is None else linear.bias.detach().numpy()
    return x.numpy() @ linear.weight.detach().numpy().T + bias


# ---- each stage against the formula -----------------------------------------------------------------------------------

MASKS = pytest.mark.parametrize("kind", ["none", "padding", "scattered"])


def test_a_dot_product_worked_by_hand() -> None:
    """Scores 0, ln 2 and ln 5, so weights 1/8, 2/8 and 5/8; then without the last, 1/3 and 2/3."""
    q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[[0.0, 7.0], [math.log(2), 1.0], [math.log(5), -3.0]]])
    v = torch.tensor([[[8.0], [16.0], [24.0]]])
    assert_look(dot_product(q, k, v), ([[20.0]], [[0.125, 0.25, 0.625]]))
    hidden = torch.tensor([True, True, False])
    assert_look(dot_product(q, k, v, hidden), ([[40 / 3]], [[1 / 3, 2 / 3, 0.0]]))
    assert_look(scaled_dot_product(q * math.sqrt(2), k, v), ([[20.0]], [[0.125, 0.25, 0.625]]))


@MASKS
def test_the_additive_score_is_a_small_network_for_each_key(kind: str) -> None:
    stage = AdditiveAttention(d_query=3, d_key=4, d_hidden=6)
    q, k, v = torch.randn(B, 3), torch.randn(B, S, 4), torch.randn(B, S, 7)
    mask = mask_of(kind, B, S)
    w, u, last = (weight.detach().numpy() for weight in (stage.W.weight, stage.U.weight, stage.v.weight))
    looks = []
    for b in range(B):
        scores = np.array([last[0] @ np.tanh(w @ q[b].numpy() + u @ key) for key in k[b].numpy()])
        looks.append(attend(scores, v[b].numpy(), None if mask is None else mask[b].numpy()))
    assert_look(stage(q, k, v, mask), tuple(np.array(part) for part in zip(*looks, strict=True)))


@MASKS
@pytest.mark.parametrize("name", ONE_QUERY)
def test_one_query_is_answered_as_the_formula_says(name: str, kind: str) -> None:
    q, k, v = torch.randn(B, C), torch.randn(B, S, C), torch.randn(B, S, 7)
    mask = mask_of(kind, B, S)
    scale = math.sqrt(C) if name == "dot" else 1.0  # the oracle divides
    context, weights = by_hand(
        scale * q[:, None].numpy(), k.numpy(), v.numpy(), None if mask is None else mask[:, None]
    )
    assert_look(ONE_QUERY[name](q, k, v, mask), (context[:, 0], weights[:, 0]))


@MASKS
def test_many_queries_are_answered_as_the_formula_says(kind: str) -> None:
    q, k, v = torch.randn(B, T, C), torch.randn(B, S, C), torch.randn(B, S, 7)
    mask = mask_of(kind, B, T, S)
    assert_look(many_queries(q, k, v, mask), by_hand(q.numpy(), k.numpy(), v.numpy(), mask))


@MASKS
def test_keys_and_values_are_projected_apart(kind: str) -> None:
    stage, q, x = KeyValueHead(C, 6), torch.randn(B, T, 6), torch.randn(B, S, C)
    mask = mask_of(kind, B, T, S)
    assert_look(stage(q, x, x, mask), by_hand(q.numpy(), projected(x, stage.w_k), projected(x, stage.w_v), mask))


@MASKS
@pytest.mark.parametrize("cls", [SelfHead, CausalHead])
def test_self_attention_projects_queries_too_and_masked_never_looks_ahead(cls: type[SelfHead], kind: str) -> None:
    stage, x = cls(C, 6), torch.randn(B, S, C)
    mask = mask_of(kind, B, S, S)
    seen = torch.ones(S, S, dtype=torch.bool) if mask is None else mask
    if cls is CausalHead:
        seen = seen & torch.tensor([[j <= i for j in range(S)] for i in range(S)])
    q, k, v = (projected(x, linear) for linear in (stage.w_q, stage.w_k, stage.w_v))
    assert_look(stage(x, x, x, mask), by_hand(q, k, v, seen))


def heads_by_hand(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Tensor | None, out: nn.Linear, d: int
) -> tuple[np.ndarray, np.ndarray]:
    """Heads of width d of projected q, k, v, with as many heads of queries for each of keys as there are; then W_O."""
    n, shared = q.shape[-1] // d, q.shape[-1] // k.shape[-1]
    parts = [[x[..., i * d : (i + 1) * d] for i in range(x.shape[-1] // d)] for x in (q, k, v)]
    looks = [by_hand(parts[0][h], parts[1][h // shared], parts[2][h // shared], mask) for h in range(n)]
    side_by_side = torch.from_numpy(np.concatenate([context for context, _ in looks], -1))
    return projected(side_by_side, out), np.stack([weights for _, weights in looks], 1)


@MASKS
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_multi_head_is_heads_side_by_side_grouped_or_not(n_kv_heads: int, kind: str) -> None:
    stage, x = MultiHead(C, 4, n_kv_heads), torch.randn(B, S, C)
    mask = mask_of(kind, B, S, S)
    edges = [C, C + 3 * n_kv_heads]
    q, k, v = np.split(projected(x, stage.layer.qkv)[..., qkv_rows(4, n_kv_heads, 3)], edges, axis=-1)
    assert_look(stage(x, x, x, mask), heads_by_hand(q, k, v, mask, stage.layer.out, 3))


@MASKS
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_cross_attention_asks_other_tokens(n_kv_heads: int, kind: str) -> None:
    stage, y, x = MultiHeadCross(C, 4, n_kv_heads), torch.randn(B, T, C), torch.randn(B, S, C)
    mask = mask_of(kind, B, T, S)
    k, v = np.split(projected(x, stage.layer.kv)[..., kv_rows(n_kv_heads, 3)], 2, axis=-1)
    assert_look(stage(y, x, x, mask), heads_by_hand(projected(y, stage.layer.q), k, v, mask, stage.layer.out, 3))


# ---- what all of them have in common ----------------------------------------------------------------------------------


def stages() -> dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], tuple[int, ...], bool]]:
    """Name -> stage, the shape of its query, and whether query and keys must be the same tokens."""
    return {
        "additive": (AdditiveAttention(C, C, 6), (B, C), False),
        "dot product": (dot_product, (B, C), False),
        "scaled": (scaled_dot_product, (B, C), False),
        "many queries": (many_queries, (B, T, C), False),
        "keys and values": (KeyValueHead(C, C), (B, T, C), False),
        "self": (SelfHead(C, 4), (B, S, C), True),
        "masked": (CausalHead(C, 4), (B, S, C), True),
        "multi-head": (MultiHead(C, H), (B, S, C), True),
        "cross": (MultiHeadCross(C, H), (B, T, C), False),
    }


@pytest.mark.parametrize("name", list(stages()))
@pytest.mark.parametrize("kind", ["none", "scattered"])
def test_gradients_reach_every_input_and_weight_and_are_those_of_finite_differences(name: str, kind: str) -> None:
    stage, shape, same = stages()[name]
    x, q = torch.randn(B, S, C, requires_grad=True), torch.randn(shape, requires_grad=True)
    mask = mask_of(kind, *shape[:-1], S)
    weights = list(stage.parameters()) if isinstance(stage, nn.Module) else []
    inputs = [x, *([] if same else [q]), *weights]
    assert torch.autograd.gradcheck(lambda *_: stage(x if same else q, x, x, mask), inputs, fast_mode=True)
    context, _ = stage(x if same else q, x, x, mask)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
        gradients = torch.autograd.grad(context.square().sum(), inputs)
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


@given(data=st.data())
def test_a_masked_key_might_as_well_not_be_there(data: st.DataObject) -> None:
    n, keep = data.draw(st.integers(1, 4)), data.draw(st.lists(st.booleans(), min_size=2, max_size=6).filter(any))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, x = torch.randn(n, 3, generator=generator), torch.randn(len(keep), 3, generator=generator)
    mask = torch.tensor(keep)
    context, weights = many_queries(q, x, x, mask)
    assert_look((context, weights[:, mask]), many_queries(q, x[mask], x[mask]))
    assert not weights[:, ~mask].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(n))


@pytest.mark.parametrize("name", list(stages()))
def test_one_mask_of_keys_serves_every_row_query_and_head(name: str) -> None:
    stage, shape, same = stages()[name]
    x = torch.randn(B, S, C)
    q, mask = x if same else torch.randn(shape), torch.tensor([True, False, True, True, False])
    assert_look(stage(q, x, x, mask), stage(q, x, x, mask.expand(*shape[:-1], S)))


def test_scores_far_from_zero_overflow_nowhere() -> None:
    q, x = torch.tensor([[1e4, 0.0]]), torch.tensor([[[1e4, 0.0], [-1e4, 5.0], [1e4, 0.0]]])
    assert_look(dot_product(q, x, x), ([[1e4, 0.0]], [[0.5, 0.0, 0.5]]))


# ---- each stage in the one after it -----------------------------------------------------------------------------------


def identity(*layers: nn.Linear) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(*layer.weight.shape))


def test_an_additive_score_without_its_last_layer_is_the_mean() -> None:
    stage, q, x = AdditiveAttention(C, C, 6), torch.randn(B, C), torch.randn(B, S, C)
    nn.init.zeros_(stage.v.weight)
    assert_look(stage(q, x, x), (x.mean(1), torch.full((B, S), 1 / S)))


def test_an_additive_decoder_may_project_its_keys_once() -> None:
    stage, q, x = AdditiveAttention(C, C, 6), torch.randn(B, C), torch.randn(B, S, C)
    torch.testing.assert_close(stage.scores(q, stage.U(x)).softmax(-1), stage(q, x, x)[1])


def test_scaled_is_the_dot_product_of_a_shorter_query() -> None:
    q, x = torch.randn(B, 16), torch.randn(B, S, 16)
    assert_look(scaled_dot_product(4 * q, x, x), dot_product(q, x, x))


def test_many_queries_are_that_many_single_ones() -> None:
    q, x, mask = torch.randn(B, T, C), torch.randn(B, S, C), mask_of("scattered", B, T, S)
    assert mask is not None
    singles = [scaled_dot_product(q[:, t], x, x, mask[:, t]) for t in range(T)]
    assert_look(many_queries(q, x, x, mask), tuple(torch.stack(part, 1) for part in zip(*singles, strict=True)))


def test_with_identities_for_projections_a_head_is_many_queries() -> None:
    stage, q, x = KeyValueHead(C, C), torch.randn(B, T, C), torch.randn(B, S, C)
    identity(stage.w_k, stage.w_v)
    assert_look(stage(q, x, x), many_queries(q, x, x))


def test_self_attention_with_an_identity_for_queries_is_the_head_before_it() -> None:
    stage, before, x = SelfHead(C, C), KeyValueHead(C, C), torch.randn(B, S, C)
    identity(stage.w_q)
    before.load_state_dict({name: weight for name, weight in stage.state_dict().items() if name != "w_q.weight"})
    assert_look(stage(x, x, x), before(x, x, x))


def test_masked_attention_is_self_attention_of_each_beginning() -> None:
    stage, before, x = CausalHead(C, 4), SelfHead(C, 4), torch.randn(B, S, C)
    before.load_state_dict(stage.state_dict())
    context, weights = stage(x, x, x)
    for t in range(1, S + 1):
        shorter = before(x[:, :t], x[:, :t], x[:, :t])
        assert_look((context[:, t - 1], weights[:, t - 1, :t]), (shorter[0][:, -1], shorter[1][:, -1]))


def test_one_head_with_an_identity_for_its_output_is_masked_attention() -> None:
    stage, before, x = MultiHead(C, 1), CausalHead(C, C), torch.randn(B, S, C)
    with torch.no_grad():
        stage.layer.qkv.weight.copy_(torch.cat([before.w_q.weight, before.w_k.weight, before.w_v.weight]))
        stage.layer.qkv.bias.zero_()
        stage.layer.out.bias.zero_()
    identity(stage.layer.out)
    context, weights = stage(x, x, x, causal_mask(S))
    assert_look((context, weights[:, 0]), before(x, x, x))


def test_cross_attention_to_oneself_is_self_attention() -> None:
    stage, before, x = MultiHeadCross(C, H, 1), MultiHead(C, H, 1), torch.randn(B, S, C)
    weight, bias = before.layer.qkv.weight, before.layer.qkv.bias
    stage.layer.load_state_dict(
        {
            "q.weight": weight[:C],
            "q.bias": bias[:C],
            "kv.weight": weight[C:],
            "kv.bias": bias[C:],
        }  # of one head of keys
        | {f"out.{name}": value for name, value in before.layer.out.state_dict().items()}
    )
    assert_look(stage(x, x, x, causal_mask(S)), before(x, x, x, causal_mask(S)))


# ---- the last ones are the Transformer's ------------------------------------------------------------------------------


def peer(weight: Tensor, bias: Tensor, out: nn.Linear) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(C, H, batch_first=True)
    theirs.load_state_dict(
        {"in_proj_weight": weight, "in_proj_bias": bias, "out_proj.weight": out.weight, "out_proj.bias": out.bias}
    )
    return theirs


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_is_torchs_contexts_and_weights(causal: bool) -> None:
    stage, x = MultiHead(C, H), torch.randn(B, S, C)
    nn.init.normal_(stage.layer.qkv.bias)
    theirs = peer(*(p[qkv_rows(H, H, C // H)] for p in stage.layer.qkv.parameters()), stage.layer.out)
    hidden = torch.ones(S, S).triu(1).bool() if causal else None  # True = hidden, over there
    expected = theirs(x, x, x, attn_mask=hidden, average_attn_weights=False)
    assert_look(stage(x, x, x, None if hidden is None else ~hidden), expected)


def test_cross_attention_is_torchs_contexts_and_weights() -> None:
    stage, y, x = MultiHeadCross(C, H), torch.randn(B, T, C), torch.randn(B, S, C)
    q, kv = stage.layer.q, stage.layer.kv
    rows = kv_rows(H, C // H)
    weight, bias = torch.cat([q.weight, kv.weight[rows]]), torch.cat([q.bias, kv.bias[rows]])
    theirs = peer(weight, bias, stage.layer.out)
    padding = torch.tensor([[False] * S, [False] * 3 + [True] * 2])
    expected = theirs(y, x, x, key_padding_mask=padding, average_attn_weights=False)
    assert_look(stage(y, x, x, ~padding[:, None]), expected)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, with_window(CAUSAL, 2), prefix(3)], ids=str)
def test_the_fused_kernel_of_the_same_layer_gives_the_same_contexts(mask: Mask) -> None:
    self_stage, cross, x, y = MultiHead(C, H), MultiHeadCross(C, H), torch.randn(B, S, C), torch.randn(B, T, C)
    places, others = torch.arange(S).expand(B, S), torch.arange(T).expand(B, T)
    ctx = Context(places, Prepared(make_plan(mask, places, places)))
    seen = dense_mask(mask, places, places)[:, 0]
    torch.testing.assert_close(self_stage(x, x, x, seen)[0], self_stage.layer(x, ctx))
    ctx = Context(others, memory=x, memory_plan=make_plan(mask, others, places))
    torch.testing.assert_close(cross(y, x, x, dense_mask(mask, others, places)[:, 0])[0], cross.layer(y, ctx))


@pytest.mark.parametrize("sizes", [(12, 5, 0), (12, 4, 3), (12, 0, 0), (12, 4, 8), (-12, 4, 4)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int, int]) -> None:
    for stage in (MultiHead, MultiHeadCross):
        with pytest.raises(RegardError, match="multiple of the heads"):
            stage(*sizes)


def test_the_transformers_layers_refuse_inputs_they_would_not_look_at() -> None:
    x, y = torch.randn(B, S, C), torch.randn(B, S, C)
    for given_ in ((x, y, y), (x, x, y), (x, y, x)):
        with pytest.raises(RegardError, match="same tensor"):
            MultiHead(C, H)(*given_)
    with pytest.raises(RegardError, match="same tensor"):
        MultiHeadCross(C, H)(x, x, y)


# ---- docs/lectures/attention.md ----------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "lectures" / "attention.md"


def test_the_examples_of_the_page_run_and_say_what_it_says() -> None:
    torch.set_default_dtype(torch.float32)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 12
    names: dict[str, Any] = {}
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, names)
        for expression, value in re.findall(r"^(\S.*?)  # -> (.*)$", block, re.MULTILINE):
            assert repr(eval(expression, names)) == value, expression
        assert printed.getvalue() in PAGE.read_text(encoding="utf-8")


SETTINGS = model_config(d_model=C, n_heads=H, d_head=4)


def situation(positions: str, mask: Mask, device: str = "cuda", **changed: Any) -> Situation:
    fields = {"queries": 1024, "self_attention": True, "d_head": 64} | changed
    return Situation(device, mask=mask, scheme=make_positions(SETTINGS, "decoder", positions), **fields)


BIASES = ["t5", "alibi", "kerple-log", "kerple-power"]
FREE = ["none", "linear", "sinusoidal", "learned", "rope", "yarn"]
WINDOW = with_window(CAUSAL, 8)
ROWS: dict[int, list[Situation]] = {
    1: [situation(name, mask) for name in ("shaw", "cope") for mask in (CAUSAL, WINDOW)],
    2: [
        *(situation(name, mask, queries=128, d_head=d) for name in FREE for mask in (FULL, CAUSAL) for d in (16, 128)),
        situation("none", FULL, self_attention=False, queries=1, keys=128),
        situation("none", CAUSAL, queries=9, dropout=0.1),
    ],
    3: [
        *(situation(name, CAUSAL, queries=129) for name in FREE),
        situation("rope", CAUSAL, queries=100, d_head=80),
        situation("rope", CAUSAL, "cpu", queries=100),
    ],
    4: [
        *(situation(name, FULL) for name in FREE),
        situation("none", FULL, self_attention=False, queries=1, keys=129),
        situation("rope", CAUSAL, self_attention=False, queries=1, keys=100),
    ],
    5: [situation(name, WINDOW, "cpu") for name in [*FREE, *BIASES, "fire"]],
    6: [
        situation(name, WINDOW, self_attention=own, queries=127)
        for name in [*FREE, *BIASES, "fire"]
        for own in (True, False)
    ],
    7: [situation(name, WINDOW, self_attention=False) for name in [*FREE, *BIASES, "fire"]],
    8: [situation(name, WINDOW, dropout=0.1) for name in [*FREE, *BIASES, "fire"]],
    9: [situation(name, WINDOW, d_head=8) for name in [*FREE, *BIASES, "fire"]],
    10: [
        situation(name, mask)
        for name in FREE
        for mask in (WINDOW, prefix(3), document_mask(CAUSAL), document_mask(FULL))
    ],
    11: [situation(name, mask, d_head=d) for name in BIASES for mask in (FULL, WINDOW) for d in (16, 32, 64, 128)],
    12: [situation(name, CAUSAL, d_head=80) for name in BIASES],
    13: [situation("fire", mask) for mask in (CAUSAL, WINDOW)],
    14: [
        situation("fire", FULL),
        situation("fire", prefix(3)),
        situation("fire", document_mask(CAUSAL)),
        situation("fire", CAUSAL, d_head=80),
    ],
}


def test_the_pages_table_of_kernels_is_what_is_chosen() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| `(\w+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(ROWS)
    for number, kernel, remark in rows:
        choices = [choose(s) for s in ROWS[int(number)]]
        assert {choice.kernel for choice in choices} == {kernel}, number
        assert {choice.fast for choice in choices} == {"(slow)" not in remark}, number
