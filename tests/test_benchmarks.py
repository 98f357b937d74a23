"""The benchmarks run (tiny, on the CPU), and they compare equal work."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from regard import model_folder
from regard.config import DecodeConfig, TokenizerConfig
from regard.data.parallel_corpus import ParallelCorpus
from regard.models.architectures import make_model, preset, resolve
from regard.text.special_tokens import PAD
from regard.text.tokenizer import Tokenizer, Tokenizers

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import a benchmark's module by name, hidden from other tests."""
    before, threads = set(sys.modules), torch.get_num_threads()
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in {path.stem for path in BENCHMARKS.glob("*.py")} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def run(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a benchmark as a command, tiny and without peers; return the JSON that it wrote."""

    def command(name: str, *options: str, code: int = 0) -> dict[str, Any]:
        out = tmp_path / "out.json"
        given = ("--tiny", "--repeats", "1", "--json", str(out), "--date", "2026-11-15", *options)
        monkeypatch.setattr(sys, "argv", [name, *given])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        assert ended.value.code == code
        return json.loads(out.read_text())

    return command


def measured(found: dict[str, Any]) -> set[str]:
    return {row["what"] for row in found["rows"] if row["value"] > 0}


def report_of(common: ModuleType, **options: Any) -> Any:
    return common.Report(Namespace(**{"peers": "none", "only": "*", "json": None, "tiny": True, **options}), CPU)


# ---- they run ---------------------------------------------------------------------------------------------------------


def test_training_is_measured_in_every_section(run: Callable[..., dict[str, Any]]) -> None:
    found = run("train", "--peers", "none")
    assert measured(found) >= {"gpt2", "llama", "marian", "marian-real", "marian-real, of padded", "small-real"}
    assert found["date"] == "2026-11-15"
    assert found["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(found["limits"]) == {"matmul", "copy"}
    assert all("0 graphs compiled after" in note for note in found["notes"][1:])


def test_decoding_is_measured_in_every_section(run: Callable[..., dict[str, Any]]) -> None:
    found = run("decode", "--peers", "none")
    cases = {"gpt2-1", "gpt2-64", "llama-1", "marian-1x1", "marian-1x4", "marian-64x4", "marian-256x4"}
    assert measured(found) == cases | {f"{case}, first call" for case in cases}


def test_only_what_was_asked_for_is_measured(run: Callable[..., dict[str, Any]]) -> None:
    assert {what.split(",")[0] for what in measured(run("decode", "--peers", "none", "--only", "gpt2*,x"))} == {
        "gpt2-1",
        "gpt2-64",
    }


def test_growth_is_measured_and_drawn(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = run("scale")
    axes = {row["what"].split("=")[0] for row in found["rows"]}
    assert axes == {f"train {x}" for x in ("length", "batch", "vocabulary", "model")} | {
        "decode batch",
        "decode context",
    }
    rows = [row | {"value": 2.0} for row in found["rows"]]  # a difference of two moments may be below zero here
    (tmp_path / "out.json").write_text(json.dumps(found | {"rows": rows}))
    monkeypatch.setattr(sys, "argv", ["scale", "--plot", str(tmp_path / "out.json"), "--pictures", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "scale.py"), run_name="__main__")
    assert ended.value.code == 0
    pictures = sorted(tmp_path.glob("*.png"))
    assert [path.name for path in pictures] == ["scale-decode.png", "scale-train.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_recurrent_layers_are_measured(run: Callable[..., dict[str, Any]]) -> None:
    assert measured(run("recurrent", "--peers", "none")) >= {"lstm", "lstm-layer", "gru-cho", "mut1", "mut2", "mut3"}


def test_experts_are_measured_beside_a_dense_model(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a mixture of experts " * 50)
    found = run("experts", "--profile", "--loads", str(text), "--steps", "10")
    after = {f"decode after {n} tokens" for n in (4, 16)}
    ratios = {f"{what}, of dense" for what in {"train", *after}}
    assert measured(found) >= {"train", *after, *ratios, "loads, busiest expert"}
    active = [int(note.split()[-2].replace(",", "")) for note in found["notes"] if note.endswith(" active")]
    routers = 2 * 8 * 32  # two blocks, 8 experts, a width of 32
    assert active[0] - active[1] == routers


def test_recurrences_are_measured_beside_attention(run: Callable[..., dict[str, Any]]) -> None:
    found = run("recurrences", "--mixers", "gla,mamba2")
    assert measured(found) >= {"train, rows of 32", "train, rows of 32, of attention", "decode, context 16, a token"}
    assert {row["who"] for row in found["rows"]} == {"regard", "attention", "gla", "mamba2"}


def test_word_vectors_are_measured(run: Callable[..., dict[str, Any]]) -> None:
    assert measured(run("word2vec", "--peers", "none")) == {"sg-ns", "cbow-ns", "sg-hs"}


def test_filters_are_measured(run: Callable[..., dict[str, Any]]) -> None:
    found = {what.split(",")[0] for what in measured(run("filters", "--peers", "none"))}
    assert found == {"nlm", "bilateral", "tv", "gaussian", "texture"}  # "large" is for GPUs


def test_recording_is_measured_on_and_off(run: Callable[..., dict[str, Any]]) -> None:
    found = run("recording", "--device", "cpu")
    works = ("forward, evaluating", "forward, with gradients", "training", "decoding")
    off = {(work, "once") for work in works}
    rows = {(row["what"], row["who"]) for row in found["rows"] if row["value"] > 0}
    assert rows >= off | {("forward, evaluating", "stream"), ("training", "on"), ("decoding", "live")}
    assert sum("recorded once / never recorded" in note for note in found["notes"]) == len(off)
    assert sum("recorded now / never recorded" in note for note in found["notes"]) == len(off)


def test_all_that_is_recorded_takes_turns_with_what_is_not(load: Load) -> None:
    turns: list[str] = []
    options = Namespace(repeats=2)
    report = Namespace(options=options, device=CPU, put=lambda *_: None, note=lambda _: None)
    works = {who: (lambda who=who: turns.append(who)) for who in ("regard", "once", "on", "stream")}
    recording = load("recording")
    recording.compare(report, "forward", works, 1)
    rounds = [turns[i : i + 4] for i in range(0, len(turns), 4)]
    assert len(rounds) == recording.WARM + 2
    assert all(one == (list(works) if i % 2 else list(works)[::-1]) for i, one in enumerate(rounds))


def test_predicted_memory_stands_beside_measured_memory(run: Callable[..., dict[str, Any]]) -> None:
    found = run("memory_prediction", "--only", "gpt-*,bert-bf16")
    cases = {
        f"{case}, {kind}"
        for case in ("gpt-plain", "gpt-checkpointing", "gpt-bf16", "bert-bf16")
        for kind in ("peak", "state")
    }
    assert {row["what"] for row in found["rows"]} == cases
    assert {row["what"] for row in found["rows"] if row["who"] == "predicted" and row["value"] > 0} == cases


def test_a_trace_of_the_allocator_names_what_was_alive_at_the_peak(load: Load) -> None:
    def event(action: str, addr: int, size: int = 0, line: int = 0) -> dict[str, Any]:
        return {
            "action": action,
            "addr": addr,
            "size": size,
            "frames": [{"filename": "/x/regard/a.py", "line": line, "name": "f"}],
        }

    events = [event("alloc", 1, 10, 1), event("alloc", 2, 30, 2), event("alloc", 3, 30, 2)]
    events += [
        event("free_requested", 2),
        event("free_completed", 2),
        event("alloc", 4, 25, 3),
        event("free_requested", 9),
    ]
    total, groups = load("memory_prediction").largest_groups(events)
    assert total == 70
    assert dict(groups) == {(30, "regard/a.py:2 f"): 60, (10, "regard/a.py:1 f"): 10}


def tiny_folder(path: Path, norm: str) -> Path:
    """Save a model with random weights and a tokenizer of the toy language."""
    corpus = ParallelCorpus(("toy:50",), "en", "de", Path(), "train")
    joint = Tokenizer.train((text for row in corpus.rows() for text in row), TokenizerConfig(vocab_size=120))
    sizes = {"d_model": 16, "n_heads": 2, "d_ff": 32, "n_encoder_layers": 1, "n_decoder_layers": 1, "max_len": 64}
    torch.manual_seed(0)
    model = make_model(preset("transformer-tiny", source_vocab=len(joint), target_vocab=len(joint), norm=norm, **sizes))
    options = DecodeConfig(max_len_a=0.0, max_len_b=6)
    both = Tokenizers(joint, joint)
    model_folder.save(
        path, model_folder.ModelPackage(model, both, "translation", options, source="en", target="de"), "a card"
    )
    return path


def test_a_test_set_is_translated_and_scored(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "model", "pre")
    found = run("multi30k", "--run", str(path), "--test", "toy:12", "--sentences", "9", "--peers", "none")
    assert {row["what"] for row in found["rows"]} == {
        "test set",
        "test set, first call",
        "test set, BLEU",
        "test set, BLEU lower-cased",
    }


def test_a_section_that_fails_is_one_line_and_the_next_goes_on(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(load("common"))

    def broken(report: Any) -> None:
        raise RuntimeError("out of\nmemory")

    report.section("first", broken)
    report.section("second", lambda report: report.put("work", "regard", 1.0, "tokens/s"))
    assert report.finish() == 1
    assert report.failed == ["first"]
    assert "first failed: RuntimeError: out of memory" in capsys.readouterr().out
    assert report.regard("work") == 1.0


def test_real_batches_without_their_folder_are_a_failure_that_says_so(
    load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(load("common"), tiny=False, data=None, repeats=1)
    report.section("small-real", load("train").small_real)
    assert "give --data" in capsys.readouterr().out


# ---- they say what is true --------------------------------------------------------------------------------------------


def test_ratios_say_how_many_times_better_regard_is(load: Load) -> None:
    report = report_of(load("common"))
    report.put("training", "regard", 900.0, "tokens/s", 0.5)
    report.put("training", "hf", 600.0, "tokens/s", 1 / 3)
    report.put("test set", "regard", 2.0, "s")
    report.put("test set", "hf", 30.0, "s")
    report.put("alone", "hf", 30.0, "s")
    lines = [line.split() for line in report.table().splitlines()]
    assert lines[1] == ["training", "regard", "900", "tokens/s", "50.0%"]
    assert lines[2] == ["training", "hf", "600", "tokens/s", "1.50x", "33.3%"]
    assert lines[4][-1] == "15.00x"
    assert lines[5][-1] == "s"


def test_a_compilation_is_noticed(load: Load) -> None:
    common, calls = load("common"), []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        calls.append(module)
        return module.forward

    double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
    counts = [common.compiled_graphs()]
    for x in (torch.ones(2), torch.zeros(2), torch.ones(3)):
        double(x)
        counts.append(common.compiled_graphs())
    assert [b - a for a, b in pairwise(counts)] == [1, 0, 1]
    assert len(calls) == 2


def test_what_is_compiled_after_the_warm_up_fails_the_section(load: Load) -> None:
    report, train = report_of(load("common")), load("train")
    train.put_costs(report, "work", "regard", 1.0, train.compiled_graphs())
    train.put_costs(report, "work", "hf", 1.0, train.compiled_graphs() - 1)
    with pytest.raises(AssertionError, match="1 graphs were compiled after the warm-up"):
        train.put_costs(report, "work", "regard", 1.0, train.compiled_graphs() - 1)


def test_a_loss_that_is_not_finite_is_no_training(load: Load) -> None:
    steps, config = load("steps"), load("common").sizes("gpt2", tiny=True, target_vocab=97)
    model = load("common").make_random_model(config, CPU)
    step, batch = steps.RegardStep(model, steps.TrainConfig(), True), steps.random_batch(config, 2, 8, CPU)
    step(batch)
    step.check()
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    step(batch)
    with pytest.raises(AssertionError, match="not finite"):
        step.check()


def test_random_batches_are_scored_in_every_place(load: Load) -> None:
    steps = load("steps")
    for name, inputs in (("gpt2", 2), ("transformer-base", 3)):
        settings = {"target_vocab": 9} | ({"source_vocab": 9} if inputs == 3 else {})
        batch = steps.random_batch(load("common").sizes(name, tiny=True, **settings), 3, 5, CPU)
        assert len(batch.inputs) == inputs
        assert batch.tokens == (batch.labels != PAD).sum() == 15


def test_a_step_reads_its_blocks_and_its_head(load: Load) -> None:
    decode, sizes = load("decode"), {"n_decoder_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 12, "target_vocab": 10}
    block = 4 * 8 * 8 + 3 * 8 * 12 + 2 * 8  # q, k, v, out; gate, value, back; two norms
    for tie, head in (("none", 10 * 8), ("all", 10 * 8)):  # the embedding is the head, or one row of it is looked up
        model: Any = make_model(preset("llama-7b", tie=tie, max_len=16, **sizes)).bfloat16()
        assert decode.weight_bytes(model, model.embedding.weight) == 2 * (block + 8 + head)


@pytest.mark.parametrize(("kind", "name"), [("gpt2", "gpt2"), ("llama", "llama-7b"), ("marian", "transformer-tiny")])
def test_a_peer_has_as_many_weights(load: Load, kind: str, name: str) -> None:
    pytest.importorskip("transformers")
    vocabulary = {"target_vocab": 97} | ({"source_vocab": 97, "norm": "post"} if kind == "marian" else {})
    config = load("common").sizes(name, tiny=True, dropout=0.25, attention_dropout=0.25, **vocabulary)
    theirs = load("peer_models").make_hf_model(config, kind, CPU)
    count = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (theirs, make_model(config))]
    assert count[0] == count[1]
    dropouts = {module.p for module in theirs.modules() if isinstance(module, torch.nn.Dropout)}
    assert dropouts <= {0.25}


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_peer_of_a_translator_computes_the_same(load: Load, norm: str) -> None:
    pytest.importorskip("transformers")
    config = resolve(preset("transformer-tiny", source_vocab=40, target_vocab=40, norm=norm, max_len=20, d_model=32))
    torch.manual_seed(0)
    model: Any = make_model(replace(config, n_encoder_layers=2, n_decoder_layers=2)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # norms and biases too
    peer: Any = load("multi30k").peer_of(model, CPU, torch.float32)
    source, target = torch.randint(5, 40, (2, 9)), torch.randint(5, 40, (2, 7))
    source[1, 6:] = PAD
    with torch.no_grad():
        known = {"input_ids": source.clamp(min=0), "attention_mask": (source != PAD).long()}  # -1 is no token to them
        theirs = peer(**known, decoder_input_ids=target).logits
        torch.testing.assert_close(model(source, target), theirs, atol=2e-5, rtol=1e-4)


def test_the_peer_of_a_translator_finds_the_same_translations(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    multi30k = load("multi30k")
    translator = multi30k.Translator.load(tiny_folder(tmp_path / "model", "post"), "cpu")
    texts = [source for source, _ in ParallelCorpus(("toy:6",), "en", "de", Path(), "test").rows()]
    peer = multi30k.peer_of(translator.model, CPU, torch.float32)
    assert multi30k.peer_translate(peer, translator)(texts) == multi30k.own_translate(translator)(texts)


def test_speed_of_translating_texts(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").write_text("I ate an apple.\nWhere is the station?\n", encoding="utf-8")
    words = [str(tmp_path / "texts"), "--beams", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["translate.py", *words])
    load("translate").main()
    first, _, row = capsys.readouterr().out.splitlines()
    assert first == "2 texts, 8 words"
    name, beam, rate, delay = row.split()
    assert (name, beam) == ("en-de-fr-zh", "1")
    assert float(rate.replace(",", "")) > 0
    assert float(delay) > 0
