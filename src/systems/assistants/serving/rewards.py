"""A trained reward model: rewards of replies, and its agreement with ranked replies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from src.data.parts import leaf_configs
from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.experiments.kinds import REWARD
from src.models.load import checkpoint_folder, load, move
from src.runs.metadata import expand_run, read_exp_dict
from src.systems.assistants.conversations import ranked, templates
from src.systems.assistants.conversations.entries import Message, Reply
from src.systems.assistants.conversations.rendering import Renderer

Asked = tuple[Sequence[Message], str]
"""A conversation, and a reply to it."""


class Judge:
    """A reward model that reads conversations as the experiment that trained it."""

    def __init__(self, model: Any, tokenizer: Any, recipe: Any, data: ranked.Config, micro_batch: int) -> None:
        """micro_batch: sequences in one forward pass."""
        self._model, self._recipe, self._data, self._micro_batch = model, recipe, data, micro_batch
        self._renderer = Renderer(tokenizer, templates.find(data.writing.template, tokenizer))

    def rewards(self, requests: Sequence[Asked]) -> list[float]:
        """One reward per reply, in order. Long ones are truncated as in training."""
        import torch

        from src.data.collate import pad_tokens

        rows = [
            ranked.render_reply(self._data, self._renderer, messages, Reply(reply, 0)).ids
            for messages, reply in requests
        ]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # little padding
        rewards, device = [0.0] * len(rows), self._model.base.device
        for first in range(0, len(rows), self._micro_batch):
            places = order[first : first + self._micro_batch]
            ids = [rows[i] for i in places]
            batch = pad_tokens(ids, [[True] * len(row) for row in ids], self._renderer.safe.pad_id)
            with torch.no_grad():
                values = self._model(
                    input_ids=batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device)
                )
            for i, value in zip(places, values.tolist(), strict=True):
                rewards[i] = value
        return rewards

    def agreement(self, places: Places, corpus: str, split: str) -> tuple[int, Mapping[str, float]]:
        """Conversations with ranked replies of a prepared folder, and the recipe's evaluation scores on them by name.

        Raises:
            DataError: the folder is missing or malformed, or ranks nothing.
        """
        from src.training.validation import measure

        config = self._data.model_copy(update={"corpus": corpus, "val_samples": None, "shuffled_ranks": False})
        data = ranked.RankedReplies(config, config.read(places, split), self._renderer, None, "", corpus)
        sums = measure(
            self._model, data, self._recipe.loss(), self._micro_batch, self._model.base.device, count=self._recipe.count
        )  # fmt: skip
        return len(data), {"loss": sums.loss, **sums.means}


def load_judge(source: Path, places: Places, device: str | None, micro_batch: int) -> Judge:
    """The reward model of a run or a checkpoint.

    Raises:
        ConfigError: it is no reward model, or the device or `micro_batch` cannot be used.
        UserError: a part of the model is missing.
    """
    if micro_batch < 1:
        raise ConfigError(f"--micro_batch: expected at least 1, got {micro_batch}.")
    source = expand_run(source, places.runs)
    run = checkpoint_folder(source).parents[1]
    recipe: Any = load_experiment(read_exp_dict(run), str(run))
    parts = leaf_configs("data", recipe.data) if getattr(recipe, "model_kind", None) == REWARD else ()
    data = next((part for _, part in parts if isinstance(part, ranked.Config)), None)
    if data is None:
        raise ConfigError(f"{run}: no reward model. Name a run of recipe 'reward'.")
    model, tokenizer = load(source, places)
    move(model, device)
    return Judge(model, tokenizer, recipe, data, micro_batch)
