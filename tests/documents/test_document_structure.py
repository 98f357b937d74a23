"""Structure of documents before and after translation, by parsers that are not Regard's: nothing is lost or invented."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from document_checks import ALIGNMENTS, FILES, PRIVATE_USE, STRUCTURES, TRANSLATORS, read, translate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.documents import parse_document

# ---- real documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_document_with_its_own_segments_is_unchanged(path: Path) -> None:
    text, format = read(path)
    document = parse_document(text, format)
    assert document.render(document.segments) == text
    assert len(document.segments) > 3
    assert all(segment.text.strip() == segment.text != "" for segment in document.segments)


@pytest.mark.parametrize("translator", TRANSLATORS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_structure_is_the_same_after_translation(path: Path, translator: str) -> None:
    text, format = read(path)
    before = STRUCTURES[format](text)
    for alignment in ALIGNMENTS:
        made = translate(text, format, translator, alignment)
        assert STRUCTURES[format](made) == before
        assert not PRIVATE_USE.search(made)
        assert ("\r\n" in made) == ("\r\n" in text)
        assert made.endswith("\n") == text.endswith("\n")
        assert made.startswith("\ufeff") == text.startswith("\ufeff")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_translated_words_arrive(path: Path) -> None:
    """In capitals, every segment is in the document: no translation is refused that has enough words."""
    text, format = read(path)
    document = parse_document(text, format)
    made = translate(text, format, "upper", "monotone")
    letters = "".join(char for char in made if char.isalpha())
    for segment in document.segments:
        words = [word for word in PRIVATE_USE.sub(" ", segment.text).upper().split() if word.isalpha()]
        assert all(word in letters for word in words), segment


# ---- generated documents ---------------------------------------------------------------------------------------------

SIGNS = (
    "the quick fox Haus schön été 世界 你好， 3.5 1,000 don't a&b x<y *star* snake_case # - + 1. 2) | ! [ ] ~ ` \\ & < > "
    "https://example.org/a_b?c=1&d=2 me@example.org {name} %s Wort, Ende. (so) „ja“ « oui » é \u00a0 😀 \ue123"
)
SIMPLE = "the quick brown fox jumps Haus schön été world again, and Ende. (so) 世界 3.5"
WORDS, PLAIN_WORDS = st.sampled_from(SIGNS.split(" ")), st.sampled_from(SIMPLE.split(" "))
RUN = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
LINE_ENDS = st.sampled_from(["\n", "\n", "\r\n"])


def sentences(words: st.SearchStrategy[str] = PLAIN_WORDS, least: int = 1, most: int = 12) -> st.SearchStrategy[str]:
    return st.lists(words, min_size=least, max_size=most).map(" ".join)


def check(text: str, format: str, translator: str, alignment: str) -> None:
    document = parse_document(text, format)
    assert document.render(document.segments) == text
    made = translate(text, format, translator, alignment)
    assert STRUCTURES[format](made) == STRUCTURES[format](text)
    assert sorted(PRIVATE_USE.findall(made)) == sorted(PRIVATE_USE.findall(text))


HOW = {"translator": st.sampled_from(sorted(TRANSLATORS)), "alignment": st.sampled_from(sorted(ALIGNMENTS))}

MARKDOWN_INLINE = st.recursive(
    sentences(),
    lambda inner: st.one_of(
        inner.map(lambda text: f"*{text}*"),
        inner.map(lambda text: f"**{text}**"),
        inner.map(lambda text: f"a _{text}_ b"),
        inner.map(lambda text: f"~~{text}~~"),
        inner.map(lambda text: f'[{text}](https://example.org/x_y "The title")'),
        inner.map(lambda text: f"[{text}][ref]"),
        inner.map(lambda text: f"<b>{text}</b>"),
        st.tuples(inner, inner).map(" ".join),
        st.sampled_from(
            [
                "`code *x*`",
                "![alt text](a.png)",
                "<https://e.org>",
                "[ref]",
                "<br>",
                "&amp;",
                "\\*",
                "a  \nb",
                "[^1]",
                "x\\\ny",
            ]
        ),
    ),
    max_leaves=6,
)
MARKDOWN_BLOCK = st.one_of(
    MARKDOWN_INLINE,
    MARKDOWN_INLINE.map(lambda text: "# " + text.replace("\n", " ")),
    MARKDOWN_INLINE.map(lambda text: "> " + text.replace("\n", "\n> ")),
    st.lists(MARKDOWN_INLINE, min_size=1, max_size=3).map(
        lambda items: "\n".join("- " + item.replace("\n", "\n  ") for item in items)
    ),
    st.lists(sentences(), min_size=1, max_size=3).map(
        lambda items: "\n".join(f"{i + 1}. {x}" for i, x in enumerate(items))
    ),
    st.tuples(sentences(), MARKDOWN_INLINE).map(
        lambda cells: "| a | b |\n|---|:-:|\n| {} | {} |".format(
            *(cell.replace("\n", " ").replace("|", "") for cell in cells)
        )
    ),
    st.lists(sentences(least=8, most=14), min_size=2, max_size=5).map("\n".join),
    sentences(WORDS),
    st.sampled_from(
        [
            "```py\nx = 1  # a comment\n```",
            "    code",
            "---",
            "<div>\n<p>Some text</p>\n</div>",
            "[^1]: A note.",
            "Title\n=====",
        ]
    ),
)


@settings(max_examples=260, **RUN)
@given(blocks=st.lists(MARKDOWN_BLOCK, min_size=1, max_size=4), end=LINE_ENDS, **HOW)
def test_generated_markdown_keeps_its_structure(blocks: list[str], end: str, translator: str, alignment: str) -> None:
    text = "\n\n".join([*blocks, "[ref]: https://example.org/ref 'A reference'"]) + "\n"
    check(text.replace("\n", end), "markdown", translator, alignment)


HTML_TEXT = sentences().map(lambda text: text.replace("&", "&amp;").replace("<", "&lt;"))
HTML_INLINE = st.recursive(
    HTML_TEXT,
    lambda inner: st.one_of(
        inner.map(lambda text: f"<em>{text}</em>"),
        inner.map(lambda text: f"<b class='x'>{text}</b>"),
        inner.map(lambda text: f'<a href="x.html?a=1&amp;b=2" title="Some title">{text}</a>'),
        inner.map(lambda text: f"<span translate=no>{text}</span>"),
        st.tuples(inner, inner).map(" ".join),
        st.tuples(inner, inner).map("\n   ".join),
        st.sampled_from(
            [
                "<code>x &lt; y</code>",
                "<br>",
                '<img src=a.png alt="A picture">',
                "&nbsp;",
                "&eacute;t&eacute;",
                "<!-- note -->",
            ]
        ),
    ),
    max_leaves=6,
)
HTML_BLOCK = st.one_of(
    *(HTML_INLINE.map(lambda text, tag=tag: f"<{tag}>{text}</{tag}>") for tag in ("p", "h1", "div", "blockquote")),
    st.lists(HTML_INLINE, min_size=1, max_size=3).map(
        lambda items: f"<ul>{''.join(f'<li>{x}</li>' for x in items)}</ul>"
    ),
    st.lists(HTML_INLINE, min_size=1, max_size=3).map(
        lambda items: f"<table><tr>{''.join(f'<td>{x}</td>' for x in items)}</tr></table>"
    ),
    HTML_TEXT.map(lambda text: f"<pre>{text}\n  {text}</pre>"),
    HTML_TEXT.map(lambda text: f'<form><input placeholder="{text}"><button>{text}</button></form>'),
    st.just("<script>if (a < b && c) { x = '<p>'; }</script>"),
    st.just("<p class=notranslate>Stay <b>here</b></p>"),
)


@settings(max_examples=220, **RUN)
@given(blocks=st.lists(HTML_BLOCK, min_size=1, max_size=4), end=LINE_ENDS, **HOW)
def test_generated_html_keeps_its_structure(blocks: list[str], end: str, translator: str, alignment: str) -> None:
    check("\n".join(blocks).replace("\n", end), "html", translator, alignment)


@settings(max_examples=120, **RUN)
@given(
    text=st.lists(st.sampled_from([*"<>&;/\"'= \n!-?[]ab", "<b", "</b>", "<!--", "<![x", "&#", "<p ", "&lt"])).map(
        "".join
    )
)
def test_broken_html_is_unchanged_or_escaped_without_an_error(text: str) -> None:
    document = parse_document(text, "html")
    assert document.render(document.segments) == text
    translate(text, "html", "garbage", "none")


@settings(max_examples=120, **RUN)
@given(
    text=st.lists(st.sampled_from([*"*_[]()<>!`~#-+>|\\:& \n\tab1.=^", "\n\n", "**", "  \n", "](x)", "```\n"])).map(
        "".join
    ),
    **HOW,
)
def test_random_signs_in_markdown_keep_their_structure(text: str, translator: str, alignment: str) -> None:
    check(text, "markdown", translator, alignment)


PARAGRAPH = st.one_of(
    st.lists(sentences(least=10, most=13), min_size=2, max_size=5).map("\n".join),
    st.lists(sentences(most=5), min_size=1, max_size=5).map("\n".join),
    st.lists(sentences(most=8), min_size=1, max_size=4).map(lambda lines: "\n".join("- " + line for line in lines)),
    st.lists(sentences(most=12), min_size=1, max_size=4).map(lambda lines: "\n".join("> " + line for line in lines)),
    st.sampled_from(
        [
            "Title\n=====",
            "-- \nMe\nhttps://example.org",
            "Name      Price\nApple     3",
            "    x = f(1);",
            "Mail me@example.org now.",
            "+---+\n| a |\n+---+",
        ]
    ),
)


@settings(max_examples=140, **RUN)
@given(paragraphs=st.lists(PARAGRAPH, min_size=1, max_size=4), end=LINE_ENDS, **HOW)
def test_generated_text_keeps_its_structure(paragraphs: list[str], end: str, translator: str, alignment: str) -> None:
    if translator == "garbage":
        translator = "double atoms"  # plain text has no escapes: signs in a translation are text
    check("\n\n".join(paragraphs).replace("\n", end), "text", translator, alignment)


@settings(max_examples=60, **RUN)
@given(
    text=st.lists(
        st.one_of(WORDS, st.sampled_from(["\n", "\n\n", " ", "\r\n", "\t", "> ", "\r", "\x0b", "\u2028"]))
    ).map("".join)
)
def test_any_plain_text_is_unchanged_with_its_own_segments(text: str) -> None:
    document = parse_document(text, "text")
    assert document.render(document.segments) == text
    translate(text, "text", "garbage", "none")


CUE_TEXT = st.one_of(
    sentences(),
    st.tuples(sentences(), sentences()).map("\n".join),
    st.tuples(sentences(), sentences()).map(lambda lines: f"- {lines[0]}\n- {lines[1]}"),
    st.tuples(sentences(), sentences()).map(lambda lines: f"<i>{lines[0]}\n{lines[1]}</i>"),
    st.tuples(sentences(), sentences()).map(lambda lines: f"{lines[0]} <b>{lines[1]}</b>"),
)


@settings(max_examples=120, **RUN)
@given(cues=st.lists(CUE_TEXT, min_size=1, max_size=5), is_vtt=st.booleans(), end=LINE_ENDS, **HOW)
def test_generated_subtitles_keep_their_structure(
    cues: list[str], is_vtt: bool, end: str, translator: str, alignment: str
) -> None:
    time = "00:00:{:02}.000 --> 00:00:{:02}.500" if is_vtt else "00:00:{:02},000 --> 00:00:{:02},500"
    blocks = [f"{i + 1}\n{time.format(i, i)}\n{cue}" for i, cue in enumerate(cues)]
    if is_vtt:
        blocks = ["WEBVTT", "NOTE a remark", *blocks, "00:10.000 --> 00:11.000\n<v Ann>Well <00:10.500>then"]
    else:
        blocks.append("99\n00:10:00,000 --> 00:10:01,000\n{\\an8}Up there")
    check("\n\n".join(blocks).replace("\n", end) + end, "vtt" if is_vtt else "srt", translator, alignment)


MESSAGE = st.one_of(
    sentences(),
    sentences().map(lambda text: "_" + text),
    st.tuples(sentences(), sentences()).map(lambda lines: f"{lines[0]} %s {lines[1]} %d."),
    st.tuples(sentences(), sentences()).map(lambda lines: f"{lines[0]} {{name}}\n{lines[1]}\n"),
    st.tuples(sentences(), sentences()).map(lambda lines: f'{lines[0]} <b>{lines[1]}</b> "quoted" \\ and \t tab'),
)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t") + '"'


@settings(max_examples=120, **RUN)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=5, unique=True), end=LINE_ENDS, **HOW)
def test_generated_catalogues_keep_their_structure(
    messages: list[str], end: str, translator: str, alignment: str
) -> None:
    if translator == "garbage":
        translator = "double atoms"  # it has %s and tags, which nothing escapes in a message
    blocks = ['msgid ""\nmsgstr ""\n"Plural-Forms: nplurals=2; plural=n != 1;\\n"']
    for i, message in enumerate(messages):
        if i % 3 == 2:
            plural = f'msgid {quoted(message)}\nmsgid_plural {quoted("Many: " + message)}\nmsgstr[0] ""\nmsgstr[1] ""'
            blocks.append(f"#: file.c:{i}\n{plural}")
        else:
            blocks.append(f'#. note\n#, c-format\nmsgctxt "c{i}"\nmsgid {quoted(message)}\nmsgstr ""')
    check("\n\n".join(blocks).replace("\n", end) + end, "po", translator, alignment)


def test_a_large_document_takes_seconds() -> None:
    chance = random.Random(0)
    words = ["the", "quick", "*brown*", "fox", "[jumps](x.html)", "over", "`the`", "lazy", "dog", "again"]
    text = "\n\n".join(" ".join(chance.choice(words) for _ in range(60)) for _ in range(100)) + "\n"
    check(text, "markdown", "upper", "monotone")
