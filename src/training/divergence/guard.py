"""Acts on divergence findings before the optimizer step: warn, dump the batch, skip, rewind or stop. See `detector`."""

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
from src.training.divergence.detector import MOST_SUSPECTS, Detector, Finding, severest

REMEDY = "Lower loop.learning_rate, lengthen loop.warmup_rate, or look at the data of this step."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Everything needed to read a step's batch again, besides its keys."""

    dataset: Dataset
    tokenizer: Any
    branches: Sequence[Branch]
    order: Order


class DivergenceGuard:
    """Passes each step to the detector and acts on its findings. All ranks see the same values, so all decide alike.

    written: returns when the checkpoint being written is complete. Collective.
    """

    def __init__(self, run: Run, config: LoopConfig, source: Source, wait_for_checkpoint: Callable[[], None]) -> None:
        self.run, self.config, self.source, self.written = run, config, source, wait_for_checkpoint
        self.detector = Detector(config.divergence)
        self.recent: deque[tuple[int, Sequence[Sequence[Key]]]] = deque(maxlen=MOST_SUSPECTS)
        """The last steps and the keys of their micro-batches in this process."""

    def remember_keys(self, step: int, keys: Sequence[Sequence[Key]]) -> None:
        """Call it before `skips_step`, with what this process has read in optimizer step `step`."""
        self.recent.append((step, keys))

    def skips_step(self, step: int, loss: float, grad_norm: float, overflowed: bool, kl: float | None = None) -> bool:
        """True where the weights must not move for step number `step`, counted from 1.
        Collective where something is found.

        overflowed: the float16 loss scaler sees to the gradient. kl: of a policy from its reference, in nats per token.

        Raises:
            TrainingError: the training must not go on; on every rank.
            distributed.StopTraining: the run was rewound to an earlier checkpoint; on every rank.
            RunError: the disk refuses.
        """
        found = self.detector.observe(step, loss, grad_norm, skipped=overflowed, kl=kl)
        action, text = severest(found), " ".join(finding.message for finding in found)
        if action is None:
            return False
        log.warning("%s: %s (%s)", self.run.path, text, action)
        distributed.broadcast_from_rank0(lambda: self._record_findings(found))
        self._save_batches(found)
        if action == "rewind":
            self._rewind(found, step, text)
        if action in ("stop", "rewind"):
            error = TrainingError(
                f"{text} The training stops before the optimizer moves; the last checkpoint is sound. {REMEDY}"
            )
            error.everywhere = True
            raise error
        return action == "skip_batch"

    def _record_findings(self, found: Sequence[Finding]) -> None:
        for finding in found:
            facts = {**asdict(finding), "attempt": self.run.dir.attempt}
            ledger.append(self.run.path, ledger.event("divergence", **facts))

    def _save_batches(self, found: Sequence[Finding]) -> None:
        """Save the suspected batches, of those that this process has read since it started."""
        source, suspects = (
            self.source,
            {step for finding in found if finding.action != "warn" for step in finding.suspects},
        )
        with distributed.raise_together():
            for step, keys in self.recent:
                if step in suspects:
                    batches = [source.dataset.collate([source.dataset.sample(*key) for key in rows]) for rows in keys]
                    batch_dump.save(self.run.path, step, distributed.rank(), batches, source.tokenizer, keys)

    def _rewind(self, found: Sequence[Finding], step: int, text: str) -> None:
        """Rewind to the newest checkpoint before the divergence began and skip the data up to here;
        returns if that is impossible."""
        self.written()
        first = min(_first_step(finding, self.source.order) for finding in found)
        to, refusal = distributed.broadcast_from_rank0(lambda: self._plan_rewind(first, step, text))
        if to is None:
            log.warning("%s: it cannot be taken back: %s", self.run.path, refusal)
            return
        raise distributed.StopTraining(
            distributed.Reason(f"taken back to step {to}, as {text}", "limit"), everywhere=True, step=to
        )

    def _plan_rewind(self, first: int, step: int, text: str) -> tuple[int | None, str]:
        path, most = self.run.path, self.config.divergence.max_rewinds
        number = archive.next_number(path)
        if number > most:
            return None, f"there are {number - 1} branches already, and loop.divergence.max_rewinds is {most}."
        before = [at for at in map(checkpoints.step_of, checkpoints.list_all(path)) if at < first]
        if not before:
            return (
                None,
                f"no checkpoint of a step before {first} is left. Save more often (--save_every), or keep more.",
            )
        to = before[-1]
        # Of two branches from one step only the later holds, so it takes over what the earlier says.
        old = next((branch for branch in self.source.branches if branch.from_step == to), None)
        if old is not None and old.data == "reshuffle":
            return (
                None,
                (
                    f"branch {old.number} reads step {to} and what follows in another order, "
                    "in which nothing can be passed over."
                ),
            )
        # Not their sum, as each may have read a part of its own of the next phase.
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
    """The smallest number from `steps` on that can be passed over behind `step`:
    orders of rollouts pass over whole iterations."""
    return order.whole_skip(step, steps) if isinstance(order, WholeSkips) else steps


def _first_step(finding: Finding, order: Order) -> int:
    """Where what was found began.
    A policy that is too far away was moved there in the iteration before it was measured, or in this one."""
    return (
        order.begin_before(finding.step) + 1
        if finding.kind == "kl" and isinstance(order, WholeSkips)
        else finding.first_step
    )
