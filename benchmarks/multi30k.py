"""A whole test set with its mixed lengths: Translator.translate beside `generate` of transformers with the same weights.

    python benchmarks/multi30k.py --run runs/multi30k-en-de --data MULTI30K [--peers hf|none] [--repeats 3] [--json FILE]

Both go from text to text, with the same tokenizer and beam 5. The peer gets the sentences sorted by length in batches of
128, in bf16. Its class is Marian's for post-norm models and Pegasus's for pre-norm ones: the two differ in nothing else.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Report, parser, reset_memory, wall
from peer_models import make_hf_model
from torch import nn

from regard.config import ModelConfig
from regard.data.parallel_corpus import ParallelCorpus
from regard.decode.constraints import pad_rows
from regard.device import pick_device, pick_precision
from regard.exchange.encoder_decoder_families import MARIAN
from regard.exchange.tensor_rules import Rule, copy_layer, export_tensors, interleave_sinusoids
from regard.inference.translator import Translator
from regard.metrics.translation_scores import score_translations
from regard.text.special_tokens import PAD

BATCH, BEAM = 128, 5
Translate = Callable[[list[str]], list[str]]


def rules(config: ModelConfig) -> list[Rule]:
    """Return Marian's rules, and for a pre-norm model those of the two final norms that Pegasus has."""
    found = list(MARIAN.rules(config))
    if config.norm == "pre":
        for side in ("encoder", "decoder"):
            found += copy_layer(f"{side}.norm", f"model.{side}.layer_norm", (interleave_sinusoids(config.d_model, 0),))
    return found


def peer_of(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the same weights in a model of transformers."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    theirs = make_hf_model(config, "marian" if config.norm == "post" else "pegasus", device)
    tensors = export_tensors(rules(config), {name: p.detach() for name, p in model.named_parameters()})
    missing, unknown = theirs.load_state_dict(tensors, strict=False)
    left = [n for n in missing if not n.endswith(("embed_positions.weight", "embed_tokens.weight", "lm_head.weight"))]
    if unknown or set(left) - {"final_logits_bias"}:
        raise ValueError(f"no place for {unknown}, nothing for {left}")
    return theirs.to(dtype).eval()


def own_translate(translator: Translator) -> Translate:
    return lambda texts: [found.text for found in translator.translate_sentences(texts, beam=BEAM)]


def peer_translate(model: Any, translator: Translator) -> Translate:
    """Return a translation function that batches sentences of similar length."""
    tokenizers, token_template, options = translator.tokenizers, translator.token_template, translator.options

    @torch.inference_mode()
    def translate(texts: list[str]) -> list[str]:
        sources = [token_template.wrap(ids) for ids in tokenizers.source.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda i: len(sources[i]))
        found: dict[int, str] = {}
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            ids = pad_rows([sources[i] for i in rows], model.device)
            limit = int(options.max_len_a * ids.shape[1] + options.max_len_b)
            written = model.generate(
                input_ids=ids.clamp(min=0),
                attention_mask=(ids != PAD).long(),
                num_beams=BEAM,
                do_sample=False,
                length_penalty=options.length_penalty,
                max_new_tokens=min(limit, model.config.max_position_embeddings - 1),
            )
            outputs = [[id for id in row if id not in tokenizers.target.special_ids] for row in written.tolist()]
            found.update(zip(rows, tokenizers.target.decode_batch(outputs), strict=True))
        return [found[i] for i in range(len(texts))]

    return translate


def measure(report: Report, who: str, translate: Translate, pairs: list[tuple[str, ...]], language: str) -> list[str]:
    """Report the seconds of all sentences, and their scores. The peer, which captures no graphs, warms up with a few."""
    texts, references = ([pair[i] for pair in pairs] for i in (0, 1))
    own_way, device, found = who == "regard", report.device, list[list[str]]()
    first = wall(lambda: translate(texts if own_way else texts[:8]), device)
    repeats = report.options.repeats if own_way else 1
    clock = statistics.median(wall(lambda: found.append(translate(texts)), device) for _ in range(repeats))
    report.put("test set", who, clock, "s")
    if own_way:
        report.put("test set, first call", who, first, "s")
    scores = score_translations(found[0], references, texts, language)
    for bleu in (scores.bleu, scores.bleu_lower):
        report.put(f"test set, {bleu.name}", who, bleu.value, "points")
    return found[0]


def section(report: Report) -> None:
    options, device = report.options, report.device
    translator = Translator.load(options.run, str(device))
    corpus = ParallelCorpus((options.test,), translator.source, translator.target, options.data, "test")
    pairs = list(corpus.rows())[: options.sentences or None]
    ours = measure(report, "regard", own_translate(translator), pairs, translator.target)
    if "hf" in report.peers:
        reset_memory(device)
        model = peer_of(translator.model, device, pick_precision("auto", device))
        theirs = measure(report, "hf", peer_translate(model, translator), pairs, translator.target)
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        report.note(f"{equal} of {len(pairs)} translations are the same")


def main() -> int:
    made = parser(__doc__, ["multi30k"], ["hf"], "hf")
    made.set_defaults(repeats=3)
    made.add_argument("--run", type=Path, required=True, help="a run or model folder of an encoder-decoder")
    made.add_argument("--data", type=Path, default=Path(), help="the folder of the test set")
    made.add_argument("--test", default="test_2016_flickr.{lang}.xz", help="the test set, as data.test names it")
    made.add_argument("--sentences", type=int, default=0, help="use only the first N sentences; 0 = all")
    report = Report(made.parse_args(), pick_device("auto"))
    report.section("multi30k", section)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
