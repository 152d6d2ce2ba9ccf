"""Model repositories: what is written, under which names, and into which folders."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from src.errors import ConfigError, RunError
from src.experiments.config import Places
from src.experiments.grid import ref
from src.experiments.registry import MODELS, bind
from src.serving.served_model import load_served
from src.systems.assistants.serving.triton import repository, server
from tests.core.serving import small_runs
from tests.core.serving.small_runs import IDS, JUDGE, pad, run_of


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return small_runs.train(tmp_path_factory.mktemp("repository"))


def write(run: Path, folder: Path, places: Places, **changes: Any) -> str:
    asked = {"mode": "rm", "backend": "python", "name": None, "max_batch": 64, "device": "cpu", **changes}
    return repository.write_model(run, folder, places, Namespace(**asked))


def test_the_config_tells_the_model_that_a_child_names(places: Places, tmp_path: Path):
    run = run_of(places, "judge")
    name = write(run, tmp_path / "models", places)
    config = (tmp_path / "models" / name / "config.pbtxt").read_text()
    named = bind(MODELS, ref(JUDGE)).identity(places)
    assert name == run.name
    assert f'parameters {{ key: "fingerprint" value {{ string_value: "{named}" }} }}' in config
    assert 'name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ]' in config
    assert "dynamic_batching" not in config
    assert repository.list_models(tmp_path / "models")[name]["fingerprint"] == named
    (tmp_path / "models" / name / "1" / "model.py").unlink()
    assert write(run, tmp_path / "models", places) == name, "written anew"
    assert (tmp_path / "models" / name / "1" / "model.py").is_file()


@pytest.mark.parametrize("name", ["../../out", "..", ".hidden", "/tmp/x", "a b", "a\n", "-x", "x" * 300, "ü"])
def test_no_name_leaves_the_folder(name: str, places: Places, tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be a model's name"):
        write(run_of(places, "judge"), tmp_path / "models", places, name=name)
    assert not list(tmp_path.iterdir())


def test_a_slash_becomes_a_dash(places: Places, tmp_path: Path):
    assert write(run_of(places, "judge"), tmp_path / "models", places, name="lab/../judge") == "lab-..-judge"
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["lab-..-judge", repository.MARKER]


def test_what_is_not_ours_is_left_alone(places: Places, tmp_path: Path):
    run = run_of(places, "judge")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"other: holds other things than a model repository of ours"):
        write(run, tmp_path / "other", places)
    with pytest.raises(RunError, match=r"notes\.txt: is no folder"):
        write(run, tmp_path / "other" / "notes.txt", places)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]
    write(run, tmp_path / "models", places)
    (tmp_path / "models" / "handmade").mkdir()
    (tmp_path / "models" / "linked").symlink_to(tmp_path / "other")
    for name in ("handmade", "linked"):
        with pytest.raises(RunError, match=f"{name}: was not written by this command"):
            write(run, tmp_path / "models", places, name=name)
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    with pytest.raises(RunError, match="no model repository of ours"):
        server.command(tmp_path / "other", "127.0.0.1", {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "ref"}, r"expected a decoder, .* for --mode ref; got 'reward'"),
        ({"max_batch": 0}, r"--max_batch: expected at least 1, got 0"),
        ({"device": "tpu"}, r"--device: expected cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_mistakes_are_one_line(changes: dict[str, Any], message: str, places: Places, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        write(run_of(places, "judge"), tmp_path / "models", places, **changes)
    assert not (tmp_path / "models").exists()


def test_the_command_prints_one_line(places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--device", "cpu", "--data_path", str(places.data), "-sb", str(places.runs)]
    run = run_of(places, "judge").name
    assert repository.main([run[:8], str(tmp_path / "models"), "--mode", "sft", *options]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert repository.main([run[:8], str(tmp_path / "models"), "--mode", "rm", *options]) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("which", "mode"), [("judge", "rm"), ("talker", "sft"), ("talker", "ref")])
def test_a_traced_model_is_the_model(which: str, mode: str, places: Places, tmp_path: Path):
    """On batches of other sizes than the example's, too."""
    run = run_of(places, which)
    name = write(run, tmp_path / "models", places, mode=mode, backend="pytorch")
    assert 'default_model_filename: "traced-model.pt"' in (tmp_path / "models" / name / "config.pbtxt").read_text()
    traced, eager = (
        torch.jit.load(str(tmp_path / "models" / name / "1" / "traced-model.pt")),
        load_served(run, places, "cpu"),
    )
    for ids in (IDS, IDS[:1], IDS * 5, [[1, 2, 3] * 30]):
        batch = {key: value.int() for key, value in pad(ids).items()}
        with torch.no_grad():
            found = traced(**batch)
        assert torch.allclose(found, eager.score(**batch), atol=1e-6)


def test_a_trace_that_holds_sizes_is_refused(places: Places):
    model = load_served(run_of(places, "judge"), places, "cpu")

    class Fixed(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return input_ids.float().sum(1) + float(input_ids.shape[1])

    model.module = Fixed()
    with pytest.raises(
        ConfigError, match=r"its trace differs by \d+ from the model on 1 x 1 tokens\. Use --backend python"
    ):
        repository.trace(model)


def test_a_server_is_needed(monkeypatch: pytest.MonkeyPatch, places: Places, tmp_path: Path):
    write(run_of(places, "judge"), tmp_path / "models", places)
    monkeypatch.setattr(server, "ENVIRONMENT", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"the Triton server is not installed\. Run: make triton"):
        server.command(tmp_path / "models", "127.0.0.1", {})
