"""Weights recorded during a search equal those of a forward pass over the hypothesis; the tree is that of the search."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokens import EOS, MASK, PADDING, SOS, UNK
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.batch_decoding import search
from regard.decode.beam_search import beam_search
from regard.decode.constraints import Hypothesis, length_limits, pad_rows
from regard.decode.generation import generate
from regard.errors import RegardError
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.layers.hooks import is_observed
from regard.look.beam_search_trace import BeamNode, BeamSearchTrace, SearchTracer, trace_generation, trace_translation
from regard.look.record import record
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.text.special_tokens import PAD

sys.path.append(str(Path(__file__).parent))
from small import MAX_LEN, gpt, ids, seq2seq, transformer

CPU = torch.device("cpu")
SOURCES = [[*x[x != PAD].tolist(), EOS] for x in ids(5, 1, 12, 3, 8, 9, 2, seed=4)]
BEAM = DecodeConfig(beam=4, nbest=3, max_len_a=1.0, max_len_b=8, length_penalty=1.0)
MODELS: dict[str, Any] = {
    "sinusoidal": lambda: transformer(),
    "post-norm": lambda: transformer(norm="post"),
    "rope, grouped": lambda: transformer(positions="rope", n_kv_heads=2),
    "alibi": lambda: transformer(positions="alibi"),
    "t5": lambda: transformer(positions="t5", n_kv_heads=1),
    "shaw": lambda: transformer(positions="shaw"),
    "window": lambda: transformer(**{"attention.window": 3}),
    "convolutions": lambda: transformer(mixer="convolution", **{"convolution.kernel": 3}),
    "additive": lambda: seq2seq(**{"recurrent.bidirectional": True}),
    "general, two layers": lambda: seq2seq(attention_score="general", cell="gru", n_decoder_layers=2),
    "dot": lambda: seq2seq(attention_score="dot", cell="lstm", **{"recurrent.bidirectional": False}),
}
every_model = pytest.mark.parametrize("name", MODELS)


@torch.no_grad()
def ending(model: Any, share: float = 0.05) -> Any:
    """In doubt about what to say, and in that share of the places the end token is the likeliest."""
    model.head.weight = torch.nn.Parameter(
        torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(1))
    )
    logits = model(pad_rows(SOURCES, CPU), ids(*[12] * len(SOURCES), seed=5))
    model.head.weight.div_(logits.std())
    logits = model(pad_rows(SOURCES, CPU), ids(*[12] * len(SOURCES), seed=5))
    gap = logits.amax(-1) - logits[..., EOS]
    model.head.bias = torch.nn.Parameter(torch.zeros(len(model.head.weight)))
    model.head.bias[EOS] = gap.flatten().quantile(share)
    return model


def run(
    model: Any, options: DecodeConfig, start: tuple[int, ...] = (SOS,)
) -> tuple[SearchTracer, list[list[Hypothesis]]]:
    """All sentences in one batch; the same as without anybody who looks."""
    source, rows = pad_rows(SOURCES, CPU), list(range(len(SOURCES)))
    tracer = SearchTracer(model, options, len(start))
    found = search(tracer, source, rows, options, MAX_LEN, start)
    assert found == search(model, source, rows, options, MAX_LEN, start)
    return tracer, found


def said(hypothesis: Hypothesis) -> list[int]:
    return [*hypothesis.tokens, *[EOS] * hypothesis.ended]


@torch.no_grad()
def forced(
    model: Transformer | Seq2Seq, source: list[int], tokens: list[int], start: tuple[int, ...]
) -> dict[str, Tensor]:
    with record(model) as tape:
        model(torch.tensor([source]), torch.tensor([[*start, *tokens[:-1]]]))
    return {name: tape.weights(name)[0] for name in tape}


def check_weights(found: BeamSearchTrace, expected: dict[str, Tensor]) -> None:
    assert found.weights.keys() == expected.keys()
    for name, w in expected.items():
        torch.testing.assert_close(found.weights[name], w, atol=1e-5, rtol=0)


def best(found: BeamSearchTrace) -> list[BeamNode]:
    return [node for level in found.steps for node in level if node.best]


def check_tree(found: BeamSearchTrace, hypothesis: Hypothesis, model: Any, source: list[int]) -> None:
    """Every node is worth what the model says of its tokens; the survivors are the hypothesis."""
    path = best(found)
    assert [node.token for node in path] == said(hypothesis)
    assert path[-1].ended == hypothesis.ended
    assert path[-1].log_prob == pytest.approx(hypothesis.log_prob, abs=1e-4)
    texts: list[list[list[int]]] = []
    for t, level in enumerate(found.steps):
        above = texts[-1] if t else [[]]
        texts.append([[*above[node.parent or 0], node.token] for node in level])
        assert all((node.parent is None) == (t == 0) for node in level)
        assert all(not found.steps[t - 1][node.parent].ended for node in level if node.parent is not None)
        assert all((node.token == EOS) == node.ended for node in level)
        assert len({tuple(text) for text in texts[-1]}) == len(level)
    logits = model(torch.tensor([source] * len(texts[-1])), torch.tensor([[SOS, *text[:-1]] for text in texts[-1]]))
    scored = logits.log_softmax(-1).gather(2, torch.tensor(texts[-1])[..., None]).sum((1, 2))
    for node, value in zip(found.steps[-1], scored.tolist(), strict=True):
        assert node.log_prob == pytest.approx(value, abs=1e-4)


@every_model
def test_weights_recorded_during_beam_search_are_those_of_a_forced_forward(name: str) -> None:
    everything = []
    for share in (0.05, 0.4):  # some are cut off, some stop early
        model = ending(MODELS[name](), share)
        tracer, found = run(model, BEAM)
        for i, ranked in enumerate(found):
            for hypothesis in (ranked[0], ranked[-1]):
                seen = tracer.trace(said(hypothesis), i)
                check_weights(seen, forced(model, SOURCES[i], said(hypothesis), (SOS,)))
                check_tree(seen, hypothesis, model, SOURCES[i])
                everything.append(hypothesis)
        assert not is_observed(model)
    assert {hypothesis.ended for hypothesis in everything} == {True, False}
    assert len({len(hypothesis.tokens) for hypothesis in everything}) > 4


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("name", ["rope, grouped", "additive"])
def test_of_greedy_search_and_of_samples_the_tree_is_a_line(name: str, options: dict[str, Any]) -> None:
    model = ending(MODELS[name]())
    tracer, found = run(model, DecodeConfig(beam=1, max_len_a=1.0, max_len_b=6, **options))
    for i, (hypothesis,) in enumerate(found):
        seen = tracer.trace(said(hypothesis), i)
        assert [len(level) for level in seen.steps] == [1] * len(said(hypothesis))
        check_weights(seen, forced(model, SOURCES[i], said(hypothesis), (SOS,)))
        check_tree(seen, hypothesis, model, SOURCES[i])
    assert len({len(hypothesis.tokens) for (hypothesis,) in found}) > 1


def test_a_start_of_two_tokens_is_read_and_not_written() -> None:
    model = ending(transformer(positions="alibi"))
    tracer, found = run(model, BEAM, (EOS, 7))
    for i, ranked in enumerate(found):
        seen = tracer.trace(said(ranked[0]), i)
        check_weights(seen, forced(model, SOURCES[i], said(ranked[0]), (EOS, 7)))
        assert [node.token for node in best(seen)] == said(ranked[0])


@pytest.mark.parametrize("kind", ["transformer", "seq2seq"])
def test_hypotheses_that_tie(kind: str) -> None:
    """Tokens come in pairs with one vector each, so every hypothesis has twins of the same log p."""
    model: Any = transformer(tie="none") if kind == "transformer" else seq2seq(tie="none")
    with torch.no_grad():
        for weight in (model.head.weight, model.target_embedding.weight):
            weight[6:22:2] = weight[5:21:2]
    tracer, found = run(model, replace(BEAM, min_len=4))
    ties = 0
    for i, ranked in enumerate(found):
        seen = tracer.trace(said(ranked[0]), i)
        ties += sum(len(level) - len({round(node.log_prob, 5) for node in level}) for level in seen.steps)
        check_weights(seen, forced(model, SOURCES[i], said(ranked[0]), (SOS,)))
        check_tree(seen, ranked[0], model, SOURCES[i])
    assert ties > 20


def test_the_tree_of_a_search_worked_out_by_hand() -> None:
    """A beam of two over A and B:

    <sos> -> A 0.6, B 0.3, end 0.1;  A -> A 0.1, B 0.4, end 0.5;  B -> A 0.2, B 0.1, end 0.7
    """
    a, b = 5, 6
    table = torch.full((8, 8), 1e-9)
    for last, p in ((SOS, (0.6, 0.3, 0.1)), (a, (0.1, 0.4, 0.5)), (b, (0.2, 0.1, 0.7))):
        table[last, [a, b, EOS]] = torch.tensor(p)
    model = transformer(source_vocab=8, target_vocab=8)
    step = model.step
    model.step = lambda tokens, state: step(tokens, state) * 0 + table[tokens].log()  # type: ignore[method-assign]
    options = DecodeConfig(beam=2, length_penalty=0.0)
    tracer = SearchTracer(model, options)
    source = torch.tensor([[5, 6, EOS]])
    ((found,),) = beam_search(tracer, source, length_limits(torch.tensor([3]), options, 10), options)
    assert said(found) == [a, EOS]
    seen = tracer.trace([a, EOS])
    levels = [[(n.token, n.parent, round(math.exp(n.log_prob), 6), n.ended, n.best) for n in x] for x in seen.steps]
    # after A (0.6) and B (0.3): A end 0.30, A B 0.24, B end 0.21, A A 0.06: A end is among the best two, so it is kept
    # A B and A A stay open (B A is worth 0.06 too)
    assert levels[0] == [(a, None, 0.6, False, True), (b, None, 0.3, False, False)]
    assert levels[1][0] == (b, 0, 0.24, False, False)
    assert levels[1][1][2:] == (0.06, False, False)
    assert levels[1][2:] == [(EOS, 0, 0.3, True, True)]
    # A B end 0.168 is kept, and two finished ones are better than any that is open: the search stops
    assert (EOS, 0, 0.168, True, False) in levels[2]
    assert len(levels) == 3


def test_rows_that_only_fill_the_beam_are_no_hypotheses() -> None:
    """A vocabulary of one word: of a beam of four only one place can be taken."""
    model = transformer(source_vocab=6, target_vocab=6)
    options = DecodeConfig(beam=4, max_len_a=0.0, max_len_b=5)
    source = torch.tensor([[5, 5, EOS]])
    tracer = SearchTracer(model, options)
    (ranked,) = beam_search(tracer, source, torch.tensor([5]), options)
    seen = tracer.trace(said(ranked[0]))
    for t, level in enumerate(seen.steps):
        texts = [(node.token, node.ended) for node in level]
        assert sorted(texts) == sorted({(5, False), (EOS, True)}), t
    check_weights(seen, forced(model, source[0].tolist(), said(ranked[0]), (SOS,)))
    assert not {PADDING, SOS, UNK, MASK} & {node.token for level in seen.steps for node in level}


def test_the_end_token_is_no_node_before_it_may_be_said() -> None:
    model = ending(transformer(), 0.5)
    tracer, found = run(model, replace(BEAM, min_len=3))
    ended = 0
    for i, ranked in enumerate(found):
        seen = tracer.trace(said(ranked[0]), i)
        assert not any(node.ended for level in seen.steps[:3] for node in level)
        ended += sum(node.ended for node in seen.steps[3])
    assert ended > 0


def test_a_recording_around_it_hears_nothing_of_the_steps() -> None:
    model = transformer()
    with record(model, stream=True) as tape:
        run(model, replace(BEAM, nbest=1))
        steps = [len(tape[name]) for name in tape]
        tracer = SearchTracer(model, BEAM)
        beam_search(tracer, pad_rows(SOURCES, CPU), torch.full((7,), 4), BEAM)
        assert [len(tape[name]) for name in tape] == steps
        assert is_observed(model)


def test_what_the_search_never_followed_is_refused_and_so_is_a_model_without_attention() -> None:
    tracer, _ = run(transformer(), BEAM)
    with pytest.raises(RegardError, match="no such hypothesis"):
        tracer.trace([0, 0])
    with pytest.raises(RegardError, match="no attention"):
        SearchTracer(seq2seq(attention_score="none"))


# ---- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"beam": 4, "nbest": 2}, {"beam": 1}, {"temperature": 0.9, "beam": 1, "seed": 2}])
@pytest.mark.parametrize("kind", ["translation", "rope", "rnnsearch"])
def test_a_sentence_is_translated_as_ever(bundles: Any, kind: str, options: dict[str, Any]) -> None:
    translator = Translator(bundles[kind])
    text = "der Mann hat einen roten Apfel."
    translation, seen = trace_translation(translator, text, max_len_b=8, max_len_a=0.0, **options)
    assert translation == translator.translate(text, max_len_b=8, max_len_a=0.0, **options)
    path = best(seen)
    assert path[-1].log_prob == pytest.approx(translation.log_prob, abs=1e-4)
    pieces = translator.tokenizers.target.pieces([node.token for node in path if node.token != EOS])
    assert tuple(pieces) == translation.tokens
    with record(translator.model) as tape:
        translator.translate(text, max_len_b=8, max_len_a=0.0, **options)
    check_weights(seen, {name: tape.weights(name)[0] for name in tape})
    with pytest.raises(RegardError, match="nothing to translate"):
        trace_translation(translator, " ")
    with pytest.raises(RegardError, match="one sample can be followed"):
        trace_translation(translator, text, temperature=1.0, nbest=2)
    with pytest.raises(RegardError, match="cannot be traced"):
        trace_translation(translator, text, beam=2, prune=3.0)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"stop": "a"}])
def test_a_text_is_continued_as_ever(bundles: Any, options: dict[str, Any]) -> None:
    writer = Generator(bundles["gpt"])
    generation, seen = trace_generation(writer, "the man", max_new_tokens=9, **options)
    assert generation == writer.generate("the man", max_new_tokens=9, **options)
    assert [len(level) for level in seen.steps] == [1] * (len(generation.tokens) + (generation.end == "end"))
    assert best(seen)[-1].log_prob == pytest.approx(generation.log_prob, abs=1e-4)
    with record(writer.model) as tape:
        writer.generate("the man", max_new_tokens=9, **options)
    check_weights(seen, {name: tape.weights(name)[0] for name in tape})
    same, line = trace_generation(writer, "the man", beam=3, max_new_tokens=9, **options)
    assert (same, line.steps) == (generation, seen.steps)
    with pytest.raises(RegardError, match="one text"):
        trace_generation(writer, "the man", n=2, temperature=1.0)


def test_prompts_of_several_lengths_in_one_batch() -> None:
    model, prompts = gpt(positions="rope", n_kv_heads=2), [[SOS, 7, 8, 9, 10], [SOS, 11], [SOS, 12, 13]]
    options = DecodeConfig(beam=1, max_new_tokens=6)
    tracer = SearchTracer(model, options)
    rows = generate(tracer, prompts, options)  # type: ignore[arg-type]
    for i, row in enumerate(sorted(rows, key=lambda row: -len(row.prompt))):  # as they stand in the batch
        tokens = [*row.tokens, *[EOS] * (row.end == "end")]
        with record(model) as tape, torch.no_grad():
            model(torch.tensor([[*row.prompt, *tokens[:-1]]]))
        check_weights(tracer.trace(tokens, i), {name: tape.weights(name)[0] for name in tape})
