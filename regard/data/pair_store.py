"""The token store of a parallel corpus: both sides tokenized once, filtered, and kept in the token cache."""

from __future__ import annotations

from collections.abc import Callable

from regard.data.multilingual import DirectedCorpus, DirectedTokenizer
from regard.data.parallel_corpus import ParallelCorpus
from regard.data.positional_unknown import PairedCorpus, PositionalUnknownTokenizer
from regard.data.token_cache import Encoder, Filters, Store, cache_folder, prepare_store
from regard.text.tokenizer import Tokenizers


def prepare_pair_store(
    corpus: ParallelCorpus,
    tokenizers: Tokenizers,
    filters: Filters,
    progress: Callable[[int], None] = lambda done: None,
    unknown_words: PositionalUnknownTokenizer | None = None,
) -> Store:
    """Tokenize a parallel corpus, or take it from the cache.

    Sources begin with language tokens if the corpus has directions, and unknown target words become positional tokens if
    the vocabulary has them: by `unknown_words`, otherwise by a word alignment that is learned from this corpus itself."""
    own = DirectedCorpus(corpus) if corpus.directions else corpus
    source: Encoder = DirectedTokenizer(tokenizers.source) if corpus.directions else tokenizers.source
    if not tokenizers.target.positional_unknown():
        return prepare_store(own, (source, tokenizers.target), filters, cache_folder(), progress)
    target = unknown_words or align_unknown_words(corpus, tokenizers)
    paired = PairedCorpus(own, target.corpus)
    return prepare_store(paired, (source, target), filters, cache_folder(), progress)


def align_unknown_words(corpus: ParallelCorpus, tokenizers: Tokenizers) -> PositionalUnknownTokenizer:
    """Return a tokenizer of targets that learns from a corpus which source word each unknown word comes from.

    It learns when it first encodes a text, so a corpus in the cache takes no time."""
    paired = PairedCorpus(DirectedCorpus(corpus) if corpus.directions else corpus)
    return PositionalUnknownTokenizer(tokenizers, paired)
