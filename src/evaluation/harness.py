"""Tasks of lm-evaluation-harness as scores of an evaluation, by its adapter for transformers models (`HFLM`).

Every process builds all requests of a task and computes all scores. The requests are split into batches that do not
depend on the number of processes, and each process runs its share of the batches.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from src.errors import ConfigError, DataError
from src.experiments.config import Config, Places, unknown_text
from src.support import distributed

PACKAGE = "lm_eval==0.4.13"
_FEWSHOT_SEED = 1234
"""The harness's own default."""
_ONE_PASS = ("loglikelihood", "multiple_choice")
"""Output types with one forward pass per batch, which sharded models need."""


class Harness(Config):
    """Tasks to score at evaluations, as harness/TASK/METRIC."""

    tasks: list[str] = Field(min_length=1)
    """Names of tasks of the harness, such as "arc_easy"; no groups."""
    limit: int | None = Field(default=None, gt=0)
    """Rows per task, from the start; None for all."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each question; None for the task's number."""
    task_folder: str | None = Field(default=None, min_length=1)
    """Folder below `--data_path` with further tasks as YAML files."""
    at: Literal["evaluations", "end"] = "evaluations"
    """evaluations: score at each evaluation. end: only the trained model, in the last row."""

    def __hash__(self) -> int:
        """For `call_once`, as a list has no hash."""
        return hash(self.model_dump_json())

    def load(self, places: Places) -> dict[str, Any]:
        """The harness's tasks by name.

        Raises:
            ConfigError: the harness is not installed, or has no such task.
            DataError: the data of a task are neither on this machine nor in the hub's cache.
        """
        if find_spec("lm_eval") is None:
            raise ConfigError(f'harness: lm_eval is not installed. pip install "{PACKAGE}", or remove harness.')
        from datasets import config as hub

        folder = places.data / self.task_folder if self.task_folder else None
        if folder and not folder.is_dir():
            raise DataError(f"harness.task_folder: {folder}: no such folder. Write YAML files of tasks there.")
        manager = _manager(folder)
        loaded: dict[str, Any] = {}
        online, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
        try:
            for name in self.tasks:
                if name not in manager.all_subtasks:
                    raise ConfigError(
                        f"harness.tasks: {unknown_text('task', name, manager.all_subtasks, '`lm-eval ls tasks`')}"
                    )
                try:
                    loaded |= manager.load(name)["tasks"]
                except Exception as error:  # noqa: BLE001  of any library that the task reads its data with
                    raise DataError(
                        f"harness.tasks: {name!r}: cannot be loaded offline ({type(error).__name__}: {error}). If its "
                        f"data are missing, download them: python -m lm_eval --model dummy --tasks {name} --limit 1"
                    ) from None
        finally:
            hub.HF_HUB_OFFLINE = online
        return loaded

    def scorer(
        self, places: Places, model: Any, tokenizer: Any, batch_size: int, is_sharded: bool
    ) -> Callable[[], dict[str, float]]:
        """A function that scores the model. Both are collective. is_sharded: whether each forward pass is collective.

        Raises:
            UserError: see `load`; or a sharded model cannot run a task.
        """
        if distributed.world_size() > 1:
            distributed.broadcast_from_rank0(lambda: len(self.load(places)))  # one process fills the caches
        with distributed.raise_together():
            tasks = self.load(places)
            for name, task in tasks.items():
                if is_sharded and task.OUTPUT_TYPE not in _ONE_PASS:
                    raise ConfigError(
                        f"harness.tasks: {name!r} ({task.OUTPUT_TYPE}) needs the full model in each process. "
                        "Remove it, or train without --fsdp and --deepspeed."
                    )
                if self.num_fewshot is not None or task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=self.num_fewshot or 0)

        def scores() -> dict[str, float]:
            from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]

            for task in tasks.values():
                task.set_fewshot_seed(seed=_FEWSHOT_SEED)
            language_model = _adapter(model, tokenizer, batch_size)
            results = evaluate(language_model, {"tasks": tasks}, self.limit, bootstrap_iters=0, log_samples=False)
            assert results is not None, "each process is the first one of its own evaluation"
            return {
                f"harness/{name}/{metric.removesuffix(',none')}": float(value)
                for name, row in results["results"].items()
                for metric, value in row.items()
                if isinstance(value, int | float) and "," in metric and "_stderr," not in metric
            }

        return scores


@cache
def _manager(folder: Path | None) -> Any:
    """The harness's table of tasks, which takes seconds to read. folder: with further tasks."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    return TaskManager(include_path=str(folder) if folder else None)


class _Unchanged:
    """A model that the adapter neither ties nor sets to another mode, as it is being trained."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)


def _adapter(model: Any, tokenizer: Any, batch_size: int) -> Any:
    """The harness's model, whose requests are shared by all processes, in the precision of the caller's autocast."""
    import torch
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    from src.evaluation.generation import gather_batches

    def share(run: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
        """A method like `run`, in batches that do not depend on the number of processes."""

        def run_batches(self: Any, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
            def answer(numbers: Sequence[int]) -> Sequence[Any]:
                return run(self, [requests[number] for number in numbers], disable_tqdm=True)

            batches = gather_batches(answer, range(len(requests)), batch_size)
            return [value for batch in batches for value in batch]

        return run_batches

    class SharedLM(HFLM):
        loglikelihood = share(HFLM.loglikelihood)
        loglikelihood_rolling = share(HFLM.loglikelihood_rolling)
        generate_until = share(HFLM.generate_until)

    device = next(model.parameters()).device.type
    return SharedLM(
        _Unchanged(model),  # type: ignore[arg-type]
        backend="causal",
        tokenizer=copy.deepcopy(tokenizer),  # the adapter adds a padding token
        batch_size=batch_size,
        logits_cache=False,
        # None switches autocast off.
        mixed_precision_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
    )
