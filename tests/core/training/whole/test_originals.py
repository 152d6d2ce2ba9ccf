"""Numbers that the originals gave, in tests/golden/originals.json. How they were made, outside of this project:

xc_cache: the blocks of ServiceNow/xc-cache (cross_attn_gptbigcode.py at 61b2b0b, cross_attn_llama.py at 0e90cb8) with
transformers 4.39.3, copied by hand without the branches that these settings do not take, before the layers of a base of
4 layers, width 16, 4 heads (Llama: 2 of keys and values, inner width 24), 23 words, 64 positions; with "final" after
them. Weights are `drawn` here by the same lines, from the names that they have there. Three questions, filled up on the
right, each with two contexts that are encoded apart; six logits at the first and at the last token of each. The first
contexts are of
one length: XC-Cache's rotary positions count the padding between contexts, ours do not.

t5: package t5 0.9.4 with TensorFlow 2.21. Rows of `random_spans_helper`: inputs_length, noise_density,
mean_noise_span_length, 1 extra token a span on both sides; its tokens_length, targets_length. `corruption`:
noise_span_to_unique_sentinel and nonnoise_span_to_unique_sentinel of given masks, the first sentinel being 99. `text`:
t5.data.preprocessors on invented rows in the layout of TensorFlow Datasets, called as get_glue_text_preprocessor does.

nanot5: AdamWScale of nanoT5 (copied_utils.py at 73b2e63, copied by hand too), in float64, and its
cosine schedule: LinearLR from one half in 4 steps, then
CosineAnnealingLR to 1e-5 in 16; learning rate 2e-2, no decay of the first two tensors and 0.1 of the others.

trl: TRL 1.16.0, the losses of DPOTrainer and RewardTrainer for the numbers of `scored` below. pairs: loss_type, beta,
label_smoothing, and the mean. rewards: margin, center_rewards_coefficient, and the mean, for 2 sin(2.3 i), the first
half being chosen.
trl_more: further losses of DPOTrainer ("mean": sigmoid_norm) and, without a reference, of CPOTrainer ("mean": simpo).
trl_kto: `_compute_loss` of its KTOTrainer, run with the logits of the model and the log-probabilities of the reference
of `make_scores`: loss_type, beta, desirable_weight, undesirable_weight, phase of the reference, the loss, and the KL.
trl_random: the same for random logits and rewards, those of `random_scored` below; before each the seed, which gives
the shapes too.
trl_grpo: `_compute_loss` of its GRPOTrainer on four rollouts of up to five tokens, of at most 8:
tests/systems/assistants/rl/test_policy_maths.py.
"""

import json
import zlib
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from data_prep.t5.superglue import FORMS
from src.experiments.config import load
from src.systems.assistants.dpo import Config, Preference
from src.systems.assistants.preferences import kto
from src.systems.assistants.preferences.losses import answer_logps, pair_loss, ranking_loss
from src.systems.crossattn.model import xc_cache_weights
from src.systems.t5.denoising import noise
from src.systems.t5.tasks import task_table
from src.training.config import LoopConfig
from src.training.optim.adamw_scale import AdamWScale
from src.training.optim.schedule import learning_rate
from tests.conftest import ROOT
from tests.core.models.conftest import make, make_base  # noqa: F401  a fixture


@cache
def originals() -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "golden" / "originals.json").read_text(encoding="utf-8"))


def seeded_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Weights that are a function of their name and shape."""
    x = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return torch.tensor(
        x / 3 if len(shape) > 1 else 1 + x / 5 if "norm" in name or "ln_" in name else x / 5, dtype=torch.float32
    )


def make_scores(phase: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of 8 answers of 9 tokens of 7, their ids, and which are learned; the first four are chosen, the others
    rejected."""
    logits = torch.sin(torch.arange(8 * 9 * 7, dtype=torch.float64) * 1.7 + phase) * 3
    mask = torch.zeros(8, 9, dtype=torch.bool)
    for row, (begin, end) in enumerate([(3, 9), (2, 6), (4, 9), (5, 7), (3, 5), (2, 9), (6, 9), (4, 8)]):
        mask[row, begin:end] = True
    return logits.view(8, 9, 7).float(), (torch.arange(8 * 9) * 5 % 7).view(8, 9), mask


def random_scored(seed: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], torch.Tensor]:
    """As `scored`, of two models, for up to six pairs; and a reward of each answer."""
    state = np.random.RandomState(seed)
    rows, length, words = 2 * state.randint(1, 7), state.randint(4, 16), state.randint(3, 40)
    ids = torch.tensor(state.randint(0, words, (rows, length)))
    begins, mask = state.randint(1, length - 1, rows), torch.zeros(rows, length, dtype=torch.bool)
    for row, begin in enumerate(begins):
        mask[row, begin : state.randint(begin + 1, length + 1)] = True
    logits = [torch.tensor(3 * state.standard_normal((rows, length, words)), dtype=torch.float32) for _ in range(2)]
    return [(each, ids, mask) for each in logits], torch.tensor(2 * state.standard_normal(rows))


def questions() -> dict[str, torch.Tensor]:
    state = np.random.RandomState(2)
    ids, contexts = torch.tensor(state.randint(3, 23, (3, 7))), torch.tensor(state.randint(3, 23, (2, 3, 5)))
    mask = torch.arange(7) < torch.tensor([7, 5, 3])[:, None]
    context_mask = torch.arange(5) < torch.tensor([[5, 5, 5], [3, 5, 1]])[..., None]
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "context_ids": (contexts * context_mask).transpose(0, 1),
        "context_mask": context_mask.transpose(0, 1),
    }


@pytest.mark.parametrize("case", range(10))
@torch.no_grad()
def test_logits_are_those_of_xc_cache(make, tmp_path, case: int):  # noqa: F811
    case_data = originals()["xc_cache"][case]
    settings, llama = case_data["settings"], case_data["model_type"] == "llama"
    base = make_base(case_data["model_type"])
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    for name, parameter in base.named_parameters():
        parameter.copy_(seeded_tensor(name, tuple(parameter.shape)))
    assert tied is not llama
    options = {
        "num_layers": settings["n"],
        "stride": settings["stride"],
        "final_layer": settings.get("final", False),
        "skip_connections": settings.get("skip", False),
        "shared_weights": settings.get("shared", False),
        "shared_projections": settings.get("shared_projections", False),
        "hidden_size": settings["hidden_size"],
        "num_heads": settings["heads"],
        **({"norm": "layer", "num_key_value_heads": settings.get("kv", settings["heads"])} if llama else {}),
    }
    model = make(case_data["model_type"], base=base, **options)
    xc_cache_weights.save(model, tmp_path, "base")
    names = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    shared = lambda name: f"cross_attn_layers.3.{name.split('.', 2)[2]}" if settings.get("shared") else name  # noqa: E731
    save_file(
        {name: seeded_tensor(shared(name), shape) for name, shape in names.items()}, tmp_path / "model.safetensors"
    )
    xc_cache_weights.load(model, tmp_path)
    logits = model(**questions())
    first_logits = torch.stack(
        [logits[row, place, :6] for row, length in enumerate((7, 5, 3)) for place in (0, length - 1)]
    )
    torch.testing.assert_close(first_logits, torch.tensor(case_data["logits"]), rtol=2e-5, atol=2e-5)


def test_lengths_are_those_of_random_spans_helper():
    for inputs, density, mean, *expected in originals()["t5"]["random_spans_helper"]:
        assert list(noise.lengths(inputs, density, mean)) == expected, (inputs, density, mean)


def test_rows_are_corrupted_as_t5_does():
    for row in originals()["t5"]["corruption"]:
        ids, mask = np.array(row["ids"]), np.array(row["mask"], dtype=bool)
        inputs, targets = noise.corrupt(ids, mask, noise.run_starts(mask), np.arange(99, 80, -1), eos_id=1)
        assert (inputs.tolist(), targets.tolist()) == ([*row["inputs"], 1], [*row["targets"], 1])


@pytest.mark.parametrize("number", range(len(originals()["t5"]["text"])))
def test_text_is_that_of_t5(number: int):
    example = originals()["t5"]["text"][number]
    task = task_table.find(example["task"])
    form = task.task.form
    records = list(FORMS[form](example["row"], "train", "row")) if form else [example["row"]]
    assert {task.input(record) for record in records} == {example["inputs"]}
    targets = [task.target(record["label"]) for record in records]
    assert targets == (example["targets"] if form == "record" else [example["targets"]])


def test_steps_and_rates_are_those_of_nanot5():
    original = originals()["nanot5"]
    raw = {"steps": 20, "sequences_per_step": 1, "micro_batch": 1, "learning_rate": 2e-2, "eval_every": 1}
    schedule = {"schedule": "cosine", "warmup_rate": 0.2, "warmup_start": 0.5, "final_rate": 1e-5 / 2e-2}
    rate = learning_rate(load(LoopConfig, {**raw, **schedule}, "loop"))
    assert [rate(step) for step in range(20)] == pytest.approx(original["rates"])

    def draw(seed: int) -> torch.Tensor:
        return torch.tensor(np.random.RandomState(seed).standard_normal((3, 2)), dtype=torch.float64)

    weights = [nn.Parameter(size * draw(i)) for i, size in enumerate((0.0, 1e-4, 0.5, 3.0))]
    groups = [{"params": weights[:2], "weight_decay": 0.0}, {"params": weights[2:], "weight_decay": 0.1}]
    optimizer = AdamWScale(groups, 2e-2, (0.9, 0.999), 1e-6)
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for i, weight in enumerate(weights):
            weight.grad = draw(100 + 10 * step + i)
        optimizer.step()
    for weight, expected in zip(weights, original["weights"], strict=True):
        assert weight.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def pairs_loss(scores: Any, before_scores: Any, kind: Any, beta: float, flip_rate: float) -> float:
    """The mean over pairs. scores, before_scores: as `scored`, of the model and of the reference."""
    ours, before = answer_logps(*scores), answer_logps(*before_scores)
    ratios = (ours.logps - before.logps) / (ours.tokens if kind == "ipo" else 1)
    return float(pair_loss(*ratios.chunk(2), kind=kind, beta=beta, flip_rate=flip_rate)) / (len(ratios) // 2)


def rewards_loss(rewards: torch.Tensor, by: Any, margin: float, centring: float) -> float:
    """The mean over pairs, of which the first half of the rewards are the chosen ones'."""
    pairs = len(rewards) // 2
    of, ranks = torch.arange(2 * pairs) % pairs, torch.arange(2 * pairs) // pairs
    return float(ranking_loss(rewards, of, ranks, by=by, margin=margin, centring=centring)) / pairs


@pytest.mark.parametrize("number", range(10))
def test_further_losses_of_pairs_are_those_of_trl(number: int):
    kind, beta, reduction, with_reference, margin, expected = originals()["trl_more"][number]
    preference = load(
        Preference,
        {
            "kind": kind,
            "beta": beta,
            "reduction": reduction,
            "reference": "stored" if with_reference else "none",
            "margin": margin,
        },
        "preference",
    )
    recipe = Config.model_construct(preference=preference)
    logits, ids, mask = make_scores(0.0)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # pairs follow each other
    batch = {
        "input_ids": ids[order],
        "loss_mask": mask[order],
        "attention_mask": torch.ones(8, 9),
        "ranks": torch.tensor([0, 1] * 4),
        "reference_logps": answer_logps(*make_scores(0.4)).logps[order],
    }
    loss, _ = recipe.loss()(lambda **_: SimpleNamespace(logits=logits[order]), batch)
    assert float(loss) / 4 == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("number", range(len(originals()["trl_kto"])))
def test_losses_of_single_replies_are_those_of_trl(number: int):
    kind, beta, desirable, undesirable, phase, expected, kl = originals()["trl_kto"][number]
    settings = {"kind": kind, "beta": beta, "desirable_weight": desirable, "undesirable_weight": undesirable}
    recipe = kto.Config.model_construct(kto=load(kto.Settings, settings, "kto"))
    logits, ids, mask = make_scores(0.0)
    reference_logps, mismatched_logps = (answer_logps(*make_scores(each)).logps for each in (phase, phase + 0.9))
    batch = {
        "input_ids": torch.cat([ids, ids]),
        "loss_mask": torch.cat([mask, mask]),
        "attention_mask": torch.ones(16, 9),
        "ranks": 1 - torch.tensor([1, 0, 1, 1, 0, 0, 1, 0] * 2),
        "sample_of_row": torch.zeros(16, dtype=torch.int64),
        "mismatch_mask": torch.arange(16) >= 8,
        "reference_logps": torch.cat([reference_logps, mismatched_logps]),
    }
    mismatched_logits = make_scores(0.7)[0].requires_grad_()
    answers = iter([mismatched_logits, logits.requires_grad_()] if kind == "kto" else [logits.requires_grad_()])
    loss, named_sums = recipe.loss()(lambda **_: SimpleNamespace(logits=next(answers)), batch)
    assert loss.item() / recipe.count(batch) == pytest.approx(expected, rel=1e-5)
    assert float(named_sums["kl_estimate"][0]) == pytest.approx(kl, rel=1e-5)
    loss.backward()
    assert logits.grad is not None
    assert mismatched_logits.grad is None


def test_losses_of_preferences_are_those_of_trl():
    for *options, expected in originals()["trl"]["pairs"]:
        assert pairs_loss(make_scores(0.0), make_scores(0.4), *options) == pytest.approx(expected, rel=1e-5)
    rewards = torch.sin(torch.arange(8, dtype=torch.float64) * 2.3) * 2
    for *options, expected in originals()["trl"]["rewards"]:
        for by in ("conversations", "pairs"):
            assert rewards_loss(rewards, by, *options) == pytest.approx(expected, rel=1e-5)


def test_losses_of_preferences_are_those_of_trl_on_random_logits():
    for seed, *options, expected in originals()["trl_random"]["pairs"]:
        assert pairs_loss(*random_scored(seed)[0], *options) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for seed, *options, expected in originals()["trl_random"]["rewards"]:
        for by in ("conversations", "pairs"):
            assert rewards_loss(random_scored(seed)[1], by, *options) == pytest.approx(expected, rel=1e-5)
