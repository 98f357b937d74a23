"""Prepared corpora: the store is the encoded text, made once, and survives whatever happens to its cache."""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.data import token_cache
from regard.data.parallel_corpus import ParallelCorpus
from regard.data.token_cache import Filters, Store, TokenStore, cache_folder, prepare_store
from regard.errors import RegardError
from regard.files import find_damage

ROOMY = Filters(max_len=1000)


class Words:
    """A stand-in tokenizer: one id a word, worked out from the word's own bytes; counts its calls."""

    def __init__(self, size: int = 1000, name: str = "words") -> None:
        self.size, self.name, self.calls = size, name, 0

    def encode(self, text: str) -> list[int]:
        return [int.from_bytes(hashlib.md5(word.encode()).digest()[:4], "big") % self.size for word in text.split()]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        self.calls += 1
        return [self.encode(text) for text in texts]

    def fingerprint(self) -> str:
        return f"{self.name}-{self.size}"

    def __len__(self) -> int:
        return self.size


class Forbidden(Words):
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        raise AssertionError("a cache hit must not tokenize")


def corpus_of(root: Path, pairs: Iterable[tuple[str, str]], name: str = "x.tsv") -> ParallelCorpus:
    (root / name).write_text("".join(f"{a}\t{b}\n" for a, b in pairs), newline="")
    return ParallelCorpus((name,), "en", "de", root)


def run(corpus: ParallelCorpus, cache: Path, tokenizer: Words | None = None, filters: Filters = ROOMY) -> Store:
    tokenizer = tokenizer or Words()
    return prepare_store(corpus, (tokenizer, tokenizer), filters, cache)


def content(store: Store) -> list[tuple[list[int], list[int]]]:
    return [(store.source[i].tolist(), store.target[i].tolist()) for i in range(len(store))]


def encoded(pairs: Iterable[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    return [(Words().encode(a), Words().encode(b)) for a, b in pairs]


def numbered(n: int) -> list[tuple[str, str]]:
    return [(f"sentence number {i}", f"Satz Nummer {i} von {n}") for i in range(n)]


def only_folder(cache: Path) -> Path:
    (folder,) = cache.iterdir()
    return folder


# ---- content and filters -----------------------------------------------------------------------------------------


WORD = st.text(st.characters(exclude_categories=("Cs", "Cc", "Z")), min_size=1, max_size=6)
SENTENCE = st.lists(WORD, min_size=1, max_size=6).map(" ".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=12), size=st.sampled_from([7, 65536, 65537]))
def test_store_is_the_encoded_text(tmp_path: Path, pairs: list[tuple[str, str]], size: int) -> None:
    tokenizer = Words(size)
    corpus = ParallelCorpus(("x.tsv",), "en", "de", tmp_path)
    (tmp_path / "x.tsv").write_bytes(b"\xef\xbb\xbf" + "".join(f"{a}\t{b}\r\n" for a, b in pairs).encode())
    store = run(corpus, tmp_path / "cache", tokenizer)
    for side, tokens in enumerate((store.source, store.target)):
        wanted = [tokenizer.encode(pair[side]) for pair in pairs]
        assert [sequence.tolist() for sequence in tokens] == wanted
        assert tokens.lengths.tolist() == [len(ids) for ids in wanted]
        assert tokens.dtype == (np.uint32 if size == 65537 else np.uint16)
    assert len(store) == store.report.kept == len(pairs)


def test_many_chunks_and_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "CHUNK", 4)
    pairs, seen = numbered(10), []
    store = prepare_store(corpus_of(tmp_path, pairs), (Words(), Words()), ROOMY, tmp_path / "cache", seen.append)
    assert content(store) == encoded(pairs)
    assert seen == [4, 4, 2]


def test_two_tokenizers_each_with_its_own_type(tmp_path: Path) -> None:
    small, large = Words(50), Words(100_000)
    store = prepare_store(corpus_of(tmp_path, [("a b", "c")]), (small, large), ROOMY, tmp_path / "cache")
    assert content(store) == [(small.encode("a b"), large.encode("c"))]
    assert (store.source.dtype, store.target.dtype) == (np.uint16, np.uint32)


def test_ids_at_the_edge_of_each_type(tmp_path: Path) -> None:
    for largest in (65535, 65536, 2**32 - 1):
        tokenizer = Words(largest + 1)
        tokenizer.encode = lambda text, largest=largest: [largest, 0]  # type: ignore[method-assign,misc]
        store = run(corpus_of(tmp_path, [("a", "b")]), tmp_path / "cache", tokenizer)
        assert content(store) == [([largest, 0], [largest, 0])]


def test_every_pair_is_counted_once_under_its_first_fault(tmp_path: Path) -> None:
    pairs = [
        ("a b c", "a"),  # kept: exactly 3 times as long
        ("a b c d", "a"),  # ratio
        ("a", "a b c d"),  # ratio
        ("a b c d e", "a b c d e"),  # kept: exactly 5 tokens
        ("a b c d e f", "a"),  # too long, and the ratio too
        ("a", ""),  # empty
        (" ", "a"),  # empty
        ("", "a b c d e f"),  # empty, and too long
        ("", ""),  # empty
    ]
    store = run(corpus_of(tmp_path, pairs), tmp_path / "cache", filters=Filters(max_len=5, max_ratio=3))
    assert content(store) == encoded([pairs[0], pairs[3]])
    assert store.report.describe() == "9 pairs: kept 2, empty 4, longer than 5 tokens 1, ratio over 3 2"
    again = run(corpus_of(tmp_path, pairs), tmp_path / "cache", Forbidden(), Filters(max_len=5, max_ratio=3))
    assert again.report == store.report


def test_blank_text_is_empty_even_where_spaces_are_tokens(tmp_path: Path) -> None:
    tokenizer = Words()
    tokenizer.encode = lambda text: [1] * len(text)  # type: ignore[method-assign]
    report = run(corpus_of(tmp_path, [("a", "b"), ("\u3000", "b"), ("a", "  ")]), tmp_path / "cache", tokenizer).report
    assert (report.kept, report.empty) == (1, 2)


def test_description_of_a_large_report_without_ratio() -> None:
    report = token_cache.FilterReport(Filters(), kept=28_997, empty=1, too_long=2)
    assert report.describe() == "29,000 pairs: kept 28,997, empty 1, longer than 256 tokens 2"
    report = token_cache.FilterReport(Filters(max_ratio=9), kept=28_997, empty=1, too_long=2)
    assert report.describe() == "29,000 pairs: kept 28,997, empty 1, longer than 256 tokens 2, ratio over 9 0"


def test_nothing_left_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"x\.tsv .*2 rows: kept 0, empty 1, longer than 1 tokens 1") as caught:
        run(corpus_of(tmp_path, [("", "a"), ("a b", "a")]), tmp_path / "cache", filters=Filters(max_len=1))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("options", "name"),
    [({"max_len": 0}, "max_len"), ({"max_ratio": 0.5}, "max_ratio"), ({"max_ratio": -1}, "max_ratio")],
)
def test_impossible_filters(options: dict[str, int], name: str) -> None:
    with pytest.raises(RegardError, match=name):
        Filters(**options)


def test_token_store_is_a_sequence() -> None:
    store = TokenStore(np.array([5, 6, 7], np.uint16), np.array([0, 2, 2, 3]))
    assert [ids.tolist() for ids in store] == [[5, 6], [], [7]]
    assert store[-1].tolist() == [7]
    assert store.lengths.tolist() == [2, 0, 1]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            store[outside]
    store[0][0] = 9  # what is handed out is the caller's own
    assert store[0].tolist() == [5, 6]


# ---- the cache ---------------------------------------------------------------------------------------------------


def test_hit_does_not_tokenize_and_needs_no_writing(tmp_path: Path) -> None:
    pairs = numbered(5)
    cache = tmp_path / "cache"
    run(corpus_of(tmp_path, pairs), cache)
    moved = corpus_of(tmp_path, pairs, "renamed.tsv")
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert content(run(moved, cache, Forbidden())) == encoded(pairs)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_anything_changed_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"

    def folders_after(corpus: ParallelCorpus, tokenizer: Words, filters: Filters) -> int:
        run(corpus, cache, tokenizer, filters)
        assert tokenizer.calls == 2  # one chunk, two sides
        return len(list(cache.iterdir()))

    first = corpus_of(tmp_path, numbered(5))
    assert folders_after(first, Words(), ROOMY) == 1
    assert folders_after(first, Words(name="other"), ROOMY) == 2
    assert folders_after(first, Words(), Filters(max_len=999)) == 3
    assert folders_after(first, Words(), Filters(max_len=1000, max_ratio=9)) == 4
    assert folders_after(corpus_of(tmp_path, numbered(6)), Words(), ROOMY) == 5
    monkeypatch.setattr(token_cache, "FORMAT", token_cache.FORMAT + 1)
    assert folders_after(first, Words(), ROOMY) == 6


def test_source_and_target_tokenizer_are_not_interchangeable(tmp_path: Path) -> None:
    corpus, one, two = corpus_of(tmp_path, [("a", "a")]), Words(50), Words(60)
    prepare_store(corpus, (one, two), ROOMY, tmp_path / "cache")
    assert content(prepare_store(corpus, (two, one), ROOMY, tmp_path / "cache")) == [(two.encode("a"), one.encode("a"))]


FILES = ["manifest.json", "meta.json", "side-0.ids", "side-0.offsets", "side-1.ids", "side-1.offsets"]


def test_folder_holds_these_files_and_their_sizes(tmp_path: Path) -> None:
    run(corpus_of(tmp_path, numbered(5)), tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["report"]["kept"] == 5
    assert meta["sides"] == [{"dtype": "<u2", "tokens": 15}, {"dtype": "<u2", "tokens": 25}]
    assert (folder / "side-0.ids").stat().st_size == 30
    assert (folder / "side-0.offsets").stat().st_size == 48


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "shorter", "longer"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = numbered(5)
    corpus = corpus_of(tmp_path, pairs)
    run(corpus, tmp_path / "cache")
    path = only_folder(tmp_path / "cache") / name
    whole = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"empty": b"", "shorter": whole[:-2], "longer": whole + b"xx"}[damage])
    check_rebuilt(corpus, tmp_path / "cache", pairs, path, whole, capsys.readouterr)


def check_rebuilt(
    corpus: ParallelCorpus, cache: Path, pairs: list[tuple[str, str]], path: Path, whole: bytes, said: Callable[[], Any]
) -> None:
    """A damaged store is prepared again, one line says which and why, and nothing is said when it is used next."""
    tokenizer = Words()
    said()
    assert content(run(corpus, cache, tokenizer)) == encoded(pairs)
    assert tokenizer.calls == 2
    assert re.fullmatch(rf"the prepared data in {path.parent} is damaged \(.+\) and is prepared again\n", said().err)
    assert path.read_bytes() == whole
    assert content(run(corpus, cache, Forbidden())) == encoded(pairs)
    assert said().err == ""


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the store's first, middle and last byte; also those that leave every file as long and every offset in range."""
    pairs = numbered(5)
    corpus = corpus_of(tmp_path, pairs)
    run(corpus, tmp_path / "cache")
    path = only_folder(tmp_path / "cache") / name
    whole = path.read_bytes()
    for place in (0, 8, len(whole) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        check_rebuilt(corpus, tmp_path / "cache", pairs, path, whole, capsys.readouterr)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["folder", "fifo", "link to itself"])
def test_other_things_in_a_files_place(
    tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = numbered(5)
    corpus = corpus_of(tmp_path, pairs)
    run(corpus, tmp_path / "cache")
    path = only_folder(tmp_path / "cache") / name
    whole = path.read_bytes()
    path.unlink()
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "link to itself": lambda: path.symlink_to(path)}[kind]()
    check_rebuilt(corpus, tmp_path / "cache", pairs, path, whole, capsys.readouterr)


def test_a_manifest_names_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that one bit turns into another file's leaves its own file without a checksum."""
    pairs = numbered(5)
    corpus = corpus_of(tmp_path, pairs)
    run(corpus, tmp_path / "cache")
    path = only_folder(tmp_path / "cache") / "manifest.json"
    whole = path.read_bytes()
    assert whole.count(b"side-0.ids") == 1
    path.write_bytes(whole.replace(b"side-0.ids", b"side-1.ids"))
    check_rebuilt(corpus, tmp_path / "cache", pairs, path, whole, capsys.readouterr)


def test_checksums_are_verified_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[Path] = []
    monkeypatch.setattr(token_cache, "find_damage", lambda folder: verified.append(folder) or find_damage(folder))
    corpus = corpus_of(tmp_path, numbered(5))
    run(corpus, tmp_path / "cache")
    folder = only_folder(tmp_path / "cache")
    run(corpus, tmp_path / "cache", Forbidden())
    run(corpus, tmp_path / "cache", Forbidden())
    assert verified == [folder] * 2  # written a moment ago, a file could change without another time stamp
    monkeypatch.setattr(token_cache, "SETTLED", -1)
    run(corpus, tmp_path / "cache", Forbidden())
    run(corpus, tmp_path / "cache", Forbidden())
    assert verified == [folder] * 3
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)
    run(corpus, tmp_path / "cache", Forbidden())
    assert verified == [folder] * 4


@pytest.mark.parametrize("meta", ["[]", '{"report": 3}', '{"report": {"filters": {"max_len": 0}}}', "\0\0\0"])
def test_nonsense_in_meta_is_rebuilt(tmp_path: Path, meta: str) -> None:
    corpus = corpus_of(tmp_path, numbered(5))
    run(corpus, tmp_path / "cache")
    (only_folder(tmp_path / "cache") / "meta.json").write_text(meta)
    assert content(run(corpus, tmp_path / "cache")) == encoded(numbered(5))


def test_twin_that_finishes_first(tmp_path: Path) -> None:
    """Another process prepares the same thing, from beginning to end, while this one is tokenizing."""
    pairs, cache = numbered(5), tmp_path / "cache"
    corpus = corpus_of(tmp_path, pairs)

    class Overtaken(Words):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            if not self.calls:
                assert content(run(corpus, cache)) == encoded(pairs)
            return super().encode_batch(texts)

    assert content(run(corpus, cache, Overtaken())) == encoded(pairs)
    assert sorted(path.name for path in only_folder(cache).iterdir()) == FILES


def test_store_outlives_its_folder(tmp_path: Path) -> None:
    """As when another process takes the folder for damaged and replaces it."""
    pairs = numbered(5)
    store = run(corpus_of(tmp_path, pairs), tmp_path / "cache")
    for path in only_folder(tmp_path / "cache").iterdir():
        path.unlink()
    assert content(store) == encoded(pairs)


def test_name_that_cannot_be_taken_costs_only_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs, cache = numbered(5), tmp_path / "cache"
    corpus = corpus_of(tmp_path, pairs)
    run(corpus, cache)
    folder = only_folder(cache)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    capsys.readouterr()
    assert content(run(corpus, cache)) == encoded(pairs)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder} is damaged" in line
    assert "it cannot be removed" in line
    assert only_folder(cache).read_text() == "in the way"


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_token_cache import ROOMY, Words, corpus_of, numbered, content, encoded
from regard.data import token_cache
from regard.data.parallel_corpus import ParallelCorpus

class Noisy(Words):
    def encode_batch(self, texts):
        if self.calls == {stop_after}:
            print("tokenizing", flush=True)
            sys.stdin.readline()
        return super().encode_batch(texts)

token_cache.CHUNK = 50
root = Path({root!r})
store = token_cache.prepare_store(ParallelCorpus(("x.tsv",), "en", "de", root), (Noisy(), Noisy()), ROOMY, root / "cache")
assert content(store) == encoded(numbered(200))
"""


def start(root: Path, stop_after: int) -> subprocess.Popen[str]:
    """A process that tokenizes `stop_after` chunks of 50 pairs a side, says so, and waits for a line."""
    code = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent), root=str(root), stop_after=stop_after)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "tokenizing\n"
    return process


def test_killed_process_does_no_harm(tmp_path: Path) -> None:
    corpus, cache = corpus_of(tmp_path, numbered(200)), tmp_path / "cache"
    process = start(tmp_path, stop_after=2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (leftover,) = cache.iterdir()  # half written, never under the final name
    assert (leftover / "side-0.ids").stat().st_size > 0
    tokenizer = Words()
    assert content(run(corpus, cache, tokenizer)) == encoded(numbered(200))
    assert tokenizer.calls == 2
    assert leftover.exists()  # for all this process knows, its owner is still at work
    for path in (*leftover.iterdir(), leftover):
        os.utime(path, (1, 1))
    (cache / "holidays.partial-2024").mkdir()  # not a name that Regard gives
    os.utime(cache / "holidays.partial-2024", (1, 1))
    run(corpus, cache, Words(name="other"))
    assert not leftover.exists()
    assert (cache / "holidays.partial-2024").exists()


def test_two_processes_at_once_both_end_well(tmp_path: Path) -> None:
    corpus_of(tmp_path, numbered(200))
    processes = [start(tmp_path, stop_after=1) for _ in range(2)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\ngo\n")  # one line for each side's tokenizer
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert sorted(path.name for path in only_folder(tmp_path / "cache").iterdir()) == FILES


# ---- the disk ----------------------------------------------------------------------------------------------------


def test_full_disk_names_the_folder_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_cache, "_append", full)
    with pytest.raises(RegardError, match="disk is full") as caught:
        run(corpus_of(tmp_path, numbered(5)), cache)
    assert str(cache) in str(caught.value)
    assert not list(cache.iterdir())


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(RegardError, match=f"cannot write prepared data to {tmp_path / 'cache'}"):
        run(corpus_of(tmp_path, numbered(5)), tmp_path / "cache")


def test_broken_corpus_keeps_its_own_message_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_bytes(b"a\tb\nc\n")
    with pytest.raises(RegardError, match=r"x\.tsv line 2"):
        run(ParallelCorpus(("x.tsv",), "en", "de", tmp_path), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "CHUNK", 256)

    def peak(n: int) -> int:
        corpus = corpus_of(tmp_path, ((f"{i} " * 20, f"{i} " * 20) for i in range(n)))
        tokenizer = Words()
        tokenizer.encode = lambda text: [7] * text.count(" ")  # type: ignore[method-assign]
        tracemalloc.start()
        store = run(corpus, tmp_path / "cache", tokenizer)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(store) == n
        return used

    small, large = peak(2_000), peak(20_000)  # the larger text alone has 4 MB
    assert (tmp_path / "x.tsv").stat().st_size > 4_000_000
    assert large < 1.2 * small
    assert large < 2_000_000


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("REGARD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "regard"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/regard")
    monkeypatch.setenv("REGARD_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"


def test_long_rows_are_tokenized_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "CHARACTERS", 20)
    pairs = [("a b c d e", "x")] * 7
    seen: list[int] = []
    store = prepare_store(corpus_of(tmp_path, pairs), (Words(), Words()), ROOMY, tmp_path / "cache", seen.append)
    assert seen == [2, 2, 2, 1]  # ten characters a pair
    assert len(store) == 7
