"""Cached steps against full forward passes, independence of the batch, and the order, limits and checks of `decode`."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from oracle import BANNED, FIRST_WORD, VOCAB, padded, random_sources, tiny_transformer
from tokens import EOS, SETTINGS, SOS
from torch import Tensor

from regard.config import DecodeConfig, ModelConfig
from regard.decode.batch_decoding import decode
from regard.decode.constraints import Hypothesis, length_limits, log_probabilities
from regard.errors import RegardError
from regard.layers.decoding_state import DecodingState
from regard.layers.mixers.attention import CrossAttention
from regard.models.transformer import Transformer

CPU = torch.device("cpu")
MAX_LEN = 64


def run(model: Transformer, sources: list[list[int]], **options: object) -> list[list[Hypothesis]]:
    return decode(model, sources, DecodeConfig(**options), model.config.max_len, CPU)  # type: ignore[arg-type]


# --- cached == uncached ------------------------------------------------------------------------------------------------


class Follower:
    """Runs cached steps of a model and checks each against a full forward pass over all tokens so far."""

    def __init__(self, model: Transformer, sources: list[list[int]]) -> None:
        self.model, self.sources = model, sources
        self.state: DecodingState = model.begin(padded(sources))
        self.said = [[SOS] for _ in sources]  # of each hypothesis
        self.owner = list(range(len(sources)))  # the sentence of each hypothesis
        self.generator = torch.Generator().manual_seed(0)

    def check_step(self) -> None:
        found = self.model.step(torch.tensor([said[-1] for said in self.said]), self.state)
        source = padded([self.sources[i] for i in self.owner])
        expected = self.model(source, torch.tensor(self.said))[:, -1]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for said in self.said:
            said.append(int(torch.randint(FIRST_WORD, VOCAB, (1,), generator=self.generator)))

    def reorder(self, parents: list[list[int]]) -> None:
        """Reorder beams: the hypotheses of each sentence become these parents, numbered within the sentence."""
        self.state.reorder(torch.tensor(parents))
        width = len(self.said) // len(parents)
        rows = [i * width + j for i, row in enumerate(parents) for j in row]
        self.said, self.owner = [list(self.said[i]) for i in rows], [self.owner[i] for i in rows]

    def select(self, sentences: list[int]) -> None:
        """Keep these sentences and drop the others, as a search does when some have stopped."""
        names = [list(dict.fromkeys(self.owner))[i] for i in sentences]
        self.state.select(torch.tensor(sentences))
        rows = [row for row, owner in enumerate(self.owner) if owner in names]
        self.said, self.owner = [list(self.said[i]) for i in rows], [self.owner[i] for i in rows]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_step_equals_a_whole_forward(norm: str) -> None:
    """Forty steps: the cache grows beyond its first 16 columns, and beyond 32."""
    follower = Follower(tiny_transformer(0, norm=norm), random_sources(0, 7))
    with torch.no_grad():
        for _ in range(40):
            follower.check_step()


def test_hypotheses_multiply_swap_and_leave() -> None:
    follower = Follower(tiny_transformer(1), random_sources(1, 4))
    with torch.no_grad():
        follower.check_step()
        follower.reorder([[0, 0, 0]] * 4)  # one hypothesis a sentence becomes three
        for _ in range(3):
            follower.check_step()
        follower.reorder([[2, 1, 0], [0, 0, 1], [2, 2, 2], [2, 0, 1]])  # swapped, doubled, dropped
        for _ in range(14):
            follower.check_step()  # past the first 16 columns of the cache
        follower.select([0, 2, 3])
        follower.check_step()
        follower.reorder([[1, 1, 0], [0, 2, 1], [0, 0, 0]])
        for _ in range(3):
            follower.check_step()
        follower.select([1])
        for _ in range(12):
            follower.check_step()
        follower.reorder([[2, 0]])  # fewer hypotheses than before
        follower.check_step()
    assert follower.owner == [2, 2]


def test_the_memory_is_projected_once() -> None:
    model = tiny_transformer(2)
    calls = {m: 0 for m in model.modules() if isinstance(m, CrossAttention)}

    def count(layer: CrossAttention) -> None:
        def hook(*_: object) -> None:
            calls[layer] += 1

        layer.kv.register_forward_hook(hook)

    for layer in calls:
        count(layer)
    run(model, random_sources(2, 5), beam=3, max_len_a=0, max_len_b=10, min_len=9)
    assert list(calls.values()) == [1, 1]


# --- a sentence does not depend on its batch -------------------------------------------------------------------------

WAYS = [
    {"beam": 4, "nbest": 4},
    {"beam": 4, "nbest": 2, "beam_stop": "proven", "length_penalty": 0.6, "min_len": 3},
    {"beam": 1},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "seed": 5, "nbest": 3},
]


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in expected]
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], abs=1e-5)
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected], abs=1e-4)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_alone_or_in_company(way: dict) -> None:
    """Sixteen ragged sources: each alone, and all in one batch, in batches of a few, and one by one."""
    model, sources = tiny_transformer(0), random_sources(3, 16)
    way = {**way, "max_len_a": 1, "max_len_b": 5}
    together = run(model, sources, **way)
    assert len({tuple(ranked[0].tokens) for ranked in together}) > 5
    for batch_tokens in (150, 1):
        for found, expected in zip(run(model, sources, batch_tokens=batch_tokens, **way), together, strict=True):
            assert_same(found, expected)
    for i, source in enumerate(sources):
        (alone,) = run(model, [source], **{**way, "seed": way.get("seed", 0) + i})  # sentence i draws from seed + i
        assert_same(alone, together[i])


@pytest.mark.parametrize("way", WAYS[3:], ids=str)
def test_each_source_is_sampled_with_the_seed_that_it_is_given(way: dict) -> None:
    model, sources = tiny_transformer(0), random_sources(3, 16)
    together = run(model, sources, batch_tokens=150, **way)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist()
    options = DecodeConfig(**{**way, "seed": 99})
    given = [sources[i] for i in order], options, model.config.max_len, CPU
    shuffled = decode(model, *given, seeds=[way["seed"] + i for i in order])
    for i, found in zip(order, shuffled, strict=True):
        assert_same(found, together[i])


@pytest.mark.parametrize("way", WAYS[:3], ids=str)
def test_in_another_order(way: dict) -> None:
    model, sources = tiny_transformer(0), random_sources(3, 30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()
    together = run(model, sources, **way)
    shuffled = run(model, [sources[i] for i in order], batch_tokens=300, **way)
    for i, found in zip(order, shuffled, strict=True):
        assert_same(found, together[i])


# --- results in order ------------------------------------------------------------------------------------------------


class Echo:
    """A model that copies its source, so that a result shows which source it belongs to."""

    config = ModelConfig(**SETTINGS)

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def begin(self, source: Tensor) -> Echo.State:
        self.shapes.append(tuple(source.shape))
        return Echo.State(source)

    def step(self, tokens: Tensor, state: Echo.State) -> Tensor:
        due = state.source[:, state.time] if state.time < state.source.shape[1] else torch.tensor([EOS])
        due = due.clamp(min=0).expand(len(state.source)).repeat_interleave(len(tokens) // len(state.source))
        state.time += 1
        return torch.nn.functional.one_hot(due, VOCAB) * 20.0

    @dataclasses.dataclass
    class State:
        source: Tensor
        time: int = 0

        def reorder(self, parents: Tensor) -> None:
            pass

        def select(self, sentences: Tensor) -> None:
            self.source = self.source[sentences]


@pytest.mark.parametrize(
    "way", [{"beam": 1}, {"beam": 3}, {"temperature": 0.1}, {"temperature": 0.1, "nbest": 2}], ids=str
)
@pytest.mark.parametrize("batch_tokens", [1, 60, 10**6])
def test_order_progress_and_batches(way: dict, batch_tokens: int) -> None:
    sources = [*random_sources(4, 40), []]
    model, finished = Echo(), []
    options = DecodeConfig(batch_tokens=batch_tokens, **way)
    found = decode(model, sources, options, MAX_LEN, CPU, progress=finished.append)
    assert [ranked[0].tokens for ranked in found] == sources
    assert all(ranked[0].ended for ranked in found)
    assert sum(finished) == len(sources)
    assert len(finished) == len(model.shapes)
    width = 1 if way == {"beam": 1} else max(options.beam, options.nbest)
    copies = 1 if options.temperature == 0 else options.nbest
    for rows, length in model.shapes:
        assert rows == copies or rows // copies * length * width <= batch_tokens
    assert batch_tokens < 10**6 or len(finished) == 1
    assert batch_tokens > 1 or len(finished) == len(sources)


def test_nothing_to_do() -> None:
    finished: list[int] = []
    assert decode(Echo(), [], DecodeConfig(), MAX_LEN, CPU, progress=finished.append) == []
    assert finished == []


# --- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [{"beam": 1}, {"beam": 4, "nbest": 4}, {"temperature": 1.0}], ids=str)
@pytest.mark.parametrize(("a", "b", "min_len"), [(0, 5, 0), (1, 0, 0), (0.5, 1, 2), (0, 5, 4), (0, 3, 6), (100, 0, 0)])
def test_limits(way: dict, a: float, b: int, min_len: int) -> None:
    """At most a * source + b tokens with the end token (but room for min_len and an end), and no more than positions."""
    model, sources = tiny_transformer(0, max_len=16), random_sources(5, 30)
    seen = set()
    for source, ranked in zip(
        sources, run(model, sources, max_len_a=a, max_len_b=b, min_len=min_len, **way), strict=True
    ):
        limit = min(max(int(a * (len(source) + 1) + b), min_len + 1), 16)
        for h in ranked:
            assert len(h.tokens) >= min_len
            assert len(h.tokens) + h.ended <= limit
            assert h.ended or len(h.tokens) == limit
            assert not set(h.tokens) & {*BANNED, EOS}
            seen.add(h.ended)
    assert seen == {True, False}


def test_length_limits_by_hand() -> None:
    lengths = torch.tensor([1, 4, 10])

    def limits(**options: float) -> list[int]:
        return length_limits(lengths, DecodeConfig(**options), 32).tolist()  # type: ignore[arg-type]

    assert limits() == [22, 28, 32]
    assert limits(max_len_a=1.5, max_len_b=1) == [2, 7, 16]
    assert limits(max_len_a=0.1, max_len_b=0) == [1, 1, 1]
    assert limits(max_len_a=0, max_len_b=3, min_len=5) == [6, 6, 6]
    assert limits(max_len_a=0, max_len_b=-7) == [1, 1, 1]
    assert limits(max_len_a=math.inf) == [32, 32, 32]  # as long as the model can


def test_what_may_be_said() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5, 3.0, -1.0, 0.0, 2.5]])
    options = DecodeConfig(min_len=2)
    total = sum(math.exp(x) for x in logits[0].tolist())
    for step, banned in ((0, {*BANNED, EOS}), (1, {*BANNED, EOS}), (2, {*BANNED})):
        found = log_probabilities(logits, step, options, ModelConfig(**SETTINGS))[0].tolist()
        expected = [-math.inf if i in banned else x - math.log(total) for i, x in enumerate(logits[0].tolist())]
        assert found == pytest.approx(expected, abs=1e-6)
    assert logits[0, 0] == 1.0  # the model's own logits are left alone


# --- bad input ---------------------------------------------------------------------------------------------------------


def test_a_source_too_long_is_named() -> None:
    model = tiny_transformer(0, max_len=8)
    run(model, [[5] * 7])  # seven and the end token just fit
    with pytest.raises(RegardError, match=r"sentence 3 has 8 tokens.*at most 7"):
        run(model, [[5], [5] * 7, [5] * 8, [5] * 9])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"beam": 0}, "decode.beam"),
        ({"beam": -2}, "decode.beam"),
        ({"nbest": 0}, "decode.nbest"),
        ({"beam": 2, "nbest": 3}, "decode.nbest 3 is more than decode.beam 2"),
        ({"temperature": -0.5}, "decode.temperature"),
        ({"temperature": math.inf}, "decode.temperature"),
        ({"temperature": math.nan}, "decode.temperature"),
        ({"temperature": 1.0, "top_k": -1}, "decode.top_k"),
        ({"temperature": 1.0, "top_p": 0.0}, "decode.top_p"),
        ({"temperature": 1.0, "top_p": 1.5}, "decode.top_p"),
        ({"temperature": 1.0, "top_p": math.nan}, "decode.top_p"),
        ({"length_penalty": math.nan}, "decode.length_penalty"),
        ({"length_penalty": 200.0}, "decode.length_penalty"),  # 20^200 is more than a float holds
    ],
    ids=str,
)
def test_settings_that_mean_nothing(options: dict, named: str) -> None:
    with pytest.raises(RegardError, match=named) as caught:
        decode(Echo(), [[5]], DecodeConfig(**options), MAX_LEN, CPU)
    assert "\n" not in str(caught.value)
