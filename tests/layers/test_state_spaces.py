"""Mamba, RWKV-4 and hybrids: rows, packed rows, prompts in pieces and steps compute the same, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from configured import model_config
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.generation import eager_steps, make_request
from regard.decode.graphs.decoding import graph_steps
from regard.errors import RegardError
from regard.kernels.masks import PAD_POSITION, positions_of, prefix
from regard.layers.decoding_state import DecodingState
from regard.models import gpt
from regard.models.architectures import make_model, preset, resolve
from regard.models.gpt import GPT

VOCAB = 23
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
SMALL: dict[str, Any] = {"n_decoder_layers": 3, "d_model": 12, "target_vocab": VOCAB, "max_len": 64}
MAMBA: dict[str, Any] = {
    "preset": "mamba-tiny",
    "mixer": ("mamba",),
    "positions": "none",
    "norm_kind": "rms",
    "bias": False,
}
CHANNELS: dict[str, Any] = {
    "feedforward": ("rwkv-channel-mix",),
    "d_ff": 20,
    "positions": "none",
    "embedding_norm": True,
}
RWKV: dict[str, Any] = {"preset": "rwkv-tiny", "mixer": ("rwkv",), **CHANNELS}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {**MAMBA, "mamba.d_state": 3},
    "mamba-wide": {**MAMBA, "mamba.expand": 3, "mamba.kernel": 1, "mamba.dt_rank": 2, "bias": True},
    "rwkv": RWKV,
    "hybrid": {**MAMBA, "mixer": ("mamba", "rwkv", "attention"), "n_heads": 2, "positions": "rope"},
    "hybrid-layers": {**RWKV, "mixer": ("rwkv", "attention", "mamba"), "n_heads": 2},
}
ALL = pytest.mark.parametrize("name", MODELS)


def make(name: str) -> GPT:
    torch.manual_seed(0)
    model: Any = make_model(model_config(**{**SMALL, **MODELS[name]})).double().eval()
    with torch.no_grad():
        for p in model.parameters():  # no weight at a special value
            p.add_(torch.randn_like(p) * 0.2)
    return model


def rows(*lengths: int) -> Tensor:
    ids = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    return ids.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], PAD_POSITION)


@ALL
@torch.no_grad()
def test_prompts_and_steps_are_the_whole(name: str) -> None:
    model, ids = make(name), rows(9, 9, 9, 9)
    whole = model(ids)
    lengths = [5, 1, 3, 4]
    prompt = ids[:, :5].where(torch.arange(5) < torch.tensor(lengths)[:, None], PAD_POSITION)
    logits, state = model.begin(prompt)
    for step in range(4):
        wanted = torch.stack([whole[row, n + step - 1] for row, n in enumerate(lengths)])
        torch.testing.assert_close(logits, wanted, atol=1e-9, rtol=1e-9)
        logits = model.step(torch.stack([ids[row, n + step] for row, n in enumerate(lengths)]), state)


@ALL
@torch.no_grad()
def test_padding_changes_no_other_row(name: str) -> None:
    model, ids = make(name), rows(7, 2, 5)
    found = model(ids)
    for row, n in enumerate((7, 2, 5)):
        torch.testing.assert_close(found[row, :n], model(ids[row : row + 1, :n])[0], atol=1e-10, rtol=1e-10)


@ALL
def test_packed_documents_and_their_gradients_are_those_of_each_alone(name: str) -> None:
    model, lengths = make(name), (4, 1, 6)
    documents = [rows(n)[0] for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model.packed(torch.cat(documents)[None], positions)[0]
    alone = torch.cat([model(document[None])[0] for document in documents])
    torch.testing.assert_close(packed, alone, atol=1e-10, rtol=1e-10)
    leaves = [*model.parameters()]
    pairs = zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (packed, alone)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


@ALL
@torch.no_grad()
def test_a_prompt_continues_an_earlier_one(name: str) -> None:
    model, ids = make(name), rows(9, 9)
    state = DecodingState(model, 2, ids.device, torch.float64)
    positions = torch.arange(9).expand(2, -1)
    first = model.hidden(ids[:, :4], positions[:, :4], state)
    second = model.hidden(ids[:, 4:], positions[:, 4:], state)
    wanted = model.hidden(ids, positions_of(ids))
    torch.testing.assert_close(torch.cat([first, second], 1), wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["mamba", "rwkv"])
@torch.no_grad()
def test_long_prompts_are_read_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts end in the first, the second and the last piece."""
    model, ids = make(name), rows(2, 5, 9)
    wanted, whole = model.begin(ids)
    read: list[int] = []
    hidden = model.hidden
    monkeypatch.setattr(gpt, "PREFILL_TOKENS", 12)
    monkeypatch.setattr(gpt, "LEAST_PIECE", 1)
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: read.append(ids.shape[1]) or hidden(ids, *rest))
    found, state = model.begin(ids)
    assert read == [4, 4, 1]
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
    after = model.step(found.argmax(-1), state)
    torch.testing.assert_close(after, model.step(wanted.argmax(-1), whole), atol=1e-9, rtol=1e-9)


@ALL
@torch.no_grad()
def test_beams_are_reordered_with_their_states(name: str) -> None:
    model, ids = make(name), rows(6, 6)
    _, state = model.begin(ids[:1, :3])
    state.reorder(torch.tensor([[0, 0]]))
    model.step(ids[:, 3], state)
    state.reorder(torch.tensor([[1, 0]]))
    found = model.step(ids[[1, 0], 4], state)
    texts = torch.cat([ids[:1, :3].expand(2, -1), ids[[1, 0], 3:5]], 1)
    torch.testing.assert_close(found, model(texts)[:, -1], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@ALL
def test_slots_write_what_rows_write(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven prompts through two slots, so that slots are reused; in a CUDA graph on a GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, options = make(name).float(), DecodeConfig(beam=1, max_new_tokens=6, batch_tokens=64 * 2)
    prompts = [ids[ids >= 0].tolist() for ids in rows(3, 1, 4, 2, 2, 5, 1)]
    plain, found = ([make_request(ids, 0, options, model) for ids in prompts] for _ in range(2))
    for _ in eager_steps(copy.deepcopy(model), plain, options):
        pass
    for _ in graph_steps(model.to(device), found, options):
        pass
    assert [row.ids for row in found] == [row.ids for row in plain]
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("name", ["mamba", "rwkv"])
@torch.no_grad()
def test_memory_does_not_grow_with_the_text(name: str) -> None:
    model = make(name)
    logits, state = model.begin(rows(3, 3))
    before = {path: {k: v.shape for k, v in vars(kept).items()} for path, kept in state}
    for _ in range(20):
        logits = model.step(logits.argmax(-1), state)
    assert before == {path: {k: v.shape for k, v in vars(kept).items()} for path, kept in state}
    assert state.filled == 0
    assert state.next.tolist() == [23, 23]


def test_what_makes_no_sense_is_refused() -> None:
    for part in ({"mixer": ("mamba",)}, {"mixer": ("rwkv",)}, {"feedforward": ("rwkv-channel-mix",)}):
        with pytest.raises(RegardError, match="reads forwards only"):
            resolve(model_config(preset="bert-tiny", source_vocab=VOCAB, **part))
    for name in ("mamba", "rwkv"):
        with pytest.raises(RegardError, match=f"{name} sees no prefix"):
            make(name)(rows(5), prefix(2))
    with pytest.raises(RegardError, match="keeps a state between steps"):
        resolve(model_config(preset="lstm-small", target_vocab=VOCAB, recurrent_feedforward="rwkv-channel-mix"))


def test_initial_step_sizes_lie_between_their_limits() -> None:
    mixer: Any = make_model(model_config(**{**SMALL, **MAMBA})).decoder.blocks[0].sublayers["self"]
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    assert 0.001 * (1 - 1e-3) <= steps.min() < steps.max() <= 0.1 * (1 + 1e-3)
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(24, -1))


def test_rwkv_begins_by_the_number_of_its_block_in_a_hybrid_too() -> None:
    """The formulas of the paper by hand, in fp64: block l of L has the ratios l / (L - 1) and 1 - l / L."""
    width, layers = 12, 5
    alternating = {"mixer": ("attention", "rwkv"), "feedforward": ("dense", "rwkv-channel-mix"), "n_heads": 2}
    settings = {**SMALL, **RWKV, **alternating, "n_decoder_layers": layers}
    blocks: Any = make_model(model_config(**settings)).decoder.blocks
    channel = torch.arange(width, dtype=torch.float64)
    for block in (1, 3):
        ratio, left = block / (layers - 1), 1 - block / layers
        mixer, channels = blocks[block].sublayers["self"], blocks[block].sublayers["ff"]
        wanted = {
            "decay": -5 + 8 * (channel / (width - 1)) ** (0.7 + 1.3 * ratio),
            "mix_k": (channel / width) ** left,
            "mix_v": (channel / width) ** left + 0.3 * ratio,
            "mix_r": (channel / width) ** (left / 2),
        }
        for name, values in wanted.items():
            torch.testing.assert_close(getattr(mixer, name).double(), values, atol=1e-6, rtol=1e-6)
        for name in ("mix_k", "mix_r"):
            torch.testing.assert_close(getattr(channels, name).double(), wanted["mix_k"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "limited"),
    [
        ("mamba-tiny", {}, False),
        ("rwkv-tiny", {}, False),
        ("s4d-tiny", {}, False),
        ("mamba-tiny", {"mixer": ("mamba", "attention"), "n_heads": 2}, True),  # a KV cache
        ("linear-attention-tiny", {}, True),  # learned positions
        ("gpt-tiny", {}, True),
    ],
)
def test_a_state_of_fixed_size_reads_texts_of_any_length(name: str, settings: dict[str, Any], limited: bool) -> None:
    sizes = {"n_decoder_layers": 2, "d_model": 16, "target_vocab": VOCAB, "max_len": 8}
    model = make_model(preset(name, **sizes, **settings)).eval()
    request = make_request([3, 4, 5], 0, DecodeConfig(beam=1, max_new_tokens=20), model)
    assert (request.limit, request.limit_reason) == ((5, "context") if limited else (20, "length"))
    for _ in eager_steps(model, [request], DecodeConfig(beam=1, min_len=20)):
        pass
    assert len(request.ids) == 3 + request.limit
