"""The commands and examples of the README and the documentation, run as a reader would run them.

Blocks of a page run in order, in one empty folder:

| block          | what is done                                                                                            |
|----------------|---------------------------------------------------------------------------------------------------------|
| ```console     | lines that begin with `$ ` are run by bash; the lines below a command must be its stdout                |
| ```python      | is run; all blocks of a page share their names                                                          |
| ```pycon       | is a doctest: lines that begin with `>>> `, and what they print                                         |
| ```toml        | whose first line is `# NAME.toml` is written to that file                                               |
| <!-- setup ... -->  | an invisible script of bash, for files that a reader would have                                    |

In what is shown, `...` stands for anything, within a line or, alone on it, for any number of lines. A block behind
`<!-- not run: REASON -->` is not run; `python tests/test_docs.py` lists these.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from preloaded import command_folder

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "site" not in p.parts)]
BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->"
    r"|(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^(?P<fence>```+)(?P<kind>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)",
    re.M | re.S,
)
RUN = ("console", "python", "pycon", "toml")
SECONDS = 120  # for one command: a minute on two idle cores


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int
    reason: str = ""  # why it is not run


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["setup"] is not None:
            yield Block("setup", found["setup"], line)
        else:
            yield Block(found["kind"], found["text"], line, found["reason"] or "")


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block and the output that is shown below it."""
    parts = re.split(r"^\$ ", text, flags=re.M)
    assert not parts[0].strip(), f"a console block begins with a command: {parts[0]!r}"
    for part in parts[1:]:
        lines = part.splitlines(keepends=True)
        n = next(i for i, line in enumerate(lines) if not line.rstrip("\n").endswith("\\"))
        yield "".join(lines[: n + 1]).rstrip("\n"), "".join(lines[n + 1 :])


def matches(shown: str, printed: str) -> bool:
    """Return whether what was printed is what is shown; spaces at the ends of lines do not count."""
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    pattern = ""
    for line in lines:
        pattern += (
            r"(?:[^\n]*\n)*?" if line.strip() == "..." else ".*?".join(map(re.escape, line.split("..."))) + r"[ \t]*\n"
        )
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None


class Reader:
    """A person who types what a page says, in an empty folder. `commands` is a folder that comes first in PATH."""

    def __init__(self, folder: Path, commands: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
        self.environment |= {"REGARD_CACHE": str(folder / ".cache")}

    def do(self, block: Block) -> None:
        if block.kind == "console":
            for command, shown in sessions(block.text):
                printed = self.shell(command)
                assert not shown.strip() or matches(shown, printed), f"{command}\nshown:\n{shown}\nprinted:\n{printed}"
        elif block.kind == "setup":
            self.shell(f"set -e\n{block.text}")
        elif block.kind == "python":
            exec(compile(block.text, f"line {block.line}", "exec"), self.names)
        elif block.kind == "pycon":
            test = doctest.DocTestParser().get_doctest(block.text, self.names, "page", "page", block.line)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            said: list[str] = []
            runner.run(test, out=said.append, clear_globs=False)
            self.names.update(test.globs)
            assert not runner.failures, "".join(said)
        elif found := re.match(r"# ([\w-]+\.toml)\n", block.text):
            (self.folder / found[1]).write_text(block.text, encoding="utf-8")

    def shell(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        return done.stdout


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return command_folder(tmp_path_factory.mktemp("preloaded"))


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.kind in RUN for b in blocks(p))], ids=lambda p: str(p.relative_to(ROOT))
)
@pytest.mark.timeout(600)
def test_what_a_page_says_works(page: Path, tmp_path: Path, preloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the README are processes of their own; those of other pages are forked, which is faster."""
    if page.name == "extending.md":
        pytest.skip("its module is imported by tests/test_extending_page.py")
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, Path(sys.executable).parent if page.name == "README.md" else preloaded)
    for block in blocks(page):
        if block.reason:
            continue
        try:
            reader.do(block)
        except Exception as error:
            raise AssertionError(f"{page.relative_to(ROOT)} line {block.line}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_stand_in_blocks_that_are_run(page: Path) -> None:
    """A block of another kind must not hold commands: nobody would notice when they stop working."""
    for block in blocks(page):
        if block.kind in ("", "text", "bash", "sh", "shell"):
            commands = re.findall(r"^(?:\$ )?(?:regard|python|make|pip) .*", block.text, re.M)
            assert block.reason or not commands, f"{page.relative_to(ROOT)} line {block.line}: {commands[0]}"


def test_the_harness_compares_what_is_shown() -> None:
    assert matches("a\nb\n", "a \nb\n")
    assert matches("a ... c\n...\nz", "a b c\nx\ny\nz\n")
    assert matches("...\nz", "z\n")
    assert not matches("a\nb", "a\nc\n")
    assert not matches("a", "a\nb\n")
    assert list(sessions("$ one \\\n  two\nout\n$ three\n")) == [("one \\\n  two", "out\n"), ("three", "")]


def test_forked_commands_end_as_others_do(preloaded: Path, tmp_path: Path) -> None:
    def run(command: str) -> subprocess.CompletedProcess[str]:
        path = f"{preloaded}:{os.environ['PATH']}"
        shell = ["bash", "-c", command]
        return subprocess.run(
            shell, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=SECONDS
        )

    done = run("regard cost nobody")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    translated = run("echo 'I ate an apple.' | regard translate --to de | cat; echo ${PIPESTATUS[1]}")
    assert translated.stdout == "Ich habe einen Apfel gegessen.\n0\n"
    stopped = run("regard train hello --train.steps 1000000 & sleep 3; kill $!; wait $!; echo $?")
    assert stopped.stdout.splitlines()[-1] == "143"


if __name__ == "__main__":
    for page in PAGES:
        for block in blocks(page):
            if block.reason:
                print(f"{page.relative_to(ROOT)}:{block.line}: {block.reason}")
