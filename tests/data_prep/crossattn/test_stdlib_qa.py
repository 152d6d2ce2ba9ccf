"""The data set from the standard library: true, fair, without leaks, and the same every time."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest

from data_prep.crossattn import stdlib_qa
from src import files
from src.data import jsonl
from src.data.text import dataset, tokenizers
from src.errors import ConfigError, DataError
from src.evaluation.metrics.answers import references
from src.experiments.config import Places
from src.systems.crossattn.data import cross_attention

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The data set of this machine's own standard library."""
    folder = tmp_path_factory.mktemp("stdlib") / "data"
    assert stdlib_qa.prepare(folder)
    return folder


@pytest.fixture(scope="session")
def rows(whole):
    """Rows of both splits."""
    fields = {
        "context": str,
        "question": str,
        "answer": str,
        "sample_idx": int,
        "dataset": str,
        "kind": str,
        "module": str,
    }
    return {split: list(jsonl.read_rows(whole / "stdlib_qa" / f"{split}.jsonl", fields)) for split in ("train", "val")}


@pytest.fixture(scope="session")
def small_stdlib(tmp_path_factory):
    """A dozen real modules, enough for both splits."""
    folder = tmp_path_factory.mktemp("lib")
    real = Path(sysconfig.get_path("stdlib"))
    for package in ("json", "email", "logging", "asyncio"):
        shutil.copytree(real / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_it_is_large_and_every_kind_is_in_both_splits(rows, whole):
    assert sum(map(len, rows.values())) > 20_000
    manifest = json.loads((whole / "stdlib_qa" / "manifest.json").read_text())
    for split in ("train", "val"):
        counts = {kind: sum(row["kind"] == kind for row in rows[split]) for kind in stdlib_qa.code_questions.KINDS}
        assert min(counts.values()) > 20
        assert manifest["counts"][split] == counts
        assert [row["sample_idx"] for row in rows[split]] == list(range(len(rows[split])))
        assert max(counts.values()) < 0.4 * len(rows[split])
    assert manifest["made_from"]["python"] == sys.version.split()[0]
    assert 0.05 < len(rows["val"]) / len(rows["train"]) < 0.3


@pytest.mark.slow
def test_no_module_and_no_context_is_in_both_splits(rows, whole):
    for field in ("module", "context"):
        assert not {row[field] for row in rows["train"]} & {row[field] for row in rows["val"]}
    modules = {
        split: {
            row["source"]
            for row in jsonl.read_rows(whole / "stdlib_text" / f"{split}.jsonl", {"source": str, "text": str})
        }
        for split in rows
    }
    assert not modules["train"] & modules["val"]
    for split in rows:
        assert {row["module"] for row in rows[split]} <= modules[split]


@pytest.mark.slow
def test_no_question_contains_its_answer(rows):
    for row in rows["train"] + rows["val"]:
        question, answer = row["question"].lower(), row["answer"].lower()
        assert answer not in question
        words, question_words = (" ".join(re.findall(r"\w+", text)) for text in (answer, question))
        assert words
        assert f" {words} " not in f" {question_words} "


@pytest.mark.slow
def test_questions_are_distinct(rows):
    for split in rows:
        assert len({(row["context"], row["question"]) for row in rows[split]}) == len(rows[split])


@pytest.mark.slow
def test_answers_follow_from_the_context_only(rows):
    """Parse each context afresh and derive the answers another way."""
    num_checked = dict.fromkeys(stdlib_qa.code_questions.KINDS, 0)
    for row in rows["train"] + rows["val"]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (node,) = ast.parse(row["context"]).body
        assert all(
            not ast.get_docstring(n)
            for n in ast.walk(node)
            if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
        )
        assert 40 <= len(row["context"]) <= 1000
        answer, kind = row["answer"], row["kind"]
        if kind == "name":
            assert node.name == answer
        elif kind == "parameters":
            arguments = sorted(
                (a for a in ast.walk(node.args) if isinstance(a, ast.arg)), key=lambda a: (a.lineno, a.col_offset)
            )
            besides = re.findall(r"besides (\w+)", row["question"])
            assert [*besides, *(name.lstrip("*") for name in answer.split(", "))] == [a.arg for a in arguments]
        elif kind == "default":
            parameter = row["question"].removesuffix("?").split()[-1]
            tail = [*node.args.posonlyargs, *node.args.args][::-1]
            defaults = dict(zip((a.arg for a in tail), node.args.defaults[::-1], strict=False))
            defaults |= {a.arg: d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d}
            assert ast.dump(defaults[parameter]) == ast.dump(ast.parse(answer, mode="eval").body)
        elif kind == "raises":
            exceptions = {
                ast.unparse(n.exc.func if isinstance(n.exc, ast.Call) else n.exc)
                for n in ast.walk(node)
                if isinstance(n, ast.Raise)
            }
            assert set(answer.split(", ")) == exceptions
        elif kind == "calls":
            body = ast.Module(node.body, [])
            callees = {
                n.func.id if isinstance(n.func, ast.Name) else n.func.attr
                for n in ast.walk(body)
                if isinstance(n, ast.Call) and isinstance(n.func, (ast.Name, ast.Attribute))
            }
            assert set(answer.split(", ")) == callees
            assert len(answer.split(", ")) == len(callees)
        elif kind == "decorators":
            elements = ast.parse(f"[{answer}]", mode="eval").body.elts
            assert [ast.dump(d) for d in node.decorator_list] == [ast.dump(d) for d in elements]
        num_checked[kind] += 1
    assert min(num_checked.values()) > 0


@pytest.mark.slow
def test_the_tokenizer_knows_its_control_tokens_and_all_bytes(whole):
    tokenizer = tokenizers.load(whole / "stdlib_tokenizer")
    assert len(tokenizer) == 4096
    for token in stdlib_qa.SPECIAL_TOKENS:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    strange = "def f():\r\n\t\x00\x7f é 漢字 🙂\n        return  1234"
    assert tokenizer.decode(tokenizer.encode(strange)) == strange


@pytest.mark.slow
def test_the_data_sets_read_it(whole):
    places = Places(data=whole, runs=whole)
    tokenizer = tokenizers.load(whole / "stdlib_tokenizer")
    config = cross_attention.Config(corpus="stdlib_qa", context_tokens=256, sequence_tokens=128, loss_on="answer")
    data = config.build(places, tokenizer, "val", 0)
    shuffled = data.with_shuffled_contexts()
    cut = 0
    for i in range(len(data)):
        sample = data.sample(0, i)
        assert shuffled.sample(0, i)["context_chunks"] != sample["context_chunks"]
        answer = [t for t, m in zip(sample["input_ids"], sample["loss_mask"], strict=True) if m]
        assert tokenizer.decode(answer) == references(data.row(i))[0] + "<|endoftext|>"
        cut += len(sample["context_chunks"][0]) == 256
    assert cut < 0.1 * len(data)
    assert len(dataset.Config(corpus="stdlib_text", sequence_tokens=256).build(places, tokenizer, "val", 0)) > 100


@pytest.mark.slow
def test_two_runs_give_the_same_bytes(small_stdlib, tmp_path):
    code = (
        "import sys; from pathlib import Path; from data_prep.crossattn.stdlib_qa import prepare; "
        "prepare(Path(sys.argv[1]), 600, Path(sys.argv[2]))"
    )
    trees = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed), str(small_stdlib)],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
        )
        trees.append(tree(tmp_path / seed))
    assert trees[0] == trees[1]
    assert set(trees[0]) >= {
        f"stdlib_{kind}/{split}.jsonl" for kind in ("qa", "text") for split in ("train", "val")
    } | {"stdlib_tokenizer/tokenizer.json"}


@pytest.mark.slow
def test_nothing_is_done_twice_and_changes_and_damage_are_noticed(small_stdlib, tmp_path, capsys):
    def prepare(vocab_size=600):
        return stdlib_qa.prepare(tmp_path, vocab_size, small_stdlib)

    assert prepare()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    capsys.readouterr()
    assert not prepare()
    assert re.fullmatch(
        r".*stdlib_qa, .*stdlib_text, .*stdlib_tokenizer: complete and made from these .*: nothing to do\.\n",
        capsys.readouterr().out,
    )
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    whole = tree(tmp_path)
    (tmp_path / "stdlib_text" / "val.jsonl").write_text("x")
    assert prepare()
    assert tree(tmp_path) == whole
    assert prepare(vocab_size=700)
    assert files.defect(tmp_path / "stdlib_tokenizer") is None
    (small_stdlib / "extra.py").write_text("def extra(value):\n    return other(value) + another(value)\n")
    try:
        assert prepare(vocab_size=700)
    finally:
        (small_stdlib / "extra.py").unlink()


@pytest.mark.slow
def test_unreadable_sources_are_skipped(small_stdlib, tmp_path):
    library = tmp_path / "lib"
    shutil.copytree(small_stdlib, library)
    (library / "broken.py").write_text("def f(:\n")
    (library / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    (library / "binary.py").write_bytes(b"\xff\xfe\x00")
    for name in ("test", "site-packages", "__pycache__"):
        (library / name).mkdir()
        (library / name / "inside.py").write_text("def f(x):\n    return g(x) + h(x) + i(x) + j(x)\n")
    sources = stdlib_qa.read_sources(library)
    assert "name = 'é'\n" in sources["latin"]
    assert "json" in sources
    assert "json.decoder" in sources
    assert not {"binary", "test.inside", "site-packages.inside"} & set(sources)
    rows, skipped = stdlib_qa.question_rows(sources)
    assert skipped == ["broken"]
    assert rows["train"]


def test_no_sources_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "python311.zip").write_bytes(b"")
    for place in (tmp_path, tmp_path / "python311.zip", tmp_path / "nowhere"):
        with pytest.raises(
            DataError,
            match=(
                rf"{re.escape(str(place))}: no Python sources. The standard library of this Python is zipped, "
                rf"frozen or compiled"
            ),
        ):
            stdlib_qa.prepare(tmp_path / "data", 600, place)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", stdlib_qa.FOLDERS)
def test_other_files_are_not_replaced(tmp_path, small_stdlib, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").touch()
    with pytest.raises(DataError, match=re.escape(str(tmp_path / name / "notes.txt"))):
        stdlib_qa.prepare(tmp_path, 600, small_stdlib)
    assert [path.name for path in tmp_path.rglob("*")] == [name, "notes.txt"]


def test_too_few_modules_for_two_splits(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "one.py").write_text("x = 1\n")
    with pytest.raises(DataError, match=r"lib: its 1 modules give too few questions"):
        stdlib_qa.prepare(tmp_path / "data", 600, tmp_path / "lib")


def test_too_small_a_vocabulary(tmp_path):
    with pytest.raises(ConfigError, match=r"^--vocab_size: expected at least 265, got 100\.$"):
        stdlib_qa.prepare(tmp_path, 100)


def test_the_split_is_the_same_everywhere():
    assert [stdlib_qa.split_of(name) for name in ("json.decoder", "tkinter", "heapq", "xml.dom.minidom")] == [
        "train",
        "train",
        "train",
        "val",
    ]
