"""Fine-tuning an encoder-decoder on tasks that are written as text, and scoring it: what recipe `seq2seq` does.

The recipe adds the tokenizers and which splits a data set has.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src import config as configs
from src import distributed
from src.config import Places, unknown_text
from src.errors import ConfigError
from src.evaluation.task_config import Answering, Predictions
from src.registry import ENCODER_DECODER, Dataset, Model, Part, check_kind, max_positions, require_kind, resolved
from src.runs.context import Run
from src.training.config import LoopConfig
from src.training.evaluation_config import Evaluation

if TYPE_CHECKING:
    from torch import Tensor

TASK = "task"
"""Name of the data set whose rows are answered."""
LOSS, TASK_SCORE = "val_loss", "task_score"


class TextToText(configs.Config):
    """An experiment: a loop that trains, or the evaluation of the model as it stands."""

    seed: int = Field(ge=0, lt=2**63)
    model: Model
    data: Dataset
    loop: LoopConfig | None = None
    evaluation: Evaluation | None = None
    answers: Answering = Answering()
    predictions: Predictions | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "TextToText":
        if (self.loop is None) == (self.evaluation is None):
            raise ValueError("expected either loop, which trains the model, or evaluation, which scores it as it stands.")
        if self.evaluation and self.model.name == "lora":
            raise ValueError("model: new adapters change nothing before they are trained. Take their base, or write loop.")
        require_kind(self.model, ENCODER_DECODER, None)
        if not self.asked:
            raise ValueError(f"data: expected {TASK!r}, or a 'mixture' with such a part; got {self.data.name!r}.")
        also = self.predictions.also if self.predictions else []
        for part in also:
            if part.name != TASK:
                raise ValueError(f"predictions.also: expected data sets {TASK!r}, got {part.name!r}.")
        twice = [name for name, count in Counter(name_of(part) for part in [*self.asked, *also]).items() if count > 1]
        if twice:
            raise ValueError(f"data: the task {twice[0]!r} stands there twice, and its scores would have one name.")
        return self

    @property
    def asked(self) -> list[Part]:
        """The tasks in `data`."""
        return list(_tasks(self.data))

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass."""
        return (self.loop or self.evaluation).micro_batch  # type: ignore[union-attr]  one of them is there


def _tasks(data: Part) -> Iterator[Part]:
    if data.name == TASK:
        yield data
    for part in getattr(data.config, "parts", {}).values():
        yield from _tasks(part)


def name_of(part: Part) -> str:
    """The task of a data set `task`."""
    return part.config.model_dump()["task"]


@dataclass(frozen=True)
class Table:
    """What the recipe knows of data sets, which lie beyond this layer."""

    named: Callable[[Part, Places], Any]
    """The task of a data set `task`: `name`, `task`, `answers`."""
    has: Callable[[Part, Places, str], bool]
    """Whether such a data set has a split."""
    load_tokenizer: Callable[[str], Any]
    """Of a model's name_or_path."""


def checks(config: TextToText, places: Places, table: Table) -> list[Callable[[], object]]:
    """For `errors.check_all`: each raises a UserError for what can be known to fail before anything is loaded."""

    def learns() -> None:
        if config.loop and config.model.ask("frozen"):
            raise ConfigError("model: its weights are frozen, so there is nothing to train. Put 'lora' around it, or write evaluation.")

    also = config.predictions.also if config.predictions else []

    def asked_along() -> None:
        for part in also:
            part.ask("check_splits", places, [split for split in ("val", "test") if table.has(part, places, split)])

    def answered() -> None:
        for part in [*config.asked, *also]:
            if config.answers.by == "rank" and not table.named(part, places).answers:
                raise ConfigError(f"answers.by: the answers of task {name_of(part)!r} are any text, so there is no list to rank.")

    def measured() -> None:
        if config.loop is None:
            return
        known = score_names([table.named(part, places) for part in config.asked])
        if config.loop.best_metric not in known:
            raise ConfigError(f"loop.best_metric: {unknown_text('score', config.loop.best_metric, known)}")
        lower = config.loop.best_metric == LOSS
        if (config.loop.best_mode == "min") != lower:
            right, better = ("min", "lower") if lower else ("max", "higher")
            raise ConfigError(f"loop.best_mode: the better {config.loop.best_metric} is the {better} one. Write {right!r}.")
        config.loop.check({config.loop.best_metric.partition("/")[0]})

    found = [
        lambda: config.model.ask("check", places),
        lambda: check_kind(config.model, ENCODER_DECODER, places),
        learns,
        lambda: config.data.ask("check", places),
        lambda: config.data.ask("fits", max_positions(config.model, places)),
        asked_along,
        answered,
        measured,
        lambda: predicted(config, places, table),
    ]
    if config.loop:
        compiled = config.loop.compile
        found.append(lambda: config.data.ask("one_shape", compiled))
    return found


def score_names(tasks: Sequence[Any]) -> list[str]:
    """What an evaluation measures: `val_loss`, `task_score`, and the metrics of one task, or of several under "accuracy/<task>"."""
    if len(tasks) == 1:
        return [LOSS, TASK_SCORE, *tasks[0].task.metrics]
    return [LOSS, TASK_SCORE, *(f"{name}/{task.name}" for task in tasks for name in (TASK_SCORE, *task.task.metrics))]


def predicted(config: TextToText, places: Places, table: Table) -> list[tuple[Part, str]]:
    """The rows that are predicted, as data sets with splits.

    Raises:
        ConfigError: no data set has a split, or one has none of the splits.
        UserError: a data set is missing, or its task unknown.
    """
    asked = config.predictions
    if asked is None:
        return []
    every = [*config.asked, *asked.also]
    found = [(part, split) for part in every for split in dict.fromkeys(asked.splits) if table.has(part, places, split)]
    for split in asked.splits:
        if split not in {has for _, has in found}:
            names = ", ".join(map(repr, map(name_of, every)))
            raise ConfigError(f"predictions.splits: none of {names} has the split {split!r}. data_prep.prepare_task makes it.")
    for part in every:
        if part not in [with_split for with_split, _ in found]:
            raise ConfigError(f"predictions: {name_of(part)!r} has none of the splits {', '.join(asked.splits)}.")
    return found


def carry_out(config: TextToText, run: Run, loss: "Callable[..., Tensor]", table: Table) -> None:
    """Train to the last step, or score the model as it stands; and then make the predictions. Collective.

    loss: (model, batch) and, for training, label smoothing and z-loss -> summed loss. Scores: train_loss and those of `score_names`;
    at the end "predictions/<split>/<metric>", of several tasks "predictions/<split>/<metric>/<task>".
    """
    import torch

    from src.evaluation import evaluate_only
    from src.evaluation.predictions import Asked
    from src.training.checkpointing.folder import About
    from src.training.fingerprints import fingerprints
    from src.training.loop import Task, fit

    torch.manual_seed(config.seed)
    with distributed.together():
        model = config.model(run.places)
        tokenizer = table.load_tokenizer(model.name_or_path)
        val = [part(run.places, tokenizer, "val", config.seed) for part in config.asked]
        sets = []
        for part, split in predicted(config, run.places, table):
            same = [data for data, own in zip(val, config.asked, strict=True) if own is part and split == "val"]
            sets.append(Asked(same[0] if same else part(run.places, tokenizer, split, config.seed), split))
        train = config.data(run.places, tokenizer, "train", config.seed) if config.loop else None
        inputs = fingerprints(run, val[0] if train is None else train, tokenizer, config.model.ask("fingerprint", run.places))
        exam = _Exam(config, run, model, tokenizer, loss, val, sets, inputs)
    if config.evaluation:
        return evaluate_only.score(model, run, config.evaluation, exam.evaluate, exam.finish)
    loop = config.loop
    assert loop, "the validator has seen to it"
    about = About(resolved(config.model), tokenizer)

    def learned(module: torch.nn.Module, batch: Any) -> "Tensor":
        return loss(module, batch, loop.label_smoothing, loop.z_loss)

    fit(Task(model, about, train, inputs, learned, exam.evaluate, exam.finish), run, loop, config.seed)
    return None


@dataclass(frozen=True)
class _Exam:
    """A model and what it is asked. Both methods are called on every rank and give the same scores on each."""

    config: TextToText
    run: Run
    model: Any
    tokenizer: Any
    loss: "Callable[..., Tensor]"
    val: Sequence[Any]
    """Of each task the data set."""
    sets: Sequence[Any]
    """`predictions.Asked`, of the trained model."""
    inputs: dict[str, str]
    """What `training.inputs.fingerprints` gave."""

    def evaluate(self, accelerator: Any) -> dict[str, float]:
        """The scores of `score_names`; of several tasks val_loss and task_score are the means, each task counting the same."""
        from src.evaluation.predictions import task_scores
        from src.training.validation import mean_loss

        who, found = self._respondent(accelerator, self.config.answers), {}
        for data in self.val:
            texts = [text for some in who.rounds(data, range(len(data))) for text in some]
            scores = task_scores(data.task, [data.answered(i, text) for i, text in enumerate(texts)])
            scores[LOSS] = mean_loss(self.model, data, self.loss, self.config.micro_batch, accelerator.device)
            found[data.task.name] = scores
        return _named(found)

    def finish(self, accelerator: Any) -> dict[str, float]:
        """Make the predictions; their scores."""
        from src.evaluation import predictions

        answering = self.config.answers if self.config.answers.by != "teacher_forced" else Answering()
        scores = predictions.make(self.run, self.sets, self._respondent(accelerator, answering), self.inputs)
        found: dict[str, float] = {}
        for split in dict.fromkeys(asked.split for asked in self.sets):
            own = {asked.dataset.task.name: scores[asked.name] for asked in self.sets if asked.split == split and asked.name in scores}
            several = len(self.config.asked) + len(self.config.predictions.also if self.config.predictions else []) > 1
            found |= {f"predictions/{split}/{name}": value for name, value in (_named(own, several) if own else {}).items()}
        return found

    def _respondent(self, accelerator: Any, answering: Answering) -> Any:
        from src.evaluation.ranking import TextRespondent

        return TextRespondent(self.model, self.tokenizer, answering, self.config.micro_batch, accelerator.device)


def _named(found: dict[str, dict[str, float]], several: bool = False) -> dict[str, float]:
    """Scores by task as one dict: those of one task as they are, of several under "accuracy/<task>", with means of what all have."""
    if len(found) == 1 and not several:
        return dict(next(iter(found.values())))
    scores = {f"{name}/{task}": value for task, own in found.items() for name, value in own.items()}
    for name in (LOSS, TASK_SCORE):
        values = [own[name] for own in found.values() if name in own]
        scores |= {name: sum(values) / len(values)} if values else {}
    return scores
