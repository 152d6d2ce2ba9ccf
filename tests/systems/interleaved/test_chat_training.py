"""Trainings on conversations with images: scores, kills, checks before the start, adapters and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from data_prep.interleaved import digit_pages
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.interfaces import load_experiment
from src.models import prepared_tokenizer
from src.models.export import main
from src.models.load import load
from src.runs import plan
from src.systems.interleaved import groups
from tests import toy

CHAT = override(
    groups.INTERLEAVED_CHAT_TINY,
    {
        "model.vision.hidden_size": 16,
        "model.hidden_size": 16,
        "model.num_layers": 1,
        "loop.steps": 8,
        "loop.eval_every": 4,
        "loop.micro_batch": 4,
        "data.sequence_tokens": 128,
        "answers.questions": 6,
        "answers.max_new_tokens": 3,
    },
)


def exp_id(exp: dict[str, Any]) -> str:
    return plan.load(exp, "", "").exp_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and a model trained on them."""
    folder = tmp_path_factory.mktemp("chats")
    digit_pages.prepare(folder / "data", pages=60, val_pages=12, chats=True)
    assert toy.main(["-e", "chat"], {"chat": [CHAT]}, folder) == 0
    return folder


def test_scores_are_those_of_answers(folder: Path):
    *_, last = toy.evaluations(folder, exp_id(CHAT))
    assert {"val_loss", "val_loss_shuffled_context", "word_accuracy", "word_accuracy_shuffled_context"} <= last.keys()
    assert last["val_loss"] != last["val_loss_shuffled_context"]
    experiment: Any = load_experiment(CHAT, "here")
    places = Places(folder / "data", folder / "runs")
    tokenizer = prepared_tokenizer.load(folder / "data" / "digit_chats" / "tokenizer", experiment.model.new_tokens())
    val = experiment.data.build(places, tokenizer, "val", 0)
    rows = [val.sample(0, number) for number in range(len(val))]
    labels = [token for row in rows for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on]
    words = tokenizer.decode(labels).replace(tokenizer.eos_token, "").replace(".", "").split()
    assert len(words) > 24
    assert all(word.isdecimal() for word in words), "nothing but digits and sums"
    assert labels.count(tokenizer.eos_token_id) == 2 * 12


@pytest.mark.slow
def test_killed_training_ends_with_the_same_bits(folder: Path, tmp_path: Path):
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'chat': [{CHAT!r}]}}")
    (tmp_path / "data").symlink_to(folder / "data")
    toy.kill_midway(root, ["-e", "chat"], tmp_path, exp_id(CHAT))
    done = toy.run(root, ["-e", "chat"], tmp_path)
    assert done.returncode == 0, done.stderr
    weights = "checkpoints/step-00000008/model.safetensors"
    whole, again = (where / "runs" / exp_id(CHAT) / weights for where in (folder, tmp_path))
    assert whole.read_bytes() == again.read_bytes()


def test_a_tokenizer_without_template_is_found_by_a_dry_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    digit_pages.prepare(tmp_path / "data", pages=8, val_pages=4)
    (tmp_path / "data" / "digit_chats").symlink_to(folder / "data" / "digit_chats")
    exp = override(CHAT, {"model.tokenizer": "digit_pages/tokenizer"})
    assert toy.main(["-e", "chat", "--dry-run"], {"chat": [exp]}, tmp_path) == 1
    error = capsys.readouterr().err
    assert "data.sources.digits.chat: " in error
    assert str(tmp_path / "data" / "digit_pages" / "tokenizer") in error


def test_pages_that_are_no_conversations_are_found_by_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for chats in (False, True):
        digit_pages.prepare(tmp_path / "data", pages=8, val_pages=8, chats=chats)
    exp = override(CHAT, {"data.sources.digits.path": "digit_pages"})
    assert toy.main(["-e", "chat", "--dry-run"], {"chat": [exp]}, tmp_path) == 1
    assert "data.sources.digits: document 0 of shard-00000.tar: " in capsys.readouterr().err
    assert toy.main(["-e", "chat", "--dry-run"], {"chat": [CHAT]}, tmp_path) == 0


def export(folder: Path, run: str, target: Path) -> tuple[Any, Any]:
    """The processor and the model of an exported run."""
    words = [str(folder / "runs" / run), str(target), "--data_path", str(folder / "data"), "-sb", str(folder / "runs")]
    assert main(words) == 0
    return AutoProcessor.from_pretrained(target), AutoModelForImageTextToText.from_pretrained(target)


def test_export_answers_with_the_template_of_the_training(folder: Path, tmp_path: Path):
    processor, model = export(folder, exp_id(CHAT), tmp_path / "out")
    assert processor.chat_template == digit_pages.CHAT_TEMPLATE
    image = Image.new("RGB", (8, 8), (9, 99, 200))
    question = {"type": "text", "text": "The digits are"}
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, question]}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, **options)
    assert processor.decode(inputs["input_ids"][0]).endswith("The digits are<end_of_utterance>\nAssistant:")
    assert model.generation_config.eos_token_id == processor.tokenizer.convert_tokens_to_ids("<end_of_utterance>")
    ours, _ = load(folder / "runs" / exp_id(CHAT), Places(folder / "data", folder / "runs"))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**inputs).logits, ours(**inputs).logits)


def test_adapters_on_an_exported_model_train_and_export(folder: Path, tmp_path: Path):
    """The settings of group smolvlm_256m_chat, on a model of one frame per image."""
    out = tmp_path / "data" / "smol"
    export(folder, exp_id(CHAT), out)
    (tmp_path / "data" / "my_chats").symlink_to(folder / "data" / "digit_chats")
    exp = override(
        groups.GROUPS["smolvlm_256m_chat"][0],
        {
            "model.base.path": "smol",
            "model.base.dtype": "float32",
            "loop.precision": "float32",
            "data.images": CHAT["data"]["images"],
            "data.sequence_tokens": 256,
            "loop.steps": 4,
            "loop.eval_every": 2,
            "loop.sequences_per_step": 2,
            "loop.micro_batch": 1,
        },
    )
    assert toy.main(["-e", "chat", "--dry-run"], {"chat": [exp]}, tmp_path) == 0
    assert toy.main(["-e", "chat"], {"chat": [exp]}, tmp_path) == 0
    processor, model = export(tmp_path, exp_id(exp), tmp_path / "adapted")
    assert processor.chat_template == digit_pages.CHAT_TEMPLATE
    assert type(model).__name__ == "Idefics3ForConditionalGeneration"
