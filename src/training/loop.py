"""The training loop of every recipe, on Hugging Face Accelerate.

A run that is killed and restarted resumes bit-exactly at the same world size: data order and dropout are functions of
(seed, step), and everything else is in `State`, the optimizer and the weights. `State` has fingerprints of the inputs
(data, tokenizer, parents' weights); a run does not resume with changed inputs.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from src.data.orders import Cursor, order_of
from src.errors import CheckpointError, ConfigError, TrainingError
from src.runs import environment, ledger
from src.runs.checkpoints import checkpoints
from src.runs.context import BRIEF_ROW_EVERY, Run
from src.runs.history import branches
from src.runs.inputs import content_samples
from src.runs.store import CODE_VERSIONS
from src.support import distributed
from src.support.weights import AVERAGE
from src.training import loader, seeds
from src.training.checkpointing import checkpoint, continuation
from src.training.checkpointing.saver import LoopSnapshot, Saver
from src.training.config import SHORT_TYPES, LoopConfig, short_weights_message
from src.training.divergence.guard import DivergenceGuard, Source
from src.training.loss import NamedSums, SumNames, watch_groups
from src.training.monitoring.monitor import Monitor
from src.training.monitoring.reporter import Reporter
from src.training.monitoring.throughput import ThroughputMeter
from src.training.optim import optimizers, schedule
from src.training.optim.weight_average import WeightAverage
from src.training.parallel import choice, memory
from src.training.parallel.engine import Engine
from src.training.profile import StepProfiler
from src.training.spec import TrainSpec
from src.training.state import IntervalTotals, State
from src.training.stopping.early_stopping import ModelSelection
from src.training.stopping.stop_conditions import StopConditions

log = logging.getLogger(__name__)


def fit(spec: TrainSpec, run: Run, config: LoopConfig, seed: int) -> State:
    """Train from the newest complete checkpoint of `run`, or from the start, to the last step. Collective.

    Returns the final state; `spec.model` is changed in place. Scores are written to scores.jsonl, timings to
    perf.jsonl, events to ledger.jsonl.

    Raises:
        distributed.StopTraining: a process received a stop signal, or a limit is reached. All processes stop after
            the same step, or in the evaluation after it, and save a checkpoint. Or the divergence guard has rewound the
            run.
        ConfigError: the precision needs another device, or `loop.best_metric` is not a score of the evaluation.
        RunError: data, tokenizer or a parent have changed since the start of the run; the disk refuses; another process
            took over.
        TrainingError: the training diverges and `loop.divergence` is set to stop, or a step has nothing to learn;
            raised on every rank before the update.
    """
    with distributed.raise_together():
        accelerator = choice.build_accelerator(config, run.options)
    loop = Loop(spec, run, config, seed, accelerator)
    loop.restore()
    distributed.defer_stop()
    with distributed.raise_together():
        reporter = Reporter(run, config, spec.model, loop.state.step)
        profiler = StepProfiler(run.path, run.options.profile)
    limits = StopConditions(run.options.limits, run.path)
    num_workers = 0 if spec.experience else run.options.num_workers  # rollouts cannot be read ahead
    reader = loader.StepLoader(spec.train, loop.order, config, accelerator.device, spec.count, num_workers)
    with (
        contextlib.closing(reporter),
        contextlib.closing(reader.steps(loop.state)) as steps,  # else a traceback would leave worker processes alive
        memory.oom_advice(),
        loop.saver.close_on_exit(),
        distributed.stop_when(limits.reason),
        loop.attempt(),
        loop.save_on_stop(),
    ):
        loop.meter.restart()
        distributed.stop_together()
        while True:
            if new := loop.row_due():
                loop.report(reporter, loop.state.since_row, loop.evaluate() if loop.due(config.eval_every) else {})
                loop.state.since_row = IntervalTotals()
            elif new := loop.brief_row_due():
                loop.report(reporter, loop.state.since_brief_row, {})
            if loop.save_due() and (new or loop.saver.step != loop.state.step):
                loop.save()
            if loop.state.step >= config.steps or loop.selection.stop():
                break
            if loop.stopping:
                raise distributed.agreed_stop(None)
            loss = loop.train_step(loop.meter.waiting(steps))
            reporter.step(loop.state.step, loss, *loop.meter.rates())
            profiler.after_step(loop.state.step)
        loop.finish(reporter)
    return loop.state


class Loop:
    """The state and the operations of one training. `fit` is the loop itself."""

    def __init__(self, spec: TrainSpec, run: Run, config: LoopConfig, seed: int, accelerator: Accelerator) -> None:
        self.spec, self.run, self.config, self.seed, self.accelerator = spec, run, config, seed, accelerator
        for parameter in spec.model.parameters():
            if parameter.requires_grad and (kind := str(parameter.dtype).removeprefix("torch.")) in SHORT_TYPES:
                raise ConfigError(short_weights_message(kind))
        self.engine: Engine  # set by `restore`, after loading the weights
        self.average: WeightAverage  # set by `restore`
        self.branches = distributed.broadcast_from_rank0(lambda: branches.read(run.path))
        # The micro-batch of the experiment, without --micro_batch.
        micro_batch_of_run = (run.dir.exp.get("loop") or {}).get("micro_batch", config.micro_batch)
        group = micro_batch_of_run if config.group_by_length else None
        self.order = order_of(spec.train, seed, config.sequences_per_step, config.steps, self.branches, group)
        self.cursor: Cursor = {}
        """Entries of the order's cursor changed by this process, up to the last finished step."""
        self.learning_rate = branches.override_learning_rate(schedule.learning_rate(config), self.branches)
        self.selection = ModelSelection(config)
        self.saver = Saver(run, spec.about, config)
        self.guard = DivergenceGuard(
            run, config, Source(spec.train, spec.about.tokenizer, self.branches, self.order), self.saver.wait
        )
        content = distributed.broadcast_from_rank0(lambda: content_samples(run.dir.exp, run.places))
        self.state = State(inputs={**spec.inputs, **content})
        self.row_every = run.options.log_every or config.eval_every
        self.brief_every = 0 if run.options.log_every else BRIEF_ROW_EVERY
        self.save_every = run.options.save_intervals(config.eval_every)
        self.meter = ThroughputMeter(spec.model, config.precision, spec.experience)
        self.monitor = Monitor(run.path, spec.model, run.options.statistics_every, compiled=config.compile)
        self.sources = loader.sources(spec.train)
        self.sum_names = SumNames([config.best_metric, *(f"loss/{name}" for name in self.sources)])
        self.generated = 0  # number of blocks of `Engine.generating` since the last step, start or checkpoint
        self.other_micro_batch = config.micro_batch != micro_batch_of_run
        """Whether --micro_batch differs from the experiment, and the first pass without dropout has not confirmed it
        yet."""
        self.stopping = False  # whether any process received a stop signal; equal on every rank

    def due(self, every: int) -> bool:
        """Whether the step is a multiple of `every`, in `loop.extra_eval_steps`, or the last."""
        return self.state.step % every == 0 or self.state.step in (*self.config.extra_eval_steps, self.config.steps)

    def row_due(self) -> bool:
        """Whether a score row is due, including after a stop between the step and its row."""
        return self.state.since_row.steps > 0 and (self.due(self.config.eval_every) or self.due(self.row_every))

    def brief_row_due(self) -> bool:
        """Whether a row without evaluation is due, for the steps since the last row of any kind."""
        return bool(self.brief_every and self.state.step % self.brief_every == 0 and self.state.since_brief_row.steps)

    def save_due(self) -> bool:
        """Whether a checkpoint is due, including after the best evaluation so far and at early stopping."""
        best = self.selection.best_step == self.state.step
        return best or any(map(self.due, self.save_every)) or self.selection.stop()

    def attempt(self) -> contextlib.AbstractContextManager[None]:
        """Record this attempt in the ledger, with its data position and micro-batch."""
        cursor = dict(self.order.describe(self.state.step, self.state.cursor))
        facts = {"engine": self.engine.name, "cursor": cursor, "micro_batch": self.config.micro_batch}
        return ledger.attempt(self.run.path, lambda: self.state.step, **facts)

    @contextlib.contextmanager
    def save_on_stop(self) -> Iterator[None]:
        """Save a checkpoint of the last finished step if the block is stopped."""
        try:
            yield
        except distributed.StopTraining as stopped:
            if stopped.step is None:
                if self.saver.step != self.state.step:
                    self.save()
                self.saver.wait()
                stopped.step = self.state.step
            raise
        self.saver.wait()

    def train_step(self, step: loader.Step) -> float:
        """Run one optimizer step on the mean loss of the global batch; returns the loss."""
        state, shares = self.state, distributed.world_size()
        count, tokens, requested, failed = distributed.all_reduce_sum(
            [step.count, step.loss_tokens, distributed.stop_requested() is not None, self.saver.writer.failed]
        )
        self.stopping = requested > 0
        if failed:
            self.saver.wait()
        # The count of rollouts is 0 if all have the same reward.
        count = (int(count) if count.is_integer() else count) or (1 if self.spec.experience else 0)
        if count <= 0:
            raise TrainingError(
                f"step {state.step + 1}: nothing to learn in the {self.config.sequences_per_step} sequences "
                f"(count {count}). Change the data or the loss, or skip the step: "
                f"python -m src.operations.interventions rewind {self.run.path} --to STEP --data skip:1, "
                f"where STEP is the step of a checkpoint ({state.step} if it has one)."
            )
        self.monitor.before_step(state.step + 1)
        optimizers.set_learning_rate(self.engine.optimizer, self.learning_rate(state.step))
        # (2,) float64: sum and count, on the device, so that passes do not synchronize.
        sums: dict[str, Tensor] = {}
        for a, (batch, sources, counts) in enumerate(step.on_device()):
            seed = seeds.dropout_seed(self.seed, state.step, a * shares + distributed.rank())
            seeds.set_seed(seed, self.accelerator.device)
            last = a == step.passes - 1
            offload = self.run.options.offload_activations
            offload_context = memory.offload_activations(self.spec.model) if offload else contextlib.nullcontext()
            with self.engine.accumulation_context(last):
                with self.accelerator.autocast(), self.monitor.forward(last), offload_context:
                    loss, named_sums = self._loss(batch, sources)
                if self.other_micro_batch:
                    self._require_no_dropout(seed)
                # The engine averages over ranks; the factor `shares` makes it a sum.
                self.engine.backward(loss * (counts * shares / count), last)
            named_sums = {"": (loss, loss.new_zeros(())), **named_sums}
            for name, pair in named_sums.items():
                part = torch.stack([value.detach().to(loss.device, torch.float64) for value in pair])
                sums[name] = sums.get(name, torch.zeros_like(part)) + (part if counts else 0)
        sums_2S = torch.stack(list(sums.values())).flatten()
        parts = [part.to(sums_2S) for part in (self.engine.norms(), self.engine.weight_norms(), sums_2S)]
        numbers = torch.cat(parts).cpu()  # the only wait for the device
        *norms, flat = (part.tolist() for part in numbers.split([*map(len, parts)]))
        norm = self.engine.total_norm(*norms)
        # All ranks use the norm of rank 0, as copies on different devices can differ in the last bit.
        counters = {f"data/{name}": pair for name, pair in step.counters.items()}
        local = [norm if distributed.is_main() else 0.0, *flat]
        norm, *flat = distributed.all_reduce_sum([*local, *(value for pair in counters.values() for value in pair)])
        totals = {name: flat[2 * i : 2 * i + 2] for i, name in enumerate([*sums, *counters])}
        total = totals.pop("")[0]
        if self.spec.experience:
            self.guard.recent.clear()  # rollouts change, so keys of earlier steps can refer to other samples
        self.guard.remember_keys(state.step + 1, step.keys)
        self.optimizer_step(total, count, norm, totals.get("kl"))
        state.tokens += int(tokens)
        state.add_sums(totals)
        self.cursor, self.generated = step.cursor, 0
        self.meter.count(step)
        return total / count

    def _loss(self, batch: Mapping[str, Tensor], sources_B: Tensor | None) -> tuple[Tensor, NamedSums]:
        """Summed loss of a micro-batch, and named sums: those of the loss, and the loss by source."""
        none = contextlib.nullcontext(())
        with none if sources_B is None else watch_groups(batch, sources_B, len(self.sources)) as by_source:
            result = self.spec.loss(self.engine.model, batch)
        loss, named_sums = result if isinstance(result, tuple) else (result, {})
        self.sum_names.check([*named_sums])
        losses = {f"loss/{name}": (pair[0], pair[1]) for name, pair in zip(self.sources, by_source, strict=False)}
        return loss, {**named_sums, **losses}

    def _seed_generation(self) -> None:
        """Seed a block of `Engine.generating`: different in each block and process, equal after a restart."""
        seed = seeds.generation_seed(self.seed, self.state.step, self.generated, distributed.rank())
        seeds.set_seed(seed, self.accelerator.device)
        self.generated += 1

    def _require_no_dropout(self, seed: int) -> None:
        """Raise ConfigError if a forward pass has drawn random numbers, as they depend on the micro-batch."""
        with distributed.raise_together():
            if seeds.has_drawn(seed, self.accelerator.device):
                raise ConfigError(
                    f"--micro_batch {self.config.micro_batch}: the model has dropout, which depends on the "
                    "micro-batch. Leave the option out."
                )
        self.other_micro_batch = False  # once is enough

    def optimizer_step(self, loss_sum: float, count: float, norm: float, kl: Sequence[float] | None) -> None:
        """Check the step with the guard, clip and update. All ranks see equal values and make the same decision."""
        state = self.state
        # If float16 overflows, the scaler skips the step and lowers its scale.
        overflow = self.config.precision == "float16" and not math.isfinite(norm)
        self.monitor.after_backward()
        if self.guard.skips_step(
            state.step + 1, loss_sum / count, norm, overflow, kl[0] / kl[1] if kl and kl[1] else None
        ):
            clipped, has_moved = False, False
            self.engine.skip_step()
        else:
            clipped = self.engine.clip(norm, self.config.max_grad_norm)
            self.engine.step()
            has_moved = not overflow
        if has_moved:
            self.average.update()
        self.monitor.after_step(self.engine.optimizer)
        state.add_step(loss_sum, count, norm if has_moved else None, clipped)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current model and update the best step."""
        self.spec.model.eval()
        last_step = self.state.step if self.config.early_stopping or self.state.step == self.config.steps else None
        with self.meter.pause(), self.accelerator.autocast():
            scores = self.spec.scores(self.accelerator, last_step)
            scores |= self.average.scores(lambda: self.spec.evaluate(self.accelerator))
        self.generated = 0  # as after a restart
        self.spec.model.train(self.spec.dropout)
        self.selection.update(self.state.step, scores)
        return scores

    def finish(self, reporter: Reporter) -> None:
        """Add the final scores of the trained model, if the recipe has any, to the last row."""
        if self.spec.finish is not None:
            self.saver.wait()
            if self.spec.finish_with_best:
                self.saver.load_best(self.engine)
            self.spec.model.eval()
            with self.accelerator.autocast():
                scores = self.spec.finish(self.accelerator)
            distributed.broadcast_from_rank0(lambda: reporter.complete(scores))

    def report(self, reporter: Reporter, since: IntervalTotals, scores: Mapping[str, float]) -> None:
        """Write one score row and one row of timings."""
        step = self.state.step
        row = {
            "step": step,
            **since.scores(),
            "learning_rate": (rate := self.learning_rate(step - 1)),
            **optimizers.learning_rates(self.engine.optimizer, rate),
            "tokens": self.state.tokens,
            **scores,
        }
        perf, is_durable = self.meter.row(), bool(scores) or self.save_due()
        distributed.broadcast_from_rank0(lambda: reporter.report(row, perf, is_durable))
        self.state.since_brief_row = IntervalTotals()
        self.meter.restart()

    def save(self) -> None:
        """Write a checkpoint of the finished step."""
        state, scaler = self.state, self.accelerator.scaler
        state.selection, state.detector = self.selection.state(), self.guard.detector.state()
        state.scaler = scaler.state_dict() if scaler else {}
        state.cursor |= dict(distributed.all_gather_list(list(self.cursor.items())))
        with self.meter.pause():
            more_tensors = {AVERAGE: self.average.tensors() if distributed.is_main() else {}}
            if self.spec.experience:
                more_tensors[checkpoint.EXPERIENCE] = checkpoint.copy_experience(self.spec.experience.tensors())
            best_step = self.selection.best_step
            self.saver.save(self.engine, LoopSnapshot(state.step, best_step, state.to_json(), more_tensors))
        self.generated = 0  # as after a restart from here

    def restore(self) -> None:
        """Resume from the newest complete checkpoint, or continue the parent's training. Later scores are dropped."""
        folder = continuation.newest_checkpoint(self.run, self.spec.about, self.state.inputs)
        experience: dict[str, Tensor] = {}
        with distributed.raise_together():
            if folder is not None:
                self._load_state(checkpoint.load_weights(folder, self.spec.model))
                experience = checkpoint.load_experience(folder)
            branches.check_start(self.branches, self.state.step)
            choice.change_layers(self.spec.model, self.config, self.run.options)
        if folder is not None and self.spec.experience:
            self.spec.experience.load(experience)
        self.engine = choice.build_engine(self.accelerator, self.spec.model, self.config, self.run.options, folder)
        self.engine.seed_generation = self._seed_generation
        self.average = WeightAverage(self.spec.model, self.config.ema)
        if folder is not None:
            with distributed.raise_together():
                self.average.load(folder)
            if branches.must_reset_optimizer(self.branches, self.state.step):
                log.info("%s: resetting the optimizer's moments, as set in branch.json.", self.run.path)
            else:
                self.engine.load_optimizer(folder)
            if self.accelerator.scaler and self.state.scaler:
                self.accelerator.scaler.load_state_dict(self.state.scaler)
            log.info("%s: continues from step %d.", self.run.path, self.state.step)
        else:
            log.info("%s: trains %d steps.", self.run.path, self.config.steps)
        distributed.broadcast_from_rank0(self._truncate_records)
        if self.spec.experience:
            self.spec.experience.begin(self.engine)
            self.generated = 0
        self.spec.model.train(self.spec.dropout)

    def _load_state(self, saved: dict[str, Any]) -> None:
        try:
            state = State.from_json(saved)
            self.guard.detector.restore(state.detector)
        except CheckpointError as error:
            raise CheckpointError(f"{self.run.path}: {error}") from None
        state.take_inputs(self.state.inputs, self.run.path)
        self.state, self.saver.step = state, state.step
        self.selection.restore(state.selection)

    def _truncate_records(self) -> None:
        """Roll back scores, newer checkpoints, status and the best pointer to the restored step."""
        versions = len({*ledger.codes_of_starts(self.run.path, self.state.step), environment.code_digest()})
        facts = {CODE_VERSIONS: versions} if versions > 1 else {}
        self.run.dir.set_status("running", step=self.state.step, steps=self.config.steps, **facts)
        # After a stop during an evaluation, the checkpoint exists but its row is missing.
        self.run.dir.scores.truncate(self.state.step - (self.row_due() or self.brief_row_due()))
        self.monitor.truncate(self.state.step)
        checkpoints.set_aside_newer(self.run.path, self.state.step)
        best = self.selection.best_step
        if (
            best is None or not checkpoints.folder(self.run.path, best).is_dir()
        ):  # a rewind can remove the best checkpoint
            checkpoints.forget_best(self.run.path)
        else:
            checkpoints.mark_best(self.run.path, best)
        self.saver.rotation.rotate(self.state.step, best)  # the killed process can have skipped this
