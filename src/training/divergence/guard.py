"""Act on divergence findings before the optimizer step: warn, save the batch, skip, rewind or stop. See `detector`."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from src.data.orders import Key, Order, WholeSkips
from src.errors import TrainingError, UserError
from src.experiments.dataset_protocols import Dataset
from src.runs import ledger
from src.runs.checkpoints import checkpoints
from src.runs.context import Run
from src.runs.history import archive, rewind
from src.runs.history.branches import Branch
from src.support import distributed
from src.training.config import LoopConfig
from src.training.divergence import batch_dump
from src.training.divergence.detector import MAX_SUSPECTS, Detector, Finding, severest

REMEDY = "Lower loop.learning_rate, lengthen loop.warmup_rate, or look at the data of this step."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Everything needed to read the batch of a step again from its keys."""

    dataset: Dataset
    tokenizer: Any
    branches: Sequence[Branch]
    order: Order


class DivergenceGuard:
    """Passes each step to the detector and acts on its findings. All ranks see equal values and make the same
    decisions.

    wait_for_checkpoint: waits until the current checkpoint is complete. Collective.
    """

    def __init__(self, run: Run, config: LoopConfig, source: Source, wait_for_checkpoint: Callable[[], None]) -> None:
        self.run, self.config, self.source, self.wait_for_checkpoint = run, config, source, wait_for_checkpoint
        self.detector = Detector(config.divergence)
        self.recent: deque[tuple[int, Sequence[Sequence[Key]]]] = deque(maxlen=MAX_SUSPECTS)
        """Recent steps and the keys of their micro-batches in this process."""

    def remember_keys(self, step: int, keys: Sequence[Sequence[Key]]) -> None:
        """Record the keys that this process has read in step `step`. Call it before `skips_step`."""
        self.recent.append((step, keys))

    def skips_step(self, step: int, loss: float, grad_norm: float, overflow: bool, kl: float | None = None) -> bool:
        """Check step number `step`, counted from 1; returns whether to skip its update. Collective if there are
        findings.

        overflow: whether the float16 loss scaler skips the step. kl: KL divergence of a policy from its reference, in
        nats per token.

        Raises:
            TrainingError: the training must stop; on every rank.
            distributed.StopTraining: the run was rewound to an earlier checkpoint; on every rank.
            RunError: the disk refuses.
        """
        findings = self.detector.observe(step, loss, grad_norm, skipped=overflow, kl=kl)
        action, text = severest(findings), " ".join(finding.message for finding in findings)
        if action is None:
            return False
        log.warning("%s: %s (%s)", self.run.path, text, action)
        distributed.broadcast_from_rank0(lambda: self._record_findings(findings))
        self._save_batches(findings)
        if action == "rewind":
            self._rewind(findings, step, text)
        if action in ("stop", "rewind"):
            error = TrainingError(
                f"{text} The training stops before the update, so the last checkpoint is valid. {REMEDY}"
            )
            error.everywhere = True
            raise error
        return action == "skip_batch"

    def _record_findings(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            facts = {**asdict(finding), "attempt": self.run.dir.attempt}
            ledger.append(self.run.path, ledger.event("divergence", **facts))

    def _save_batches(self, findings: Sequence[Finding]) -> None:
        """Save suspicious batches that this process has read."""
        source, suspects = (
            self.source,
            {step for finding in findings if finding.action != "warn" for step in finding.suspects},
        )
        with distributed.raise_together():
            for step, keys in self.recent:
                if step in suspects:
                    batches = [source.dataset.collate([source.dataset.sample(*key) for key in rows]) for rows in keys]
                    batch_dump.save(self.run.path, step, distributed.rank(), batches, source.tokenizer, keys)

    def _rewind(self, findings: Sequence[Finding], step: int, text: str) -> None:
        """Rewind to the newest checkpoint before the divergence and skip the data read since. Returns if that is
        impossible."""
        self.wait_for_checkpoint()
        first = min(_first_step(finding, self.source.order) for finding in findings)
        to, refusal = distributed.broadcast_from_rank0(lambda: self._plan_rewind(first, step, text))
        if to is None:
            log.warning("%s: cannot rewind: %s", self.run.path, refusal)
            return
        raise distributed.StopTraining(
            distributed.Reason(f"rewound to step {to}: {text}", "limit"), everywhere=True, step=to
        )

    def _plan_rewind(self, first: int, step: int, text: str) -> tuple[int | None, str]:
        path, most = self.run.path, self.config.divergence.max_rewinds
        number = archive.next_number(path)
        if number > most:
            return None, f"loop.divergence.max_rewinds: the run already has {number - 1} branches, the limit is {most}."
        before = [at for at in map(checkpoints.step_of, checkpoints.list_all(path)) if at < first]
        if not before:
            return (
                None,
                f"no checkpoint before step {first}. Save more often (--save_every), or keep more checkpoints.",
            )
        to = before[-1]
        # Only the later one of two branches from the same step applies, so it includes the earlier one.
        old = next((branch for branch in self.source.branches if branch.from_step == to), None)
        if old is not None and old.data == "reshuffle":
            return (
                None,
                (f"branch {old.number} reshuffles the data after step {to}, which cannot be combined with a skip."),
            )
        # Not their sum, as each can have read a different part of the next phase.
        skips = "+".join(map(str, [*(old.skips if old else ()), _least_skip(self.source.order, to, step - to)]))
        new = {"number": number, "data": f"skip:{skips}"}
        branch = old.model_copy(update=new) if old else Branch(from_step=to, **new)
        try:
            self.run.dir.confirm()
            rewind.plan(path, branch, text).apply()
        except UserError as error:
            return None, str(error)
        return to, ""


def _least_skip(order: Order, step: int, steps: int) -> int:
    """The smallest number of steps, at least `steps`, that can be skipped after `step`. Rollouts skip complete
    iterations."""
    return order.whole_skip(step, steps) if isinstance(order, WholeSkips) else steps


def _first_step(finding: Finding, order: Order) -> int:
    """First step of a finding. A policy that is too far from its reference moved in this iteration or the previous
    one."""
    return (
        order.begin_before(finding.step) + 1
        if finding.kind == "kl" and isinstance(order, WholeSkips)
        else finding.first_step
    )
