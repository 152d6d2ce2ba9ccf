"""T5's pre-training through the command line: it learns, resumes bit for bit, is shared by processes, and refuses what
does not fit."""

import copy
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.t5.tiny import unigram_loss
from data_prep import tokenize
from data_prep.t5 import pmi_vocabulary, t5_tokenizer
from src.data.text import tokenizers
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from tests import toy, warm

MODEL: dict[str, Any] = {
    "name": "t5",
    "random": {
        "tokenizer": "toy_t5_tokenizer",
        "hidden_size": 32,
        "feed_forward_size": 64,
        "num_layers": 2,
        "num_heads": 2,
    },
    "dropout_rate": 0.1,
}
T5: dict[str, Any] = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": MODEL,
    "data": {"name": "span_corruption", "corpus": "toy_text", "input_tokens": 18, "mean_span_tokens": 1.0},
    "loop": {"steps": 120, "sequences_per_step": 16, "micro_batch": 8, "learning_rate": 3e-3, "eval_every": 60},
}
SHARED: dict[str, Any] = copy.deepcopy(T5)
SHARED["loop"] |= {"steps": 4, "eval_every": 2}
GROUPS = {"t5": [T5], "shared": [SHARED]}


def write_tokenizer(data: Path) -> None:
    """The toy world's tokenizer, with sentinels and names of sentences."""
    t5_tokenizer.prepare(data, "toy_t5_tokenizer", "toy_tokenizer", sentences=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data and a trained model."""
    folder = tmp_path_factory.mktemp("t5")
    toy.write_data(folder / "data")
    write_tokenizer(folder / "data")
    assert toy.main(["-e", "t5"], GROUPS, folder) == 0
    return folder


def test_model_learns_masked_text(folder: Path):
    first, last = toy.evaluations(folder, exp_id(T5))
    places = Places(folder / "data", folder / "runs")
    assert last["val_loss"] < 0.6 * unigram_loss(load_experiment(T5, "t5"), places)
    assert last["val_loss"] < first["val_loss"]
    assert last["val_accuracy"] > 4 / 7  # sentinels and end token come of themselves
    assert last["val_perplexity"] == pytest.approx(2.718281828 ** last["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_was_cut_short_ends_with_the_same_bits(folder: Path):
    run, last = folder / "runs" / exp_id(T5), "checkpoints/step-00000120"
    files = [run / last / name for name in ("model.safetensors", "optimizer.safetensors", "state.json")] + [
        run / "scores.jsonl"
    ]
    before = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    shutil.rmtree(run / last)
    (run / "status.json").unlink()
    assert toy.main(["-e", "t5"], GROUPS, folder) == 0
    assert "continues from step 60" in (run / "logs" / "train.log").read_text()
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == before


@pytest.mark.parametrize("is_mixture", [False, True])
def test_depth_is_trained_under_its_masks_and_its_sentences_are_scored(folder: Path, is_mixture: bool):
    depth = {"name": "depth", "corpus": "toy_text", "input_tokens": 64, "target_tokens": 64, "num_sentences": 4}
    data = {"name": "mixture", "parts": {"one": depth}} if is_mixture else depth
    exp = {**T5, "data": data, "loop": {**T5["loop"], "steps": 2, "eval_every": 1}}
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
    first, last = toy.evaluations(folder, exp_id(exp))
    assert last["val_loss"] < first["val_loss"]
    assert is_mixture or last["val_sentence_loss"] < first["val_sentence_loss"]
    if is_mixture:  # the same as alone: the masks are those of the batch
        alone = {**exp, "data": depth}
        assert toy.main(["-e", "g"], {"g": [alone]}, folder) == 0
        assert toy.rows(folder, exp_id(alone))[0]["val_loss"] == pytest.approx(first["val_loss"], rel=0.2)


def test_curriculum_is_evaluated_on_its_last_phase(folder: Path):
    """Whose scores may be the best_metric; the phase before has none of them."""
    depth = {"name": "depth", "corpus": "toy_text", "input_tokens": 64, "target_tokens": 64, "num_sentences": 4}
    loop = {**T5["loop"], "steps": 2, "eval_every": 1, "best_metric": "val_sentence_accuracy", "best_mode": "max"}
    exp = {
        **T5,
        "data": {"name": "phases", "phases": [{"until": 0.5, "data": T5["data"]}, {"data": depth}]},
        "loop": loop,
    }
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0
    assert all(row["val_sentence_loss"] > 0 for row in toy.rows(folder, exp_id(exp)))


@pytest.fixture(scope="module")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, tokens and a list of n-grams, each made of the same text by one command."""
    folder = tmp_path_factory.mktemp("own")
    pages = [path.read_text(encoding="utf-8") for path in sorted((toy.ROOT / "docs").glob("*.md"))]
    sections = [section for page in pages for section in page.split("\n## ")]
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": section}) + "\n" for section in sections))
    arguments = ["--data_path", str(folder / "data"), "--train", str(folder / "docs.jsonl")]
    assert t5_tokenizer.main([*arguments, "--name", "own_tokenizer", "--vocab_size", "700", "--sentinels", "20"]) == 0
    assert (
        tokenize.main(
            [*arguments, "--name", "own", "--tokenizer", "own_tokenizer", "--val_rate", "0.3", "--processes", "1"]
        )
        == 0
    )
    assert pmi_vocabulary.main([*arguments, "--name", "own_pmi", "--min_count", "5", "--size", "400"]) == 0
    return folder


def test_everything_can_be_prepared_from_own_text(prepared_folder: Path):
    """The ids are those of the new tokenizer, and the masks whole n-grams of the new list."""
    data = {
        "name": "span_corruption",
        "corpus": "own",
        "input_tokens": 64,
        "ngrams": "own_pmi/ngrams.txt",
        "val_sequences": 8,
    }
    exp = copy.deepcopy({**T5, "data": data})
    exp["model"]["random"]["tokenizer"] = "own_tokenizer"
    exp["loop"] |= {"steps": 2, "eval_every": 1}
    assert toy.main(["-e", "g"], {"g": [exp]}, prepared_folder) == 0
    first, last = toy.evaluations(prepared_folder, exp_id(exp))
    assert last["val_loss"] < first["val_loss"]


def test_longt5_continues_from_its_folder(prepared_folder: Path):
    """Whose inputs are longer than what a position sees of them."""
    from transformers import LongT5Config, LongT5ForConditionalGeneration

    tokenizer = tokenizers.load(prepared_folder / "data" / "own_tokenizer")
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "local_radius": 7}
    local = {"global_block_size": 4, "encoder_attention_type": "transient-global", "decoder_start_token_id": 0}
    LongT5ForConditionalGeneration(LongT5Config(vocab_size=len(tokenizer), **sizes, **local)).save_pretrained(
        prepared_folder / "long"
    )
    tokenizer.save_pretrained(prepared_folder / "long")
    data = {"name": "span_corruption", "corpus": "own", "input_tokens": 100, "val_sequences": 4}
    loop = {**T5["loop"], "steps": 2, "eval_every": 1, "learning_rate": 1e-2}
    exp = {**T5, "model": {"name": "t5", "path": str(prepared_folder / "long")}, "data": data, "loop": loop}
    assert toy.main(["-e", "g"], {"g": [exp]}, prepared_folder) == 0
    first, last = toy.evaluations(prepared_folder, exp_id(exp))
    assert last["val_loss"] < first["val_loss"]


@pytest.fixture(scope="module")
def shared(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Score rows of two processes by how they share the model."""
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    root, results = toy.project(folder, f"EXP_GROUPS = {GROUPS!r}\n"), {}
    for mode in ("replicated", "zero2", "zero3", "fsdp"):
        words = {"replicated": [], "fsdp": ["--fsdp"]}.get(mode, ["--deepspeed", f"resources/ds_config_{mode}.json"])
        words = [str(toy.ROOT / word) if word.startswith("resources") else word for word in words]
        process = warm.Process(
            toy.command(root, ["-e", "shared", *words], folder, processes=2),
            toy.environment(),
            None,
            folder / f"{mode}.log",
        )
        try:
            assert process.wait(timeout=600) == 0, (folder / f"{mode}.log").read_text()
        finally:
            process.kill()
        results[mode] = toy.rows(folder, exp_id(SHARED))
        events = [
            json.loads(line) for line in (folder / "runs" / exp_id(SHARED) / "ledger.jsonl").read_text().splitlines()
        ]
        assert [event["engine"] for event in events if event["event"] == "start"] == [mode]
        shutil.rmtree(folder / "runs" / exp_id(SHARED))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["zero2", "zero3", "fsdp"])
def test_processes_that_share_the_model_have_the_losses_of_those_that_do_not(shared: dict[str, Any], mode: str):
    for row, expected in zip(shared[mode], shared["replicated"], strict=True):
        for name in ("train_loss", "val_loss", "grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": toy.BASE["model"]}, "model: expected an encoder-decoder, such as 't5'; got 'gpt_bigcode'"),
        ({"data": toy.BASE["data"]}, "data: 'text' is for .*; this recipe reads data for an encoder-decoder"),
        ({"recipe": "lm"}, "model: expected .*; got 't5', which is of the kind 'encoder_decoder'"),
        ({"recipe": "lm", "model": toy.BASE["model"]}, "data: 'span_corruption' is for an encoder-decoder"),
        (
            {"data": {**T5["data"], "corpus": "toy_txt"}},
            "toy_txt: no such data set: unknown corpus 'toy_txt'. Did you mean 'toy_text'",
        ),
        ({"loop": {**T5["loop"], "best_metric": "em"}}, "loop.best_metric: unknown score 'em'"),
    ],
)
def test_invalid_settings_are_refused_before_the_start(
    change: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert toy.main(["-e", "g", "--dry-run"], {"g": [{**T5, **change}]}, folder) == 1
    stderr = capsys.readouterr().err
    assert re.search(message, stderr), stderr


def test_tokenizer_without_sentinels_is_refused_with_the_command_to_make_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    exp = copy.deepcopy(T5)
    exp["model"]["random"]["tokenizer"] = "toy_tokenizer"
    assert toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder) == 1
    assert "data_prep.t5.t5_tokenizer" in capsys.readouterr().err
