"""Training by several processes: the losses and weights of one process, whatever the layout, and checkpoints for any other.

Processes are started by torchrun, on CPUs with gloo. Each start trains many small recipes one after the other
(parallel_cases.py), since importing torch takes longer than training them. All is in fp64, so that a wrong factor cannot be
taken for rounding: AdamW moves a weight whose gradient is zero but for rounding, such as the bias of a key, by a whole step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.config import TrainConfig
from regard.config.schema import MeshConfig
from regard.data.batches import Batch
from regard.device import set_up_device
from regard.errors import RegardError
from regard.layers.mixers.state_space_layer import StateSpaceLayer
from regard.layers.stack import Stack
from regard.models.architectures import make_model, preset, resolve
from regard.models.initialization import is_made_in_parts, materialize_part
from regard.text.special_tokens import PAD
from regard.training.communication import Exchange, list_exchanges, unit_sizes
from regard.training.objective import Objective, make_token_objective
from regard.training.parallel import Ranks, SingleProcess, arrange, cut_matrices, find_straggler, open_ranks, whole
from regard.training.training_step import TrainingStep

HERE = Path(__file__).parent
SIZES = "d_model = 32\nn_heads = 4\nd_ff = 64\ndropout = 0.0\nattention_dropout = 0.0\nff_dropout = 0.0\nmax_len = 32\n"
TRAIN = "warmup = 5\nlr = 3e-3\nlog_every = 5\nsamples = 0\nvalid_sentences = 8\nkeep = 9\n"
TEXT = '[data]\nroot = "{recipe}"\ntrain = ["text.txt"]\nvalid = ["text.txt"]\ndocuments = "line"\n'
TEXT += '[tokenizer]\nkind = "char"\n'
EVERY = "steps = 20\nvalid_every = 10\nsave_every = 10\n"
RECIPES = {
    "transformer": '[data]\ntrain = ["toy:300"]\n[tokenizer]\nvocab_size = 250\n[model]\npreset = "transformer-base"\n'
    f"{SIZES}n_encoder_layers = 1\nn_decoder_layers = 2\n[train]\nbatch_tokens = 500\nr_drop = 1.0\n{EVERY}{TRAIN}",
    "gpt": f'task = "causal-lm"\n{TEXT}[model]\npreset = "gpt2"\n{SIZES}n_decoder_layers = 2\n[train]\nbatch_tokens = 224\n'
    f"accumulate = 2\nlabel_smoothing = 0.0\nweight_decay = 0.1\nclip = 0.5\n{EVERY}{TRAIN}",
    "llama": f'task = "causal-lm"\n{TEXT}[model]\npreset = "llama-7b"\n{SIZES}n_kv_heads = 2\nn_decoder_layers = 2\n'
    f"[train]\nbatch_tokens = 100\nactivation_checkpointing = true\n{EVERY}{TRAIN}",
    "bert": f'task = "masked-lm"\n{TEXT}[model]\npreset = "bert-base"\n{SIZES}n_encoder_layers = 2\n[train]\n'
    f"batch_tokens = 224\nlabel_smoothing = 0.0\n{EVERY}{TRAIN}",
    "odd": f'task = "causal-lm"\n{TEXT}[model]\npreset = "gpt2"\n{SIZES}n_decoder_layers = 1\n[train]\nbatch_tokens = 224\n'
    f"label_smoothing = 0.0\n{EVERY}{TRAIN}",
    "rnn": f'task = "causal-lm"\n{TEXT}[model]\npreset = "lstm-small"\nd_model = 24\nn_decoder_layers = 2\ndropout = 0.0\n'
    f"max_len = 32\n[train]\nbatch_tokens = 120\nbptt = 8\nlabel_smoothing = 0.0\ntar_weight = 1.0\n{EVERY}{TRAIN}",
}
RECIPES["gpt"] = RECIPES["gpt"].replace('documents = "line"', 'documents = "line"\npacking = "documents"')
RECIPES["transformer"] = RECIPES["transformer"].replace("max_len = 32", "max_len = 64")
RECIPES["odd"] = RECIPES["odd"].replace("d_model = 32", "d_model = 36").replace("d_ff = 64", "d_ff = 67")
RECIPES["rnn"] = RECIPES["rnn"].replace('documents = "line"\n', "")
RECIPES["fine-tuning"] = RECIPES["transformer"].replace("[tokenizer]\nvocab_size = 250\n", "")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "fsdp": (2, {"parallel": "fsdp"}),
    "tensor": (2, {"mesh.tensor": 2}),
    "hsdp": (4, {"parallel": "fsdp", "mesh.data": 2, "mesh.shard": 2}),
    "fsdp-tensor": (4, {"parallel": "fsdp", "mesh.tensor": 2}),
    "ddp-tensor": (4, {"mesh.tensor": 2}),
    "ddp-4": (4, {}),
    "fsdp-4": (4, {"parallel": "fsdp"}),
}
KILLS = int(os.environ.get("REGARD_TEST_KILLS", "2"))  # of one rank; a third as many of all of them
THOROUGH = KILLS > 2  # longer runs, and every pair of layouts
TOLERANCE = 1e-9  # relative, in fp64: 20 steps of sums in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all recipes, and the runs of one process."""
    made = tmp_path_factory.mktemp("parallel")
    rng = np.random.default_rng(0)
    words = ["the", "cat", "dog", "sees", "house", "small", "big", "runs", "and", "a", "red", "tree", "walks", "under"]
    lines = [" ".join(rng.choice(words, rng.integers(2, 9))) for _ in range(160)]
    (made / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, text in RECIPES.items():
        (made / f"{name}.toml").write_text(text, encoding="utf-8")
    return made


def case(folder: Path, recipe: str, run: str, dtype: str = "float64", **train: Any) -> dict[str, Any]:
    return {"recipe": str(folder / f"{recipe}.toml"), "run": str(folder / run), "train": train, "dtype": dtype}


def start(folder: Path, cases: list[dict[str, Any]], ranks: int, restarts: int = 0) -> subprocess.Popen[str]:
    """Start the training of cases by so many processes; 0: by a process without torchrun."""
    file = folder / f"cases-{time.monotonic_ns()}.json"
    file.write_text(json.dumps(cases), encoding="utf-8")
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
    ]
    command = [sys.executable, *(launcher if ranks else []), str(HERE / "parallel_cases.py"), str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A file and no pipe: nobody reads it before the end, and ranks that are killed often write more than a pipe holds.
    with file.with_suffix(".log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a training, which must have succeeded."""
    process.wait(timeout=280)
    assert isinstance(process.args, list)
    assert process.returncode == 0, Path(process.args[-1]).with_suffix(".log").read_text(encoding="utf-8")[-6000:]


def train(folder: Path, cases: list[dict[str, Any]], ranks: int, restarts: int = 0) -> None:
    finish(start(folder, cases, ranks, restarts))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def losses(run: Path) -> list[float]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines]


def assert_same(run: Path, other: Path, tolerance: float = TOLERANCE) -> None:
    """Compare logged losses, which are written in full precision, and final weights, which are saved in fp32."""
    assert len(losses(run)) == len(losses(other)) > 0
    assert np.allclose(losses(run), losses(other), rtol=tolerance, atol=0), (losses(run), losses(other))
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert (x - theirs[name]).abs().max() <= 2.0**-22 * x.abs().max(), name


def check_layouts(folder: Path, recipes: list[str], layouts: list[str]) -> None:
    missing = [name for name in recipes if not (folder / f"{name}-one").exists()]
    train(folder, [case(folder, name, f"{name}-one") for name in missing], 0)
    for ranks in sorted({LAYOUTS[name][0] for name in layouts}):
        chosen = [name for name in layouts if LAYOUTS[name][0] == ranks]
        made = [case(folder, recipe, f"{recipe}-{name}", **LAYOUTS[name][1]) for recipe in recipes for name in chosen]
        train(folder, made, ranks)
    for recipe in recipes:
        for name in layouts:
            # R-Drop computes its loss in fp32 from logits of any precision.
            tolerance = 1e-6 if recipe == "transformer" else TOLERANCE
            assert_same(folder / f"{recipe}-{name}", folder / f"{recipe}-one", tolerance)


def test_two_processes_train_like_one(folder: Path) -> None:
    check_layouts(folder, ["gpt"], ["ddp", "fsdp", "tensor"])
    check_layouts(folder, ["odd"], ["fsdp"])  # sizes that the number of ranks does not divide
    for name in ("ddp", "fsdp", "tensor"):
        lines = [json.loads(line) for line in (folder / f"gpt-{name}" / "metrics.jsonl").read_text().splitlines()]
        assert all(line["communication"] > 0 and line["waiting"] >= 0 for line in lines if line["kind"] == "train")


class ShareByShare(TrainingStep):
    """A step of one process with the sums of two ranks of ddp: the gradients of each share of the rows, then their sum."""

    def __call__(self, batches: list[Batch], lr: float) -> None:
        self.label_weight.fill_(1 / batches[0].tokens)
        self.updater.set_lr(lr)
        gradients = []
        for index in range(2):
            self._forward_backward(*rank_of_two(index).share(batches[0]).inputs)
            gradients.append([p.grad for p in self.updater.parameters])
            for p in self.updater.parameters:
                p.grad = None
        for p, first, second in zip(self.updater.parameters, *gradients, strict=True):
            assert first is not None
            assert second is not None
            p.grad = first + second
        self._update()


def rank_of_two(index: int) -> Ranks:
    ranks = Ranks.__new__(Ranks)
    ranks.data_index, ranks.data_count = index, 2
    return ranks


def test_two_ranks_have_the_bits_of_one_process_that_sums_in_their_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clipping and packed documents, in fp32: DDP changes the order of sums and nothing else."""
    train(folder, [case(folder, "gpt", "bits-ddp", "float32", accumulate=1)], 2)
    monkeypatch.setattr("regard.training.trainer.TrainingStep", ShareByShare)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have
    try:
        torch.manual_seed(0)
        regard.train(folder / "gpt.toml", folder / "bits-one", settings={"train.accumulate": 1}, quiet=True)
    finally:
        torch.set_num_threads(threads)
    ours, theirs = weights(folder / "bits-ddp"), weights(folder / "bits-one")
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert torch.equal(ours[name], x), name


GPU_CASES = [("ddp", False), ("fsdp", False), ("fsdp", True)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("layout", "checkpointing"), GPU_CASES)
def test_a_captured_step_of_ranks_is_the_eager_one(
    layout: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP and FSDP2 with NCCL: CUDA graphs, for two shapes of batches, give the losses and weights of eager steps."""
    found: dict[bool, tuple[list[float], list[torch.Tensor]]] = {}
    for captured in (False, True):
        set_only_rank(monkeypatch)
        found[captured] = run_forced(layout, captured, checkpointing)
    assert np.allclose(found[True][0], found[False][0], rtol=1e-5, atol=0)
    for ours, theirs in zip(found[True][1], found[False][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def run_forced(layout: str, captured: bool, checkpointing: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Train 20 steps on one rank that uses DDP or FSDP2 although it needs neither; return losses and weights."""
    config = TrainConfig(
        parallel=layout, device="cuda", precision="fp32", warmup=2, activation_checkpointing=checkpointing
    )
    with open_ranks(config) as ranks:
        ranks.count, ranks.is_sharded = 2, layout == "fsdp"
        device, dtype = set_up_device(replace(config, device=ranks.device(config)))
        torch.set_float32_matmul_precision("highest")
        torch.manual_seed(0)
        sizes = {"d_model": 64, "n_heads": 4, "d_ff": 128, "n_decoder_layers": 3, "max_len": 64, "target_vocab": 100}
        sizes |= {"source_vocab": 100}
        smooth = {"dropout": 0.0, "attention_dropout": 0.0, "ff_dropout": 0.0}
        model = make_model(resolve(replace(preset("gpt2"), **sizes, **smooth))).to(device).train()
        step = TrainingStep(make_token_objective(model, config), config, device, dtype, ranks)
        assert step.is_graphed
        step.is_graphed = captured
        draw, losses = torch.Generator().manual_seed(1), []
        for number in range(40):
            ids = torch.randint(5, 100, (4, (32, 48)[number % 2]), generator=draw)
            step.sums.zero_()
            step([Batch((ids[:, :-1], ids[:, 1:].contiguous()), ids[:, 1:].numel())], 1e-3)
            losses.append(float(step.sums[1] / step.sums[2]))
        assert not captured or len(step.graphed_step.graphs) == 2
        return losses, [whole(p.detach()).cpu() for p in model.parameters()]


def set_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a group of one rank, as torchrun does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**one, **place}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("mixer", ["s4", "s4d", "attention,s4d"])
def test_fsdp_in_bf16_does_not_round_the_dynamics_of_state_spaces(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_only_rank(monkeypatch)
    config, seen = TrainConfig(parallel="fsdp", device="cpu"), []
    with open_ranks(config) as ranks:
        model = make_model(preset("s4d-tiny", mixer=mixer, target_vocab=20, max_len=16, n_decoder_layers=2))
        objective = Objective(model)
        exact = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("log_dt")}
        ranks._shard(objective, torch.bfloat16)
        read = StateSpaceLayer.forward  # where the parameters are whole

        def forward(self: StateSpaceLayer, *given: Any) -> Any:
            seen.append((self.log_dt.detach().clone(), self.out.weight.dtype))
            return read(self, *given)

        monkeypatch.setattr(StateSpaceLayer, "forward", forward)
        ids = torch.randint(5, 20, (2, 8))
        with torch.autocast("cpu", torch.bfloat16):
            objective(ids, ids)[0].backward()
        assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())
    assert len(seen) == len(exact) == (1 if "," in mixer else 2)
    for (used, dtype), expected in zip(seen, exact.values(), strict=True):
        assert torch.equal(used, expected)
        assert dtype == torch.float32  # a mixer is one group


@pytest.mark.slow
def test_two_processes_train_on_a_reward_like_one(folder: Path) -> None:
    """Each scores the samples of its own rows; a batch of an odd number of rows is filled up with one that is not scored."""
    base = case(folder, "transformer", "reward-base", steps=10, r_drop=0.0)
    reward: dict[str, Any] = {"objective": "reward", "init_from": base["run"], "steps": 10, "r_drop": 0.0}
    reward |= {"reward.samples": 3, "reward.likelihood_weight": 0.1}
    made = [
        {**case(folder, "fine-tuning", f"reward-{name}", **reward), "fixed_samples": True} for name in ("one", "ddp")
    ]
    train(folder, [base, made[0]], 0)
    train(folder, made[1:], 2)
    assert_same(folder / "reward-ddp", folder / "reward-one")
    lines = (json.loads(line) for line in (folder / "reward-ddp" / "metrics.jsonl").read_text("utf-8").splitlines())
    assert all(line["reward_sd"] > 0 for line in lines if line["kind"] == "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layouts"),
    [
        ("transformer", ["ddp", "fsdp", "tensor", "ddp-4"]),
        ("llama", ["hsdp", "fsdp-tensor"]),
        ("bert", ["ddp", "fsdp", "ddp-tensor"]),
        ("rnn", ["ddp", "fsdp", "fsdp-4"]),
    ],
)
def test_every_layout_trains_like_one_process(folder: Path, recipe: str, layouts: list[str]) -> None:
    check_layouts(folder, [recipe], layouts)


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(folder: Path) -> None:
    """Ten steps in one layout, ten more in another: the losses and weights of twenty steps of one process."""
    layouts = {"one": (0, {}), **{name: LAYOUTS[name] for name in ("ddp", "fsdp", "tensor", "hsdp")}}
    ring = [*layouts, *layouts]
    pairs = [("gpt", a, b) for i, a in enumerate(layouts) for b in ring[i + 1 : i + (len(layouts) if THOROUGH else 3)]]
    pairs += [("rnn", a, b) for a, b in (("one", "fsdp"), ("ddp", "hsdp"), ("hsdp", "one"))]
    train(folder, [case(folder, name, f"{name}-constant", schedule="constant") for name in ("gpt", "rnn")], 0)
    for half, steps in ((0, 10), (1, 20)):
        for ranks in (0, 2, 4):
            chosen = [pair for pair in pairs if layouts[pair[1 + half]][0] == ranks]
            settings = [{**layouts[pair[1 + half]][1], "steps": steps, "schedule": "constant"} for pair in chosen]
            made = [
                case(folder, pair[0], "-to-".join(pair), **given) for pair, given in zip(chosen, settings, strict=True)
            ]
            train(folder, made, ranks)
    for pair in pairs:
        run, whole = folder / "-to-".join(pair), folder / f"{pair[0]}-constant"
        assert np.allclose(losses(run)[-3:], losses(whole)[-3:], rtol=TOLERANCE, atol=0), pair
        for name, x in weights(whole).items():
            assert (x - weights(run)[name]).abs().max() <= 2.0**-22 * x.abs().max(), (pair, name)


LONG = {"steps": 600 if THOROUGH else 150, "valid_every": 50, "save_every": 7, "log_every": 50, "keep": 3}


@pytest.fixture(scope="module")
def long_run(folder: Path) -> Path:
    """A long run by one process, which nobody killed."""
    train(folder, [case(folder, "gpt", "long-one", **LONG)], 0)
    return folder / "long-one"


def wait_for_a_moment(run: Path, process: subprocess.Popen[str], rng: np.random.Generator, number: int) -> None:
    """Wait until a random moment: every second time after one more checkpoint, otherwise also while ranks start."""
    if number % 2 == 0:
        wait_for_progress(run, process)
        time.sleep(rng.uniform(0, 0.5))
    else:
        time.sleep(rng.uniform(0, 8))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_nothing_had_happened(
    folder: Path, long_run: Path, layout: str
) -> None:
    """SIGKILL for one of two ranks at random moments; torchrun starts both again from the newest whole checkpoint."""
    run = folder / f"long-{layout}"
    process = start(folder, [case(folder, "gpt", run.name, **LONG, **LAYOUTS[layout][1])], 2, restarts=KILLS)
    rng = np.random.default_rng(len(layout))
    for number in range(KILLS):
        wait_for_a_moment(run, process, rng, number)
        if victims := children_of(process.pid):
            os.kill(victims[rng.integers(len(victims))], signal.SIGKILL)
        time.sleep(1.0)
    finish(process)
    assert_same(run, long_run, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_all_ranks_are_killed_and_the_run_continues(folder: Path, long_run: Path, layout: str) -> None:
    """SIGKILL for torchrun and all ranks at random moments, as when a machine fails; the same command continues it."""
    run = folder / f"long-all-{layout}"
    cases = [case(folder, "gpt", run.name, **LONG, **LAYOUTS[layout][1])]
    rng = np.random.default_rng(len(layout))
    for number in range(-(-KILLS // 3)):
        process = start(folder, cases, 2)
        wait_for_a_moment(run, process, rng, number)
        for pid in (process.pid, *children_of(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    train(folder, cases, 2)
    assert_same(run, long_run, 1e-6)


def wait_for_progress(run: Path, process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """Wait until one more checkpoint has been saved."""
    before, end = newest(run), time.monotonic() + seconds
    while newest(run) <= before and process.poll() is None:
        assert time.monotonic() < end, "no checkpoint is saved"
        time.sleep(0.01)


def newest(run: Path) -> str:
    return max((path.name for path in (run / "checkpoints").glob("step-*")), default="")


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, those that train."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
        return [child for child in found if b"parallel_cases" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return []


# ---- parts ---------------------------------------------------------------------------------------------------------------


def test_tensor_parallelism_of_a_model_without_matrices_that_it_cuts_is_refused() -> None:
    model = make_model(preset("mamba-tiny", target_vocab=20, n_decoder_layers=1, d_model=16))
    with pytest.raises(RegardError, match="this model has none"):
        cut_matrices(model, SimpleNamespace(size=lambda: 2))


def test_a_mesh_is_arranged() -> None:
    def mesh(count: int, parallel: str = "ddp", **sizes: int) -> tuple[int, int, int]:
        return arrange(TrainConfig(parallel=parallel, mesh=MeshConfig(**sizes)), count)

    assert mesh(8) == (8, 1, 1)
    assert mesh(8, tensor=2) == (4, 1, 2)
    assert mesh(8, "fsdp") == (1, 8, 1)
    assert mesh(8, "fsdp", shard=4) == (2, 4, 1)
    assert mesh(16, "fsdp", data=2, tensor=2) == (2, 4, 2)
    for count, parallel, sizes in ((8, "ddp", {"data": 3}), (6, "fsdp", {"shard": 4}), (3, "ddp", {"tensor": 2})):
        with pytest.raises(RegardError, match="were started"):
            mesh(count, parallel, **sizes)
    with pytest.raises(RegardError, match=r"is for train\.parallel fsdp"):
        mesh(4, "ddp", shard=2)
    assert arrange(TrainConfig(param_dtype="bf16"), 1) == (1, 1, 1)
    with pytest.raises(RegardError, match="leave it at fp32"):  # replicas would drift apart
        arrange(TrainConfig(param_dtype="bf16"), 2)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_shares_of_a_batch_are_the_batch(rows: int, count: int) -> None:
    """Every row is in one share, all shares have the same shape, and what fills them up is not scored."""
    inputs, labels = torch.arange(rows)[:, None] + torch.zeros(rows, 3, dtype=torch.long), torch.ones(rows, 3).long()
    seen = []
    for index in range(count):
        ranks = Ranks.__new__(Ranks)
        ranks.data_index, ranks.data_count = index, count
        share = ranks.share(Batch((inputs, labels), 3 * rows))
        assert share.inputs[0].shape == (-(-rows // count), 3)
        assert share.tokens == 3 * rows
        scored = share.inputs[1][:, 0] != PAD
        seen += share.inputs[0][scored, 0].tolist()
        state = torch.arange(rows, dtype=torch.float32)[:, None]
        assert ranks.own_rows(state)[scored].flatten().tolist() == share.inputs[0][scored, 0].tolist()
    assert seen == list(range(rows))
    assert (labels == 1).all()  # the batch itself is as it was


@pytest.mark.parametrize("name", ["transformer-base", "gpt2", "llama-7b", "bert-base", "t5-small"])
def test_a_model_that_is_filled_block_by_block_has_the_weights_of_a_whole_one(name: str) -> None:
    """Where a stack changes its layers once more (T5's queries), that is detected, and the model is made whole."""
    sizes: dict[str, Any] = {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "d_head": 8, "d_ff": 32, "max_len": 16}
    sizes |= {"source_vocab": 20, "target_vocab": 20}
    config = preset(name)
    layers = {key: 2 for key in ("n_encoder_layers", "n_decoder_layers") if getattr(config, key)}
    config = resolve(replace(config, **sizes, **layers))
    torch.manual_seed(3)
    whole = make_model(config)
    torch.manual_seed(3)
    with torch.device("meta"):
        made = make_model(config)
    assert is_made_in_parts(made) == (name != "t5-small")
    if name == "t5-small":
        return
    blocks = {block for stack in made.modules() if isinstance(stack, Stack) for block in stack.blocks}
    for path in [path for path, module in made.named_modules() if module in blocks]:
        materialize_part(made, path, "cpu")
    assert any(p.is_meta for p in made.parameters())
    materialize_part(made, "", "cpu")
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    found = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    assert found.keys() == expected.keys()  # tied weights have one name
    for key, x in expected.items():
        assert torch.equal(found[key], x), key


def test_the_exchanges_of_a_step_are_counted() -> None:
    """For 3 blocks of 12 C^2 + 13 C numbers, of which each of 2 ranks holds half."""
    sizes: dict[str, Any] = {"d_model": 16, "n_heads": 2, "d_ff": 64, "n_decoder_layers": 3, "max_len": 10}
    model = make_model(resolve(replace(preset("gpt2"), **sizes, source_vocab=20, target_vocab=20)))
    block, rest = 12 * 16**2 + 13 * 16, (20 + 10) * 16 + 2 * 16
    config = TrainConfig(accumulate=2, batch_tokens=100)

    def count(data: int, shard: int, tensor: int) -> dict[Exchange, int]:
        ranks = Ranks.__new__(Ranks)
        ranks.data, ranks.shard, ranks.tensor, ranks.data_count = data, shard, tensor, data * shard
        return dict(list_exchanges(ranks, model, unit_sizes(model), config, torch.bfloat16))

    bf16, fp32 = torch.bfloat16, torch.float32
    assert count(2, 1, 1) == {Exchange("all-reduce", "data", 3 * block + rest, fp32): 1}
    assert count(1, 2, 1) == {  # the parameters here are whole, not cut
        Exchange("all-gather", "shard", block, bf16): 2 * 3 * 2,
        Exchange("reduce-scatter", "shard", block, fp32): 3 * 2,
        Exchange("all-gather", "shard", rest, bf16): 2,
        Exchange("reduce-scatter", "shard", rest, fp32): 2,
    }
    assert count(2, 1, 2)[Exchange("all-reduce", "tensor", 16 * 50, bf16)] == 4 * 3 * 2
    assert count(2, 2, 1)[Exchange("all-reduce", "data", block, fp32)] == 3


def test_a_straggler_is_the_one_that_does_not_wait() -> None:
    assert find_straggler([0.3, 0.01, 0.28, 0.4]) == (1, pytest.approx((0.3 + 0.28 + 0.4) / 3))
    assert find_straggler([0.02, 0.01, 0.03]) is None  # nobody waits for long
    assert find_straggler([0.3, 0.29, 0.31]) is None  # all wait: for the network, not for a rank
    assert find_straggler([0.5]) is None


def test_a_process_without_others_is_itself() -> None:
    alone, x = SingleProcess(), torch.arange(4)
    assert alone.from_first(lambda: {"a": 1}) == {"a": 1}
    assert alone.gather(3) == [3]
    assert torch.equal(alone.all_rows(alone.own_rows(x), 4), x)
    assert alone.read_waiting() == []
