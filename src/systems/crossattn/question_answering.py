"""Train and evaluate models that answer questions, for the recipes `crossattn`, `prompted` and `fid`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from src.evaluation.config import Answers, Inference
from src.experiments.config import Places
from src.experiments.interfaces import NewTokens
from src.experiments.registry import resolved_dict
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once
from src.systems.crossattn.data.subsets import RowsConfig

VAL_LOSSES = ("val_loss", "val_loss_shuffled_context")


def require_questions(recipe: TrainingRecipe, model_kind: str, dataset_name: str) -> None:
    """Raises ValueError if the model or the data are not for this recipe."""
    recipe.model.require_kind(model_kind, None)
    if recipe.data.name != dataset_name:
        raise ValueError(f"data: expected {dataset_name!r}, got {recipe.data.name!r}.")


def checks(
    recipe: TrainingRecipe, places: Places, model_kind: str, answers: Answers | None, inference: Inference | None
) -> list[Callable[[], object]]:
    """Checks that need no model or data in memory; each raises a UserError."""
    from src.systems.crossattn.data import row_index

    model, data, loop = recipe.model, recipe.data, recipe.loop
    assert isinstance(data, RowsConfig), "the validator has checked its name"
    new_tokens = NewTokens.longest({"answers": answers, "inference": inference})
    checks: list[Callable[[], object]] = [
        lambda: call_once(model.check, places),
        lambda: model.check_kind(model_kind, places),
        recipe.check_trainable,
        lambda: recipe.check_questions(places),
        lambda: recipe.check_precision(places),
        lambda: call_once(data.check, places),
        lambda: call_once(data.check_shuffling, places),
        lambda: call_once(data.check_room, model, places),
        lambda: data.check_length(model.longest_sequence(places), new_tokens),
        lambda: inference and row_index.check_inference(places, data, inference),
    ]
    if loop:
        score_names = {*VAL_LOSSES, *(answers.score_names() if answers else [])}
        checks += [recipe.check_compiled, lambda: loop.check(score_names)]
    return checks


def train_on_questions(
    recipe: TrainingRecipe,
    run: Run,
    loss: Callable[..., Any],
    answers: Answers | None,
    inference: Inference | None,
) -> None:
    """Train, or evaluate without training; then answer the questions of `inference`. Collective.

    Scores: train_loss, val_loss, val_loss_shuffled_context if there are contexts (nats per token), and the metrics of
    `answers`; at the end the bytes cached per context token, if known, and the metrics of `inference`.

    loss: (model, batch) -> summed loss of an evaluation.
    """
    import torch

    from src.data.text import tokenizers
    from src.evaluation import generation, validation_record
    from src.evaluation.inference import make, prepare
    from src.systems.crossattn.data import row_index
    from src.training.checkpointing.checkpoint import CheckpointMetadata
    from src.training.spec import TrainSpec
    from src.training.state import fingerprints
    from src.training.validation import SampleSums, measure

    data, batch_size = recipe.data, recipe.micro_batch
    assert isinstance(data, RowsConfig), "the validator has checked its name"
    torch.manual_seed(recipe.seed)
    with distributed.raise_together():
        model = recipe.build_model(run)
        tokenizer = tokenizers.load(model.name_or_path, recipe.model.new_tokens())
        val = data.build(run.places, tokenizer, "val", recipe.seed)
        shuffled = val.with_shuffled_contexts() if val.reads_contexts else None
        if answers:
            answers.require(val)
        job = None
        if inference:
            rows = row_index.read(run.places, data, inference.index_file) if inference.index_file else None
            job = prepare(inference, data.build(run.places, tokenizer, inference.split, recipe.seed), rows)
        train = data.build(run.places, tokenizer, "train", recipe.seed) if recipe.loop else val
        inputs = fingerprints(run, train, tokenizer, recipe.model.fingerprint(run.places))

    def evaluate(accelerator: Any, samples: list[SampleSums] | None = None) -> dict[str, float]:
        scores = {
            name: measure(model, split, recipe.in_chunks(loss), batch_size, accelerator.device, samples=into).loss
            for name, split, into in zip(VAL_LOSSES, (val, shuffled), (samples, None), strict=True)
            if split is not None
        }
        if answers:
            generator = generation.AnswerGenerator(
                model, val, tokenizer, batch_size, accelerator.device, answers.decoding()
            )
            scores |= generation.evaluate(answers, generator, shuffled)
        return scores

    def finish(accelerator: Any) -> dict[str, float]:
        value_bytes = next(model.parameters()).dtype.itemsize
        cached = recipe.model.cache_bytes(run.places, value_bytes) if shuffled is not None else None
        scores: dict[str, float] = dict(cached or {})
        if val.stored_bytes_per_token is not None:
            scores["cache_bytes_per_context_token"] = val.stored_bytes_per_token
        if job:
            generator = generation.AnswerGenerator(
                model, job.dataset, tokenizer, batch_size, accelerator.device, job.config.decoding()
            )
            scores |= make(run, job, generator, inputs)
        return scores

    about = CheckpointMetadata(resolved_dict(recipe.model), tokenizer)
    record = partial(validation_record.write, run, parts={"": val})
    spec = TrainSpec(model, about, train, inputs, recipe.training_loss(), evaluate, finish, record=record)
    recipe.fit_or_evaluate(spec, run)
