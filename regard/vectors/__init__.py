"""Word vectors: training by word2vec (CPU threads or a GPU), file formats, look-up, and initial embeddings of models."""
