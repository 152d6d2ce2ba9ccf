"""Recipe `crossattn`: train cross-attention layers in a frozen language model, to answer questions about a context that they read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src import config as configs
from src import distributed
from src.config import Places
from src.errors import DataError, check_all
from src.experiments.run import Run
from src.registry import Dataset, Metric, Model, max_positions, resolved
from src.training.config import LoopConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


class Answers(configs.Config):
    """Questions answered by greedy generation at each evaluation, and how the answers are scored."""

    questions: int = Field(gt=0)
    """The first ones of the validation set."""
    max_new_tokens: int = Field(gt=0)
    metrics: list[Metric] = Field(min_length=1)


class Config(configs.Config):
    """An experiment of this recipe, without its "recipe" key."""

    seed: int = Field(ge=0, lt=2**63)
    model: Model
    data: Dataset
    loop: LoopConfig
    answers: Answers | None = None

    @model_validator(mode="after")
    def _reads_contexts(self) -> "Config":
        if not self.model.ask("reads_contexts"):
            raise ValueError(f"the model of this recipe is 'cross_attention' around a base model, got {self.model.name!r}.")
        if self.data.name != "qa":
            raise ValueError(f"the data of this recipe are 'qa', questions on contexts, got {self.data.name!r}.")
        return self


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""
    scores = {"val_loss", "val_loss_shuffled_context"}
    if config.answers and config.loop.best_metric not in scores:
        scores |= {name for metric in config.answers.metrics for name in metric([""], [[""]])}
    check_all(
        lambda: config.model.ask("check", places),
        lambda: config.data.ask("check", places),
        lambda: config.data.ask("fits", max_positions(config.model, places), config.answers.max_new_tokens if config.answers else 0),
        lambda: config.data.ask("one_shape", config.loop.compile),
        lambda: config.loop.check(scores),
    )


def run(config: Config, run: Run) -> None:
    """Train to the last step. Collective.

    Scores: train_loss; val_loss with the right context and val_loss_shuffled_context with another question's (nats per token);
    those of `answers.metrics`.
    """
    import torch

    from src.data import tokenizers
    from src.training import answers
    from src.training.checkpoint import About
    from src.training.evaluation import mean_loss
    from src.training.inputs import fingerprints
    from src.training.loop import Task, fit

    torch.manual_seed(config.seed)
    with distributed.together():
        model = config.model(run.places)
        tokenizer = tokenizers.load(model.name_or_path)
        train = config.data(run.places, tokenizer, "train", config.seed)
        val = config.data(run.places, tokenizer, "val", config.seed)
        shuffled = val.with_shuffled_contexts()
        inputs = fingerprints(run, train, tokenizer, config.model.ask("fingerprint", run.places))
        if config.answers and config.answers.questions > len(val):
            raise DataError(f"answers.questions: {config.answers.questions} of a validation set of {len(val)}. Ask for fewer.")

    def evaluate(accelerator: Any) -> dict[str, float]:
        at = (config.loop.micro_batch, accelerator.device)
        scores = {"val_loss": mean_loss(model, val, loss, *at), "val_loss_shuffled_context": mean_loss(model, shuffled, loss, *at)}
        if config.answers:
            predictions = answers.answer(model, val, tokenizer, config.answers.questions, config.answers.max_new_tokens, at)
            scores |= answers.scores(config.answers.metrics, predictions, val)
        return scores

    def learned(module: "nn.Module", batch: "Mapping[str, Tensor]") -> "Tensor":
        return loss(module, batch, config.loop.label_smoothing)

    about = About(resolved(config.model), tokenizer)
    fit(Task(model, about, train, inputs, learned, evaluate), run, config.loop, config.seed)


def loss(model: "nn.Module", batch: "Mapping[str, Tensor]", label_smoothing: float = 0.0) -> "Tensor":
    """Summed cross entropy of the tokens where `loss_mask` is True; the model gives logits for these alone."""
    from src.training.loss import cross_entropy

    return cross_entropy(model(**batch), batch["input_ids"][batch["loss_mask"]], label_smoothing)
