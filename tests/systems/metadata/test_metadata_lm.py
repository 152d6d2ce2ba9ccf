"""Trainings on documents with metadata: what these are worth, rows at any number of processes, and going on after a
stop."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from results import metadata
from src.data.orders import RankShare, order_of
from src.data.text import tokenizers
from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.dataset_protocols import content_of
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import MODELS
from src.files import new_directory
from src.models import export
from tests import toy
from tests.systems.metadata import late_tokenizer

WRITING = {"keys": ["title", "entity"], "separators": {"item": " | ", "key_value": " ", "prefix_end": " ?"}}
WITH_GAINS: dict[str, Any] = {
    "recipe": "metadata_lm",
    "seed": 0,
    "model": {**toy.BASE["model"], "num_layers": 2, "hidden_size": 64},
    "data": {
        "name": "metadata",
        "corpus": "toy_metadata",
        "sequence_tokens": 16,
        "probability": 0.7,
        "sampling": "independent",
        "weights": {"title": 1.0, "entity": 0.2},
        "writing": WRITING,
    },
    "loop": {"steps": 150, "sequences_per_step": 8, "micro_batch": 8, "learning_rate": 3e-3, "eval_every": 150},
    "gains": {"columns": ["title"], "documents": 64, "positions": [2], "chunked": True, "prompt": True},
}


WITH_GAINS_SHORT = override(WITH_GAINS, {"loop.steps": 2, "loop.eval_every": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With documents that name a thing and its colour, which the title tells."""
    folder = tmp_path_factory.mktemp("metadata_lm")
    write_metadata(toy.write_data(folder / "data"))
    return folder


def write_metadata(data: Path) -> None:
    """Write toy_metadata below `data`."""
    facts = [
        (thing, colour) for i, thing in enumerate(toy.THINGS) for colour in toy.COLOURS[i % 8 :] + toy.COLOURS[: i % 8]
    ]
    with new_directory(data / "toy_metadata") as new:
        for split, rows in (("train", facts[::2]), ("val", facts[1::4])):
            toy._write_rows(new / f"{split}.jsonl", [row(thing, colour) for thing, colour in rows])


def row(thing: str, colour: str) -> dict[str, Any]:
    text = f"the {thing} is {colour} . "
    entity = {"key": "entity", "type": "local", "value": "it", "char_start_idx": 4, "char_end_idx": 4 + len(thing)}
    return {"text": text * 2, "metadata": [{"key": "title", "type": "global", "value": colour}, entity]}


def rows_of(folder: Path, config: Any, processes: int, steps: int = 20) -> list[list[Any]]:
    """The samples of each step, whichever process reads them."""
    tokenizer = tokenizers.load(folder / "data" / "toy_tokenizer")
    data = config.build(Places(folder / "data", folder / "runs"), tokenizer, "train", 3)
    rows: list[list[Any]] = [[None] * 8 for _ in range(steps)]
    for rank in range(processes):
        share = RankShare(8, 2, rank, processes)
        stream: Iterator[Any] = order_of(data, 3, 8, steps).micro_batches(0, share, {})
        for step in range(steps):
            for g in share.numbers:
                rows[step][g * 2 : g * 2 + 2] = [data.sample(*key) for key in next(stream).keys]
    return rows


def test_content_is_that_of_the_documents_with_or_without_metadata(folder: Path):
    """`results.compare` compares such validations."""
    raw, places = WITH_GAINS["data"], Places(folder / "data", folder / "runs")
    tokenizer = tokenizers.load(places.data / "toy_tokenizer")
    settings = [{}, {"probability": 0.0}, {"with_metadata": False}, {"sequence_tokens": 24}]
    data = [
        load_experiment({**WITH_GAINS, "data": {**raw, **more}, "gains": None}, "here").data.build(
            places, tokenizer, "val", 0
        )
        for more in settings
    ]
    assert len({each.fingerprint for each in data}) == len(settings)
    assert len({content_of(each) for each in data}) == 1


@pytest.mark.parametrize("open_rows", [0, 3])
def test_rows_do_not_depend_on_the_number_of_processes(folder: Path, open_rows: int):
    raw = {**WITH_GAINS["data"], "open_rows": open_rows, "sequence_tokens": 40, "sampling": "weighted"}
    recipe = load_experiment({**WITH_GAINS, "data": raw, "gains": None}, "here")
    one, two, three, four = (rows_of(folder, recipe.data, count) for count in (1, 2, 3, 4))
    assert one == two == three == four
    assert len({json.dumps(sample) for step in one for sample in step}) > 60, "documents are read with and without"
    assert all(len(sample["lengths"]) == 1 for step in one for sample in step) == (open_rows == 0)


def scores(folder: Path, raw: dict[str, Any]) -> dict[str, float]:
    lines = (folder / "runs" / exp_id(raw) / "scores.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if "val_loss" in line][-1]


@pytest.mark.slow
def test_gains_are_measured_in_the_loop_and_afterwards(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert toy.main(["-e", "told"], {"told": [WITH_GAINS]}, folder) == 0
    measured_scores = scores(folder, WITH_GAINS)
    assert measured_scores["val_gain_low/title"] > 0.05 > measured_scores["val_gain_control_high/title"]
    assert measured_scores["val_gain/title"] == pytest.approx(measured_scores["val_gain_chunked/title"], rel=0.3)
    assert measured_scores["val_text_perplexity_without/title"] > measured_scores["val_text_perplexity_with/title"]
    again = {
        **WITH_GAINS,
        "model": {"name": "experiment", "exp_id": exp_id(WITH_GAINS)},
        "loop": None,
        "evaluation": {"micro_batch": 4},
    }
    assert toy.main(["-e", "again"], {"again": [again]}, folder) == 0
    offline = scores(folder, again)
    assert {name: offline[name] for name in measured_scores if "gain" in name} == {
        name: measured_scores[name] for name in measured_scores if "gain" in name
    }
    larger = override(again, {"evaluation.micro_batch": 16})
    assert toy.main(["-e", "larger"], {"larger": [larger]}, folder) == 0
    for name, value in scores(folder, larger).items():
        if "gain" in name:
            assert value == pytest.approx(offline[name], abs=1e-6)

    capsys.readouterr()
    runs = [str(folder / "runs" / exp_id(raw)) for raw in (WITH_GAINS, again)]
    assert metadata.main([*runs, "--output", str(folder / "gains.png")]) == 0
    output, _ = capsys.readouterr()
    assert (
        output.count(f"{measured_scores['val_gain/title']:.4f} ({measured_scores['val_gain_low/title']:.4f} to ") == 4
    ), "twice as a gain in long documents"
    assert "tokens 0-2" in output
    assert (folder / "gains.png").stat().st_size > 5000
    without = override(WITH_GAINS, {"gains": None, "loop.steps": 1, "loop.eval_every": 1})
    assert toy.main(["-e", "without"], {"without": [without]}, folder) == 0
    assert metadata.main([str(folder / "runs" / exp_id(without))]) == 1
    assert "no evaluation has gains" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_and_a_resumed_training_have_equal_scores(folder: Path, tmp_path: Path):
    short = override(WITH_GAINS, {"data.open_rows": 2, "loop.steps": 30, "loop.eval_every": 10})
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'short': [{short!r}]}}")
    (tmp_path / "data").symlink_to(folder / "data")
    assert toy.run(root, ["-e", "short"], folder).returncode == 0
    toy.kill_midway(root, ["-e", "short"], tmp_path, exp_id(short))
    assert toy.run(root, ["-e", "short"], tmp_path).returncode == 0
    weights = "checkpoints/step-00000030/model.safetensors"
    whole, resumed_weights = (where / "runs" / exp_id(short) / weights for where in (folder, tmp_path))
    assert whole.read_bytes() == resumed_weights.read_bytes()
    assert gains(scores(folder, short)) == gains(scores(tmp_path, short))

    offline = {
        **short,
        "model": {"name": "experiment", "exp_id": exp_id(short)},
        "loop": None,
        "evaluation": {"micro_batch": 4},
    }
    (root / "exp_configs.py").write_text(f"EXP_GROUPS = {{'offline': [{offline!r}]}}")
    done = toy.run(root, ["-e", "offline"], tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    assert gains(scores(tmp_path, offline)) == pytest.approx(gains(scores(folder, short)), abs=1e-6)


def test_deepspeed_accumulation_must_agree_b4(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """B4: another number there than in the experiment was silent, and the run ended after a sixteenth of its
    updates."""
    settings = tmp_path / "zero.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 16}))
    never = override(WITH_GAINS, {"seed": 4})
    assert toy.main(["-e", "never", "--deepspeed", str(settings)], {"never": [never]}, folder) == 1
    assert "gradient_accumulation_steps: 16, but the experiment has 1" in capsys.readouterr().err
    assert not (folder / "runs" / exp_id(never) / "scores.jsonl").exists()


def gains(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if "gain" in name or "perplexity" in name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.columns": ["titel"]}, r"data: columns: unknown column 'titel'. Did you mean 'title'\?"),
        ({"data.sampling": "all"}, "weights: ignored by sampling 'all'"),
        ({"data.weights": {"title": 2.0}}, "weights: expected probabilities for sampling 'independent', got title: 2"),
        ({"data.weights": {"title": 0.0}}, "weights: all are 0, so no metadata would ever be drawn"),
        ({"data.weights": {"url": 1.0}}, "weights: 'url' would never be written: 'url' is not among writing.keys"),
        ({"data.columns": ["entity"]}, "weights: 'title' is not among data.columns: entity"),
        ({"data.writing.keys": ["titel"]}, r"keys: unknown key 'titel'. Did you mean 'title'\?.* custom_keys"),
        ({"data.writing.keys": ["title", "entity", "mood"], "data.writing.custom_keys": ["mood"]}, None),
        ({"data.writing.local_key_names": {"entity": "e"}}, "local_key_names: .*list_local_keys"),
        ({"gains.columns": ["titel"]}, r"gains\.columns: unknown column 'titel'. Did you mean 'title'\?"),
        ({"gains.columns": ["url"]}, r"gains\.columns: 'url' would never be written"),
        ({"gains.columns": ["title", "title"]}, "columns: .*'title'"),
        ({"gains.positions": [32, 8]}, r"positions: expected ascending numbers above 0, got \[32, 8\]"),
        ({"gains.documents": 1}, "expected a number > 1, got 1"),
        ({"data": toy.BASE["data"]}, "gains: needs validation data 'metadata', got 'text'"),
    ],
)
def test_mistakes_are_found_when_an_experiment_is_loaded(changes: dict[str, Any], message: str | None):
    if message is None:
        load_experiment(override(WITH_GAINS, changes), "here")  # keys of one's own are possible
        return
    with pytest.raises(ConfigError, match=message):
        load_experiment(override(WITH_GAINS, changes), "here")


def test_documents_that_do_not_fit_are_found_by_a_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]):
    """In blocks of 8 tokens no document fits with its title. With the number of tokens in the message, two do."""
    exp = override(WITH_GAINS, {"data.sequence_tokens": 8})
    assert toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder) == 1
    message = capsys.readouterr().err
    assert "gains.columns: fewer than two of the 32 documents with title fit into a block of data" in message
    smallest = int(re.findall(r"Set data\.sequence_tokens to (\d+) or more", message)[0])
    for tokens, code in ((smallest - 1, 1), (smallest, 0)):
        exp = override(WITH_GAINS, {"data.sequence_tokens": tokens})
        assert toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder) == code


def test_documents_that_do_not_fit_are_refused_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """If the tokenizer of the model is not known before it is built."""
    monkeypatch.setitem(MODELS.modules, "late_tokenizer", late_tokenizer.__name__)
    exp = override(WITH_GAINS, {"model.name": "late_tokenizer", "data.sequence_tokens": 8})
    assert toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder) == 0
    capsys.readouterr()
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 1
    assert "gains.columns: fewer than two of the 32 documents with title" in capsys.readouterr().err
    assert not (folder / "runs" / exp_id(exp) / "scores.jsonl").exists()


def test_the_tokenizer_of_a_pretrained_base_is_read_by_a_dry_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert toy.main(["-e", "g"], {"g": [WITH_GAINS_SHORT]}, folder) == 0
    run, export_folder = folder / "runs" / exp_id(WITH_GAINS_SHORT), tmp_path / "exported"
    assert export.main([str(run), str(export_folder), "--data_path", str(folder / "data")]) == 0
    base = {"name": "hf", "path": str(export_folder)}
    for model in (base, {"name": "lora", "rank": 1, "alpha": 1.0, "target_modules": ["c_attn"], "base": base}):
        exp = override(WITH_GAINS, {"model": model, "data.sequence_tokens": 8})
        assert toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder) == 1
        assert "gains.columns: fewer than two of the 32 documents with title" in capsys.readouterr().err


SPECIAL = {
    **WITH_GAINS["data"],
    "writing": {**WRITING, "run_starts": {"entity": "<E>"}, "run_ends": {"entity": " </E> "}, "special_tokens": True},
}


def test_new_control_tokens_are_learned_saved_and_exported_b18(folder: Path):
    """B18: the reference saved no tokenizer with its checkpoints, so that evaluation needed another one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from src.models.trained_model import from_checkpoint

    places = Places(folder / "data", folder / "runs")
    lacking = override(WITH_GAINS, {"data": SPECIAL, "loop.steps": 2, "loop.eval_every": 2})
    assert toy.main(["-e", "lacking"], {"lacking": [lacking]}, folder) == 1
    new = override(lacking, {"model.extra_tokens": ["<E>", " </E> "]})
    assert toy.main(["-e", "new"], {"new": [new]}, folder) == 0
    checkpoint = folder / "runs" / exp_id(new) / "checkpoints" / "step-00000002"
    assert export.main([str(checkpoint), str(folder / "exported"), "--data_path", str(places.data)]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "exported")
    old = tokenizers.load(places.data / "toy_tokenizer")
    ids = tokenizer("the<E> </E> is")["input_ids"]
    assert len(tokenizer) == len(old) + 2
    assert {len(old), len(old) + 1} <= set(ids)
    input_ids = torch.tensor([ids])
    loaded = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    with torch.no_grad():
        assert torch.equal(
            loaded(input_ids).logits, from_checkpoint(checkpoint, "here", places).eval()(input_ids).logits
        )
    # A pretrained model grows by what its vocabulary lacks, and no more.
    for tokens, more in ((["<E>"], 0), (["<E>", "<F>"], 1)):
        config = {**new, "model": {"name": "hf", "path": str(folder / "exported"), "extra_tokens": tokens}}
        model = load_experiment(config, "here").model.build(places)
        assert model.get_input_embeddings().num_embeddings == len(tokenizer) + more


def test_new_tokens_of_a_frozen_model_are_refused():
    base = {**WITH_GAINS["model"], "extra_tokens": ["<E>"]}
    with pytest.raises(ConfigError, match="it is frozen, so its extra_tokens"):
        load_experiment(
            {**WITH_GAINS, "model": {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": base}}, "here"
        )
    with pytest.raises(ConfigError, match="a quantized model cannot learn new tokens"):
        load_experiment(
            {**WITH_GAINS, "model": {"name": "hf", "path": "x", "quantization": "8bit", "extra_tokens": ["<E>"]}},
            "here",
        )
