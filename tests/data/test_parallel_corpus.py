"""Raw text in: what was written comes back, and everything broken is refused in one line that says where."""

import gzip
import json
import lzma
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.data import parallel_corpus as corpus_module
from regard.data.parallel_corpus import ParallelCorpus, read_lines
from regard.errors import RegardError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_content_size=False).compress,
}
SUFFIXES = list(PACK)
SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\ufeff"

# Any text without "\n" and NUL; rich in the characters that str.splitlines() would break at.
CHARACTER = st.characters(exclude_characters="\n\0", exclude_categories=("Cs",)) | st.sampled_from(SEPARATORS)
LINE = st.text(CHARACTER, max_size=12)
END = st.sampled_from([b"\n", b"\r\n"])
relaxed = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](data))
    return path


def make(root: Path, *specs: str, source: str = "en", target: str = "de", split: str = "train") -> ParallelCorpus:
    return ParallelCorpus(specs, source, target, root, split)


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(RegardError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    return message


def encode(lines: list[str], end: bytes, bom: bool, last_end: bool) -> bytes:
    data = b"\xef\xbb\xbf" * bom + b"".join(line.encode() + end for line in lines)
    return data if last_end else data.removesuffix(end)


def without_carriage_return(line: str, end: bytes) -> str:
    """With plain "\\n" line ends a line's own final "\\r" cannot be told from half of a "\\r\\n"."""
    return line[:-1] if end == b"\n" and line.endswith("\r") else line


# ---- what goes in comes out --------------------------------------------------------------------------------------


@relaxed
@given(lines=st.lists(LINE, min_size=1, max_size=8), end=END, bom=st.booleans(), suffix=st.sampled_from(SUFFIXES))
def test_lines_round_trip(tmp_path: Path, lines: list[str], end: bytes, bom: bool, suffix: str) -> None:
    if not bom:
        lines[0] = lines[0].lstrip("\ufeff")  # at the start of a file it is a byte-order mark, not text
    path = write(tmp_path / f"text.txt{suffix}", encode(lines, end, bom, last_end=True))
    assert list(read_lines(path)) == [without_carriage_return(line, end) for line in lines]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\ntwo", ["one", "two"]),
        (b"one\n\n", ["one", ""]),
        (b"\n", [""]),
        (b"\r\n\r\r\n", ["", "\r"]),
        (b"one\r", ["one"]),
        (b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n\xef\xbb\xbf", ["one", "\ufefftwo", "\ufeff"]),
        ("a\u2028b\x85c\x0bd\x1ee\n".encode(), ["a\u2028b\x85c\x0bd\x1ee"]),
    ],
)
def test_line_rules(tmp_path: Path, data: bytes, lines: list[str], suffix: str) -> None:
    assert list(read_lines(write(tmp_path / f"text{suffix}", data))) == lines


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_block_borders_do_not_show(tmp_path: Path, suffix: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte-order mark, "\\r\\n" and multi-byte characters may fall on either side of a block's border."""
    monkeypatch.setattr(corpus_module, "BLOCK", block * (4 if suffix == ".zst" else 1))
    path = write(tmp_path / f"text{suffix}", b"\xef\xbb\xbf" + "äöü\r\n\r\n\U0001f34e\nend".encode())
    assert list(read_lines(path)) == ["äöü", "", "\U0001f34e", "end"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_concatenated_compressed_streams_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(PACK[suffix](b"one\ntw") + PACK[suffix](b"o\nthree\n"))
    assert list(read_lines(path)) == ["one", "two", "three"]


@relaxed
@given(
    pairs=st.lists(st.tuples(LINE, LINE), min_size=1, max_size=8),
    container=st.sampled_from(["lang", "bar", "tsv", "jsonl"]),
    ascii_json=st.booleans(),
    last_end=st.booleans(),
    suffix=st.sampled_from(SUFFIXES),
)
def test_pairs_round_trip(
    tmp_path: Path, pairs: list[tuple[str, str]], container: str, ascii_json: bool, last_end: bool, suffix: str
) -> None:
    """Written with "\\r\\n" and a byte-order mark, so that every character of a line is kept."""
    if container == "tsv":
        pairs = [(a.replace("\t", " "), b.replace("\t", " ")) for a, b in pairs]
    if not last_end:
        pairs = [*pairs, ("last\u2028", "letzter\x85")]  # an empty last line without a line end would be no line at all

    def put(name: str, lines: list[str]) -> None:
        write(tmp_path / name, encode(lines, b"\r\n", bom=True, last_end=last_end))

    sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
    if container == "lang":
        spec = f"x.{{lang}}.txt{suffix}"
        put(f"x.en.txt{suffix}", sources)
        put(f"x.de.txt{suffix}", targets)
    elif container == "bar":
        spec = f"left{suffix}|right.gz"
        put(f"left{suffix}", sources)
        put("right.gz", targets)
    elif container == "tsv":
        spec = f"x.tsv{suffix}"
        put(spec, [f"{a}\t{b}" for a, b in pairs])
    else:
        spec = f"x.jsonl{suffix}"
        put(spec, [json.dumps({"de": b, "n": 1, "en": a}, ensure_ascii=ascii_json) for a, b in pairs])
    assert list(make(tmp_path, spec).rows()) == pairs


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    write(tmp_path / "x.tsv", b'"a\t"b" said\n\t\n')
    assert list(make(tmp_path, "x.tsv").rows()) == [('"a', '"b" said'), ("", "")]


def test_specs_are_read_in_order_and_languages_choose_the_side(tmp_path: Path) -> None:
    write(tmp_path / "x.en", b"one\n")
    write(tmp_path / "x.de", b"eins\n")
    write(tmp_path / "y.jsonl", b'{"en": "two", "de": "zwei"}\n')
    assert list(make(tmp_path, "x.{lang}", "y.jsonl").rows()) == [("one", "eins"), ("two", "zwei")]
    backwards = make(tmp_path, "y.jsonl", "x.{lang}", source="de", target="en")
    assert list(backwards.rows()) == [("zwei", "two"), ("eins", "one")]


def test_absolute_paths_need_no_root(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", b"a\tb\n")
    assert list(make(tmp_path / "nowhere", str(path)).rows()) == [("a", "b")]


# ---- the toy corpus ----------------------------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the grammar: two numbered words and the split."""
    module = types.ModuleType("regard.data.toy")
    module.pairs = lambda n, split, seed=0: ((f"{split} {i}", f"{split.upper()} {i}") for i in range(n))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "regard.data.toy", module)
    monkeypatch.setattr(sys.modules["regard.data"], "toy", module, raising=False)


@pytest.mark.usefixtures("toy")
def test_toy(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert list(make(nowhere, "toy:2").rows()) == [("train 0", "TRAIN 0"), ("train 1", "TRAIN 1")]
    assert list(make(nowhere, "toy:1", source="de", target="en", split="test").rows()) == [("TEST 0", "test 0")]
    prints = {make(nowhere, spec, split=split).fingerprint() for spec in ("toy:1", "toy:2") for split in ("a", "b")}
    assert len(prints) == 4


@pytest.mark.parametrize("spec", ["toy:", "toy:0", "toy:-1", "toy:many", "toy:1.5"])
def test_toy_needs_a_number(tmp_path: Path, spec: str) -> None:
    message = refused(lambda: list(make(tmp_path, spec).rows()))
    assert spec in message
    assert "toy:20000" in message


def test_toy_is_english_and_german(tmp_path: Path) -> None:
    message = refused(lambda: list(make(tmp_path, "toy:5", target="fr").rows()))
    assert "en to fr" in message
    assert "German" in message


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_different_line_counts_name_both_files_and_counts(tmp_path: Path) -> None:
    write(tmp_path / "x.en", b"line\n" * 1203)
    write(tmp_path / "x.de.gz", b"zeile\n" * 1200)
    for spec in ("x.en|x.de.gz", "x.de.gz|x.en"):
        pairs = make(tmp_path, spec).rows()
        for _ in range(1200):
            next(pairs)
        message = refused(lambda pairs=pairs: next(pairs))  # type: ignore[misc]
        assert f"{tmp_path / 'x.en'} has 1,203" in message
        assert f"{tmp_path / 'x.de.gz'} has 1,200" in message


def test_missing_file_folder_and_root(tmp_path: Path) -> None:
    assert f"no file {tmp_path / 'x.en'}" in refused(lambda: list(make(tmp_path, "x.{lang}").rows()))
    (tmp_path / "d.tsv").mkdir()
    assert f"{tmp_path / 'd.tsv'} is a folder" in refused(lambda: list(make(tmp_path, "d.tsv").rows()))
    nowhere = tmp_path / "nowhere"
    assert f"no data folder {nowhere}" in refused(lambda: list(make(nowhere, "x.tsv").rows()))
    assert f"no file {tmp_path / 'x.tsv'}" in refused(make(tmp_path, "x.tsv").fingerprint)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", b"a\n")
    path.chmod(0)
    assert f"cannot read {path}: Permission denied" in refused(lambda: list(read_lines(path)))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_empty_file(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = write(tmp_path / f"x.txt{suffix}", data)
    assert refused(lambda: list(read_lines(path))).startswith(f"{path} is empty")
    path.write_bytes(b"")  # not even a compressed stream
    assert refused(lambda: list(read_lines(path))).startswith(f"{path} is empty")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_binary_file(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"x{suffix}", b"fine\nELF\0\1\n")
    message = refused(lambda: list(read_lines(path)))
    assert f"{path} line 2" in message
    assert "binary" in message


@pytest.mark.parametrize("bad", [b"caf\xe9", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf0\x9f\x8d"])
def test_invalid_utf8_names_the_line(tmp_path: Path, bad: bytes) -> None:
    path = write(tmp_path / "x.txt.xz", b"ok\n" * 40_000 + b"ab" + bad + b"\nok\n")
    message = refused(lambda: list(read_lines(path)))
    assert f"{path} line 40001" in message
    assert "UTF-8" in message


def test_text_without_line_breaks_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "LONGEST_LINE", 100_000)
    path = write(tmp_path / "x.txt", b"short\n" + b"word " * 100_000)
    assert f"{path} line 2: over 100,000 bytes" in refused(lambda: list(read_lines(path)))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("keep", [0.02, 0.5, 0.999])
def test_cut_short_compressed_file(tmp_path: Path, suffix: str, keep: float) -> None:
    whole = PACK[suffix]("\n".join(str(i**3) for i in range(20_000)).encode())
    path = tmp_path / f"x{suffix}"
    path.write_bytes(whole[: int(len(whole) * keep)])
    assert refused(lambda: list(read_lines(path))).startswith(f"{path} is damaged or cut short")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_damaged_compressed_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"plain text that somebody renamed\n")
    assert refused(lambda: list(read_lines(path))).startswith(f"{path} is damaged")
    whole = bytearray(PACK[suffix]("\n".join(str(i**3) for i in range(20_000)).encode()))
    whole[4:12] = b"\xff" * 8
    path.write_bytes(whole)
    assert refused(lambda: list(read_lines(path))).startswith(f"{path} is damaged")


def test_zstandard_missing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.zst", b"a\n")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    message = refused(lambda: list(read_lines(path)))
    assert str(path) in message
    assert "pip install zstandard" in message


@pytest.mark.parametrize(("line", "columns"), [("a", 1), ("", 1), ("a\tb\tc", 3), ("a\tb\t", 3)])
def test_tsv_with_other_than_two_columns(tmp_path: Path, line: str, columns: int) -> None:
    write(tmp_path / "x.tsv", f"a\tb\n{line}\na\tb\n".encode())
    assert f"{tmp_path / 'x.tsv'} line 2: {columns} " in refused(lambda: list(make(tmp_path, "x.tsv").rows()))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"en": "a"}', "no key 'de'"),
        ('{"en": "a", "de": null}', "'de' is not a string"),
        ('["a", "b"]', "not an object"),
        ('"a"', "not an object"),
        ("", "not JSON"),
        ('{"en": "a", "de": "b"', "not JSON"),
        ('{"en": "a", "de": "\\ud83c"}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_jsonl_refusals(tmp_path: Path, line: str, what: str) -> None:
    path = write(tmp_path / "x.jsonl", b'{"en": "a", "de": "b"}\n' + line.encode() + b"\n")
    message = refused(lambda: list(make(tmp_path, "x.jsonl").rows()))
    assert f"{path} line 2: " in message
    assert what in message


@pytest.mark.parametrize("spec", ["x.csv", "x.en", "a|b|c", "", "x.gz", "tsv"])
def test_unknown_spec(tmp_path: Path, spec: str) -> None:
    assert f"corpus {spec!r}" in refused(lambda: list(make(tmp_path, spec).rows()))


def test_no_spec(tmp_path: Path) -> None:
    assert "no val corpus" in refused(lambda: list(make(tmp_path, split="val").rows()))


# ---- fingerprints ------------------------------------------------------------------------------------------------


def test_fingerprint_follows_content_only(tmp_path: Path) -> None:
    for folder, suffix in (("one", "txt"), ("two", "text")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / f"en.{suffix}", b"a\nb\n")
        write(tmp_path / folder / f"de.{suffix}", b"c\nd\n")
    print_one = make(tmp_path / "one", "{lang}.txt").fingerprint()
    os.utime(tmp_path / "two" / "en.text", (1, 1))
    assert make(tmp_path / "two", "en.text|de.text", split="val").fingerprint() == print_one
    assert make(tmp_path / "one", "de.txt|en.txt").fingerprint() != print_one
    assert make(tmp_path / "one", "{lang}.txt", "{lang}.txt").fingerprint() != print_one
    assert make(tmp_path / "one", "en.txt|de.txt", target="fr").fingerprint() != print_one
    write(tmp_path / "one" / "de.txt", b"c\nD\n")
    assert make(tmp_path / "one", "{lang}.txt").fingerprint() != print_one


def test_fingerprint_knows_kinds_and_file_borders(tmp_path: Path) -> None:
    for name, data in (
        ("a", b"x\ny\n"),
        ("b", b"z\n"),
        ("c", b"x\n"),
        ("d", b"y\nz\n"),
        ("t.tsv", b"s"),
        ("t.jsonl", b"s"),
    ):
        write(tmp_path / name, data)
    specs = ["a|b", "c|d", "t.tsv", "t.jsonl"]
    assert len({make(tmp_path, spec).fingerprint() for spec in specs}) == len(specs)


def test_fingerprint_knows_the_compression(tmp_path: Path) -> None:
    """The same bytes are another text, or none, under another suffix."""
    for name in ("a.tsv", "a.tsv.gz"):
        (tmp_path / name).write_bytes(b"x\ty\n")
    assert make(tmp_path, "a.tsv").fingerprint() != make(tmp_path, "a.tsv.gz").fingerprint()


def test_real_corpus_is_aligned() -> None:
    repo = Path(__file__).resolve().parents[2]
    data = Path(os.environ.get("REGARD_DATA") or repo.parent / "shared" / "data") / "multi30k"
    if not data.is_dir():
        pytest.skip("Multi30k is not at REGARD_DATA or ../shared/data")
    pairs = list(make(data, "val.{lang}.xz").rows())
    with lzma.open(data / "val.de.xz") as file:
        german = file.read().decode().split("\n")[:-1]
    assert [target for _, target in pairs] == german
    assert len(pairs) == 1014
