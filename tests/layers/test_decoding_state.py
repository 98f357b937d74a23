"""The decoding state: the growing one against plain concatenation and indexing, under any sequence of steps, reorderings
and selections; and the static one against the growing one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configured import model_config
from formula import ragged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.kernels.masks import CAUSAL, PAD_POSITION
from regard.layers.block import PreNormBlock
from regard.layers.context import Context
from regard.layers.decoding_state import LENGTH, Columns, DecodingState, PerRow, PerSentence, Storage, state_bytes
from regard.layers.part import Mixer
from regard.layers.stack import Stack
from regard.layers.static_decoding_state import StaticDecodingState
from regard.models.gpt import GPT
from regard.models.transformer import Transformer

H, D, W = 2, 3, 4
DEVICE = torch.device("cpu")


class Keeper(nn.Module):
    """Declares one storage of each kind."""

    def state(self) -> dict[str, Storage]:
        columns = {"keys": Columns(H, D), "values": Columns(H, D)}
        return {**columns, "running": PerRow((W,)), "memory": PerSentence((H, LENGTH, D))}


class Keepers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keeper(), Keeper()])


MODEL = Keepers()
LAYERS = list(MODEL.layers)


def new_state(rows: int) -> DecodingState:
    return DecodingState(MODEL, rows, DEVICE, torch.float32)


# ---- the growing state ------------------------------------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 20)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 99), min_size=1, max_size=5)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=50)
@given(operations=operations, rows=st.integers(1, 4))
def test_the_state_is_concatenation_and_indexing(operations: list[tuple[str, object]], rows: int) -> None:
    state = new_state(rows)
    columns = [(torch.empty(rows, H, 0, D), torch.empty(rows, H, 0, D)) for _ in LAYERS]
    running = [torch.zeros(rows, W) for _ in LAYERS]
    memories = [torch.randn(rows, H, 5, D) for _ in LAYERS]
    for layer, memory in zip(LAYERS, memories, strict=True):
        state.store_memory(layer, memory=memory)
    positions = torch.empty(rows, 0, dtype=torch.long)
    for name, argument in operations:
        if name == "select":
            assert isinstance(argument, list)
            chosen = torch.tensor([i % rows for i in argument])
            columns = [(k[chosen], v[chosen]) for k, v in columns]
            running, memories = [x[chosen] for x in running], [x[chosen] for x in memories]
            positions, rows = positions[chosen], len(chosen)
            state.select(chosen)
        else:
            assert isinstance(argument, int)
            new_positions = torch.randint(-1, 50, (rows, argument))
            positions = torch.cat([positions, new_positions], 1)
            assert torch.equal(state.key_positions(new_positions), positions)
            for i, layer in enumerate(LAYERS):
                k, v = torch.randn(2, rows, H, argument, D)
                columns[i] = (torch.cat([columns[i][0], k], 2), torch.cat([columns[i][1], v], 2))
                found = state.extend(layer, keys=k, values=v)
                assert torch.equal(found[0], columns[i][0])
                assert torch.equal(found[1], columns[i][1])
                running[i] = 0.5 * running[i] + argument
                state.parts[layer].running.mul_(0.5).add_(argument)
            state.advance(new_positions, is_prompt=True)
        assert torch.equal(state.positions, positions)
        for i, layer in enumerate(LAYERS):
            assert torch.equal(state.parts[layer].running, running[i])
            assert torch.equal(state.parts[layer].memory, memories[i])


searches = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("reorder"), st.integers(1, 4)),
        st.tuples(st.just("narrow"), st.integers(1, 4)),
        st.tuples(st.just("leave"), st.integers(0, 2)),
    ),
    min_size=3,
    max_size=14,
)
Written = list[list[list[tuple[Tensor, int]]]]  # sentence, hypothesis -> its keys (H, D) and their positions


@settings(max_examples=60)
@given(operations=searches, seed=st.integers(0, 10**6))
def test_a_hypothesis_sees_what_it_and_its_ancestors_wrote(operations: list[tuple[str, int]], seed: int) -> None:
    """Compare with lists of keys that are copied from parent to child; `narrow`: all continue one parent."""
    rng = torch.Generator().manual_seed(seed)
    state, written = new_state(3), [[[]], [[]], [[]]]
    memory = torch.randn(3, H, 5, D, generator=rng)
    state.store_memory(LAYERS[0], memory=memory)
    for name, n in operations:
        if name == "step":
            for _ in range(n):
                say(state, written, rng)
        elif name == "leave" and len(written) > 1:
            staying = [i for i in range(len(written)) if i != n % len(written)]
            state.select(torch.tensor(staying))
            written, memory = [written[i] for i in staying], memory[staying]
        elif name in ("reorder", "narrow"):
            parents = torch.randint(0, len(written[0]), (len(written), n), generator=rng)
            parents = parents[:, :1].expand(-1, n) if name == "narrow" else parents
            state.reorder(parents)
            written = copied(written, parents)
        assert state.width == len(written[0])
        assert torch.equal(
            state.parts[LAYERS[0]].memory, memory
        )  # one for each sentence, independent of its hypotheses


def copied(written: Written, parents: Tensor) -> Written:
    return [[list(row[i]) for i in of] for row, of in zip(written, parents.tolist(), strict=True)]


def say(state: DecodingState, written: Written, rng: torch.Generator) -> None:
    """Run one step of every hypothesis, and compare the keys that each one sees."""
    b, k = len(written), len(written[0])
    positions = state.position().view(b, k)
    assert positions.tolist() == [[len(said) for said in row] for row in written]
    new = torch.randn(b, H, k, D, generator=rng)
    places, past = state.key_positions(positions), state.own_past()
    for row, keys in zip(written, new, strict=True):
        for i, said in enumerate(row):
            said.append((keys[:, i], len(said)))
    for layer in LAYERS:
        keys, values = state.extend(layer, keys=new, values=-new)
        first = new[:, 0, :, 0].flatten()[:, None]  # (N, 1), the first number of each new key
        running = state.parts[layer].running
        running.mul_(0.5).add_(first)
        for i, row in enumerate(written):
            for j, said in enumerate(row):
                seen = torch.ones_like(places[i], dtype=torch.bool) if past is None else past[i, j]
                assert places[i][seen].tolist() == [place for _, place in said]
                assert torch.equal(keys[i][:, seen], torch.stack([key for key, _ in said], 1))
                assert torch.equal(values[i][:, seen], -torch.stack([key for key, _ in said], 1))
                expected = torch.zeros(W)
                for key, _ in said:
                    expected = 0.5 * expected + key[0, 0]
                assert torch.equal(running[i * k + j], expected)
    state.advance(positions)


def test_columns_that_nobody_sees_make_way_before_room_is_doubled() -> None:
    """Rows lose different numbers of columns; those still in use stay, in their order."""
    state, written, rng = new_state(2), [[[]], [[]]], torch.Generator().manual_seed(0)
    for step in range(40):
        parents = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1] if step % 8 else [0, 0, 0, 0]])[:, : 1 if step == 0 else 4]
        parents = parents % len(written[0])
        state.reorder(parents)
        written = copied(written, parents)
        say(state, written, rng)
    assert state.parts[LAYERS[0]].keys.shape[2] <= 128  # 157 were written, for which 256 would be made


def test_how_hypotheses_look_at_the_source_is_worked_out_once_for_the_same_sentences() -> None:
    state, made = new_state(3), []
    state.memory_positions = ragged(4, 2, 3)

    def make() -> Any:
        made.append(object())
        return made[-1]

    assert state.get_memory_plan(make) is state.get_memory_plan(make) is made[0]
    state.reorder(torch.tensor([[0, 0]] * 3))
    assert state.get_memory_plan(make) is made[0]
    state.select(torch.tensor([2, 0]))
    assert state.get_memory_plan(make) is made[1]
    assert torch.equal(state.memory_positions, ragged(4, 2, 3)[[2, 0]])


def test_each_row_goes_on_after_its_own_last_token() -> None:
    state = new_state(3)
    assert state.position().tolist() == [0, 0, 0]
    state.advance(torch.tensor([[0, 1, 2], [0, -1, -1], [0, 1, -1]]), is_prompt=True)  # a prompt, padded on the right
    for expected in ([3, 1, 2], [4, 2, 3]):
        assert state.position().tolist() == expected
        state.advance(state.position()[:, None])
    state.select(torch.tensor([1, 1]))
    assert state.position().tolist() == [3, 3]
    state.reorder(torch.tensor([[0, 0], [0, 0]]))
    assert state.position().tolist() == [3, 3, 3, 3]


def test_rows_that_may_look_at_every_column_are_known() -> None:
    state = new_state(2)
    state.advance(ragged(3, 3), is_prompt=True)
    assert state.sees_all()
    state.advance(state.position()[:, None])
    assert state.sees_all()
    state.reorder(torch.tensor([[0, 0], [0, 0]]))
    assert not state.sees_all()  # a hypothesis must not see the columns of another
    padded = new_state(2)
    padded.advance(ragged(3, 2), is_prompt=True)
    assert not padded.sees_all()


def test_room_doubles_rather_than_growing_each_step() -> None:
    state, views = new_state(1), []  # all kept alive, so that no address is used twice
    for i in range(40):
        k = torch.randn(1, H, 1, D)
        views.append(state.extend(LAYERS[0], keys=k)[0])
        state.advance(torch.tensor([[i]]))
    moves = {view.untyped_storage().data_ptr() for view in views}
    assert len(moves) == 3  # room for 16, 32 and 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_that_are_allocated(dtype: torch.dtype) -> None:
    """A static state allocates what was declared; states of fixed size are at least in fp32."""
    position = torch.zeros(6, dtype=torch.int32)
    static = StaticDecodingState(MODEL, (3, 2), 10, 7, dtype, position=position)
    size = dtype.itemsize
    by_hand = 2 * (2 * 6 * H * 10 * D * size + 6 * W * 4 + 3 * H * 7 * D * size)
    assert static.nbytes() == state_bytes(MODEL, 3, 2, 10, 7, dtype) == by_hand


# ---- reading prompts step by step -------------------------------------------------------------------------------------


class Decaying(Mixer):
    """y_t = sum_i 2^-i x_{t-i}, with a state of fixed size, the default `prefill`, and a count of the tokens read."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.width = width
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])  # (T, T); padding stands on the right
        return torch.where(back >= 0, 2.0**-back, 0.0) @ x * self.scale

    def state(self) -> dict[str, Storage]:
        return {"sum": PerRow((self.width,)), "read_so_far": PerRow((), torch.int64)}

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        kept.sum.mul_(0.5).add_(x)
        kept.read_so_far += 1
        self.real = ctx.real
        return kept.sum * self.scale


@torch.no_grad()
def test_a_prompt_that_is_read_step_by_step_leaves_the_state_after_each_rows_last_token() -> None:
    c, lengths, more = 8, (5, 2, 7), 3
    config = model_config(d_model=c, n_heads=2, n_kv_heads=2, d_head=4, dropout=0.0)
    mixers = [Decaying(c), Decaying(c)]
    stack = Stack(config, (PreNormBlock(config, {"self": mixer}) for mixer in mixers), CAUSAL, "decoder").eval()
    x = torch.randn(len(lengths), max(lengths) + more, c)
    wanted = stack(x, torch.arange(x.shape[1]).expand(len(x), -1))  # a whole row: causal, so any beginning is the same

    state, positions = DecodingState(stack, len(lengths), DEVICE, x.dtype), ragged(*lengths)
    prompt = x[:, : max(lengths)].masked_fill(positions[..., None] == PAD_POSITION, 1e6)
    found, real = stack(prompt, positions, state=state), positions > PAD_POSITION
    torch.testing.assert_close(found[real], wanted[:, : max(lengths)][real])
    assert mixers[0].real.tolist() == [False, False, True]  # of the last column
    rows = torch.arange(len(x))
    for i in range(more):
        for mixer in mixers:
            assert state.parts[mixer].read_so_far.tolist() == [n + i for n in lengths]
        at = torch.tensor(lengths) + i
        assert torch.equal(state.position(), at)
        torch.testing.assert_close(stack.step(x[rows, at], state), wanted[rows, at])


# ---- the static state -------------------------------------------------------------------------------------------------

VOCAB, ROOM = 30, 24
STYLES: dict[str, dict[str, object]] = {
    "attention": {"positions": "learned"},
    "rotary": {"positions": "rope", "n_kv_heads": 1},
    "window and bias": {"positions": "alibi", "attention.window": 3},
    "rotary window": {"positions": "rope", "attention.window": 4},
    "contextual window": {"positions": "cope", "cope.positions": 6, "attention.window": 3},
    "a scheme for each layer": {"positions": "fire"},
    "contextual": {"positions": "cope", "cope.positions": 6},
    "convolution": {"mixer": ("convolution",), "n_heads": 0, "convolution.dilations": (1, 3), "positions": "none"},
    "both in turn": {"mixer": ("convolution", "attention"), "positions": "rope"},
}
styles = pytest.mark.parametrize("style", STYLES)


@pytest.fixture
def torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn Triton's interpreter off: kernels are tested elsewhere."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def gpt(style: str) -> GPT:
    torch.manual_seed(4)
    sizes = {"preset": "gpt-tiny", "n_decoder_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "max_len": ROOM}
    model = GPT(model_config(**{**sizes, "target_vocab": VOCAB, **STYLES[style]}))  # type: ignore[arg-type]
    return stirred(model).eval()


def stirred(model: Any) -> Any:
    """Add noise to all parameters, since schemes such as CoPE are initialized to zero."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def prompts(*lengths: int) -> Tensor:
    ids = torch.randint(VOCAB, (len(lengths), max(lengths)))
    return ids.where(ragged(*lengths) > PAD_POSITION, PAD_POSITION)


class Slots:
    """A static state with the positions and owners of its rows."""

    def __init__(self, model: nn.Module, b: int, k: int, source: int = 0) -> None:
        self.k = k
        self.position = torch.zeros(b * k, dtype=torch.int32)
        self.owner = torch.arange(b * k, dtype=torch.int32)[:, None].repeat(1, ROOM)
        owner = self.owner if k > 1 else None
        self.state = StaticDecodingState(
            model, (b, k), ROOM, source, torch.float32, position=self.position, owner=owner
        )

    def enter(self, slots: list[int], other: DecodingState, which: list[int]) -> None:
        self.state.fill_slots(torch.tensor(slots), other, torch.tensor(which))
        for slot, sentence in zip(slots, which, strict=True):
            rows = slice(slot * self.k, (slot + 1) * self.k)
            self.position[rows] = int(other.next[sentence])
            self.owner[rows] = torch.arange(rows.start, rows.stop, dtype=torch.int32)[:, None]

    def move(self, parents: Tensor) -> None:
        """Reorder beams by parent (N,) after a step."""
        rows = torch.arange(len(parents))
        self.owner[rows, self.position.long()] = rows.int()  # what each has just written
        self.owner.copy_(self.owner[parents])
        self.state.reorder(parents)
        self.position += 1


@styles
@torch.no_grad()
@pytest.mark.usefixtures("torch_operations")
def test_rows_at_their_own_positions_in_slots_that_are_entered_again(style: str) -> None:
    model = gpt(style)
    slots = Slots(model, 3, 1)
    rows = torch.arange(3)

    def steps(n: int, states: list[tuple[list[int], DecodingState]]) -> None:
        """Compare n steps of growing states with those of the slots that hold their sentences."""
        for _ in range(n):
            tokens = torch.randint(VOCAB, (3,))
            found = model.step(tokens, slots.state)
            for held, state in states:
                torch.testing.assert_close(found[held], model.step(tokens[held], state), rtol=1e-4, atol=1e-5)
            slots.move(rows)

    _, first = model.begin(prompts(7, 3, 5))
    slots.enter([2, 0, 1], first, [0, 1, 2])  # sentences in other slots than their own
    first.select(torch.tensor([1, 2, 0]))
    steps(4, [([0, 1, 2], first)])
    _, second = model.begin(prompts(2))  # shorter than what the slot holds
    slots.enter([2], second, [0])
    first.select(torch.tensor([0, 1]))
    steps(3, [([0, 1], first), ([2], second)])
    _, third = model.begin(prompts(4, 9, 1))  # one of several, with padding, longer than what the slot holds
    slots.enter([0], third, [1])
    third.select(torch.tensor([1]))
    first.select(torch.tensor([1]))
    steps(5, [([0], third), ([1], first), ([2], second)])


WINDOWS = [style for style in STYLES if "window" in style]


@pytest.mark.parametrize("style", WINDOWS)
@torch.no_grad()
def test_a_sliding_window_keeps_no_more_than_two_windows(style: str) -> None:
    """Steps after prompts of any length say what whole rows say, and a long text needs no more memory than a short one."""
    model, window = gpt(style), int(STYLES[style]["attention.window"])  # type: ignore[call-overload]
    for lengths in ((2, 9, 14), (12, 12), (1,)):
        ids = torch.randint(VOCAB, (len(lengths), ROOM))
        wanted = model(ids)
        rows, at = torch.arange(len(ids)), torch.tensor(lengths)
        prompt = ids[:, : max(lengths)].where(ragged(*lengths) > PAD_POSITION, PAD_POSITION)
        _, state = model.begin(prompt)
        for _ in range(ROOM - max(lengths)):
            assert state.filled <= 2 * window
            assert all(x.shape[2] <= 8 * 16 for kept in state.parts.values() for x in vars(kept).values())
            found = model.step(ids[rows, at], state)
            torch.testing.assert_close(found, wanted[rows, at], rtol=1e-4, atol=1e-5)
            at += 1


@torch.no_grad()
def test_memory_of_a_long_prompt_that_a_window_has_left_behind_is_given_back() -> None:
    torch.manual_seed(4)
    sizes = {"preset": "gpt-tiny", "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 24, "max_len": 1000}
    model = GPT(model_config(**{**sizes, "target_vocab": VOCAB, "positions": "rope", "attention.window": 4})).eval()  # type: ignore[arg-type]
    _, short = model.begin(prompts(9))
    _, long = model.begin(prompts(1000))
    assert long.nbytes() <= short.nbytes()


@pytest.mark.parametrize("style", WINDOWS)
@torch.no_grad()
def test_the_static_cache_of_a_sliding_window_does_not_grow_with_the_longest_text(style: str) -> None:
    model = gpt(style)
    window = int(STYLES[style]["attention.window"])  # type: ignore[call-overload]
    position = torch.zeros(2, dtype=torch.int32)
    sizes = {n: StaticDecodingState(model, (2, 1), n, 0, torch.float32, position=position).nbytes() for n in (8, ROOM)}
    assert sizes[8] == sizes[ROOM] == 2 * 2 * 2 * 16 * window * 4  # keys and values of two layers
    assert sizes[ROOM] == state_bytes(model, 2, 1, ROOM, 0, torch.float32)


@styles
@torch.no_grad()
@pytest.mark.usefixtures("torch_operations")
def test_hypotheses_change_places(style: str) -> None:
    model, b, k = gpt(style), 2, 3
    slots = Slots(model, b, k)
    _, state = model.begin(prompts(6, 2))
    search(model, slots, state, b, k)
    _, state = model.begin(prompts(1, 4))  # the same slots again
    search(model, slots, state, b, k)


@torch.no_grad()
@pytest.mark.usefixtures("torch_operations")
@pytest.mark.parametrize("mixer", ["attention", "convolution"])
def test_hypotheses_share_their_sentences_source(mixer: str) -> None:
    torch.manual_seed(4)
    sizes = {"n_encoder_layers": 1, "n_decoder_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 24, "max_len": ROOM}
    vocabularies = {"source_vocab": VOCAB, "target_vocab": VOCAB}
    config = model_config(**{"preset": "transformer-tiny", **sizes, **vocabularies, "mixer": (mixer,)})  # type: ignore[arg-type]
    model, b, k = stirred(Transformer(config)).eval(), 2, 3
    slots = Slots(model, b, k, source=8)
    search(model, slots, model.begin(prompts(8, 5)), b, k)
    search(model, slots, model.begin(prompts(3, 4)), b, k)  # shorter than what the slots held


def search(model: Any, slots: Slots, state: DecodingState, b: int, k: int) -> None:
    slots.enter([1, 0], state, [0, 1])
    state.select(torch.tensor([1, 0]))
    state.reorder(torch.zeros(b, k, dtype=torch.long))
    first = torch.arange(b)[:, None] * k
    for _ in range(10):
        tokens = torch.randint(VOCAB, (b * k,))
        torch.testing.assert_close(model.step(tokens, slots.state), model.step(tokens, state), rtol=1e-4, atol=1e-5)
        parents = torch.randint(k, (b, k))
        slots.move((first + parents).flatten())
        state.reorder(parents)


@torch.no_grad()
def test_a_slot_that_is_cleared_begins_as_if_nothing_was_read() -> None:
    model = gpt("convolution")
    slots = Slots(model, 2, 1)
    _, state = model.begin(prompts(3, 4))
    slots.enter([0, 1], state, [0, 1])
    slots.state.clear_slots(torch.tensor([1]))
    slots.position[1] = 0
    tokens = torch.randint(VOCAB, (2,))
    found = model.step(tokens, slots.state)
    torch.testing.assert_close(found[0], model.step(tokens, state)[0])
    torch.testing.assert_close(found[1], model(tokens[1:, None])[0, 0])
