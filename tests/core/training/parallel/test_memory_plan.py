"""What is planned on paper beside what a real step of tiny models takes on this machine, by PyTorch's own record of
allocations."""

import gc
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from src.data.longest_batch import longest_batch
from src.experiments.config import Places
from src.experiments.grid import override, ref, seeds
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import MODELS, bind
from src.files import write_json
from src.runs.context import Options
from src.training.monitoring import flops
from src.training.optim import parameter_groups
from src.training.parallel import choice, memory, memory_plan
from src.training.parallel.live_storages import FakeStorages
from src.training.parallel.memory_plan import pass_peak, vocabulary
from tests import toy

TOLERANCE = 0.10
VOCABULARY = [f"<{i}>" for i in range(800)]
LOOP = {"steps": 2, "sequences_per_step": 8, "micro_batch": 4, "learning_rate": 1e-2, "eval_every": 2}
GPT = {
    "name": "gpt_bigcode",
    "tokenizer": "toy_tokenizer",
    "hidden_size": 96,
    "num_layers": 4,
    "num_heads": 4,
    "max_positions": 160,
}
LM = {
    **toy.BASE,
    "model": {**GPT, "extra_tokens": VOCABULARY},
    "data": {**toy.BASE["data"], "sequence_tokens": 160},
    "loop": LOOP,
}
T5 = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {
        "name": "t5",
        "random": {
            "tokenizer": "toy_tokenizer",
            "vocabulary_multiple": 640,
            "hidden_size": 96,
            "feed_forward_size": 256,
            "num_layers": 3,
            "num_heads": 4,
        },
    },
    "data": {"name": "span_corruption", "corpus": "toy_text", "input_tokens": 128},
    "loop": {**LOOP, "optimizer": "adamw_scale"},
}
CROSSATTN = {
    **toy.CROSSATTN,
    "model": {"name": "cross_attention", "num_layers": 2, "stride": 2, "base": {**GPT}},
    "data": {**toy.CROSSATTN["data"], "context_tokens": 160, "sequence_tokens": 96, "loss_on": "all"},
    "loop": LOOP,
}
INTERLEAVED = {
    "recipe": "interleaved",
    "seed": 0,
    "model": {
        "name": "vision_language",
        "tokenizer": "toy_tokenizer",
        "vision": {"frame_size": 32, "patch_size": 4, "hidden_size": 64, "num_layers": 2, "num_heads": 4},
        "scale_factor": 4,
        "hidden_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "max_positions": 96,
    },
    "data": {
        "name": "streamed",
        "sources": {"pages": {"path": "pages"}},
        "images": {"frame_size": 32, "image_tokens": 4, "max_size": 32},
        "sequence_tokens": 96,
        "max_frames": 6,
    },
    "loop": LOOP,
}
FID = {
    **CROSSATTN,
    "recipe": "fid",
    "model": {"name": "fusion_in_decoder", "base": T5["model"]},
    "data": {
        "name": "fid_qa",
        "corpus": "toy_qa",
        "contexts": "all",
        "num_passages": 3,
        "passage_tokens": 32,
        "answer_tokens": 16,
    },
    "answers": None,
}
LORA = override(
    LM, {"model": {"name": "lora", "rank": 4, "alpha": 4.0, "target_modules": ["c_attn", "c_fc"], "base": LM["model"]}}
)
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "lm": (LM, None),
    "lm bfloat16": (override(LM, {"loop.precision": "bfloat16"}), None),
    "lm recomputed": (LM, "full"),
    "lm recomputed but for products": (LM, "selective"),
    "lm in chunks": (override(LM, {"loop.cross_entropy_chunk_tokens": 64}), None),
    "t5 bfloat16": (override(T5, {"loop.precision": "bfloat16"}), None),
    "crossattn bfloat16": (override(CROSSATTN, {"loop.precision": "bfloat16"}), None),
    "fid": (FID, None),
    "lora": (LORA, None),
    "documents that are kept apart": (
        override(LM, {"data.separate_documents": True, "loop.optimizer": "adafactor"}),
        None,
    ),
    "images": (INTERLEAVED, None),
}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(toy.write_data(tmp_path / "data"), tmp_path / "runs")


def measure_peak(model: nn.Module, loss: Any, batch: Mapping[str, Tensor], recipe: Any, recompute: str | None) -> int:
    """Bytes of weights, and the most that two steps have taken besides."""
    accelerator = choice.build_accelerator(recipe.loop, Options())
    if recompute:
        memory.checkpoint_layers(model, recompute)
    engine = choice.build_engine(accelerator, model, recipe.loop, Options())
    model.train()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(recipe.loop.steps):
            for last in (False, True):
                with engine.accumulation_context(last):
                    with accelerator.autocast():
                        result = loss(engine.model, batch)
                    loss_sum = result[0] if isinstance(result, tuple) else result
                    engine.backward(loss_sum * 1.0, last)
                del result, loss_sum
            engine.clip(engine.norm(), 1.0)
            engine.step()
    events = [(e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for _, number in sorted(events, key=lambda event: event[0]):
        now += number
        most = max(most, now)
    return most + sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in ("lm", "lm recomputed") else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_plan_equals_the_memory_of_a_step(case: str, places: Places):
    exp, recompute = CASES[case]
    recipe: Any = load_experiment(exp, case)
    loss = recipe.training_loss()
    torch.manual_seed(0)
    model = recipe.model.build(places)
    batch = longest_batch(recipe.data, recipe.micro_batch, model.config)
    state = memory_plan.optimizer_bytes(parameter_groups.split(model, recipe.loop))
    peak = measure_peak(model, loss, batch, recipe, recompute)
    with torch.device("meta"):
        on_paper = recipe.model.build(replace(places, on_paper=True))
    if recompute:
        memory.checkpoint_layers(on_paper, recompute)
    storages = FakeStorages(vocabulary(on_paper), gpu=False)
    parts = pass_peak(storages, on_paper, loss, batch, recipe.loop.precision, passes=2)
    assert sum(parts.values()) + state == pytest.approx(peak, rel=TOLERANCE), parts
    assert sum(parts.values()) + state > 3 * parts["weights"], (
        "little but weights would hide what is wrong with the rest"
    )


@pytest.fixture
def run_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function from groups and arguments to the exit code, the lines of the table and the errors of --dry-run
    --memory."""
    toy.write_data(tmp_path / "data")

    def run(groups: dict[str, Any], *arguments: str) -> tuple[int, list[dict[str, str]], str]:
        code = toy.main(["-e", *groups, "--dry-run", "--memory", *arguments], groups, tmp_path)
        out, err = capsys.readouterr()
        lines = [re.split(r"  +", line) for line in out.splitlines()]
        head = next((line for line in lines if line[0] == "experiment"), [])
        return (
            code,
            [dict(zip(head, line, strict=True)) for line in lines[lines.index(head) + 1 :]] if head else [],
            err,
        )

    return run


def test_equal_experiments_have_one_line_and_need_no_parent(run_plan: Any, tmp_path: Path):
    groups = {"base": [override(toy.BASE, {"seed": seed}) for seed in (0, 1, 2)], "crossattn": [toy.CROSSATTN]}
    code, rows, err = run_plan(groups)
    assert (code, err) == (0, "")
    assert [row["experiment"] for row in rows] == ["base[0] and 2 more", "crossattn[0]"]
    places = Places(tmp_path / "data", tmp_path / "runs")
    model = load_experiment(toy.BASE, "").model.build(places)  # type: ignore[attr-defined]  a recipe with a model
    count = f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:,.1f}"
    assert (rows[0]["parameters"], rows[0]["trained"]) == (count, count)


def test_a_pretrained_model_needs_only_its_config(run_plan: Any, tmp_path: Path):
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 2048,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
    }
    (tmp_path / "llama").mkdir()
    write_json(tmp_path / "llama" / "config.json", {**config, "intermediate_size": 2048})
    base = {"name": "hf", "path": str(tmp_path / "llama"), "dtype": "bfloat16"}
    code, rows, err = run_plan({"pretrained": [override(toy.BASE, {"model": base})]})
    assert code == 1
    assert "no weights." in err, "the plan hides nothing of what is missing"
    assert rows[0]["parameters"] == f"{(2 * 64 * 2048 + 4 * 2048**2 + 3 * 2048**2 + 3 * 2048) / 1e6:,.1f}"


def test_a_gpu_computes_norms_in_float32_under_autocast_and_recomputes_them_so(tmp_path: Path):
    """bfloat16 weights, whose norms would be computed in bfloat16 on a CPU."""
    sizes = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 64, "n_layer": 8, "n_head": 2, "n_positions": 64}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    (tmp_path / "gpt2").mkdir()
    write_json(tmp_path / "gpt2" / "config.json", sizes)
    exp = override(
        LM, {"model": {"name": "hf", "path": str(tmp_path / "gpt2"), "dtype": "bfloat16"}, "data.sequence_tokens": 64}
    )
    recipe: Any = load_experiment(override(exp, {"loop.precision": "bfloat16"}), "")
    places, activation_bytes = Places(tmp_path, tmp_path / "runs", on_paper=True), dict[tuple[bool, bool], int]()
    for gpu, recompute in ((True, False), (True, True), (False, False)):
        with torch.device("meta"):
            model = recipe.model.build(places)
        if recompute:
            memory.checkpoint_layers(model)
        batch = longest_batch(recipe.data, recipe.micro_batch, model.config)
        parts = pass_peak(FakeStorages(gpu=gpu), model, recipe.training_loss(), batch, "bfloat16", passes=1)
        activation_bytes[gpu, recompute] = parts["activations"]
    assert activation_bytes[True, False] > activation_bytes[False, False]
    assert activation_bytes[True, True] < activation_bytes[True, False] / 2


def test_time_is_work_by_the_peak(run_plan: Any, tmp_path: Path):
    def plan_rates(*arguments: str) -> tuple[float, float]:
        exp = override(LM, {"loop.precision": "bfloat16", "loop.steps": 10**9})
        _, rows, _ = run_plan({"lm": [exp]}, *arguments)
        return float(rows[0]["tokens/s"].replace(",", "")), float(rows[0]["hours"].replace(",", ""))

    rate, hours = plan_rates()
    model = bind(MODELS, LM["model"]).build(Places(tmp_path / "data", tmp_path / "runs"))
    work = flops.batch_flops(model)
    assert work
    assert hours == pytest.approx(10**9 * work({"input_ids": torch.zeros(8, 160)}) / (0.4 * 989e12) / 3600, rel=0.01)
    assert rate * hours * 3600 == pytest.approx(10**9 * 8 * 160, rel=0.01)
    assert plan_rates("--gpus", "2") == pytest.approx((2 * rate, hours / 2), rel=0.01)
    assert plan_rates("--gpu", "A100")[1] == pytest.approx(hours * 989 / 312, rel=0.01)


def test_costs_of_a_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Equal to a finished run in checkpoints, and to steps, operations and hours of the plan of one run."""
    toy.write_data(tmp_path / "data")
    loop = {**toy.BASE["loop"], "steps": 6, "eval_every": 2, "precision": "bfloat16", "extra_eval_steps": [5]}
    exp = override(LM, {"loop": loop, "data": toy.BASE["data"]})
    groups = {"seeds": seeds([exp], 3), "long": [override(exp, {"loop.steps": 60})]}

    def cost(*arguments: str) -> dict[str, Any]:
        assert toy.main(["-e", *groups, "--dry-run", "--cost", "--json", *arguments], groups, tmp_path) == 0
        return json.loads(capsys.readouterr().out)

    recipe: Any = load_experiment(exp, "")
    plan = recipe.plan_memory(Places(tmp_path / "data", tmp_path / "runs"), gpus=2, gpu="A100", mfu=0.25)
    content = cost("--gpus", "2", "--gpu", "A100", "--mfu", "0.25", "--keep_last", "2")
    assert content["memory"] == []
    of_seeds, of_long, total = content["cost"]
    assert [row["runs"] for row in content["cost"]] == [3, 1, 4]
    tokens = 6 * loop["sequences_per_step"] * exp["data"]["sequence_tokens"]
    assert (of_seeds["tokens"], of_long["tokens"]) == (3 * tokens, 10 * tokens)
    assert of_seeds["operations"] == 3 * 6 * plan.operations
    assert of_seeds["gpu_hours"] == pytest.approx(3 * 2 * plan.hours)
    assert total == {"where": "total"} | {
        name: pytest.approx(of_seeds[name] + of_long[name]) for name in total if name != "where"
    }
    with_ema = override(exp, {"loop.ema": 0.9})
    groups |= {"ema": [with_ema], "decay": [override(exp, {"model": ref(exp, step=4)})]}
    of_four, _, of_averages, of_decay, _ = cost("--keep_last", "2", "--keep_every", "4")["cost"]
    assert of_averages["checkpoint_bytes"] == pytest.approx(of_four["checkpoint_bytes"] / 3 * 4 / 3, rel=0.05)
    assert (of_decay["tokens"], of_decay["operations"]) == (tokens / 3, 2 * plan.operations)
    del groups["ema"], groups["decay"]
    one = groups["seeds"][0]
    assert toy.main(["-e", "one", "--keep_last", "2"], {"one": [one]}, tmp_path) == 0
    folders = list((tmp_path / "runs" / exp_id(one) / "checkpoints").glob("step-*"))
    size = sum(
        (folder / name).stat().st_size for folder in folders for name in ("model.safetensors", "optimizer.safetensors")
    ) / len(folders)
    assert of_seeds["checkpoint_bytes"] == pytest.approx(3 * 3 * size, rel=0.05)  # 2 newest and the best one
    assert len(folders) in (2, 3)
    assert cost("--save_every", "1", "--keep_every", "3", "--gpu", "A100")["cost"][0][
        "checkpoint_bytes"
    ] == pytest.approx(3 * 4 * size, rel=0.05)  # 3, 5, 6 and the best one

    perf = tmp_path / "runs" / exp_id(one) / "perf.jsonl"
    capsys.readouterr()
    for word in ("1.5", "0", "-1", exp_id(one)[:8], "zz"):
        assert toy.main(["-e", "seeds", "--dry-run", "--cost", f"--mfu={word}"], groups, tmp_path) == 1
        assert f"--mfu {word}:" in capsys.readouterr().err
    perf.write_text(perf.read_text() + "".join(f'{{"step": 9, "mfu": {value}}}\n' for value in (0.1, 0.2, 0.5)))
    half = cost("--mfu", exp_id(one)[:8])["cost"][0]["gpu_hours"]
    assert half == pytest.approx(2 * cost("--mfu", "0.4")["cost"][0]["gpu_hours"])


OPERATIONS = {
    "lm": (LM, 1e-3),
    "adapters": (LORA, 0.03),  # the formula also counts gradients of the lowest layer's inputs
    "t5": (T5, 1e-3),
    "fid": (FID, 1e-3),
    "images": (INTERLEAVED, 1e-3),
    "crossattn": (CROSSATTN, 1e-3),
    "crossattn, cached contexts": (override(CROSSATTN, {"model.cache_contexts": True}), 1e-3),
    "crossattn, encoded contexts": (override(CROSSATTN, {"data.encoded_contexts": True}), 1e-3),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_operations_equal_those_of_a_step(case: str, places: Places):
    exp, tolerance = OPERATIONS[case]
    recipe: Any = load_experiment(exp, case)
    model = recipe.model.build(places)
    getattr(model, "base", model).set_attn_implementation("eager")  # PyTorch does not count the fused backward on CPUs
    batch = longest_batch(recipe.data, recipe.micro_batch, model.config)
    batch = {name: torch.rand(value.shape) if value.is_meta else value for name, value in batch.items()}
    if "cache_contexts" in exp["model"]:
        recipe.training_loss()(model, batch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = recipe.training_loss()(model.train(), batch)
        (result[0] if isinstance(result, tuple) else result).backward()
    micro_batches = LOOP["sequences_per_step"] // LOOP["micro_batch"]
    plan = recipe.plan_memory(places, gpus=2, gpu="H100")
    assert plan.operations == pytest.approx(micro_batches * counter.get_total_flops(), rel=tolerance)


def test_without_a_peak_only_the_rate_is_unknown(run_plan: Any):
    in_float32, in_bfloat16 = (override(LM, {"loop.precision": kind}) for kind in ("float32", "bfloat16"))
    _, rows, _ = run_plan({"lm": [in_float32, in_bfloat16]})
    assert [(row["tokens/s"] == "?", row["hours"] == "?") for row in rows] == [(True, True), (False, False)]
    assert rows[0]["TFLOP"] == rows[1]["TFLOP"] != "?"


@pytest.mark.slow
def test_a_shared_model_takes_less(tmp_path: Path):
    recipe: Any = load_experiment(override(LM, {"loop.micro_batch": 1}), "")
    places = Places(toy.write_data(tmp_path / "data"), tmp_path / "runs")
    write_json(
        tmp_path / "zero.json",
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_max_live_parameters": 1000}},
    )
    machines = {"gpus": 4, "gpu": "H100"}
    sharing = {"fsdp": True}, {"fsdp": True, "fsdp_sharded_gradients": True}, {"deepspeed": tmp_path / "zero.json"}
    whole, fsdp, each_pass, zero = (recipe.plan_memory(places, **machines, **more) for more in ({}, *sharing))
    for part in ("weights", "optimizer"):
        assert fsdp.parts[part] == zero.parts[part] == whole.parts[part] // 4
    one_pass: Any = load_experiment(override(LM, {"loop.micro_batch": 2}), "")
    alone, shared = (one_pass.plan_memory(places, **{**machines, "gpus": gpus}) for gpus in (1, 4))
    assert alone.parts["copies"] == shared.parts["copies"], "the gradients of one pass a step lie in DDP's buckets"
    assert fsdp.parts["gradients"] > 0.9 * whole.parts["gradients"], (
        "with two passes a step, they are whole until the last"
    )
    assert each_pass.parts["gradients"] <= whole.parts["gradients"] // 4
    assert zero.parts["gradients"] <= whole.parts["gradients"] // 4


@pytest.mark.slow
def test_a_model_that_is_gathered_in_bfloat16_leaves_no_copies_to_autocast(tmp_path: Path):
    """Of a deep one: what FSDP2 gathers is of two layers, what autocast would copy of all. Nor does ZeRO-3, unless its
    json says so."""
    places = Places(toy.write_data(tmp_path / "data"), tmp_path / "runs")
    changes = {"loop.micro_batch": 1, "loop.precision": "bfloat16", "model.num_layers": 24}
    recipe: Any = load_experiment(override(LM, changes), "")
    whole, fsdp = (recipe.plan_memory(places, gpus=4, gpu="H100", **more) for more in ({}, {"fsdp": True}))
    assert fsdp.parts["copies"] < whole.parts["weights"] / 3
    assert fsdp.parts["activations"] == pytest.approx(whole.parts["activations"], rel=0.1)
    assert whole.parts["copies"] > whole.parts["weights"]
    stage_3 = {"stage": 3, "reduce_bucket_size": 1000, "stage3_max_live_parameters": 1000}
    for name, more in {"zero": {}, "plain": {"memory_efficient_linear": False}}.items():
        write_json(tmp_path / f"{name}.json", {"zero_optimization": {**stage_3, **more}})
    zero, plain = (
        recipe.plan_memory(places, gpus=4, gpu="H100", deepspeed=tmp_path / f"{name}.json")
        for name in ("zero", "plain")
    )
    assert zero.parts["copies"] < whole.parts["weights"] / 2
    assert plain.parts["copies"] - zero.parts["copies"] > 0.4 * whole.parts["weights"], (
        "half of the bytes of linear layers"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "H101"), r"--gpu: unknown GPU 'H101'. Did you mean 'H100'\? Known: A10, .*RTX 4090"),
        (("--gpus", "9"), r"base\[0\]: --gpus 9: a step has 4 micro-batches. Use at most 4 GPUs"),
        (("--gpus", "0"), "--gpus: expected at least 1, got 0"),
        (("--offload_activations",), "cannot estimate --offload_activations"),
        (("--micro_batch", "3"), "--micro_batch 3: .*is not a multiple"),
    ],
)
def test_unplannable_experiments_are_reported(run_plan: Any, arguments: tuple[str, ...], message: str):
    code, rows, err = run_plan({"base": [toy.BASE]}, *arguments)
    assert (code, rows) == (1, [])
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"name": "documents", "corpus": "toy_text"}}, "data.sequence_tokens is missing"),
        ({"model": {"name": "hf", "path": "gone"}}, "'gone' is neither a folder"),
    ],
)
def test_experiments_without_a_plan_are_named(run_plan: Any, changes: dict[str, Any], message: str):
    code, rows, err = run_plan({"odd": [override(toy.BASE, changes)], "base": [toy.BASE]})
    assert code == 1
    assert [row["experiment"] for row in rows] == ["base[0]"]
    assert re.search(rf"odd\[0\].*{message}", err), err


def test_evaluations_are_omitted_next_to_trainings(run_plan: Any):
    evaluation_exp = override(toy.BASE, {"loop": None, "evaluation": {"micro_batch": 4}})
    code, rows, _ = run_plan({"evaluated": [evaluation_exp], "base": [toy.BASE]})
    assert (code, [row["experiment"] for row in rows]) == (0, ["base[0]"])
    code, rows, err = run_plan({"evaluated": [evaluation_exp]})
    assert (code, rows) == (1, [])
    assert "the experiment has no loop" in err


def test_memory_option_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, message in (
        (["--memory"], "only for --dry-run"),
        (["--cost"], "--cost: only for --dry-run"),
        (["--dry-run", "--gpus", "2"], "--gpus"),
        (["--dry-run", "--mfu", "0.5"], "--mfu"),
    ):
        assert toy.main(["-e", "base", *arguments], {"base": [toy.BASE]}, tmp_path) == 1
        assert message in capsys.readouterr().err


def test_a_dry_run_with_memory_counts_groups_and_refuses_empty_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    toy.write_data(tmp_path / "data")
    patterns = {"good": "wte", "empty": "wtee"}
    groups = {
        name: [override(toy.BASE, {"loop.groups": [{"match": pattern, "learning_rate": 0.1}]})]
        for name, pattern in patterns.items()
    }
    assert toy.main(["-e", "good", "empty", "--dry-run", "--memory"], groups, tmp_path) == 1
    out, err = capsys.readouterr()
    recipe: Any = load_experiment(toy.BASE, "")
    model = recipe.model.build(Places(tmp_path / "data", tmp_path / "runs"))
    embeddings = model.get_input_embeddings().weight.numel()
    others = sum(part.numel() for part in model.parameters()) - embeddings
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    assert ["good[0]", "group0 (adamw)", f"{embeddings:,}"] in lines
    assert ["good[0]", "rest (adamw)", f"{others:,}"] in lines
    assert "empty[0]: loop.groups[0].match: 'wtee'" in err
    assert "good[0]: loop" not in err
