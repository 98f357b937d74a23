"""Fused kernels and the pure functions that attention layers are made of.

Triton kernels are in modules that end in `_triton`; the module without that ending has the definition in plain torch,
chooses between the two, and registers operators. `step_linear` has its few kernels itself.

| module                | what it fuses                                                           |
|-----------------------|-------------------------------------------------------------------------|
| attention_functions   | none: split heads, rotary embeddings, masked softmax, in plain torch    |
| masks, weight_layout  | none: attention masks, row order of fused weight matrices               |
| short_attention       | attention of at most 128 keys                                           |
| toeplitz_attention    | attention with a position bias that depends on the distance             |
| fire_attention        | attention with FIRE's position bias                                     |
| flex_attention        | torch's block-sparse FlexAttention                                      |
| residual_norm         | residual sum, dropout and norm                                          |
| linear_activation     | linear layer and activation                                             |
| cross_entropy         | output projection and cross-entropy, in chunks                          |
| step_linear           | norm, matrix-vector product, activation and residual of a decoding step |
| step_attention        | attention of a decoding step over a static key/value cache              |
| cuda_graph            | none: capture and replay of CUDA graphs                                 |
| cpu_threads, hashing  | none: threads of CPU products, counter-based random bits                |
"""
