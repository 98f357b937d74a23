"""Outputs before and after interventions: of a translator that aligns words one to one, of a language model, as text and
HTML, and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
import typer
from tokens import EOS, SOS
from typer.testing import CliRunner, Result

from regard import model_folder
from regard.cli.look_commands import look_change
from regard.errors import RegardError
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.look.intervention_hooks import intervene
from regard.look.interventions import Forbid, Intervention, Pin, Replace, Zero, parse
from regard.look.output_comparison import Difference, Output, compare
from regard.model_folder import ModelPackage

KINDS = ("transformer", "rnnsearch")
TEXT = "elk ape fox hen"


def translator(kind: str = "transformer") -> Translator:
    return Translator(toy.taught(kind))


def by_hand(user: Translator, source: str, written: tuple[int, ...]) -> list[float]:
    """log p of each token, by one forced forward."""
    ids = torch.tensor([[*toy.tokens().encode(source), EOS]])
    with torch.no_grad():
        log_p = user.model(ids, torch.tensor([[SOS, *written[:-1]]])).double().log_softmax(-1)[0]
    return [log_p[i, token].item() for i, token in enumerate(written)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_hidden_by_name_changes_that_word_alone(kind: str) -> None:
    user, change = translator(kind), parse("forbid", "Affe>ape")
    found = compare(user, TEXT, [change])
    assert found.before.text == "Elch Affe Fuchs Henne"
    assert found.before.pieces == ("Elch", "Affe", "Fuchs", "Henne", "<eos>")
    assert found.after.text.split()[0] == "Elch"
    assert found.after.text.split()[1] != "Affe"
    # What else the model writes is up to what it has learned: "Affe" may come later, and then is not among the lost.
    assert found.lost or found.changed
    assert (1, 1, True) not in found.rows()
    assert found.kept[0] == pytest.approx(found.before.log_probs[0], abs=1e-5)
    assert found.before.log_probs == pytest.approx(by_hand(user, TEXT, found.before.ids), abs=1e-5)
    with intervene(user.model, [Forbid("*cross", None, 1, 1)]):
        assert found.after.log_probs == pytest.approx(by_hand(user, TEXT, found.after.ids), abs=1e-5)
        assert found.kept == pytest.approx(by_hand(user, TEXT, found.before.ids), abs=1e-5)
    assert found.kept_log_prob < found.before.log_prob - 1
    assert found.kept_log_prob == pytest.approx(sum(found.kept))
    assert min(range(5), key=lambda i: found.kept[i] - found.before.log_probs[i]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_another_word_in_the_source_is_translated_in_its_place(kind: str) -> None:
    found = compare(translator(kind), TEXT, [parse("replace", "source:ape=owl")])
    assert found.after.text == "Elch Eule Fuchs Henne"
    assert found.changed == found.lost == (1,)
    assert found.kept == pytest.approx(by_hand(translator(kind), "elk owl fox hen", found.before.ids), abs=1e-5)
    assert found.rows() == [(0, 0, True), (1, 1, False), (2, 2, True), (3, 3, True), (4, 4, True)]


@pytest.mark.parametrize("kind", KINDS)
def test_another_word_in_the_translation_is_gone_on_from(kind: str) -> None:
    user = translator(kind)
    found = compare(user, TEXT, [parse("replace", "target:Affe=Eule")])
    assert found.after.text.split()[:2] == ["Elch", "Eule"]
    assert found.after.log_probs == pytest.approx(by_hand(user, TEXT, found.after.ids), abs=1e-5)
    assert found.kept == pytest.approx(found.before.log_probs, abs=1e-6)


def test_words_that_shift_others_are_replaced_alone() -> None:
    found = compare(translator(), TEXT, [parse("replace", "source:ape=owl bee")])
    assert found.after.text == "Elch Eule Biene Fuchs Henne"
    assert found.changed == (1, 2)
    with pytest.raises(RegardError, match=r"2 pieces in the place of 1 .*'pin 0>2' goes by places"):
        compare(translator(), TEXT, [Replace("source", 1, "owl bee"), Pin(0, 2)])


def test_places_must_stay_where_they_were_on_both_sides() -> None:
    longer, shorter = Replace("source", 1, "owl bee"), Replace("source", (2, 3), "fox")  # as many tokens in all
    for changes in ([longer, shorter, Pin(0, 2)], [Replace("target", 2, "Eule Biene"), Forbid("*cross", None, 3, 3)]):
        with pytest.raises(RegardError, match="2 pieces in the place of 1"):
            compare(translator(), TEXT, changes)
    same = compare(translator(), TEXT, [Replace("source", 1, "owl"), Pin(0, 1)])
    assert same.after.text.split()[0] == "Eule"


def test_a_change_without_a_place_goes_with_any_other_text() -> None:
    found = compare(translator(), TEXT, [Replace("source", 1, "owl bee"), Zero("decoder.0.self", (1,))])
    with intervene(translator().model, [Zero("decoder.0.self", (1,))]):
        expected = by_hand(translator(), "elk owl bee fox hen", found.after.ids)
    assert found.after.log_probs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_given_is_not_replaced_in_the_output(kind: str) -> None:
    with pytest.raises(RegardError, match=r"target:0=Eule: that was given, not written.*begin at 1"):
        compare(translator(kind), TEXT, [Replace("target", 0, "Eule")])
    first = compare(translator(kind), TEXT, [Replace("target", 1, "Eule")])
    assert first.after.text.split()[0] == "Eule"


@pytest.mark.parametrize("words", [15, 16, 40])
def test_an_output_that_is_forced_beyond_the_model_is_refused(words: int) -> None:
    change = Replace("target", 1, " ".join(["Eule"] * words))
    with pytest.raises(RegardError, match=f"begins with {words + 1} tokens, and the model was built for at most 16"):
        compare(translator(), TEXT, [change])
    longest = compare(translator(), TEXT, [Replace("target", 1, " ".join(["Eule"] * 14))])
    assert longest.after.text.split()[:14] == ["Eule"] * 14


def test_the_options_of_decoding_are_heard() -> None:
    found = compare(translator(), TEXT, [Zero("*cross")], max_len_a=0.0, max_len_b=3, beam=1)
    assert len(found.before.ids) == len(found.after.ids) == 3


def test_nothing_and_empty_texts_are_refused() -> None:
    with pytest.raises(RegardError, match="give a sentence"):
        compare(translator(), " ", [Zero("*")])


@pytest.mark.parametrize("text", ["decoder.*.self@2>1", "zero"])
def test_a_language_model_goes_on_otherwise(bundles: dict[str, ModelPackage], text: str) -> None:
    user = Generator(bundles["gpt"])
    change: Intervention = Zero("decoder.0.self") if text == "zero" else parse("forbid", text)
    found = compare(user, "the man has", [change], max_new_tokens=5)
    assert found.before.text == user.generate("the man has", max_new_tokens=5).text.strip()
    prompt = user.framed("the man has")

    def scored(ids: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            log_p = user.model(torch.tensor([[*prompt, *ids[:-1]]])).log_softmax(-1)[0, len(prompt) - 1 :]
        return [log_p[i, token].item() for i, token in enumerate(ids)]

    assert found.before.log_probs == pytest.approx(scored(found.before.ids), abs=1e-5)
    with intervene(user.model, [change]):
        assert found.after.log_probs == pytest.approx(scored(found.after.ids), abs=1e-5)
        assert found.kept == pytest.approx(scored(found.before.ids), abs=1e-5)


def test_the_prompt_of_a_language_model_may_be_another(bundles: dict[str, ModelPackage]) -> None:
    user = Generator(bundles["gpt"])
    found = compare(user, "the man has", [Replace("source", 1, "a")], max_new_tokens=4)
    other = [*user.framed("the man has")]
    other[1:2] = user.tokenizer.encode("a")
    assert found.kept == pytest.approx(
        user.model(torch.tensor([[*other, *found.before.ids[:-1]]]))
        .log_softmax(-1)[0, len(other) - 1 :]
        .gather(1, torch.tensor(found.before.ids)[:, None])[:, 0]
        .tolist(),
        abs=1e-5,
    )
    (written, *_) = found.before.pieces
    forced = compare(user, "the man has", [Replace("target", len(user.framed("the man has")), "red")], max_new_tokens=4)
    begin = user.tokenizer.encode("red")
    assert list(forced.after.ids[: len(begin)]) == begin
    assert written == forced.before.pieces[0]


def test_a_prompt_is_not_replaced_in_the_output(bundles: dict[str, ModelPackage]) -> None:
    user = Generator(bundles["gpt"])
    n = len(user.framed("the man has"))
    for place in (0, n - 1):
        with pytest.raises(RegardError, match=f"given, not written.*begin at {n}"):
            compare(user, "the man has", [Replace("target", place, "red")])


def test_after_a_longer_prompt_as_much_of_the_old_output_is_scored_as_fits(bundles: dict[str, ModelPackage]) -> None:
    user = Generator(bundles["gpt"])
    n = len(user.framed("the man has"))
    found = compare(user, "the man has", [Replace("source", 1, "the red man")], max_new_tokens=64 - n, min_len=64 - n)
    other = user.framed("the man has")
    other[1:2] = user.tokenizer.encode("the red man")
    assert len(found.before.ids) == 64 - n
    assert len(found.kept) == 64 - len(other) < 64 - n
    with torch.no_grad():
        log_p = user.model(torch.tensor([[*other, *found.before.ids[: len(found.kept)]]])).log_softmax(-1)[0]
    expected = [log_p[len(other) - 1 + i, found.before.ids[i]].item() for i in range(len(found.kept))]
    assert found.kept == pytest.approx(expected, abs=1e-4)
    said = f"the first {len(found.kept)} of the {64 - n} tokens that stood before have log p"
    assert said in str(found)
    assert "there is no room for more" in found._repr_html_()


# ---- as it is shown --------------------------------------------------------------------------------------------------

HOSTILE = "</td><script>alert(1)</script>"
MADE = Difference(
    f"in {HOSTILE}",
    (f"pin {HOSTILE}>0",),
    Output("ein Apfel", (7, 8, 2), ("▁ein", "▁Apfel", "<eos>"), (-0.25, -0.5, -0.125)),
    Output(f"ein {HOSTILE} da", (7, 9, 10, 2), ("▁ein", HOSTILE, "▁da", "<eos>"), (-0.25, -1.5, -0.75, -0.5)),
    (-0.25, -9.0, -0.25),
)


def test_tokens_stand_side_by_side_and_what_differs_is_marked() -> None:
    assert (MADE.changed, MADE.lost) == ((1, 2), (1,))
    lines = str(MADE).splitlines()
    assert lines[0] == f"change  pin {HOSTILE}>0"
    assert lines[1] == "before  ein Apfel   (log p -0.875)"
    assert lines[2] == f"after   ein {HOSTILE} da   (log p -3.000)"
    assert lines[3] == "what stood before has log p -9.500 after the change"
    assert [line.split() for line in lines[5:]] == [
        ["before", "log", "p", "changed", "after", "log", "p"],
        ["▁ein", "-0.250", "-0.250", "▁ein", "-0.250"],
        ["*", "▁Apfel", "-0.500", "-9.000", HOSTILE, "-1.500"],
        ["*", "▁da", "-0.750"],
        ["<eos>", "-0.125", "-0.250", "<eos>", "-0.500"],
    ]


def test_in_a_notebook_text_is_never_markup() -> None:
    html = MADE._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3  # the change, the text, the token
    assert html.count("<tr") == 5
    assert html.count("bold") == 2


def test_all_of_it_can_be_had_as_numbers() -> None:
    numbers = json.loads(json.dumps(MADE.numbers()))
    assert numbers["before"]["tokens"] == ["▁ein", "▁Apfel", "<eos>"]
    assert numbers["after"]["log_prob"] == -3.0
    assert numbers["before_in_changed_model"] == {"log_prob": -9.5, "log_probs": [-0.25, -9.0, -0.25]}
    assert numbers["changed"] == [1, 2]


# ---- the command -----------------------------------------------------------------------------------------------------


def call(*words: str, **settings: Any) -> Result:
    app = typer.Typer()
    app.command()(look_change)
    return CliRunner().invoke(app, [*words, "--device", "cpu"], obj={f"decode.{k}": v for k, v in settings.items()})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("toy") / "model"
    model_folder.save(path, toy.taught("transformer"), "a card")
    return str(path)


def test_the_command_prints_both(saved: str) -> None:
    result = call(saved, TEXT, "--forbid", "Affe>ape", "--zero", "decoder.0.self:1", beam="2")
    assert result.exit_code == 0, result.output
    expected = compare(translator(), TEXT, [parse("zero", "decoder.0.self:1"), parse("forbid", "Affe>ape")], beam=2)
    assert result.output == f"{expected}\n"
    found = json.loads(call(saved, TEXT, "--pin", "0>2", "--json").output)
    assert found["after"]["text"].split()[0] == "Fuchs"
    assert found["changes"] == ["pin 0>2"]


def test_the_command_wants_a_change_and_a_model_that_writes(saved: str, folders: dict[str, Path]) -> None:
    assert "nothing is changed" in str(call(saved, TEXT).exception)
    assert "neither translates nor writes" in str(call(str(folders["bert"]), TEXT, "--zero", "*").exception)
