"""Every setting of a run, declared once: its name, its default, one line of help, and what it may be.

The TOML reader, the command line and the documentation all come from these declarations (recipes.py).
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from typing import Any

from regard.errors import RegardError


def option(default: Any, help: str) -> Any:
    """A dataclass field with its help text beside it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DataConfig:
    source: str = option("en", "source language: fills {lang} in file names, and is a key of JSONL files")
    target: str = option("de", "target language")
    root: str = option(".", "folder that the corpora below are relative to")
    train: tuple[str, ...] = option(
        (), "training corpora: 'train.{lang}.xz', 'a.en|a.de', 'x.tsv', 'x.jsonl' or 'toy:20000'"
    )
    valid: tuple[str, ...] = option((), "validation corpora")
    test: tuple[str, ...] = option((), "test corpora, used by `regard evaluate` alone")
    max_len: int = option(256, "training pairs with more tokens than this on a side are left out (and counted)")
    documents: str = option("file", "what one document of plain text is: file, line or blank (up to an empty line)")
    packing: str = option("stream", "rows of text: stream (windows of everything) or documents (kept apart)")
    noise: float = option(0.0, "share of tokens that pre-training hides; 0 = the task's own: 0.15, denoising 0.3")
    mean_span: float = option(3.0, "tokens hidden at once, on average, by spans and denoising")
    whole_words: bool = option(False, "masked-lm: hide whole words, not pieces of them")
    permute: bool = option(True, "denoising: also shuffle the sentences")
    text: str = option("", "labelled data: the column of the text, by name or number (from 1); empty = the usual names")
    pair: str = option("", "labelled data: the column of a second text")
    label: str = option("", "labelled data: the column of the label")
    image_size: int = option(0, "images are scaled to this many pixels a side; 0 = as they are")
    shift: int = option(0, "training images move by up to this many pixels")
    rotate: float = option(0.0, "training images turn by up to this many degrees")
    scale: float = option(0.0, "training images shrink or grow by up to this share")
    flip: bool = option(False, "training images are mirrored at random")
    max_ratio: float = option(0.0, "training pairs whose lengths differ by more than this factor are left out; 0 = off")


@dataclass(frozen=True)
class TokenizerConfig:
    kind: str = option("bpe", "char, word, split (at white space alone), wordpiece, bpe, byte-bpe or unigram")
    vocab_size: int = option(8000, "pieces in a vocabulary, special tokens included")
    joint: bool = option(True, "one vocabulary for both languages, or one each")
    nfc: bool = option(True, "bring Unicode into composed form (NFC)")
    lowercase: bool = option(False, "lower-case everything")
    file: str = option("", "take this tokenizer.json (or that of this run or model folder) instead of learning one")
    extra: int = option(0, "more special tokens, <extra-0> and on; spans needs one for each gap (100 by default)")
    tags: tuple[str, ...] = option((), "languages with a special token <to-...>; filled in from the directions of data")
    dropout: float = option(0.0, "translation: chance that training undoes a merge of a piece (BPE-dropout: 0.1)")


@dataclass(frozen=True)
class ModelConfig:
    preset: str = option("transformer-small", "sizes and style to start from; `regard cost` lists them")
    architecture: str = option("", "transformer, gpt, bert, vit, rnn or seq2seq; empty = the preset's")
    n_encoder_layers: int = option(0, "encoder blocks")
    n_decoder_layers: int = option(0, "decoder blocks")
    d_model: int = option(0, "width of the model")
    n_heads: int = option(0, "attention heads; must divide d_model, unless d_head is given")
    n_kv_heads: int = option(0, "heads of keys and values: 0 = n_heads, 1 = multi-query, between = grouped-query")
    d_head: int = option(0, "width of a head; 0 = d_model / n_heads")
    d_ff: int = option(0, "inner width of the feed-forward layers")
    norm: str = option("pre", "where LayerNorm stands: pre (today) or post (the 2017 paper)")
    parallel: bool = option(False, "attention and feed-forward side by side, x + attn(norm(x)) + ff(norm(x)): PaLM")
    norm_kind: str = option("layer", "layer (LayerNorm) or rms (RMSNorm: no mean, no bias)")
    norm_eps: float = option(1e-5, "added to the variance")
    bias: bool = option(True, "biases in projections, feed-forward layers and LayerNorm")
    activation: str = option("relu", "relu, gelu, gelu-tanh or silu")
    gated: bool = option(False, "gated feed-forward layers: SwiGLU with silu, GEGLU with gelu")
    scale_embeddings: bool = option(True, "embeddings times sqrt(d_model)")
    embedding_norm: bool = option(False, "a norm on the embeddings, before the first block")
    scale_logits: bool = option(False, "logits divided by sqrt(d_model): T5, whose tied embeddings are large")
    head_bias: bool = option(False, "a bias for each piece of the vocabulary, added to its logit: Marian")
    tie: str = option(
        "all", "shared embeddings: none, decoder (input and output), inputs (encoder and decoder) or all of them"
    )
    positions: str = option(
        "sinusoidal",
        "none, linear, sinusoidal, learned, shaw, t5, rope, yarn, alibi, kerple-log, kerple-power, fire or cope",
    )
    encoder_positions: str = option("", "another scheme for the encoder, or disentangled (DeBERTa); empty = the same")
    cross_positions: str = option("none", "bias between target and source positions: none, t5, alibi or kerple-*")
    position_base: float = option(10000.0, "base of the wavelengths of sinusoidal, rope and yarn")
    rope_scaling: str = option("none", "rope beyond the trained length: none, linear or ntk")
    rope_factor: float = option(1.0, "how many times the trained length rope scaling and yarn are for")
    trained_len: int = option(1024, "yarn: the length the model was trained on")
    yarn_slow: float = option(1.0, "yarn: hands turning less often than this in trained_len are interpolated")
    yarn_fast: float = option(32.0, "yarn: hands turning more often than this are kept")
    shaw_clip: int = option(16, "shaw: distances beyond this share one vector")
    t5_buckets: int = option(32, "t5: buckets of distances")
    t5_max_distance: int = option(128, "t5: distances beyond this share one bucket")
    fire_width: int = option(32, "fire: hidden units of its network")
    fire_threshold: float = option(512.0, "fire: L, below which positions are not stretched; its factor is learned")
    cope_positions: int = option(0, "cope: learned positions; 0 = max_len")
    disentangled_buckets: int = option(
        256, "disentangled: buckets of distances on either side (DeBERTa 3); 0 = every distance its own (DeBERTa 1)"
    )
    disentangled_reach: int = option(512, "disentangled: distances from this on share a vector")
    window: int = option(0, "self-attention sees this many tokens back (in an encoder also ahead); 0 = all")
    mixer: str = option(
        "attention", "what the blocks of a transformer or gpt mix tokens with: attention or convolution"
    )
    kernel: int = option(3, "convolution: tokens it sees at once")
    dilations: tuple[int, ...] = option((1,), "convolution: steps between those tokens, block by block, over and over")
    cell: str = option("lstm", "rnn, lstm, gru, gru-cho (resets before its product), mut1, mut2 or mut3")
    d_hidden: int = option(0, "width of recurrent layers")
    bidirectional: bool = option(False, "recurrent layers that read: in both directions")
    recurrent_norm: bool = option(False, "LayerNorm inside recurrent cells")
    score: str = option(
        "additive",
        "seq2seq: how attention compares: additive, dot or general; without: none, or constant (a context for all steps)",
    )
    reverse_source: bool = option(False, "seq2seq: the source is read from its end")
    patch_size: int = option(4, "pixels on a side of a patch")
    image_channels: int = option(1, "1 = grey, 3 = colour")
    answer: str = option(
        "none", "what a head on top answers: none, row (a class or number a row) or token (a tag each)"
    )
    n_classes: int = option(0, "answers to choose from; filled in from the data")
    eos_token_id: int = option(-1, "the token that ends a text, -1 = none; filled in from the tokenizer")
    suppress_tokens: tuple[int, ...] = option((), "tokens that are never generated; filled in from the tokenizer")
    token_types: int = option(0, "kinds of tokens with a vector each, such as BERT's two sentences; 0 = none")
    max_len: int = option(1024, "longest input in tokens; longer ones are refused, never cut")
    dropout: float = option(0.1, "on embeddings and on every sublayer's output")
    attention_dropout: float = option(0.0, "on attention weights")
    ff_dropout: float = option(0.0, "inside the feed-forward layers")
    hidden_dropout: float = option(0.0, "between recurrent layers (dropout is on their embeddings)")
    output_dropout: float = option(0.0, "on what the head of a recurrent model reads")
    weight_dropout: float = option(0.0, "on the matrices from a recurrent layer to its next step: weight drop")
    word_dropout: float = option(0.0, "recurrent models: on whole words of the vocabulary, a batch long")
    variational: bool = option(True, "recurrent models: dropout takes the same numbers at all steps of a row")
    source_vocab: int = option(0, "filled in from the tokenizer")
    target_vocab: int = option(0, "filled in from the tokenizer")


@dataclass(frozen=True)
class TrainConfig:
    init: str = option("", "begin with the weights and vocabulary of this run or model folder (fine-tuning)")
    vectors: str = option("", "begin the embeddings with these word vectors, a file or folder as wide as model.d_model")
    auxiliary: float = option(0.0, "classification with a gpt: weight of its language-model loss beside (GPT: 0.5)")
    steps: int = option(10000, "optimizer steps")
    batch_tokens: int = option(4096, "padded target tokens in a batch")
    accumulate: int = option(1, "batches per optimizer step")
    bptt: int = option(0, "rnn: tokens a batch goes on for, beyond which nothing is learned back; 0 = model.max_len")
    carry: bool = option(True, "rnn on a stream of text: each batch goes on with the state that the one before left")
    activity: float = option(0.0, "rnn: weight of the mean square of what the last layer gives (AR; AWD-LSTM: 2)")
    slowness: float = option(0.0, "rnn: the same of its changes from step to step (TAR; AWD-LSTM: 1)")
    lr: float = option(1e-3, "peak learning rate")
    schedule: str = option("inverse-sqrt", "after warm-up: inverse-sqrt, cosine, linear or constant")
    warmup: int = option(1000, "steps of linear warm-up")
    optimizer: str = option(
        "adamw", "adamw, or muon for the matrices inside blocks (AdamW for all else, at one train.lr)"
    )
    beta1: float = option(0.9, "AdamW's first momentum")
    beta2: float = option(0.98, "AdamW's second momentum")
    weight_decay: float = option(0.0, "on matrices; never on biases, norms and embeddings")
    clip: float = option(1.0, "largest gradient norm; 0 = off")
    label_smoothing: float = option(0.1, "probability mass spread over the whole vocabulary")
    z_loss: float = option(0.0, "weight of (log Z)^2 of tokens, which keeps logits from drifting (PaLM: 1e-4); 0 = off")
    r_drop: float = option(
        0.0, "weight of R-Drop, which trains two dropped-out readings to agree (5 is usual); 0 = off"
    )
    seed: int = option(0, "of weights, dropout and data order")
    log_every: int = option(50, "steps between lines of metrics")
    valid_every: int = option(500, "steps between validations")
    save_every: int = option(500, "steps between checkpoints")
    keep: int = option(3, "checkpoints kept beside the best one")
    average: int = option(1, "the final model is the mean of this many last checkpoints; 1 = the best checkpoint")
    metric: str = option("loss", "what 'best' and early stopping look at: loss, bleu, accuracy, f1, ...")
    patience: int = option(0, "stop after this many validations without a better one; 0 = never")
    samples: int = option(3, "translations shown at each validation")
    valid_sentences: int = option(0, "decode at most this many validation sentences of each direction; 0 = all")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    precision: str = option("auto", "auto (bf16 on a GPU, else fp32), fp32 or bf16")
    weights: str = option("fp32", "fp32, or bf16: weights, gradients and moments in half the memory, rounded at random")
    recompute: bool = option(
        False, "keep only what enters each block and compute the rest again: less memory, more time"
    )
    compile: bool = option(True, "compile the training step on a GPU")
    threads: int = option(0, "CPU threads; 0 = OMP_NUM_THREADS, or all cores")


@dataclass(frozen=True)
class DecodeConfig:
    beam: int = option(4, "beam width; 1 = greedy")
    nbest: int = option(1, "translations returned for each sentence")
    length_penalty: float = option(1.0, "a: a hypothesis y scores log p(y) / |y|^a, |y| counting its end token")
    min_len: int = option(0, "tokens before the end token is allowed")
    max_len_a: float = option(2.0, "at most a * source length + b tokens ...")
    max_len_b: int = option(20, "... and never more than the model's max_len")
    stop: str = option(
        "likely", "end a sentence when no open hypothesis beats the kept ones: likely (now) or proven (ever)"
    )
    temperature: float = option(0.0, "above 0: sample instead of searching")
    top_k: int = option(0, "sample among the k likeliest tokens; 0 = all")
    top_p: float = option(1.0, "sample among the likeliest tokens that hold this much probability")
    min_p: float = option(0.0, "sample among tokens at least this many times as likely as the likeliest; 0 = all")
    repetition_penalty: float = option(1.0, "above 1: tokens already said (or in the prompt) lose; no beam; 1 = off")
    max_new_tokens: int = option(256, "language models: tokens written after a prompt, at most")
    stop_strings: tuple[str, ...] = option((), "language models: end before the first of these in the text")
    seed: int = option(0, "of the samples; sentence i uses seed + i, whatever its batch")
    batch_tokens: int = option(0, "padded source tokens x beam decoded at a time; 0 = 8,192 on a CPU, 131,072 on a GPU")
    shortlist: bool = option(False, "choose among the pieces that go with each source (`regard shortlist`); on a CPU")


@dataclass(frozen=True)
class VectorsConfig:
    """Of `regard vectors train`, as its options; the defaults are those of the original word2vec program."""

    model: str = option("skipgram", "skipgram, or cbow: one prediction from the mean of the window")
    loss: str = option("negative", "negative (sampling), hierarchical (a Huffman tree) or softmax (small vocabularies)")
    dim: int = option(100, "numbers in a vector")
    window: int = option(5, "words on each side, at most")
    shrink_windows: bool = option(True, "draw each window's reach from 1 to the window, so that near words weigh more")
    negatives: int = option(5, "words drawn as noise for each prediction")
    noise_power: float = option(0.75, "noise is drawn by count to this power")
    min_count: int = option(5, "rarer words are taken out before windows are made")
    max_vocab: int = option(0, "keep this many of the most frequent words; 0 = all")
    lowercase: bool = option(False, "lower-case the text")
    subsample: float = option(1e-3, "words above this share of the text are dropped at random; 0 = off")
    subsample_rule: str = option("word2vec", "a word stays with sqrt(t/f) + t/f (word2vec) or sqrt(t/f) (paper)")
    epochs: int = option(5, "times the text is read")
    lr: float = option(0.0, "learning rate at the start; 0 = 0.025, and 0.05 for cbow")
    min_lr_share: float = option(1e-4, "the learning rate falls in a line, never below this share of the first")
    spread: float = option(
        0.5, "vectors begin evenly within +-spread / dim: 0.5 as in the original program, 1 in gensim"
    )
    cbow_gradient: str = option("whole", "each word of a window gets the whole gradient, or it divided by their number")
    threads: int = option(0, "CPU threads, which do not wait for each other; 0 = all cores")
    seed: int = option(0, "of everything drawn; one thread with the same seed gives the same vectors")
    device: str = option("auto", "cpu, or a GPU: cuda or cuda:N; auto = cpu")
    batch: int = option(0, "on a GPU, windows that are worked on at once; 0 = 512, and 256 for hierarchical")


TASKS = (
    "translation",
    "causal-lm",
    "masked-lm",
    "spans",
    "denoising",
    "classification",
    "regression",
    "tagging",
    "images",
)


@dataclass(frozen=True)
class Config:
    name: str = option("run", "the run's folder is runs/NAME")
    task: str = option("translation", f"what is learned: {', '.join(TASKS)}")
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def __post_init__(self) -> None:
        wrong = name_fault(self.name)
        if wrong:
            shown = repr(self.name)
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            raise RegardError(f"'name' {wrong}, not {shown}: choose a plain name such as my-run; --run sets the folder")


NAME_BYTES = 223  # file systems allow 255, and the drafts of what is called NAME, NAME.json or NAME.error add to it


def name_fault(name: str) -> str | None:
    """Return what the name of a run must be, if it is not."""
    if not isinstance(name, str) or not name or name != name.strip() or name.startswith("."):
        return "must begin with a character that is neither white space nor a dot, and not end in white space"
    if any(c in "/\\" or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
        return "must have no slash, backslash or control character"
    return None if len(name.encode()) <= NAME_BYTES else f"must have at most {NAME_BYTES} bytes in UTF-8"


POSITIONS = (
    *("none", "linear", "sinusoidal", "learned", "shaw", "t5", "rope", "yarn"),
    *("alibi", "kerple-log", "kerple-power", "fire", "cope"),
)
CHOICES = {
    "task": TASKS,
    "tokenizer.kind": ("char", "word", "split", "wordpiece", "bpe", "byte-bpe", "unigram"),
    "model.architecture": ("", "transformer", "gpt", "bert", "vit", "rnn", "seq2seq"),
    "model.mixer": ("attention", "convolution"),
    "model.cell": ("rnn", "lstm", "gru", "gru-cho", "mut1", "mut2", "mut3"),
    "model.score": ("none", "constant", "additive", "dot", "general"),
    "model.answer": ("none", "row", "token"),
    "model.norm": ("pre", "post"),
    "model.norm_kind": ("layer", "rms"),
    "model.activation": ("relu", "gelu", "gelu-tanh", "silu"),
    "model.tie": ("none", "decoder", "inputs", "all"),
    "model.positions": POSITIONS,
    "model.encoder_positions": ("", *POSITIONS, "disentangled"),
    "model.cross_positions": POSITIONS,
    "model.rope_scaling": ("none", "linear", "ntk"),
    "train.schedule": ("inverse-sqrt", "cosine", "linear", "constant"),
    "train.metric": ("loss", "bleu", "accuracy", "f1", "matthews", "pearson", "spearman"),
    "data.documents": ("file", "line", "blank"),
    "data.packing": ("stream", "documents"),
    "train.precision": ("auto", "fp32", "bf16"),
    "train.optimizer": ("adamw", "muon"),
    "train.weights": ("fp32", "bf16"),
    "decode.stop": ("likely", "proven"),
    "vectors.model": ("skipgram", "cbow"),
    "vectors.loss": ("negative", "hierarchical", "softmax"),
    "vectors.subsample_rule": ("word2vec", "paper"),
    "vectors.cbow_gradient": ("whole", "divided"),
}

# Ranges: every number is at least 0, except these.
SIGNED = {"decode.length_penalty", "model.eos_token_id"}
AT_LEAST_ONE = {f"train.{name}" for name in ("steps", "batch_tokens", "accumulate", "average")} | {
    f"train.{name}_every" for name in ("log", "valid", "save")
}
AT_LEAST_ONE |= {f"vectors.{name}" for name in ("dim", "window", "min_count", "epochs")}
BELOW_ONE = {"data.noise", "data.scale", "tokenizer.dropout", "train.beta1", "train.beta2", "train.label_smoothing"}
BELOW_ONE |= {"model.norm_eps"}

# Maxima of whole numbers, far above every model that exists: a larger value is a mistake, and would fill the memory before
# anything else could say so. Numbers without one of their own are at most LARGEST.
LARGEST = (1 << 31) - 1
AT_MOST: dict[str, int] = {
    **{f"model.n_{side}_layers": 10_000 for side in ("encoder", "decoder")},
    **{f"model.{name}": 1 << 20 for name in ("d_model", "d_ff", "d_head", "d_hidden", "fire_width")},
    **{f"model.{name}": 1 << 16 for name in ("n_heads", "n_kv_heads", "token_types", "kernel", "dilations")},
    **{f"model.{name}": 1 << 14 for name in ("patch_size", "image_channels")},
    **{
        f"model.{name}": 1 << 24
        for name in (
            "source_vocab",
            "target_vocab",
            "n_classes",
            "suppress_tokens",
            "eos_token_id",
            "max_len",
            "window",
        )
    },
    **{f"model.{name}": 1 << 24 for name in ("trained_len", "cope_positions", "t5_max_distance", "disentangled_reach")},
    **{f"model.{name}": 1 << 20 for name in ("shaw_clip", "t5_buckets", "disentangled_buckets")},
    **{f"decode.{name}": 1 << 24 for name in ("min_len", "max_len_b", "max_new_tokens", "top_k")},
    **{f"decode.{name}": 1 << 16 for name in ("beam", "nbest")},
    **{f"{section}.seed": 1 << 62 for section in ("train", "decode", "vectors")},
    **{"tokenizer.vocab_size": 1 << 22, "tokenizer.extra": 1 << 16, "data.image_size": 1 << 14, "vectors.dim": 1 << 16},
}
LARGEST_TABLE = 1 << 28  # numbers in a table that follows from sizes alone, such as that of sinusoidal positions: 1 GiB
