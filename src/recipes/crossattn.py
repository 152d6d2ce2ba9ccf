"""Recipe `crossattn`: train cross-attention layers in a frozen language model, to answer questions about a context that they read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src import config as configs
from src import distributed
from src.config import Places
from src.data import indices
from src.errors import check_all
from src.experiments.run import Run
from src.registry import Dataset, Model, max_positions, resolved
from src.training.answer_configs import Answers, Inference, measured, most_new_tokens
from src.training.config import LoopConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


class Config(configs.Config):
    """An experiment of this recipe, without its "recipe" key."""

    seed: int = Field(ge=0, lt=2**63)
    model: Model
    data: Dataset
    loop: LoopConfig
    answers: Answers | None = None
    inference: Inference | None = None

    @model_validator(mode="after")
    def _reads_contexts(self) -> "Config":
        if not self.model.ask("reads_contexts"):
            raise ValueError(f"the model of this recipe is 'cross_attention' around a base model, got {self.model.name!r}.")
        if self.data.name != "qa":
            raise ValueError(f"the data of this recipe are 'qa', questions on contexts, got {self.data.name!r}.")
        return self


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""
    new_tokens = most_new_tokens(config.answers, config.inference)
    check_all(
        lambda: config.model.ask("check", places),
        lambda: config.data.ask("check", places),
        lambda: config.data.ask("check_base", places, config.model),
        lambda: config.data.ask("fits", max_positions(config.model, places), new_tokens),
        lambda: config.data.ask("one_shape", config.loop.compile),
        lambda: config.loop.check({"val_loss", "val_loss_shuffled_context"} | measured(config.answers)),
        lambda: config.inference and indices.check(places, config.data.config, config.inference.split, config.inference.index_file),
    )


def run(config: Config, run: Run) -> None:
    """Train to the last step, and then make the inference. Collective.

    Scores: train_loss; val_loss with the right context and val_loss_shuffled_context with another question's (nats per token);
    those of `answers.metrics`. The last row has those of the trained model too: cache_bytes_per_context_token and its kind, and those
    of `inference`.
    """
    import torch

    from src.data import tokenizers
    from src.training import answers, inference
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
        if config.answers:
            config.answers.require(val)
        asked = inference.prepare(
            config.inference,
            lambda split: config.data(run.places, tokenizer, split, config.seed),
            lambda name: indices.read(run.places, config.data.config, name),
        )

    def respondent(dataset: Any, accelerator: Any) -> answers.Respondent:
        return answers.Respondent(model, dataset, tokenizer, config.loop.micro_batch, accelerator.device)

    def evaluate(accelerator: Any) -> dict[str, float]:
        at = (config.loop.micro_batch, accelerator.device)
        scores = {"val_loss": mean_loss(model, val, loss, *at), "val_loss_shuffled_context": mean_loss(model, shuffled, loss, *at)}
        return scores | (answers.evaluate(config.answers, respondent(val, accelerator)) if config.answers else {})

    def finish(accelerator: Any) -> dict[str, float]:
        caches = config.model.ask("cache_bytes", run.places, model.base.dtype.itemsize) or {}
        return caches | inference.make(run, asked, lambda dataset: respondent(dataset, accelerator))

    def learned(module: "nn.Module", batch: "Mapping[str, Tensor]") -> "Tensor":
        return loss(module, batch, config.loop.label_smoothing)

    about = About(resolved(config.model), tokenizer)
    fit(Task(model, about, train, inputs, learned, evaluate, finish), run, config.loop, config.seed)


def loss(model: "nn.Module", batch: "Mapping[str, Tensor]", label_smoothing: float = 0.0) -> "Tensor":
    """Summed cross entropy of the tokens where `loss_mask` is True; the model gives logits for these alone."""
    from src.training.loss import cross_entropy

    return cross_entropy(model(**batch), batch["input_ids"][batch["loss_mask"]], label_smoothing)
