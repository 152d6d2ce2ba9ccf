"""Export a reward model as a transformers model for sequence classification with one label."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from src.errors import ConfigError
from src.models import prepared_tokenizer

if TYPE_CHECKING:
    from src.systems.assistants.model.layers import RewardModel

PAD = "<|padding|>"


def sequence_classifier(model: "RewardModel", pad_id: int) -> Any:
    """The model as transformers' class, with shared weights. pad_id: id of a token that no sequence contains.

    That class reads the last token that is not `pad_id`. If the end token were the padding, it would read the token
    before it.

    Raises:
        ConfigError: transformers has no such class for the family, or the model pools by the mean.
    """
    from transformers import AutoModelForSequenceClassification

    if model.pooling != "last":
        raise ConfigError(
            f"pooling {model.pooling!r}: transformers only supports the last token. Load the model with this project."
        )
    config = type(model.config).from_dict({**model.config.to_dict(), "num_labels": 1, "pad_token_id": pad_id})
    try:
        with torch.device("meta"):
            classifier: Any = AutoModelForSequenceClassification.from_config(config, dtype=model.base.dtype)
    except ValueError:
        raise ConfigError(
            f"transformers has no {config.model_type!r} for sequence classification. Load the model with this project."
        ) from None
    setattr(classifier, classifier.base_model_prefix, model.base)
    classifier.score = model.head.to(model.base.dtype)
    return classifier


def save(model: "RewardModel", folder: Path) -> None:
    """Write the model into `folder`, next to its tokenizer. Adds a padding token to both if there is no separate one.

    Raises:
        ConfigError: see `sequence_classifier`.
    """
    tokenizer = prepared_tokenizer.load(folder)
    if tokenizer.pad_token is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": PAD})
        tokenizer.save_pretrained(folder)
    if len(tokenizer) > model.base.get_input_embeddings().num_embeddings:
        model.base.resize_token_embeddings(len(tokenizer))
    sequence_classifier(model, tokenizer.pad_token_id).save_pretrained(folder)
