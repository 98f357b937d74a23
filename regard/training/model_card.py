"""The model card (README.md) that a finished run writes beside its weights."""

from __future__ import annotations

from regard.config import ModelConfig
from regard.models.architectures import architecture_of
from regard.training.checkpoint import Progress
from regard.training.job import Job, Validation

PIPELINE_TAGS = {  # of the Hugging Face Hub
    "translation": "translation",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "classification": "text-classification",
    "tagging": "token-classification",
    "image-classification": "image-classification",
}


def model_card(job: Job, result: Validation, steps: list[int], progress: Progress) -> str:
    """Return the model card of a finished run, whose weights are the mean of the checkpoints of `steps`."""
    config, model = job.config, job.config.model
    parameters = sum(p.numel() for p in job.model.parameters())
    weights = f"checkpoint of step {steps[0]}" if len(steps) == 1 else f"mean of the checkpoints of steps {steps}"
    origin = f" from {config.train.init_from}" if config.train.init_from else ""
    return f"""---
{_front_matter(job)}library_name: regard
---
# {config.name}

A {model.architecture} model for {config.task}, trained with Regard{origin}.

| | |
|---|---|
| parameters | {parameters:,} |
| layers | {_layers(job)}, width {model.d_model}, {_style(model)} |
| vocabulary | {_vocabulary(job)} |
| training data | {", ".join(config.data.train)}: {job.data_amount} |
| trained | {progress.step:,} steps, {progress.tokens:,} scored, {progress.seconds:,.0f} s of training |
| weights | {weights} |
| validation | {", ".join(config.data.valid) or "held out of the training data"}: {result.describe()} |

Scores on a test set: `regard evaluate`. Every setting of the run is in its config.toml.
"""


def _front_matter(job: Job) -> str:
    data, task = job.config.data, job.config.task
    languages = f"language: [{data.source}, {data.target}]\n" if task == "translation" else ""
    return languages + (f"pipeline_tag: {PIPELINE_TAGS[task]}\n" if task in PIPELINE_TAGS else "")


def _style(model: ModelConfig) -> str:
    if architecture_of(model).is_recurrent:
        return f"{model.cell} of {model.value('recurrent.d_hidden')}"
    names = {
        "attention": f"{model.n_heads} heads",
        "convolution": f"convolutions over {model.value('convolution.kernel')} tokens",
    }
    mixer = " and ".join(names.get(name, name) for name in dict.fromkeys(model.mixer))
    return f"{mixer}, {model.norm}-norm"


def _layers(job: Job) -> str:
    counts = {"encoder": job.config.model.n_encoder_layers, "decoder": job.config.model.n_decoder_layers}
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n)


def _vocabulary(job: Job) -> str:
    sizes = {job.config.model.source_vocab, job.config.model.target_vocab} - {0}
    given = job.config.train.init_from or job.config.tokenizer.file  # its kind is not among the settings of this run
    pieces = f"{' and '.join(f'{n:,}' for n in sizes)} pieces"
    return (f"{pieces} of {given}" if given else f"{job.config.tokenizer.kind}, {pieces}") if sizes else "none"
