"""Keys and values kept between decoding steps.

Self-attention appends one step's keys and values to those before. Cross-attention projects the memory once, at the first
step, and only reads from then on; it keeps one row a *sentence*, however many hypotheses the sentence has.
A layer is its own key.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]  # each (B, H, S, D)


class Cache:
    """No memory of earlier steps: training, and encoders."""

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> KeysValues:
        return k, v

    def memory(self, layer: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
        return project()

    def key_positions(self, positions: Tensor) -> Tensor:
        """Positions of the keys that queries at `positions` meet."""
        return positions

    def advance(self, positions: Tensor) -> None:
        """Called once per forward, after the last layer."""


NO_CACHE = Cache()


class StepCache(Cache):
    """Grows by doubling: a step writes in place, and reads a view of what is filled."""

    def __init__(self) -> None:
        self.keys: dict[nn.Module, Tensor] = {}  # layer -> (N, H, capacity, D)
        self.values: dict[nn.Module, Tensor] = {}
        self.crossed: dict[nn.Module, KeysValues] = {}  # layer -> (B, H, S, D) twice
        self.positions: Tensor | None = None  # (N, filled)
        self.spare: dict[tuple[int, ...], list[Tensor]] = {}  # memory of that shape to write to

    @property
    def filled(self) -> int:
        return 0 if self.positions is None else self.positions.shape[1]

    def next_positions(self, tokens: Tensor) -> Tensor:
        """Where one more token (N,) of each row stands, (N, 1): after its row's last, however long the others are."""
        if self.positions is None:
            return torch.zeros_like(tokens)[:, None]
        return self.positions.amax(1, keepdim=True) + 1

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> KeysValues:
        start, end = self.filled, self.filled + k.shape[2]
        for store, new in ((self.keys, k), (self.values, v)):
            if layer not in store or store[layer].shape[2] < end:
                store[layer] = _grown(store.get(layer), new, start, end)
            store[layer][:, :, start:end] = new
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def memory(self, layer: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
        if layer not in self.crossed:
            self.crossed[layer] = project()
        return self.crossed[layer]

    def key_positions(self, positions: Tensor) -> Tensor:
        return positions if self.positions is None else torch.cat([self.positions, positions], 1)

    def advance(self, positions: Tensor) -> None:
        self.positions = self.key_positions(positions)

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was: beams that survive, multiply or leave."""
        for store in (self.keys, self.values):
            for layer, x in store.items():
                store[layer] = self._moved(x, rows)
        if self.positions is not None:
            self.positions = self.positions[rows]

    def _moved(self, x: Tensor, rows: Tensor) -> Tensor:
        """Whole rows, into memory that a step before has left: asking for new memory takes longer than copying."""
        shape = (len(rows), *x.shape[1:])
        spare = self.spare.setdefault(shape, [])
        room = spare.pop() if spare else x.new_empty(shape)
        torch.index_select(x, 0, rows, out=room)
        if x.shape == room.shape:
            spare.append(x)
        return room

    def select_memory(self, sentences: Tensor) -> None:
        """The same for the memory's rows: sentences that are still being translated."""
        self.crossed = {layer: (k[sentences], v[sentences]) for layer, (k, v) in self.crossed.items()}


def _grown(old: Tensor | None, new: Tensor, filled: int, needed: int) -> Tensor:
    n, h, _, d = new.shape
    room = new.new_empty(n, h, max(16, 1 << (needed - 1).bit_length()), d)
    if old is not None:
        room[:, :, :filled] = old[:, :, :filled]
    return room
