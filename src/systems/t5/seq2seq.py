"""Recipe `seq2seq`: fine-tune and evaluate an encoder-decoder on text tasks, such as GLUE and SuperGLUE."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from src.errors import ConfigError
from src.evaluation.config import Answering, Predictions
from src.experiments.config import Places, unknown_text
from src.experiments.interfaces import DatasetConfig
from src.experiments.kinds import ENCODER_DECODER
from src.experiments.registry import resolved_dict
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once

if TYPE_CHECKING:
    from src.systems.t5.tasks.dataset import Config as TaskConfig
    from src.systems.t5.tasks.task_table import NamedTask

TASK = "task"
"""Name of the data set with tasks."""
LOSS, PERPLEXITY, TASK_SCORE = "val_loss", "val_perplexity", "task_score"


class Config(TrainingRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    answers: Answering = Answering()
    predictions: Predictions | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        self.model.require_kind(ENCODER_DECODER, None)
        if not self.tasks:
            raise ValueError(f"data: expected {TASK!r}, or a 'mixture' of it, got {self.data.name!r}.")
        for part in self.predictions.extra_tasks if self.predictions else []:
            if part.name != TASK:
                raise ValueError(f"predictions.extra_tasks: expected data sets {TASK!r}, got {part.name!r}.")
        duplicates = [name for name, count in Counter(part.task for part in self.tasks_to_predict).items() if count > 1]
        if duplicates:
            raise ValueError(
                f"data: duplicate task {duplicates[0]!r}, so that two scores would have the same name. Remove one."
            )
        return self

    @property
    def tasks(self) -> "list[TaskConfig]":
        """The tasks in `data`; if it has phases, in the last phase."""
        return list(_tasks(self.data))

    @property
    def tasks_to_predict(self) -> "list[TaskConfig]":
        """The tasks in `data`, and those of `predictions.extra_tasks`."""
        return [
            *self.tasks,
            *(task for part in (self.predictions.extra_tasks if self.predictions else []) for task in _tasks(part)),
        ]

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """Checks that need no model or data in memory; each raises a UserError."""
        loop = self.loop

        def check_tasks_not_trained() -> None:
            for task in self.tasks_to_predict[len(self.tasks) :]:
                task.check_splits(places, [split for split in ("val", "test") if task.has_split(places, split)])

        def check_targets() -> None:
            source = self.model.find_tokenizer(places)
            for task in self.tasks_to_predict:
                call_once(task.check_targets, places, source)

        def check_ranking() -> None:
            for task in self.tasks_to_predict:
                if self.answers.by == "rank" and not task.find_task(places).answers:
                    raise ConfigError(
                        f"answers.by: 'rank' needs a list of answers, but task {task.task!r} has free text. "
                        "Use 'generate'."
                    )

        def check_best_metric() -> None:
            if loop is None:
                return
            known_scores = score_names([task.find_task(places) for task in self.tasks])
            if loop.best_metric not in known_scores:
                raise ConfigError(f"loop.best_metric: {unknown_text('score', loop.best_metric, known_scores)}")
            lower = loop.best_metric.partition("/")[0] in (LOSS, PERPLEXITY)
            if (loop.best_mode == "min") != lower:
                right, better = ("min", "lower") if lower else ("max", "higher")
                raise ConfigError(
                    f"loop.best_mode: expected {right!r} for {loop.best_metric}, as {better} is better, "
                    f"got {loop.best_mode!r}."
                )
            loop.check({loop.best_metric.partition("/")[0]})

        return [
            lambda: call_once(self.model.check, places),
            lambda: self.model.check_kind(ENCODER_DECODER, places),
            self.check_trainable,
            lambda: self.check_precision(places),
            lambda: call_once(self.data.check, places),
            lambda: self.data.check_tokenizer(places, self.model.find_tokenizer(places)),
            lambda: self.data.check_length(self.model.longest_sequence(places)),
            check_tasks_not_trained,
            check_targets,
            check_ranking,
            check_best_metric,
            lambda: self.splits_to_predict(places),
            lambda: loop and self.data.check_steps(loop.steps),
            self.check_compiled,
        ]

    def splits_to_predict(self, places: Places) -> "list[tuple[TaskConfig, str]]":
        """The tasks and splits to predict.

        Raises:
            ConfigError: no task has one of the splits, or a task has no split.
            UserError: a data set is missing, or its task is unknown.
        """
        if self.predictions is None:
            return []
        tasks, splits = self.tasks_to_predict, list(dict.fromkeys(self.predictions.splits))
        task_splits = [(task, split) for task in tasks for split in splits if task.has_split(places, split)]
        for split in splits:
            if split not in {has for _, has in task_splits}:
                names = ", ".join(repr(task.task) for task in tasks)
                raise ConfigError(
                    f"predictions.splits: no {split!r} split in {names}. Prepare it with data_prep.t5.prepare_task."
                )
        for task in tasks:
            if task not in [with_split for with_split, _ in task_splits]:
                raise ConfigError(
                    f"predictions: {task.task!r} has no split {' or '.join(self.predictions.splits)}. Prepare one."
                )
        return task_splits

    def training_loss(self) -> Callable[..., Any]:
        from src.training.loss import seq2seq_loss

        return self.with_loop_options(seq2seq_loss)

    def run(self, run: Run) -> None:
        """Train, or evaluate without training; then write predictions. Collective.

        Scores: train_loss and `score_names`; at the end "predictions/<split>/<metric>", or with several tasks
        "predictions/<split>/<metric>/<task>".
        """
        import torch

        from src.data.text import tokenizers
        from src.evaluation import validation_record
        from src.evaluation.predictions import TaskSplit, make, task_scores
        from src.evaluation.ranking import TaskPredictor
        from src.training.checkpointing.checkpoint import CheckpointMetadata
        from src.training.loss import seq2seq_loss
        from src.training.spec import TrainSpec
        from src.training.state import fingerprints
        from src.training.validation import SampleSums, measure

        batch_size, best = self.micro_batch, self.predictions is not None and self.predictions.checkpoint == "best"
        torch.manual_seed(self.seed)
        with distributed.raise_together():
            model = self.build_model(run)
            tokenizer = tokenizers.load(model.name_or_path, self.model.new_tokens())
            tasks = self.tasks
            val = [task.build(run.places, tokenizer, "val", self.seed) for task in tasks]
            splits = []
            for task, split in self.splits_to_predict(run.places):
                val_data = [
                    data for data, val_task in zip(val, tasks, strict=True) if val_task is task and split == "val"
                ]
                splits.append(
                    TaskSplit(val_data[0] if val_data else task.build(run.places, tokenizer, split, self.seed), split)
                )
            train = self.data.build(run.places, tokenizer, "train", self.seed) if self.loop else val[0]
            inputs = fingerprints(run, train, tokenizer, self.model.fingerprint(run.places))

        def evaluate(accelerator: Any, samples: list[SampleSums] | None = None) -> dict[str, float]:
            predictor, scores_by_task = (
                TaskPredictor(model, tokenizer, self.answers, batch_size, accelerator.device),
                {},
            )
            for data in val:
                texts = [text for batch in predictor.batches(data, range(len(data))) for text in batch]
                scores = task_scores(data.task, [data.prediction(i, text) for i, text in enumerate(texts)])
                scores[LOSS] = measure(model, data, seq2seq_loss, batch_size, accelerator.device, samples=samples).loss
                if data.task.task.kind == "text":
                    scores[PERPLEXITY] = float(torch.tensor(scores[LOSS]).exp())
                scores_by_task[data.task.name] = scores
            return _name_scores(scores_by_task)

        def finish(accelerator: Any) -> dict[str, float]:
            answering = self.answers if self.answers.by != "teacher_forced" else Answering()
            predictor = TaskPredictor(model, tokenizer, answering, batch_size, accelerator.device)
            of_files = make(run, splits, predictor, inputs, best)
            scores: dict[str, float] = {}
            for split in dict.fromkeys(some.split for some in splits):
                scores_by_task = {
                    some.dataset.task.name: of_files[some.name]
                    for some in splits
                    if some.split == split and some.name in of_files
                }
                named_scores = (
                    _name_scores(scores_by_task, several=len(self.tasks_to_predict) > 1) if scores_by_task else {}
                )
                scores |= {f"predictions/{split}/{name}": value for name, value in named_scores.items()}
            return scores

        about = CheckpointMetadata(resolved_dict(self.model), tokenizer)
        record = partial(validation_record.write, run, parts={data.task.name: data for data in val})
        loss = self.training_loss()
        spec = TrainSpec(model, about, train, inputs, loss, evaluate, finish, finish_with_best=best, record=record)
        self.fit_or_evaluate(spec, run)


def _tasks(data: DatasetConfig) -> "Iterator[TaskConfig]":
    data = data.validation
    if data.name == TASK:
        yield data  # type: ignore[misc]  by its name
    for part in getattr(data, "parts", {}).values():
        yield from _tasks(part)


def score_names(tasks: "Sequence[NamedTask]") -> list[str]:
    """Names of the scores of an evaluation: `val_loss`, `task_score`, metrics, and `val_perplexity` for text tasks.

    With several tasks, names have the suffix "/<task>", as in "accuracy/<task>".
    """

    def names_of(task: "NamedTask") -> list[str]:
        return [TASK_SCORE, *task.task.metrics, *([PERPLEXITY] if task.task.kind == "text" else [])]

    if len(tasks) == 1:
        return [LOSS, *names_of(tasks[0])]
    return [LOSS, TASK_SCORE, *(f"{name}/{task.name}" for task in tasks for name in names_of(task))]


def _name_scores(scores_by_task: dict[str, dict[str, float]], several: bool = False) -> dict[str, float]:
    """Merge scores by task into one dict. With several tasks, names have the suffix "/<task>", and the means of the
    loss and the task score are added."""
    if len(scores_by_task) == 1 and not several:
        return dict(next(iter(scores_by_task.values())))
    scores = {
        f"{name}/{task}": value for task, task_scores in scores_by_task.items() for name, value in task_scores.items()
    }
    for name in (LOSS, TASK_SCORE):
        values = [task_scores[name] for task_scores in scores_by_task.values() if name in task_scores]
        scores |= {name: sum(values) / len(values)} if values else {}
    return scores
