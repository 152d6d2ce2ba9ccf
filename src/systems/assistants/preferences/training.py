"""What the recipes `dpo` and `kto` share: the reference, and a training on log-probabilities of replies."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from src.data.parts import leaf_configs
from src.recipes import pretraining
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.systems.assistants.conversations.dataset import ConversationConfig

if TYPE_CHECKING:
    import torch

ROUNDING = 1e-3
"""Maximum difference, in nats, between log-probabilities of one model in two passes."""


def require_reference(recipe: TrainingRecipe, field: str, source: str) -> None:
    """Raise ValueError if log-probabilities of the reference cannot come from `source`, the value of `field`."""
    for path, data in leaf_configs("data", recipe.data):
        tags = data.writing.tags if isinstance(data, ConversationConfig) else None
        if tags and tags.dropout and source == "stored":
            raise ValueError(
                f"{path}.writing.tags.dropout: stored references need the same text in each epoch. "
                f"Set it to 0, or with model 'lora' set {field}: adapters_off."
            )
    if source == "adapters_off" and recipe.model.name != "lora":
        raise ValueError(
            f"{field}: only model 'lora' has adapters to switch off. Wrap the model in 'lora', or use stored."
        )


def train_on_replies(
    recipe: TrainingRecipe,
    run: Run,
    loss: Callable[..., Any],
    scores: Sequence[str],
    count: "Callable[[Mapping[str, torch.Tensor]], float]",
    reference: str,
) -> None:
    """Train to the last step, or evaluate. Scores: val_loss and the means of `scores`. Collective.

    loss: (model, batch) -> summed loss, and sums by the names `scores`. reference: "stored" adds the log-probabilities
    of the initial model to the batches.
    """
    from src.systems.assistants.preferences.reference import add_references

    prepare = partial(add_references, run=run.path, micro_batch=recipe.micro_batch, precision=recipe.precision[0])
    pretraining.train_on_text(
        recipe,
        run,
        pretraining.TextTraining(
            loss, reported_sums=scores, count=count, prepare=prepare if reference == "stored" else None
        ),
    )
