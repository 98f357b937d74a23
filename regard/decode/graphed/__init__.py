"""Decoding on a GPU: one step is one CUDA graph over static memory, replayed until every sentence has come to its end.

Each operation is a plain function on tensors, a Triton kernel beside a torch reference that defines it.
"""
