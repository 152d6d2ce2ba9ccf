"""Recipe `dpo`: direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) on pairs of replies."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from src.data.parts import leaf_configs
from src.evaluation.harness import Harness
from src.experiments.config import Config as StrictConfig
from src.experiments.kinds import DECODER, REWARD
from src.recipes import pretraining
from src.systems.assistants.conversations import ranked
from src.systems.assistants.preferences.training import ROUNDING, ReplyRecipe

if TYPE_CHECKING:
    import torch


class Preference(StrictConfig):
    """The loss of a pair; see `systems.assistants.preferences.losses.pair_loss`."""

    kind: Literal["sigmoid", "ipo", "robust", "hinge", "apo_zero", "apo_down"] = "sigmoid"
    """The loss function."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull towards the reference model; for ipo this is tau."""
    label_flip_rate: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of wrong preference labels. With kind sigmoid this gives conservative DPO."""
    reduction: Literal["sum", "mean"] | None = None
    """Log-probability of a reply: the sum over its tokens, or the mean, which takes the reward from longer replies.
    None: the mean for ipo, else the sum."""
    margin: float = Field(default=0.0, ge=0)
    """Margin by which beta times the log-ratio of the pair should exceed 0, for kind sigmoid. With reduction mean and
    reference none this is SimPO's gamma (Meng et al. 2024, arXiv 2405.14734, equation 6)."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss on the chosen reply, in nats per token (Pang et al. 2024, arXiv 2404.19733)."""

    reference: Literal["stored", "adapters_off", "none"] = "stored"
    """Source of the reference log-probabilities. stored: computed once and saved in the run. adapters_off: computed at
    each step by model `lora` without its adapters, for texts that change with the epoch (tags with dropout) or too many
    replies to store. none: log-probabilities without a reference, as in CPO and SimPO."""

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "Preference":
        for field, kinds in (("label_flip_rate", ("sigmoid", "robust")), ("margin", ("sigmoid",))):
            if getattr(self, field) and self.kind not in kinds:
                raise ValueError(f"{field}: {self.kind!r} has no such setting. Remove it.")
        return self

    @property
    def takes_mean(self) -> bool:
        """Whether log-probabilities are means over tokens."""
        return (self.reduction or ("mean" if self.kind == "ipo" else "sum")) == "mean"


class Config(ReplyRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    can_continue: ClassVar[bool] = False
    reported_scores: ClassVar[Sequence[str]] = ("accuracy", "margin", "chosen_logratio", "rejected_logratio")

    preference: Preference = Preference()
    harness: Harness | None = None
    """Tasks of lm-evaluation-harness to score; None for none."""

    @model_validator(mode="after")
    def _samples_are_pairs(self) -> "Config":
        pretraining.require_text(self, DECODER, REWARD)
        for path, data in leaf_configs("data", self.data):
            if not isinstance(data, ranked.Config) or data.max_replies != 2:
                raise ValueError(f"{path}: this recipe needs pairs: use 'ranked_replies' with max_replies 2.")
        self.require_reference("preference.reference")
        return self

    @property
    def reference(self) -> str:
        return self.preference.reference

    def loss(self) -> Callable[..., Any]:
        """A function that returns the summed loss and, by name, sums over pairs.

        chosen_logratio and rejected_logratio: log-probability of each reply relative to the reference. accuracy: 1 if
        the first is larger than the second by more than rounding. margin: beta times their difference.
        """
        from src.systems.assistants.preferences.losses import pair_loss
        from src.systems.assistants.preferences.reference import log_ratios

        preference = self.preference

        def loss_and_sums(model: Any, batch: "Mapping[str, torch.Tensor]") -> Any:
            import torch

            first, second = batch["ranks"][::2], batch["ranks"][1::2]
            differ = first != second

            def pairs(values: torch.Tensor) -> list[torch.Tensor]:
                """Values of the chosen and of the rejected replies, without ties.
                With shuffled ranks some pairs are swapped."""
                both = values[::2], values[1::2]
                return [torch.where(first < second, *order)[differ] for order in (both, both[::-1])]

            sums, ratios = log_ratios(model, batch, preference.reference)
            loss = pair_loss(
                *pairs(ratios / sums.tokens if preference.takes_mean else ratios),
                kind=preference.kind,
                beta=preference.beta,
                flip_rate=preference.label_flip_rate,
                margin=preference.margin,
            )
            if preference.sft_weight:
                loss = loss - preference.sft_weight * pairs(sums.logps / sums.tokens)[0].sum()
            chosen_ratios, rejected_ratios = pairs(ratios.detach())
            is_right = (chosen_ratios > rejected_ratios + ROUNDING).float()
            margins = preference.beta * (chosen_ratios - rejected_ratios)
            return loss, self.named_sums(is_right, margins, chosen_ratios, rejected_ratios)

        return loss_and_sums

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        """Number of pairs with different ranks."""
        return float((batch["ranks"][::2] != batch["ranks"][1::2]).sum())
