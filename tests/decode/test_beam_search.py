"""Beam search against exhaustive search, against a slow beam search, and against Hugging Face's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from fused_rows import kv_rows, qkv_rows
from oracle import (
    BANNED,
    FIRST_WORD,
    LogP,
    Said,
    TableModel,
    every_sequence,
    log_softmax,
    padded,
    random_sources,
    random_table,
    slow_beam,
    tiny_transformer,
)
from tokens import EOS, PADDING, SOS

from regard.config import DecodeConfig
from regard.decode.batch_decoding import decode
from regard.decode.beam_search import beam_search, best_extensions
from regard.decode.constraints import Hypothesis
from regard.models.transformer import Transformer
from regard.text.special_tokens import PAD

CPU = torch.device("cpu")
PENALTIES = (0.0, 0.6, 1.0, 1.5, -0.5)
NAMES = [[5], [6], [7]]  # three sentences of one token, for the models that are tables


def search(model: object, sources: Sequence[Sequence[int]], limits: list[int], **options: object) -> list[list[Said]]:
    found = beam_search(model, padded(sources), torch.tensor(limits), DecodeConfig(**options))  # type: ignore[arg-type]
    return [[as_said(h) for h in hypotheses] for hypotheses in found]


def as_said(h: Hypothesis) -> Said:
    return h.tokens, h.score, h.log_prob, h.ended


def assert_same(found: list[Said], expected: list[Said], tolerance: float = 1e-5) -> None:
    assert [(tokens, ended) for tokens, _, _, ended in found] == [(tokens, ended) for tokens, _, _, ended in expected]
    np.testing.assert_allclose([s[1] for s in found], [s[1] for s in expected], atol=tolerance)
    np.testing.assert_allclose([s[2] for s in found], [s[2] for s in expected], atol=tolerance)


# --- exhaustive search -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_len", [0, 2])
@pytest.mark.parametrize("stop", ["likely", "proven"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_beam_as_wide_as_the_language_is_exhaustive_search(penalty: float, stop: str, min_len: int) -> None:
    """Three words, four tokens: 1 + 3 + 9 + 27 ended and 81 cut sequences; the whole ranked list is compared."""
    table = random_table(seed=1, words=3)
    found = search(
        TableModel(table), NAMES, [4] * 3, beam=121, nbest=121, length_penalty=penalty, beam_stop=stop, min_len=min_len
    )
    for name, ranked in zip(NAMES, found, strict=True):
        expected = every_sequence(partial(table, name[0]), 4, penalty, min_len)
        assert len(expected) == 121 - (0 if min_len == 0 else 1 + 3)
        assert_same(ranked, expected)


@pytest.mark.parametrize("limits", [[1, 2, 3], [4, 1, 4]])
def test_each_sentence_has_its_own_limit(limits: list[int]) -> None:
    table = random_table(seed=2, words=3)
    found = search(TableModel(table), NAMES, limits, beam=121, nbest=121)
    for name, limit, ranked in zip(NAMES, limits, found, strict=True):
        assert_same(ranked, every_sequence(partial(table, name[0]), limit, penalty=1.0))


def test_a_transformer_searched_exhaustively() -> None:
    """Exhaustive search with a real model. Its log-probabilities are taken from whole forwards in fp64, without a cache.

    A logit in fp32 passes through about 33 products of at most 32 terms each, and each term adds an error of eps/2 at most,
    relative to numbers of the logits' size, which is below 8. Hypotheses whose scores differ by less may stand in any order.
    """
    model, sources = tiny_transformer(0), random_sources(0, 3)
    tolerance = 33 * 32 * torch.finfo(torch.float32).eps / 2 * 8
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for source, ranked in zip(sources, search(model, sources, [2] * 3, beam=400, nbest=400), strict=True):
            every = {tuple(said): rest for said, *rest in every_sequence(forward_table(exact, source), 2, penalty=1.0)}
            expected = [(said, *every[tuple(said)]) for said, *_ in ranked]
            assert len(ranked) == len(every) == len({tuple(said) for said, *_ in ranked})
            assert_same(ranked, expected, tolerance)
            scores = np.array([score for _, score, *_ in expected])
            assert (scores[1:] < scores[:-1] + 2 * tolerance).all()


def forward_table(model: Transformer, source: list[int]) -> LogP:
    def log_p(said: tuple[int, ...]) -> np.ndarray:
        logits = model(padded([source]), torch.tensor([[SOS, *said]]))[0, -1]
        return log_softmax(logits.numpy())

    return log_p


# --- a beam narrower than the language ---------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_equals_a_slow_beam_search(k: int, penalty: float) -> None:
    """`likely` stops where the slow one does; `proven` finds what the slow one finds without ever stopping early."""
    for seed in range(8):
        table = random_table(seed, words=4, end=seed % 4 - 1.0, spread=1.0 + seed % 3)
        for stop, slow_stop in (("likely", "likely"), ("proven", "never")):
            options = {"beam": k, "nbest": k, "length_penalty": penalty, "beam_stop": stop, "min_len": seed % 3}
            found = search(TableModel(table), NAMES, [7, 3, 9], **options)
            for name, limit, ranked in zip(NAMES, (7, 3, 9), found, strict=True):
                assert_same(ranked, slow_beam(partial(table, name[0]), k, limit, penalty, seed % 3, slow_stop))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_order_of_the_searches(penalty: float) -> None:
    """likely <= proven <= exhaustive, and each is somewhere strictly less (else this test would show nothing)."""
    best = {"likely": [], "proven": [], "all": []}
    sources = [[name] for name in range(5, 65)]
    table = random_table(seed=9, words=3)
    for stop in ("likely", "proven"):
        found = search(TableModel(table), sources, [5] * 60, beam=1, length_penalty=penalty, beam_stop=stop)
        best[stop] = [ranked[0][1] for ranked in found]
    best["all"] = [every_sequence(partial(table, name), 5, penalty)[0][1] for (name,) in sources]
    likely, proven, exhaustive = (np.array(best[kind]) for kind in ("likely", "proven", "all"))
    assert (likely <= proven + 1e-6).all()
    assert (proven <= exhaustive + 1e-6).all()
    assert (proven < exhaustive - 1e-3).any()
    assert penalty <= 0 or (likely < proven - 1e-3).any()


A, B = FIRST_WORD, FIRST_WORD + 1


def worked_model(p: dict[tuple[int, ...], dict[int, float]]) -> TableModel:
    def table(name: int, said: tuple[int, ...]) -> np.ndarray:
        log_p = np.full(FIRST_WORD + 2, -50.0)
        for token, value in p.get(said, {EOS: 0.4, A: 0.35, B: 0.25}).items():
            log_p[token] = np.log(value)
        return log_p

    return TableModel(table)


def test_stopping_worked_by_hand() -> None:
    """Beam 1, penalty 1, limit 4. After one step: finished ln 0.5 = -0.693; open 'a' at ln 0.4 = -0.916.

    likely: -0.693 >= -0.916 / 1, so it stops there, after one step. proven: -0.916 / 4 = -0.229 could still win. After the
    second step 'a' has ended with ln 0.396 / 2 = -0.463, and the open 'aa' is at ln 0.002 / 4 = -1.55: it stops there,
    after two steps of four.
    """
    p = {(): {EOS: 0.5, A: 0.4, B: 0.1}, (A,): {EOS: 0.99, A: 0.005, B: 0.005}}
    likely, proven = worked_model(p), worked_model(p)
    assert_same(search(likely, [[5]], [4], beam=1, beam_stop="likely")[0], [([], np.log(0.5), np.log(0.5), True)])
    assert likely.steps == 1
    expected = [([A], np.log(0.396) / 2, np.log(0.396), True)]
    assert_same(search(proven, [[5]], [4], beam=1, beam_stop="proven")[0], expected)
    assert proven.steps == 2


@pytest.mark.parametrize("stop", ["likely", "proven"])
def test_stopping_with_a_negative_penalty_worked_by_hand(stop: str) -> None:
    """Beam 2, penalty -0.5: score = ln p * sqrt(|y|), so an open hypothesis scores best at its present length.

    Step 1 finishes '' at ln 0.06 = -2.813, step 2 'a' at ln 0.45 * sqrt(2) = -1.129; open is 'ab', ln 0.378 * sqrt(2) =
    -1.376, which may still beat the first (though not at the limit of 9: ln 0.378 * 3 = -2.919). Step 3 finishes 'ab' at
    ln 0.3024 * sqrt(3) = -2.072; open is 'aba' at ln 0.04536 * sqrt(3) = -5.358: the end.
    """
    p = {
        (): {EOS: 0.06, A: 0.9, B: 0.04},
        (A,): {EOS: 0.5, A: 0.08, B: 0.42},
        (A, B): {EOS: 0.8, A: 0.12, B: 0.08},
    }
    model = worked_model(p)
    (found,) = search(model, [[5]], [9], beam=2, nbest=2, length_penalty=-0.5, beam_stop=stop)
    assert_same(
        found,
        [
            ([A], np.log(0.45) * 2**0.5, np.log(0.45), True),
            ([A, B], np.log(0.3024) * 3**0.5, np.log(0.3024), True),
        ],
    )
    assert model.steps == 3


def test_a_stopped_sentence_leaves_the_batch() -> None:
    """Sentence 5 ends at once, sentence 6 never: the batch has one sentence less after the first step."""
    widths = []

    class Watched(TableModel):
        def step(self, tokens: torch.Tensor, state: object) -> torch.Tensor:
            widths.append(len(tokens))
            return super().step(tokens, state)  # type: ignore[arg-type]

    def table(name: int, said: tuple[int, ...]) -> np.ndarray:
        logits = np.arange(FIRST_WORD + 3, dtype=float)
        logits[EOS] = 30.0 if name == 5 else -30.0
        return log_softmax(logits)

    short, long = search(Watched(table), [[5], [6]], [6, 6], beam=2, nbest=2)
    assert short[0][0] == []
    assert [len(said[0]) for said in long] == [6, 6]
    assert widths == [2, 4, 2, 2, 2, 2]


def test_fewer_sequences_than_places() -> None:
    """One word and a limit of 2: 'end', 'a end', 'a a' are all there is, however many are asked for."""
    table = random_table(seed=3, words=1)
    (ranked,) = search(TableModel(table), [[5]], [2], beam=8, nbest=8)
    assert_same(ranked, every_sequence(partial(table, 5), 2, penalty=1.0))
    assert len(ranked) == 3


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 1000])
@pytest.mark.parametrize(("k", "n"), [(1, 2), (4, 8), (3, 700)])
def test_the_best_extensions_are_those_of_sorting_all(vocab: int, k: int, n: int) -> None:
    """The best may be at the ends of blocks or in the short last block; some hypotheses do not exist (-inf)."""
    rng = np.random.default_rng([vocab, k])
    log_p, log_prob = rng.normal(size=(3, k, vocab)).astype(np.float32), rng.normal(size=(3, k)).astype(np.float32)
    log_p[:, :, rng.random(vocab) < 0.2] = -np.inf
    log_prob[1, 1:] = -np.inf
    found = best_extensions(torch.tensor(log_p), torch.tensor(log_prob), n)
    value, parent, token = (x.numpy() for x in found)
    total = (log_p + log_prob[:, :, None]).reshape(3, -1)
    assert value.shape == (3, min(n, k * vocab))
    np.testing.assert_array_equal(value, -np.sort(-total, axis=1)[:, :n])
    assert (parent < k).all()
    assert (token < vocab).all()
    np.testing.assert_array_equal(total[np.arange(3)[:, None], parent * vocab + token], value)
    for row, pairs in zip(value, parent * vocab + token, strict=True):
        real = pairs[np.isfinite(row)]
        assert len(set(real.tolist())) == len(real)  # each once


# --- Hugging Face ------------------------------------------------------------------------------------------------------

LIMIT = 14


@pytest.fixture(scope="module")
def marian() -> tuple[Transformer, object]:
    """The same weights in a `Transformer` and in a `MarianMTModel`."""
    transformers = pytest.importorskip("transformers")
    ours = tiny_transformer(0, end=1.0, norm="post", tie="all", n_decoder_layers=1)
    c = ours.config
    config = transformers.MarianConfig(
        vocab_size=c.source_vocab,
        d_model=c.d_model,
        encoder_layers=c.n_encoder_layers,
        decoder_layers=c.n_decoder_layers,
        encoder_attention_heads=c.n_heads,
        decoder_attention_heads=c.n_heads,
        encoder_ffn_dim=c.d_ff,
        decoder_ffn_dim=c.d_ff,
        activation_function=c.activation,
        max_position_embeddings=c.max_len,
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=PADDING,
        eos_token_id=EOS,
        bos_token_id=SOS,
        decoder_start_token_id=SOS,
        forced_eos_token_id=None,
    )
    theirs = transformers.MarianMTModel(config).eval()
    missing = theirs.load_state_dict(marian_weights(ours), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"final_logits_bias"}  # zeros from the start
    return ours, theirs


@pytest.fixture(scope="module")
def marian64(marian: tuple[Transformer, object]) -> tuple[Transformer, object]:
    """Return both in fp64, where they have the same log-probabilities to the last bit of the fp32 they are searched in.

    So what is compared are the searches, not the roundings of two ways to multiply matrices.
    """
    ours, theirs = copy.deepcopy(marian)
    return ours.double(), theirs.double()  # type: ignore[attr-defined]


MARIAN = {  # our (sublayer, module) -> theirs, in the order in which ours stacks them
    ("self", "qkv"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self", "out"): ("self_attn.out_proj",),
    ("self", "norm"): ("self_attn_layer_norm",),
    ("cross", "q"): ("encoder_attn.q_proj",),
    ("cross", "kv"): ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    ("cross", "out"): ("encoder_attn.out_proj",),
    ("cross", "norm"): ("encoder_attn_layer_norm",),
    ("ff", "inner"): ("fc1",),
    ("ff", "outer"): ("fc2",),
    ("ff", "norm"): ("final_layer_norm",),
}


def marian_weights(model: Transformer) -> dict[str, torch.Tensor]:
    embedding, h, d = model.target_embedding.weight, model.config.n_heads, model.config.d_head
    rows = {"qkv": qkv_rows(h, h, d), "kv": kv_rows(h, d)}
    weights = {"lm_head.weight": embedding, "model.shared.weight": embedding}
    for side in ("encoder", "decoder"):
        positions = getattr(model, side).schemes[0]
        weights[f"model.{side}.embed_tokens.weight"] = embedding
        weights[f"model.{side}.embed_positions.weight"] = positions.encoding  # sines and cosines in our order
    for name, value in model.named_parameters():  # such as decoder.blocks.0.sublayers.cross.kv.weight
        if ".blocks." in name:  # or decoder.blocks.0.norms.cross.weight
            side, _, i, holder, sublayer, *rest, kind = name.split(".")
            module = "norm" if holder == "norms" else rest[-1]
            theirs = MARIAN[sublayer, module]
            value = value[rows[module]] if module in rows else value
            for target, part in zip(theirs, value.chunk(len(theirs)), strict=True):
                weights[f"model.{side}.layers.{i}.{target}.{kind}"] = part
    return weights


def hugging_face(model: object, sources: list[list[int]], beams: int, **options: object) -> list[list[Said]]:
    """Return what `generate` finds for each source; it does not return log p, which is 0 here."""
    ids = padded(sources)
    out = model.generate(  # type: ignore[attr-defined]
        input_ids=ids.clamp(min=0),
        attention_mask=(ids != PAD).long(),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=LIMIT,
        suppress_tokens=list(BANNED),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    scores = out.sequences_scores.tolist() if beams > 1 else [0.0] * len(sources)
    said = []
    for row, score in zip(out.sequences.tolist(), scores, strict=True):
        tokens = [token for token in row[1:] if token not in (PADDING, EOS)]
        said.append((tokens, score, 0.0, EOS in row))
    return [said[i : i + beams] for i in range(0, len(said), beams)]


def test_marian_gives_the_same_logits(marian: tuple[Transformer, object]) -> None:
    ours, theirs = marian
    source, target = padded(random_sources(4, 20)), torch.tensor(random_targets(5, 20))
    with torch.no_grad():
        mask = (source != PAD).long()
        expected = theirs(input_ids=source.clamp(min=0), attention_mask=mask, decoder_input_ids=target).logits  # type: ignore[operator]
        torch.testing.assert_close(ours(source, target), expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.5


def random_targets(seed: int, count: int) -> list[list[int]]:
    return [[SOS, *row] for row in np.random.default_rng(seed).integers(FIRST_WORD, 23, size=(count, 9)).tolist()]


@pytest.mark.parametrize("min_len", [0, 3])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("stop", "early_stopping"), [("likely", False), ("proven", "never")])
def test_hugging_face_finds_the_same_beams(
    marian64: tuple[Transformer, object], stop: str, early_stopping: object, penalty: float, min_len: int
) -> None:
    """100 ragged sources in one batch, all four hypotheses of each. The two agree in every corner tried here:

    the penalty's length counts the end token, hypotheses cut at the limit rank beside ended ones, banned tokens keep their
    share of the probability, False is our `likely` and "never" our `proven`.
    """
    ours, theirs = marian64
    sources = random_sources(6, 100)
    options = {"length_penalty": penalty, "early_stopping": early_stopping, "min_new_tokens": min_len}
    expected = hugging_face(theirs, sources, 4, **options)
    chosen = DecodeConfig(
        beam=4, nbest=4, length_penalty=penalty, beam_stop=stop, min_len=min_len, max_len_a=0, max_len_b=LIMIT
    )
    found = [[as_said(h) for h in ranked] for ranked in decode(ours, sources, chosen, ours.config.max_len, CPU)]
    tokens = [[(said[0], said[3]) for said in ranked] for ranked in found]
    assert tokens == [[(said[0], said[3]) for said in ranked] for ranked in expected]
    np.testing.assert_allclose(
        [[said[1] for said in ranked] for ranked in found],
        [[said[1] for said in ranked] for ranked in expected],
        atol=1e-4,
    )
    lengths = {len(said[0]) for ranked in found for said in ranked}
    assert len(lengths) >= 6  # the model is not degenerate
    assert len({tuple(ranked[0][0]) for ranked in found}) >= 20


def test_hugging_face_is_as_greedy(marian64: tuple[Transformer, object]) -> None:
    ours, theirs = marian64
    sources = random_sources(7, 100)
    found = decode(ours, sources, DecodeConfig(beam=1, max_len_a=0, max_len_b=LIMIT), ours.config.max_len, CPU)
    expected = hugging_face(theirs, sources, 1)
    assert [(h.tokens, h.ended) for (h,) in found] == [(said[0], said[3]) for (said,) in expected]
