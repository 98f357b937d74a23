"""Generation against the loop of transformers, independence of the batch, scoring, and text up to a stop string."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from fused_rows import fused, qkv_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import parameters_by_sublayer
from tokens import EOS, MASK, PADDING, SETTINGS, SOS, UNK
from torch import Tensor

from regard.config import DecodeConfig, ModelConfig, TokenizerConfig
from regard.decode.generation import GenerationRequest, TextStreamer, generate, token_log_probs
from regard.errors import RegardError
from regard.look.record import record
from regard.models.gpt import GPT
from regard.text.tokenizer import Tokenizer

V = 23
BANNED = [PADDING, SOS, UNK, MASK]


def tiny_gpt(seed: int = 2, end: float = 0.0, **sizes: object) -> GPT:
    """Return a random model whose texts end at different lengths and sometimes repeat tokens."""
    chosen = {"n_decoder_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 48, **sizes}
    model = GPT(ModelConfig(**{"preset": "gpt-tiny", "target_vocab": V, "dropout": 0.0, **SETTINGS, **chosen})).eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    rows = qkv_rows(model.config.n_heads, model.config.n_kv_heads, model.config.d_head)
    with torch.no_grad():
        for name, weight in parameters_by_sublayer(model):
            spread = 1.0 if "norm" in name and name.endswith("weight") else 0.1 if name.endswith("bias") else 0.4
            drawn = torch.randn(weight.shape, generator=generator) * spread
            weight.copy_(fused(drawn, rows) if ".qkv." in name else drawn)  # the same model whatever the layout
        embedding = model.embedding.weight
        embedding.copy_(torch.nn.functional.normalize(embedding, dim=1) * 1.6)
        model.decoder.norm.bias += end * embedding[EOS] / embedding[EOS].norm() ** 2  # type: ignore[operator]
    return model.requires_grad_(False)


MODEL = tiny_gpt()


def random_prompts(seed: int, count: int, longest: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[SOS, *rng.integers(5, V, size=rng.integers(0, longest + 1)).tolist()] for _ in range(count)]


def tokens_and_end(row: GenerationRequest) -> tuple[list[int], str]:
    return row.tokens, row.end


def go_on(prompts: list[list[int]], model: GPT = MODEL, **options: object) -> list[GenerationRequest]:
    chosen = {"beam": 1, "max_new_tokens": 20, **options}
    return generate(model, prompts, DecodeConfig(**chosen))  # type: ignore[arg-type]


# ---- transformers ----------------------------------------------------------------------------------------------------


def their_generate(model: GPT, prompt: list[int], **settings: object) -> list[int]:
    """transformers' loop around the full forward of our model: no cache, no code of `regard.decode`."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    class Peer(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.GPT2Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.anchor = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
            return CausalLMOutput(logits=model(input_ids))

    peer = Peer(transformers.GPT2Config(vocab_size=V, bos_token_id=SOS, eos_token_id=EOS)).eval()
    how = transformers.GenerationConfig(
        eos_token_id=EOS, pad_token_id=PADDING, suppress_tokens=BANNED, use_cache=False, do_sample=False, **settings
    )
    ids = torch.tensor([prompt])
    found = peer.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.7}])
def test_greedy_writing_is_that_of_transformers(settings: dict[str, float]) -> None:
    prompts = random_prompts(1, 8)
    expected = [their_generate(MODEL, prompt, max_new_tokens=20, **settings) for prompt in prompts]
    rows = go_on(prompts, **settings)  # together
    assert [[*row.tokens, *([EOS] if row.end == "end" else [])] for row in rows] == expected
    assert len({len(row.tokens) for row in rows}) >= 3 or settings.get("repetition_penalty") == 0.7  # which never ends


def test_the_penalty_changes_what_is_written() -> None:
    prompts = random_prompts(1, 8)
    plain, averse = (go_on(prompts, repetition_penalty=penalty) for penalty in (1.0, 1.3))
    assert sum(a.tokens != b.tokens for a, b in zip(plain, averse, strict=True)) >= 4


# ---- neighbours ------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 6),
    batch_tokens=st.sampled_from([1, 60, 10**6]),
    temperature=st.sampled_from([0.0, 0.8, 2.0]),
)
def test_a_row_does_not_depend_on_its_batch(seed: int, count: int, batch_tokens: int, temperature: float) -> None:
    prompts = random_prompts(seed, count)
    together = go_on(prompts, temperature=temperature, seed=seed, batch_tokens=batch_tokens)
    for i, (prompt, row) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = go_on([prompt], temperature=temperature, seed=seed + i)
        assert tokens_and_end(alone) == tokens_and_end(row)
        assert alone.log_probs == pytest.approx(row.log_probs, abs=1e-4)


def test_short_prompts_use_the_whole_context_beside_long_ones() -> None:
    """The columns of the cache are used up while the short row may still have many more tokens."""
    model = tiny_gpt(end=-9.0, max_len=24)
    prompts = [[SOS, *range(5, 5 + n)] for n in (17, 1, 9)]
    rows = go_on(prompts, model, max_new_tokens=99, temperature=1.0)
    assert [len(row.ids) for row in rows] == [24, 24, 24]
    assert {row.end for row in rows} == {"context"}
    for i, row in enumerate(rows):
        assert tokens_and_end(
            go_on([prompts[i]], model, max_new_tokens=99, temperature=1.0, seed=i)[0]
        ) == tokens_and_end(row)


def test_samples_of_a_prompt_read_it_once_and_have_their_own_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(3, 2)
    read: list[int] = []
    begin = GPT.begin
    monkeypatch.setattr(GPT, "begin", lambda model, ids: (read.append(len(ids)), begin(model, ids))[1])
    rows = go_on(prompts, temperature=1.5, nbest=5, seed=4)
    assert read == [2]
    assert len({tuple(row.tokens) for row in rows[:5]}) > 2
    for i, prompt in enumerate(prompts):
        for j in range(5):
            (alone,) = go_on([prompt], temperature=1.5, seed=(4 + i) * 5 + j)
            assert tokens_and_end(alone) == tokens_and_end(rows[i * 5 + j])


# ---- what is written -------------------------------------------------------------------------------------------------


def brute_log_probs(model: GPT, ids: list[int]) -> list[float]:
    """Return log p of each token but the first, from one full forward pass per token."""
    found = []
    for t in range(1, len(ids)):
        logits = model(torch.tensor([ids[:t]]))[0, -1].double().numpy()
        found.append(float(logits[ids[t]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())))
    return found


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_k": 4}, {"repetition_penalty": 1.4}])
def test_log_probabilities_are_the_models_own(options: dict[str, float]) -> None:
    """log p is over all tokens, disallowed ones included, at temperature 1 and without a penalty."""
    for row in go_on(random_prompts(5, 4), **options):
        whole = [*row.ids, *([EOS] if row.end == "end" else [])]
        assert row.log_probs == pytest.approx(brute_log_probs(MODEL, whole)[len(row.prompt) - 1 :], abs=1e-4)


def test_first_tokens_have_the_frequency_of_their_probability() -> None:
    n, prompt = 3000, [SOS, 7, 9]
    p = MODEL(torch.tensor([prompt]))[0, -1].double().numpy()
    p[BANNED] = -np.inf
    p = np.exp(p - p.max()) / np.exp(p - p.max()).sum()
    rows = go_on([prompt], temperature=1.0, nbest=n, max_new_tokens=1, batch_tokens=10**6)
    counts = Counter(row.tokens[0] if row.tokens else EOS for row in rows)
    for token in range(V):
        spread = (n * p[token] * (1 - p[token])) ** 0.5
        assert abs(counts[token] - n * p[token]) <= 4.5 * spread + (p[token] > 0), token


def test_special_tokens_are_never_written_and_the_end_not_before_its_time() -> None:
    rows = go_on([[SOS]], temperature=5.0, nbest=200, min_len=3)
    assert {t for row in rows for t in row.tokens} == set(range(5, V))
    assert min(len(row.tokens) for row in rows) == 3
    assert {row.end for row in rows} == {"end", "length"}
    assert all(len(row.log_probs) == len(row.tokens) + (row.end == "end") <= 20 for row in rows)


def test_a_callback_receives_every_token_and_may_end_a_row() -> None:
    received: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def on_token(row: int, token: int) -> bool:
        received[row].append(token)
        return row == 1 and len(received[row]) == 2

    prompts = [[SOS, 5], [SOS, 6], [SOS, 7]]
    model = tiny_gpt(end=-9.0)
    free = go_on(prompts, model, max_new_tokens=6)
    rows = generate(model, prompts, DecodeConfig(max_new_tokens=6, beam=1), on_token)
    assert [received[i] for i in range(3)] == [row.tokens for row in rows]
    first, _, last = (tokens_and_end(row) for row in free)
    assert [tokens_and_end(row) for row in rows] == [first, (free[1].tokens[:2], "stop"), last]


def test_recording_sees_one_forward_over_what_was_written() -> None:
    prompts = [[SOS, 5, 6, 7], [SOS, 8]]
    with record(MODEL, "decoder.0.self") as tape:
        rows = go_on(prompts)
    (trace,) = tape["decoder.0.self"]
    assert trace.tokens is not None
    assert trace.sentences is not None
    for sentence, tokens in zip(trace.sentences, trace.tokens, strict=True):
        assert tokens[: len(rows[sentence].ids)] == rows[sentence].ids


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([SOS] + [5] * 47, {}, "prompt 2 has 48 tokens, but the model was built for at most 48 .* shorten it to 47"),
        ([SOS] + [5] * 70, {}, "prompt 2 has 71 tokens"),
        ([], {}, "prompt 2 is empty"),
        ([SOS], {"nbest": 3}, "3 samples at temperature 0 are all the same"),
        ([SOS], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([SOS], {"min_p": 1.5}, "min_p must be from 0 to 1"),
        ([SOS], {"repetition_penalty": 0.0}, "repetition_penalty above 0"),
    ],
)
def test_what_cannot_be_is_refused_with_sizes(prompt: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        go_on([[SOS, 5], prompt], **options)


@pytest.mark.parametrize(("asked", "end"), [(1, "length"), (2, "context")])
def test_the_last_token_that_fits_is_written(asked: int, end: str) -> None:
    (row,) = go_on([[SOS] + [5] * 46], tiny_gpt(end=-9.0), max_new_tokens=asked)
    assert (len(row.log_probs), row.end) == (1, end)


# ---- scoring ---------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), count=st.integers(1, 5), batch_tokens=st.sampled_from([1, 30, 10**6]))
def test_scores_are_those_of_the_full_forward(seed: int, count: int, batch_tokens: int) -> None:
    texts = [[*ids, 7] for ids in random_prompts(seed, count)]
    found = token_log_probs(MODEL, texts, DecodeConfig(batch_tokens=batch_tokens))
    for ids, row in zip(texts, found, strict=True):
        assert row == pytest.approx(brute_log_probs(MODEL, ids), abs=1e-4)


def test_scoring_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = random_prompts(2, 6)
    texts = [[*ids, 9, 8] for ids in texts]
    whole = token_log_probs(MODEL, texts, DecodeConfig())
    monkeypatch.setattr("regard.decode.generation.CHUNK", 3)
    for a, b in zip(token_log_probs(MODEL, texts, DecodeConfig()), whole, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


# ---- text up to a stop string ----------------------------------------------------------------------------------------

LINES = ["abab abc ba cab.", "aa bb cc: ab\ncab", "é ü ü a", "User: a\nUser: b"]
BYTES = Tokenizer.train(LINES, TokenizerConfig(kind="byte-bpe", vocab_size=275))
PIECES = Tokenizer.train(LINES, TokenizerConfig(kind="bpe", vocab_size=40))


def cut(text: str, stops: list[str]) -> str:
    """Return the text before the first stop string that is complete, looking character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    text=st.text("abcé :\n", max_size=30),
    stops=st.lists(st.text("abcé :\n", min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 99),
)
def test_nothing_of_a_stop_string_is_told_however_it_is_cut_into_tokens(text: str, stops: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    while text:  # also tokens that the tokenizer itself would not choose
        n = int(rng.integers(1, 6))
        ids += BYTES.encode(text[:n])
        text = text[n:]
    whole, streamed = BYTES.decode(ids), ""
    streamer = TextStreamer(BYTES, [], stops)
    for id in ids:
        streamed += streamer.push(id)
        assert cut(whole, stops).startswith(streamed)
        if streamer.stopped:
            break
    assert streamed + streamer.flush() == cut(whole, stops)
    assert not any(s in cut(whole, stops) for s in stops)


def test_of_stop_strings_in_one_token_the_one_that_is_complete_first_counts() -> None:
    (token,) = ids = BYTES.encode("User")
    assert BYTES.decode(ids) == "User"  # one token that holds both
    for stops in (["User", "se"], ["se", "User"]):
        assert TextStreamer(BYTES, [], stops).push(token) == "U"


def test_text_is_told_as_soon_as_it_cannot_be_a_stop_string() -> None:
    streamer = TextStreamer(BYTES, [], ["User:"])
    streamed = [streamer.push(BYTES.encode(char)[0]) for char in "a Us b User"]
    assert streamed == ["a", " ", "", "", "Us ", "b", " ", "", "", "", ""]
    assert streamer.flush() == "User"


def test_the_space_after_the_prompt_is_told() -> None:
    """A word alone decodes without the space in front of it; after a prompt the space counts."""
    prompt, rest = PIECES.encode("ab"), PIECES.encode("ab cab")[len(PIECES.encode("ab")) :]
    assert PIECES.decode(rest) == "cab"
    streamer = TextStreamer(PIECES, [SOS, *prompt], [])
    assert "".join(map(streamer.push, rest)) + streamer.flush() == " cab"
