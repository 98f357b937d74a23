"""Beam search in slots against decode/beam_search.py to the bit and the slow beam search; kernels against references.

The model is a table, whose rows are looked up by what the slots themselves say was written. A cache that holds a token where
a real one holds keys checks `owner`. On a GPU the kernels run there: `pytest -m gpu` on this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import BANNED, FIRST_WORD, Prefix, TableModel, padded, random_table, slow_beam
from tokens import EOS, SOS
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.beam_search import beam_search
from regard.decode.constraints import Hypothesis
from regard.decode.graphs.slots import Slots, advance, advance_reference, beam_step, beam_step_reference, collect
from regard.decode.sampling import sample

Table = Callable[[int, Prefix], np.ndarray]
Step = Callable[[Slots, Tensor, Tensor, Tensor, DecodeConfig], None]
CHUNK = 5  # of the vocabulary
STEPS = pytest.mark.parametrize("step", [beam_step_reference, beam_step])
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])


def written(slots: Slots, slot: int, row: int) -> Prefix:
    """Return the tokens of a row, by walking back along the parents."""
    said: list[int] = []
    for t in reversed(range(int(slots.step[slot]))):
        said.append(int(slots.token_ids[slot, t, row]))
        row = int(slots.parent[slot, t, row])
    return tuple(reversed(said))


def top_of_chunks(scores: Tensor, best: int) -> tuple[Tensor, Tensor]:
    """The best of each chunk of the vocabulary: value and index (N, P * best), -inf and 0 where there are no more."""
    values, ids = [], []
    for first in range(0, scores.shape[1], CHUNK):
        value, index = scores[:, first : first + CHUNK].sort(dim=1, descending=True, stable=True)
        room = (0, max(0, best - CHUNK, best - value.shape[1]))
        values.append(torch.nn.functional.pad(value[:, :best], room, value=-torch.inf))
        ids.append(torch.nn.functional.pad(index[:, :best] + first, room))
    value, index = torch.cat(values, 1), torch.cat(ids, 1)
    return value, index.masked_fill(value == -torch.inf, 0).int()


class Cache:
    """A cache that holds tokens in place of their keys, after `before` columns of a prompt."""

    def __init__(self, slots: Slots, before: int) -> None:
        self.tokens = np.full(slots.owner.shape, -1)
        self.before = before

    def read(self, slots: Slots) -> None:
        self.tokens[np.arange(len(self.tokens)), slots.position.numpy()] = slots.last.numpy()

    def past(self, slots: Slots, n: int) -> list[int]:
        """What row n attends to, the token it has just read included."""
        columns = range(self.before, int(slots.position[n]))
        return [int(self.tokens[slots.owner[n, j], j]) for j in columns] + [int(slots.last[n])]


def look_up(table: Table, slots: Slots, inside: dict[int, int], cache: Cache) -> Tensor:
    """The logits (N, V) of every row; what rows without a hypothesis get must not matter."""
    b, k = slots.log_prob.shape
    cache.read(slots)
    rows = []
    for slot, row in np.ndindex(b, k):
        said: Prefix = ()
        if slot in inside and slots.log_prob[slot, row] > -torch.inf:
            said = written(slots, slot, row)
            assert cache.past(slots, slot * k + row) == [SOS, *said]
        rows.append(table(inside.get(slot, 99), said))
    return torch.tensor(np.stack(rows), dtype=torch.float32)


def decode_in_slots(
    table: Table, limits: Sequence[int], options: DecodeConfig, step: Step, b: int, exact: bool = True, before: int = 0
) -> list[list[Hypothesis]]:
    """Decode sentences named 5 + i; one of them enters before each step that finds a free slot."""
    slots = Slots.make(b, options.beam, max(limits), "cpu", offset=before, eos=EOS)
    cache = Cache(slots, before)
    inside: dict[int, int] = {}
    found: dict[int, list[Hypothesis]] = {}
    waiting = list(range(len(limits)))
    while waiting or inside:
        free = [slot for slot in range(b) if slot not in inside]
        if waiting and free:
            i = waiting.pop(0)
            slots.enter(torch.tensor(free[:1]), torch.tensor([limits[i]]), SOS, before, options)
            inside[free[0]] = 5 + i
        logits = look_up(table, slots, inside, cache)
        log_z = torch.zeros(len(logits)) if exact else (3 * logits + 1).logsumexp(1)
        scores = logits.log_softmax(1) if exact else 3 * logits + 1
        scores[:, BANNED] = -torch.inf
        scores[:, EOS].masked_fill_(slots.no_end, -torch.inf)
        step(slots, *top_of_chunks(scores, 2 * options.beam), log_z, options)
        assert all(bool(slots.active[s] == 1 - slots.stopped[s]) for s in inside)
        assert slots.position.max() < slots.owner.shape[1]
        ended = [slot for slot in inside if slots.stopped[slot]]
        for slot, hypotheses in zip(ended, collect(slots.packed, ended, options.beam, options, EOS), strict=True):
            found[inside.pop(slot) - 5] = hypotheses
    return [found[i] for i in range(len(limits))]


def decode_in_batch(table: Table, limits: Sequence[int], options: DecodeConfig) -> list[list[Hypothesis]]:
    names = padded([[5 + i] for i in range(len(limits))])
    return beam_search(TableModel(table), names, torch.tensor(limits), options)


searches = st.fixed_dictionaries(
    {
        "beam": st.integers(1, 5),
        "length_penalty": st.sampled_from([0.0, 1.0, -0.5, 0.6]),
        "length_norm": st.sampled_from(["power", "gnmt"]),
        "beam_stop": st.sampled_from(["likely", "proven"]),
        "min_len": st.integers(0, 3),
    }
).map(lambda chosen: DecodeConfig(nbest=chosen["beam"], **chosen))
tables = st.builds(random_table, st.integers(0, 999), words=st.integers(6, 30), end=st.sampled_from([0.0, 1.5, 3.0]))
many_limits = st.lists(st.integers(1, 9), min_size=1, max_size=5)
few_limits = st.lists(st.integers(1, 6), min_size=2, max_size=3)


def assert_the_same_search(
    table: Table, limits: list[int], options: DecodeConfig, step: Step, b: int, before: int
) -> None:
    limits = [max(limit, options.min_len + 1) for limit in limits]
    found = decode_in_slots(table, limits, options, step, b, before=before)
    assert found == decode_in_batch(table, limits, options)  # scores too, to the bit


@settings(max_examples=40)
@given(tables, many_limits, searches, st.integers(1, 3), st.integers(0, 2))
def test_slots_find_what_a_batch_finds(
    table: Table, limits: list[int], options: DecodeConfig, b: int, before: int
) -> None:
    assert_the_same_search(table, limits, options, beam_step_reference, b, before)


@settings(max_examples=8)
@given(tables, few_limits, searches, st.integers(1, 2), st.integers(0, 2))
def test_the_kernel_finds_what_a_batch_finds(
    table: Table, limits: list[int], options: DecodeConfig, b: int, before: int
) -> None:
    assert_the_same_search(table, limits, options, beam_step, b, before)


@STEPS
def test_slots_find_what_the_slow_search_finds(step: Step) -> None:
    """From logits that are not normalised: log p = value - log_z."""
    sharp = random_table(seed=4, words=12, end=2.0)
    options = DecodeConfig(beam=3, nbest=3, length_penalty=0.6)

    def log_p(name: int, said: Prefix) -> np.ndarray:
        logits = 3 * sharp(name, said)
        return logits - np.log(np.exp(logits).sum())

    limits = [7, 2, 5, 7]
    for i, found in enumerate(decode_in_slots(sharp, limits, options, step, b=2, exact=False)):
        expected = slow_beam(partial(log_p, 5 + i), 3, limits[i], 0.6, stop="likely")
        assert [(h.tokens, h.ended) for h in found] == [(tokens, ended) for tokens, _, _, ended in expected]
        np.testing.assert_allclose([h.score for h in found], [s[1] for s in expected], atol=1e-5)
        np.testing.assert_allclose([h.log_prob for h in found], [s[2] for s in expected], atol=1e-5)


# --- single steps ------------------------------------------------------------------------------------------------------


def clone(slots: Slots) -> Slots:
    """A copy whose fields are views of its own `packed`."""
    k, room = slots.log_prob.shape[1], slots.token_ids.shape[1]
    other = Slots.make(len(slots.active), k, room, slots.packed.device, slots.owner.shape[1] - room, slots.eos)
    for name in ("packed", "last", "position", "no_end", "owner"):
        getattr(other, name).copy_(getattr(slots, name))
    return other


def entered(
    b: int, k: int, room: int, limits: Sequence[int], min_len: int = 0, device: str = "cpu", offset: int = 0
) -> Slots:
    """The first slots are being decoded, the others are empty."""
    slots = Slots.make(b, k, room, device, offset, EOS)
    which, most = torch.arange(len(limits), device=device), torch.tensor(limits, device=device)
    slots.enter(which, most, SOS, offset, DecodeConfig(min_len=min_len))
    return slots


def assert_equal(found: Slots, expected: Slots) -> None:
    for name, x in vars(expected).items():
        if isinstance(x, int):
            assert getattr(found, name) == x
            continue
        np.testing.assert_array_equal(getattr(found, name).cpu().numpy(), x.cpu().numpy(), err_msg=name)


def drawn(n: int, words: int, best: int, seed: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates of which many are equal, and many rows without some."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (n, FIRST_WORD + words), generator=rng).float() / 4
    scores[:, EOS] += levels / 16
    scores.masked_fill_(torch.rand(scores.shape, generator=rng) < 0.4, -torch.inf)
    scores[:, BANNED] = -torch.inf
    return *top_of_chunks(scores, best), torch.randint(1, 3, (n,), generator=rng).float()


@DEVICES
@pytest.mark.parametrize(
    ("k", "penalty", "stop"),
    [
        (1, 1.0, "proven"),
        (2, -0.5, "likely"),
        (2, 0.6, "proven"),
        (5, 0.0, "likely"),
        (5, 1.0, "proven"),
        (16, 0.6, "likely"),
    ],
)
def test_the_kernel_writes_what_the_reference_writes(k: int, penalty: float, stop: str, device: str) -> None:
    """With a prompt of 40 columns before, so that owners are copied in more than one block for K = 16."""
    options = DecodeConfig(beam=k, length_penalty=penalty, beam_stop=stop, min_len=2)
    slots = entered(b=4, k=k, room=6, limits=[6, 2, 5], min_len=2, device=device, offset=40)
    for step in range(4):
        candidates = [x.to(device) for x in drawn(4 * k, 9, 2 * k, seed=step, levels=8 if k < 16 else 30)]
        other = clone(slots)
        beam_step_reference(slots, *candidates, options)
        beam_step(other, *candidates, options)
        assert_equal(other, slots)
    assert slots.step[0] > 1


@STEPS
def test_equal_extensions_are_taken_in_the_order_of_rows_and_ids(step: Step) -> None:
    """Two rows, both with log p -1. Five extensions weigh -2, the first four count: b ends, and c is worth no place."""
    a, b, c = FIRST_WORD, FIRST_WORD + 1, EOS
    slots = entered(b=1, k=2, room=4, limits=[4])
    slots.step.fill_(1)
    slots.log_prob.fill_(-1.0)
    value = torch.tensor([[-1.0, -1.0, -9.0], [-1.0, -1.0, -1.0]])
    index = torch.tensor([[b, c, a], [c, b, a]], dtype=torch.int32)
    step(slots, value, index, torch.zeros(2), DecodeConfig(beam=2))
    assert slots.done_token[0].tolist() == [EOS, 0]
    assert slots.done_score[0].tolist() == [-1.0, -torch.inf]
    assert (slots.token_ids[0, 1].tolist(), slots.parent[0, 1].tolist()) == ([b, a], [0, 1])
    assert slots.last.tolist() == [b, a]
    assert slots.log_prob.tolist() == [[-2.0, -2.0]]


@STEPS
def test_an_ended_hypothesis_as_good_as_a_kept_one_comes_after_it(step: Step) -> None:
    slots = entered(b=1, k=2, room=4, limits=[4])
    slots.step.fill_(1)
    slots.done_score.copy_(torch.tensor([[-1.0, -1.5]]))
    slots.done_log_prob.copy_(slots.done_score)
    slots.done_length.fill_(1)
    value = torch.tensor([[-2.0, -8.0], [0.0, 0.0]])  # -2 over 2 tokens, and nothing from the row that is not there
    index = torch.tensor([[EOS, 7], [7, 8]], dtype=torch.int32)
    step(slots, value, index, torch.zeros(2), DecodeConfig(beam=2))
    assert slots.done_score[0].tolist() == [-1.0, -1.0]
    assert slots.done_length[0].tolist() == [1, 2]
    assert slots.stopped.tolist() == [1]  # nothing open can beat -1: -8 / 2


@STEPS
@pytest.mark.parametrize(
    ("stop", "penalty", "kept", "stops"),
    [("likely", 1.0, -1.0, 1), ("proven", 1.0, -1.0, 0), ("proven", -0.5, -3.5, 0)],
)
def test_the_way_to_stop_decides_what_an_open_hypothesis_may_hope_for(
    step: Step, stop: str, penalty: float, kept: float, stops: int
) -> None:
    """The open one has log p -2.2 after two tokens of four: it scores -1.1 now, but -0.55 if the rest is free.

    With penalty -0.5 it is the present that is best: -2.2 * sqrt(2) = -3.1 now, and -4.4 with four tokens.
    """
    slots = entered(b=1, k=1, room=4, limits=[4])
    slots.step.fill_(1)
    slots.log_prob.fill_(-1.2)
    slots.done_score.fill_(kept)
    value, index = torch.tensor([[-1.0, -9.0]]), torch.tensor([[7, 8]], dtype=torch.int32)
    step(slots, value, index, torch.zeros(1), DecodeConfig(beam=1, beam_stop=stop, length_penalty=penalty))
    assert slots.stopped.tolist() == [stops]
    assert slots.active.tolist() == [1 - stops]


@STEPS
def test_a_slot_that_rests_is_left_alone(step: Step) -> None:
    slots = entered(b=3, k=2, room=3, limits=[3, 1])
    options = DecodeConfig(beam=2)
    step(slots, *drawn(6, 9, 4, seed=1, levels=99), options)  # the second has stopped, the third was never in use
    assert slots.stopped.tolist()[1:] == [1, 0]
    assert slots.position.tolist()[2:] == [0] * 4
    before = clone(slots)
    step(slots, *drawn(6, 9, 4, seed=2, levels=99), options)
    for name, x in vars(before).items():
        if name == "eos":
            continue
        rows = 1 if name == "fresh" else len(x) // 3
        np.testing.assert_array_equal(getattr(slots, name)[rows:].numpy(), x[rows:].numpy(), err_msg=name)
    assert slots.step.tolist() == [2, 1, 0]


def test_entering_leaves_the_other_slots_alone() -> None:
    slots = entered(b=3, k=2, room=4, limits=[4, 4, 4])
    beam_step_reference(slots, *drawn(6, 9, 4, seed=1, levels=99), DecodeConfig(beam=2))
    before = clone(slots)
    starts, places = torch.tensor([7, 8]), torch.tensor([1, 0])
    slots.enter(torch.tensor([2, 0]), torch.tensor([3, 40]), starts, places, DecodeConfig(min_len=1))
    assert slots.last.tolist() == [8, 8, *before.last.tolist()[2:4], 7, 7]
    assert slots.position.tolist() == [0, 0, 1, 1, 1, 1]
    assert slots.no_end.tolist() == [True, True, False, False, True, True]
    assert slots.limit.tolist() == [4, 4, 3]  # never more than there is room for
    assert slots.log_prob[0].tolist() == slots.log_prob[2].tolist() == [0.0, -torch.inf]
    assert slots.owner[[0, 1, 4, 5]].tolist() == [[n] * 4 for n in (0, 1, 4, 5)]
    np.testing.assert_array_equal(slots.packed[1].numpy(), before.packed[1].numpy())
    np.testing.assert_array_equal(slots.owner[2:4].numpy(), before.owner[2:4].numpy())


# --- one hypothesis a slot ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [advance_reference, advance])
@pytest.mark.parametrize("min_len", [0, 3])
def test_greedy_slots_say_what_a_greedy_batch_says(
    step: Callable[[Slots, Tensor, Tensor, DecodeConfig], None], min_len: int
) -> None:
    table = random_table(seed=7, words=9, end=1.5)
    limits = [6, 1 + min_len, 9, 4, 9]
    options = DecodeConfig(beam=1, length_penalty=0.6, min_len=min_len)
    names = padded([[5 + i] for i in range(len(limits))])
    expected = sample(TableModel(table), names, torch.tensor(limits), [0] * len(limits), options)
    assert len({len(h.tokens) for h in expected}) > 2

    def likeliest(slots: Slots, value: Tensor, index: Tensor, log_z: Tensor, options: DecodeConfig) -> None:
        place = value.argmax(1, keepdim=True)
        token, log_prob = index.gather(1, place).squeeze(1).long(), value.gather(1, place).squeeze(1) - log_z
        step(slots, token, log_prob, options)

    for (found,), h in zip(decode_in_slots(table, limits, options, likeliest, b=2, before=1), expected, strict=True):
        assert (found.tokens, found.ended) == (h.tokens, h.ended)
        np.testing.assert_allclose([found.score, found.log_prob], [h.score, h.log_prob], rtol=1e-6)


@DEVICES
def test_the_kernel_advances_as_the_reference_does(device: str) -> None:
    slots = entered(b=200, k=1, room=4, limits=[1 + i % 4 for i in range(190)], min_len=2, device=device)
    options = DecodeConfig(beam=1, min_len=2, length_penalty=0.6)
    for step in range(4):
        rng = torch.Generator().manual_seed(step)
        token = torch.randint(EOS, 6, (200,), generator=rng).to(device)
        log_prob = -torch.rand(200, generator=rng).to(device)
        other = clone(slots)
        advance_reference(slots, token, log_prob, options)
        advance(other, token, log_prob, options)
        assert_equal(other, slots)
    assert slots.stopped.sum() == 190


# --- hypotheses --------------------------------------------------------------------------------------------------------


def test_hypotheses_are_read_off_the_fields() -> None:
    """Worked by hand: rows change places at the second step; one hypothesis ended, one was cut, one place is empty."""
    slots = Slots.make(3, 3, 3, "cpu", eos=EOS)
    slots.token_ids[1] = torch.tensor([[10, 11, 12], [20, 21, 22], [0, 0, 0]])
    slots.parent[1] = torch.tensor([[0, 0, 0], [2, 0, 0], [0, 0, 0]])
    slots.done_score[1] = torch.tensor([-0.5, -1.0, -torch.inf])
    slots.done_log_prob[1] = torch.tensor([-1.5, -3.0, -torch.inf])
    slots.done_length[1] = torch.tensor([3, 3, 0])
    slots.done_parent[1] = torch.tensor([0, 1, 0])
    slots.done_token[1] = torch.tensor([EOS, 30, 0])
    first = Hypothesis([12, 20], -0.5, -1.5, True)
    second = Hypothesis([10, 21, 30], -1.0, -3.0, False)
    assert collect(slots.packed, [1], 3, DecodeConfig(beam=3, nbest=3), EOS) == [[first, second]]
    assert collect(slots.packed, [1], 3, DecodeConfig(beam=3, nbest=1), EOS) == [[first]]
    assert collect(slots.packed, [], 3, DecodeConfig(beam=3, nbest=1), EOS) == []
    assert slots.last.tolist() == [0] * 9
