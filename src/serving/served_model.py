"""A trained model for servers: computes rewards, or log-probabilities of tokens, of a padded batch of token ids.

Shapes: B sequences, T tokens of the longest.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.experiments.kinds import DECODER, KINDS, REWARD
from src.experiments.registry import MODELS, bind
from src.models.load import load, move
from src.runs.checkpoints import checkpoints
from src.runs.store import SavedRun, expand_run

if TYPE_CHECKING:
    from torch import Tensor

MODES = {"rm": REWARD, "sft": DECODER, "ref": DECODER}
"""Kind of model for each mode of a server: rewards, or log-probabilities under two names."""
OUTPUTS = {REWARD: "rewards", DECODER: "logps"}


class ServedModel:
    """A model and its identity."""

    def __init__(self, model: Any, output: str, fingerprint: str) -> None:
        """output: "rewards" or "logps". fingerprint: digest of the weights, as in experiments that refer to the run."""
        import torch

        self.output, self.fingerprint = output, fingerprint
        base = model.base if output == OUTPUTS[REWARD] else model
        self.vocabulary, self.longest = (
            base.get_input_embeddings().num_embeddings,
            getattr(base.config, "max_position_embeddings", None),
        )
        self.device = base.device
        self.module: torch.nn.Module = _make_rewards(model) if output == OUTPUTS[REWARD] else _make_logps(model)

    def score(self, input_ids: "Tensor", attention_mask: "Tensor") -> "Tensor":
        """Compute (B,) rewards, or (B, T) log-probabilities of the tokens, 0 for the first, as float32 on the CPU.

        input_ids: (B, T) of any integer type, padded on the right. attention_mask: of the same shape, 0 on padding.

        Raises:
            ConfigError: tokens are not in the vocabulary, a sequence is too long, or the mask is invalid.
        """
        import torch

        if input_ids.ndim != 2 or input_ids.shape != attention_mask.shape or 0 in input_ids.shape:
            raise ConfigError(
                f"expected input_ids and attention_mask of one shape (B, T), got {_shape(input_ids)}, "
                f"{_shape(attention_mask)}."
            )
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= self.vocabulary:
            raise ConfigError(
                f"input_ids: token id {low if low < 0 else high} is out of range, expected 0 to {self.vocabulary - 1}."
            )
        if self.longest is not None and input_ids.shape[1] > self.longest:
            raise ConfigError(
                f"input_ids: {input_ids.shape[1]} tokens, more than the {self.longest} of the model. "
                "Send shorter sequences."
            )
        mask = attention_mask.long()
        if not (mask[:, 0] == 1).all() or not ((mask == 0) | (mask == 1)).all() or not (mask.diff(dim=1) <= 0).all():
            raise ConfigError(
                "attention_mask: expected ones for each sequence, at least one, followed by zeros for padding."
            )
        with torch.inference_mode():
            scores = self.module(input_ids.to(self.device), attention_mask.to(self.device))
        return scores.float().cpu()


def _shape(tensor: "Tensor") -> str:
    return str(list(tensor.shape))


def _make_rewards(model: Any) -> Any:
    import torch

    class Rewards(torch.nn.Module):
        """The reward model `model` on ids and masks of any integer type."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: "Tensor", attention_mask: "Tensor") -> "Tensor":
            return self.model(input_ids.long(), attention_mask.bool())

    return Rewards().eval()


def _make_logps(model: Any) -> Any:
    import torch

    class Logps(torch.nn.Module):
        """Log-probabilities of tokens by the decoder `model`, without returning the logits."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: "Tensor", attention_mask: "Tensor") -> "Tensor":
            input_ids, attention_mask = input_ids.long(), attention_mask.long()
            logits_BTV = (
                self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1].float()
            )
            of_tokens_BT = logits_BTV.gather(2, input_ids[:, 1:, None]).squeeze(2) - logits_BTV.logsumexp(2)
            return torch.nn.functional.pad(of_tokens_BT, (1, 0)) * attention_mask

    return Logps().eval()


def find_run(source: Path, places: Places) -> tuple[Path, Places]:
    """Find a run by its path or a prefix of its id; returns it, and the places with its folder as `runs`.

    Raises:
        RunError: not found.
    """
    run = expand_run(source, places.runs)
    _ = SavedRun(run).exp  # raises an error if it is damaged
    return run, Places(places.data, run.resolve().parent)


def fingerprint_of(run: Path, places: Places) -> str:
    """Identity of the model of a finished run, as in an experiment that refers to it with `ref`. places: from
    `find_run`.

    Raises:
        ConfigError: it is not trained yet.
        UserError: a checkpoint is missing or damaged.
    """
    identity = _as_parent(run).identity(places)
    if identity is None:
        raise ConfigError(f"{run}: the training is not finished. Serve it when it is done.")
    return identity


def check_mode(run: Path, places: Places, mode: str | None) -> str:
    """The output of the run's model, "rewards" or "logps". mode: required key of MODES, or None. places: from
    `find_run`.

    Raises:
        ConfigError: the model does not support the mode.
    """
    kind = _as_parent(run).kind(places)
    if kind not in OUTPUTS or (mode is not None and MODES[mode] != kind):
        expected = " or ".join(KINDS[each] for each in OUTPUTS) if mode is None else KINDS[MODES[mode]]
        raise ConfigError(
            f"{run}: expected {expected}{f' for --mode {mode}' if mode else ''}; got {kind!r}. Name another run."
        )
    return OUTPUTS[kind]


def load_served(run: Path, places: Places, device: str | None, mode: str | None = None) -> ServedModel:
    """Load the last checkpoint of a finished run. device: see `models.load.move`. mode: see `check_mode`.

    Raises:
        ConfigError: the run is not done, the model has the wrong kind, or the device cannot be used.
        UserError: a part of the model is missing.
    """
    output, fingerprint = check_mode(run, places, mode), fingerprint_of(run, places)
    model, _ = load(checkpoints.last(SavedRun(run)), places)
    move(model, device)
    return ServedModel(model, output, fingerprint)


def _as_parent(run: Path) -> ModelConfig:
    return bind(MODELS, {"name": "experiment", "exp_id": run.name, "checkpoint": "last"})
