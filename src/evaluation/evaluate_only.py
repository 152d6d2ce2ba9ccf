"""Evaluate a model without training, such as a prompted language model as a baseline.

Writes one row of scores, at step 0, and no checkpoint. An interrupted evaluation restarts.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from accelerate import Accelerator
from torch import nn

from src.runs import ledger
from src.runs.context import Run
from src.support import distributed
from src.training.config import Evaluation
from src.training.monitoring.reporter import Reporter
from src.training.parallel import choice, memory
from src.training.stopping.stop_conditions import StopConditions

Measure = Callable[[Accelerator], Mapping[str, float]]
log = logging.getLogger(__name__)


def evaluate_only(model: nn.Module, run: Run, config: Evaluation, evaluate: Measure, finish: Measure) -> None:
    """Write the scores of `evaluate`, then add those of `finish`, which can take long and is resumable. Collective.

    Both are called on every rank, with the model on its device and in eval mode. Every process has the full model, even
    with --deepspeed or --fsdp.

    Raises:
        distributed.StopTraining: a process received a stop signal, or a limit is reached.
        ConfigError: the precision needs another device, or accelerate has another precision.
        RunError: the disk refuses; another process took over.
    """
    with distributed.raise_together():
        config.check_accelerate(run.options.launcher_settings)
        accelerator = choice.plain_accelerator(config.precision, "evaluation.precision")
    if run.options.deepspeed or run.options.fsdp:
        log.info("%s: nothing is trained, so every process has the full model.", run.path)
    distributed.broadcast_from_rank0(lambda: _begin(run))
    distributed.defer_stop()
    with distributed.raise_together():
        reporter = Reporter(run, config, model, 0)
    limits = StopConditions(run.options.limits, run.path)
    with (
        contextlib.closing(reporter),
        memory.oom_advice(),
        distributed.stop_when(limits.reason),
        ledger.attempt(run.path, lambda: 0, engine="evaluation"),
    ):
        distributed.stop_together()
        model.to(accelerator.device).eval()
        began = time.perf_counter()
        with accelerator.autocast():
            scores = evaluate(accelerator)
        perf = {"evaluation_seconds": time.perf_counter() - began}
        distributed.broadcast_from_rank0(lambda: reporter.report({"step": 0, **scores}, perf))
        with accelerator.autocast():
            more = finish(accelerator)
        if more:
            distributed.broadcast_from_rank0(lambda: reporter.complete(more))


def _begin(run: Run) -> None:
    """Reset status and scores."""
    run.dir.set_status("running", step=0, steps=0)
    run.dir.scores.truncate(-1)
