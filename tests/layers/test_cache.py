"""The growing cache against plain concatenation, under any sequence of steps and selections."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from regard.layers.cache import NO_CACHE, KeysValues, StepCache

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
