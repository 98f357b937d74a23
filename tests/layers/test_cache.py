"""The growing cache against plain concatenation, under any sequence of steps and selections."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from regard.layers.cache import NO_CACHE, KeysValues, StepCache
from torch import nn

H, D = 2, 3
LAYERS = [nn.Identity(), nn.Identity()]
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
def test_the_cache_is_concatenation_and_indexing(operations: list[tuple[str, object]], rows: int) -> None:
    cache = StepCache()
    kept = [(torch.empty(rows, H, 0, D), torch.empty(rows, H, 0, D)) for _ in LAYERS]
    positions = torch.empty(rows, 0, dtype=torch.long)
    for name, argument in operations:
        if name == "select":
            assert isinstance(argument, list)
            chosen = torch.tensor([i % rows for i in argument])
            kept = [(k[chosen], v[chosen]) for k, v in kept]
            positions, rows = positions[chosen], len(chosen)
            cache.select(chosen)
            continue
        assert isinstance(argument, int)
        new_positions = torch.randint(-1, 50, (rows, argument))
        positions = torch.cat([positions, new_positions], 1)
        assert torch.equal(cache.key_positions(new_positions), positions)
        for i, layer in enumerate(LAYERS):
            k, v = torch.randn(2, rows, H, argument, D)
            kept[i] = (torch.cat([kept[i][0], k], 2), torch.cat([kept[i][1], v], 2))
            found = cache.extend(layer, k, v)
            assert torch.equal(found[0], kept[i][0])
            assert torch.equal(found[1], kept[i][1])
        cache.advance(new_positions)
        assert cache.filled == positions.shape[1]


searches = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("follow"), st.integers(1, 4)),
        st.tuples(st.just("narrow"), st.integers(1, 4)),
        st.tuples(st.just("leave"), st.integers(0, 2)),
    ),
    min_size=3,
    max_size=14,
)


@settings(max_examples=60)
@given(operations=searches, seed=st.integers(0, 10**6))
def test_a_hypothesis_sees_what_it_and_its_ancestors_wrote(operations: list[tuple[str, int]], seed: int) -> None:
    """Beside lists of keys that are copied from parent to child; `narrow`: all go on from one, so that old columns die."""
    rng = torch.Generator().manual_seed(seed)
    cache, written = StepCache(), [[[]], [[]], [[]]]  # sentence, hypothesis -> its keys (H, D) and their positions
    for name, n in operations:
        width = len(written[0])
        if name == "step":
            for _ in range(n):
                say(cache, written, rng)
        elif name == "leave" and len(written) > 1:
            kept = [i for i in range(len(written)) if i != n % len(written)]
            cache.select(torch.tensor(kept))
            written = [written[i] for i in kept]
        elif name in ("follow", "narrow"):
            parents = torch.randint(0, width, (len(written), n), generator=rng)
            parents = parents[:, :1].expand(-1, n) if name == "narrow" else parents
            cache.follow(parents)
            written = [[list(row[i]) for i in of] for row, of in zip(written, parents.tolist(), strict=True)]


def say(cache: StepCache, written: list[list[list[tuple[torch.Tensor, int]]]], rng: torch.Generator) -> None:
    b, k = len(written), len(written[0])
    positions = cache.next_positions(torch.zeros(b * k, dtype=torch.long))
    assert positions.tolist() == [[len(said) for said in row] for row in written]
    new = torch.randn(b, H, k, D, generator=rng)
    places, past = cache.key_positions(positions), cache.own_past()
    for row, keys in zip(written, new, strict=True):
        for i, said in enumerate(row):
            said.append((keys[:, i], len(said)))
    for layer in LAYERS:
        keys, values = cache.extend(layer, new, -new)
        for i, row in enumerate(written):
            for j, said in enumerate(row):
                seen = torch.ones_like(places[i], dtype=torch.bool) if past is None else past[i, j]
                assert places[i][seen].tolist() == [place for _, place in said]
                assert torch.equal(keys[i][:, seen], torch.stack([key for key, _ in said], 1))
                assert torch.equal(values[i][:, seen], -torch.stack([key for key, _ in said], 1))
    cache.advance(positions)


def test_columns_that_nobody_sees_make_way_before_room_is_doubled() -> None:
    """Rows that lose different columns, one more than the other; what is seen stays, in its order."""
    cache, written, rng = StepCache(), [[[]], [[]]], torch.Generator().manual_seed(0)
    for step in range(40):
        parents = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1] if step % 8 else [0, 0, 0, 0]])[:, : 1 if step == 0 else 4]
        parents = parents % len(written[0])
        cache.follow(parents)
        written = [[list(row[i]) for i in of] for row, of in zip(written, parents.tolist(), strict=True)]
        say(cache, written, rng)
    assert cache.keys[LAYERS[0]].shape[2] <= 128  # 157 were written, for which 256 would be made


def test_memory_is_projected_once_and_follows_its_sentences() -> None:
    cache, calls = StepCache(), []
    keys, values = torch.randn(2, 4, H, 5, D)

    def project() -> KeysValues:
        calls.append(1)
        return keys, values

    for _ in range(3):
        assert cache.memory(LAYERS[0], project) == (keys, values)
    assert len(calls) == 1
    cache.select_memory(torch.tensor([3, 1]))
    k, v = cache.memory(LAYERS[0], project)
    assert len(calls) == 1
    assert torch.equal(k, keys[[3, 1]])
    assert torch.equal(v, values[[3, 1]])
    cache.memory(LAYERS[1], project)  # another layer projects for itself
    assert len(calls) == 2


def test_without_a_cache_nothing_is_kept() -> None:
    k, v = torch.randn(2, 1, H, 4, D)
    positions = torch.arange(4)[None]
    assert NO_CACHE.extend(LAYERS[0], k, v) == (k, v)
    NO_CACHE.advance(positions)
    assert NO_CACHE.key_positions(positions) is positions
    calls: list[int] = []

    def project() -> KeysValues:
        calls.append(1)
        return k, v

    NO_CACHE.memory(LAYERS[0], project)
    NO_CACHE.memory(LAYERS[0], project)
    assert len(calls) == 2


def test_each_row_goes_on_after_its_own_last_token() -> None:
    cache, tokens = StepCache(), torch.tensor([7, 7, 7])
    assert cache.next_positions(tokens).tolist() == [[0], [0], [0]]
    cache.advance(torch.tensor([[0, 1, 2], [0, -1, -1], [0, 1, -1]]))  # a prompt, padded on the right
    for expected in ([[3], [1], [2]], [[4], [2], [3]]):
        positions = cache.next_positions(tokens)
        assert positions.tolist() == expected
        cache.advance(positions)
    cache.select(torch.tensor([1, 1]))
    assert cache.next_positions(tokens[:2]).tolist() == [[3], [3]]


def test_room_doubles_rather_than_growing_each_step() -> None:
    cache, views = StepCache(), []  # all kept alive, so that no address is used twice
    for i in range(40):
        k = torch.randn(1, H, 1, D)
        views.append(cache.extend(LAYERS[0], k, k)[0])
        cache.advance(torch.tensor([[i]]))
    moves = {view.untyped_storage().data_ptr() for view in views}
    assert len(moves) == 3  # room for 16, 32 and 64
