"""The training loop: training steps, logging, validation, checkpoints, early stopping, and the final model.

An iteration begins after `progress.step` steps, and what is due there (validation, a checkpoint) is decided from `progress`
alone. So a run that resumes from any checkpoint does exactly what the uninterrupted run would have done.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from regard import device as devices
from regard import model_folder
from regard.data.batches import prefetch
from regard.decode.constraints import free_decode_graphs
from regard.errors import RegardError
from regard.files import MANIFEST, exists, find_damage
from regard.layers.experts import summarize_loads
from regard.models.architectures import make_model
from regard.models.weights import copy_weights, load_weights
from regard.signals import Interrupted, StopRequest
from regard.training.checkpoint import Checkpoints, Progress
from regard.training.job import Job, Validation
from regard.training.metrics_log import MetricsLog, NoMetrics, ProgressDisplay, print_message
from regard.training.model_card import model_card
from regard.training.objective import Objective
from regard.training.optimizer import scheduled_learning_rate
from regard.training.parallel import SingleProcess, find_straggler
from regard.training.throughput import ThroughputMeter
from regard.training.training_step import TrainingStep


class Trainer:
    """The training of one run, from its newest checkpoint or from the beginning to its final model."""

    def __init__(
        self, job: Job, quiet: bool = False, is_unchanged: bool = False, ranks: SingleProcess | None = None
    ) -> None:
        """Prepare the training of a job; `is_unchanged` says that its run was begun with exactly these settings."""
        self.job, self.config, self.is_unchanged = job, job.config.train, is_unchanged
        self.ranks = ranks or SingleProcess()
        quiet = quiet or not self.ranks.is_first
        device_name = self.ranks.device(self.config)
        self.device, self.dtype = devices.set_up_device(replace(self.config, device=device_name))
        is_built = not any(p.is_meta for p in job.model.parameters())  # otherwise its processes fill it, each its share
        self.model = (job.model.to(self.device) if is_built else job.model).train()
        objective = check_job(job)
        self.rows = max((len(x) for x in objective.buffers(recurse=False)), default=0)  # of recurrent state
        self.training_step = TrainingStep(objective, self.config, self.device, self.dtype, self.ranks)
        self.carried = dict(objective.named_buffers(recurse=False))  # recurrent state, kept from batch to batch
        self.replica: nn.Module | None = None  # the model in one piece, for validation, where processes share it
        self.checkpoints = Checkpoints(job.folder / "checkpoints")
        self.progress = self._resume(quiet)
        self.first_step = self.progress.step
        self.saved = (self.progress.step, self.progress.validated)  # step and validation that the newest checkpoint has
        self.meter = ThroughputMeter(
            job.config.model, self.training_step.objective.passes, self.device, self.ranks.count
        )
        if self.ranks.is_first:  # the sums of all processes since the last line of metrics
            self.training_step.sums.copy_(torch.tensor(self.progress.running))
            kept = iter(self.progress.expert_loads)
            for load in self.training_step.expert_loads if self.progress.expert_loads else ():
                load.copy_(torch.tensor([next(kept) for _ in load]))
        self.metrics = (
            MetricsLog(job.folder, self.progress.step, self.progress.validated) if self.ranks.is_first else NoMetrics()
        )
        self.display = ProgressDisplay(self.progress.step, self.config.steps, quiet)
        self.communication = 0.0  # seconds that the exchanges of a step take by themselves
        self.logged = self.progress.step, self.progress.seconds  # at the last line of metrics

    def _resume(self, quiet: bool) -> Progress:
        """Resume from the newest intact checkpoint, if there is one, and return the progress of the run."""
        step = self.ranks.from_first(lambda: self.checkpoints.newest(warn=print_message))
        if step is None:
            self.ranks.separate_random_numbers(self.config.seed)
            return Progress(data=self.job.data_key, running=[0.0] * len(self.training_step.sums))
        optimizer = self.training_step.updater.optimizer
        progress = self.checkpoints.load(step, self.model, optimizer, self.carried, self.ranks)
        if progress.cursor.epoch > progress.step * self.config.accumulate:  # an epoch has at least one batch
            raise RegardError(
                f"checkpoint {self.checkpoints.path(step)} is of epoch {progress.cursor.epoch + 1:,} after {step:,} steps, "
                f"which cannot be: remove it, and the one before is used"
            )
        loads = sum(len(load) for load in self.training_step.expert_loads)
        if len(progress.expert_loads) not in (0, loads):
            raise RegardError(
                f"checkpoint {self.checkpoints.path(step)} has {len(progress.expert_loads)} loads of experts, and this "
                f"model {loads}: remove it, and the one before is used"
            )
        if len(progress.running) != len(self.training_step.sums):
            raise RegardError(
                f"checkpoint {self.checkpoints.path(step)} has {len(progress.running)} running sums, and this objective "
                f"{len(self.training_step.sums)}: remove it, and the one before is used"
            )
        if progress.data != self.job.data_key:
            raise RegardError(
                f"the training data, as tokenized, is not what {self.job.folder} began with: "
                f"put the old files back, or start over with --overwrite"
            )
        print_message(
            f"resuming at step {step}: epoch {progress.cursor.epoch + 1}, batch {progress.cursor.batch}", quiet
        )
        return progress

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, stop: StopRequest) -> None:
        """Train up to the last step, or until early stopping, then write the final model."""
        progress, config = self.progress, self.config
        if self._is_finished():
            return self._say_finished()
        self.communication = self.ranks.time_communication(self.model, config, self.dtype)
        self._announce()
        stream = prefetch(self.job.batches().iterate_from(progress.cursor), pin=self.device.type == "cuda")
        try:
            while not self._validate_and_save(self.ranks.agree_to_stop(stop), stop):
                items = [next(stream) for _ in range(config.accumulate)]
                batches = [batch for batch, _ in items]
                progress.step += 1
                self.training_step(batches, scheduled_learning_rate(config, progress.step))
                progress.cursor = items[-1][1]
                for batch in batches:
                    progress.tokens += batch.tokens
                    self.meter.count(batch)
                self.display.step(progress.step)
                if _is_due(progress.step, config.log_every):
                    self._log()
        finally:
            stream.close()  # type: ignore[attr-defined]
        self._finish(stop)

    def _validate_and_save(self, stop: StopRequest, signals: StopRequest) -> bool:
        """Validate and save as far as due between two steps; return whether training is over.

        `stop` is what all processes agreed on, and `signals` what this one receives meanwhile."""
        progress, config = self.progress, self.config
        last = progress.step >= config.steps
        validating = last or _is_due(progress.step, config.valid_every)
        saving = _is_due(progress.step, config.save_every)
        if not (validating or saving or stop):
            return False
        self._check_finite()  # waits for the device; so the timed interval ends here, and what is saved is finite
        progress.seconds += self.meter.lap()
        try:
            improved = validating and self._validate(signals)
        except Interrupted:  # the resumed run begins with this validation
            self._save()
            self.checkpoints.wait()
            raise
        over = last or 0 < config.patience <= progress.without_gain  # early stopping: no gain for so many validations
        stopping = bool(stop)  # a signal from here on waits for the next call
        if over or improved or saving or stopping:
            self._save()
        if stopping:
            self.checkpoints.wait()
            self._raise_if_stopped(stop)
        self.meter.start()
        return over

    def _is_finished(self) -> bool:
        """Return whether there is nothing to do: the last step is done, and the final model is there and intact."""
        folder = self.job.folder / "model"
        is_over = self.progress.step >= self.config.steps or 0 < self.config.patience <= self.progress.without_gain
        is_validated = self.progress.validated == self.progress.step > 0
        return is_over and is_validated and self.is_unchanged and exists(folder / MANIFEST) and not find_damage(folder)

    def _say_finished(self) -> None:
        steps, last = self.progress.step, self.config.steps
        how = f"{steps:,} of {max(steps, last):,} steps"
        how = how if steps >= last else f"stopped early after {how}"
        more = f"--train.steps {2 * max(steps, last)}"
        if steps < last:  # early stopping ended it, and would end it again
            more = f"--train.patience {2 * self.config.patience}"
        self.display.say(
            f"{self.job.folder} is finished ({how}); its model is in {self.job.folder / 'model'}\n"
            f"to train longer: regard resume {shlex.quote(str(self.job.folder))} {more}" + self._next_steps()
        )

    def _next_steps(self) -> str:
        """Return the commands that the user may want to run next, as lines that follow a message."""
        commands = self.job.next_steps()
        return "\n" + "\n".join(["next:", *(f"  {command}" for command in commands)]) if commands else ""

    # ---- between steps -----------------------------------------------------------------------------------------------

    def _log(self) -> None:
        loss, nll, tokens, *more = self.ranks.add_up(self.training_step.sums).tolist()  # waits for the device
        self._check_finite()
        self.training_step.sums.zero_()
        progress = self.progress
        progress.seconds += self.meter.lap()
        speed, norm = self.meter.read(), self.training_step.norm.item()
        described = self.training_step.objective.describe_sums(more)
        values = {"loss": loss / tokens, "nll": nll / tokens, **described}
        values |= {"lr": scheduled_learning_rate(self.config, progress.step)}
        values |= {"auxiliary_loss": self.training_step.auxiliary.item()} if self.training_step.has_auxiliary else {}
        values |= self._read_expert_loads()
        values |= {"grad_norm": norm, "tokens": progress.tokens, "seconds": progress.seconds, **speed}
        values |= self._compare_ranks() | self._share_of_communication()
        self.metrics.write("train", progress.step, **values)
        shown = "".join(f"  {name} {value:.3f}" for name, value in described.items())
        mfu = f"  MFU {speed['mfu']:.1%}" if "mfu" in speed else ""
        shares = "".join(f"  {name} {values[name]:.0%}" for name in ("waiting", "communication") if name in values)
        self.display.status(
            progress.step,
            f"loss {values['loss']:.3f}{shown}  lr {values['lr']:.2e}  {speed['tokens_per_s']:,.0f} {self.job.scored}/s{mfu}"
            + shares,
        )

    def _share_of_communication(self) -> dict[str, float]:
        """Return how much of the time of a step its exchanges would take if the computation did not hide them."""
        (step, seconds), self.logged = self.logged, (self.progress.step, self.progress.seconds)
        each = (self.progress.seconds - seconds) / max(1, self.progress.step - step)
        return {"communication": self.communication / each} if self.communication and each > 0 else {}

    def _read_expert_loads(self) -> dict[str, Any]:
        """Return how evenly the experts of a model were used since the last line, in all processes."""
        loads = self.training_step.expert_loads
        if not loads:
            return {}
        total = self.ranks.add_up(torch.cat(loads))
        for load in loads:
            load.zero_()
        return summarize_loads(total.split([len(load) for load in loads]), self.training_step.limited_layers)

    def _compare_ranks(self) -> dict[str, float]:
        """Return how much of the time since the last line the processes waited for each other, and name a slow one."""
        found = self.ranks.read_waiting()
        if not found:
            return {}
        slow = find_straggler(found)
        if slow is not None:
            self.display.say(f"rank {slow[0]} is slower than the others: they wait {slow[1]:.0%} of the time for it")
        return {"waiting": sum(found) / len(found)}

    def _check_finite(self) -> None:
        """Raise an error if a step had a loss or gradient that is not finite. Waits for the device."""
        bad = self.training_step.updater.first_bad_step(self.first_step)
        if bad is not None:
            newest = self.checkpoints.newest(warn=print_message)
            run = self.job.folder
            advice = f"go on from step {newest} with `regard resume {run} --train.lr ...`" if newest else "start again"
            raise RegardError(
                f"the loss or its gradient is not finite at step {bad}; that step was not applied: "
                f"{advice}, with a lower train.lr, a longer train.warmup or train.precision fp32"
            )

    def _validate(self, stop: StopRequest) -> bool:
        """Validate, unless this step has been validated; return whether the result is the best so far."""
        progress = self.progress
        if progress.validated == progress.step:
            return False
        result = self._measure(stop)
        progress.validated = progress.step
        value = result.metric(self.config.metric)
        improved = math.isfinite(value) and (progress.best is None or value > progress.best)
        if improved:
            progress.best, progress.best_step, progress.without_gain = value, progress.step, 0
        else:
            progress.without_gain += 1
        self._show(result, improved)
        return improved

    def _measure(self, stop: StopRequest, model: nn.Module | None = None) -> Validation:
        """Validate a model, by default the one in training; the first process does."""
        measured = self._whole_model() if model is None else model
        found = self.ranks.from_first(lambda: self._measure_here(measured, stop))
        if "signum" in found:
            raise Interrupted(found["signum"], self.job.folder, self.progress.step, self.config.steps)
        return Validation(**found)

    def _measure_here(self, model: nn.Module, stop: StopRequest) -> dict[str, Any]:
        """Validate on this process; return the fields of the result, or the signal that interrupted it."""
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager"):  # blocks are compiled for the shapes of training only
                poll = lambda: self._raise_if_stopped(stop)  # noqa: E731
                return asdict(replace(self.job, model=model).validate(model, self.device, self.dtype, poll))
        except Interrupted as error:
            return {"signum": error.exit_code - 128}
        finally:
            model.train()
            free_decode_graphs(model)  # training may need their memory

    def _whole_model(self) -> nn.Module:
        """Return the model in one piece: itself, or where processes share it a copy, which the first of them fills."""
        if not self.ranks.is_sharded:
            return self.model
        weights = self.ranks.full_weights(self.model)
        if self.ranks.is_first:
            if self.replica is None:
                self.replica = make_model(self.job.config.model).to(self.device)
            copy_weights(self.replica, weights)
        return self.replica if self.replica is not None else self.model

    def _show(self, result: Validation, improved: bool) -> None:
        self.metrics.write("valid", self.progress.step, loss=result.loss, **result.scores)
        best = "  (best so far)" if improved else ""
        self.display.say(f"valid at step {self.progress.step}: {result.describe()}{best}")
        for sample in result.samples:
            self.display.say(f"  {sample}")

    def _save(self) -> None:
        progress = self.progress
        if (progress.step, progress.validated) != self.saved:
            progress.running = self.ranks.add_up(self.training_step.sums).tolist()
            loads = self.training_step.expert_loads
            progress.expert_loads = self.ranks.add_up(torch.cat(loads)).tolist() if loads else []
            self.metrics.sync()
            optimizer = self.training_step.updater.optimizer
            self.checkpoints.wait()
            if (
                self.ranks.is_parallel
            ):  # the one that is saved now is written in the background, and pruned with the next
                self._prune()
            self.checkpoints.save(self.model, optimizer, progress, self.carried, self.ranks, self.rows)
            self.saved = (progress.step, progress.validated)
        if not self.ranks.is_parallel:
            self._prune()

    def _prune(self) -> None:
        """Remove the checkpoints that nothing needs any more."""
        if self.ranks.is_first:
            steps = (self.progress.step, self.progress.best_step, self.saved[0])
            self.checkpoints.prune([*steps, *self._regular_checkpoints()])

    def _regular_checkpoints(self) -> list[int]:
        """Return the steps of the last checkpoints that `train.save_every` asked for, as many as are kept or averaged.

        Checkpoints of interruptions do not count, so that they change no average; nor do those ahead of this step, which are
        damaged: the run fell back to an earlier one.
        """
        steps = [step for step in self.checkpoints.steps() if step <= self.progress.step]
        regular = [step for step in steps if _is_due(step, self.config.save_every)]
        return regular[-max(self.config.keep, self.config.average) :]

    def _raise_if_stopped(self, stop: StopRequest) -> None:
        if stop.signum:
            raise Interrupted(stop.signum, self.job.folder, self.progress.step, self.config.steps)

    # ---- first message and final model -------------------------------------------------------------------------------

    def _announce(self) -> None:
        config = self.job.config
        parameters = sum(p.numel() for p in self.model.parameters())
        precision = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        self.display.say(
            f"{config.name}: {config.task} on {devices.describe(self.device)}, {precision}; "
            f"{parameters:,} parameters; {self.job.data_amount}"
        )
        if self.communication:
            self.display.say(
                f"{self.ranks.count} ranks: the exchanges of a step take {1000 * self.communication:.1f} ms by themselves"
            )

    def _final_steps(self) -> list[int]:
        """Return the steps whose mean is the final model: the best, or the last regular ones, without damaged ones."""
        progress, average = self.progress, self.config.average
        steps = self._regular_checkpoints()[-average:] if average > 1 else []
        intact = [
            s for s in steps or [progress.best_step] if self.checkpoints.is_intact(s, print_message, "going without it")
        ]
        return intact or [progress.step]

    def _finish(self, stop: StopRequest) -> None:
        """Write the final model and print its score; a run that is stopped meanwhile does this again."""
        progress = self.progress
        self.checkpoints.wait()
        self._prune()
        steps = self.ranks.from_first(self._final_steps)
        model = self._whole_model()
        self.ranks.from_first(lambda: self._load_mean(model, steps))
        result = self._measure(stop, model)
        self.ranks.from_first(lambda: self._write_model(model, result, steps))
        which = (
            f"the checkpoint of step {steps[0]}"
            if len(steps) == 1
            else f"the mean of the last {len(steps)} checkpoints"
        )
        self.display.say(
            f"done: {which} has {result.describe()} "
            f"(best {self.config.metric} during training: {abs(progress.best or 0):.4g} at step {progress.best_step})"
            + self._next_steps()
        )

    def _load_mean(self, model: nn.Module, steps: list[int]) -> None:
        """Load the mean of checkpoints into the model."""
        model.float()  # the mean of bf16 checkpoints needs more than bf16
        load_weights(model, self.checkpoints.average(steps), self.checkpoints.folder)

    def _write_model(self, model: nn.Module, result: Validation, steps: list[int]) -> None:
        """Write the final model."""
        package = replace(self.job, model=model).package()
        card = model_card(self.job, result, steps, self.progress)
        model_folder.save(self.job.folder / "model", package, card, own=model_folder.MODEL_FILES)

    def close(self) -> None:
        self.display.close()
        self.metrics.close()


def check_job(job: Job) -> Objective:
    """Refuse settings that are not for the task of a job, before its run is touched. Return its objective."""
    config, objective = job.config.train, job.objective()
    if config.metric not in job.metrics:
        raise RegardError(
            f"train.metric {config.metric} is not measured by the task {job.config.task}: "
            f"choose one of {', '.join(job.metrics)}"
        )
    if config.r_drop and objective.passes < 2:
        raise RegardError(f"train.r_drop is not for this kind of {job.config.task}: set it to 0")
    if config.z_loss and not objective.z_loss:
        raise RegardError(f"train.z_loss is not for {job.config.task}, which has no vocabulary: set it to 0")
    return objective


def _is_due(step: int, every: int) -> bool:
    return step > 0 and step % every == 0
