"""Slots of sentences on a GPU, and one captured step that serves them all (continuous batching).

What is captured is the model's own `step`, over a state whose memory never moves (layers/static_decoding_state.py), and what chooses
the next tokens. Whether a step can be captured is found out before it is: the first one runs with synchronisation forbidden,
and a part that asks the host for a number makes it fail there, not inside of a capture.

The host puts bursts of steps into the device's queue and looks at what they have done one burst later, so neither waits
for the other; slots whose sentence has ended are given to the next one meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import token_budget
from regard.decode.graphs.slots import Slots, advance, beam_step
from regard.decode.graphs.step_model import StepModel, stepped
from regard.decode.graphs.top_candidates import greedy_token, top_candidates
from regard.decode.sampling import choose_next
from regard.kernels.cuda_graph import GraphedCallable
from regard.layers.decoding_state import state_bytes
from regard.layers.part import find_failing_part
from regard.layers.static_decoding_state import StaticState

BURST = 4  # steps between two looks at the slots
MAX_ENGINES = 4  # engines of one model that stay ready
SHARE = 0.3  # of the memory that is free, for keys and values
RECORDED = ("length_penalty", "min_len", "stop", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass
class Snapshot:
    """What the slots held after a burst, on its way to the host."""

    burst: int
    packed: Tensor  # as Slots.packed
    gained: Tensor  # (N, L + 1) log p of each token, for K = 1
    done: torch.cuda.Event | None  # None: it is there

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class Engine:
    """B slots of K rows; `room` tokens may be written, `columns` of the cache hold them and what came before."""

    def __init__(
        self,
        model: Writing,
        options: DecodeConfig,
        dtype: torch.dtype,
        shape: tuple[int, int, int, int],
        width: int = 0,
    ) -> None:
        b, k, room, columns = shape
        device = next(model.parameters()).device
        self.options, self.k = options, k
        self.shadow = StepModel(model, dtype)
        self.config = model.config
        self.special = (self.config.suppress_tokens, self.config.eos_token_id)
        self.slots = Slots.make(b, k, room, device, columns - room, self.config.eos_token_id)
        self.state = StaticState(
            self.shadow.model, (b, k), columns, width, dtype, position=self.slots.position,
            owner=self.slots.owner if k > 1 else None, active=self.slots.active,
        )  # fmt: skip
        self.gained = torch.zeros((b * k, room + 1), device=device)  # the last column: of rows that rest
        self.seeds = torch.zeros(b * k, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None  # (N, V) tokens a row has read or written, where repeating them costs
        if options.repetition_penalty != 1:
            vocabulary = self.shadow.head.weight.shape[0]
            self.seen = torch.zeros((b * k, vocabulary), dtype=torch.bool, device=device)
        step = self._search if k > 1 else self._write
        self.step: Callable[[], None] = GraphedCallable(step) if device.type == "cuda" else step
        self.tried = device.type != "cuda"
        self.burst = 0
        self.home: tuple[Shelf, object] = (OrderedDict(), None)  # where it rests
        fields = (self.slots.packed, self.gained)
        self.hosts = [tuple(torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for x in fields) for _ in range(2)]

    def forget(self) -> None:
        """Its recording refers to it, so that it would stay in memory for a while."""
        self.step = lambda: None

    @torch.inference_mode()
    def try_step(self) -> None:
        """Run the first step, over slots that rest, with synchronisation forbidden: an error if it needs some. It is
        also the run that warms up what the capture needs."""
        if self.tried:
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
        self.tried = True

    def refresh(self) -> None:
        """Take over what training has changed since the last search."""
        self.shadow.refresh()
        self.state.refresh()

    def _search(self) -> None:
        slots = self.slots
        logits = self.shadow.step(slots.last, self.state)
        before = slots.step.clone() if self.state.rows else None
        beam_step(slots, *top_candidates(logits, 2 * self.k, slots.no_end, *self.special), self.options)
        if before is not None:
            self.state.reorder(self._parents(before))

    def _parents(self, before: Tensor) -> Tensor:
        """Return the rows (N,) that the rows of a step continue, itself for one that rests; `before` (B,) counts steps."""
        slots, b = self.slots, len(before)
        at = before.clamp(max=slots.parent.shape[1] - 1).long()
        chosen = slots.parent.gather(1, at[:, None, None].expand(-1, 1, self.k))[:, 0].long()  # (B, K)
        own = torch.arange(self.k, device=before.device).expand(b, -1)
        moved = (slots.step > before)[:, None]
        first = torch.arange(b, device=before.device)[:, None] * self.k
        return (first + torch.where(moved, chosen, own)).flatten()

    def _write(self) -> None:
        """One token more in every row, the likeliest or one drawn at random."""
        slots, options = self.slots, self.options
        if self.seen is not None:
            self.seen.scatter_(1, slots.last[:, None], True)
        logits = self.shadow.step(slots.last, self.state)
        if options.temperature == 0 and self.seen is None:
            token, log_prob = greedy_token(logits, slots.no_end, *self.special)
        else:
            token, log_prob = choose_next(logits, self.seen, slots.no_end, self.seeds, slots.step, options, self.config)
        self.gained.scatter_(1, slots.step[:, None].long(), log_prob[:, None])
        advance(slots, token, log_prob, options)

    def run(self, steps: int) -> Snapshot:
        """Queue a burst; nothing is waited for."""
        for _ in range(steps):
            self.step()
        packed, gained = self.hosts[self.burst % 2]
        packed.copy_(self.slots.packed, non_blocking=True)
        if self.k == 1:
            gained.copy_(self.gained, non_blocking=True)
        done = torch.cuda.Event() if packed.is_pinned() else None
        if done is not None:
            done.record()
        self.burst += 1
        return Snapshot(self.burst, packed, gained, done)

    def begin(self, rows: Tensor, seeds: Sequence[int], read: Sequence[Sequence[int]]) -> None:
        """What chance and repetition need to know of rows that enter: their seeds, and what they have read."""
        if self.options.temperature > 0:
            self.seeds[rows] = torch.tensor([seed % 2**63 for seed in seeds], device=rows.device)
        if self.seen is not None:
            for row, ids in zip(rows, read, strict=True):
                self.seen[row] = False
                self.seen[row].index_fill_(0, torch.tensor(ids, device=rows.device), True)

    def rows(self, slots: Sequence[int]) -> Tensor:
        """The numbers of all rows of these slots."""
        device = self.slots.last.device
        return (torch.tensor(slots, device=device)[:, None] * self.k + torch.arange(self.k, device=device)).flatten()


class NotCapturable(Exception):
    """A step that cannot be captured in a CUDA graph; the message says which part it is and why."""


Work = TypeVar("Work")


Writing = Any  # a model that has `step`, `head` and a configuration


class DecodeJob(Generic[Work]):
    """What waits for a slot, and which slot works on what. A context, at whose end the engine is given back; one in which
    something went wrong is not used again."""

    def __init__(self, engine: Engine, waiting: Iterable[Work]) -> None:
        self.engine, self.waiting = engine, deque(waiting)
        self.working: dict[int, Work] = {}
        self.left: dict[int, int] = {}  # slot -> most steps to go
        self.entered: dict[int, int] = {}  # slot -> bursts before it began
        self.free = list(range(len(engine.slots.active)))
        engine.slots.active.zero_()  # a job that was interrupted may have left some

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, GeneratorExit | KeyboardInterrupt):
            give_back(self.engine)

    def next(self) -> tuple[list[Work], list[int]]:
        """What enters now, and its slots: whatever waits, once a quarter is free, since reading stops all others."""
        slots = len(self.free) + len(self.working)
        n = min(len(self.free), len(self.waiting)) if 4 * len(self.free) >= slots else 0
        return [self.waiting.popleft() for _ in range(n)], [self.free.pop() for _ in range(n)]

    def begin(self, slot: int, work: Work, limit: int) -> None:
        self.working[slot], self.left[slot], self.entered[slot] = work, limit, self.engine.burst

    def burst(self) -> Snapshot | None:
        """None: all have come to their limits, if not to their ends."""
        steps = min(BURST, max(self.left.values(), default=0))
        if steps <= 0:
            return None
        for slot in self.left:
            self.left[slot] -= steps
        return self.engine.run(steps)

    def seen_by(self, snapshot: Snapshot) -> list[int]:
        """Slots whose present work the snapshot shows."""
        return [slot for slot in self.working if self.entered[slot] < snapshot.burst]

    def end(self, slot: int) -> Work:
        del self.left[slot]
        self.free.append(slot)
        return self.working.pop(slot)


Shelf = OrderedDict[object, Engine]
ENGINES: WeakKeyDictionary[Writing, Shelf] = WeakKeyDictionary()  # engines that rest, by model: they go when it goes


def engine_for(model: Writing, options: DecodeConfig, shape: tuple[int, int, int, int], width: int = 0) -> Engine:
    """One that is ready, or a new one. It is the caller's alone until `give_back`."""
    shelf = ENGINES.setdefault(model, OrderedDict())
    dtype, weights = (
        dtype_of(model),
        [p.data_ptr() for m in stepped(model) for p in m._parameters.values() if p is not None],
    )
    key = (*(getattr(options, name) for name in RECORDED), dtype, shape, width, model.head.weight.device, *weights)
    engine = shelf.pop(key, None)
    if engine is None:
        while len(shelf) >= MAX_ENGINES:  # before the new one asks for memory
            shelf.popitem(last=False)[1].forget()
        try:
            engine = Engine(model, options, dtype, shape, width)
            engine.try_step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a part's step may do that it may not
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise NotCapturable(f"{find_failing_part(error)} cannot be captured: {reason}") from error
        engine.home = (shelf, key)
    engine.refresh()
    return engine


def give_back(engine: Engine) -> None:
    shelf, key = engine.home
    shelf[key] = engine


def slots_for(
    model: Writing, jobs: int, tokens: int, rows: tuple[int, int], options: DecodeConfig, width: int = 0
) -> int:
    """Return how many slots of `tokens` each the budget allows, and the memory that is free, with K rows of that many
    columns and sources of `width` tokens."""
    k, columns = rows
    device = model.head.weight.device
    most = token_budget(options, device) // tokens
    if device.type == "cuda":
        each = max(1, state_bytes(model, 1, k, columns, width, dtype_of(model)))
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for whoever asks
        free = torch.cuda.mem_get_info(device)[0] + held
        most = min(most, int(SHARE * free) // each)
    return min(power(jobs), power(max(1, most) + 1) // 2)


def dtype_of(model: Writing) -> torch.dtype:
    """What a model works in: its weights' precision, or that of the autocast around."""
    weight = model.head.weight
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def rounded(n: int, step: int = 32) -> int:
    """Sizes are few, so that an engine fits many jobs."""
    return -(-n // step) * step


def power(n: int) -> int:
    """The power of two at or above."""
    return 1 << max(0, n - 1).bit_length()
