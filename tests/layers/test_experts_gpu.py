"""Mixtures of experts on a GPU: grouped products, compiled blocks, CUDA graphs, and no waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from configured import model_config
from torch import Tensor, nn

from regard.config import DecodeConfig, TrainConfig
from regard.data.batches import Batch
from regard.decode.constraints import uses_cuda_graphs
from regard.decode.generation import generate
from regard.layers.context import Context
from regard.layers.experts import expert_loads
from regard.layers.part import Place, make_part
from regard.models.architectures import make_model
from regard.training.objective import make_token_objective
from regard.training.training_step import TrainingStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FORMS = ("noisy-experts", "switch", "mixtral")
every = pytest.mark.parametrize("name", FORMS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
QUIET = {"noisy-experts": {}, "switch": {"switch.jitter": 0.0}, "mixtral": {}}


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layer(name: str, width: int = 32, inner: int = 64) -> Any:
    torch.manual_seed(0)
    config = model_config(d_model=width, d_ff=inner, activation="silu", feedforward=name, **QUIET[name])
    part = make_part("feedforward", name, config, Place("encoder"))
    for parameter in part.parameters():
        nn.init.normal_(parameter, std=0.3)
    if name == "noisy-experts":
        part.noise.data.fill_(-100.0)  # no noise for inputs above 0
    return part


def results(part: Any, x: Tensor, ctx: Context) -> list[Tensor]:
    y, loss = part(x, ctx)
    weights = [p for n, p in part.named_parameters() if n != "noise"]
    return [y, loss, *torch.autograd.grad(y.float().square().sum() + loss, [x, *weights])]


@every
@DTYPES
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sizes", [(32, 64), (20, 36)], ids=["aligned", "odd"])
def test_outputs_and_gradients_are_those_of_the_cpu(
    name: str, dtype: torch.dtype, compiled: bool, sizes: tuple[int, int]
) -> None:
    """Against float64 on the CPU, by norms: bf16 rounds every factor to 2^-9, through some four products."""
    part = layer(name, *sizes).double()
    x = torch.rand(3, 50, sizes[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    for p in part.parameters():
        p.data.copy_(p.to(dtype))
    lengths, t = torch.tensor([50, 31, 1]), torch.arange(50)
    positions = torch.where(t < lengths[:, None], t, -1)
    wanted = results(part, x.requires_grad_(), Context(positions))
    mine: Any = part.to("cuda", dtype)
    x = x.detach().to("cuda", dtype).requires_grad_()
    ctx = Context(positions.cuda())
    torch._dynamo.reset()
    run = torch.compile(mine, dynamic=True) if compiled else mine
    torch.set_float32_matmul_precision("highest")
    run(x, ctx)  # compiles
    with no_waiting():
        y, loss = run(x, ctx)
    with no_waiting():
        (y.float().square().sum() + loss).backward()
    weights = [p.grad for n, p in mine.named_parameters() if n != "noise"]
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for found, expected in zip([y, loss, x.grad, *weights], wanted, strict=True):
        assert (found.double().cpu() - expected).norm() <= tolerance * expected.norm()


def gpt(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"preset": "gpt-tiny", "n_decoder_layers": 2, "target_vocab": 50, "max_len": 64, "d_ff": 128}
    config = model_config(**sizes, feedforward=f"dense,{name}", activation="silu", dropout=0.0, **settings)
    return make_model(config)


@every
def test_a_captured_training_step_learns_and_counts_loads(name: str) -> None:
    model, device = gpt(name), torch.device("cuda")
    config = TrainConfig(label_smoothing=0.0)
    step = TrainingStep(make_token_objective(model.to(device).train(), config), config, device, torch.bfloat16)
    words = torch.randint(5, 50, (2, 8, 32), generator=torch.Generator().manual_seed(0))
    batch = Batch(tuple(words), 8 * 32).pin()
    losses = []
    for _ in range(5):
        for _ in range(8):
            step([batch], 3e-3)
        losses.append((step.sums[0] / step.sums[2]).item())
        step.sums.zero_()
    with no_waiting():
        step([batch], 3e-3)
    assert step.is_graphed
    assert losses[-1] < 0.8 * losses[0]
    (load,) = expert_loads(model)
    assert load.sum().item() == 41 * 8 * 32 * (1 if name == "switch" else 2)


@every
@pytest.mark.parametrize("rows", [1, 6])
def test_cuda_graph_decoding_writes_what_steps_without_one_write(name: str, rows: int) -> None:
    model: Any = gpt(name).cuda().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    prompts = torch.randint(5, 50, (rows, 4), generator=torch.Generator().manual_seed(2)).tolist()
    options = DecodeConfig(beam=1, min_len=20, max_new_tokens=20)
    assert uses_cuda_graphs(model)
    found = [row.tokens for row in generate(model, prompts, options)]
    with torch.no_grad():
        scores, state = model.begin(torch.tensor(prompts, device="cuda"))
        said: list[Tensor] = []
        for _ in range(20):
            for token in {model.config.eos_token_id, *model.config.suppress_tokens} - {-1}:
                scores[:, token] = -torch.inf
            said.append(scores.argmax(-1))
            scores = model.step(said[-1], state)
    assert [list(tokens)[:20] for tokens in found] == torch.stack(said, 1).tolist()
