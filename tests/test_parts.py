"""Four parts that the package has never seen, each defined here and registered by one line.

For each of them, without a line about it in the package: a model trains, cached decoding equals uncached (beams, rows at
different positions, a reused slot), `regard cost` and `regard summary` count it, `regard look` shows the model, it is
saved and loaded, its settings come from TOML and the command line, and a misspelt one is refused with the nearest name. On a
GPU, CUDA graphs decode it as the host does, and a step that asks the host for a number is decoded token by token.
"""

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from configured import model_config
from tokens import EOS, SETTINGS, SOS
from torch import Tensor, nn
from typer.testing import CliRunner

import regard
from regard.cli.main import app
from regard.config import DecodeConfig, ModelConfig, TrainConfig
from regard.config.registry import register, setting, unregister
from regard.data.batches import Batch
from regard.decode.batch_decoding import decode
from regard.decode.constraints import NOT_CAPTURED, uses_cuda_graphs, warn_once
from regard.decode.generation import GenerationRequest, eager_steps, generate, make_request
from regard.decode.graphs.decoding import graph_steps, translate
from regard.decode.graphs.engine import ENGINES
from regard.errors import RegardError
from regard.kernels.attention_functions import Rotation
from regard.kernels.masks import PAD_POSITION
from regard.layers.block import Block
from regard.layers.cells import Cell, CellState, keep_at_padding
from regard.layers.context import Context
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.part import FeedForward, Mixer, Place
from regard.layers.positions.scheme import PositionScheme
from regard.layers.stack import Stack
from regard.look import trace
from regard.look.record import record
from regard.models.analysis.cost import Cost, report_costs
from regard.models.architectures import make_model
from regard.training.objective import Objective
from regard.training.optimizer import make_optimizer
from regard.training.training_step import TrainingStep

# ---- a position scheme -----------------------------------------------------------------------------------------------


class Spiral(PositionScheme):
    """Rotates queries and keys by the logarithm of their position."""

    @dataclass(frozen=True)
    class Settings:
        base: float = setting(100.0, "ratio of the fastest to the slowest rotation", above=1)

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.base = settings.base
        self.register_buffer("turn", torch.empty(config.d_head // 2), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        self.turn.copy_(self.base ** -torch.linspace(0, 1, len(self.turn), device="cpu"))

    def rotation(self, positions: Tensor) -> Rotation:
        angle = (1.0 + positions.clamp(min=0)).log()[:, None, :, None] * self.turn  # (B, 1, T, D/2)
        return angle.cos(), angle.sin()


# ---- a token mixer with a state of fixed size --------------------------------------------------------------------------


class Fade(Mixer):
    """A mean of the tokens of a text whose weights fall geometrically with distance."""

    @dataclass(frozen=True)
    class Settings:
        rate: float = setting(0.5, "how much of the mean is left after a token", above=0, below=1)

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.rate, self.causal, self.width = settings.rate, place.causal, config.d_model
        self.value, self.out = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        index = torch.arange(x.shape[1], device=x.device)
        start, real = index - ctx.positions, ctx.positions > PAD_POSITION  # where a token's document begins
        apart = (index[:, None] - index).expand(len(x), -1, -1)  # (B, T, S)
        seen = (start[:, :, None] == start[:, None]) & real[:, None] & ((apart >= 0) | (not self.causal))
        weights = torch.where(seen, self.rate ** apart.abs().to(x.dtype), 0.0)
        return self.out((weights @ self.value(x)).tanh())

    def state(self) -> dict[str, Storage]:
        return {"mean": PerRow((self.width,))}

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        kept.mean.mul_(self.rate).add_(self.value(x))
        return self.out(kept.mean.to(x.dtype).tanh())


# ---- a feed-forward layer with an auxiliary loss -----------------------------------------------------------------------


class Mixture(FeedForward):
    """Experts that a router mixes, and a loss that keeps their shares even."""

    @dataclass(frozen=True)
    class Settings:
        experts: int = setting(3, "how many experts there are", least=2)
        balance: float = setting(0.1, "weight of the loss that keeps their shares even")

    auxiliary = True

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.balance, e = settings.balance, settings.experts
        self.router = nn.Linear(config.d_model, e)
        self.up = nn.Parameter(torch.empty(e, config.d_model, config.d_ff))
        self.down = nn.Parameter(torch.empty(e, config.d_ff, config.d_model))

    def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        flat, real = x.flatten(0, -2), ctx.real.flatten()[:, None]  # (M, C), (M, 1)
        share = self.router(flat).softmax(-1)  # (M, E)
        inner = torch.relu(flat @ self.up.to(x.dtype))  # (E, M, F)
        y = torch.einsum("emc,me->mc", inner @ self.down.to(x.dtype), share)
        mean = (share.float() * real).sum(0) / real.sum().clamp(min=1)
        return y.view_as(x), self.balance * len(mean) * mean.square().sum()


# ---- a recurrent cell ------------------------------------------------------------------------------------------------


class MGU(Cell):
    """The minimal gated unit: f = s(W x + U h + b), n = tanh(W x + U (f * h) + b), h = (1 - f) * h + f * n."""

    gates, inputs, hidden = 2, 2, (1, 1)

    def forward(
        self, x: Tensor, weight: Tensor, offset: Tensor | None, real: Tensor | None, h: Tensor
    ) -> tuple[CellState, CellState]:
        x_f, x_n = x.chunk(2, -1)
        f = torch.sigmoid(x_f + self.recurrent_product(0, h, weight, offset))
        n = torch.tanh(x_n + self.recurrent_product(1, f * h, weight, offset))
        return (keep_at_padding(real, (1 - f) * h + f * n, h),), ((f * h).detach(),)


# ---- the tests -------------------------------------------------------------------------------------------------------

PARTS = {"spiral": Spiral, "fade": Fade, "mixture": Mixture, "mgu": MGU}
CHOSEN = {
    "spiral": {"model.positions": "spiral"},
    "fade": {"model.mixer": "fade,attention"},
    "mixture": {"model.feedforward": "mixture"},
    "mgu": {"model.cell": "mgu"},
}
SETTING = {"spiral": ("base", 30.0), "fade": ("rate", 0.25), "mixture": ("experts", 4)}  # the cell has none
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
VOCAB = 40
ALL = pytest.mark.parametrize("name", PARTS)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The parts are in the registry while a test of this file runs."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, part in PARTS.items():
        register(name)(part)
    yield
    for name, part in PARTS.items():
        unregister(part.kind, name)


def settings_of(name: str) -> dict[str, Any]:
    return {key.removeprefix("model."): value for key, value in CHOSEN[name].items()}


def language_model(name: str) -> Any:
    """A model that continues a text, with the part in it."""
    torch.manual_seed(1)
    small = {"preset": "rnn-tiny", "recurrent.d_hidden": 24} if name == "mgu" else {"preset": "gpt-tiny", "d_ff": 48}
    small |= {} if name == "mgu" else {"n_heads": 2}
    chosen = {key: tuple(x.split(",")) if key == "mixer" else x for key, x in settings_of(name).items()}
    model = make_model(
        model_config(**small, d_model=24, n_decoder_layers=2, max_len=48, target_vocab=VOCAB, **SETTINGS, **chosen)
    ).eval()
    return sharp(model)


def translation_model(name: str) -> Any:
    """A model that translates, with the part in it."""
    torch.manual_seed(2)
    both = {"n_encoder_layers": 2, "n_decoder_layers": 2, "source_vocab": VOCAB, "target_vocab": VOCAB}
    if name == "mgu":
        small = {"preset": "rnnsearch-small", "recurrent.d_hidden": 24, "recurrent.bidirectional": True}
    else:
        small = {"preset": "transformer-tiny", "d_ff": 48, "n_heads": 2}
    chosen = {key: tuple(x.split(",")) if key == "mixer" else x for key, x in settings_of(name).items()}
    return sharp(make_model(model_config(**small, **both, d_model=24, max_len=48, **SETTINGS, **chosen)).eval())


def sharp(model: Any) -> Any:
    """Larger weights: answers that differ, and end."""
    for p in model.parameters():
        if p.dim() >= 2:
            p.data *= 1.5
    return model


def words(n: int, seed: int, longest: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (n,), generator=generator).tolist()
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def rows(model: Any, options: DecodeConfig, n: int) -> list[GenerationRequest]:
    return [make_request(ids, 11 * i, options, model) for i, ids in enumerate(words(n, 3))]


# ---- decoding --------------------------------------------------------------------------------------------------------


@ALL
def test_steps_equal_a_whole_forward_whatever_the_lengths_of_the_prompts(name: str) -> None:
    """In fp64, where sums in another order differ by some 1e-14 of numbers of size 1 to 10."""
    model = language_model(name).double()
    prompts = words(5, 0)
    state = model.begin(padded(prompts))[1]
    with torch.no_grad():
        for t in range(6):
            said = [(7 * i + 3 * t) % (VOCAB - 5) + 5 for i in range(len(prompts))]
            prompts = [[*ids, token] for ids, token in zip(prompts, said, strict=True)]
            found = model.step(torch.tensor(said), state)
            whole = model(padded(prompts))
            expected = torch.stack([row[len(ids) - 1] for row, ids in zip(whole, prompts, strict=True)])
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
            if t == 2:  # rows change places, and one leaves
                order = [3, 0, 4, 1]
                state.select(torch.tensor(order))
                prompts = [prompts[i] for i in order]


def padded(rows: list[list[int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True, padding_value=-1)


@ALL
def test_hypotheses_that_multiply_swap_and_leave_go_on_as_if_alone(name: str) -> None:
    model = translation_model(name).double()
    sources = words(3, 4)
    state = model.begin(padded(sources))
    said = [[[SOS]] for _ in sources]  # of each sentence its hypotheses
    moves = {1: [[0, 0, 0]] * 3, 3: [[2, 1, 0], [0, 0, 1], [2, 2, 2]], 5: [[1, 1, 0], [0, 2, 1], [0, 0, 0]]}
    with torch.no_grad():
        for t in range(8):
            tokens = torch.tensor([ids[-1] for sentence in said for ids in sentence])
            found = model.step(tokens, state)
            source = padded([sources[i] for i, sentence in enumerate(said) for _ in sentence])
            expected = model(source, torch.tensor([ids for sentence in said for ids in sentence]))[:, -1]
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
            if t in moves:
                parents = moves[t][: len(said)]
                state.reorder(torch.tensor(parents))
                said = [[list(sentence[i]) for i in of] for sentence, of in zip(said, parents, strict=True)]
            if t == 6:
                state.select(torch.tensor([2, 0]))
                said, sources = [said[2], said[0]], [sources[2], sources[0]]
            for i, sentence in enumerate(said):
                for j, ids in enumerate(sentence):
                    ids.append((5 * t + 3 * i + 2 * j) % (VOCAB - 5) + 5)


@pytest.mark.parametrize("device", DEVICES)
@ALL
def test_slots_write_what_rows_write(name: str, device: str) -> None:
    """Eleven prompts through four slots, so that slots are reused; in a CUDA graph on a GPU."""
    model, options = language_model(name), DecodeConfig(beam=1, max_new_tokens=13, batch_tokens=64 * 4)
    plain, found = rows(model, options, 11), rows(model, options, 11)
    for _ in eager_steps(copy.deepcopy(model), plain, options):
        pass
    with torch.backends.cudnn.flags(allow_tf32=False):
        for _ in graph_steps(model.to(device), found, options):
            pass
    assert [row.ids for row in found] == [row.ids for row in plain]
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("beam", [1, 3])
@ALL
def test_slots_translate_what_the_search_translates(name: str, beam: int, device: str) -> None:
    model, sources = translation_model(name), words(9, 5)
    options = DecodeConfig(beam=beam, nbest=beam, batch_tokens=32 * beam * 2, max_len_a=0.0, max_len_b=9)
    plain = decode(copy.deepcopy(model), sources, options, 48, torch.device("cpu"))
    with torch.backends.cudnn.flags(allow_tf32=False):
        found = translate(model.to(device), [[*ids, EOS] for ids in sources], options, (SOS,))
    for ours, theirs in zip(found, plain, strict=True):
        assert [h.tokens for h in ours] == [h.tokens for h in theirs]
        assert [h.log_prob for h in ours] == pytest.approx([h.log_prob for h in theirs], rel=1e-3, abs=1e-3)


@pytest.mark.gpu
@NO_GPU
@ALL
def test_a_part_that_nobody_knows_is_decoded_by_graphs(name: str) -> None:
    model = language_model(name).cuda()
    assert uses_cuda_graphs(model)
    generate(model, words(2, 6), DecodeConfig(beam=1, max_new_tokens=8))
    assert ENGINES[model]  # an engine was made, and rests
    assert model not in NOT_CAPTURED


class Asking(Fade):
    """Its step asks the host for a number, which a captured step cannot."""

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        if float(kept.mean.abs().max()) > 1e9:
            kept.mean.zero_()
        return super().step(x, ctx, kept)


@pytest.mark.gpu
@NO_GPU
def test_a_step_that_reads_the_host_is_decoded_token_by_token(caplog: pytest.LogCaptureFixture) -> None:
    unregister("mixer", "fade")
    register("fade")(Asking)
    warn_once.cache_clear()
    model = language_model("fade")
    options = DecodeConfig(beam=1, max_new_tokens=9)
    expected = [row.ids for row in generate(copy.deepcopy(model), words(3, 7), options)]
    with caplog.at_level(logging.WARNING, "regard"):
        found = [row.ids for row in generate(model.cuda(), words(3, 7), options)]
    assert found == expected
    assert "'fade' cannot be captured" in caplog.text
    assert not uses_cuda_graphs(model)


@ALL
def test_a_step_does_the_same_operations_at_every_position(name: str) -> None:
    """A captured step replays fixed operations: neither Python counters nor host branches may depend on the position."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from regard.decode.graphs.engine import Engine

    class Trace(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            self.seen.append((str(op), getattr(result, "shape", None)))
            return result

    engine = Engine(language_model(name), DecodeConfig(beam=1), torch.float32, (2, 1, 16, 32))
    traces = []
    for position in (3, 7):
        engine.slots.position.fill_(position)
        with Trace() as trace, torch.no_grad():
            engine.step_model.step(engine.slots.last, engine.state)
        traces.append(trace.seen)
    assert traces[0] == traces[1]


# ---- training, files, settings -----------------------------------------------------------------------------------------

TRAINED = {
    "tokenizer.kind": "word",
    "tokenizer.vocab_size": "30",
    "model.d_model": "16",
    "model.n_decoder_layers": "2",
    "model.max_len": "32",
    "train.steps": "12",
    "train.batch_tokens": "128",
    "train.valid_every": "12",
    "train.save_every": "12",
    "train.log_every": "6",
    "train.device": "cpu",
}


def recipe(tmp_path: Path, name: str) -> tuple[Path, dict[str, str]]:
    """A recipe of a language model with the part, whose setting stands in TOML, and what is written over it."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 20)
    key, value = SETTING.get(name, ("", 0))
    table = f"\n[model.{name}]\n{key} = {value}\n" if key else ""
    preset = "rnn-tiny" if name == "mgu" else "gpt-tiny"
    path = tmp_path / f"{name}.toml"
    path.write_text(
        f'task = "causal-lm"\n[data]\ntrain = ["text.txt"]\nvalid = ["text.txt"]\n[model]\npreset = "{preset}"\n{table}'
    )
    small = {"model.recurrent.d_hidden": "16"} if name == "mgu" else {"model.n_heads": "2", "model.d_ff": "32"}
    return path, {**TRAINED, **small, **CHOSEN[name], "data.root": str(tmp_path)}


@ALL
def test_a_model_trains_is_saved_loaded_used_and_shown(name: str, tmp_path: Path) -> None:
    path, settings = recipe(tmp_path, name)
    run = regard.train(path, tmp_path / "run", settings=settings, quiet=True)
    writer: Any = regard.load(run, device="cpu")
    parts = [module for module in writer.model.modules() if type(module) is PARTS[name]]
    assert parts
    key, value = SETTING.get(name, ("", 0))
    logged = (run / "metrics.jsonl").read_text()
    assert ("auxiliary_loss" in logged) == (name == "mixture")
    if key:
        assert writer.model.config.value(f"{name}.{key}") == value
        assert f"{key} = {value}" in (run / "config.toml").read_text()
    assert len(writer.generate("the cat", max_new_tokens=5).tokens) <= 5
    assert writer.score("the cat sat").total < 0
    if name != "mgu":  # a language model without attention has nothing that `look` could show: see the translator below
        assert trace(run, "the cat", max_new_tokens=3).kind == "language"
    text = str(regard.summary(run, depth=3))
    assert f"{sum(p.numel() for p in writer.model.parameters()):,}" in text


@ALL
def test_attention_beside_the_part_is_recorded(name: str) -> None:
    model = translation_model(name)
    with record(model) as tape, torch.no_grad():
        model(padded(words(2, 9)), torch.tensor([[SOS, 7, 8], [SOS, 9, 6]]))
    weights = tape.weights("decoder.cross" if name == "mgu" else "decoder.1.cross")
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_the_auxiliary_loss_is_learned_from_and_not_reported() -> None:
    """One step of gradient descent by hand: that of the text's loss and of the balance, a mean over all scored tokens."""
    model = language_model("mixture").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = padded(words(4, 8))
    labels, objective = ids[:, 1:], Objective(model)
    for stack in model.modules():
        if isinstance(stack, Stack):
            stack.dropout = 0.0
            for place in stack.blocks.modules():
                if isinstance(place, Block):
                    place.dropout = 0.0
    sums = objective(ids[:, :-1], labels)
    count = float((labels >= 0).sum())
    router = next(part for part in model.modules() if isinstance(part, Mixture)).router.weight
    expected = torch.autograd.grad(sums[0] / count + model.decoder.auxiliary_loss, router)[0]
    alone = torch.autograd.grad(objective(ids[:, :-1], labels)[0] / count, router)[0]
    assert (expected - alone).abs().max() > 1e-4  # the auxiliary loss has an effect
    step = TrainingStep(objective, TrainConfig(device="cpu", clip=0.0), torch.device("cpu"), torch.float32)
    found: list[Tensor] = []
    router.register_hook(lambda gradient: found.append(gradient.clone()))
    step([Batch((ids[:, :-1], labels), int((labels >= 0).sum()))], 1e-3)
    torch.testing.assert_close(found[-1], expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(step.sums, sums.detach())  # what is reported is the text's loss alone


@ALL
def test_cost_and_summary_count_what_is_there(name: str) -> None:
    """Parameters and FLOPs against those of a run on real tensors, counted by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    model = language_model(name)
    cost, length = Cost(model.config), 7
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(torch.full((1, length), 6))
    assert cost.forward_flops(1, 0, length) == counter.get_total_flops()
    found = report_costs(model.config, 2, length)["memory"]["decoding"]
    state = model.begin(torch.full((1, length), 6))[1]
    kept = sum(
        x[..., :length, :].nbytes if x.dim() == 4 else x.nbytes for _, part in state for x in vars(part).values()
    )
    counted = found.get("state_per_row", 0) + 2 * found.get("cache_bf16_per_token", 0) * length  # fp32 here
    assert counted == kept


@ALL
def test_settings_come_from_the_command_line_and_misspelt_ones_are_refused(name: str, tmp_path: Path) -> None:
    path, settings = recipe(tmp_path, name)
    run = CliRunner()
    listed = run.invoke(app, ["settings", name])
    assert listed.exit_code == 0, listed.output
    assert PARTS[name].__doc__.split("\n")[0].rstrip(".").split(":")[0] in " ".join(listed.output.split())
    if name not in SETTING:
        return
    key, value = SETTING[name]
    with pytest.raises(RegardError, match=rf"model\.{name}\.{key}x.*{name}\.{key}"):
        regard.train(path, tmp_path / "run", settings={**settings, f"model.{name}.{key}x": "1"}, quiet=True)
    other = {"fade": "attention", "spiral": "rope", "mixture": "dense"}[name]
    field = next(iter(CHOSEN[name]))
    with pytest.raises(RegardError, match=name):  # the table of a part that is not chosen
        regard.train(
            path, tmp_path / "run", settings={**settings, field: other, f"model.{name}.{key}": "1"}, quiet=True
        )
    twice = {**settings, f"model.{name}.{key}": str(value * 2 if name != "fade" else 0.75), "train.steps": "2"}
    made = regard.train(path, tmp_path / "other", settings=twice, quiet=True)
    assert regard.load(made, device="cpu").model.config.value(f"{name}.{key}") == (
        value * 2 if name != "fade" else 0.75
    )
    with pytest.raises(RegardError):  # out of the range that its field declares
        regard.train(path, tmp_path / "third", settings={**settings, f"model.{name}.{key}": "0"}, quiet=True)


def test_a_language_model_is_freed_after_decoding() -> None:
    for name in PARTS:
        model = language_model(name)
        generate(model, words(2, 6), DecodeConfig(beam=1, max_new_tokens=3))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


def test_a_model_that_was_trained_with_an_auxiliary_loss_can_be_copied() -> None:
    model = language_model("mixture").train()
    model(torch.full((1, 4), 6)).sum().backward()
    assert model.decoder.auxiliary_loss is not None
    assert copy.deepcopy(model).decoder.auxiliary_loss is None


def test_forward_hooks_of_a_mixer_act_while_decoding() -> None:
    model, options = language_model("fade"), DecodeConfig(beam=1, max_new_tokens=4, min_len=4)
    part = next(module for module in model.modules() if isinstance(module, Fade))
    seen: list[Any] = []
    handle = part.register_forward_hook(lambda module, given, result: seen.append(result.shape))  # type: ignore[func-returns-value]
    generate(model, [[7, 8, 9]], options)
    handle.remove()
    assert len(seen) == 1 + 3  # the prompt, and a step for each token but the last
    handle = part.register_forward_hook(lambda module, given, result: torch.zeros_like(result))
    changed = model.begin(torch.tensor([[7, 8, 9]]))[0]
    torch.testing.assert_close(changed, model(torch.tensor([[7, 8, 9]]))[:, -1], atol=1e-5, rtol=1e-5)
    handle.remove()
    part.forward = lambda x, ctx: x  # type: ignore[method-assign]
    with pytest.raises(RegardError, match=r"forward\(\) of Fade is replaced"):
        model.begin(torch.tensor([[7, 8, 9]]))


def test_a_step_that_cannot_be_captured_is_decoded_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a CUDA-graph decoder take more rows than a batch of the host does."""
    model = language_model("fade")
    options = DecodeConfig(beam=1, max_new_tokens=5, batch_tokens=64)
    expected = [row.ids for row in generate(model, words(20, 3), options)]
    most: list[int] = []
    begin = model.begin

    def begun(prompt: Tensor) -> Any:
        most.append(prompt.numel())
        return begin(prompt)

    monkeypatch.setattr(model, "begin", begun)
    monkeypatch.setattr("regard.decode.generation.uses_cuda_graphs", lambda model, beam=1: True)
    monkeypatch.setattr("regard.decode.graphs.engine.StaticDecodingState", lambda *_, **__: 1 / 0)
    assert [row.ids for row in generate(model, words(20, 3), options)] == expected
    assert max(most) <= 64
    assert "division" in NOT_CAPTURED.pop(model)


def test_a_step_must_change_its_state_in_place() -> None:
    from regard.decode.graphs.engine import Engine

    engine = Engine(language_model("fade"), DecodeConfig(beam=1), torch.float32, (2, 1, 16, 32))
    kept = next(iter(engine.state.parts.values()))
    with pytest.raises(RuntimeError, match="in place"):
        kept.mean = torch.zeros(1)


class Bare(Mixer):
    """Keeps nothing between tokens, and has a parameter that must not decay and dropout of its own."""

    no_decay = ("scale",)

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.scale, self.drop = nn.Parameter(torch.ones(1, config.d_model)), nn.Dropout(0.5)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.drop(x * self.scale)

    def state(self) -> dict[str, Storage]:
        return {}


@pytest.fixture
def bare() -> Iterator[Any]:
    register("bare")(Bare)
    torch.manual_seed(0)
    sizes = {"preset": "gpt-tiny", "n_heads": 2, "d_model": 16, "n_decoder_layers": 2, "max_len": 24, "dropout": 0.0}
    yield make_model(model_config(**sizes, mixer=("bare", "attention"), target_vocab=VOCAB, **SETTINGS))
    unregister("mixer", "bare")


def test_a_mixer_without_a_state_decodes(bare: Any) -> None:
    model = bare.eval()
    _, state = model.begin(padded([[7, 8, 9], [6]]))
    found = model.step(torch.tensor([5, 6]), state)
    whole = model(padded([[7, 8, 9, 5], [6, 6]]))
    torch.testing.assert_close(found, torch.stack([whole[0, 3], whole[1, 1]]), atol=1e-5, rtol=1e-5)


def test_activation_checkpointing_draws_a_parts_own_dropout_again(bare: Any) -> None:
    ids, gradients = torch.full((2, 6), 7), []
    assert bare.decoder.random
    for recompute in (False, True):
        bare.train().zero_grad()
        bare.decoder.activation_checkpointing = recompute
        torch.manual_seed(5)
        bare(ids).square().sum().backward()
        gradients.append(next(m for m in bare.modules() if isinstance(m, Bare)).scale.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_weight_decay_leaves_alone_what_a_part_says(bare: Any) -> None:
    optimizer = make_optimizer(bare, TrainConfig(device="cpu", weight_decay=0.1))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    layers = [m for m in bare.modules() if isinstance(m, Bare)]
    assert layers
    assert not any(id(layer.scale) in decayed for layer in layers)


class Half(Mixer):
    """Fills one of its vectors itself."""

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.scale = nn.Parameter(torch.full((config.d_model,), torch.nan))
        self.matrix = nn.Parameter(torch.full((config.d_model, config.d_model), torch.nan))

    def init_weights(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return (x * self.scale) @ self.matrix if x.sum().item() < 1e9 else x

    def state(self) -> dict[str, Storage]:
        return {}


def test_a_part_that_fills_a_vector_itself_has_its_matrices_filled_and_says_that_it_cannot_be_counted() -> None:
    register("half")(Half)
    try:
        model = make_model(model_config(preset="gpt-tiny", mixer=("half",), target_vocab=VOCAB, **SETTINGS))
        assert all(p.isfinite().all() for p in model.parameters())
        with pytest.raises(RegardError, match="'half' cannot be counted: its forward needs numbers"):
            Cost(model.config).forward_flops(1, 0, 5)
    finally:
        unregister("mixer", "half")


def test_declarations_that_cannot_be_are_refused() -> None:
    class Loose(Mixer):
        """Settings without help."""

        @dataclass(frozen=True)
        class Settings:
            rate: float = 0.5

    with pytest.raises(RegardError, match=r"model\.loose\.rate has no help"):
        register("loose")(Loose)
    Loose.Settings = dict  # type: ignore[assignment,misc]
    with pytest.raises(RegardError, match="must be a dataclass"):
        register("loose")(Loose)
    with pytest.raises(RegardError, match="only a scheme that adds to scores"):
        make_model(model_config(preset="transformer-tiny", cross_positions="spiral", source_vocab=9, target_vocab=9))


@pytest.mark.parametrize("value", ["0", "1", "1.5"])
def test_both_ends_of_a_range_are_checked(value: str, tmp_path: Path) -> None:
    path, settings = recipe(tmp_path, "fade")
    with pytest.raises(RegardError, match="above 0 and below 1"):
        regard.train(path, tmp_path / "run", settings={**settings, "model.fade.rate": value}, quiet=True)


def test_a_part_may_not_take_a_name_that_is_taken() -> None:
    with pytest.raises(RegardError, match="two parts of kind mixer are called 'fade'"):
        register("fade")(Asking)
    with pytest.raises(RegardError, match=r"\[model\.dropout\]"):
        register("dropout")(Spiral)


def test_parts_are_short() -> None:
    """A part is at most forty lines."""
    import inspect

    for part in PARTS.values():
        assert len(inspect.getsource(part).splitlines()) <= 40


# ---- mistakes of an author that are reported when a part is registered or built -----------------------------------------


def test_a_mixer_must_say_what_its_step_keeps() -> None:
    class Forgetful(Mixer):
        """Mixes tokens, and forgot to declare what a step needs of earlier ones."""

        def forward(self, x: Tensor, ctx: Context) -> Tensor:
            return x.cumsum(1)

    with pytest.raises(RegardError, match=r"'forgetful' has no method state\(\)"):
        register("forgetful")(Forgetful)


def test_a_scheme_must_do_something_and_declare_its_bias() -> None:
    class Idle(PositionScheme):
        """Does nothing."""

    class Silent(PositionScheme):
        """Has a bias that nobody would ask for."""

        def bias(self, q: Tensor, k: Tensor) -> Tensor:
            return (k - q).float()[None]

    class Taken(Spiral):
        """Puts a number where its base class has a method."""

        table = 3

    for name, scheme, message in (("idle", Idle, "does nothing"), ("silent", Silent, "relative = True")):
        with pytest.raises(RegardError, match=message):
            register(name)(scheme)
    with pytest.raises(RegardError, match="'table', which is a method"):
        register("taken")(Taken)
    assert "idle" not in regard.config.registry.PARTS["positions"]


class Picky(Spiral):
    """Has a check of its own, which does not call that of its base class."""

    @classmethod
    def check(cls, settings: Any, config: ModelConfig, place: Place) -> None:
        if config.d_head % 2:
            raise RegardError("picky needs an even width")


def test_a_check_of_its_own_does_not_switch_off_those_of_its_kind() -> None:
    register("picky")(Picky)
    try:
        for chosen in ({"mixer": "fade", "positions": "picky"}, {"cross_positions": "picky"}):
            preset = "gpt-tiny" if "mixer" in chosen else "transformer-tiny"
            with pytest.raises(RegardError, match="picky"):
                make_model(model_config(preset=preset, source_vocab=9, target_vocab=9, **chosen))
    finally:
        unregister("positions", "picky")


def test_a_state_that_is_replaced_is_refused_while_the_host_steps_too() -> None:
    class Replacing(Fade):
        """Puts another tensor into the place of its state."""

        def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
            kept.mean = kept.mean * self.rate + self.value(x)
            return self.out(kept.mean.tanh())

    unregister("mixer", "fade")
    register("fade")(Replacing)
    with pytest.raises(RuntimeError, match="in place"):
        language_model("fade").begin(padded(words(2, 3)))


def test_limits_hold_for_floats_and_for_defaults() -> None:
    @dataclass(frozen=True)
    class Settings:
        share: float = setting(0.5, "a share", least=0, most=1)

    from regard.config.recipes import build

    assert build({"share": 1}, Settings).share == 1
    with pytest.raises(RegardError, match=r"'share' must be at most 1, not 1\.5"):
        build({"share": 1.5}, Settings)
    with pytest.raises(RegardError, match=r"the default -0\.5 of a setting \(a slope\) must be a number from 0 up"):
        setting(-0.5, "a slope")


def test_a_class_that_is_defined_again_replaces_itself() -> None:
    """A notebook cell that is run twice, or a module that is reloaded."""
    again = type("Fade", (Fade,), {"__doc__": "Fades.", "__module__": Fade.__module__, "__qualname__": "Fade"})
    register("fade")(again)
    assert regard.config.registry.PARTS["mixer"]["fade"] is again
    with pytest.raises(RegardError, match="two parts of kind mixer are called 'fade'"):
        register("fade")(Bare)


def test_a_vector_that_nobody_fills_is_an_error() -> None:
    class Unfilled(FeedForward):
        """Has a vector, and no init_weights."""

        def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
            super().__init__(settings, config, place)
            self.gain = nn.Parameter(torch.empty(config.d_model))

        def forward(self, x: Tensor, ctx: Context) -> Tensor:
            return x * self.gain

    register("unfilled")(Unfilled)
    try:
        with pytest.raises(RegardError, match=r"'unfilled' has the vector 'gain', but no init_weights\(\)"):
            make_model(model_config(preset="gpt-tiny", feedforward="unfilled", target_vocab=9))
    finally:
        unregister("feedforward", "unfilled")


def test_an_auxiliary_loss_is_one_number() -> None:
    class PerToken(Mixture):
        """Returns a loss for each token."""

        def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
            return x, x.square().mean(-1)

    unregister("feedforward", "mixture")
    register("mixture")(PerToken)
    with pytest.raises(TypeError, match=r"the auxiliary loss of PerToken has shape \[1, 3\]: return one number"):
        language_model("mixture")(torch.full((1, 3), 6))


def test_positions_where_there_is_nothing_for_them_are_refused() -> None:
    for name in ("cross_positions", "encoder_positions"):
        with pytest.raises(RegardError, match=rf"model\.{name} would do nothing here"):
            make_model(model_config(preset="gpt-tiny", target_vocab=9, **{name: "alibi"}))
