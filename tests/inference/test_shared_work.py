"""Work that ranks share: any number of them, killed at any moment, makes what one process makes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call
from fake_translation import CapitalTranslator
from hypothesis import given
from hypothesis import strategies as st

from regard import model_folder
from regard.config import DecodeConfig, TokenizerConfig
from regard.decode import batch_decoding
from regard.decode.batch_decoding import decode
from regard.errors import RegardError
from regard.inference import document_translation, shared_work
from regard.inference.document_translation import OutputStyle, TextFile, translate_file
from regard.inference.embedder import Embedder
from regard.inference.shared_work import (
    Meet,
    SharedDecoding,
    SharedParts,
    ShareFinished,
    embed_shared,
    group_parts,
    parts_folder,
    set_up_rank,
    translate_shared,
)
from regard.inference.streaming import ChunkTranslator
from regard.inference.translator import Translation
from regard.kernels import cpu_threads
from regard.models.architectures import make_model, preset
from regard.process_rank import Rank
from regard.text.language_identification import Direction
from regard.text.tokenizer import Tokenizer, Tokenizers

IDENTITY = {"input": "1", "model": "2", "options": "3", "version": "4"}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_translation, "CHUNK_SEGMENTS", 3)


class ContextTranslator(CapitalTranslator):
    """A translator whose translations depend on all texts before them, whether these were translated or skipped."""

    def __init__(self, before: Callable[[list[str]], None] = lambda texts: None) -> None:
        super().__init__(before=before)
        self.context = hashlib.sha256()

    def detect(self, texts: Sequence[str], *arguments: Any, **options: Any) -> list[Direction]:
        for text in texts:
            self.context.update(text.encode() + b"\n")
        return super().detect(texts)

    def one(self, text: str, to: str) -> Translation:
        found = super().one(f"{text} {self.context.hexdigest()[:6]}", to)
        self.context.update(text.encode() + b"\n")
        return found


def for_ranks(count: int, work: Callable[[Rank, Meet], Any]) -> Any:
    """Call `work(rank, meet)` for every rank, one after the other, and return the result of rank 0.

    Rank 0 begins; where it would meet the others, they do all of their work.
    """

    def others(digest: bytes) -> list[bytes]:
        found = [digest]
        for index in range(1, count):
            with contextlib.suppress(ShareFinished):
                work(Rank(index, count, index, count), lambda own: found.append(own) or [])  # type: ignore[func-returns-value]
        return found

    return work(Rank(0, count, 0, count), others)


def translate(
    folder: Path,
    count: int,
    make: Callable[[], Any] = ContextTranslator,
    style: OutputStyle | None = None,
    identity: dict[str, str] = IDENTITY,
    format: str = "lines",
    **how: Any,
) -> list[Any]:
    """Translate `folder/in` to `folder/out` by so many ranks; return their translators."""
    made: list[Any] = []

    def work(rank: Rank, meet: Meet) -> None:
        file = TextFile(folder / "in", format)
        made.append(make())
        chunks = ChunkTranslator(made[-1], has_code_blocks=format == "lines")
        chunks.look_ahead(file.first_texts())
        translate_shared(
            file,
            folder / "out",
            chunks,
            style or OutputStyle(),
            identity,
            rank,
            sizes=file.chunk_sizes(),
            meet=meet,
            **how,
        )

    for_ranks(count, work)
    return made


def translate_alone(folder: Path, style: OutputStyle | None = None, format: str = "lines") -> bytes:
    """Return what one process writes."""
    file = TextFile(folder / "in", format)
    chunks = ChunkTranslator(ContextTranslator(), has_code_blocks=format == "lines")  # type: ignore[arg-type]
    chunks.look_ahead(file.first_texts())
    translate_file(file, folder / "alone", chunks, style or OutputStyle(), IDENTITY, total=file.count())
    return (folder / "alone").read_bytes()


# ---- translating a file ----------------------------------------------------------------------------------------------

LINE = st.text(st.sampled_from("ab ?`\u2028é"), max_size=5) | st.just("```")
LINES = st.lists(LINE, min_size=1, max_size=40).map(lambda lines: "\n".join(lines).encode() + b"\n")
STYLE = st.sampled_from([OutputStyle(), OutputStyle(as_json=True), OutputStyle(has_nbest=True)])


@given(LINES, st.integers(1, 9), STYLE, st.sampled_from([1, 2, 4096]))
def test_any_number_of_ranks_writes_the_bytes_of_one_process(
    data: bytes, count: int, style: OutputStyle, most_parts: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(shared_work, "MOST_PARTS", most_parts)
        (folder / "in").write_bytes(data)
        translate(folder, count, style=style)
        assert (folder / "out").read_bytes() == translate_alone(folder, style)
        assert sorted(path.name for path in folder.iterdir()) == ["alone", "in", "out"]


@given(LINES, st.integers(1, 5), st.integers(1, 5), st.data())
def test_whatever_parts_are_there_only_the_others_are_translated(
    data: bytes, first: int, second: int, draw: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        (folder / "in").write_bytes(data)
        expected = translate_alone(folder)
        patch.setattr(SharedParts, "remove", lambda self: self._lock.close())
        whole = [call for each in translate(folder, first) for call in each.calls]
        patch.undo()
        parts = sorted(parts_folder(folder / "out").glob("part-*"))
        assert len(parts) == len(whole)
        lost = draw.draw(st.sets(st.sampled_from(range(len(parts)))))
        for i in lost:
            parts[i].unlink()
        (folder / "out").unlink()
        again = [call for each in translate(folder, second) for call in each.calls]
        assert len(again) == len(lost)
        assert (folder / "out").read_bytes() == expected
        assert not parts_folder(folder / "out").exists()


@pytest.mark.parametrize("format", ["markdown", "text"])
def test_documents_are_shared_by_their_segments(tmp_path: Path, format: str) -> None:
    (tmp_path / "in").write_text("# One\n\nTwo *three* four.\n\n- five\n- six\n\n" + "A paragraph.\n\n" * 20)
    made = translate(tmp_path, 3, format=format)
    assert (tmp_path / "out").read_bytes() == translate_alone(tmp_path, format=format)
    assert min(len(each.calls) for each in made) >= 2


def test_rank_0_says_what_the_translations_of_all_ranks_say(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(f"line {i}{'???' * (i % 4 == 0)}\n" for i in range(1, 31)))
    seen: list[tuple[int, str, tuple[str, ...], str]] = []
    done: list[int] = []
    translate(
        tmp_path,
        3,
        observe=lambda line, text, each: seen.append((line, text, each.notes, each.source)),
        advance=done.append,
    )
    assert seen == [(i, f"line {i}???", ("left as it is",), "en") for i in range(4, 31, 4)]
    assert sum(done) <= 30


def interrupted(calls: int) -> Callable[[], Any]:
    """Return a function that makes translators which are interrupted after so many calls."""

    def make() -> Any:
        def stop(texts: list[str]) -> None:
            if len(made.calls) == calls:
                raise KeyboardInterrupt

        made = ContextTranslator(before=stop)
        return made

    return make


def test_an_interrupted_group_says_how_to_continue(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"one\ntwo\nthree\n" * 10)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        translate(tmp_path, 1, interrupted(0))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]  # nothing was translated, so nothing is left
    with pytest.raises(
        KeyboardInterrupt, match=r"after 6 of 30 segments, which are kept in .*out\.parts: the same command continues"
    ):
        translate(tmp_path, 1, interrupted(2))
    translate(tmp_path, 4)
    assert (tmp_path / "out").read_bytes() == translate_alone(tmp_path)


# ---- the folder of the parts -----------------------------------------------------------------------------------------


def leave_parts(folder: Path) -> Path:
    """Return the folder of parts that an interrupted translation has left."""
    (folder / "in").write_bytes(b"one\ntwo\nthree\n" * 10)
    with pytest.raises(KeyboardInterrupt):
        translate(folder, 1, interrupted(2))
    return parts_folder(folder / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("what", IDENTITY)
def test_parts_of_another_input_are_neither_used_nor_removed(tmp_path: Path, what: str) -> None:
    parts = leave_parts(tmp_path)
    before = contents(parts)
    with pytest.raises(RegardError, match=rf"out\.parts is .* other work \(not the same {what}\).*remove the folder"):
        translate(tmp_path, 2, identity=IDENTITY | {what: "other"})
    assert contents(parts) == before
    assert not (tmp_path / "out").exists()


def test_ranks_with_another_input_are_refused(tmp_path: Path) -> None:
    digests: list[bytes] = []
    identities = [IDENTITY, IDENTITY, IDENTITY | {"input": "other"}, IDENTITY]
    for index, identity in enumerate(identities):
        with contextlib.suppress(KeyboardInterrupt):
            SharedParts(tmp_path / "parts", identity, 4, Rank(index, 4, index, 4), stop_after(digests.append))
    assert [each == digests[0] for each in digests] == [True, True, False, True]
    for index, identity in enumerate(identities):
        with pytest.raises(RegardError, match=r"^rank 2 has another input, model or version of Regard than rank 0"):
            SharedParts(tmp_path / "parts", identity, 4, Rank(index, 4, index, 4), lambda own: digests)
    assert not (tmp_path / "parts").exists()


def stop_after(function: Callable[[bytes], object]) -> Callable[[bytes], list[bytes]]:
    def meet(digest: bytes) -> list[bytes]:
        function(digest)
        raise KeyboardInterrupt

    return meet


def test_a_rank_whose_parts_are_there_does_not_need_the_folder(tmp_path: Path) -> None:
    """Rank 0 may have joined all parts and removed them before another rank has done anything."""

    def remove_all(digest: bytes) -> list[bytes]:
        rest = SharedParts(tmp_path / "parts", IDENTITY, 1, Rank(), None)
        rest.write(0, b"")
        rest.remove()
        return [digest]

    late = SharedParts(tmp_path / "parts", IDENTITY, 1, Rank(1, 2, 1, 2), remove_all)
    assert late.own_missing == []
    assert not (tmp_path / "parts").exists()


def test_files_of_others_stay(tmp_path: Path) -> None:
    parts = leave_parts(tmp_path)
    others = {
        "notes.txt": b"mine",
        "part-1": b"mine",
        "part-000001.txt": b"mine",
        "part-000999": b"mine",
        ".part-x.draft-1": b"mine",
    }
    for name, content in others.items():
        (parts / name).write_bytes(content)
    (parts / ".part-000001.draft-123").write_bytes(b"left by a rank that was killed")
    translate(tmp_path, 2)
    assert contents(parts) == others
    assert (tmp_path / "out").read_bytes() == translate_alone(tmp_path)


def test_a_folder_in_the_place_of_the_parts_stays(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"one\n")
    parts = parts_folder(tmp_path / "out")
    for mine, message in (
        ({"part-000000": b"mine"}, "has parts but no plan"),
        ({"plan.json": b"mine"}, r"plan\.json is in the way"),
        ({"plan.json": b"[]"}, r"plan\.json is in the way"),
        ({"plan.json": b'{"kind": "mine"}'}, r"plan\.json is in the way"),
    ):
        parts.mkdir(exist_ok=True)
        for path in parts.iterdir():
            path.unlink()
        for name, content in mine.items():
            (parts / name).write_bytes(content)
        with pytest.raises(RegardError, match=message):
            translate(tmp_path, 2)
        assert contents(parts) == mine
    for path in parts.iterdir():
        path.unlink()
    parts.rmdir()
    parts.write_text("mine")
    with pytest.raises(RegardError, match=r"cannot write .*out\.parts: File exists"):
        translate(tmp_path, 2)
    assert parts.read_text() == "mine"


def test_two_groups_do_not_share_a_folder(tmp_path: Path) -> None:
    parts = leave_parts(tmp_path)
    before = contents(parts)
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    )
    words = [sys.executable, "-c", program, str(parts / "plan.json")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(RegardError, match=r"another process uses .*out\.parts"):
            translate(tmp_path, 2)
        other.communicate(b"\n")
    assert contents(parts) == before
    translate(tmp_path, 2)
    assert not parts.exists()


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    parts = leave_parts(tmp_path)
    (parts / "part-000001").write_bytes(b"[{")
    with pytest.raises(RegardError, match=r"part-000001 is damaged: remove it"):
        translate(tmp_path, 1)
    (parts / "part-000001").unlink()
    translate(tmp_path, 1)
    assert (tmp_path / "out").read_bytes() == translate_alone(tmp_path)


def test_rank_0_waits_for_the_parts_of_others(tmp_path: Path) -> None:
    parts = SharedParts(tmp_path, IDENTITY, 2, Rank(0, 2, 0, 2), lambda own: [own])
    other = SharedParts(tmp_path, IDENTITY, 2, Rank(1, 2, 1, 2), lambda own: [own])
    asked: list[int] = []

    def wait() -> None:
        asked.append(len(asked))
        if len(asked) == 3:
            other.write(1, b"at last")

    assert other.own_missing == [1]
    assert parts.read(1, wait) == b"at last"
    assert len(asked) == 3
    assert parts.new_parts() == {1}
    assert parts.new_parts() == set()
    assert (SharedParts.is_begun(tmp_path), SharedParts.is_begun(tmp_path / "nowhere")) == (True, False)


@given(st.integers(0, 20_000), st.integers(1, 50))
def test_parts_have_all_items_in_order_and_are_not_too_many(items: int, least: int) -> None:
    groups = group_parts(items, least)
    assert [i for group in groups for i in group] == list(range(items))
    assert len(groups) <= shared_work.MOST_PARTS
    assert all(len(group) == len(groups[0]) >= least for group in groups[:-1])


# ---- test sets and vectors -------------------------------------------------------------------------------------------

SOURCES = [[5 + (7 * i + 3 * j) % 50 for j in range(3 + i % 9)] for i in range(150)]
SMALL = {"d_model": 16, "d_ff": 32, "n_heads": 2, "max_len": 40, "dropout": 0.0}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {**SMALL, "source_vocab": 60, "target_vocab": 60, "n_encoder_layers": 1, "n_decoder_layers": 1}
    return make_model(preset("transformer-base", **sizes)).eval()


@pytest.mark.parametrize("options", [{"beam": 3, "nbest": 2}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seeds", [None, [(7 * i) % 11 for i in range(150)]], ids=["default", "given"])
def test_a_shared_test_set_is_decoded_as_by_one_process(
    tmp_path: Path,
    model: Any,
    options: dict[str, Any],
    count: int,
    seeds: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_decoding, "count_processes", lambda model, sources, options, threads: threads)
    monkeypatch.setattr(batch_decoding, "idle_cores", lambda: 0)
    monkeypatch.setattr(cpu_threads, "_undivided", 4)
    chosen = DecodeConfig(max_len_b=8, **options)
    expected = decode(model, SOURCES, chosen, 40, CPU, seeds=seeds)
    done: list[int] = []
    made: list[SharedDecoding] = []

    def work(rank: Rank, meet: Meet) -> Any:
        made.append(SharedDecoding(tmp_path / "parts", IDENTITY, rank, meet))
        return made[-1](model, SOURCES, chosen, 40, CPU, done.append, seeds=seeds)

    assert for_ranks(count, work) == expected  # to the last bit: the batches are the same
    assert (tmp_path / "parts").exists()
    made[0].finish()
    assert not (tmp_path / "parts").exists()


def test_sentences_that_are_too_long_are_refused_before_any_work(tmp_path: Path, model: Any) -> None:
    shared = SharedDecoding(tmp_path / "parts", IDENTITY, Rank())
    with pytest.raises(RegardError, match="sentence 2 has 50 tokens"):
        shared(model, [[5], [5] * 50], DecodeConfig(), 40, CPU)
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("normalize", [True, False])
def test_shared_vectors_are_those_of_one_process(
    tmp_path: Path, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    texts = [f"a cat and {i} dogs sat {'there ' * (i % 7)}" for i in range(60)]
    tokenizer = Tokenizer.train(texts, TokenizerConfig(kind="char", vocab_size=60))
    config = preset("bert-base", **SMALL | {"max_len": 64}, source_vocab=len(tokenizer), n_encoder_layers=1)
    package = model_folder.ModelPackage(
        make_model(replace(config, target_vocab=len(tokenizer))).eval(), Tokenizers(tokenizer, tokenizer), "mlm"
    )
    embedder = Embedder(package)
    monkeypatch.setattr(shared_work, "BATCH_TOKENS", 300)
    expected = embedder.embed(texts, normalize=normalize, batch_tokens=300)

    def work(rank: Rank, meet: Meet) -> Any:
        folder = tmp_path / "parts"
        return embed_shared(embedder, texts, None, normalize, False, folder, IDENTITY, rank, meet=meet)

    for count in (1, 2, 3):
        vectors, parts = for_ranks(count, work)
        np.testing.assert_array_equal(vectors, expected)
        assert parts.count > 5
        parts.remove()
        assert not (tmp_path / "parts").exists()


# ---- devices and cores -----------------------------------------------------------------------------------------------


def test_each_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = [Rank(i, 4, i % 4, 4) for i in range(4)]
    assert [set_up_rank("auto", rank) for rank in ranks] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert set_up_rank("cuda", ranks[1]) == "cuda:1"
    assert set_up_rank("cuda:1", ranks[0]) == "cuda:1"
    assert set_up_rank("cpu", ranks[1]) == "cpu"
    assert set_up_rank("auto", Rank()) == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set_up_rank("auto", ranks[1]) == "auto"


def test_ranks_divide_the_cores_and_make_the_batches_of_one_process(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "_undivided", 0)
    monkeypatch.setattr(batch_decoding, "FORKED_SECONDS", 0.0)
    options = DecodeConfig(beam=4)
    torch.set_num_threads(4)
    alone = batch_decoding.plan_batches(model, SOURCES, options, CPU)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    set_up_rank("cpu", Rank(1, 2, 1, 2))
    assert torch.get_num_threads() == 4  # OMP_NUM_THREADS is what torch has read
    monkeypatch.delenv("OMP_NUM_THREADS")
    for ranks, threads in ((2, 2), (3, 1), (9, 1)):
        torch.set_num_threads(4)
        set_up_rank("cpu", Rank(1, ranks, 1, ranks))
        assert torch.get_num_threads() == threads
        assert batch_decoding.plan_batches(model, SOURCES, options, CPU) == alone
    monkeypatch.setattr(cpu_threads, "_undivided", 0)
    assert batch_decoding.plan_batches(model, SOURCES, options, CPU) != alone


# ---- the command -----------------------------------------------------------------------------------------------------

TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("words", [("translate", "hello"), ("translate",), ("embed", "model", "hello")])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_ranks_need_files(
    capfd: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], rank: str
) -> None:
    for name, value in {**TWO, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    code, out, err = call(capfd, monkeypatch, *words, stdin=b"hello\n")
    assert (code, out) == (2, "")
    assert "several processes share a file: give --input FILE and --output FILE" in err


def test_one_process_continues_what_a_group_has_left(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import regard.inference.translator as translator_module

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(document_translation, "CHUNK_SEGMENTS", 256)
    stopped, whole = CapitalTranslator(before=lambda texts: stop()), CapitalTranslator()

    def stop() -> None:
        if len(stopped.calls) == 1:
            raise KeyboardInterrupt

    waiting = iter([stopped, whole])
    monkeypatch.setattr(translator_module, "bundled_translator", lambda *arguments: next(waiting))
    Path("in.lines").write_text("".join(f"line {i}\n" for i in range(1000)))
    words = ("translate", "-i", "in.lines", "-o", "out", "--format", "lines")
    for name, value in {**TWO, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shared_work, "meet_ranks", lambda own: [own])
    code, _, err = call(capfd, monkeypatch, *words)
    assert code == 130
    assert "stopped after 256 of 1,000 segments, which are kept in out.parts: the same command continues" in err
    assert len(list(Path("out.parts").glob("part-*"))) == 1
    for name in (*TWO, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    assert call(capfd, monkeypatch, *words) == (0, "", "")
    assert Path("out").read_text() == Path("in.lines").read_text().upper()
    assert len(whole.calls) == 3
    assert not Path("out.parts").exists()


# ---- processes of torchrun -------------------------------------------------------------------------------------------

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "shared_translation.py"
SHARED = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "regard"]


@pytest.mark.slow
def test_ranks_of_torchrun_write_the_bytes_of_one_process_though_some_are_killed(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARK), "--lines", "6000", "--kills", "2", "--folder", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("the same bytes three times\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "killed", "lines.en", "log", "model", "shared"]
    assert len((tmp_path / "killed").read_bytes().splitlines()) == 6000
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def run(*command: str) -> tuple[str, str]:
        found = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=200
        )
        return found.stdout, found.stderr

    alone = (sys.executable, "-m", "regard")
    for output, start in (("ev1", alone), ("ev2", SHARED)):
        out, err = run(*start, "evaluate", "model", "--data", "toy:200", "-o", output, "--json")
        scores = json.loads(out)  # one object: only rank 0 prints
        assert scores["corpus"] == ["toy:200"]
        assert f"hypotheses in {output}" in err
    assert (tmp_path / "ev1").read_bytes() == (tmp_path / "ev2").read_bytes()
    for output, others in (("v1.npy", ()), ("v2.npy", ("--nproc-per-node", "2"))):
        assert run(*alone, "embed", "model", "-i", "lines.en", "-o", output, *others)[0] == f"{output}\n"
    ours, theirs = np.load(tmp_path / "v1.npy"), np.load(tmp_path / "v2.npy")
    np.testing.assert_allclose(ours, theirs, atol=1e-6)  # the batches are the same, the threads of a product are not
    assert not list(tmp_path.glob("*.parts"))
