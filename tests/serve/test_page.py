"""The page of the server in a real browser, with a server whose answers are known."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "look")]
pytest.importorskip("starlette", reason="the server is not installed: pip install 'regard[serve]'")
from fake_service import LOOK, PAGE, Running, word_by_word  # noqa: E402  # after the check for starlette

pytest_plugins = "chromium"
Open = Callable[..., Any]
CAT = "The cat sat on the mat."
GERMAN_CAT = "Die Katze saß auf die Matte."
NETWORK_ERRORS = ("Failed to load resource",)


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


@pytest.fixture
def fake(service: Running) -> Any:
    """The state of the service as it was at the start."""
    vars(service.fake).clear()
    service.fake.__init__()  # type: ignore[misc]
    return service.fake


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def open_page(chromium: Any, service: Running, fake: Any, complaints: list[str]) -> Iterator[Open]:
    """open_page("look", color_scheme="dark") -> Playwright's page. Errors that it logs and foreign requests fail a test."""
    contexts = []

    def opened(tab: str = "", wait: bool = True, **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: is_foreign(asked.url, service) and complaints.append(asked.url))
        page.goto(f"{service.url}#{tab}")
        if wait:
            page.wait_for_selector("html[data-tab]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def is_foreign(url: str, service: Running) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != urlsplit(service.url).netloc


def translated(page: Any, text: str, expected: str) -> None:
    """Type a text as a whole and wait for its translation."""
    page.fill("#source-text", text)
    wait_for_text(page, "#translation", expected)


def wait_for_text(page: Any, selector: str, expected: str) -> None:
    deadline = time.monotonic() + 15
    while (found := page.text_content(selector)) != expected:
        assert time.monotonic() < deadline, f"{selector} is {found!r}, not {expected!r}"
        page.wait_for_timeout(20)


def wait_until(page: Any, holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


def lit(page: Any, where: str) -> list[str]:
    return page.eval_on_selector_all(f"{where} .word.lit", "all => all.map(one => one.textContent)")


def word(text: str) -> str:
    return f'#translation .word:text-is("{text}")'


# ---- Translate -------------------------------------------------------------------------------------------------------


def test_a_text_is_translated_while_it_is_typed(open_page: Open, fake: Any) -> None:
    page = open_page()
    page.focus("#source-text")
    page.keyboard.type("The cat", delay=30)
    wait_for_text(page, "#translation", "Die Katze")
    assert page.input_value("#source-language") == ""
    assert "English" in page.inner_text("#source-language option >> nth=0")
    assert "German" in page.inner_text("#target-language option >> nth=0")
    page.keyboard.type(" sat on the mat.", delay=30)
    wait_for_text(page, "#translation", GERMAN_CAT)
    asked = [body["text"] for body in fake.bodies("/regard/translate")]
    assert len(asked) < 8, "one request for a pause, not for a key"
    assert page.inner_text(".counter").startswith("23")


def test_a_request_that_typing_has_overtaken_is_given_up(open_page: Open, fake: Any) -> None:
    """The first translation would take a minute: only giving it up ends it before the test does."""
    fake.pause = 0.3
    page = open_page()
    page.fill("#source-text", " ".join([CAT] * 200))
    page.wait_for_selector("#translation .sentence")
    fake.pause = 0.0  # for the second one alone
    page.fill("#source-text", CAT)
    wait_for_text(page, "#translation", GERMAN_CAT)
    wait_until(page, lambda: fake.given_up == 1)


def test_words_are_lit_by_the_alignment_from_both_sides_by_mouse_and_by_caret(open_page: Open) -> None:
    page = open_page()
    translated(page, CAT, GERMAN_CAT)
    page.hover(word("Katze"))
    assert lit(page, ".mirror") == ["cat"]
    assert lit(page, "#translation") == ["Katze"]
    page.hover(word("Matte"))
    assert lit(page, ".mirror") == ["mat"]
    page.hover(".counter")
    assert lit(page, "#translation") == []
    box = page.locator('.mirror .word:text-is("sat")').bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert lit(page, "#translation") == ["saß"]
    page.hover(".counter")
    page.focus("#source-text")
    page.keyboard.press("Home")
    wait_until(page, lambda: lit(page, "#translation") == ["Die"])


def test_the_words_behind_the_text_field_lie_where_its_words_are(open_page: Open) -> None:
    """The height of the mirror is that of the text, so the field needs no scrolling and both break lines alike."""
    page = open_page()
    text = "\n".join(f"{CAT} {CAT} {CAT}" for _ in range(12))
    translated(page, text, "\n".join(f"{GERMAN_CAT} {GERMAN_CAT} {GERMAN_CAT}" for _ in range(12)))
    names = ("scrollHeight", "clientHeight", "scrollWidth", "clientWidth")
    sizes = [page.evaluate(f"document.querySelector('#source-text').{name}") for name in names]
    assert sizes[0] <= sizes[1] + 1
    assert sizes[2] == sizes[3]
    assert page.text_content(".mirror").rstrip("\u200b") == text


def test_an_alternative_replaces_the_rest_of_its_sentence(open_page: Open, fake: Any) -> None:
    page = open_page()
    translated(page, f"{CAT} The dog barked.", f"{GERMAN_CAT} Die Hund bellte.")
    page.click(word("saß"))
    page.wait_for_selector(".menu-item")
    body = fake.bodies("/regard/alternatives")[-1]
    assert (body["text"], body["prefix"], body["to"], body["source"]) == (CAT, "Die Katze ", "de", "en")
    assert page.inner_text(".menu-item >> nth=0").split("\n")[0] == "saß"
    page.click(".menu-item >> nth=1")
    wait_for_text(page, "#translation", "Die Katze Anders auf die Matte. Die Hund bellte.")
    assert page.evaluate("document.activeElement.textContent") == "Anders"
    page.hover(word("Katze"))
    assert lit(page, ".mirror") == ["cat"]  # links before the change stay
    page.hover(word("Hund"))
    assert lit(page, ".mirror") == ["dog"]  # and so do those of the next sentence, which has moved


def test_long_texts_arrive_sentence_by_sentence(open_page: Open, fake: Any) -> None:
    fake.pause = 0.15
    page = open_page()
    page.fill("#source-text", " ".join([CAT] * 12))
    page.wait_for_selector("#translation .sentence")
    assert page.locator("#translation .sentence").count() < 12
    assert page.is_visible("progress")
    assert "of 12 sentences" in page.inner_text(".target .pane-foot")
    wait_for_text(page, "#translation", " ".join([GERMAN_CAT] * 12))
    assert not page.is_visible("progress")
    assert "Confidence 80 %" in page.inner_text(".target .pane-foot")


def test_stopping_keeps_what_has_arrived(open_page: Open, fake: Any) -> None:
    fake.pause = 0.2
    page = open_page()
    page.fill("#source-text", " ".join([CAT] * 30))
    page.wait_for_selector("#translation .sentence >> nth=1")
    page.click("text=Stop")
    count = page.locator("#translation .sentence").count()
    page.wait_for_timeout(500)
    assert page.locator("#translation .sentence").count() == count < 30


def test_languages_formality_and_swapping(open_page: Open, fake: Any) -> None:
    page = open_page()
    translated(page, CAT, GERMAN_CAT)
    page.select_option(".form", "formal")
    wait_for_text(page, "#translation", f"{GERMAN_CAT} (formal)")
    page.select_option("#target-language", "fr")  # it has no forms of address
    wait_for_text(page, "#translation", GERMAN_CAT)
    assert not page.is_visible(".form")
    assert fake.bodies("/regard/translate")[-1]["to"] == "fr"
    page.select_option("#target-language", "de")
    wait_until(page, lambda: fake.bodies("/regard/translate")[-1]["to"] == "de")
    page.select_option(".form", "")
    wait_for_text(page, "#translation", GERMAN_CAT)
    page.click('[aria-label="Swap the languages"]')
    assert page.input_value("#source-text") == GERMAN_CAT
    assert (page.input_value("#source-language"), page.input_value("#target-language")) == ("de", "en")


def test_uncertain_sentences_and_notes_are_shown_quietly(open_page: Open) -> None:
    page = open_page()
    translated(page, "The cat sat? The dog barked again again.", "Die Katze saß? Die Hund bellte AGAIN AGAIN.")
    wait_until(page, lambda: page.locator(".notes li").count() == 2)
    assert page.inner_text("#translation .unsure") == "Die Katze saß?"
    assert "Repeats itself" in page.inner_text(".notes")


def test_the_translation_is_copied_as_it_is(open_page: Open) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    translated(page, f"{CAT}\n\n{CAT}", f"{GERMAN_CAT}\n\n{GERMAN_CAT}")
    page.click('[aria-label="Copy the translation"]')
    assert page.evaluate("navigator.clipboard.readText()") == f"{GERMAN_CAT}\n\n{GERMAN_CAT}"


def test_history_is_in_this_browser_alone_and_can_be_cleared(open_page: Open, fake: Any) -> None:
    page = open_page()
    translated(page, "The cat", "Die Katze")
    page.wait_for_timeout(1700)
    translated(page, CAT, GERMAN_CAT)  # the same text typed on: one entry
    page.wait_for_timeout(1700)
    translated(page, "The dog barked.", "Die Hund bellte.")
    page.wait_for_timeout(1700)
    page.click(".history summary")
    assert page.locator(".entry").count() == 2
    assert GERMAN_CAT in page.inner_text(".entry >> nth=1")
    page.click(".entry >> nth=1")
    wait_for_text(page, "#translation", GERMAN_CAT)
    page.click("text=Clear history")
    assert page.locator(".entry").count() == 0
    assert page.evaluate("localStorage.getItem('regard.history')") is None


def test_a_file_is_translated_and_saved(open_page: Open, fake: Any, tmp_path: Path) -> None:
    page = open_page()
    file = {"name": "note.txt", "mimeType": "text/plain", "buffer": CAT.encode()}
    page.set_input_files("#files", file)
    with page.expect_download() as download:
        page.click("text=Download")
    assert download.value.suggested_filename == "note.de.txt"
    assert Path(download.value.path()).read_text() == GERMAN_CAT
    assert fake.bodies("/translate_file") == [{"source": "auto", "target": "de"}]


def test_files_are_dropped_in_and_those_that_fail_say_why(open_page: Open, complaints: list[str]) -> None:
    page = open_page()
    data = page.evaluate_handle(
        "() => { const d = new DataTransfer(); d.items.add(new File(['x'], 'unreadable.txt')); return d }"
    )
    page.dispatch_event(".panes", "dragenter", {"dataTransfer": data})
    assert page.is_visible(".drop-hint")
    page.dispatch_event(".panes", "drop", {"dataTransfer": data})
    page.wait_for_selector('.files li[data-state="failed"]')
    assert not page.is_visible(".drop-hint")
    assert "This file cannot be read." in page.inner_text(".files")
    forgive(complaints)


# ---- hostile and unusual texts ---------------------------------------------------------------------------------------


def test_text_is_never_markup_and_invisible_controls_are_shown(open_page: Open) -> None:
    page = open_page()
    text = "<img src=x onerror=alert(1)> a\u202eb <b>cat</b>"
    page.fill("#source-text", text)
    page.wait_for_selector("#translation .word")
    assert page.locator("#translation img, #translation b").count() == 0
    assert page.inner_text("#translation .control") == "U+202E"
    assert "U+202E" in page.inner_text(".invisible-note")
    page.click(".invisible-note button")
    assert page.input_value("#source-text") == text.replace("\u202e", "")
    assert not page.is_visible(".invisible-note")


def test_positions_are_counted_in_utf16_as_the_server_does(open_page: Open) -> None:
    page = open_page()
    translated(page, "\U0001f408 cat \U0001f415 dog", "\U0001f408 Katze \U0001f415 Hund")
    page.hover(word("Hund"))
    assert lit(page, ".mirror") == ["dog"]


# ---- errors ----------------------------------------------------------------------------------------------------------


def forgive(complaints: list[str]) -> None:
    """Take out what a browser itself logs of a failed request."""
    complaints[:] = [said for said in complaints if not said.startswith(NETWORK_ERRORS)]


def test_a_server_that_is_gone_is_shown_and_the_text_translated_when_it_is_back(
    open_page: Open, service: Running, complaints: list[str]
) -> None:
    page = open_page()
    translated(page, CAT, GERMAN_CAT)
    service.stop()
    try:
        page.fill("#source-text", f"{CAT} The dog barked.")
        page.wait_for_selector('.notice[data-kind="offline"]')
        assert "cannot be reached" in page.inner_text(".notice.inline")
        assert page.input_value("#source-text") == f"{CAT} The dog barked."
        assert page.text_content("#translation") == GERMAN_CAT
    finally:
        service.start()
    wait_for_text(page, "#translation", f"{GERMAN_CAT} Die Hund bellte.")
    assert not page.is_visible(".notice.inline")
    forgive(complaints)


def test_a_busy_server_is_asked_again_after_the_time_it_names(
    open_page: Open, fake: Any, complaints: list[str]
) -> None:
    page = open_page()
    fake.busy = 1
    page.fill("#source-text", CAT)
    page.wait_for_selector('.notice[data-kind="busy"]')
    assert "Trying again in 1 s" in page.inner_text(".notice.inline")
    wait_for_text(page, "#translation", GERMAN_CAT)
    assert not page.is_visible(".notice.inline")
    forgive(complaints)


def test_a_text_over_the_limit_says_limit_and_length(open_page: Open, fake: Any, complaints: list[str]) -> None:
    fake.limit = 20
    page = open_page()
    page.fill("#source-text", CAT)
    page.wait_for_selector('.notice[data-kind="limit"]')
    assert "Limit 20, this is 23" in page.inner_text(".notice.inline")
    assert "over" in page.get_attribute(".counter", "class")
    forgive(complaints)


def test_a_key_is_asked_for_used_and_forgotten_with_the_tab(open_page: Open, fake: Any, complaints: list[str]) -> None:
    fake.key = "secret"
    page = open_page(wait=False)
    page.wait_for_selector("#key-field")
    page.fill("#key-field", "wrong")
    page.keyboard.press("Enter")
    wait_until(page, lambda: "refused" in page.inner_text("#key-message") if page.is_visible("#key") else False)
    page.fill("#key-field", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("#source-text")
    assert not page.is_visible("#key")
    translated(page, CAT, GERMAN_CAT)
    assert page.evaluate("Object.values({...localStorage}).includes('secret')") is False
    assert page.evaluate("sessionStorage.getItem('regard.key')") == "secret"
    forgive(complaints)


# ---- Look ------------------------------------------------------------------------------------------------------------


def look_at(page: Any, text: str, expected: str) -> Any:
    """Translate a text, open the Look tab, and return the frame once its map is drawn."""
    translated(page, text, expected)
    page.click("text=Look inside")
    frame = page.frame_locator(".look-frame")
    frame.locator("[data-cell]").first.wait_for()
    return frame


def test_the_whole_look_page_is_shown_on_what_was_translated(open_page: Open, fake: Any) -> None:
    page = open_page()
    frame = look_at(page, f"{CAT} The dog barked.", f"{GERMAN_CAT} Die Hund bellte.")
    assert fake.bodies("/regard/look")[0] == {"text": CAT, "model": "en-de-fr", "to": "de"}
    assert page.inner_text(".output .written") == GERMAN_CAT
    assert frame.locator("#tabs .tab").all_inner_texts() == ["Attention", "Predictions"]
    assert frame.locator("[data-cell]").count() == 7 * 7
    assert "Die" in frame.locator(".heat").inner_text()
    height = page.locator(".look-frame").bounding_box()["height"]
    inside = page.frames[1].evaluate("document.body.scrollHeight")
    assert abs(height - inside) <= 2, "the frame is as high as what is in it"
    page.select_option('.look [aria-label="Sentence"]', "1")
    wait_for_text(page, ".output .written", "Die Hund bellte.")


def test_a_link_is_forbidden_by_a_click_on_its_cell(open_page: Open, fake: Any) -> None:
    page = open_page()
    frame = look_at(page, CAT, GERMAN_CAT)
    frame.locator('[data-cell="1,1"]').click(force=True)
    page.wait_for_selector(".picked")
    assert page.inner_text(".picked p").startswith("Katze → cat")
    page.click(".picked .strong")
    wait_for_text(page, ".output:last-child .written", GERMAN_CAT.replace("Katze", "Hund"))
    assert page.inner_text(".output:first-child .written") == GERMAN_CAT
    assert page.eval_on_selector_all(".outputs mark", "all => all.map(one => one.textContent)") == ["Katze", "Hund"]
    assert fake.bodies("/regard/change")[-1]["changes"] == [{"kind": "forbid", "value": "*cross@1>1"}]
    frame.locator("#tabs .tab", has_text="Compare").wait_for()
    page.click("text=Undo all")
    wait_until(page, lambda: page.locator(".output").count() == 1)
    assert page.inner_text(".output .written") == GERMAN_CAT


def test_heads_words_beam_and_positions_are_changed_by_the_controls(
    open_page: Open, fake: Any, complaints: list[str]
) -> None:
    page = open_page()
    frame = look_at(page, CAT, GERMAN_CAT)
    frame.locator('[data-key="head 1"]').click()
    wait_until(page, lambda: page.input_value('.panel [aria-label="Head"]') == "1")
    page.click("text=Switch off")
    page.wait_for_selector(".chip")
    assert page.inner_text(".chip") == "zero decoder.1.cross:1"
    page.select_option('[aria-label="From word"]', label="saß")
    page.select_option('[aria-label="To word"]', label="sat")
    page.click(".panel >> text=Forbid")
    wait_until(page, lambda: len(fake.bodies("/regard/change")) == 2)
    assert fake.bodies("/regard/change")[-1]["changes"] == [
        {"kind": "zero", "value": "decoder.1.cross:1"},
        {"kind": "forbid", "value": "*cross@2>2"},  # row 2 writes the third word
    ]
    page.select_option('[aria-label="Position scheme"]', "none")  # refused, and taken back
    page.wait_for_selector(".look .notice.inline")
    wait_until(page, lambda: page.input_value('[aria-label="Position scheme"]') == "")
    assert page.locator(".chip").count() == 2
    page.click("text=Undo all")
    wait_until(page, lambda: page.locator(".output").count() == 1)
    page.select_option('[aria-label="Beam"]', "1")
    wait_for_text(page, ".output:last-child .written", GERMAN_CAT.upper())
    assert page.inner_text(".output:first-child .written") == GERMAN_CAT
    forgive(complaints)


def test_the_frame_follows_the_colours_of_the_page(open_page: Open) -> None:
    page = open_page()
    look_at(page, CAT, GERMAN_CAT)
    inside = page.frames[1]
    assert inside.get_attribute("html", "data-theme") == "light"
    page.click("#theme")
    wait_until(page, lambda: inside.get_attribute("html", "data-theme") == "dark")


def test_the_frame_loads_all_scripts_of_look_in_their_order() -> None:
    named = re.findall(r'src="/static/look/([^"]+)"', (PAGE / "look.html").read_text())
    assert named == sorted(path.name for path in LOOK.glob("*.js"))


# ---- other models ----------------------------------------------------------------------------------------------------


def test_there_are_tabs_only_for_what_is_served(open_page: Open, fake: Any) -> None:
    page = open_page()
    assert page.locator("#tabs a").all_inner_texts() == ["Translate", "Look", "Write", "Chat", "Classify", "Vectors"]
    fake.models = fake.models[:1]
    page = open_page()
    assert page.locator("#tabs a").all_inner_texts() == ["Translate", "Look"]


def test_tokens_have_probabilities_and_another_candidate_continues_the_text(open_page: Open, fake: Any) -> None:
    page = open_page("write")
    page.fill(".write textarea", "Once upon")
    page.click("text=Continue the text")
    wait_for_text(page, ".write .tokens", "Once upon word0 word1 word2 word3 word4 word5")
    assert page.get_attribute(".write .token >> nth=0", "title") == "70 %"
    page.click(".write .token >> nth=2")
    page.click(".menu-item >> nth=1")
    wait_until(page, lambda: len(fake.bodies("/regard/generate")) == 2)
    assert fake.bodies("/regard/generate")[-1]["prompt"] == "Once upon word0 word1 other2"
    wait_for_text(page, ".write .tokens", "Once upon word0 word1 other2 word0 word1 word2 word3 word4 word5")


def test_a_conversation_is_streamed_and_an_answer_can_take_another_way(open_page: Open, fake: Any) -> None:
    page = open_page("chat")
    page.fill(".chat textarea", "Hello")
    page.keyboard.press("Enter")
    wait_for_text(page, ".assistant .tokens", " word0 word1 word2 word3 word4 word5")
    page.fill(".chat textarea", "And then?")
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.locator(".assistant >> nth=1").locator(".token").count() == 6)
    roles = [message["role"] for message in fake.bodies("/regard/generate")[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    page.click(".assistant >> nth=0 >> .token >> nth=1")
    page.click(".menu-item >> nth=1")
    wait_until(page, lambda: page.locator(".message").count() == 2 and len(fake.bodies("/regard/generate")) == 3)
    body = fake.bodies("/regard/generate")[-1]
    assert body["prefix"] == " word0 other1"
    assert body["messages"] == [{"role": "user", "content": "Hello"}]


def test_labels_and_neighbours_are_bars(open_page: Open) -> None:
    page = open_page("classify")
    page.fill(".classify textarea", "A fine day")
    page.wait_for_selector(".bars li")
    assert page.locator(".classify .bars bdi").all_inner_texts() == ["cheerful", "calm", "sad"]
    assert page.evaluate("document.querySelector('.classify .bar-fill').style.width") == "70%"
    page.click("a[data-tab=vectors]")
    page.fill(".vectors input", "walk")
    page.wait_for_selector(".vectors .bars li")
    assert page.locator(".vectors .bars bdi").all_inner_texts() == ["walks", "walking"]


# ---- keyboard, colours, sizes ----------------------------------------------------------------------------------------


def test_everything_works_by_keyboard_alone(open_page: Open, fake: Any) -> None:
    page = open_page()
    wait_until(page, lambda: page.evaluate("document.activeElement.id") == "source-text")
    page.keyboard.type("The cat sat.")
    wait_for_text(page, "#translation", "Die Katze saß.")
    for _ in range(12):  # to the translation, which is one stop
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className").startswith("word"):
            break
    assert page.evaluate("document.activeElement.textContent") == "Die"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Katze"
    assert lit(page, ".mirror") == ["cat"]
    page.keyboard.press("Enter")
    page.wait_for_selector(".menu-item")
    wait_until(page, lambda: page.evaluate("document.activeElement.className") == "menu-item")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "Katze"
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.evaluate("document.activeElement.className") == "menu-item")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_for_text(page, "#translation", "Die Anders saß.")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Look inside"
    page.keyboard.press("Enter")
    frame = page.frame_locator(".look-frame")
    frame.locator("[data-cell]").first.wait_for()
    frame.locator(".cells").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector(".picked")
    page.focus(".picked .strong")
    page.keyboard.press("Enter")
    wait_until(page, lambda: fake.bodies("/regard/change"))


def test_dark_and_light_follow_the_system_or_the_switch(open_page: Open) -> None:
    def paper(page: Any) -> str:
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    assert paper(open_page()) == "rgb(247, 247, 245)"
    page = open_page(color_scheme="dark")
    assert paper(page) == "rgb(20, 22, 26)"
    page.click("#theme")
    assert paper(page) == "rgb(247, 247, 245)"
    page.reload()
    page.wait_for_selector("#source-text")
    assert paper(page) == "rgb(247, 247, 245)"


@pytest.mark.parametrize("width", [390, 760, 1280])
def test_nothing_scrolls_sideways(open_page: Open, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 844})
    text = f"{CAT} {'unbroken' * 20}"
    translated(page, text, word_by_word(text)[0].replace("The", "Die"))
    page.click("#translation .word >> nth=5")
    page.wait_for_selector(".menu-item")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.keyboard.press("Escape")
    for tab in ("look", "write", "chat", "classify", "vectors", "translate"):
        page.click(f"a[data-tab={tab}]")
        if tab == "look":
            page.frame_locator(".look-frame").locator("[data-cell]").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == width, tab


def test_every_control_has_a_name_for_screen_readers(open_page: Open) -> None:
    page = open_page()
    look_at(page, CAT, GERMAN_CAT)
    for tab in ("translate", "look", "write", "chat", "classify", "vectors"):
        page.click(f"a[data-tab={tab}]")
        unnamed = page.eval_on_selector_all(
            "button, select, input, textarea, iframe",
            """all => all.filter(one => one.checkVisibility()).filter(one => !(one.ariaLabel || one.title
               || one.textContent.trim() && one.tagName === 'BUTTON' || one.labels?.length)).map(one => one.outerHTML)""",
        )
        assert unnamed == [], tab


# ---- files of the page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(PAGE.iterdir()), ids=lambda path: path.name)
def test_no_file_reads_data_as_markup_or_names_another_server(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for dangerous in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
    ):
        assert dangerous not in text
    addresses = set(re.findall(r"\w+://[^\"'\s)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    if path.suffix == ".html":
        assert not re.search(r"\s(style|on\w+)=|<style|<script(?![^>]*\ssrc=)", text)
