"""What a model that was trained with metadata writes under options ones."""

import io
from pathlib import Path

import pytest

from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.serving import chat
from src.serving.pretrained import load_writer
from src.systems.metadata.data.annotations import Document
from src.systems.metadata.writer import MetadataWriter
from tests import toy
from tests.systems.metadata.test_metadata_lm import WITH_GAINS, row, write_metadata

SURE = override(
    WITH_GAINS,
    {"data.probability": 0.9, "gains": None, "loop.steps": 300, "loop.eval_every": 300, "data.columns": ["title"]},
)
SURE = override(SURE, {"data.weights": {"title": 1.0}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that has learned to say the colour that the title names."""
    folder = tmp_path_factory.mktemp("chat")
    write_metadata(toy.write_data(folder / "data"))
    assert toy.main(["-e", "sure"], {"sure": [SURE]}, folder) == 0
    return folder


def ask(folder: Path, *words: str) -> int:
    return chat.main([str(folder / "runs" / exp_id(SURE)), *words, "--data_path", str(folder / "data")])


def test_metadata_steer_the_text(folder: Path, capsys: pytest.CaptureFixture[str]):
    matches: dict[bool, list[bool]] = {True: [], False: []}
    for colour in toy.COLOURS:
        for options in (["--metadata", f"title={colour}"], []):
            assert ask(folder, *options, "the thing3 is", "--temperature", "0", "--max_new_tokens", "1") == 0
            matches[bool(options)].append(capsys.readouterr().out == f"the thing3 is {colour}\n")
    assert sum(matches[True]) >= 7
    assert sum(matches[False]) <= 1


@pytest.mark.parametrize("text", ["the cat", " ".join(["cat"] * 60)])
def test_default_number_of_tokens_fits_the_model(text: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert ask(folder, text, "--temperature", "0") == 0
    words = capsys.readouterr().out.split()
    assert len(text.split()) < len(words) <= 64, "the positions of the model"


@pytest.mark.parametrize("linearisation", ["nested", "compatible"])
def test_metadata_are_written_as_in_training(linearisation: str, folder: Path):
    writer, _ = load_writer(folder / "runs" / exp_id(SURE), Places(folder / "data", folder / "runs"))
    assert isinstance(writer, MetadataWriter)
    data = writer._data.model_copy(
        update={"writing": writer._data.writing.model_copy(update={"linearisation": linearisation})}
    )
    writer = MetadataWriter(writer._model, writer._tokenizer, data)
    writer.set_metadata(["title=red"])
    document = Document(row("thing1", "red")["text"], writer._items)
    piece = writer._maker.pieces(document)[0]
    assert writer.prompt(document.text) == piece.ids[:-1], "all but the end token"
    writer.set_metadata([])
    assert writer.prompt("") == [writer._tokenizer.eos_token_id]


def test_lines_are_read_and_sampling_is_that_of_its_seed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    outputs = []
    for seed in ("1", "1", "2"):
        monkeypatch.setattr("sys.stdin", io.StringIO("the thing1\nthe thing2\n"))
        assert (
            ask(folder, "--metadata", "title=red", "--seed", seed, "--temperature", "3", "--max_new_tokens", "9") == 0
        )
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert [line.split()[:2] for line in outputs[0].splitlines()][:1] == [["the", "thing1"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metadata", "titel=red"], "error: --metadata: unknown key 'titel'. Did you mean 'title'?"),
        (["--metadata", "entity=red"], "error: --metadata: unknown key 'entity'."),
        (["--metadata", "title"], "error: --metadata 'title': expected KEY=VALUE, such as url=docs.python.org."),
        (["--temperature", "nan"], "error: expected --max_new_tokens >= 1"),
        (["--max_new_tokens", "1000"], "--max_new_tokens 1000 exceed the 64 positions of the model"),
        (["--max_new_tokens", "0"], "error: expected --max_new_tokens >= 1"),
        (["--temperature", "-1"], "error: expected --max_new_tokens >= 1, --temperature >= 0"),
        (["--8bit", "--device", "cpu"], "error: --8bit: needs a GPU, got cpu."),
        (["--device", "abacus"], "error: --device: 'abacus' cannot be used"),
    ],
)
def test_mistakes_are_reported(words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert ask(folder, "the cat", *words) == 1
    assert message in capsys.readouterr().err
