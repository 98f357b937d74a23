"""A look-up is a product with a one-hot vector; a tied head multiplies by the transpose of the same matrix."""

import torch
import torch.nn.functional as F

from regard.layers.embedding import Embedding, Head

V, C = 11, 16


def test_the_look_up_is_a_one_hot_vector_times_the_matrix() -> None:
    embedding = Embedding(V, C)
    ids = torch.tensor([[3, 0, 10], [7, 7, 1]])
    one_hot = F.one_hot(ids, V).float()
    torch.testing.assert_close(embedding(ids), one_hot @ embedding.weight * 4.0)  # sqrt(16) = 4


def test_one_hots_are_orthogonal_and_learned_vectors_are_not() -> None:
    motel, hotel = F.one_hot(torch.tensor([2, 5]), V).float()
    assert motel @ hotel == 0
    a, b = Embedding(V, C)(torch.tensor([2, 5]))
    assert a @ b != 0


def test_the_head_scores_each_piece_by_its_product_with_the_hidden_vector() -> None:
    embedding = Embedding(V, C)
    head = Head(embedding.weight)
    hidden = torch.randn(2, 3, C)
    logits = head(hidden)
    assert logits.shape == (2, 3, V)
    for piece in range(V):
        torch.testing.assert_close(logits[..., piece], (hidden * embedding.weight[piece]).sum(-1))


def test_a_tied_matrix_is_one_parameter_that_learns_from_both_ends() -> None:
    embedding = Embedding(V, C)
    head = Head(embedding.weight)
    assert head.weight is embedding.weight
    hidden = embedding(torch.tensor([3]))
    head(hidden.detach()).sum().backward()
    assert embedding.weight.grad is not None
    assert (embedding.weight.grad.abs().sum(1) > 0).all()  # every row, through the head
