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
) -> Store:
    """Tokenize a parallel corpus, or take it from the cache.

    Sources begin with language tokens if the corpus has directions, and unknown target words become positional tokens if
    the vocabulary has them."""
    own = DirectedCorpus(corpus) if corpus.directions else corpus
    source: Encoder = DirectedTokenizer(tokenizers.source) if corpus.directions else tokenizers.source
    if not tokenizers.target.positional_unknown():
        return prepare_store(own, (source, tokenizers.target), filters, cache_folder(), progress)
    paired = PairedCorpus(own)
    target = PositionalUnknownTokenizer(tokenizers, paired)
    return prepare_store(paired, (source, target), filters, cache_folder(), progress)
