"""The schema: every setting of a run, declared once with its name, default, one line of help and allowed values.

The TOML reader, the command line and the documentation are derived from these declarations (recipes.py). The settings of a
part are declared with the part (layers/), those of one architecture in a table below. This module does not import torch.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from regard.config.registry import (
    ALIGNMENT,
    BLOCKS,
    IMAGES,
    RECURRENT,
    RESERVED_NAMES,
    TABLES,
    register_table,
    setting,
    split_names,
)
from regard.errors import RegardError


@dataclass(frozen=True)
class DataConfig:
    """The corpora of a run and how examples are made of them."""

    source: str = setting("en", "source language: fills {lang} in file names, and is a key of JSONL files")
    target: str = setting("de", "target language")
    root: str = setting(".", "folder that the corpora below are relative to; {recipe} = that of the recipe")
    train: tuple[str, ...] = setting(
        (),
        "training corpora: 'train.{lang}.xz', 'a.en|a.de', 'x.tsv', 'x.jsonl' or 'toy:20000'; for translation "
        "'x.tsv*2.5', or {corpus = 'x.tsv', weight = 2.5}, is read two and a half times in an epoch",
    )
    temperature: float = setting(
        1.0,
        "several directions: read them in proportion to their number of pairs to the power of 1 / temperature; above 1, "
        "directions with fewer pairs are read more often",
        above=0,
    )
    valid: tuple[str, ...] = setting((), "validation corpora; empty = a share of the training data is held out")
    valid_share: float = setting(
        0.05, "share that is held out where data.valid is empty, at most 2,000 examples", above=0, below=1
    )
    test: tuple[str, ...] = setting((), "test corpora, used by `regard evaluate` alone")
    max_len: int = setting(256, "drop training pairs with more tokens than this on either side")
    documents: str = setting(
        "file",
        "what one document of plain text is: file, line or blank (up to an empty line)",
        choices=("file", "line", "blank"),
    )
    packing: str = setting(
        "stream",
        "rows of text: stream (windows over all text) or documents (no attention between documents)",
        choices=("stream", "documents"),
    )
    mask_ratio: float = setting(
        0.0, "share of tokens that pre-training masks; 0 = the task's default: 0.15, denoising 0.3", below=1
    )
    mean_span: float = setting(3.0, "span-corruption and denoising: mean length of a masked span in tokens")
    whole_words: bool = setting(False, "masked-lm: mask whole words, not single pieces")
    permute: bool = setting(True, "denoising: also shuffle the sentences")
    text_column: str = setting("", "labelled data: the column of the text, by name or number (from 1); empty = text")
    pair_column: str = setting("", "labelled data: the column of a second text")
    label_column: str = setting("", "labelled data: the column of the label; empty = label")
    image_size: int = setting(0, "scale images to this many pixels on each side; 0 = as they are", most=1 << 14)
    shift: int = setting(0, "shift training images at random by up to this many pixels")
    rotate: float = setting(0.0, "rotate training images at random by up to this many degrees")
    scale: float = setting(0.0, "scale training images at random by up to this share", below=1)
    flip: bool = setting(False, "mirror training images at random")
    max_ratio: float = setting(0.0, "drop training pairs whose lengths differ by more than this factor; 0 = off")


@dataclass(frozen=True)
class TokenizerConfig:
    """The kind and size of the vocabulary, which is trained on the training corpora."""

    kind: str = setting(
        "bpe",
        "char, word, split (at white space alone), wordpiece, bpe, byte-bpe or unigram",
        choices=("char", "word", "split", "wordpiece", "bpe", "byte-bpe", "unigram"),
    )
    vocab_size: int = setting(8000, "pieces in a vocabulary, special tokens included", most=1 << 22)
    joint: bool = setting(True, "one vocabulary for both languages, or one each")
    nfc: bool = setting(True, "normalize text to Unicode's composed form (NFC)")
    lowercase: bool = setting(False, "lower-case everything")
    file: str = setting("", "use this tokenizer.json (or that of this run or model folder) instead of training one")
    n_sentinels: int = setting(
        0,
        "sentinel tokens <extra-0>, ...: span-corruption needs one for each masked span (default 100)",
        most=1 << 16,
    )
    language_tokens: tuple[str, ...] = setting(
        (), "target languages with a special token <to-...>; filled in from the directions of data"
    )
    bpe_dropout: float = setting(
        0.0, "translation: BPE-dropout, the probability that training undoes a merge (0.1 is usual)", below=1
    )
    positional_unknown: int = setting(
        0,
        "translation with kind word or split: unknown target words become tokens <unk:-7> to <unk:+7> (or another range) "
        "that say how far from its source word one stands; 0 = off (Luong et al. 2015: 7)",
        most=1000,
    )


S = TypeVar("S")


class PartSettings(Mapping[str, Any]):
    """The settings of parts by the names of their tables; immutable and hashable, so that configurations can be keys."""

    def __init__(self, tables: Mapping[str, Any] | None = None) -> None:
        self._tables = dict(tables or {})

    def __getitem__(self, name: str) -> Any:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __hash__(self) -> int:
        return hash(frozenset(self._tables.items()))

    def __repr__(self) -> str:
        return f"PartSettings({self._tables!r})"


@dataclass(frozen=True)
class ModelConfig:
    """The sizes that parts share, and the chosen parts, whose own settings are in `parts` by the names of their tables."""

    preset: str = setting("transformer-small", "sizes and style to start from; `regard cost` lists them")
    architecture: str = setting("", "transformer, gpt, bert, vit, rnn, seq2seq, ...; empty = the preset's")
    n_encoder_layers: int = setting(0, "encoder blocks", most=10_000)
    n_decoder_layers: int = setting(0, "decoder blocks", most=10_000)
    d_model: int = setting(0, "width of the model", most=1 << 20)
    n_heads: int = setting(0, "attention heads; must divide d_model, unless d_head is given", most=1 << 16, of=BLOCKS)
    n_kv_heads: int = setting(
        0,
        "key/value heads: 0 = n_heads, 1 = multi-query, between = grouped-query attention",
        most=1 << 16,
        of=BLOCKS,
    )
    d_head: int = setting(0, "width of a head; 0 = d_model / n_heads", most=1 << 20, of=BLOCKS)
    d_ff: int = setting(0, "inner width of the feed-forward layers", most=1 << 20, of=BLOCKS)
    max_len: int = setting(1024, "longest input in tokens; longer ones are refused, never cut", least=1, most=1 << 24)
    source_vocab: int = setting(0, "filled in from the tokenizer", most=1 << 24)
    target_vocab: int = setting(0, "filled in from the tokenizer", most=1 << 24)
    norm: str = setting(
        "pre",
        "norm before each sublayer (pre) or after its residual connection (post, the 2017 paper)",
        choices=("pre", "post"),
        of=BLOCKS,
    )
    parallel: bool = setting(
        False, "attention and feed-forward layer in parallel, x + attn(norm(x)) + ff(norm(x)) (PaLM)", of=BLOCKS
    )
    norm_kind: str = setting(
        "layer", "layer (LayerNorm) or rms (RMSNorm: no mean, no bias)", choices=("layer", "rms"), of=BLOCKS
    )
    norm_eps: float = setting(1e-5, "epsilon of norms, added to the variance", below=1, of=BLOCKS)
    bias: bool = setting(True, "biases in projections, feed-forward layers and LayerNorm", of=BLOCKS)
    activation: str = setting(
        "relu",
        "activation function of the feed-forward layers",
        choices=("relu", "gelu", "gelu-tanh", "silu"),
        of=BLOCKS,
    )
    scale_embeddings: bool = setting(True, "multiply embeddings by sqrt(d_model)")
    embedding_norm: bool = setting(False, "a norm on the embeddings, before the first block", of=BLOCKS)
    scale_logits: bool = setting(False, "divide logits by sqrt(d_model), as T5 with tied embeddings does")
    head_bias: bool = setting(False, "a bias on the logit of each token (Marian)")
    tie: str = setting(
        "all",
        "weight tying: none, decoder (input and output), inputs (encoder and decoder) or all embeddings",
        choices=("none", "decoder", "inputs", "all"),
    )
    positions: str = setting("sinusoidal", "position scheme (positional encoding)", part="positions", of=BLOCKS)
    encoder_positions: str = setting(
        "", "position scheme of the encoder; empty = model.positions", choices=("",), part="positions", of=BLOCKS
    )
    cross_positions: str = setting(
        "none", "position scheme of cross-attention, one that adds to its scores", part="positions", of=BLOCKS
    )
    mixer: tuple[str, ...] = setting(
        ("attention",),
        "token mixer of the blocks: one part, or several that are repeated over the blocks",
        part="mixer",
        of=BLOCKS,
    )
    feedforward: tuple[str, ...] = setting(
        ("dense",),
        "feed-forward layer of the blocks: one part, or several that are repeated over the blocks",
        part="feedforward",
        of=BLOCKS,
    )
    cell: str = setting("lstm", "the cell of recurrent layers", part="cell", of=RECURRENT)
    recurrent_feedforward: str = setting(
        "",
        "feed-forward part between recurrent layers, x + sigmoid(f(x)), such as experts; empty = none",
        choices=("",),
        part="feedforward",
        of=RECURRENT,
    )
    attention_score: str = setting(
        "additive",
        "attention score; none = no attention, constant = one context vector for all steps",
        choices=("none", "constant"),
        part="attention_score",
        of=ALIGNMENT,
    )
    prediction_head: str = setting(
        "none",
        "none, sequence (a class or number for each text) or token (a tag for each token); filled in from the task",
        choices=("none", "sequence", "token"),
    )
    n_classes: int = setting(0, "number of classes; filled in from the data", most=1 << 24)
    eos_token_id: int = setting(
        -1, "the token that ends a text, -1 = none; filled in from the tokenizer", least=-1, most=1 << 24
    )
    suppress_tokens: tuple[int, ...] = setting(
        (), "tokens that are never generated; filled in from the tokenizer", most=1 << 24
    )
    token_types: int = setting(
        0, "number of token types (segments), such as BERT's two sentences; 0 = none", most=1 << 16, of=BLOCKS
    )
    dropout: float = setting(0.1, "dropout on embeddings and on the output of every sublayer", below=1)
    attention_dropout: float = setting(0.0, "dropout on attention weights", below=1, of=BLOCKS)
    ff_dropout: float = setting(0.0, "dropout inside the feed-forward layers", below=1, of=BLOCKS)
    parts: Mapping[str, Any] = field(default=PartSettings())

    def __post_init__(self) -> None:
        for name in ("mixer", "feedforward"):  # one name is a list of one
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, tuple(split_names(value)))
        if not isinstance(self.parts, PartSettings):
            object.__setattr__(self, "parts", PartSettings(self.parts))

    def table(self, settings: type[S]) -> S:
        """Return the settings of an architecture's table, such as RecurrentSettings, or its defaults if there is none."""
        return self.named(settings.table)  # type: ignore[attr-defined]

    def named(self, table: str) -> Any:
        """Return the settings of the table `[model.TABLE]`, or its defaults where the configuration does not have it."""
        found = self.parts.get(table)
        return TABLES[table].settings() if found is None else found

    def value(self, name: str) -> Any:
        """Return a setting by its name in `[model]`, such as "d_model" or "rope.base"."""
        table, _, key = name.rpartition(".")
        return getattr(self.named(table) if table else self, key)

    def positions_at(self, side: str) -> str:
        """Return the position scheme of an encoder, a decoder, or the cross-attention between them."""
        names = {"encoder": self.encoder_positions or self.positions, "cross": self.cross_positions}
        return names.get(side, self.positions)


RESERVED_NAMES.update(f.name for f in fields(ModelConfig))


@register_table("recurrent", RECURRENT)
@dataclass(frozen=True)
class RecurrentSettings:
    """Layers of recurrent cells."""

    d_hidden: int = setting(0, "width of recurrent layers; 0 = the preset's", most=1 << 20)
    bidirectional: bool = setting(False, "layers that read whole texts are bidirectional")
    norm: bool = setting(False, "LayerNorm inside the cells")
    variational: bool = setting(True, "variational dropout: the same mask at all time steps of a row")
    hidden_dropout: float = setting(0.0, "dropout between layers (model.dropout is on the embeddings)", below=1)
    output_dropout: float = setting(0.0, "dropout on the input of the head", below=1)
    weight_dropout: float = setting(0.0, "DropConnect on the hidden-to-hidden matrices (weight drop)", below=1)
    word_dropout: float = setting(0.0, "embedding dropout: zero the vectors of whole words for a batch", below=1)
    bidirectional_layers: int = setting(
        0, "seq2seq: how many encoder layers, from the lowest, bidirectional makes so; 0 = all (GNMT: 1)", most=10_000
    )
    interleaved: bool = setting(
        False, "seq2seq: the encoder has two columns whose directions alternate from layer to layer (Deep-Att)"
    )
    residual: int = setting(
        0, "layers from this one on, counted from 1, add their input to their output; 0 = none (GNMT: 3)", most=10_000
    )
    fast_forward: bool = setting(
        False, "layers also read half of the input projection of the layer below (fast-forward, Deep-Att)"
    )
    d_ff: int = setting(
        0, "inner width of model.recurrent_feedforward; 0 = four times the width of its input", most=1 << 20
    )
    activation: str = setting(
        "relu", "activation function of model.recurrent_feedforward", choices=("relu", "gelu", "gelu-tanh", "silu")
    )
    ff_dropout: float = setting(0.0, "dropout inside model.recurrent_feedforward", below=1)


@register_table("seq2seq", ALIGNMENT)
@dataclass(frozen=True)
class Seq2SeqSettings:
    """Recurrent encoder-decoders."""

    reverse_source: bool = setting(False, "read the source from its end to its beginning")
    context: str = setting(
        "first",
        "decoder layers that read the context of attention: first, or all of them (GNMT)",
        choices=("first", "all"),
    )
    readout: str = setting(
        "maxout",
        "input of the head with attention: maxout of state, token and context; linear map of state and context; or concat, "
        "these two themselves",
        choices=("maxout", "linear", "concat"),
    )


@register_table("vit", IMAGES)
@dataclass(frozen=True)
class ViTSettings:
    """Vision transformers."""

    patch_size: int = setting(4, "pixels on a side of a patch", least=1, most=1 << 14)
    image_channels: int = setting(1, "1 = grey, 3 = colour", least=1, most=1 << 14)


@dataclass(frozen=True)
class MeshConfig:
    """How the processes that torchrun starts are arranged; the product of the three numbers is how many there are."""

    data: int = setting(
        0, "groups of processes that hold the whole model, each with its share of a batch; 0 = what is left"
    )
    shard: int = setting(0, "fsdp: processes that share the parameters of the model; 0 = what is left")
    tensor: int = setting(
        1, "tensor parallelism: processes that share each matrix of attention and feed-forward", least=1
    )


@dataclass(frozen=True)
class RewardConfig:
    """Training on a reward (`train.objective` reward): which one, and how its gradient is estimated from samples."""

    metric: str = setting(
        "gleu",
        "score of a sampled translation: gleu or bleu of its words, or chrf of its characters",
        choices=("gleu", "bleu", "chrf"),
    )
    form: str = setting(
        "reinforce",
        "reinforce (policy gradient), or minimum-risk (mean over distinct samples, weighted by their probabilities)",
        choices=("reinforce", "minimum-risk"),
    )
    samples: int = setting(15, "translations that are sampled for each sentence pair", least=2, most=1 << 16)
    baseline: str = setting(
        "mean",
        "reinforce: what is subtracted from the reward of a sample: the mean of all samples, or of the others alone",
        choices=("mean", "leave-one-out"),
    )
    sharpness: float = setting(
        5e-3, "minimum-risk: the probabilities of the samples are raised to this power, then normalized", above=0
    )
    likelihood_weight: float = setting(0.017, "weight of the likelihood of the references beside the expected reward")


@dataclass(frozen=True)
class TrainConfig:
    """Optimization, checkpoints and devices of a training run."""

    init_from: str = setting("", "start from the weights and vocabulary of this run or model folder (fine-tuning)")
    pretrained_embeddings: str = setting(
        "", "initialize the embeddings with these word vectors, a file or folder as wide as model.d_model"
    )
    objective: str = setting(
        "likelihood",
        "what is maximized: likelihood, or, for a trained translator, the expected reward of its translations",
        choices=("likelihood", "reward"),
    )
    reward: RewardConfig = field(default_factory=RewardConfig)
    auxiliary: float = setting(0.0, "classification with gpt or rnn: weight of the language-model loss (GPT: 0.5)")
    steps: int = setting(10000, "optimizer steps", least=1)
    batch_tokens: int = setting(4096, "padded target tokens in a batch", least=1)
    accumulate: int = setting(1, "batches per optimizer step (gradient_accumulation_steps)", least=1)
    bptt: int = setting(0, "rnn: tokens of a batch, the length of truncated BPTT; 0 = model.max_len")
    carry_state: bool = setting(
        True, "rnn on a stream of text: each batch starts from the final state of the one before"
    )
    ar_weight: float = setting(0.0, "rnn: activation regularization, weight of the mean square output (AWD-LSTM: 2)")
    tar_weight: float = setting(0.0, "rnn: temporal activation regularization, weight of its mean square change (1)")
    lr: float = setting(1e-3, "peak learning rate", above=0)
    schedule: str = setting(
        "inverse-sqrt",
        "learning rate schedule after warm-up: inverse-sqrt, cosine, linear or constant",
        choices=("inverse-sqrt", "cosine", "linear", "constant"),
    )
    warmup: int = setting(1000, "steps of linear warm-up (warmup_steps)")
    optimizer: str = setting(
        "adamw",
        "adamw, or muon for the matrices inside blocks (with AdamW for the rest, at one train.lr)",
        choices=("adamw", "muon"),
    )
    beta1: float = setting(0.9, "AdamW's decay rate of the mean gradient", below=1)
    beta2: float = setting(0.98, "AdamW's decay rate of the mean squared gradient", below=1)
    weight_decay: float = setting(0.0, "weight decay of matrices; biases, norms and embeddings have none")
    clip: float = setting(1.0, "gradient clipping: the largest norm (max_grad_norm); 0 = off")
    label_smoothing: float = setting(0.1, "label smoothing: probability mass spread over the whole vocabulary", below=1)
    z_loss: float = setting(
        0.0, "weight of the z-loss (log Z)^2, which keeps logits from drifting (PaLM: 1e-4); 0 = off"
    )
    r_drop: float = setting(
        0.0, "weight of R-Drop, which makes two forward passes with dropout agree (5 is usual); 0 = off"
    )
    seed: int = setting(0, "random seed of weights, dropout and data order", most=1 << 62)
    log_every: int = setting(50, "steps between lines of metrics", least=1)
    valid_every: int = setting(500, "steps between validations", least=1)
    save_every: int = setting(500, "steps between checkpoints", least=1)
    keep: int = setting(3, "checkpoints kept beside the best one")
    average: int = setting(
        1, "the final model is the mean of this many last checkpoints; 1 = the best checkpoint", least=1
    )
    metric: str = setting(
        "loss",
        "what the best checkpoint and early stopping are chosen by: loss, bleu, accuracy, f1, ...",
        choices=("loss", "bleu", "accuracy", "f1", "matthews", "pearson", "spearman"),
    )
    patience: int = setting(0, "early stopping: stop after this many validations without a better one; 0 = never")
    samples: int = setting(3, "translations shown at each validation")
    valid_sentences: int = setting(0, "decode at most this many validation sentences of each direction; 0 = all")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    precision: str = setting("auto", "auto (bf16 on a GPU, else fp32), fp32 or bf16", choices=("auto", "fp32", "bf16"))
    param_dtype: str = setting(
        "fp32",
        "data type of parameters: fp32, or bf16: parameters, gradients and optimizer state in bf16 with stochastic rounding",
        choices=("fp32", "bf16"),
    )
    activation_checkpointing: bool = setting(
        False, "recompute activations in the backward pass (gradient checkpointing): less memory, more time"
    )
    compile: bool = setting(True, "compile the training step on a GPU")
    parallel: str = setting(
        "ddp",
        "several processes (torchrun): ddp (each holds the model) or fsdp (they share its parameters)",
        choices=("ddp", "fsdp"),
    )
    mesh: MeshConfig = field(default_factory=MeshConfig)
    rank_timeout: float = setting(600.0, "seconds after which a process that waits for others gives up", above=0)
    threads: int = setting(0, "CPU threads; 0 = OMP_NUM_THREADS, or all cores")


@dataclass(frozen=True)
class DecodeConfig:
    """How a trained model generates: beam search or sampling, lengths, stopping."""

    beam: int = setting(4, "beam width (num_beams); 1 = greedy", most=1 << 16)
    nbest: int = setting(1, "number of translations returned for each sentence", most=1 << 16)
    length_penalty: float = setting(
        1.0, "a: a hypothesis y scores log p(y) / |y|^a, |y| counting its end token", least=-math.inf
    )
    length_norm: str = setting(
        "power",
        "what log p(y) is divided by: power (|y|^a) or gnmt (((5 + |y|) / 6)^a)",
        choices=("power", "gnmt"),
    )
    coverage_penalty: float = setting(
        0.0, "b: beam search adds b * sum of log(min(attention, 1)) over the source tokens to a score; 0 = off"
    )
    prune: float = setting(
        0.0, "beam search drops hypotheses whose log p is this much below the best of their length; 0 = none, 3 in GNMT"
    )
    min_len: int = setting(0, "tokens before the end token is allowed", most=1 << 24)
    max_len_a: float = setting(2.0, "at most a * source length + b tokens ...")
    max_len_b: int = setting(20, "... and never more than the model's max_len", most=1 << 24)
    beam_stop: str = setting(
        "likely",
        "early stopping of beam search, when no open hypothesis beats the kept: likely (now) or proven (ever)",
        choices=("likely", "proven"),
    )
    max_sentence_tokens: int = setting(
        64,
        "texts: a sentence with more tokens is translated in clauses; longer ones than in training are worse",
        least=1,
        most=1 << 24,
    )
    temperature: float = setting(0.0, "above 0: sample instead of searching")
    top_k: int = setting(0, "sample among the k likeliest tokens; 0 = all", most=1 << 24)
    top_p: float = setting(1.0, "nucleus sampling: sample among the likeliest tokens that hold this much probability")
    min_p: float = setting(0.0, "sample among tokens with at least this share of the top token's probability; 0 = all")
    epsilon: float = setting(0.0, "sample among tokens with at least this probability (epsilon sampling); 0 = all")
    repetition_penalty: float = setting(
        1.0, "above 1: penalize tokens that are already in text or prompt; no beam; 1 = off"
    )
    mbr: int = setting(
        0, "minimum Bayes risk: choose among this many candidates the one most like all others; 0 = off", most=1 << 12
    )
    mbr_metric: str = setting(
        "chrf",
        "minimum Bayes risk: how two candidates are compared: chrf, bleu or gleu",
        choices=("chrf", "bleu", "gleu"),
    )
    mbr_candidates: str = setting(
        "epsilon",
        "minimum Bayes risk: candidates by epsilon sampling (0.02), ancestral sampling, or beam search",
        choices=("epsilon", "ancestral", "beam"),
    )
    ensemble: str = setting(
        "mean",
        "several models: mean of their probabilities, or log: mean of their log-probabilities",
        choices=("mean", "log"),
    )
    max_new_tokens: int = setting(
        256, "language models: generate at most this many tokens after a prompt", most=1 << 24
    )
    stop_strings: tuple[str, ...] = setting((), "language models: stop before the first of these strings in the text")
    seed: int = setting(0, "random seed for sampling; sentence i uses seed + i, whatever its batch", most=1 << 62)
    batch_tokens: int = setting(
        0, "padded source tokens x beam decoded at a time; 0 = 8,192 on a CPU, 131,072 on a GPU"
    )
    replace_unknown: str = setting(
        "none",
        "translation: unknown words are left out (none), or replaced by the source word they are aligned to (copy)",
        choices=("none", "copy"),
    )
    unknown_dictionary: str = setting(
        "", "file of lines SOURCE<TAB>TARGET: decode.replace_unknown writes TARGET where the source word is in it"
    )
    allow_tokens: tuple[int, ...] = setting(
        (), "tokens that may be generated although model.suppress_tokens has them; filled in by decode.replace_unknown"
    )


@dataclass(frozen=True)
class VectorsConfig:
    """The options of `regard vectors train`; the defaults are those of the original word2vec program."""

    model: str = setting(
        "skipgram", "skipgram, or cbow (one prediction from the mean of the window)", choices=("skipgram", "cbow")
    )
    loss: str = setting(
        "negative",
        "negative (sampling), hierarchical (a Huffman tree) or softmax (small vocabularies)",
        choices=("negative", "hierarchical", "softmax"),
    )
    dim: int = setting(100, "size of the vectors", least=1, most=1 << 16)
    window: int = setting(5, "context words on each side, at most", least=1)
    shrink_windows: bool = setting(True, "draw the size of each window from 1 to window, so that near words weigh more")
    negatives: int = setting(5, "negative samples for each prediction")
    noise_power: float = setting(0.75, "negative samples are drawn by word count to this power")
    min_count: int = setting(5, "words that occur less often are removed before windows are made", least=1)
    max_vocab: int = setting(0, "keep this many of the most frequent words; 0 = all")
    lowercase: bool = setting(False, "lower-case the text")
    subsample: float = setting(1e-3, "words above this share of the text are dropped at random (subsampling); 0 = off")
    subsample_rule: str = setting(
        "word2vec",
        "a word is kept with probability sqrt(t/f) + t/f (word2vec) or sqrt(t/f) (paper)",
        choices=("word2vec", "paper"),
    )
    epochs: int = setting(5, "passes over the text", least=1)
    lr: float = setting(0.0, "initial learning rate; 0 = 0.025, and 0.05 for cbow")
    min_lr_share: float = setting(1e-4, "the learning rate decays linearly, never below this share of the initial one")
    spread: float = setting(
        0.5, "vectors start uniformly within +-spread / dim: 0.5 as in the original program, 1 in gensim"
    )
    cbow_gradient: str = setting(
        "whole",
        "each word of a window gets the whole gradient, or it divided by their number",
        choices=("whole", "divided"),
    )
    threads: int = setting(0, "CPU threads, which update without locks (Hogwild); 0 = all cores")
    seed: int = setting(0, "random seed; one thread with the same seed gives the same vectors", most=1 << 62)
    device: str = setting("auto", "cpu, or a GPU: cuda or cuda:N; auto = cpu")
    batch: int = setting(0, "windows in a batch on a GPU; 0 = 512, and 256 for hierarchical")


TASKS = (
    "translation",
    "causal-lm",
    "masked-lm",
    "span-corruption",
    "denoising",
    "classification",
    "regression",
    "tagging",
    "image-classification",
)


@dataclass(frozen=True)
class Config:
    """All settings of a run, as a recipe gives them."""

    name: str = setting("run", "name of the run; its folder is runs/NAME")
    task: str = setting("translation", f"training task: {', '.join(TASKS)}", choices=TASKS)
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


MAX_NAME_BYTES = 223  # file systems allow 255, and temporary names of NAME, NAME.json and NAME.error are longer


def name_fault(name: str) -> str | None:
    """Return what is wrong with the name of a run, or None."""
    if not isinstance(name, str) or not name or name != name.strip() or name.startswith("."):
        return "must begin with a character that is neither white space nor a dot, and not end in white space"
    if any(c in "/\\" or unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
        return "must have no slash, backslash or control character"
    return None if len(name.encode()) <= MAX_NAME_BYTES else f"must have at most {MAX_NAME_BYTES} bytes in UTF-8"


LARGEST_TABLE = 1 << 28  # elements of a table whose size follows from settings, such as sinusoidal positions: 1 GiB
