"""Each format on small documents: what the segments are, and what a translation looks like."""

from __future__ import annotations

from pathlib import Path

import polib
import pytest
from document_checks import align_monotone

from regard.documents import format_of, parse_document, translate_document
from regard.documents.line_wrapping import display_width, fill_lines, find_wraps, split_words
from regard.errors import RegardError


def texts(text: str, format: str, **options: bool) -> list[str]:
    return [segment.text for segment in parse_document(text, format, **options).segments]


def upper(text: str, format: str, **options: bool) -> str:
    return replaced(text, format, {}, **options)


def replaced(text: str, format: str, words: dict[str, str], **options: bool) -> str:
    """Return a document whose segments are looked up in `words`, else in capitals; words stay in their order."""
    return translate_document(
        parse_document(text, format, **options),
        lambda found: [words.get(each, each.upper()) for each in found],
        lambda sources, targets: [align_monotone(*pair) for pair in zip(sources, targets, strict=True)],
    )


def test_formats_are_known_by_their_suffixes() -> None:
    names = [
        "a.txt",
        "a.MD",
        "b.markdown",
        "c.html",
        "c.htm",
        "c.xhtml",
        "d.srt",
        "e.vtt",
        "f.po",
        "f.pot",
        "g",
        "h.log",
    ]
    found = ["text", "markdown", "markdown", "html", "html", "html", "srt", "vtt", "po", "po", "text", "text"]
    assert [format_of(name) for name in names] == found
    assert format_of(Path("page"), "<!DOCTYPE html>\n<p>Hi") == "html"
    with pytest.raises(RegardError, match=r"unknown document format 'doc': choose one of text, markdown, html"):
        parse_document("", "doc")


def test_a_byte_order_mark_stays_and_a_missing_line_end_stays_missing() -> None:
    for format in ("text", "markdown", "html"):
        assert upper("\ufeffHello you", format) == "\ufeffHELLO YOU"


def test_private_use_characters_of_the_source_stay() -> None:
    assert texts("Icon \uf015 here", "text") == ["Icon \ue000 here"]
    assert upper("Icon \uf015 here \ue000 too", "text") == "ICON \uf015 HERE \ue000 TOO"


# ---- plain text ------------------------------------------------------------------------------------------------------

MAIL = """\
Dear John,

thank you very much for the long letter that you have written to me
last week. I was very happy about it and have read it more than once
in the garden.

On Monday Ann wrote:
> I do not know whether this is the right place to ask, but I would
> like to know when the next meeting is.
>> Soon.

- Bread
- Butter and a very long list item that does not fit on one line and
  so has two

Jane Miller
12 Mill Street
Leeds

-- \n\
Jane
Phone: 123
"""


def test_wrapped_paragraphs_are_joined_and_other_lines_are_not() -> None:
    assert texts(MAIL, "text") == [
        "Dear John,",
        "thank you very much for the long letter that you have written to me last week. I was very happy about it and have "
        "read it more than once in the garden.",
        "On Monday Ann wrote:",
        "I do not know whether this is the right place to ask, but I would like to know when the next meeting is.",
        "Soon.",
        "Bread",
        "Butter and a very long list item that does not fit on one line and so has two",
        "Jane Miller",
        "12 Mill Street",
        "Leeds",
        "Jane",
        "Phone: 123",
    ]


def test_a_translated_mail_is_wrapped_again() -> None:
    made = upper(MAIL, "text")
    assert made == MAIL.upper()
    long = replaced(
        MAIL, "text", {"Butter and a very long list item that does not fit on one line and so has two": "wort " * 30}
    )
    lines = [line for line in long.split("\n") if "wort" in line]
    assert len(lines) == 3
    assert [line[:2] for line in lines] == ["- ", "  ", "  "]
    assert all(len(line) <= 70 for line in lines)


def test_columns_of_a_table_stay_apart() -> None:
    assert upper("Name      Price\napples    3 euros\n", "text") == "NAME      PRICE\nAPPLES    3 EUROS\n"
    assert replaced("a word    more\n", "text", {"a word": "Wort"}) == "Wort      MORE\n"


def test_chinese_is_joined_without_spaces_and_wrapped_by_its_width() -> None:
    line = "他们说这个城市的冬天非常冷而且很长所以大家都喜欢在家里喝茶看书聊天"
    text = f"{line}\n{line}\n{line}好。\n"
    assert texts(text, "text") == [line * 3 + "好。"]
    made = replaced(text, "text", {line * 3 + "好。": "今" * 100})
    assert {display_width(row) for row in made.split("\n")[:-2]} <= {66, 68, 70}


def test_wrapping_does_not_begin_a_line_with_a_sign_of_a_list() -> None:
    words = split_words([("aaaa bbbb - cccc", "text")], True)
    assert fill_lines(words, 10, may_begin=lambda word: word != "-") == ["aaaa bbbb -", "cccc"]
    verse = [
        "Roses are red and violets are blue,",
        "Sugar is sweet and so are you my dear,",
        "And so is honey from the bee.",
    ]
    assert find_wraps(verse, verse) == [False, False]


# ---- Markdown --------------------------------------------------------------------------------------------------------


def test_markdown_moves_emphasis_links_and_code() -> None:
    text = "See *the* [red house](x.html 'T') and `code`.\n"
    assert texts(text, "markdown") == ["See the red house and \ue000."]
    assert upper(text, "markdown") == "SEE *THE* [RED HOUSE](x.html 'T') AND `code`.\n"


def test_markdown_escapes_signs_of_a_translation() -> None:
    words = {
        "one": "*eins*",
        "two": "- zwei",
        "three": "3. drei",
        "four": "a <b> c",
        "five": "# fünf #",
        "six": "a_b_c [x](y)",
    }
    made = replaced("one\n\ntwo\n\nthree\n\nfour\n\n# five\n\nsix\n", "markdown", words)
    assert made == "\\*eins\\*\n\n\\- zwei\n\n3\\. drei\n\na \\<b> c\n\n# \\# fünf \\#\n\na\\_b\\_c \\[x\\](y)\n"


def test_emphasis_beside_chinese_is_recognized() -> None:
    made = replaced("This is _very_ good", "markdown", {"This is very good": "这是 很好"})
    assert made.replace(" ", "") in ("这*是*很好", "这是*很*好", "这是*很好*", "*这*是很好")


def test_a_link_by_its_own_text_keeps_its_target() -> None:
    text = "Read [Installation] first.\n\n[Installation]: x.html\n"
    assert upper(text, "markdown") == "READ [INSTALLATION][Installation] FIRST.\n\n[Installation]: x.html\n"


def test_markdown_keeps_code_front_matter_html_and_definitions() -> None:
    code = "```\ncode here\n```\n\n    more code"
    text = f'---\ntitle: Hello\n---\n\nHi there\n\n{code}\n\n<div title="A word">\nText\n</div>\n'
    assert texts(text, "markdown") == ["Hi there", "A word", "Text"]
    assert upper(text, "markdown") == text.replace("Hi there", "HI THERE").replace("A word", "A WORD").replace(
        "Text", "TEXT"
    )


def test_tables_tasks_footnotes_and_images() -> None:
    text = (
        "| Name | Use `a\\|b` |\n|---|---|\n| one \\| two | `x` |\n\n- [ ] do it\n- [x] done now\n\n"
        "Text[^n] more.\n\n[^n]: The note.\n\n![A *fine* picture](a.png)\n"
    )
    assert texts(text, "markdown") == [
        "Name", "Use \ue000", "one | two", "do it", "done now", "Text\ue000 more.", "The note.", "A fine picture",
    ]  # fmt: skip
    made = upper(text, "markdown")
    assert "| NAME | USE `a\\|b` |" in made
    assert "| ONE \\| TWO | `x` |" in made
    assert "- [ ] DO IT\n- [x] DONE NOW" in made
    assert "TEXT[^n] MORE.\n\n[^n]: THE NOTE." in made
    assert "![A *FINE* PICTURE](a.png)" in made


def test_hard_breaks_and_quotations_stay() -> None:
    text = "> first line  \n> second line\\\n> third *one\n> two*\n"
    assert upper(text, "markdown") == "> FIRST LINE  \n> SECOND LINE\\\n> THIRD *ONE\n> TWO*\n"


# ---- HTML ------------------------------------------------------------------------------------------------------------


def test_html_translates_text_and_attributes_only() -> None:
    text = (
        '<p title="A title" class=x>See <a href="a b">the <b>house</b></a><br>now &amp; th&eacute;n &copy;<!-- no --></p>\n'
        "<script>var x = 'no';</script><pre>no</pre><p translate=no>no <i>no</i></p><input placeholder=word value=no>"
        "<meta name=description content='Some words'><meta name=viewport content='no'>"
    )
    assert texts(text, "html") == ["A title", "See the house", "now & thén \ue000", "word", "Some words"]
    assert upper(text, "html") == (
        '<p title="A TITLE" class=x>SEE <a href="a b">THE <b>HOUSE</b></a><br>NOW &amp; THÉN &copy;<!-- no --></p>\n'
        "<script>var x = 'no';</script><pre>no</pre><p translate=no>no <i>no</i></p><input placeholder=\"WORD\" value=no>"
        "<meta name=description content='SOME WORDS'><meta name=viewport content='no'>"
    )


def test_html_escapes_signs_of_a_translation() -> None:
    words = {"one": "a < b & c", "two": "x \"y\" 'z' & w"}
    made = replaced("<p title=\"two\" alt='two'>one</p>", "html", words)
    assert made == "<p title=\"x &quot;y&quot; 'z' &amp; w\" alt='x \"y\" &#39;z&#39; &amp; w'>a &lt; b &amp; c</p>"


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ('<html lang="en" class=x>', '<html lang="de" class=x>'),
        ("<HTML class=x LANG=en-GB>", "<HTML class=x LANG=de>"),
        ("<html xml:lang='en' lang='en'>", "<html xml:lang='de' lang='de'>"),
        ('<html lang="de-AT">', '<html lang="de-AT">'),  # the language of the translation already
        ("<html lang>", "<html lang>"),
        ('<html lang="en" translate="no">', '<html lang="en" translate="no">'),
        ("<html>", "<html>"),
        ('<p lang="en">', '<p lang="en">'),  # what is said of a part of a page stays
    ],
)
def test_a_page_gets_the_language_of_its_translation(tag: str, expected: str) -> None:
    document = parse_document(f"{tag}<p>Hi</p>", "html")
    assert document.render(document.segments, "de") == f"{expected}<p>Hi</p>"
    assert document.render(document.segments) == f"{tag}<p>Hi</p>"


# ---- subtitles -------------------------------------------------------------------------------------------------------


def test_cues_keep_times_tags_and_lines() -> None:
    text = (
        "1\r\n00:00:01,000 --> 00:00:02,000\r\n{\\an8}<i>One two\r\nthree four</i>\r\n\r\n"
        "2\r\n00:00:03,000 --> 00:00:04,000\r\n- Yes.\r\n- No.\r\n"
    )
    assert texts(text, "srt") == ["One two three four", "Yes.", "No."]
    assert upper(text, "srt") == text.replace("One two", "ONE TWO").replace("three four", "THREE FOUR").replace(
        "Yes", "YES"
    ).replace("No", "NO")


def test_webvtt_keeps_notes_styles_voices_and_times() -> None:
    text = (
        "WEBVTT\n\nSTYLE\n::cue { color: red }\n\nNOTE keep me\n\nname\n00:01.000 --> 00:02.000 align:start\n"
        "<v Ann>Well &amp; <c.loud>good</c> <00:01.500>day"
    )
    assert texts(text, "vtt") == ["Well & good \ue000day"]
    assert upper(text, "vtt") == text.replace("Well", "WELL").replace("good", "GOOD").replace("day", "DAY")
    assert replaced(text, "vtt", {"Well & good \ue000day": "a <b> --> c \ue000d"}).count("-->") == 1


# ---- gettext ---------------------------------------------------------------------------------------------------------

CATALOGUE = """\
# A comment
msgid ""
msgstr "Language: de\\n"

#, c-format
msgid "%d of %s (100%%)"
msgstr ""

msgctxt "menu"
msgid "Save _as"
msgstr ""

msgid "one file"
msgid_plural "{n} files"
msgstr[0] ""
msgstr[1] ""

msgid "done"
msgstr "fertig"

#, fuzzy
msgid "old"
msgstr "alt"

msgid "First line.\\n"
"Second <b>line</b>.\\n"
msgstr ""

#~ msgid "gone"
#~ msgstr "weg"
"""


def test_messages_without_a_translation_get_one() -> None:
    assert texts(CATALOGUE, "po") == [
        "\ue000 of \ue001 (100\ue002)", "Save as", "one file", "\ue000 files", "First line.\ue000Second line.",
    ]  # fmt: skip
    made = upper(CATALOGUE, "po")
    assert 'msgstr "%d OF %s (100%%)"' in made
    assert 'msgid "Save _as"\nmsgstr "_SAVE AS"' in made
    assert 'msgstr[0] "ONE FILE"\nmsgstr[1] "{n} FILES"' in made
    assert 'msgstr ""\n"FIRST LINE.\\n"\n"SECOND <b>LINE</b>.\\n"' in made
    assert 'msgstr "fertig"' in made
    assert 'msgstr "alt"' in made
    assert made.startswith('# A comment\nmsgid ""\nmsgstr "Language: de\\n"\n')


HEADER = 'msgid ""\nmsgstr ""\n"Plural-Forms: \\n"\n"Language: {}\\n"\n\nmsgid "one"\nmsgstr ""\n"Language: \\n"\n'


@pytest.mark.parametrize(
    ("given", "language", "expected"),
    [("", "de", "de"), ("", "zh", "zh_CN"), ("", "zh-Hant", "zh_TW"), ("", "", ""), ("fr", "de", "fr")],
)
def test_a_catalogue_without_a_language_gets_that_of_its_translation(given: str, language: str, expected: str) -> None:
    document = parse_document(HEADER.format(given), "po")
    assert document.render(document.segments, language) == HEADER.format(expected)
    narrow = parse_document(HEADER.format(given).replace("Language: ", "Language:"), "po")
    assert polib.pofile(narrow.render(narrow.segments, language)).metadata["Language"] == expected


def test_existing_translations_are_replaced_only_when_asked() -> None:
    made = upper(CATALOGUE, "po", overwrite=True)
    assert 'msgid "done"\nmsgstr "DONE"' in made
    assert '#, fuzzy\nmsgid "old"\nmsgstr "OLD"' in made
    assert '#~ msgstr "weg"' in made


def test_placeholders_that_a_translation_invents_are_removed() -> None:
    made = replaced('msgid "hello"\nmsgstr ""\n', "po", {"hello": "hallo %s du {x}"})
    assert made == 'msgid "hello"\nmsgstr "hallo  du "\n'


def test_what_is_no_catalogue_is_an_error_in_one_line() -> None:
    with pytest.raises(RegardError, match=r"^the file is no gettext catalogue \(PO\): Syntax error .*\(line 1\)$"):
        parse_document("This is no catalogue.\n", "po")
