"""Fusion-in-Decoder through the command line: it learns from its passages, resumes bit for bit, and refuses what does
not fit."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from src.experiments.grid import ref, set_path
from src.experiments.identity import exp_id
from tests import toy

T5: dict[str, Any] = {
    "name": "t5",
    "random": {
        "tokenizer": "toy_tokenizer",
        "hidden_size": 32,
        "feed_forward_size": 64,
        "num_layers": 2,
        "num_heads": 2,
    },
    "dropout_rate": 0.1,
}
METRICS = [{"name": "squad"}]
FID: dict[str, Any] = {
    "recipe": "fid",
    "seed": 0,
    "model": {"name": "fusion_in_decoder", "base": T5},
    "data": {"name": "fid_qa", "corpus": "toy_qa", "contexts": "all", "passage_tokens": 16, "answer_tokens": 4},
    "loop": {"steps": 80, "sequences_per_step": 16, "micro_batch": 8, "learning_rate": 1e-2, "eval_every": 40},
    "answers": {"shuffled_context": True, "questions": 16, "max_new_tokens": 4, "metrics": METRICS},
}
SCORED: dict[str, Any] = {name: value for name, value in FID.items() if name != "loop"} | {
    "model": {"name": "fusion_in_decoder", "base": T5},
    "evaluation": {"micro_batch": 8},
}
GROUPS = {"fid": [FID], "scored": [SCORED]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data and a trained model."""
    folder = tmp_path_factory.mktemp("fid")
    toy.write_data(folder / "data")
    assert toy.main(["-e", "fid"], GROUPS, folder) == 0
    return folder


def test_it_learns_to_read_its_passages(folder: Path):
    _, last = toy.evaluations(folder, exp_id(FID))
    assert last["val_loss"] < 0.5
    assert last["val_loss_shuffled_context"] > 2.0
    assert last["em"] > 0.75
    assert last["em_shuffled_context"] < 0.5
    assert last["f1"] > last["f1_shuffled_context"] + 0.25
    assert "em/toy_shuffled_context" not in last


def test_a_run_that_was_cut_short_ends_with_the_same_bits(folder: Path):
    """Dropout and all."""
    run, last = folder / "runs" / exp_id(FID), "checkpoints/step-00000080"
    files = [run / last / name for name in ("model.safetensors", "optimizer.safetensors", "state.json")] + [
        run / "scores.jsonl"
    ]
    before = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    shutil.rmtree(run / last)
    (run / "status.json").unlink()
    assert toy.main(["-e", "fid"], GROUPS, folder) == 0
    assert "continues from step 40" in (run / "logs" / "train.log").read_text()
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == before


def test_another_run_may_start_from_it_or_score_it(folder: Path):
    child = {**SCORED, "model": ref(FID)}
    assert toy.main(["-e", "g"], {"g": [child], "fid": [FID]}, folder) == 0
    (row,) = toy.rows(folder, exp_id(child))
    expected = toy.rows(folder, exp_id(FID))[-1]
    for name in ("val_loss", "val_loss_shuffled_context", "em", "f1"):
        assert row[name] == expected[name]


def test_another_program_reads_it_as_the_t5_that_it_is(folder: Path, tmp_path: Path):
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from src.experiments.config import Places
    from src.models.export import export
    from src.models.load import load

    run, places = folder / "runs" / exp_id(FID), Places(folder / "data", folder / "runs")
    export(run, tmp_path / "exported", places)
    theirs, (ours, tokenizer) = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported").eval(), load(run, places)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "exported")) == len(tokenizer)
    ids = torch.tensor([[9, 17, 25, 33]])
    there = torch.ones_like(ids)
    passage = {"context_ids": ids[:, None], "context_mask": there[:, None].bool()}
    decoder = torch.cat([torch.full((1, 1), theirs.config.decoder_start_token_id), ids[:, 1:]], dim=1)
    expected = theirs(input_ids=ids, attention_mask=there, decoder_input_ids=decoder).logits
    assert torch.equal(ours(input_ids=ids, attention_mask=there, **passage), expected)


def test_without_training_it_knows_nothing(folder: Path):
    assert toy.main(["-e", "scored"], GROUPS, folder) == 0
    (row,) = toy.rows(folder, exp_id(SCORED))
    assert row["step"] == 0
    assert row["val_loss"] > 3.0  # ln 39 = 3.7 of that vocabulary


SHORT = {**FID, "loop": {**FID["loop"], "steps": 4, "eval_every": 2}}


def test_gradient_checkpointing_changes_no_bit(folder: Path):
    found = []
    for words in ([], ["--gradient_checkpointing"]):
        assert toy.main(["-e", "g", *words], {"g": [SHORT]}, folder) == 0
        run = folder / "runs" / exp_id(SHORT)
        weights = (run / "checkpoints" / "step-00000004" / "model.safetensors").read_bytes()
        found.append((hashlib.sha256(weights).hexdigest(), toy.rows(folder, exp_id(SHORT))))
        shutil.rmtree(run)
    assert found[0] == found[1]


def test_what_processes_gather_together_is_a_whole_block(folder: Path):
    """A block of T5 has a list of its own parts, which go with it."""
    from src.experiments.config import Places
    from src.experiments.registry import MODELS, bind
    from src.training.parallel.fsdp import sharded_layers

    model = bind(MODELS, FID["model"]).build(Places(folder / "data", folder / "runs"))
    assert sharded_layers(model) == [*model.base.encoder.block, *model.base.decoder.block]


@pytest.mark.slow
def test_two_processes_score_it_together(folder: Path):
    """Each has the whole model, also where the command line would have them share one that is trained."""
    root, run = toy.project(folder, f"EXP_GROUPS = {GROUPS!r}\n"), folder / "runs" / exp_id(SCORED)
    shutil.rmtree(run, ignore_errors=True)
    assert toy.main(["-e", "scored"], GROUPS, folder) == 0
    alone = toy.rows(folder, exp_id(SCORED))
    shutil.rmtree(run)
    done = toy.run(root, ["-e", "scored", "--fsdp"], folder, processes=2)
    assert done.returncode == 0, done.stderr
    assert "nothing is trained, so every process has the full model" in done.stderr
    assert toy.rows(folder, exp_id(SCORED)) == alone


@pytest.mark.slow
def test_processes_may_share_the_model(tmp_path: Path):
    """The shares add up in another order, so the last digits may differ."""
    toy.write_data(tmp_path / "data")
    root, found = toy.project(tmp_path, f"EXP_GROUPS = {{'g': [{SHORT!r}]}}\n"), []
    for words in ([], ["--fsdp"]):
        done = toy.run(root, ["-e", "g", *words], tmp_path, processes=2)
        assert done.returncode == 0, done.stderr
        found.append(toy.rows(tmp_path, exp_id(SHORT)))
        shutil.rmtree(tmp_path / "runs")
    for alone, shared in zip(*found, strict=True):
        assert shared == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "model",
            toy.BASE["model"],
            "model: expected 'fusion_in_decoder' around an encoder-decoder; got 'gpt_bigcode'",
        ),
        (
            "model",
            T5,
            (
                "model: expected 'fusion_in_decoder' around an encoder-decoder; "
                "got 't5', which is of the kind 'encoder_decoder'"
            ),
        ),
        ("model.base", toy.BASE["model"], "expected an encoder-decoder, such as 't5'; got 'gpt_bigcode'"),
        ("data", toy.CROSSATTN["data"], "data: the data of this recipe are 'fid_qa', got 'qa'."),
        ("loop.compile", True, "loop.compile: needs batches of one length, and those of 'fid_qa' differ."),
        ("model.base.random.tokenizer", "nowhere", "nowhere: no tokenizer here"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any, message: str
):
    assert toy.main(["-e", "g", "--dry-run"], {"g": [set_path(FID, path, value, must_exist=False)]}, folder) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("exp", "message"),
    [
        ({**toy.BASE, "model": T5}, "model: expected a decoder, such as 'hf' or 'gpt_bigcode'; got 't5'"),
        (
            {**toy.BASE, "data": FID["data"]},
            "data: 'fid_qa' is for 'fusion_in_decoder' around an encoder-decoder; this recipe reads data for a decoder",
        ),
        (set_path(toy.CROSSATTN, "model.base", T5, must_exist=True), "unknown family of the base 't5'"),
        (
            set_path(toy.CROSSATTN, "model", FID["model"], must_exist=True),
            "expected 'cross_attention' around a decoder",
        ),
    ],
)
def test_other_recipes_take_none_of_its_parts(
    folder: Path, capsys: pytest.CaptureFixture[str], exp: dict[str, Any], message: str
):
    assert toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder) == 1
    assert message in capsys.readouterr().err
