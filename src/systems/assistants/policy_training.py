"""Training a policy on its own answers. The recipes `ppo` and `grpo` provide the advantages and the loss.

A recipe calls `require_rollouts` when it is loaded and `train_policy` to run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from src.errors import ConfigError
from src.evaluation.config import Answers, SampledAnswers
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig, NewTokens
from src.experiments.kinds import DECODER
from src.experiments.registry import resolved_dict
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once
from src.systems.assistants.conversations.dataset import Config as ConversationsConfig
from src.systems.assistants.rewards.interface import RewardField, RewardSetting, Rollout
from src.systems.assistants.rollouts.dataset import Config as RolloutsConfig

if TYPE_CHECKING:
    import torch

    from src.systems.assistants.rl.experience import Estimate
    from src.systems.assistants.rl.reference import ReferenceKind

    Batch = Mapping[str, torch.Tensor]
    NamedSums = dict[str, tuple[torch.Tensor, Any]]


class PolicyRecipe(TrainingRecipe):
    """Base of `ppo` and `grpo`: how to score a policy's answers."""

    takes_chunks: ClassVar[bool] = False
    is_cross_entropy: ClassVar[bool] = False
    can_continue: ClassVar[bool] = False

    rewards: list[RewardField] = Field(min_length=1)
    """Scores of an answer; their weighted sum is its reward."""
    answers: Answers | None = None
    """Validation questions to answer greedily at each evaluation. Set at least one of `answers` and `sampled`."""
    sampled: SampledAnswers | None = None
    """Validation questions to answer by sampling, several times each."""

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards in score rows. Repeated names get a number."""
        names = [reward.name for reward in self.rewards]
        return [
            f"{name}{names[:place].count(name) + 1}" if name in names[:place] else name
            for place, name in enumerate(names)
        ]

    @property
    def row_keys(self) -> list[str]:
        """The keys of the prompts' rows that rewards read."""
        return sorted({reward.row_key for reward in self.rewards if reward.row_key})

    @property
    def questions(self) -> "list[Answers | SampledAnswers]":
        return [each for each in (self.answers, self.sampled) if each]

    def checks(self, places: Places) -> list[Callable[[], object]]:
        model, data, loop = self.model, rollouts_of(self), self.loop
        assert loop is not None, "the validator has checked it"
        longest = NewTokens.longest({"data": data, "answers": self.answers, "sampled": self.sampled})
        scores = [name for questions in self.questions for name in questions.score_names()]
        return [
            lambda: call_once(model.check, places),
            lambda: model.check_kind(DECODER, places),
            lambda: call_once(data.check, places),
            lambda: data.check_rows(places, self.row_keys),
            lambda: data.check_tokenizer(places, model.find_tokenizer(places)),
            lambda: data.check_length(model.longest_sequence(places), longest),
            lambda: data.check_loop(loop.sequences_per_step, loop.steps),
            lambda: self.check_precision(places),
            lambda: self.check_questions(places),
            lambda: loop.check(scores),
            *(lambda reward=reward: call_once(reward.check, places) for reward in self.rewards),
            lambda: self.check_rewards_room(places),
        ]

    def check_rewards_room(self, places: Places) -> None:
        """Raises ConfigError if a reward cannot read the longest possible rollout."""
        data = rollouts_of(self)
        assert isinstance(data.prompts, ConversationsConfig), "the validator has checked it"
        longest = data.prompts.sequence_tokens + data.max_new_tokens
        for name, reward in zip(self.reward_names, self.rewards, strict=True):
            room = reward.longest_rollout(places)
            if room is not None and longest > room:
                raise ConfigError(
                    f"reward {name!r}: reads at most {room} tokens, but a rollout can have {longest}: "
                    f"data.prompts.sequence_tokens {data.prompts.sequence_tokens} + data.max_new_tokens "
                    f"{data.max_new_tokens}. Lower one of them, or use a reward model that reads more."
                )


@dataclass(frozen=True)
class PolicyMethod:
    """The part of the training that differs between `ppo` and `grpo`."""

    reference: "ReferenceKind"
    """The source of the reference's log-probabilities."""
    estimate: "Estimate"
    """(rollouts, cursor) -> the advantages of rollouts."""
    token_losses: "Callable[[Any, Batch], tuple[torch.Tensor, NamedSums]]"
    """(model, batch) -> summed loss, and sums with their counts by name."""
    fact_names: Sequence[str]
    """Names of the facts that `estimate` returns."""
    policy_config: ModelConfig
    """Config of the part of the model that answers."""
    policy_of: Callable[[Any], Any] = lambda model: model
    """The part of the model that answers. The reference is a copy of it."""
    count: "Callable[[Batch], float]" = lambda batch: float(batch["learned"].sum())
    """The divisor of a batch's loss, by default its learned tokens."""
    needs_sampled_logps: bool = True
    """Whether the loss needs the log-probabilities at sampling time."""


def require_rollouts(recipe: PolicyRecipe, reference: "ReferenceKind") -> None:
    """Raises ValueError if the settings of the experiment are inconsistent."""
    loop = recipe.loop
    if loop is None:
        raise ValueError("loop: missing. To evaluate a policy without training, use recipe 'sft' with evaluation.")
    if not isinstance(recipe.data, RolloutsConfig):
        raise ValueError(f"data: expected 'rollouts', got {recipe.data.name!r}.")
    recipe.model.require_kind(DECODER, None)
    if recipe.model.is_frozen():
        raise ValueError(
            "model: quantized weights cannot be trained. Wrap the model in 'lora', or remove quantization."
        )
    if not recipe.questions:
        raise ValueError("answers, sampled: both are missing, so evaluations have no score. Set at least one.")
    if loop.divergence.max_kl and reference == "none":
        raise ValueError("loop.divergence.max_kl: there is no KL without a reference. Set a KL weight, or remove it.")


def rollouts_of(recipe: TrainingRecipe) -> RolloutsConfig:
    """The config of the data."""
    assert isinstance(recipe.data, RolloutsConfig), "the validator has checked it"
    return recipe.data


def train_policy(recipe: PolicyRecipe, run: Run, method: PolicyMethod) -> None:
    """Train to the last step. Collective.

    Scores: train_loss; means over rollouts of reward, reward/NAME for each reward, answer_tokens and ended; the
    recipe's own scores; the scores of `answers` and `sampled`.
    """
    import torch

    from src.data.text import tokenizers
    from src.evaluation import generation, sampled, validation_record
    from src.systems.assistants.rl.experience import Experience, Recorder
    from src.systems.assistants.rl.policy import Generation
    from src.systems.assistants.rl.reference import build_reference, find_reference_server
    from src.systems.assistants.rl.scoring import Judges, Patience
    from src.systems.assistants.rollouts.order import prompt_numbers
    from src.training.checkpointing.checkpoint import CheckpointMetadata
    from src.training.loop import fit
    from src.training.spec import TrainSpec
    from src.training.state import fingerprints

    assert recipe.loop is not None, "the validator has checked it"
    torch.manual_seed(recipe.seed)
    data, device = rollouts_of(recipe), _device()
    with distributed.raise_together():
        model = recipe.build_model(run)
        tokenizer = tokenizers.load(model.name_or_path, recipe.model.new_tokens())
        val = data.build(run.places, tokenizer, "val", recipe.seed)
        train = data.build(run.places, tokenizer, "train", recipe.seed)
        train.prompts.require(recipe.row_keys)
        inputs = fingerprints(run, train, tokenizer, recipe.model.fingerprint(run.places))
        for questions in recipe.questions:
            questions.require(val)
        wait = Patience(run).wait
        setting = RewardSetting(run.places, device, recipe.micro_batch, tokenizer, tokenizers.load, write_with, wait)
        kind, temperature = method.reference, data.sampling.temperature
        reference_server = find_reference_server(method.policy_config, setting, temperature) if kind != "none" else None
        policy, precision = method.policy_of(model), recipe.precision[0]
        judges = Judges(
            recipe.reward_names,
            [reward.scorer(setting) for reward in recipe.rewards],
            [reward.weight for reward in recipe.rewards],
        )

    reference = None if reference_server else build_reference(kind, policy, model, device, temperature, precision)
    ends, never = train.prompts.renderer.answer_ends()

    def numbers(iteration: int) -> list[int]:
        prompts = prompt_numbers(recipe.seed, len(train.prompts), iteration, data.rollouts // data.group_size)
        return [number for number in prompts for _ in range(data.group_size)]

    experience = Experience(
        seed=recipe.seed,
        data=train,
        numbers=numbers,
        batch=data.generation_batch,
        micro_batch=recipe.micro_batch,
        generation=Generation(
            data.max_new_tokens,
            temperature,
            data.sampling.options(),
            ends,
            never,
            continuous=data.sampling.batching == "continuous",
            has_repeated_prompts=data.group_size > 1,
        ),
        decode=lambda ids: str(tokenizer.decode([*ids], skip_special_tokens=True)),
        judges=judges,
        estimate=method.estimate,
        record=Recorder(run.path).record,
        reference=reference,
        server_logps=reference_server.logps if reference_server else None,
        needs_sampled_logps=method.needs_sampled_logps,
    )
    train.fill = experience.roll_out

    def evaluate(accelerator: Any, _: Any = None) -> dict[str, float]:
        generator = generation.AnswerGenerator(model, val, tokenizer, recipe.micro_batch, accelerator.device)
        scores = generation.evaluate(recipe.answers, generator) if recipe.answers else {}
        return scores | (sampled.evaluate(recipe.sampled, generator) if recipe.sampled else {})

    about = CheckpointMetadata(resolved_dict(recipe.model), tokenizer)
    loss = with_facts(method, recipe.reward_names)
    spec = TrainSpec(
        model,
        about,
        train,
        inputs,
        loss,
        evaluate,
        count=method.count,
        experience=experience,
        dropout=False,
        record=partial(validation_record.write, run, parts={"": val}),
    )
    fit(spec, run, recipe.loop, recipe.seed)


def with_facts(
    method: PolicyMethod, reward_names: Sequence[str]
) -> "Callable[[Any, Batch], tuple[torch.Tensor, NamedSums]]":
    """The loss of a method, with the sums of all facts of the rollouts by name."""
    import torch

    names = ["reward", *(f"reward/{name}" for name in reward_names), "answer_tokens", "ended"]
    names += method.fact_names

    def loss(model: Any, batch: "Batch") -> "tuple[torch.Tensor, NamedSums]":
        total_loss, named_sums = method.token_losses(model, batch)
        count = torch.tensor(float(len(batch["facts"])))
        columns = zip(names, batch["facts"].T, strict=True)
        return total_loss, {**{name: (column.sum(), count) for name, column in columns}, **named_sums}

    return loss


def _device() -> "torch.device":
    import torch

    return torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def write_with(tokenizer: Any, template: str) -> Callable[[Rollout], list[int]]:
    """A function that renders rollouts for a reward model: see `systems.assistants.rewards.interface.RewardSetting`.

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
