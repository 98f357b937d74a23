"""The decoding state: the KV cache (key/value cache, kv_cache) and recurrent states, kept between two decoding steps.

transformers calls such an object a cache (`past_key_values`).

A part declares its storage (`state()`). Allocation, beam reordering, slots of continuous batching, removal of finished
sentences and byte counts follow from the declaration:

| storage       | holds                            | beam reordering    | sentences leave  |
|---------------|----------------------------------|--------------------|------------------|
| `Columns`     | keys or values of tokens         | nothing moves      | rows are indexed |
| `PerRow`      | a fixed size per hypothesis      | gathered by parent | rows are indexed |
| `PerSentence` | computed once from the source    | nothing moves      | rows are indexed |

There are two states with one interface. `DecodingState` grows, for a search that the host steps through; the K hypotheses
of a sentence share one row of the KV cache, and the mask `past` says which columns belong to which hypothesis.
`StaticDecodingState` (layers/static_decoding_state.py) has fixed memory, for steps that are captured in a CUDA graph.

A step has N = B * K rows: K hypotheses of each of B sentences, those of a sentence one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.kernels.masks import PAD_POSITION
from regard.layers.attention_kernels import AttentionPlan

LENGTH = None  # in the shape of a PerSentence: the number of source tokens


@dataclass(frozen=True)
class Columns:
    """The KV cache of a part, keys or values: `width` numbers for each token and head, (B, heads, columns, width).

    Sliding-window attention needs no more than the last `window` tokens; 0: all of them."""

    heads: int
    width: int
    window: int = 0

    def room(self, columns: int) -> int:
        """Return how many of `columns` tokens are kept at most."""
        return min(columns, self.window or columns)

    def nbytes(self, sentences: int, hypotheses: int, columns: int, source: int, dtype: torch.dtype) -> int:
        return sentences * hypotheses * self.heads * self.room(columns) * self.width * dtype.itemsize


@dataclass(frozen=True)
class PerRow:
    """A tensor of this shape for each hypothesis; by default in the model's precision, but at least fp32."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def dtype_for(self, working: torch.dtype) -> torch.dtype:
        return self.dtype or torch.promote_types(working, torch.float32)

    def nbytes(self, sentences: int, hypotheses: int, columns: int, source: int, dtype: torch.dtype) -> int:
        return sentences * hypotheses * math.prod(self.shape) * self.dtype_for(dtype).itemsize


@dataclass(frozen=True)
class PerSentence:
    """A tensor of this shape for each sentence, in which `LENGTH` stands for the number of its source tokens."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None = None

    def nbytes(self, sentences: int, hypotheses: int, columns: int, source: int, dtype: torch.dtype) -> int:
        sizes = [source if size is LENGTH else size for size in self.shape]
        return sentences * math.prod(sizes) * (self.dtype or dtype).itemsize


Storage = Columns | PerRow | PerSentence


# The paths and storage of each model's parts, not the parts themselves: they would keep the model, which is the key, alive.
_DECLARED: WeakKeyDictionary[nn.Module, list[tuple[str, dict[str, Storage]]]] = WeakKeyDictionary()


def declared_storage(model: nn.Module) -> list[tuple[str, nn.Module, dict[str, Storage]]]:
    """Return the path, module and storage of every part of a model that declares storage for decoding."""
    if model not in _DECLARED:
        encoders = (stack for stack in model.modules() if getattr(stack, "side", "") == "encoder")
        never = {part for stack in encoders for part in stack.modules()}  # encoders read whole rows and never step
        stepped = ((path, part) for path, part in model.named_modules() if hasattr(part, "state") and part not in never)
        _DECLARED[model] = [(path, part.state()) for path, part in stepped if part.state()]
    return [(path, model.get_submodule(path), storage) for path, storage in _DECLARED[model]]


def state_bytes(
    model: nn.Module, sentences: int, hypotheses: int, columns: int, source: int, dtype: torch.dtype
) -> int:
    """Return the bytes of the decoding state with `columns` target tokens and `source` source tokens per sentence."""
    return sum(
        storage.nbytes(sentences, hypotheses, columns, source, dtype)
        for _, _, storages in declared_storage(model)
        for storage in storages.values()
    )


class PartStorage(SimpleNamespace):
    """The tensors that one part keeps between two steps, by the names of its `state()`.

    A part changes them in place: a captured step uses their memory, and a step of prompts restores padded rows in it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not vars(self).get(name):  # `kept.total += x` puts the same tensor there again
            raise RuntimeError(f"a step must change '{name}' in place (copy_, add_, ...), not put another tensor there")

    def put(self, name: str, value: Tensor | None) -> None:
        """Put a tensor into its place; only the decoding state does so."""
        vars(self)[name] = value


class DecodingState:
    """A growing decoding state, for a search that the host steps through.

    Self-attention appends the keys and values of each step to its cache, whose memory doubles when it is full. Beam
    reordering changes only the mask `past`. Columns that no hypothesis uses any more are dropped from time to time,
    because most of the cost of attention is reading keys and values. If all attention has a sliding window, so are those
    that the widest window has left behind.
    """

    static: ClassVar[bool] = False

    def __init__(self, model: nn.Module, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.parts: dict[nn.Module, PartStorage] = {}
        self.paths: dict[str, nn.Module] = {}
        self.rows: list[tuple[PartStorage, str]] = []  # the PerRow tensors
        self.sentences: list[tuple[PartStorage, str]] = []  # the PerSentence tensors
        self.source_axes: list[int | None] = []  # of these, the axis with the length of the source
        self.columns: list[tuple[PartStorage, str]] = []
        windows: list[int] = []
        for path, part, storages in declared_storage(model):
            kept = self.parts[part] = PartStorage()
            self.paths[path] = part
            for name, storage in storages.items():
                if isinstance(storage, PerRow):
                    self.rows.append((kept, name))
                    shape = (rows, *storage.shape)
                    kept.put(name, torch.zeros(shape, dtype=storage.dtype_for(dtype), device=device))
                else:
                    (self.columns if isinstance(storage, Columns) else self.sentences).append((kept, name))
                    windows += [storage.window] if isinstance(storage, Columns) else []
                    if isinstance(storage, PerSentence):
                        self.source_axes.append(storage.shape.index(LENGTH) + 1 if LENGTH in storage.shape else None)
                    kept.put(name, None)
        self.window = max(windows, default=0) if all(windows) else 0  # the widest; 0: some attention sees all columns
        self.length = 0  # an upper bound of the tokens of a hypothesis, known without a device synchronization
        self.next = torch.zeros(rows, dtype=torch.long, device=device)  # (B,) the position of the next token
        # (B, filled), of the columns of the KV cache; nothing is filled where no part declares Columns
        self.positions = torch.zeros((rows, 0), dtype=torch.long, device=device)
        self.past: Tensor | None = None  # (B, K, filled), the columns of each hypothesis; None: K = 1
        self.memory_positions: Tensor | None = None  # (B, S), of the source tokens
        self.memory_plan: AttentionPlan | None = None  # the plan of cross-attention, if it is the same in every step
        self.gapless = True  # no column is padding
        self.last_drop_check = 0  # `filled` when unused columns were last searched for

    # ---- positions ----------------------------------------------------------------------------------------------------

    @property
    def filled(self) -> int:
        return self.positions.shape[1]

    @property
    def width(self) -> int:
        """K, the number of hypotheses per sentence."""
        return 1 if self.past is None else self.past.shape[1]

    def position(self) -> Tensor:
        """Return the position of the next token of each hypothesis, (N,)."""
        return self.next if self.past is None else self.next[:, None].expand(-1, self.width).flatten()

    def key_positions(self, new: Tensor) -> Tensor:
        """Return the positions of all columns and of new tokens (B, T), (B, filled + T)."""
        return torch.cat([self.positions, new], 1) if self.filled else new

    def own_past(self) -> Tensor | None:
        """Return the mask of each hypothesis' own columns in the next step, (B, K, filled + K), or None if K = 1."""
        if self.past is None:
            return None
        itself = torch.eye(self.width, dtype=torch.bool, device=self.past.device)
        return torch.cat([self.past, itself.expand(len(self.past), -1, -1)], 2)

    def sees_all(self) -> bool:
        """Return whether the next token may attend to every column: no padding, and no other hypotheses."""
        return self.gapless and self.past is None

    def active(self, position: Tensor) -> Tensor:
        """Return the mask of active rows in a step at `position` (N,).

        All rows are active, except those at padding while a prompt is read step by step."""
        return position > PAD_POSITION

    # ---- KV cache -----------------------------------------------------------------------------------------------------

    def extend(self, part: nn.Module, **new: Tensor) -> list[Tensor]:
        """Append new columns (B, heads, T, width) to each named cache of a part; return all columns of each."""
        kept, start = self.parts[part], self.filled
        found = []
        for name, columns in new.items():
            end = start + columns.shape[2]
            room = getattr(kept, name)
            if room is None or room.shape[2] < end:
                room = _grow_kv_cache(room, columns, start, end)
                kept.put(name, room)
            room[:, :, start:end] = columns
            found.append(room[:, :, :end])
        return found

    def advance(self, new: Tensor, is_prompt: bool = False) -> None:
        """Mark new columns at positions (B, T) as filled; called once per forward pass, after the last layer.

        They are those of prompts, which may have padding, or one of each hypothesis."""
        if is_prompt:
            self.gapless = self.gapless and bool((new > PAD_POSITION).all())
        self.length += new.shape[1] if is_prompt else 1
        if self.columns:  # without a KV cache nothing grows with the text
            self.past, self.positions = self.own_past(), self.key_positions(new)
        self.next = self.next.maximum(new.amax(1) + 1) if is_prompt else self.next + 1
        if self.window and self.filled > 2 * self.window * self.width:
            self._drop_left_behind()

    # ---- selection ----------------------------------------------------------------------------------------------------

    def select(self, sentences: Tensor) -> None:
        """Keep only these sentences, with all of their hypotheses, in this order.

        On a CPU only those that change their places are copied: see `without_rows`."""
        in_place = not sentences.is_cuda
        if in_place:
            moved = (sentences != torch.arange(len(sentences))).nonzero().squeeze(1)
            sources = sentences[moved]
            in_place = bool((sources >= len(sentences)).all())  # none is overwritten
        for kept, name in (*self.columns, *self.sentences):
            tensor = getattr(kept, name)
            if tensor is not None and in_place:
                tensor[moved] = tensor[sources]
                kept.put(name, tensor[: len(sentences)])
            elif tensor is not None:
                kept.put(name, tensor[sentences])
        width = self.width
        for kept, name in self.rows:
            rows = getattr(kept, name)
            kept.put(name, rows[sentences] if width == 1 else rows.unflatten(0, (-1, width))[sentences].flatten(0, 1))
        self.next, self.positions = self.next[sentences], self.positions[sentences]
        if self.past is not None:
            self.past = self.past[sentences]
        if self.memory_positions is not None:
            self.memory_positions, self.memory_plan = self.memory_positions[sentences], None

    def join(self, other: DecodingState) -> None:
        """Append the sentences of another state of the same model and number of hypotheses (continuous batching).

        The states may have read different numbers of tokens: the columns that one of them lacks are padding in its rows."""
        filled = max(self.filled, other.filled)
        room = -(-(filled + 8 * self.width) // 32) * 32  # for some more steps
        for (kept, name), (theirs, _) in zip(self.columns, other.columns, strict=True):
            a, b = getattr(kept, name), getattr(theirs, name)  # None before the first step
            some = a if a is not None else b
            if some is not None:
                n = len(self.next)
                both = some.new_zeros(n + len(other.next), some.shape[1], room, some.shape[3])
                if a is not None:
                    both[:n, :, : self.filled] = a[:, :, : self.filled]
                if b is not None:
                    both[n:, :, : other.filled] = b[:, :, : other.filled]
                kept.put(name, both)
        for (kept, name), (theirs, _), axis in zip(self.sentences, other.sentences, self.source_axes, strict=True):
            a, b = getattr(kept, name), getattr(theirs, name)
            if a is not None and b is not None:
                kept.put(name, torch.cat([a, b]) if axis is None else concatenate_padded(a, b, axis))
        for (kept, name), (theirs, _) in zip(self.rows, other.rows, strict=True):
            kept.put(name, torch.cat([getattr(kept, name), getattr(theirs, name)]))
        self.gapless = self.gapless and other.gapless and self.filled == other.filled
        if self.past is not None and other.past is not None:
            self.past = concatenate_padded(self.past, other.past, 2, False)
        self.positions = concatenate_padded(self.positions, other.positions, 1, PAD_POSITION)
        self.next = torch.cat([self.next, other.next])
        if self.memory_positions is not None and other.memory_positions is not None:
            self.memory_positions = concatenate_padded(self.memory_positions, other.memory_positions, 1, PAD_POSITION)
            self.memory_plan = None
        self.length = max(self.length, other.length)

    def shorten(self) -> None:
        """Drop the columns, source tokens and positions that the remaining sentences do not use, after others have left.

        Without this, a batch that sentences join and leave for hours would grow without end."""
        if self.past is None and self.filled:
            alive = self.positions > PAD_POSITION
            self._drop_columns(alive, int(alive.sum(1).max()))
        if self.memory_positions is not None:
            width = int((self.memory_positions > PAD_POSITION).sum(1).max())  # sources are padded on the right
            if 4 * width <= 3 * self.memory_positions.shape[1]:
                for (kept, name), axis in zip(self.sentences, self.source_axes, strict=True):
                    tensor = getattr(kept, name)
                    if tensor is not None and axis is not None:
                        kept.put(name, tensor.narrow(axis, 0, width).contiguous())
                self.memory_positions, self.memory_plan = self.memory_positions[:, :width].contiguous(), None
        self.length = int(self.next.max())

    def reorder(self, parents: Tensor) -> None:
        """Reorder beams by parent: hypothesis i of each sentence continues hypothesis parents[:, i]; parents (B, K).

        transformers has `_reorder_cache(beam_idx)` for this.
        """
        if self.rows:
            first = torch.arange(len(parents), device=parents.device)[:, None] * self.width
            which = (first + parents).flatten()
            for kept, name in self.rows:
                kept.put(name, getattr(kept, name)[which])
        if self.past is None and parents.shape[1] > 1:
            self.past = (self.positions > PAD_POSITION)[:, None]
        if self.past is not None:
            self.past = self.past.gather(1, parents[:, :, None].expand(-1, -1, self.filled))
            self._drop_unseen()

    def _drop_unseen(self) -> None:
        """Drop the columns that no hypothesis uses, if they are at least a quarter.

        They are counted, which synchronizes with the device, only every eight steps and before the cache must grow."""
        assert self.past is not None
        rooms = [getattr(kept, name) for kept, name in self.columns]  # None before the first step
        room = max((x.shape[2] for x in rooms if x is not None), default=0)
        full = self.filled + self.width > room
        if not room or not (full or self.filled >= self.last_drop_check + 8 * self.width):
            return
        alive = self.past.any(1)  # (B, filled)
        count = int(alive.sum(1).max())
        self.last_drop_check = self.filled
        if 4 * count > 3 * self.filled:
            return
        self.last_drop_check = count
        self._drop_columns(alive, count)

    def _drop_left_behind(self) -> None:
        """Drop the columns that are outside every window of the next token.

        They are counted, which synchronizes with the device, only when a window's worth of them has gathered."""
        alive = (self.positions > PAD_POSITION) & (self.positions > self.next[:, None] - self.window)
        if self.past is not None:
            alive &= self.past.any(1)
        least, most = (int(n) for n in alive.sum(1).aminmax())
        self.gapless = self.gapless and least == most
        self.last_drop_check = most
        self._drop_columns(alive, most)

    def _drop_columns(self, alive: Tensor, count: int) -> None:
        """Keep `count` columns of each sentence, those of `alive` (B, filled) first, in their order.

        Memory that is mostly empty then, for example after a long prompt, is given back."""
        if count == self.filled:
            return
        kept_columns = alive.byte().argsort(dim=1, descending=True, stable=True)[:, :count]  # in their old order
        for kept, name in self.columns:
            x = getattr(kept, name)
            left = x.take_along_dim(kept_columns[:, None, :, None], 2)
            if x.shape[2] > 8 * max(16, count):
                kept.put(name, _grow_kv_cache(left, left, count, 2 * count))
            else:
                x[:, :, :count] = left
        self.positions = self.positions.where(alive, PAD_POSITION).gather(1, kept_columns)
        if self.past is not None:
            self.past = self.past.take_along_dim(kept_columns[:, None], 2)

    # ---- encoder output -----------------------------------------------------------------------------------------------

    def store_memory(self, part: nn.Module, **tensors: Tensor) -> None:
        """Store tensors that a part computed from the source, one row per sentence."""
        for name, tensor in tensors.items():
            self.parts[part].put(name, tensor)

    def get_memory_plan(self, make: Callable[[], AttentionPlan]) -> AttentionPlan:
        """Return the plan of cross-attention, which the first step makes."""
        if self.memory_plan is None:
            self.memory_plan = make()
        return self.memory_plan

    def nbytes(self) -> int:
        return sum(x.nbytes for kept in self.parts.values() for x in vars(kept).values() if x is not None)

    def __iter__(self) -> Iterator[tuple[str, PartStorage]]:
        """Yield the path and the storage of each part."""
        for path, part in self.paths.items():
            yield path, self.parts[part]


def without_rows(dropped: Tensor) -> Tensor:
    """Return the rows that are left without those that are `dropped` (B,), the last ones in the places of dropped ones.

    So few rows of a decoding state are copied, which is a good part of the time of a step with many sentences."""
    kept = (~dropped).nonzero().squeeze(1)  # (n,), in order
    if dropped.is_cuda:  # copying is cheap there, and waiting for the device is not
        return kept
    n = len(kept)
    rows = torch.arange(n)
    rows[dropped[:n]] = kept[kept >= n]
    return rows


def concatenate_padded(a: Tensor, b: Tensor, axis: int, value: float = 0) -> Tensor:
    """Concatenate along the first axis two tensors whose sizes along another axis may differ, padded with a value."""
    size = max(a.shape[axis], b.shape[axis])
    both = a.new_full((len(a) + len(b), *a.shape[1:axis], size, *a.shape[axis + 1 :]), value)
    both[: len(a)].narrow(axis, 0, a.shape[axis]).copy_(a)
    both[len(a) :].narrow(axis, 0, b.shape[axis]).copy_(b)
    return both


def _grow_kv_cache(old: Tensor | None, new: Tensor, filled: int, needed: int) -> Tensor:
    """Allocate a larger KV cache with the filled columns of the old one; its length is a power of two."""
    n, h, _, d = new.shape
    room = new.new_empty(n, h, max(16, 1 << (needed - 1).bit_length()), d)
    if old is not None:
        room[:, :, :filled] = old[:, :, :filled]
    return room
