"""The CUDA-graph decoding engine: slots of sentences on a GPU, and one captured step that serves them all.

The step that is captured is the model's own `step`, over a state in static memory (layers/static_decoding_state.py), with
the choice of the next tokens. Whether a step can be captured is tested beforehand: the first one runs with synchronisation
forbidden, so a part that reads a number back to the host fails there and not inside of a capture.

The host launches a few steps at a time and reads a snapshot of the slots while the next steps run, so neither waits for the
other. Slots whose sentence has ended are given to waiting sentences meanwhile (continuous batching).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import token_budget, with_allowed_tokens
from regard.decode.graphs.slots import Slots, advance, beam_step
from regard.decode.graphs.step_model import StepModel, modules_in_step
from regard.decode.graphs.top_candidates import greedy_token, top_candidates
from regard.decode.sampling import choose_next
from regard.kernels.cuda_graph import GraphedCallable
from regard.layers.decoding_state import Columns, declared_storage, state_bytes
from regard.layers.part import find_failing_part
from regard.layers.static_decoding_state import StaticDecodingState

STEPS_PER_SNAPSHOT = 4
MAX_ENGINES = 4  # idle engines that are kept for one model
CACHE_FRACTION = 0.3  # of the free GPU memory, for keys and values
# Decoding settings that are constants of a captured step.
CAPTURED_OPTIONS = (
    *("length_penalty", "length_norm", "min_len", "beam_stop", "allow_tokens"),
    *("temperature", "top_k", "top_p", "min_p", "epsilon", "repetition_penalty"),
)

Steppable = Any  # a model that has `step`, `head` and a configuration


@dataclass
class Snapshot:
    """A copy of the slots on the host, after a launch of steps; it may still be under way."""

    launch: int  # the number of launches until then
    packed: Tensor  # as Slots.packed
    token_log_probs: Tensor  # (N, L + 1) log p of each token, for K = 1
    done: torch.cuda.Event | None  # None: the copy is complete

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self.done is not None:
            self.done.synchronize()


class Engine:
    """B slots of K rows, and the decoding step for them, captured as a CUDA graph.

    `shape` is (B, K, room, columns): up to `room` tokens are written, and `columns` of the key/value cache hold these and
    the tokens before them. `width` is the length of the longest source."""

    def __init__(
        self,
        model: Steppable,
        options: DecodeConfig,
        dtype: torch.dtype,
        shape: tuple[int, int, int, int],
        width: int = 0,
    ) -> None:
        b, k, room, columns = shape
        device = next(model.parameters()).device
        self.options, self.k = options, k
        self.step_model = StepModel(model, dtype)
        self.config = with_allowed_tokens(model.config, options)
        self.special_tokens = (self.config.suppress_tokens, self.config.eos_token_id)
        storages = (storage for _, _, named in declared_storage(model) for storage in named.values())
        cached = k > 1 and any(isinstance(storage, Columns) for storage in storages)
        self.slots = Slots.make(b, k, room, device, columns - room, self.config.eos_token_id, cached)
        self.state = StaticDecodingState(
            self.step_model.model, (b, k), columns, width, dtype, position=self.slots.position,
            owner=self.slots.owner if cached else None, active=self.slots.active,
        )  # fmt: skip
        # One column more than tokens: an inactive row writes at its `step`, which may be `room`.
        self.token_log_probs = torch.zeros((b * k, room + 1), device=device)
        self.seeds = torch.zeros(b * k, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None  # (N, V) tokens a row has read or written, for the repetition penalty
        if options.repetition_penalty != 1:
            vocabulary = self.step_model.head.weight.shape[0]
            self.seen = torch.zeros((b * k, vocabulary), dtype=torch.bool, device=device)
        # On a GPU the step is captured as a CUDA graph (torch.cuda.CUDAGraph) and replayed.
        step = self._beam_step if k > 1 else self._single_step
        self.step: Callable[[], None] = GraphedCallable(step) if device.type == "cuda" else step
        self.is_capturable = device.type != "cuda"
        self.launches = 0
        self.cache_entry: tuple[EngineCache, object] = (OrderedDict(), None)  # where `return_engine` puts it
        fields = (self.slots.packed, self.token_log_probs)
        # Two copies on the host: one is read while the other is written.
        self.hosts = [tuple(torch.empty_like(x, device="cpu", pin_memory=x.is_cuda) for x in fields) for _ in range(2)]

    def release(self) -> None:
        """Drop the captured graph, which refers to this engine: the cycle would keep both in memory for a while."""
        self.step = lambda: None

    @torch.inference_mode()
    def check_capturable(self) -> None:
        """Run the first step, over inactive slots, with synchronisation forbidden: it raises an error if it needs one.

        This run also warms up what the capture needs."""
        if self.is_capturable:
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # torch warns that this mode is a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            self.step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
        self.is_capturable = True

    def refresh(self) -> None:
        """Copy the weights that training has changed since the last use."""
        self.step_model.refresh()
        self.state.refresh()

    def _beam_step(self) -> None:
        """Run one step of beam search in every slot."""
        slots = self.slots
        logits = self.step_model.step(slots.last, self.state)
        before = slots.step.clone() if self.state.rows else None
        beam_step(slots, *top_candidates(logits, 2 * self.k, slots.no_end, *self.special_tokens), self.options)
        if before is not None:
            self.state.reorder(self._parents(before))

    def _parents(self, before: Tensor) -> Tensor:
        """Return the parent (N,) of each row for beam reordering, in an inactive slot the row itself.

        `before` (B,) is `slots.step` before the step."""
        slots, b = self.slots, len(before)
        at = before.clamp(max=slots.parent.shape[1] - 1).long()
        chosen = slots.parent.gather(1, at[:, None, None].expand(-1, 1, self.k))[:, 0].long()  # (B, K)
        own = torch.arange(self.k, device=before.device).expand(b, -1)
        moved = (slots.step > before)[:, None]
        first = torch.arange(b, device=before.device)[:, None] * self.k
        return (first + torch.where(moved, chosen, own)).flatten()

    def _single_step(self) -> None:
        """Add one token to every row, the likeliest or a sampled one."""
        slots, options = self.slots, self.options
        if self.seen is not None:
            self.seen.scatter_(1, slots.last[:, None], True)
        logits = self.step_model.step(slots.last, self.state)
        if options.temperature == 0 and self.seen is None:
            token, log_prob = greedy_token(logits, slots.no_end, *self.special_tokens)
        else:
            token, log_prob = choose_next(logits, self.seen, slots.no_end, self.seeds, slots.step, options, self.config)
        self.token_log_probs.scatter_(1, slots.step[:, None].long(), log_prob[:, None])
        advance(slots, token, log_prob, options)

    def launch(self, steps: int) -> Snapshot:
        """Queue steps and a snapshot after them on the device, without waiting for either."""
        for _ in range(steps):
            self.step()
        packed, token_log_probs = self.hosts[self.launches % 2]
        packed.copy_(self.slots.packed, non_blocking=True)
        if self.k == 1:
            token_log_probs.copy_(self.token_log_probs, non_blocking=True)
        done = torch.cuda.Event() if packed.is_pinned() else None
        if done is not None:
            done.record()
        self.launches += 1
        return Snapshot(self.launches, packed, token_log_probs, done)

    def set_rows(self, rows: Tensor, seeds: Sequence[int], read: Sequence[Sequence[int]]) -> None:
        """Set the seeds of rows that enter, and the tokens that they have read, for the repetition penalty."""
        if self.options.temperature > 0:
            self.seeds[rows] = torch.tensor([seed % 2**63 for seed in seeds], device=rows.device)
        if self.seen is not None:
            for row, ids in zip(rows, read, strict=True):
                self.seen[row] = False
                self.seen[row].index_fill_(0, torch.tensor(ids, device=rows.device), True)

    def rows(self, slots: Sequence[int]) -> Tensor:
        """Return the numbers of all rows of these slots, (len(slots) * K,)."""
        device = self.slots.last.device
        return (torch.tensor(slots, device=device)[:, None] * self.k + torch.arange(self.k, device=device)).flatten()


class NotCapturable(Exception):
    """A step that cannot be captured in a CUDA graph; the message says which part it is and why."""


# ---- continuous batching -----------------------------------------------------------------------------------------------

Item = TypeVar("Item")


class GraphDecoding(Generic[Item]):
    """A queue of items that wait for a slot, and the items that the slots work on.

    It is a context manager that returns the engine at its end; after an error the engine is dropped instead."""

    def __init__(self, engine: Engine, waiting: Iterable[Item]) -> None:
        self.engine, self.waiting = engine, deque(waiting)
        self.working: dict[int, Item] = {}  # by slot
        self.left: dict[int, int] = {}  # slot -> at most this many steps to go
        self.entered: dict[int, int] = {}  # slot -> number of launches before its item entered
        self.free = list(range(len(engine.slots.active)))
        engine.slots.active.zero_()  # a job that was interrupted may have left active slots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, GeneratorExit | KeyboardInterrupt):
            return_engine(self.engine)

    def take_waiting(self) -> tuple[list[Item], list[int]]:
        """Return the items that are admitted now and their slots: none before a quarter of the slots is free.

        All other slots wait while sources or prompts are read, so many are read at once."""
        slots = len(self.free) + len(self.working)
        n = min(len(self.free), len(self.waiting)) if 4 * len(self.free) >= slots else 0
        return [self.waiting.popleft() for _ in range(n)], [self.free.pop() for _ in range(n)]

    def begin(self, slot: int, item: Item, limit: int) -> None:
        """Note that a slot works on an item, for at most `limit` steps."""
        self.working[slot], self.left[slot], self.entered[slot] = item, limit, self.engine.launches

    def launch_steps(self) -> Snapshot | None:
        """Launch the next steps and return the snapshot after them, or None if all slots have reached their limits."""
        steps = min(STEPS_PER_SNAPSHOT, max(self.left.values(), default=0))
        if steps <= 0:
            return None
        for slot in self.left:
            self.left[slot] -= steps
        return self.engine.launch(steps)

    def slots_in(self, snapshot: Snapshot) -> list[int]:
        """Return the slots whose present item had entered before the snapshot."""
        return [slot for slot in self.working if self.entered[slot] < snapshot.launch]

    def end(self, slot: int) -> Item:
        """Free a slot and return its item."""
        del self.left[slot]
        self.free.append(slot)
        return self.working.pop(slot)


# ---- engines that are kept ---------------------------------------------------------------------------------------------

EngineCache = OrderedDict[object, Engine]
ENGINES: WeakKeyDictionary[Steppable, EngineCache] = WeakKeyDictionary()  # idle engines, freed with their model


def take_engine(model: Steppable, options: DecodeConfig, shape: tuple[int, int, int, int], width: int = 0) -> Engine:
    """Return an idle engine of this shape, or a new one; nobody else uses it until `return_engine`."""
    cache = ENGINES.setdefault(model, OrderedDict())
    dtype = working_dtype(model)
    weights = [p.data_ptr() for m in modules_in_step(model) for p in m._parameters.values() if p is not None]
    captured = (getattr(options, name) for name in CAPTURED_OPTIONS)
    key = (*captured, dtype, shape, width, model.head.weight.device, *weights)
    engine = cache.pop(key, None)
    if engine is None:
        while len(cache) >= MAX_ENGINES:  # before the new one asks for memory
            cache.popitem(last=False)[1].release()
        try:
            engine = Engine(model, options, dtype, shape, width)
            engine.check_capturable()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a part's step may raise anything under these conditions
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise NotCapturable(f"{find_failing_part(error)} cannot be captured: {reason}") from error
        engine.cache_entry = (cache, key)
    engine.refresh()
    return engine


def return_engine(engine: Engine) -> None:
    """Keep an engine for the next job of its model."""
    cache, key = engine.cache_entry
    cache[key] = engine


def count_slots(
    model: Steppable, items: int, tokens: int, rows: tuple[int, int], options: DecodeConfig, width: int = 0
) -> int:
    """Return how many slots the token budget and the free memory allow: a power of two, no more than `items` need.

    A slot has `tokens` tokens, `rows` = (K rows, columns of the cache), and a source of `width` tokens."""
    k, columns = rows
    device = model.head.weight.device
    most = token_budget(options, device) // tokens
    if device.type == "cuda":
        each = max(1, state_bytes(model, 1, k, columns, width, working_dtype(model)))
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        free = torch.cuda.mem_get_info(device)[0] + unused
        most = min(most, int(CACHE_FRACTION * free) // each)
    return min(next_power_of_two(items), next_power_of_two(max(1, most) + 1) // 2)


def working_dtype(model: Steppable) -> torch.dtype:
    """Return the precision a model computes in: that of its weights, or that of an active autocast."""
    weight = model.head.weight
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def round_up(n: int, step: int = 32) -> int:
    """Round a size up to a multiple of `step`, so that one engine fits many jobs."""
    return -(-n // step) * step


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
