"""Training on text, for recipes with a loss over the tokens of a sequence or over ranked sequences.

A recipe calls `require_text` when it is loaded, `checks` before a start, and `train_on_text` to run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from src.evaluation.config import Answers, SampledAnswers
from src.evaluation.harness import Harness
from src.experiments.config import Places
from src.experiments.dataset_protocols import Dataset
from src.experiments.kinds import KINDS
from src.experiments.registry import resolved_dict
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once

if TYPE_CHECKING:
    import torch

    from src.training.validation import LossSums, SampleSums

    Count = Callable[[Mapping[str, torch.Tensor]], float]
    MoreScores = Callable[[Any, "Scorer"], dict[str, float]]


def require_text(recipe: TrainingRecipe, model_kind: str, data_kind: str | None = None) -> None:
    """Raise ValueError if the recipe does not support the model or the data.

    model_kind, data_kind: keys of `kinds.KINDS`. data_kind: required `reader` of the data; None: `model_kind`.
    """
    if recipe.loop and recipe.model.is_frozen():
        raise ValueError("model: a quantized model cannot be trained. Wrap it in 'lora', or remove quantization.")
    recipe.model.require_kind(model_kind, None)
    data, expected_reader = recipe.data, data_kind or model_kind
    if data.name == "rollouts":
        raise ValueError("data: 'rollouts' need a policy. Use recipe 'ppo' or 'grpo', or train on the prompts.")
    if data.reader != expected_reader:
        raise ValueError(
            f"data: {data.name!r} is for {KINDS[data.reader]}; this recipe reads data for {KINDS[expected_reader]}. "
            "Use other data, or another recipe."
        )


BITS_PER_BYTE = "val_bits_per_byte"


def score_names(sum_names: Sequence[str] = ()) -> list[str]:
    """Names of the scores of an evaluation. sum_names: see `TextTraining.reported_sums`."""
    return ["val_loss", *(f"val_{name}" for name in sum_names or ["perplexity"])]


def checks(recipe: TrainingRecipe, places: Places, scores: Collection[str]) -> list[Callable[[], object]]:
    """Checks that load no model or data; each raises UserError. scores: names of the scores of an evaluation."""
    model, data, loop = recipe.model, recipe.data, recipe.loop
    harness: Harness | None = getattr(recipe, "harness", None)
    checks: list[Callable[[], object]] = [
        lambda: call_once(model.check, places),
        lambda: call_once(data.check, places),
        lambda: data.check_tokenizer(places, model.find_tokenizer(places)),
        lambda: data.check_length(model.longest_sequence(places)),
        lambda: data.check_model(call_once(model.architecture, places)),
        lambda: recipe.check_precision(places),
        lambda: recipe.check_questions(places),
    ]
    if harness:
        checks.append(lambda: call_once(harness.load, places))
        scores = [*scores, *(f"harness/{task}/" for task in harness.tasks if harness.at == "evaluations")]
    if loop:
        checks += [lambda: data.check_steps(loop.steps), recipe.check_compiled, lambda: loop.check(scores)]
    return checks


@dataclass(frozen=True)
class TextTraining:
    """The recipe-specific parts of a training on text."""

    loss: Callable[..., Any]
    """(model, batch) -> summed loss of an evaluation, and optional named sums."""
    bits_per_byte: bool = False
    """Whether an evaluation reports val_bits_per_byte, if the tokens of the tokenizer add up to the text. For losses
    that are cross entropies of the tokens of a text."""
    accuracy: bool = False
    """Whether an evaluation reports val_accuracy, the share of tokens with the highest logit."""
    reported_sums: Sequence[str] = ()
    """Named sums of `loss`. An evaluation reports their means as val_NAME and, by part of the data, val_NAME/PART,
    instead of the perplexity."""
    count: "Count | None" = None
    """Divisor of the training loss of a batch (on the CPU); None: its number of learned tokens."""
    begin: Callable[[Dataset, Any], Mapping[str, str]] | None = None
    """(train, val) -> further fingerprints of inputs by name, which must not change between starts. Called on every
    rank before the training; raises UserError if the training could not be evaluated."""
    prepare: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    """(model, train, val) -> both data sets with outputs of the initial model added. Collective."""
    more_scores: "MoreScores | None" = None
    """(val, scorer) -> further scores. Collective."""


def train_on_text(recipe: TrainingRecipe, run: Run, how: TextTraining) -> None:
    """Train or evaluate. Collective.

    Scores: train_loss, val_loss (nats per token), val_perplexity, val_bits_per_byte, the val_loss of each part of a
    mixture, and the recipe's own.
    """
    import torch

    from src.data.text import tokenizers
    from src.evaluation import validation_record
    from src.training.checkpointing.checkpoint import CheckpointMetadata
    from src.training.spec import TrainSpec
    from src.training.state import fingerprints
    from src.training.validation import LossSums, SampleSums, count_loss_tokens

    loss, reported_sums, count = how.loss, how.reported_sums, how.count or count_loss_tokens
    torch.manual_seed(recipe.seed)
    with distributed.raise_together():
        model = recipe.build_model(run)
        tokenizer = tokenizers.load(model.name_or_path, recipe.model.new_tokens())
        val = recipe.data.build(run.places, tokenizer, "val", recipe.seed)
        train = recipe.data.build(run.places, tokenizer, "train", recipe.seed) if recipe.loop else val
        inputs = fingerprints(run, train, tokenizer, recipe.model.fingerprint(run.places))
        inputs = {**inputs, **(how.begin(train, val) if how.begin else {})}
    if how.prepare:
        train, val = how.prepare(model, train, val)

    harness: Harness | None = getattr(recipe, "harness", None)
    is_sharded = recipe.loop is not None and bool(run.options.fsdp or run.options.deepspeed)
    score_tasks = harness and harness.scorer(run.places, model, tokenizer, recipe.micro_batch, is_sharded)

    token_bytes = tokenizers.token_bytes(tokenizer) if how.bits_per_byte else None
    val_parts = getattr(val, "parts", {"": val})

    def evaluate(accelerator: Any, samples: list[SampleSums] | None = None) -> dict[str, float]:
        table = None if token_bytes is None else torch.tensor(token_bytes, device=accelerator.device)
        scorer = Scorer(model, tokenizer, loss, recipe.micro_batch, accelerator.device, how.accuracy, count, table)
        summing = replace(scorer, loss=recipe.in_chunks(loss))
        of_tokens = None if reported_sums or how.count else samples  # else the loss is no mean over tokens
        parts = {name: summing.loss_sums(part, of_tokens) for name, part in val_parts.items()}
        whole = LossSums.total(parts.values())
        scores = {"val_loss": whole.loss}
        if not reported_sums:
            scores["val_perplexity"] = float(torch.tensor(whole.loss).exp())
        if whole.text_bytes:
            scores[BITS_PER_BYTE] = whole.bits_per_byte
        if how.accuracy:
            scores["val_accuracy"] = whole.accuracy
        for name, part in {"": whole, **(parts if len(parts) > 1 else {})}.items():
            scores |= {
                f"val_{kind}/{name}".rstrip("/"): part.means[kind] for kind in reported_sums if kind in part.means
            }
            scores |= {f"val_loss/{name}": part.loss} if name else {}
        scores |= how.more_scores(val, scorer) if how.more_scores else {}
        return scores | (score_tasks() if score_tasks and harness and harness.at == "evaluations" else {})

    about = CheckpointMetadata(resolved_dict(recipe.model), tokenizer)
    finish = None if recipe.loop else lambda _: {}
    if score_tasks and harness and harness.at == "end":
        finish = lambda _: score_tasks()  # noqa: E731
    record = partial(validation_record.write, run, parts=val_parts)
    spec = TrainSpec(model, about, train, inputs, recipe.training_loss(), evaluate, finish, count=count, record=record)
    recipe.fit_or_evaluate(spec, run)


@dataclass(frozen=True)
class Scorer:
    """Scores data sets with a model during an evaluation."""

    model: Any
    tokenizer: Any
    loss: Callable[..., Any]
    micro_batch: int
    device: "torch.device"
    measures_accuracy: bool
    count: "Callable[[Mapping[str, torch.Tensor]], float]"
    token_bytes: "torch.Tensor | None" = None
    """See `training.validation.measure`."""

    def loss_sums(self, data: Dataset, samples: "list[SampleSums] | None" = None) -> "LossSums":
        """Sum loss and tokens over all samples. Collective. samples: see `training.validation.measure`."""
        from src.training.validation import measure

        return measure(
            self.model,
            data,
            self.loss,
            self.micro_batch,
            self.device,
            self.measures_accuracy,
            count=self.count,
            token_bytes=self.token_bytes,
            samples=samples,
        )

    def token_losses(self, data: Dataset) -> list[list[float]]:
        """Loss in nats of each scored token of each sample. Control tokens except the end token get probability zero.
        Collective."""
        from src.data.text import tokenizers
        from src.training.validation import token_losses

        control_ids = tokenizers.control_ids(self.tokenizer)
        return token_losses(self.model, data, self.loss, self.micro_batch, self.device, control_ids)

    def sampled_answers(self, config: SampledAnswers, val: Any) -> dict[str, float]:
        """Scores of sampled answers to the first questions of a data set. Collective."""
        from src.evaluation import generation, sampled

        return sampled.evaluate(
            config, generation.AnswerGenerator(self.model, val, self.tokenizer, self.micro_batch, self.device)
        )

    def answers(self, config: Answers, val: Any) -> dict[str, float]:
        """Scores of generated answers to the first questions of a data set, and optionally with shuffled contexts.
        Collective."""
        from src.evaluation import generation

        generator = generation.AnswerGenerator(
            self.model, val, self.tokenizer, self.micro_batch, self.device, config.decoding()
        )
        return generation.evaluate(config, generator, val.with_shuffled_contexts() if config.shuffled_context else None)
