"""Keys and values kept between decoding steps.

Self-attention appends one step's keys and values to those before, a convolution its inputs. Cross-attention projects the
memory once, at the first step, and only reads from then on. All keep one row a *sentence*: its K hypotheses are K queries of
that row, which holds the keys of all of them, and `past` says which are its own. When hypotheses change places only `past`
changes; keys and values stay where they were written, until room is short: then those that nobody sees any more make way.
A layer is its own key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.layers.masks import NOWHERE

if TYPE_CHECKING:
    from regard.layers.attend import Plan

KeysValues = tuple[Tensor, Tensor]  # each (B, H, S, D)


class Cache:
    """No memory of earlier steps: training, and encoders."""

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> KeysValues:
        return k, v

    def inputs(self, layer: nn.Module, x: Tensor) -> Tensor:
        """All inputs (B, S, C) of a convolution, these last."""
        return x

    def memory(self, layer: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
        return project()

    def key_positions(self, positions: Tensor) -> Tensor:
        """Positions of the keys that queries at `positions` meet."""
        return positions

    def own_past(self) -> Tensor | None:
        """Which of these keys are a query's own past, (B, K, S), where a row holds the keys of K hypotheses."""
        return None

    def sees_all(self) -> bool:
        """Whether one more token of each row may look at every key there is: no padding, no other hypotheses."""
        return False

    def memory_plan(self, positions: Tensor, make: Callable[[], Plan]) -> Plan:
        """Return the plan for a memory with tokens at these positions, which `make` makes."""
        return make()

    def advance(self, positions: Tensor) -> None:
        """Called once per forward, after the last layer."""


NO_CACHE = Cache()


class StepCache(Cache):
    """Grows by doubling: a step writes in place, and reads a view of what is filled."""

    def __init__(self) -> None:
        self.keys: dict[nn.Module, Tensor] = {}  # layer -> (B, H, capacity, D), or a convolution's inputs
        self.values: dict[nn.Module, Tensor] = {}
        self.crossed: dict[nn.Module, KeysValues] = {}  # layer -> (B, H, S, D) twice
        self.positions: Tensor | None = None  # (B, filled)
        self.past: Tensor | None = None  # (B, K, filled) of each hypothesis; None: rows that are one each
        self.looked = 0  # columns when those that nobody sees were last looked for
        self.gapless = True  # no column of any row is padding
        self.planned: tuple[Tensor, Plan] | None = None  # the memory's positions, and the plan made for them

    @property
    def filled(self) -> int:
        return 0 if self.positions is None else self.positions.shape[1]

    @property
    def width(self) -> int:
        """K, the hypotheses of a row."""
        return 1 if self.past is None else self.past.shape[1]

    def next_positions(self, tokens: Tensor) -> Tensor:
        """Where one more token (N,) of each hypothesis stands, (B, K): after its row's last, however long the others are."""
        if self.positions is None:
            return torch.zeros_like(tokens).view(-1, self.width)
        return (self.positions.amax(1, keepdim=True) + 1).expand(-1, self.width)

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> KeysValues:
        return self._append(self.keys, layer, k), self._append(self.values, layer, v)

    def inputs(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self._append(self.keys, layer, x[:, None])[:, 0]

    def _append(self, store: dict[nn.Module, Tensor], layer: nn.Module, new: Tensor) -> Tensor:
        """(B, H, T, D) behind what is filled; all of it."""
        start, end = self.filled, self.filled + new.shape[2]
        if layer not in store or store[layer].shape[2] < end:
            store[layer] = _grown(store.get(layer), new, start, end)
        store[layer][:, :, start:end] = new
        return store[layer][:, :, :end]

    def memory(self, layer: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
        if layer not in self.crossed:
            k, v = project()
            self.crossed[layer] = k.contiguous(), v.contiguous()  # one head after the other: read at every step
        return self.crossed[layer]

    def key_positions(self, positions: Tensor) -> Tensor:
        return positions if self.positions is None else torch.cat([self.positions, positions], 1)

    def own_past(self) -> Tensor | None:
        if self.past is None:
            return None
        itself = torch.eye(self.width, dtype=torch.bool, device=self.past.device)
        return torch.cat([self.past, itself.expand(len(self.past), -1, -1)], 2)

    def sees_all(self) -> bool:
        return self.gapless and self.past is None

    def memory_plan(self, positions: Tensor, make: Callable[[], Plan]) -> Plan:
        if self.planned is None or self.planned[0] is not positions:
            self.planned = positions, make()
        return self.planned[1]

    def advance(self, positions: Tensor) -> None:
        if positions.shape[1] > self.width:  # a prompt; steps have no padding
            self.gapless = self.gapless and bool((positions > NOWHERE).all())
        self.positions, self.past = self.key_positions(positions), self.own_past()

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was, whole."""
        for store in (self.keys, self.values):
            for layer, x in store.items():
                store[layer] = x[rows]
        if self.positions is not None:
            self.positions = self.positions[rows]
        if self.past is not None:
            self.past = self.past[rows]

    def follow(self, parents: Tensor) -> None:
        """Hypothesis i of each row goes on from what its hypothesis parents[:, i] was; parents (B, K)."""
        if self.past is None and parents.shape[1] > 1:
            self.past = torch.ones(len(parents), 1, self.filled, dtype=torch.bool, device=parents.device)
        if self.past is not None:
            self.past = self.past.gather(1, parents[:, :, None].expand(-1, -1, self.filled))
            self._make_room()

    def _make_room(self) -> None:
        """Every eight steps, and before keys and values outgrow their room: drop the columns that no hypothesis sees, if
        these are a quarter. Reading keys and values is most of what attention costs."""
        assert self.past is not None
        room = next((x.shape[2] for x in self.keys.values()), 0)
        full = self.filled + self.width > room
        if not room or not (full or self.filled >= self.looked + 8 * self.width):
            return
        alive = self.past.any(1)  # (B, filled)
        count = int(alive.sum(1).max())
        self.looked = self.filled
        if 4 * count > 3 * self.filled:
            return
        self.looked = count
        kept = alive.byte().argsort(dim=1, descending=True, stable=True)[:, :count]  # in the order they were written
        for store in (self.keys, self.values):
            for x in store.values():
                x[:, :, :count] = x.take_along_dim(kept[:, None, :, None], 2)
        assert self.positions is not None
        self.positions = self.positions.where(alive, NOWHERE).gather(1, kept)
        self.past = self.past.take_along_dim(kept[:, None], 2)

    def select_memory(self, sentences: Tensor) -> None:
        """The same for the memory's rows: sentences that are still being translated."""
        self.crossed = {layer: (k[sentences], v[sentences]) for layer, (k, v) in self.crossed.items()}


def _grown(old: Tensor | None, new: Tensor, filled: int, needed: int) -> Tensor:
    n, h, _, d = new.shape
    room = new.new_empty(n, h, max(16, 1 << (needed - 1).bit_length()), d)
    if old is not None:
        room[:, :, :filled] = old[:, :, :filled]
    return room
