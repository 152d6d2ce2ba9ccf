"""Recipe `lm`: train a causal language model on the next token, from scratch or from given weights."""

from typing import Any

from pydantic import Field, model_validator

from src import config as configs
from src import distributed
from src.config import Places
from src.errors import check_all
from src.experiments.run import Run
from src.registry import DECODER, Dataset, Model, max_positions, require_kind, resolved
from src.training.config import LoopConfig


class Config(configs.Config):
    """An experiment of this recipe, without its "recipe" key."""

    seed: int = Field(ge=0, lt=2**63)
    model: Model
    data: Dataset
    loop: LoopConfig

    @model_validator(mode="after")
    def _reads_text_alone(self) -> "Config":
        if self.model.ask("reads_contexts"):
            raise ValueError("the model of this recipe reads no contexts; recipe 'crossattn' trains a 'cross_attention' model.")
        require_kind(self.model, DECODER, None)
        if self.model.ask("frozen"):
            raise ValueError("model: it is quantized, and cannot learn. Put 'lora' around it, or leave quantization out.")
        if self.data.name in ("qa", "fid_qa"):
            reads = {"qa": "crossattn", "fid_qa": "fid"}[self.data.name]
            raise ValueError(f"this recipe would leave the contexts of {self.data.name!r} data unread; recipe {reads!r} reads them.")
        return self


def check(config: Config, places: Places) -> None:
    """Raises a UserError for what can be known to fail before anything is loaded."""
    check_all(
        lambda: config.model.ask("check", places),
        lambda: config.data.ask("check", places),
        lambda: config.data.ask("fits", max_positions(config.model, places)),
        lambda: config.data.ask("one_shape", config.loop.compile),
        lambda: config.loop.check({"val_loss", "val_perplexity"}),
    )


def run(config: Config, run: Run) -> None:
    """Train to the last step. Scores: train_loss, val_loss (nats per token) and val_perplexity. Collective."""
    import torch

    from src.data import tokenizers
    from src.training.checkpoint import About
    from src.training.evaluation import mean_loss
    from src.training.inputs import fingerprints
    from src.training.loop import Task, fit
    from src.training.loss import causal_lm_loss

    torch.manual_seed(config.seed)
    with distributed.together():
        model = config.model(run.places)
        tokenizer = tokenizers.load(model.name_or_path)
        train = config.data(run.places, tokenizer, "train", config.seed)
        val = config.data(run.places, tokenizer, "val", config.seed)
        inputs = fingerprints(run, train, tokenizer, config.model.ask("fingerprint", run.places))

    def evaluate(accelerator: Any) -> dict[str, float]:
        loss = mean_loss(model, val, causal_lm_loss, config.loop.micro_batch, accelerator.device)
        return {"val_loss": loss, "val_perplexity": float(torch.tensor(loss).exp())}

    def learned(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        return causal_lm_loss(module, batch, config.loop.label_smoothing)

    about = About(resolved(config.model), tokenizer)
    fit(Task(model, about, train, inputs, learned, evaluate), run, config.loop, config.seed)
