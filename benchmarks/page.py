"""Size of a page of `regard look`, and how fast a browser opens it: 512 tokens, 6 layers, 8 heads.

    python benchmarks/page.py [--only encoder,decoder,both] [--repeats 5] [--json FILE]

The models have random weights: an encoder (BERT), a decoder (GPT), and an encoder-decoder, whose three kinds of attention
are 512 x 512 each. `made`: seconds from the loaded model to the HTML; `size` of the file; `opened`: from requesting the
file to the first heat map on the screen, in a headless Chromium, by its own clock; `another head`: from the key press to
the next heat map.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import Report, parser

from regard.config import DecodeConfig, TokenizerConfig
from regard.look.page.html_page import Page
from regard.look.tracers import trace
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, EOS_TEMPLATE, SpecialTokenTemplate, bert_template
from regard.text.tokenizer import Tokenizer, Tokenizers

CPU = torch.device("cpu")
MODELS = {"encoder": "bert-tiny", "decoder": "gpt-tiny", "both": "transformer-tiny"}
TASKS = {"encoder": "masked-lm", "decoder": "causal-lm", "both": "translation"}
FRAMES = {
    "encoder": bert_template(DEFAULT_SPECIAL_TOKENS),
    "decoder": SpecialTokenTemplate(before=EOS_TEMPLATE.start, after=()),
    "both": EOS_TEMPLATE,
}
SIZES = {"n_encoder_layers": 6, "n_decoder_layers": 6, "d_model": 128, "n_heads": 8, "d_ff": 256}
TINY = {**SIZES, "n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 16}
WORDS = [f"w{i}" for i in range(200)]
CLOCK = """
window.drawnAt = () => new Promise(done => new MutationObserver((_, watcher) => {
  watcher.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())));
}).observe(document.documentElement, {attributeFilter: ['data-drawn']}));
window.first = new Promise(done => addEventListener('DOMContentLoaded', () =>
  document.documentElement.dataset.drawn ? done(performance.now()) : drawnAt().then(done)));
"""
ANOTHER = """async () => {
  const begun = performance.now(), drawn = drawnAt();
  document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
  return await drawn - begun;
}"""


def package_of(kind: str, tokens: int, tiny: bool) -> ModelPackage:
    """Return a random model whose attention is not uniform, and whose translations have the full length."""
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 2, TokenizerConfig(kind="split", vocab_size=len(WORDS) + 10))
    sizes = {"source_vocab": len(tokenizer), "target_vocab": len(tokenizer), "max_len": tokens, "dropout": 0.0}
    sizes |= tokenizer.special.model_settings()
    torch.manual_seed(0)
    model = make_model(preset(MODELS[kind], **{**(TINY if tiny else SIZES), **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    options = DecodeConfig(beam=1, min_len=tokens - 2, max_len_a=0.0, max_len_b=tokens - 1, max_new_tokens=1)
    return ModelPackage(
        model.eval(), Tokenizers(tokenizer, tokenizer), TASKS[kind], options, token_template=FRAMES[kind]
    )


def text_of(tokens: int) -> str:
    """Return a text that leaves room for the special tokens of every template."""
    return " ".join(random.Random(0).choices(WORDS, k=tokens - 3))


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        raise RuntimeError("there is no Chromium on this machine (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path)


def opened(window: Any, path: Path) -> tuple[float, float]:
    """Return the seconds to the first heat map, and to that of another head."""
    page = window.new_page()
    page.add_init_script(CLOCK)
    page.goto(path.as_uri() + "#tab=attention")
    times = page.evaluate("first") / 1e3, page.evaluate(ANOTHER) / 1e3
    page.close()
    return times


def measure(report: Report, kind: str) -> None:
    tokens = 70 if report.options.tiny else 512
    package, text = package_of(kind, tokens, report.options.tiny), text_of(tokens)
    begun = time.perf_counter()
    html = Page([trace(package, text)]).html()
    report.put(f"{kind}, made", "regard", time.perf_counter() - begun, "s")
    report.put(f"{kind}, size", "regard", len(html.encode()) / 1e6, "MB")
    with tempfile.TemporaryDirectory() as place, browser() as window:
        path = Path(place) / "look.html"
        path.write_text(html, encoding="utf-8")
        times = [opened(window, path) for _ in range(report.options.repeats + 1)][1:]
    for name, found in zip(("opened", "another head"), zip(*times, strict=True), strict=True):
        report.put(f"{kind}, {name}", "regard", statistics.median(found), "s")


def main() -> int:
    options = parser(__doc__, MODELS, (), "none").parse_args()
    report = Report(options, CPU)
    for kind in MODELS:
        report.section(kind, lambda report, kind=kind: measure(report, kind))
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
