"""Words that name no model and no run: where each command looked, and how to get the model."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from results import diff
from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.registry import MODELS, bind
from src.files import ROOT
from src.models import export, hub_files
from src.operations import interventions
from src.runs.store import EXP_DICT
from src.serving import chat
from src.systems.assistants.serving import reward_evaluation, reward_server
from src.systems.crossattn import ask
from src.systems.interleaved.streaming import audit
from src.training.checkpointing import consolidate

COMMANDS: dict[str, Callable[[str, Path], int]] = {
    "chat": lambda word, runs: chat.main([word, "hi", "-sb", str(runs)]),
    "export": lambda word, runs: export.main([word, str(runs.parent / "out"), "-sb", str(runs)]),
    "consolidate": lambda word, runs: consolidate.main([str(runs / word)]),
    "interventions": lambda word, runs: interventions.main(["rewind", word, "--runs", str(runs), "--to", "1"]),
    "audit": lambda word, runs: audit.main([word, "--runs", str(runs)]),
    "ask": lambda word, runs: ask.main([word, "--context", __file__, "a?", "-sb", str(runs)]),
    "reward_server": lambda word, runs: reward_server.main([word, "-sb", str(runs)]),
    "reward_evaluation": lambda word, runs: reward_evaluation.main([word, "x", "-sb", str(runs)]),
    "diff": lambda word, runs: diff.main([word, word, "-r", str(runs)]),
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Four runs, and a cache of the hub without a model."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for digit in "3152":
        (tmp_path / "runs" / (digit * 32)).mkdir(parents=True)
        (tmp_path / "runs" / (digit * 32) / EXP_DICT).write_text("{}")
    return Places(tmp_path / "data", tmp_path / "runs")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("word", ["fff", "f" * 32])
def test_an_unknown_run_is_one_error_of_all_commands(
    places: Places, capsys: pytest.CaptureFixture[str], command: str, word: str
):
    assert COMMANDS[command](word, places.runs) == 1
    (line,) = capsys.readouterr().err.splitlines()
    start = places.runs / word if command == "consolidate" else word
    assert line.startswith(f"error: {start}: ")
    assert f"no run in {places.runs} has an id that starts with {word!r}" in line
    assert len(set(re.findall(r"(\d)\1{31}", line))) == 3


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        (hub_files.SMOLLM2, "`make smollm2`"),
        ("smollm2", "`make smollm2`"),
        ("owner/name", "`python -m data_prep.gguf FILE.gguf --name owner/name`"),
        ("talks_model", "`python -m data_prep.gguf FILE.gguf --name talks_model`"),
        ("own/modle", "Did you mean 'own/model'?"),
        ("huggingfacetb/smollm2-135m-instruct", f"Did you mean {hub_files.SMOLLM2!r}?"),
    ],
)
def test_a_missing_model_gets_one_advice_in_chat_and_experiments(
    places: Places, capsys: pytest.CaptureFixture[str], word: str, advice: str
):
    (places.data / "own" / "model").mkdir(parents=True)
    (places.data / "own" / "model" / "config.json").write_text("{}")
    assert chat.main([word, "hi", "-sb", str(places.runs), "--data_path", str(places.data)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    with pytest.raises(ConfigError) as error:
        bind(MODELS, {"name": "hf", "path": word}).check(places)
    common = hub_files.how_to_get(word, places.data)
    for message in (line, str(error.value)):
        assert word in message
        assert message.endswith(common)
    assert advice in common
    assert f"{places.data} (--data_path)" in common
    assert f"`hf download {word}`" in common


def test_the_start_of_an_id_gets_no_advice_about_models(places: Places, capsys: pytest.CaptureFixture[str]):
    assert chat.main(["0123abc", "hi", "-sb", str(places.runs)]) == 1
    assert "hf download" not in capsys.readouterr().err


def test_make_smollm2_makes_the_model_of_the_advice():
    assert f"SMOLLM2 := {hub_files.SMOLLM2}\n" in (ROOT / "Makefile").read_text()


def test_a_missing_checkpoint_names_the_newest(places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = places.runs / ("5" * 32)
    assert export.main([str(run), str(tmp_path / "out")]) == 1
    assert f"{run}: a run without a checkpoint" in capsys.readouterr().err
    for step in range(1, 6):
        (run / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    missing = run / "checkpoints" / "step-00000009"
    assert export.main([str(missing), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"{missing}: " in error
    assert re.findall(r"step-0000000([1-5])", error) == ["3", "4", "5"]
