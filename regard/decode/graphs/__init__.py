"""Decoding on a GPU with continuous batching: one step is one CUDA graph over static memory.

engine.py captures and replays the step, decoding.py lets sentences and prompts enter and leave, slots.py holds their state.
Each operation of a step is a plain function on tensors: a Triton kernel, and a torch reference that defines it.
"""
