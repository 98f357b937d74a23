"""Counting on the meta device: unknown parts, equal blocks, custom operators, and modules that it must not import."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import regard.kernels.linear_activation
import regard.kernels.residual_norm  # noqa: F401 (registers its operators)
from regard.layers.recurrent import counted_as
from regard.models.analysis.counting import FORMULAS, RARE, ForwardCount, count, meta_copy, meta_model, structure_key
from regard.models.architectures import make_model, preset

B, T, C = 2, 5, 8


class Switched(nn.Module):
    """A mixture of experts that the package does not know: every token goes through one of `experts` matrices."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(C, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, C, 4 * C))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        which = self.router(rows).argmax(-1)
        rows = rows * (which + 1)[:, None]
        return torch.ops.aten._grouped_mm(
            rows.bfloat16(), self.up.bfloat16(), torch.arange(len(self.up), dtype=torch.int32, device=x.device)
        )


class Tower(nn.Module):
    """Blocks of two kinds."""

    def __init__(self, n: int) -> None:
        super().__init__()
        kinds: list[nn.Module] = [nn.Linear(C, C), nn.Sequential(nn.Linear(C, 3 * C), nn.Tanh(), nn.Linear(3 * C, C))]
        self.layers = nn.ModuleList(copy.deepcopy(kinds[i % 2]) for i in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def on_meta(model: nn.Module, *shape: int) -> ForwardCount:
    return count(meta_copy(model), torch.empty(*shape, device="meta"))


# ---- products ----------------------------------------------------------------------------------------------------------


def test_a_mixture_of_experts_costs_a_token_one_of_them() -> None:
    model = Switched(4)
    ran = on_meta(model, B, T, C)
    assert ran.flops().total() == 2 * B * T * C * (4 + 4 * C)
    assert set(ran.weights().values()) == {
        2 * B * T * C * 4,
        2 * B * T * C * 4 * C,
    }  # also where a weight is cast first


def test_blocks_that_are_alike_run_once_and_all_have_their_lines() -> None:
    model = meta_copy(Tower(6))
    dispatched: list[str] = []

    class Watched(ForwardCount):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            dispatched.append(func._schema.name)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with torch.no_grad(), Watched(model) as counting:
        model(torch.empty(B, T, C, device="meta"))
    assert len([name for name in dispatched if name.endswith("mm")]) == 1 + 2  # one of each kind
    flops = counting.flops()
    assert [flops[f"layers.{i}"] for i in (0, 2, 4)] == [2 * B * T * C * C] * 3
    assert [flops[f"layers.{i}.2"] for i in (1, 3, 5)] == [2 * B * T * 3 * C * C] * 3
    assert flops.total() == B * T * 3 * (2 * C * C + 2 * 2 * C * 3 * C)
    assert counting.shapes()["layers.5.0"] == (B, T, 3 * C)
    assert not any("forward" in vars(module) for module in model.modules())


def test_blocks_of_other_sizes_are_not_alike() -> None:
    pairs = [
        (nn.Linear(3, 4), nn.Linear(3, 5)),
        (nn.Linear(3, 4), nn.Linear(3, 4, bias=False)),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Sequential(nn.Linear(3, 3), nn.GELU())),
    ]
    assert all(structure_key(a) != structure_key(b) for a, b in pairs)
    assert structure_key(nn.Linear(3, 4)) == structure_key(nn.Linear(3, 4))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(C, C))

    def forward(self, x: Tensor) -> Tensor:
        with counted_as(10):
            return F.linear(x, self.weight)


def test_a_turn_that_stands_for_ten_counts_as_ten() -> None:
    assert on_meta(Loop(), B, C).flops().total() == 10 * 2 * B * C * C


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y[0],
        lambda x, y: (x > 0).long() + 1,
        lambda x, y: x.transpose(0, 1) * 2.0,
        lambda x, y: x.softmax(-1).mean(1, keepdim=True),
        lambda x, y: (x @ y.mT).amax((0, 2)),
        lambda x, y: torch.cat([x, y], 1).flip(0).cumsum(1),
        lambda x, y: torch.stack([x, y], -1),
        lambda x, y: F.layer_norm(x, x.shape[-1:]),
        lambda x, y: x.argmax(-1),
        lambda x, y: x.gather(1, torch.zeros(2, 1, 4, dtype=torch.long, device=x.device)),
        lambda x, y: x[torch.zeros(3, 1, dtype=torch.long, device=x.device), torch.arange(5, device=x.device)],
        lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None], is_causal=True),
        lambda x, y: torch.where(x > 0, x, 1.0).masked_fill(y > 0, 2),
        lambda x, y: F.embedding((x[..., 0] > 0).long(), y[0]),
        lambda x, y: torch.arange(1, 9, 3, device=x.device) / 2,
        lambda x, y: F.glu(x, -1).tril(),
        lambda x, y: x.any(1),
        lambda x, y: x.transpose(0, 1).flatten(1),
    ],
)
def test_shapes_types_and_order_in_memory_are_those_of_a_cpu(operation: Any) -> None:
    class Run(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return operation(x, torch.ones(2, 5, 4, device=x.device))

    model = Run()
    outs = []
    expected = model(torch.ones(2, 5, 4))
    with ForwardCount(model):
        outs.append(model(torch.empty(2, 5, 4, device="meta")))
    (found,) = outs
    assert (found.shape, found.dtype, found.is_meta) == (expected.shape, expected.dtype, True)
    assert found.is_contiguous() == expected.is_contiguous()


# ---- operators ---------------------------------------------------------------------------------------------------------


def test_every_operator_of_the_package_has_a_fake_form_and_a_formula() -> None:
    pytest.importorskip("triton")
    import regard.kernels.short_attention  # noqa: F401

    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("regard::")}
    assert names >= {"regard::activated", "regard::add_norm", "regard::short_attention"}
    assert names <= set(FORMULAS), "a formula in models/analysis/counting.py"
    for name in names:
        entry = torch._library.simple_registry.singleton.find(name)
        assert entry.fake_impl.kernel is not None, f"{name} has no fake form"


def test_every_product_that_torch_knows_is_known_here() -> None:
    theirs = {str(packet._qualified_op_name) for packet in flop_registry if hasattr(packet, "_qualified_op_name")}
    forward = {name for name in theirs if name.startswith("aten::") and "backward" not in name}
    assert {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::convolution"} <= forward
    assert [name for name in forward if name not in FORMULAS and not name.startswith(RARE)] == []


def test_the_formulas_of_operators_are_those_of_the_products_inside() -> None:
    q, k, v = (torch.empty(2, h, n, 16, device="meta") for h, n in ((4, 7), (2, 9), (2, 9)))
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert FORMULAS["regard::short_attention"](q, k, v, None, None, False, None, 0.0) == counter.get_total_flops()
    x, w = torch.empty(6, 5, device="meta"), torch.empty(8, 5, device="meta")
    with FlopCounterMode(display=False) as counter:
        F.linear(x, w)
    assert FORMULAS["regard::activated"](x, w, None, "gelu", False) == counter.get_total_flops()
    assert FORMULAS["aten::_addmm_activation"](w[:, 0], x, w.T) == counter.get_total_flops()


# ---- speed -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt3", "llama-7b", "transformer-base", "awd-lstm", "rnnsearch"])
def test_counting_does_not_load_torchs_compiler(name: str) -> None:
    """It takes about as long to import as torch itself, twice as long as counting GPT-3."""
    script = (
        "import sys; from regard.models.analysis.cost import report_costs; "
        "from regard.inference.model_spec import config_of; "
        f"report_costs(config_of('{name}', {{}})[0], 1, 64, None); "
        "print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", ["gpt-tiny", "transformer-tiny", "vit-tiny", "rnnsearch-small"])
def test_a_copy_without_numbers_is_the_same_model(name: str) -> None:
    model = make_model(preset(name, source_vocab=40, target_vocab=40, n_classes=3))
    ours = {path: (tuple(p.shape), p.dtype) for path, p in meta_copy(model).named_parameters()}
    assert ours == {path: (tuple(p.shape), p.dtype) for path, p in model.named_parameters()}
    assert ours == {path: (tuple(p.shape), p.dtype) for path, p in meta_model(model.config).named_parameters()}  # type: ignore[arg-type]
    assert not any(p.is_meta for p in model.parameters())
