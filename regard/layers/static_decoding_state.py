"""A decoding state with a static KV cache, over which a CUDA graph captures a decoding step.

It holds B slots for continuous batching, each with K rows for beam hypotheses; every slot is at its own position. A step
writes the keys and values of row n into row n of the cache, and `owner[n, j]` is the row that holds column j of the past of
row n, so that beam reordering moves no keys and values. States of fixed size are gathered by parent at the end of a step.
Positions are read from device memory, so one captured step serves every length.

The KV cache of sliding-window attention is a ring buffer: column j is kept at place j % window, where the token that leaves
the window is overwritten. So its memory does not grow with the longest text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.kernels.attention_functions import rotate
from regard.kernels.masks import FULL, PAD_POSITION, Mask, with_window
from regard.layers.attention_kernels import AttentionPlan, reference
from regard.layers.decoding_state import LENGTH, Columns, DecodingState, PartStorage, PerRow, declared_storage
from regard.layers.mixers.attention import Attention
from regard.layers.part import fused_step_of
from regard.layers.positions.scheme import PositionScheme
from regard.layers.stack import Stack


@dataclass
class PositionTables:
    """Rotations or biases of a position scheme, tabulated for the L positions of a slot."""

    cos: Tensor | None = None  # (L, D/2) fp32
    sin: Tensor | None = None
    bias: Tensor | None = None  # (H, L) fp32, by the distance from the query back to the key


@dataclass
class Layer:
    """How one self-attention layer attends in a step."""

    scheme: PositionScheme
    tables: PositionTables
    mask: Mask
    kernel: bool  # run the step kernel; otherwise the reference kernel, over gathered columns


class StaticDecodingState:
    """The decoding state of a CUDA-graph engine, which owns the tensors `position` (N,) and `owner` (N, L)."""

    static: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        slots: tuple[int, int],  # B, K
        columns: int,
        source: int,
        dtype: torch.dtype,
        *,
        position: Tensor,
        owner: Tensor | None = None,
        active: Tensor | None = None,  # (B,), 0 in empty slots
    ) -> None:
        b, k = slots
        device = position.device
        self.k, self.columns, self._position, self.owner, self._active = k, columns, position, owner, active
        self.fuse = b * k == 1 and _runs_kernels(position)
        self.parts: dict[nn.Module, PartStorage] = {}
        self.paths: dict[str, PartStorage] = {}
        self.storages: dict[str, dict[str, Any]] = {}
        self.rows: list[Tensor] = []
        for path, part, storages in declared_storage(model):
            kept = self.parts[part] = self.paths[path] = PartStorage()
            self.storages[path] = storages
            for name, storage in storages.items():
                if isinstance(storage, Columns):  # the KV cache (kv_cache) is allocated here
                    shape = (b * k, storage.heads, storage.room(columns), storage.width)
                    tensor = torch.zeros(shape, dtype=dtype, device=device)
                elif isinstance(storage, PerRow):
                    tensor = torch.zeros((b * k, *storage.shape), dtype=storage.dtype_for(dtype), device=device)
                    self.rows.append(tensor)
                else:
                    sizes = (source if size is LENGTH else size for size in storage.shape)
                    tensor = torch.zeros((b, *sizes), dtype=storage.dtype or dtype, device=device)
                kept.put(name, tensor)
        self.fused: dict[nn.Module, Any] = {}  # fused steps by part, if there is one row
        if self.fuse:
            found = ((part, fused_step_of(part)) for part in model.modules() if hasattr(part, "fused_step"))
            self.fused = {part: step for part, step in found if step is not None}
        self.memory_length = torch.zeros(b, dtype=torch.int32, device=device)
        self.layers: dict[nn.Module, Layer] = {}
        self.cross: dict[nn.Module, PositionScheme] = {}
        for stack in model.modules():
            if isinstance(stack, Stack) and stack.side != "encoder":
                self._add_stack(stack)
        self.refresh()

    def _add_stack(self, stack: Stack) -> None:
        """Decide for each attention layer of a stack how it attends in a step."""
        tables = [PositionTables() for _ in stack.schemes]
        for i, (mixer, block) in enumerate(zip(stack.mixers, stack.blocks, strict=True)):
            if mixer.attends:
                which = i % len(tables)
                scheme: Any = stack.schemes[which]
                fits = stack.d_head % 2 == 0 and stack.d_head <= 128
                kernel = fits and not scheme.contextual and (scheme.toeplitz or not scheme.relative)
                kernel = kernel and getattr(type(mixer), "attend", None) is Attention.attend
                mask = with_window(stack.mask, mixer.window)
                self.layers[mixer] = Layer(scheme, tables[which], mask, kernel)
            if "cross" in block.sublayers:  # type: ignore[operator]
                self.cross[block.get_submodule("sublayers.cross")] = stack.cross_scheme

    @torch.no_grad()
    def refresh(self) -> None:
        """Tabulate the position schemes again, since training may have changed their parameters."""
        done: set[int] = set()
        at = torch.arange(self.columns, device=self._position.device)
        for layer in self.layers.values():
            tables, scheme = layer.tables, layer.scheme
            if id(tables) in done:
                continue
            done.add(id(tables))
            rotation = scheme.rotation(at[None])  # (1, 1, L, D/2) twice
            if rotation is not None:
                tables.cos, tables.sin = (
                    _update_in_place(old, new[0, 0])
                    for old, new in zip((tables.cos, tables.sin), rotation, strict=True)
                )
            if scheme.relative and scheme.toeplitz:
                tables.bias = _update_in_place(tables.bias, scheme.bias(at, torch.zeros_like(at)))  # (H, L)

    def position(self) -> Tensor:
        """Return the position of the token that each row reads, (N,)."""
        return self._position

    def active(self, position: Tensor) -> Tensor:
        """Return the mask of active rows, (N,)."""
        if self._active is None:
            return torch.ones_like(position, dtype=torch.bool)
        return self._active.bool()[:, None].expand(-1, self.k).flatten()

    # ---- attention ----------------------------------------------------------------------------------------------------

    def attend(self, part: Any, qkv: Tensor, kept: Any) -> Tensor:
        """Write the new tokens' keys and values into the cache and attend to all columns up to them.

        qkv: (N, (H + 2G) * D) -> (N, H*D)."""
        layer = self.layers[part]
        scale = layer.scheme.scale or part.d_head**-0.5
        if layer.kernel:
            from regard.kernels.step_attention import self_attend

            tables = layer.tables
            return self_attend(
                qkv, kept.keys, kept.values, self._position, owner=self.owner, cos=tables.cos, sin=tables.sin,
                bias=tables.bias, back=layer.mask.back, scale=scale, heads=(part.n_heads, part.n_kv_heads),
            )  # fmt: skip
        return self._attend_gathered(part, qkv, kept, layer)

    def _attend_gathered(self, part: Any, qkv: Tensor, kept: Any, layer: Layer) -> Tensor:
        """Attend by the reference kernel over gathered columns, for schemes that the step kernel does not support."""
        n, device, room = len(qkv), qkv.device, kept.keys.shape[2]
        at, rows = self._position.long(), torch.arange(n, device=device)
        columns = torch.arange(room, device=device)[None] + (at[:, None] - room + 1).clamp(min=0)  # (N, room), in order
        q, k, v = part.split(qkv[:, None])  # (N, H, 1, D), (N, G, 1, D) twice
        if layer.tables.cos is not None:
            assert layer.tables.sin is not None
            rotation = layer.tables.cos[at][:, None, None], layer.tables.sin[at][:, None, None]  # (N, 1, 1, D/2)
            q, k = rotate(q, rotation), rotate(k, rotation)
        kept.keys[rows, :, at % room], kept.values[rows, :, at % room] = (
            k[:, :, 0].to(kept.keys.dtype),
            v[:, :, 0].to(kept.values.dtype),
        )
        where = rows[:, None].expand(n, room) if self.owner is None else self.owner.gather(1, columns).long()
        where = torch.where(columns == at[:, None], rows[:, None], where)
        keys, values = (
            x[where, :, columns % room].transpose(1, 2).to(q.dtype) for x in (kept.keys, kept.values)
        )  # (N, G, room, D)
        places = columns.masked_fill(columns > at[:, None], PAD_POSITION)
        unused = (places == PAD_POSITION)[:, None, :, None]  # an earlier sentence in the slot may have left NaN
        keys, values = keys.masked_fill(unused, 0), values.masked_fill(unused, 0)
        plan = AttentionPlan(reference, layer.mask, at[:, None], places, scheme=layer.scheme)
        return part.attend(q, keys, values, plan).transpose(1, 2).flatten(1)

    def attend_to_memory(self, part: Any, q: Tensor, kept: Any) -> Tensor:
        """Attend to the encoder output of each row's sentence, q: (N, H*D) -> (N, H*D)."""
        scheme = self.cross[part]
        if not (scheme.relative or scheme.contextual) and type(part).attend is Attention.attend:
            from regard.kernels.step_attention import cross_attend

            scale = scheme.scale or part.d_head**-0.5
            heads = part.n_heads, part.n_kv_heads
            return cross_attend(q, kept.keys, kept.values, self.memory_length, scale=scale, heads=heads)
        b, s = len(self.memory_length), kept.keys.shape[2]
        places = torch.arange(s, device=q.device).expand(b, -1)
        places = places.masked_fill(places >= self.memory_length[:, None], PAD_POSITION)
        grouped = q.view(b, self.k, -1, part.d_head).transpose(1, 2)  # (B, H, K, D)
        plan = AttentionPlan(reference, FULL, self._position.long().view(b, self.k), places, scheme=scheme)
        found = part.attend(grouped, kept.keys.to(q.dtype), kept.values.to(q.dtype), plan)
        return found.transpose(1, 2).reshape(q.shape)

    # ---- slots --------------------------------------------------------------------------------------------------------

    def fill_slots(self, slots: Tensor, other: DecodingState, which: Tensor) -> None:
        """Copy sentences `which` (n,) of a growing state into slots (n,), to each of the K rows of a slot."""
        rows = (slots[:, None] * self.k + torch.arange(self.k, device=slots.device)).flatten()
        copies = which.repeat_interleave(self.k)
        for path, held in other:
            kept = self.paths[path]
            for name, storage in self.storages[path].items():
                place, new = getattr(kept, name), getattr(held, name)
                if isinstance(storage, Columns):
                    if new is not None and storage.window:
                        place[rows] = self._ring(new, place.shape[2], other)[copies].to(place.dtype)
                    elif new is not None:
                        place[rows, :, : other.filled] = new[copies, :, : other.filled].to(place.dtype)
                elif isinstance(storage, PerRow):
                    place[rows] = new[copies].to(place.dtype)
                else:
                    self._fill_sentences(place, new, slots, which)
        if other.memory_positions is not None:
            lengths = (other.memory_positions > PAD_POSITION).sum(1, dtype=torch.int32)
            self.memory_length[slots] = lengths[which]

    @staticmethod
    def _ring(columns: Tensor, room: int, other: DecodingState) -> Tensor:
        """Return the last columns of a growing state as a ring buffer, (B, heads, room, width).

        The columns of a prompt are in order, padding after them; the first ones may have been dropped."""
        place = torch.arange(room, device=columns.device)
        last = other.next[:, None] - 1
        position = last - (last - place) % room  # the last one at each place; negative where there is none
        which = (position - other.positions[:, :1]).clamp(min=0)
        return columns.take_along_dim(which[:, None, :, None], 2)

    @staticmethod
    def _fill_sentences(place: Tensor, new: Tensor, slots: Tensor, which: Tensor) -> None:
        """Copy PerSentence tensors into slots; columns beyond a source become zero."""
        place.index_fill_(0, slots, 0)  # `place[slots] = 0` would synchronize with the host
        inside: tuple[Any, ...] = tuple(slice(0, size) for size in new.shape[1:])
        place[(slots, *inside)] = new[which].to(place.dtype)

    def clear_slots(self, slots: Tensor) -> None:
        """Set the states of slots (n,) to zero, for sentences that start without a prompt."""
        rows = (slots[:, None] * self.k + torch.arange(self.k, device=slots.device)).flatten()
        for tensor in self.rows:
            tensor.index_fill_(0, rows, 0)

    def reorder(self, parents: Tensor) -> None:
        """Reorder beams by parent: row n continues row parents[n] (N,). The engine updates `owner` for cached columns."""
        for tensor in self.rows:
            tensor.copy_(tensor[parents])

    def nbytes(self) -> int:
        return sum(x.nbytes for kept in self.parts.values() for x in vars(kept).values())


def _update_in_place(old: Tensor | None, new: Tensor) -> Tensor:
    """Copy `new` into the memory of `old`, which a captured step reads; without `old`, return it in fp32."""
    new = new.detach().float()
    return new.contiguous() if old is None else old.copy_(new)


def _runs_kernels(x: Tensor) -> bool:
    """Return whether Triton kernels can run on this tensor: on a GPU, or in Triton's interpreter."""
    if x.is_cuda:
        return True
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)
