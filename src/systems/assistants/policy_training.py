"""Training a policy on its own answers, shared by `ppo` and `grpo`: each adds its advantages and its loss."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from src.errors import ConfigError
from src.evaluation.config import Answers, SampledAnswers
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.experiments.kinds import DECODER
from src.experiments.registry import resolved_dict
from src.recipes.finetuning import Finetuning
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once
from src.systems.assistants.conversations import dataset
from src.systems.assistants.rewards.interface import RewardField, RewardSetting, Rollout
from src.systems.assistants.rollouts.dataset import Config as RolloutsConfig

if TYPE_CHECKING:
    import torch

    from src.data.orders import Cursor
    from src.systems.assistants.rl.experience import Estimates, Rollouts
    from src.systems.assistants.rl.reference import ReferenceKind


class PolicyTraining(Finetuning):
    """An experiment that trains a policy on rollouts."""

    takes_chunks: ClassVar[bool] = False

    rewards: list[RewardField] = Field(min_length=1)
    """Scores of an answer; their weighted sum is its reward."""
    answers: Answers | None = None
    """Questions of the validation set, answered greedily and scored at each evaluation; None for none."""
    sampled: SampledAnswers | None = None
    """The same by drawing, several answers to each."""

    @model_validator(mode="after")
    def _learns_from_rollouts(self) -> "PolicyTraining":
        if self.loop is None:
            raise ValueError("loop: missing. This recipe trains; recipe 'sft' with evaluation scores a policy.")
        if not isinstance(self.data, RolloutsConfig):
            raise ValueError(f"data: expected 'rollouts', got {self.data.name!r}.")
        self.model.require_kind(DECODER, None)
        if self.model.is_frozen():
            raise ValueError(
                "model: it is quantized, and cannot learn. Put 'lora' around it, or leave quantization out."
            )
        if not (self.answers or self.sampled):
            raise ValueError("answers, sampled: write at least one of them, or nothing would be measured.")
        if self.loop.label_smoothing or self.loop.z_loss:
            raise ValueError(
                "loop: label_smoothing and z_loss are of tokens that somebody wrote, "
                "and would be ignored. Leave them out."
            )
        if self.loop.divergence.most_kl and self.reference_kind() == "none":
            raise ValueError(
                "loop.divergence.most_kl: without a reference nobody measures a KL. "
                "Write a weight of it, or leave it out."
            )
        return self

    @property
    def rollouts(self) -> RolloutsConfig:
        """The config of the data."""
        assert isinstance(self.data, RolloutsConfig), "the validator has checked it"
        return self.data

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards in score rows: the second of a name gets a number."""
        names = [reward.name for reward in self.rewards]
        return [
            f"{name}{names[:place].count(name) + 1}" if name in names[:place] else name
            for place, name in enumerate(names)
        ]

    @property
    def row_keys(self) -> list[str]:
        """What rewards read of the prompts' rows."""
        return sorted({reward.row_key for reward in self.rewards if reward.row_key})

    @abstractmethod
    def reference_kind(self) -> "ReferenceKind":
        """Where the log-probabilities of the reference come from."""

    @property
    def policy_config(self) -> ModelConfig:
        """Config of the part of the model that answers."""
        return self.model

    def policy_of(self, model: Any) -> Any:
        """The part of the model that answers: the reference is a copy of it."""
        return model

    @property
    def needs_sampled_logps(self) -> bool:
        """Whether the loss needs log-probabilities that a step does not compute."""
        return True

    @abstractmethod
    def estimate(self, rollouts: "Rollouts", cursor: "Cursor") -> "Estimates":
        """What rollouts are worth: see `systems.assistants.rl.experience.Estimate`."""

    @abstractmethod
    def token_losses(
        self, model: Any, batch: "Mapping[str, torch.Tensor]"
    ) -> "tuple[torch.Tensor, dict[str, tuple[torch.Tensor, Any]]]":
        """The summed loss of a batch, and named sums with their counts."""

    @property
    @abstractmethod
    def fact_names(self) -> Sequence[str]:
        """Names of the facts that `estimate` finds."""

    def loss(
        self, model: Any, batch: "Mapping[str, torch.Tensor]"
    ) -> "tuple[torch.Tensor, dict[str, tuple[torch.Tensor, Any]]]":
        """`token_losses`, and the means of all facts of rollouts by name."""
        import torch

        summed, named = self.token_losses(model, batch)
        names = [
            "reward",
            *(f"reward/{name}" for name in self.reward_names),
            "answer_tokens",
            "ended",
            *self.fact_names,
        ]
        count = torch.tensor(float(len(batch["facts"])))
        return summed, {
            **{name: (column.sum(), count) for name, column in zip(names, batch["facts"].T, strict=True)},
            **named,
        }

    def score_names(self) -> list[str]:
        """Names of the scores of an evaluation."""
        return [name for questions in (self.answers, self.sampled) if questions for name in questions.score_names()]

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """Checks that need no model or data in memory; each raises a UserError."""
        loop, data = self.loop, self.rollouts
        assert loop is not None, "the validator has checked it"
        longest = max([data.max_new_tokens, *(each.max_new_tokens for each in (self.answers, self.sampled) if each)])
        return [
            lambda: call_once(self.model.check, places),
            lambda: self.model.check_kind(DECODER, places),
            lambda: call_once(data.check, places),
            lambda: data.check_rows(places, self.row_keys),
            lambda: data.check_tokenizer(self.model.tokenizer_folder(places)),
            lambda: data.check_length(self.model.longest_sequence(places), longest),
            lambda: data.check_loop(loop.sequences_per_step, loop.steps),
            lambda: self.check_precision(places),
            self.check_questions,
            lambda: loop.check(self.score_names()),
            *(lambda reward=reward: call_once(reward.check, places) for reward in self.rewards),
            lambda: self.check_rewards_room(places),
        ]

    def check_rewards_room(self, places: Places) -> None:
        """Raises ConfigError if a reward cannot read the longest possible rollout."""
        data, prompts = self.rollouts, self.rollouts.prompts
        assert isinstance(prompts, dataset.Config), "the validator has checked it"
        longest = prompts.sequence_tokens + data.max_new_tokens
        for name, reward in zip(self.reward_names, self.rewards, strict=True):
            room = reward.longest_rollout(places)
            if room is not None and longest > room:
                raise ConfigError(
                    f"reward {name!r}: it reads {room} tokens, and a rollout can have {longest}: "
                    f"data.prompts.sequence_tokens + "
                    "data.max_new_tokens. Make one of them smaller, or take a reward model that reads more."
                )

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        """The number of learned tokens of a batch, which divides its loss."""
        return float(batch["learned"].sum())

    def run(self, run: Run) -> None:
        """Train to the last step. Collective.

        Scores: train_loss; of rollouts reward, reward/NAME of each part, answer_tokens and ended; those of the recipe;
        the scores of `answers` and `sampled`.
        """
        import torch

        from src.data.text import tokenizers
        from src.evaluation import generation, sampled
        from src.systems.assistants.rl.experience import Experience, Recorder
        from src.systems.assistants.rl.policy import Generation
        from src.systems.assistants.rl.reference import build_reference, find_reference_server
        from src.systems.assistants.rl.scoring import Judges, Patience
        from src.systems.assistants.rollouts.order import prompt_numbers
        from src.training.checkpointing.checkpoint import CheckpointMetadata
        from src.training.loop import fit
        from src.training.spec import TrainSpec
        from src.training.state import fingerprints

        assert self.loop is not None, "the validator has checked it"
        torch.manual_seed(self.seed)
        data, device = self.rollouts, _device()
        with distributed.raise_together():
            model = self.model.build(run.places)
            tokenizer = tokenizers.load(model.name_or_path, self.model.new_tokens())
            val = data.build(run.places, tokenizer, "val", self.seed)
            train = data.build(run.places, tokenizer, "train", self.seed)
            train.prompts.require(self.row_keys)
            inputs = fingerprints(run, train, tokenizer, self.model.fingerprint(run.places))
            for questions in (self.answers, self.sampled):
                if questions:
                    questions.require(val)
            wait = Patience(run).wait
            setting = RewardSetting(run.places, device, self.micro_batch, tokenizer, tokenizers.load, write_with, wait)
            kind, temperature = self.reference_kind(), data.sampling.temperature
            served = find_reference_server(self.policy_config, setting, temperature) if kind != "none" else None
            reference = None if served else build_reference(kind, self.policy_of(model), device, temperature)
            judges = Judges(
                self.reward_names,
                [reward.scorer(setting) for reward in self.rewards],
                [reward.weight for reward in self.rewards],
            )

        ends, never = train.prompts.renderer.answer_ends()

        def numbers(iteration: int) -> list[int]:
            prompts = prompt_numbers(self.seed, len(train.prompts), iteration, data.rollouts // data.group_size)
            return [number for number in prompts for _ in range(data.group_size)]

        experience = Experience(
            seed=self.seed,
            data=train,
            numbers=numbers,
            batch=data.generation_batch,
            micro_batch=self.micro_batch,
            generation=Generation(
                data.max_new_tokens,
                temperature,
                data.sampling.options(),
                ends,
                never,
                continuous=data.sampling.batching == "continuous",
                repeated=data.group_size > 1,
            ),
            decode=lambda ids: str(tokenizer.decode([*ids], skip_special_tokens=True)),
            judges=judges,
            estimate=self.estimate,
            record=Recorder(run.path).record,
            reference=reference,
            served=served.logps if served else None,
            measured=self.needs_sampled_logps,
        )
        train.fill = experience.roll_out

        def evaluate(accelerator: Any) -> dict[str, float]:
            generator = generation.AnswerGenerator(model, val, tokenizer, self.micro_batch, accelerator.device)
            scores = generation.evaluate(self.answers, generator) if self.answers else {}
            return scores | (sampled.evaluate(self.sampled, generator) if self.sampled else {})

        about = CheckpointMetadata(resolved_dict(self.model), tokenizer)
        spec = TrainSpec(
            model, about, train, inputs, self.loss, evaluate, count=self.count, experience=experience, dropout=False
        )
        fit(spec, run, self.loop, self.seed)


def _device() -> "torch.device":
    import torch

    return torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def write_with(tokenizer: Any, template: str) -> Callable[[Rollout], list[int]]:
    """How a rollout is written for a reward model, as text: see `systems.assistants.rewards.interface.RewardSetting`.

    Raises:
        DataError: the template does not fit the tokenizer.
    """
    from src.systems.assistants.conversations import templates
    from src.systems.assistants.conversations.entries import Message, read_message
    from src.systems.assistants.conversations.rendering import Renderer

    renderer = Renderer(tokenizer, templates.find(template, tokenizer))

    def write(rollout: Rollout) -> list[int]:
        prompt = [read_message(message, "a rollout") for message in rollout.messages]
        return renderer.render([*prompt, Message("assistant", rollout.text)]).ids

    return write
