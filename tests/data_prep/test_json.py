"""The numbers of each command's text are in its JSON document. `tests/results/test_json.py` has other commands."""

import gzip
import json
import re
import sys
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from docs import json_documents, reference
from src.files import new_directory
from tests import toy
from tests.core.data.conftest import make_tokenizer  # noqa: F401  a fixture
from tests.data_prep import test_gguf, test_llama2c
from tests.data_prep.assistants import test_check_dataset_counts, test_oasst_trees, test_show_conversations
from tests.data_prep.crossattn import test_prepare_qa
from tests.data_prep.interleaved import test_convert
from tests.data_prep.metadata import test_prepare, test_validation
from tests.data_prep.t5 import test_natural_instructions, test_pmi_vocabulary
from tests.results.test_json import COMMANDS, check_schema, missing_numbers
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.train_assistants import write_data
from tests.systems.interleaved.streaming.test_tar_index import DOCUMENTS, WHOLE, tar_of

CASES: dict[str, Callable[[Path], list[str]]] = {}
"""Command -> function that writes small sources into a folder, and returns the arguments."""
SLOW = {"crossattn.stdlib_qa"}
NO_CASE = {"assistants.stdlib_conversations", "metadata.stdlib_pages"}
"""Commands that take minutes, and print only the line of `command.make_folder`, as most other commands do, too."""


def case(command: str) -> Callable[[Callable[[Path], list[str]]], Callable[[Path], list[str]]]:
    """Register the function for `command`, a module below data_prep and a subcommand."""

    def register(write: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
        CASES[command] = write
        return write

    return register


def write_lines(path: Path, rows: Sequence[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@case("assistants.chat_tokenizer")
def _(folder: Path) -> list[str]:
    talk.tokenizer([]).save_pretrained(folder / "old")
    return ["--from", "old", "--template", "oasst", "--name", "new", "--data_path", str(folder)]


@case("assistants.check_dataset_counts")
def _(folder: Path) -> list[str]:
    rows = [{"prompt": f"q{i}", "completion": "a"} for i in range(9)]
    test_check_dataset_counts.prepare(folder, "answers", "completion", rows[:6], rows[6:])
    words = ["--data_path", str(folder / "data"), "--output_path", str(folder / "counts.csv"), "--datasets", "all"]
    return [*words, "--languages", str(folder / "languages.csv")]


def write_trees(folder: Path) -> str:
    text = "".join(json.dumps(tree) + "\n" for tree in test_oasst_trees.trees())
    (folder / "trees.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder / "trees.jsonl.gz")


@case("assistants.oasst_trees counts")
def _(folder: Path) -> list[str]:
    return ["counts", write_trees(folder)]


@case("assistants.oasst_trees filter_trees")
def _(folder: Path) -> list[str]:
    return ["filter_trees", write_trees(folder), str(folder / "out.jsonl")]


@case("assistants.oasst_trees split")
def _(folder: Path) -> list[str]:
    outputs = [str(folder / f"{split}.jsonl") for split in ("train", "val")]
    return ["split", write_trees(folder), *outputs, "--val_percent", "30"]


@case("assistants.prepare_conversations")
def _(folder: Path) -> list[str]:
    rows = [{"question": f"q{n}", "reply": "a"} for n in range(37)]
    words = ["--form", "completion", "--columns", "prompt=question", "completion=reply", "--name", "own"]
    sources = ["--train", write_lines(folder / "a.jsonl", [*rows, rows[0]]), "--val_rate", "0.3"]
    return [*words, *sources, "--data_path", str(folder)]


@case("assistants.show_conversations")
def _(folder: Path) -> list[str]:
    write_data(folder / "data")
    return ["mixed", "--data_path", str(folder / "data"), "-sb", str(folder / "runs")]


@case("crossattn.stdlib_qa")
def _(folder: Path) -> list[str]:
    return ["--data_path", str(folder)]


@case("crossattn.prepare_qa")
def _(folder: Path) -> list[str]:
    source = test_prepare_qa.squad(folder / "s.json", range(40))
    return ["--data_path", str(folder), "--name", "toy", "--train", source, "--val_percent", "25"]


@case("crossattn.preproc_nq")
def _(folder: Path) -> list[str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from src.data.text import tokenizers

    toy.write_data(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)).save_pretrained(folder / "base")
    tokenizers.load(folder / "toy_tokenizer").save_pretrained(folder / "base")
    words = ["--embedding_model", str(folder / "base"), "--maximum_input_length", "16", "--num_proc", "1"]
    return [*words, "--data_cache_path", str(folder), "--corpus", "toy_qa", "--devices", "cpu"]


@case("gguf")
def _(folder: Path) -> list[str]:
    pytest.importorskip("gguf")
    path = test_gguf.write(folder / "x.gguf", test_gguf.gguf_tensors(test_gguf.random_model()))
    return [str(path), "--name", "team/model", "--data_path", str(folder)]


@case("interleaved.convert")
def _(folder: Path) -> list[str]:
    parts = [("text", b"a"), ("image", b"no image"), test_convert.IMAGES[0]]
    members = [*test_convert.page("0_x", parts), *test_convert.page("1_y", parts, num_missing=1)]
    source = test_convert.tar(folder / "a.tar", members)
    return ["wd", str(source), "--output", str(folder / "out")]


@case("interleaved.index")
def _(folder: Path) -> list[str]:
    (folder / "a.tar").write_bytes(WHOLE)
    (folder / "b.tar").write_bytes(tar_of([*DOCUMENTS[0], *DOCUMENTS[1][:-1]]))
    return [str(folder / "a.tar"), str(folder / "b.tar"), "--processes", "1", "--output", str(folder / "out")]


@case("llama2c")
def _(folder: Path) -> list[str]:
    return test_llama2c.write(folder)[0]


@case("metadata.prepare")
def _(folder: Path) -> list[str]:
    pages = [test_prepare.page(name) for name in ("one", "two", "three")]
    test_prepare.write_json(folder / "train.jsonl", [*pages, pages[0], {"url": "https://x.org", "doc_html": "<p>"}])
    test_prepare.write_json(folder / "val.jsonl", [test_prepare.page("four")])
    sources = ["--train", str(folder / "train.jsonl"), "--val", str(folder / "val.jsonl")]
    return ["--data_path", str(folder), "--name", "made", "--workers", "1", *sources, *test_prepare.EXTRACT]


def write_pages(folder: Path) -> list[str]:
    with new_directory(folder / "pages") as pages:
        for split, rows in (("train", [*test_validation.ROWS, test_validation.ROWS[0]]), ("val", test_validation.ROWS)):
            write_lines(pages / f"{split}.jsonl", rows)
    return ["pages", "--data_path", str(folder)]


@case("metadata.validation")
def _(folder: Path) -> list[str]:
    return [*write_pages(folder), "--columns", "title", "url"]


@case("metadata.weights")
def _(folder: Path) -> list[str]:
    return write_pages(folder)


@case("t5.natural_instructions")
def _(folder: Path) -> list[str]:
    for part, name in (("splits/default/train_tasks.txt", "a"), ("splits/default/test_tasks.txt", "b")):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_text(f"{name}\n")
        (folder / "tasks").mkdir(exist_ok=True)
        (folder / "tasks" / f"{name}.json").write_text(json.dumps(test_natural_instructions.TASK))
    return ["--data_path", str(folder / "data"), str(folder)]


@case("t5.pmi_vocabulary")
def _(folder: Path) -> list[str]:
    source = write_lines(folder / "corpus.jsonl", [{"text": text} for text in test_pmi_vocabulary.corpus()])
    return ["--data_path", str(folder), "--name", "pmi", "--train", source, "--size", "80"]


@case("t5.prepare_task")
def _(folder: Path) -> list[str]:
    (folder / "train.tsv").write_text("a b\t1\nc\t0\nc\t0\n")
    (folder / "val.tsv").write_text("c\t0\n")
    splits = ["--train", str(folder / "train.tsv"), "--val", str(folder / "val.tsv")]
    return ["--data_path", str(folder / "data"), "--task", "sst2", *splits]


@case("t5.t5_tokenizer")
def _(folder: Path) -> list[str]:
    talk.tokenizer([]).save_pretrained(folder / "old")
    return ["--data_path", str(folder), "--name", "new", "--from", "old"]


@case("tokenize")
def _(folder: Path) -> list[str]:
    toy.write_data(folder)
    source = write_lines(folder / "a.jsonl", [{"text": f"the thing{n % 9} is red ."} for n in range(600)])
    words = ["--data_path", str(folder), "--name", "made", "--tokenizer", "toy_tokenizer", "--train", source]
    return [*words, "--val_rate", "0.1", "--processes", "1"]


def test_every_command_is_compared():
    lines = [line.removeprefix("python -m data_prep.") for line in reference.document_types() if "data_prep." in line]
    there = {name.removeprefix("data_prep.") for name in COMMANDS if name.startswith("data_prep.")}
    assert set(lines) == CASES.keys() | there | NO_CASE
    for name in NO_CASE:
        source = Path(import_module(f"data_prep.{name}").__file__ or "")
        assert "report(" not in source.read_text(), name


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_json_and_text_say_the_same_numbers(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    module = types.ModuleType("exp_configs")
    module.EXP_GROUPS = test_show_conversations.GROUPS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exp_configs", module)
    main = import_module(f"data_prep.{command.split(maxsplit=1)[0]}").main
    outputs = []
    for name, more in (("text", []), ("json", ["--json"])):
        (tmp_path / name).mkdir()
        words = CASES[command](tmp_path / name)
        capsys.readouterr()
        assert main([*words, *more]) == 0
        outputs.append(capsys.readouterr().out.replace(str(tmp_path / name), ""))
    # Times and speeds differ between two runs.
    text, document = re.sub(r"\d+\.\d s\b|[\d,]+ tokens/s", "", outputs[0]), json.loads(outputs[1])
    check_schema(document, [json_documents.Steps])
    assert document["error"] is None
    assert document["steps"]
    assert text.strip()
    assert missing_numbers(text, document) == []
