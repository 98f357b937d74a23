"""The token store of a parallel corpus: both sides tokenized once, filtered, and kept in the token cache."""

from __future__ import annotations

from collections.abc import Callable

from regard.data.multilingual import DirectedCorpus, DirectedTokenizer
from regard.data.parallel_corpus import ParallelCorpus
from regard.data.token_cache import Filters, Store, cache_folder, prepare_store
from regard.text.tokenizer import Tokenizers


def prepare_pair_store(
    corpus: ParallelCorpus,
    tokenizers: Tokenizers,
    filters: Filters,
    progress: Callable[[int], None] = lambda done: None,
) -> Store:
    """Tokenize a parallel corpus, or take it from the cache; sources begin with language tokens if it has directions."""
    if not corpus.directions:
        return prepare_store(corpus, (tokenizers.source, tokenizers.target), filters, cache_folder(), progress)
    directed = (DirectedTokenizer(tokenizers.source), tokenizers.target)
    return prepare_store(DirectedCorpus(corpus), directed, filters, cache_folder(), progress)
