"""However the processes share the model, the numbers are those of whole copies, and a checkpoint goes on where its mode
allows it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from src.errors import ConfigError
from src.runs.checkpoints import checkpoints
from src.training.checkpointing import consolidate
from src.training.checkpointing.checkpoint import OPTIMIZER
from src.training.config import LoopConfig
from src.training.parallel.zero import fill_settings
from tests.conftest import ROOT
from tests.core.training.parallel.modes import EXP, MODES, RESOURCES, SKIPS, Modes, pairs, scores, weights


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero1", "zero2", "zero3", "offload"])
def test_sharding_changes_no_bit(modes: Modes, mode: str):
    assert scores(modes.trained(mode)) == scores(modes.trained("replicated"))
    assert weights(modes.trained(mode)) == weights(modes.trained("replicated"))
    assert scores(modes.trained(mode))[-1]["clip_rate"] > 0
    log = (modes.trained(mode) / "logs" / "train.log").read_text()
    assert ("computes its shard of the weights" in log) == (mode == "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(["fsdp", "zero1", "zero2", "zero3_plain", "offload"], "fsdp", "zero3_plain"))
def test_sharding_changes_no_bit_in_bfloat16(modes: Modes, mode: str):
    assert scores(modes.trained(mode, "half")) == scores(modes.trained("replicated", "half"))
    assert weights(modes.trained(mode, "half")) == weights(modes.trained("replicated", "half"))
    assert scores(modes.trained("replicated", "half")) != scores(modes.trained("replicated"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(["fsdp", "zero2", "zero3"], "zero2"))
def test_losses_of_some_tokens_at_a_time_are_the_same_in_every_mode(modes: Modes, mode: str):
    """The output matrix is whole where the model is shared; DDP hands on a copy of the loss."""
    plain = scores(modes.trained("replicated"))
    assert scores(modes.trained(mode, "chunks")) == scores(modes.trained("replicated", "chunks"))
    assert weights(modes.trained(mode, "chunks")) == weights(modes.trained("replicated", "chunks"))
    for actual, reference in zip(scores(modes.trained(mode, "chunks")), plain, strict=True):
        assert actual["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero1", "zero2", "zero3"])
def test_sharding_changes_no_bit_of_groups_of_parameters(modes: Modes, mode: str):
    reference = scores(modes.trained("replicated", "grouped"))
    assert scores(modes.trained(mode, "grouped")) == reference
    assert weights(modes.trained(mode, "grouped")) == weights(modes.trained("replicated", "grouped"))
    assert reference[-1]["learning_rate/group0_embeddings"] == pytest.approx(
        reference[-1]["learning_rate"] * 3 * 0.8**4
    )
    modes.cut_back(mode, "grouped")
    assert modes.start(mode, "grouped") == ""
    assert weights(modes.run("grouped")) == weights(modes.trained(mode, "grouped"))
    assert scores(modes.run("grouped")) == reference


@pytest.mark.slow
def test_muon_resumes_with_the_same_bits_on_two_processes(modes: Modes):
    reference = modes.trained("replicated", "muon")
    modes.cut_back("replicated", "muon")
    assert modes.start("replicated", "muon") == ""
    assert weights(modes.run("muon")) == weights(reference)
    assert scores(modes.run("muon")) == scores(reference)
    one = scores(modes.trained("replicated", "muon", 1))
    assert one[-1]["train_loss"] == pytest.approx(scores(reference)[-1]["train_loss"], rel=1e-2)


@pytest.mark.slow
def test_deepspeed_linear_layers_round_differently_in_bfloat16(modes: Modes):
    """Stage 3's own, which hold no gathered weights until the backward pass, add the bias in float32."""
    for actual, reference in zip(
        scores(modes.trained("zero3", "half")), scores(modes.trained("replicated", "half")), strict=True
    ):
        assert actual["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "exact"), [("fsdp", True), ("zero1", True), ("zero2", False)])
def test_accumulation_changes_rounding_where_each_pass_is_summed(modes: Modes, mode: str, exact: bool):
    actual, reference = scores(modes.trained(mode, "twice")), scores(modes.trained("replicated", "twice"))
    if exact:
        assert actual == reference
    for one, other in zip(actual, reference, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-6)


@pytest.mark.slow
def test_gradients_sharded_after_each_pass(modes: Modes):
    """Of one process that is the same sum; of two, and of two parts of four, it rounds otherwise."""
    reference = scores(modes.trained("fsdp", "twice", 1))
    assert modes.start("fsdp", "twice", 1, ["--fsdp_sharded_gradients"]) == ""
    assert scores(modes.run("twice")) == reference
    assert weights(modes.run("twice")) == weights(modes.trained("fsdp", "twice", 1))
    for processes, more in ((2, []), (4, ["--fsdp_replicas", "2"])):
        shutil.rmtree(modes.run("twice"))
        assert modes.start("fsdp", "twice", processes, ["--fsdp_sharded_gradients", *more]) == ""
        for actual, other in zip(scores(modes.run("twice")), reference, strict=True):
            for name in ("train_loss", "grad_norm", "val_loss"):
                assert actual[name] == pytest.approx(other[name], rel=1e-5)


def first_steps(modes: Modes, mode: str, group: str, processes: int) -> Path:
    """The run of two steps on sequences of unequal lengths, moved aside, with a checkpoint of each."""
    copy_of_run = modes.folder / f"first-{mode}-{group}-{processes}"
    if not copy_of_run.exists():
        base = modes.trained("replicated", "base", processes=1)
        shutil.copytree(base, modes.run("base"), dirs_exist_ok=True)
        shutil.rmtree(modes.run(group), ignore_errors=True)
        assert modes.start(mode, group, processes, ["--log_every", "1"]) == ""
        shutil.move(modes.run(group), copy_of_run)
    return copy_of_run


def gradients(run: Path) -> dict[str, torch.Tensor]:
    """Of the first step, by parameter: Adam's first moment is then a tenth of it."""
    checkpoint = checkpoints.folder(run, 1)
    if not (checkpoint / OPTIMIZER).exists():
        assert consolidate.main([str(checkpoint)]) == 0
    actual = load_file(checkpoint / OPTIMIZER)
    return {
        name: tensor.double() / (1 - LOOP.adam_beta1) for name, tensor in actual.items() if name.endswith("::exp_avg")
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(MODES, "replicated", "fsdp", "zero1"))
def test_gradients_equal_those_of_the_global_batch(modes: Modes, mode: str):
    """Three micro-batches of 2 on 2 ranks, against one process that reads all 6 sequences in one pass.

    A mean in every engine (B17 of BigScience's metadata project: a sum where DeepSpeed was not used).
    """
    whole = gradients(first_steps(modes, "replicated", "uneven at once", 1))
    shared = gradients(first_steps(modes, mode, "uneven", 2))
    assert shared.keys() == whole.keys()
    assert len(whole) > 10
    for name, reference in whole.items():
        assert reference.abs().max() > 0, f"{name} has no gradient to compare"
        assert (shared[name] - reference).abs().max() <= 1e-6 * reference.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(MODES, "replicated", "zero3"))
def test_two_ranks_and_two_passes_make_the_step_of_one_process(modes: Modes, mode: str):
    """Of three micro-batches, two ranks make two passes each, one of which counts nothing; one process makes three."""
    alone, shared = (scores(first_steps(modes, *which)) for which in (("replicated", "uneven", 1), (mode, "uneven", 2)))
    assert [row["tokens"] for row in alone] == [row["tokens"] for row in shared]
    assert alone[0]["tokens"] % 6, "all answers of the step are of one length"
    for name in ("train_loss", "grad_norm"):
        assert shared[0][name] == pytest.approx(alone[0][name], rel=1e-6)
        assert shared[1][name] == pytest.approx(alone[1][name], rel=1e-4), (
            "after one step of Adam, which makes much of rounding"
        )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero3"])
def test_processes_that_read_fewer_contexts_wait_for_nobody_in_vain(modes: Modes, mode: str):
    rows = {}
    for one in ("replicated", mode):
        base = modes.trained("replicated", "base", processes=1)
        for group in ("base", "passes"):
            shutil.rmtree(modes.run(group), ignore_errors=True)
        shutil.copytree(base, modes.run("base"))
        assert modes.start(one, "passes") == ""
        rows[one] = scores(modes.run("passes"))
    assert rows[mode] == rows["replicated"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(["fsdp", "zero1", "zero2", "zero3", "offload"], "zero2", "offload"))
def test_a_batch_that_is_left_out_leaves_the_same_bits(modes: Modes, mode: str):
    reference = scores(modes.trained("replicated", "skips"))
    assert 0 < sum(row.get("skipped_steps", 0) for row in reference) < SKIPS["loop"]["steps"]
    assert scores(modes.trained(mode, "skips")) == reference
    assert weights(modes.trained(mode, "skips")) == weights(modes.trained("replicated", "skips"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero3", "offload"])
def test_a_resumed_training_has_the_same_bits(modes: Modes, mode: str):
    modes.cut_back(mode)
    assert modes.start(mode) == ""
    assert "continues from step 3" in (modes.run() / "logs" / "train.log").read_text()
    assert weights(modes.run()) == weights(modes.trained(mode))
    assert scores(modes.run()) == scores(modes.trained(mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero1", "zero2", "zero3"])
def test_a_resumed_model_on_frozen_weights_has_the_same_bits(modes: Modes, mode: str):
    """They are the parent's, and in no checkpoint of it."""
    whole = first_steps(modes, mode, "uneven", 2)
    shutil.copytree(modes.trained("replicated", "base", processes=1), modes.run("base"), dirs_exist_ok=True)
    shutil.copytree(whole, modes.run("uneven"))
    modes.drop_last("uneven")
    assert modes.start(mode, "uneven", 2, ["--log_every", "1"]) == ""
    assert "continues from step 1" in (modes.run("uneven") / "logs" / "train.log").read_text()
    assert weights(modes.run("uneven")) == weights(whole)
    assert scores(modes.run("uneven")) == scores(whole)


@pytest.mark.slow
def test_replicas_of_a_sharded_model_resume(modes: Modes):
    """Four processes in two parts, which two processes continue: the sums over processes have another order, and
    nothing else differs."""
    reference = scores(modes.trained("replicated", "twice"))
    assert modes.start("fsdp", "twice", 4, ["--fsdp_replicas", "2"]) == ""
    copy_of_run = scores(modes.run("twice"))
    for actual, other in zip(copy_of_run, reference, strict=True):
        for name in ("train_loss", "grad_norm", "val_loss"):
            assert actual[name] == pytest.approx(other[name], rel=1e-5)
    modes.drop_last("twice")
    assert modes.start("fsdp", "twice", 4, ["--fsdp_replicas", "2"]) == ""
    assert scores(modes.run("twice")) == copy_of_run
    shutil.rmtree(modes.run("twice"))


@pytest.mark.slow
def test_one_process_continues_a_run_of_two(modes: Modes):
    modes.cut_back("fsdp")
    assert modes.start("replicated", processes=1) == ""
    actual, reference = scores(modes.run())[-1], scores(modes.trained("fsdp"))[-1]
    assert actual["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "mode", "processes"),
    [
        ("zero2", "replicated", 1),
        ("zero2", "zero1", 2),
        ("zero2", "fsdp", 2),
        ("fsdp", "replicated", 2),
        ("fsdp", "zero3", 2),
    ],
)
def test_shards_resume_in_any_mode(modes: Modes, before: str, mode: str, processes: int):
    modes.cut_back(before)
    assert modes.start(mode, processes=processes) == ""
    actual, reference = scores(modes.run())[-1], scores(modes.trained(before))[-1]
    assert actual["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-6)


LOOP = LoopConfig(**EXP["loop"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({}, "zero_optimization.stage: expected 1, 2 or 3, got null"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage: expected 1, 2 or 3, got 0"),
        ({"train_batch_size": 16}, "train_batch_size: 16, but the experiment has 8"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu: 1, but the experiment has 4"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 4, but the experiment has 2"),
        (
            {"gradient_clipping": 1.0},
            r"gradient_clipping: 1.0, but the experiment has 0.5. Remove it, or use \"auto\"",
        ),
        ({"bf16": {"enabled": True}}, "bf16.enabled: true, but the experiment has false"),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "fp16.enabled: true, but the experiment has false"),
        (
            {"optimizer": {"params": {"lr": 3}}},
            r'optimizer: {"params": {"lr": 3}}, but the experiment has AdamW: learning rate 0.01,',
        ),
        (
            {"scheduler": {"type": "OneCycle"}},
            r"scheduler: {.*OneCycle.*, but the experiment has 'linear' with loop.warmup_rate 0\.",
        ),
        (
            {"zero_allow_untested_optimizer": False},
            "zero_allow_untested_optimizer: false, but the experiment has true",
        ),
        (
            {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm: false, but the experiment has true",
        ),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer: true, but the experiment has false"),
        (
            {"communication_data_type": "fp16"},
            'communication_data_type: "fp16" changes results',
        ),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning: {.*true} changes results"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights: true changes results",
        ),
    ],
)
def test_contradicting_settings_are_refused(tmp_path: Path, content: Any, message: str):
    path = tmp_path / "zero.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 1}, **content} if content and isinstance(content, dict) else content)
    )
    with pytest.raises(ConfigError, match=message):
        fill_settings(path, LOOP)


@pytest.mark.parametrize("name", RESOURCES)
def test_the_files_that_are_given_fit_any_experiment(name: str):
    actual = fill_settings(ROOT / "resources" / f"{name}.json", LOOP)
    assert actual["zero_optimization"]["stage"] == int(name.removeprefix("ds_config_zero")[0])
    assert actual["train_batch_size"] == 8
    assert "auto" not in json.dumps(actual)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESOURCES)
def test_the_files_that_are_given_train(modes: Modes, name: str):
    assert weights(modes.trained(name)) == weights(modes.trained("replicated"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_moments_of_every_group_are_found_from_the_first_step_on(modes: Modes, mode: str):
    """Statistics ask for them; DeepSpeed itself looks for them too early."""
    assert modes.start(mode, more=["--statistics_every", "2"]) == ""
    assert weights(modes.run()) == weights(modes.trained("replicated"))


def test_auto_is_replaced_and_other_settings_stay(tmp_path: Path):
    path = tmp_path / "zero.json"
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7}
    path.write_text(
        json.dumps(
            {
                "zero_optimization": zero,
                "train_batch_size": "auto",
                "bf16": {"enabled": "auto"},
                "wall_clock_breakdown": True,
            }
        )
    )
    actual = fill_settings(path, LOOP)
    assert actual["zero_optimization"] == {"stage": 3, "stage3_prefetch_bucket_size": 7}
    assert (
        actual["train_batch_size"],
        actual["train_micro_batch_size_per_gpu"],
        actual["gradient_accumulation_steps"],
    ) == (8, 4, 2)
    assert actual["wall_clock_breakdown"] is True
    assert "bf16" not in actual
