"""Peer models of the same sizes in transformers and torch.nn, and the training step that their users write."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.data.batches import Batch
from regard.device import autocast
from regard.exchange.families import FAMILIES
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, PAD

Step = Callable[[Batch], None]


def make_hf_model(
    config: ModelConfig, kind: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return a model of transformers with the sizes of one of ours (resolved) and random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    is_seq2seq = config.architecture == "transformer"
    theirs = FAMILIES["marian" if is_seq2seq else kind].to_theirs(config, {})
    theirs |= {"vocab_size": config.target_vocab, "pad_token_id": DEFAULT_SPECIAL_TOKENS.pad}
    theirs |= {"bos_token_id": DEFAULT_SPECIAL_TOKENS.bos, "eos_token_id": DEFAULT_SPECIAL_TOKENS.eos}
    theirs |= {"embd_pdrop": config.dropout} if kind == "gpt2" else {}
    if is_seq2seq:
        theirs |= {"decoder_vocab_size": config.target_vocab, "decoder_start_token_id": DEFAULT_SPECIAL_TOKENS.bos}
        theirs |= {"forced_eos_token_id": None}
    del theirs["model_type"]
    maker = AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM
    with device:
        model = maker.from_config(AutoConfig.for_model(kind, **theirs), dtype=dtype)
    return model.to(device)


def make_peer_step(model: nn.Module, loss: Callable[..., Tensor], device: torch.device, clip: float = 0.0) -> Step:
    """Return the usual loop body: autocast, backward, fused AdamW; torch chooses the attention kernel, cuDNN included."""
    torch.backends.cuda.enable_cudnn_sdp(True)  # set_up_device, in the same process, switched it off
    if hasattr(model, "config"):
        model.config.use_cache = False  # as transformers' own trainer does  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def step(batch: Batch) -> None:
        with autocast(device, dtype):
            value = loss(*batch.to(device).inputs)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=0.1)


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with the embedding and the head that it lacks."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.source_vocab, c.d_model)
        layers = (c.n_encoder_layers, c.n_decoder_layers)
        self.body = nn.Transformer(c.d_model, c.n_heads, *layers, c.d_ff, c.dropout, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        x = self.body(
            self.embedding(source.clamp(min=0)), self.embedding(target.clamp(min=0)), tgt_mask=mask, tgt_is_causal=True
        )
        return F.linear(x, self.embedding.weight)


def make_marian_step(model: nn.Module, device: torch.device, compiled: bool) -> Step:
    called = torch.compile(model, dynamic=True) if compiled else model

    def loss(source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask, source, target = (source != PAD).long(), source.clamp(min=0), target.clamp(min=0)
        return smoothed_loss(called(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits, labels)

    return make_peer_step(model, loss, device, clip=1.0)
