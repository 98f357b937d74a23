"""CUDA-graph decoding finds the hypotheses of eager decoding, whichever sentences enter and leave meanwhile.

Without a GPU the operations are torch's own and no graph is captured; the rest is the same code.
"""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from configured import model_config
from tokens import EOS, SETTINGS, SOS
from torch import nn

from regard.config import DecodeConfig, ModelConfig
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis, free_decode_graphs
from regard.decode.generation import GenerationRequest, eager_steps, make_request
from regard.decode.graphs.decoding import GraphTranslation, OpenGeneration, OpenTranslation, graph_steps, translate
from regard.decode.graphs.engine import ENGINES, MAX_ENGINES
from regard.decode.graphs.step_model import why_not_capturable
from regard.kernels.attention_functions import Rotation
from regard.kernels.masks import FULL
from regard.layers.attention_kernels import AttentionPlan
from regard.layers.context import Context
from regard.layers.embedding import Embedding, Head
from regard.layers.feedforward import Dense as FeedForward
from regard.layers.mixers.attention import SelfAttention
from regard.layers.part import Place
from regard.layers.positions.rotary import RoPE as Rotary
from regard.layers.positions.scheme import PositionScheme
from regard.look.record import record
from regard.models.gpt import GPT
from regard.models.rnn import RNN
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.text.special_tokens import SpecialTokenTemplate


@pytest.fixture(autouse=True)
def torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have tests of their own; in the interpreter a whole search would take minutes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
VOCAB = 60
STYLES: dict[str, dict[str, object]] = {
    "pre-norm": {},
    "post-norm": {"norm": "post"},
    "rotary": {"positions": "rope", "encoder_positions": "sinusoidal"},
    "alibi": {"positions": "alibi"},
    "t5": {"positions": "t5", "norm_kind": "rms", "bias": False, "scale_logits": True, "scale_embeddings": False},
    "grouped": {"n_kv_heads": 1, "feedforward": "gated", "activation": "silu"},
    "parallel": {"parallel": True, "activation": "gelu-tanh"},
    "window": {"attention.window": 3},
    "more": {"embedding_norm": True, "head_bias": True, "activation": "gelu"},
}


def sharp(model: torch.nn.Module) -> None:
    """Double the matrices, so that translations differ and end."""
    for p in model.parameters():
        if p.dim() == 2:
            p.data *= 2.0


def transformer(device: str = "cpu", **style: object) -> Transformer:
    torch.manual_seed(3)
    sizes = {"preset": "transformer-tiny", "n_encoder_layers": 2, "n_decoder_layers": 2, "d_model": 32, "n_heads": 2}
    settings = {**sizes, "d_ff": 64, "max_len": 40, "source_vocab": VOCAB, "target_vocab": VOCAB, **SETTINGS, **style}
    model = Transformer(model_config(**settings)).eval()  # type: ignore[arg-type]
    sharp(model)
    return model.to(device)


def gpt(device: str = "cpu", **style: object) -> GPT:
    torch.manual_seed(5)
    sizes = {"preset": "gpt-tiny", "n_decoder_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "max_len": 48}
    model = GPT(model_config(**{**sizes, "target_vocab": VOCAB, **SETTINGS, **style})).eval()  # type: ignore[arg-type]
    sharp(model)
    return model.to(device)


def sentences(n: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, 14, (n,), generator=generator).tolist()
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def both(
    model: nn.Module,
    options: DecodeConfig,
    n: int = 9,
    start: tuple[int, ...] = (SOS,),
    seeds: Sequence[int] | None = None,
) -> None:
    token_template, sources = SpecialTokenTemplate(start=start), sentences(n)
    given = copy.deepcopy(model).cpu(), sources, options, 40, torch.device("cpu")
    plain = decode(*given, token_template=token_template, seeds=seeds)
    with torch.backends.cudnn.flags(allow_tf32=False):  # recurrent layers round products to 10 bits otherwise
        found = translate(model, [token_template.wrap(ids) for ids in sources], options, start, seeds=seeds)
    same(found, plain)


def same(found: list[list[Hypothesis]], plain: list[list[Hypothesis]]) -> None:
    for ours, theirs in zip(found, plain, strict=True):
        assert [(h.tokens, h.ended) for h in ours] == [(h.tokens, h.ended) for h in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert (a.score, a.log_prob) == pytest.approx((b.score, b.log_prob), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_model_is_searched_alike(style: str, device: str) -> None:
    both(transformer(device, **STYLES[style]), DecodeConfig(beam=4, nbest=3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [
        {"beam": 1},
        {"beam": 5, "beam_stop": "proven", "length_penalty": 0.6},
        {"beam": 3, "min_len": 6, "length_penalty": 0.0},
        {"beam": 1, "temperature": 1.0, "seed": 7},
        {"beam": 1, "temperature": 0.7, "nbest": 3, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
        {"beam": 1, "repetition_penalty": 1.7},
        {"beam": 1, "repetition_penalty": 1.3, "temperature": 0.9, "min_len": 3},
    ],
)
def test_every_way_to_decode_is_alike(settings: dict[str, object], device: str) -> None:
    both(transformer(device), DecodeConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_each_source_is_sampled_with_the_seed_that_it_is_given(device: str) -> None:
    seeds = [4, 4, 2**70 + 1, 0, 9, 1, 2**62, 3, 8]
    both(transformer(device), DecodeConfig(beam=1, temperature=1.0, nbest=2), seeds=seeds)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("beam", [1, 4])
def test_sentences_enter_and_leave_while_others_go_on(beam: int, device: str) -> None:
    """20 sentences share two or four slots."""
    both(transformer(device), DecodeConfig(beam=beam, batch_tokens=32 * 4 * 2), n=20)


@pytest.mark.parametrize("device", DEVICES)
def test_several_start_tokens_are_read(device: str) -> None:
    both(transformer(device), DecodeConfig(beam=3), start=(EOS, SOS))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_learned_meanwhile_counts(device: str) -> None:
    """An engine is kept for the next call, and the weights it works with are those of that call."""
    model = transformer(device, positions="t5")
    both(model, DecodeConfig(beam=2))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(device))
    both(model, DecodeConfig(beam=2))


def rows(options: DecodeConfig, n: int) -> list[GenerationRequest]:
    prompts = [ids for ids in sentences(n) for _ in range(options.nbest)]
    model = gpt()
    return [make_request(ids, 11 * i, options, model) for i, ids in enumerate(prompts)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("style", "settings"),
    [
        ("pre-norm", {}),
        ("pre-norm", {"temperature": 0.8, "nbest": 3, "repetition_penalty": 1.2}),
        ("rotary", {"temperature": 1.0}),
        ("rotary", {"min_len": 4}),
        ("window", {}),
        ("window", {"temperature": 1.0}),
        ("grouped", {"temperature": 0.8, "nbest": 3, "repetition_penalty": 1.2}),
        ("grouped", {"min_len": 4}),
    ],
)
def test_texts_go_on_alike(style: str, settings: dict[str, object], device: str) -> None:
    model = gpt(device, **STYLES[style] | {"encoder_positions": ""})
    cpu = GPT(model.config).eval()
    cpu.load_state_dict(model.state_dict())
    options = DecodeConfig(beam=1, max_new_tokens=17, batch_tokens=64 * 4, **settings)  # type: ignore[arg-type]
    found, plain = rows(options, 11), rows(options, 11)
    for _ in graph_steps(model, found, options):
        pass
    for _ in eager_steps(cpu, plain, options):
        pass
    for ours, theirs in zip(found, plain, strict=True):
        assert (ours.ids, ours.end) == (theirs.ids, theirs.end)
        assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_its_callback_stops_leaves(device: str) -> None:
    options = DecodeConfig(beam=1, temperature=1.0, max_new_tokens=20, batch_tokens=64 * 2)
    job = rows(options, 9)
    for row in job:
        row.on_token = lambda token, row=row: len(row.tokens) == 3  # type: ignore[misc]
    for _ in graph_steps(gpt(device), job, options):
        pass
    assert {(row.end, len(row.tokens)) for row in job if row.end != "end"} == {("stop", 3)}


@pytest.mark.parametrize("device", DEVICES)
def test_two_texts_may_be_written_in_turn(device: str) -> None:
    """Each job has an engine of its own; a job that is closed early returns its engine."""
    model, options = gpt(device), DecodeConfig(beam=1, temperature=1.0, max_new_tokens=17)
    alone = [rows(options, 3)[i : i + 1] for i in (0, 1)]
    for job in alone:
        for _ in graph_steps(model, job, options):
            pass
    together = [rows(options, 3)[i : i + 1] for i in (0, 1)]
    turns = [graph_steps(model, job, options) for job in together]
    while turns:
        turns = [turn for turn in turns if next(turn, None) is not None]
    assert [job[0].ids for job in together] == [job[0].ids for job in alone]
    left = graph_steps(model, rows(options, 1), options)
    next(left)
    left.close()
    again = rows(options, 3)[:1]
    for _ in graph_steps(model, again, options):
        pass
    assert again[0].ids == alone[0][0].ids


def test_engines_rest_with_their_model_and_no_more_than_a_few() -> None:
    model = transformer()
    for beam in range(2, 9):
        translate(model, sentences(2), DecodeConfig(beam=beam), (SOS,))
    assert len(ENGINES[model]) == MAX_ENGINES
    free_decode_graphs(model)
    assert model not in ENGINES


def test_an_engine_that_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = transformer(), DecodeConfig(beam=2)
    with monkeypatch.context() as broken:
        broken.setattr(GraphTranslation, "enter", lambda job: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            translate(model, sentences(3), options, (SOS,))
    assert not ENGINES[model]
    both(model, options)


# ---- what is decoded by CUDA graphs, and what token by token ---------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("positions", ["shaw", "cope", "fire", "linear", "learned", "yarn", "kerple-log"])
def test_every_position_scheme_is_searched_alike(positions: str, device: str) -> None:
    both(transformer(device, positions=positions, encoder_positions="rope"), DecodeConfig(beam=3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "style",
    [
        {"mixer": "convolution", "convolution.dilations": (1, 2), "positions": "learned"},
        {"positions": "alibi", "cross_positions": "alibi"},
        {"d_model": 30, "d_head": 15},  # an odd width, which the kernels do not support
    ],
    ids=str,
)
def test_what_the_kernels_do_not_know_is_searched_alike(style: dict[str, object], device: str) -> None:
    both(transformer(device, **style), DecodeConfig(beam=3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", ["lstm", "gru", "mut1"])
def test_recurrent_texts_go_on_alike(cell: str, device: str) -> None:
    torch.manual_seed(6)
    sizes = {"preset": "rnn-tiny", "n_decoder_layers": 2, "d_model": 32, "recurrent.d_hidden": 24, **SETTINGS}
    model = RNN(model_config(**sizes, target_vocab=VOCAB, cell=cell)).eval()
    sharp(model)
    write_alike(model, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "mixer",
    [
        "linear-attention",
        "gla",
        "short-convolution,based,attention",
        "mamba2,attention",
        "s4,attention",
        "s4d,attention",
    ],
)
def test_texts_of_linear_recurrences_go_on_alike(mixer: str, device: str) -> None:
    settings = {"n_decoder_layers": 3, "mamba2.d_head": 16, "mamba2.d_state": 16, "based.feature_dim": 4}
    write_alike(gpt(device, mixer=mixer, positions="none", **settings, **STYLES["window"]), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", ["additive", "general", "constant", "none"])
@pytest.mark.parametrize("beam", [1, 3])
def test_recurrent_translators_are_searched_alike(score: str, beam: int, device: str) -> None:
    torch.manual_seed(6)
    sizes = {"preset": "sutskever-small", "d_model": 32, "recurrent.d_hidden": 24, **SETTINGS}
    model = Seq2Seq(model_config(**sizes, source_vocab=VOCAB, target_vocab=VOCAB, attention_score=score)).eval()
    sharp(model)
    both(model.to(device), DecodeConfig(beam=beam))


def write_alike(model: nn.Module, device: str, **settings: object) -> None:
    cpu = copy.deepcopy(model)
    options = DecodeConfig(beam=1, max_new_tokens=17, batch_tokens=64 * 4, **settings)  # type: ignore[arg-type]
    found, plain = rows(options, 11), rows(options, 11)
    with torch.backends.cudnn.flags(allow_tf32=False):  # its layers round products to 10 bits otherwise
        for _ in graph_steps(model.to(device), found, options):
            pass
    for _ in eager_steps(cpu, plain, options):  # type: ignore[arg-type]
        pass
    for ours, theirs in zip(found, plain, strict=True):
        assert (ours.ids, ours.end) == (theirs.ids, theirs.end)
        assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_decoded_by_graphs(style: str) -> None:
    assert why_not_capturable(transformer(**STYLES[style])) == ""
    assert why_not_capturable(gpt(**STYLES[style] | {"encoder_positions": ""})) == ""


def made(scheme: type[PositionScheme], model: GPT) -> PositionScheme:
    return scheme(scheme.Settings(), model.config, Place("decoder", causal=True))


class Turned(PositionScheme):
    """Rotates queries and keys by the documented hook alone: it is no `Rotary`."""

    def rotation(self, positions: torch.Tensor) -> Rotation:
        angle = positions[:, None, :, None] * torch.linspace(1.0, 0.1, 8, device=positions.device)  # heads of 16
        return angle.cos(), angle.sin()


class Reversed(Rotary):
    def rotation(self, positions: torch.Tensor) -> Rotation:
        return super().rotation(-2 * positions)


class Cubed(FeedForward):
    def forward(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        return super().forward(x, ctx) ** 3


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Blurred(SelfAttention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        return 0.5 * super().attend(q, k, v, plan)


class Shifted(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Halved(Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) / 2


class Flat(Head):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def replace(path: str, part: Callable[[ModelConfig], nn.Module]) -> Callable[[GPT], None]:
    def change(model: GPT) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, part(model.config))

    return change


FF, ATTENTION = "decoder.blocks.1.sublayers.ff", "decoder.blocks.1.sublayers.self"
CHANGES: dict[str, Callable[[GPT], None]] = {
    "Turned": lambda model: setattr(model.decoder, "schemes", nn.ModuleList([made(Turned, model)])),
    "Reversed": lambda model: setattr(model.decoder, "schemes", nn.ModuleList([made(Reversed, model)])),
    "Cubed": replace(FF, lambda c: Cubed(None, c, Place("decoder"))),
    "Doubled": replace(f"{FF}.outer", lambda c: Doubled(c.d_ff, c.d_model)),
    "Blurred": replace(ATTENTION, lambda c: Blurred(Blurred.Settings(), c, Place("decoder", causal=True))),
    "Shifted": replace("decoder.norm", lambda c: Shifted(c.d_model)),
    "Halved": replace("embedding", lambda c: Halved(c.target_vocab, c.d_model)),
}
REFUSED: dict[str, Callable[[GPT], None]] = {
    "a head of the class Flat": replace("head", lambda c: Flat(torch.zeros(c.target_vocab, c.d_model))),
    "a mask that is not causal (every key)": lambda model: setattr(model.decoder, "mask", FULL),
    f"a replaced forward() of SelfAttention ({ATTENTION})": lambda model: setattr(
        model.get_submodule(ATTENTION), "forward", lambda x, ctx: x
    ),
    f"a forward hook of Dense ({FF})": lambda model: model.get_submodule(FF).register_forward_hook(
        lambda module, given, result: 2 * result
    ),  # type: ignore[dict-item]
    "a replaced step() of GPT": lambda model: setattr(model, "step", model.step),
    "dropout, which is active in training mode": lambda model: model.train(),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_captured_step_would_not_see_is_named(reason: str) -> None:
    model = gpt(positions="rope")
    assert why_not_capturable(model) == ""
    REFUSED[reason](model)
    assert why_not_capturable(model) == reason


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("n", [1, 11])
def test_a_model_with_a_part_of_its_own_is_written_alike(change: str, n: int, device: str) -> None:
    """The part's own step is captured, also for one row, where the parts that it replaces have fused kernels."""
    model = gpt(positions="rope")
    CHANGES[change](model)
    model.eval()
    assert why_not_capturable(model) == ""
    options = DecodeConfig(beam=1, max_new_tokens=17)
    cpu = copy.deepcopy(model)
    found, plain = rows(options, n), rows(options, n)
    for _ in graph_steps(model.to(device), found, options):
        pass
    for _ in eager_steps(cpu, plain, options):
        pass
    assert [row.ids for row in found] == [row.ids for row in plain]


def test_a_recorded_model_is_still_decoded_by_graphs() -> None:
    """Recorders change nothing: they keep copies of what the layers compute."""
    model = gpt()
    with record(model, stream=True):
        assert why_not_capturable(model) == ""


# ---- work that arrives while other work is decoded -------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings", [{"beam": 3, "nbest": 2}, {"beam": 1}, {"beam": 1, "temperature": 0.8, "nbest": 2}]
)
def test_sources_are_added_while_others_are_translated(settings: dict[str, object], device: str) -> None:
    model, options, sources = transformer(device), DecodeConfig(**settings), sentences(11)  # type: ignore[arg-type]
    template = SpecialTokenTemplate(start=(SOS,))
    plain = decode(copy.deepcopy(model).cpu(), sources, options, 40, torch.device("cpu"), token_template=template)
    job, found, before, step = OpenTranslation(model, options, (SOS,), 16, 4), {}, None, 0
    while step <= 40 or job.waiting or job.working or before is not None:
        for i in range(11):
            if step == 3 * i:
                seeds = (
                    [options.seed + i]
                    if options.temperature == 0
                    else [i * options.nbest + j for j in range(options.nbest)]
                )
                job.add(i, template.wrap(sources[i]), seeds)
        done, before = job.advance(before)
        found |= done
        step += 1
    same([found[i] for i in range(11)], plain)
    assert not job.sources
    assert not job.limits


@pytest.mark.parametrize("device", DEVICES)
def test_a_source_that_nobody_waits_for_leaves_its_slot(device: str) -> None:
    model, options, sources = transformer(device), DecodeConfig(beam=2, min_len=20), sentences(6)
    template = SpecialTokenTemplate(start=(SOS,))
    job, found, before = OpenTranslation(model, options, (SOS,), 16, 2), {}, None
    for i, ids in enumerate(sources):
        job.add(i, template.wrap(ids), [0])
    _, before = job.advance(before)
    job.drop({0, 1, 4})
    while job.waiting or job.working or before is not None:
        done, before = job.advance(before)
        found |= done
    assert sorted(found) == [2, 3, 5]


@pytest.mark.parametrize("device", DEVICES)
def test_prompts_are_added_while_others_are_continued(device: str) -> None:
    model, options = gpt(device), DecodeConfig(beam=1, temperature=0.8, max_new_tokens=10)
    prompts = sentences(8)
    plain = [make_request(prompt, i, options, model) for i, prompt in enumerate(prompts)]
    cpu = copy.deepcopy(model).cpu()
    for row in plain:
        for _ in eager_steps(cpu, [row], options):
            pass
    rows = [make_request(prompt, i, options, model) for i, prompt in enumerate(prompts)]
    job, before, step = OpenGeneration(model, options, 32, 4), None, 0
    while step < 20 or job.waiting or job.working or before is not None:
        if step % 2 == 0 and step // 2 < len(rows):
            job.waiting.append(rows[step // 2])
        before = job.advance(before)
        step += 1
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert [row.end for row in rows] == [row.end for row in plain]
