"""What only a GPU can show: the compiled and captured step (CUDA graph) does what the plain one does."""

import pytest
import torch
from configured import model_config
from tokens import EOS, SETTINGS, SOS

from regard.config import DecodeConfig, RewardConfig, TrainConfig
from regard.data.batches import Batch
from regard.decode.batch_decoding import decode
from regard.device import set_up_device
from regard.kernels.masks import FULL
from regard.layers.attention_kernels import make_plan
from regard.models.architectures import make_model, preset
from regard.models.transformer import Transformer
from regard.text.special_tokens import PAD
from regard.training.objective import ClassificationObjective, Objective, PackedObjective, make_token_objective
from regard.training.reward_objective import RewardObjective, SentenceReward
from regard.training.training_step import TrainingStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = model_config(preset="transformer-tiny", n_encoder_layers=2, n_decoder_layers=2, dropout=0.0, max_len=64)
VOCAB = 200
CONVOLUTIONS: dict[str, object] = {"mixer": "convolution", "convolution.dilations": (1, 2, 4)}
SHAPES = [(8, 16), (16, 8), (5, 24), (8, 16), (16, 8), (5, 24), (8, 16), (5, 24)]


def model(**changes: object) -> Transformer:
    torch.manual_seed(0)
    values = {**vars(SIZES), "source_vocab": VOCAB, "target_vocab": VOCAB, **changes}
    return Transformer(model_config(**values)).cuda().train()  # type: ignore[arg-type]


def batch(rows: int, width: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB, (3, rows, width), generator=generator)
    source, target, labels = ids
    source[:, -1] = EOS
    source[0, width // 2 :] = PAD
    target[:, 0] = SOS
    labels[1, 3:] = PAD
    return Batch((source, target, labels), int((labels != PAD).sum()))


def run(
    compile: bool,
    dtype: torch.dtype = torch.float32,
    shapes: list[tuple[int, int]] = SHAPES,
    changes: dict[str, object] | None = None,
    **config: object,
) -> tuple[TrainingStep, Transformer]:
    net = model(**(changes or {}))
    settings = TrainConfig(compile=compile, **{"accumulate": 2, **config})  # type: ignore[arg-type]
    step = TrainingStep(make_token_objective(net, settings), settings, torch.device("cuda"), dtype)
    for i, (rows, width) in enumerate(shapes):
        step([batch(rows, width, i + 100 * j) for j in range(settings.accumulate)], lr=1e-3)
    return step, net


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("r_drop", [0.0, 5.0])
def test_captured_steps_equal_plain_ones(r_drop: float, accumulate: int) -> None:
    """One CUDA graph of the whole step, or one that accumulates gradients and one that applies them.

    Weights are compared by the length of their difference, as a share of the way they came. A lost or repeated step, 1 of 8,
    would be a share of 0.1. Single weights cannot be compared: Adam moves a weight by about the learning rate whatever the
    size of its gradient, so where a gradient is smaller than its rounding error, the sign of the update is chance.
    """
    fast, fast_net = run(True, r_drop=r_drop, accumulate=accumulate)
    plain, plain_net = run(False, r_drop=r_drop, accumulate=accumulate)
    torch.testing.assert_close(fast.sums, plain.sums, rtol=1e-4, atol=1e-3)
    captured, expected, start = (
        torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (fast_net, plain_net, model())
    )
    assert (captured - expected).norm() < 0.02 * (expected - start).norm()


@pytest.mark.parametrize(
    "changes",
    [
        *({"positions": name} for name in ("rope", "alibi", "t5", "kerple-log", "fire")),
        {"attention.window": 40},
        CONVOLUTIONS,
    ],
)
def test_long_rows_learn_the_same_on_every_kernel(changes: dict[str, object]) -> None:
    """From 128 tokens on, biases and windows have kernels of their own, inside compiled blocks and CUDA graphs."""
    shapes, changes = [(4, 160), (2, 200)] * 3, changes | {"max_len": 256}
    fast, plain = (run(compile, torch.bfloat16, shapes, changes)[0] for compile in (True, False))
    torch.testing.assert_close(fast.sums, plain.sums, rtol=1e-2, atol=1.0)


def packed_rows(seed: int) -> Batch:
    """Three documents in each row of 160 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(5, VOCAB, (2, 4, 160), generator=generator)
    positions = torch.cat([torch.arange(n) for n in (50, 90, 20)]).expand(4, -1).contiguous()
    return Batch((ids, positions, labels), labels.numel())


def pictures(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        (torch.randn(16, 1, 16, 16, generator=generator), torch.randint(0, 10, (16,), generator=generator)), 16
    )


@pytest.mark.parametrize("kind", ["packed documents", "pictures"])
def test_other_models_learn_the_same_when_captured(kind: str) -> None:
    sums = []
    for compile in (True, False):
        torch.manual_seed(0)
        if kind == "pictures":
            net = make_model(preset("vit-tiny", n_encoder_layers=2, n_classes=10, max_len=17, dropout=0.0)).cuda()
            objective, make = ClassificationObjective(net), pictures
        else:
            net = make_model(preset("gpt-tiny", n_decoder_layers=2, target_vocab=VOCAB, dropout=0.0)).cuda()
            objective, make = PackedObjective(net), packed_rows
        step = TrainingStep(objective, TrainConfig(compile=compile), torch.device("cuda"), torch.bfloat16)
        for i in range(5):
            step([make(i)], lr=1e-3)
        sums.append(step.sums)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-2, atol=1.0)


def test_bf16_learns_like_fp32() -> None:
    low, _ = run(True, torch.bfloat16)
    full, _ = run(False)
    torch.testing.assert_close(low.sums, full.sums, rtol=2e-2, atol=1.0)


def test_nothing_is_compiled_again_once_its_shape_was_seen() -> None:
    from torch._dynamo.utils import counters

    net = model()
    step = TrainingStep(Objective(net, 0.1), TrainConfig(), torch.device("cuda"), torch.bfloat16)
    for i, (rows, width) in enumerate(SHAPES):
        step([batch(rows, width, i)], lr=1e-3)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    for i, (rows, width) in enumerate(SHAPES):
        step([batch(rows, width, i)], lr=1e-3)
    assert counters["stats"]["unique_graphs"] == compiled
    assert len(step.graphed_step.graphs) == len(set(SHAPES))  # type: ignore[attr-defined]


def test_a_hybrid_model_has_a_graph_for_each_kind_of_block() -> None:
    """Not for each block: dilations and the place in a stack make no kind of their own (test_compile.py)."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    mixers = {"mixer": ("convolution", "attention"), "convolution.dilations": (1, 3)}
    net = model(n_encoder_layers=4, n_decoder_layers=4, norm="pre", dropout=0.1, **mixers)
    step = TrainingStep(Objective(net, 0.1), TrainConfig(), torch.device("cuda"), torch.bfloat16)
    for i, (rows, width) in enumerate(SHAPES):
        step([batch(rows, width, i)], lr=1e-3)
        assert counters["stats"]["unique_graphs"] == before + 4  # two in the encoder, two that look at the source too
    assert len(step.graphed_step.graphs) == len(set(SHAPES))  # type: ignore[attr-defined]


def test_dropout_differs_between_replays() -> None:
    net = model(dropout=0.5)
    step = TrainingStep(Objective(net, 0.1), TrainConfig(), torch.device("cuda"), torch.float32)
    losses = []
    for _ in range(6):
        step([batch(8, 16, 0)], lr=0.0)
        losses.append(step.sums[0].item())
        step.sums.zero_()
    assert len(set(losses)) == 6


def test_a_bad_gradient_freezes_the_weights_before_it() -> None:
    net = model()
    step = TrainingStep(Objective(net, 0.1), TrainConfig(), torch.device("cuda"), torch.float32)
    for i in range(4):
        step([batch(8, 16, i)], lr=1e-3)
    assert step.updater.first_bad_step(10) is None
    before = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        spoilt = next(net.parameters())
        good = spoilt[7].clone()
        spoilt[7] = torch.inf
    bad = batch(8, 16, 9)
    bad.inputs[0][:, 0] = 7
    step([bad], lr=1e-3)
    with torch.no_grad():
        spoilt[7] = good
    step([batch(8, 16, 10)], lr=1e-3)
    assert step.updater.first_bad_step(10) == 15
    for a, b in zip(before, net.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("beam", [1, 4])
def test_decoding_on_the_gpu_says_what_the_cpu_says(beam: int) -> None:
    net = model().eval()
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2.0)
    generator = torch.Generator().manual_seed(3)
    sources = [torch.randint(5, VOCAB, (n,), generator=generator).tolist() for n in (3, 9, 20, 1, 14)]
    options = DecodeConfig(beam=beam, nbest=beam, max_len_a=1.0, max_len_b=5)
    on_gpu = decode(net, sources, options, 64, torch.device("cuda"))
    on_cpu = decode(net.cpu(), sources, options, 64, torch.device("cpu"))
    assert [[h.tokens for h in hs] for hs in on_gpu] == [[h.tokens for h in hs] for hs in on_cpu]


def test_gradients_under_a_mask_are_finite() -> None:
    """cuDNN's attention returned NaN gradients for long rows of padding; `set_up_device` takes it out of the choice."""
    set_up_device(TrainConfig(device="cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.manual_seed(0)
    steps, lengths = torch.arange(64, device="cuda"), torch.randint(2, 64, (128, 1), device="cuda")
    positions = steps.where(steps < lengths, -1)  # (B, S)
    q, k, v = (8 * torch.randn(128, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    make_plan(FULL, positions, positions, kernel="sdpa")(q, k, v, 0.1).square().mean().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_training_on_a_reward_samples_by_graphs_from_the_present_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of the captured step, before and after training, against eager ones with the same noise.

    Rounding may change a token here and there; weights that are a few steps old change most samples."""
    net = model(**SETTINGS)
    settings = TrainConfig(label_smoothing=0.0, reward=RewardConfig(samples=4, likelihood_weight=1.0))
    objective = RewardObjective(net, settings, DecodeConfig(max_len_a=1.0, max_len_b=2), SentenceReward("gleu"))
    step = TrainingStep(objective, settings, torch.device("cuda"), torch.float32)
    assert not step.is_graphed
    sources = [[5 + i, 6 + i, 7 + i] for i in range(32)]

    def draw() -> list[list[list[int]]]:
        torch.manual_seed(1)
        return [sorted(h.tokens for h in several) for several in objective.draw_samples(sources, torch.device("cuda"))]

    def count_equal(a: list[list[list[int]]], b: list[list[list[int]]]) -> float:
        return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)

    before = draw()
    for i in range(4):
        step([batch(8, 16, i)], lr=0.02)
    assert step.sums.isfinite().all()
    after = draw()
    monkeypatch.setattr("regard.decode.batch_decoding.uses_cuda_graphs", lambda *args: False)
    eager = draw()
    assert count_equal(after, eager) > 0.8
    assert count_equal(before, eager) < 0.2
