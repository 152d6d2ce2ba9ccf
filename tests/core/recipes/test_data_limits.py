"""Limits of an experiment on the amount of data: --dry-run refuses a limit that the data cannot meet, by its path, and
accepts the largest that they can."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from data_prep import tokenize
from data_prep.t5 import prepare_task
from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.experiments.kinds import TokenizerSource
from src.experiments.registry import MODELS, bind
from src.files import new_directory
from src.support.call_once import call_once, remember_calls
from tests import toy
from tests.core.training.parallel.test_memory_plan import FID
from tests.systems.assistants import train_assistants
from tests.systems.interleaved import train_pages
from tests.systems.interleaved.streaming import pages
from tests.systems.metadata.test_metadata_lm import WITH_GAINS, write_metadata
from tests.systems.t5 import test_seq2seq

LONG_TASKS = """
phrases:
  columns: [text]
  labels: [it is red, blue]
  metrics: [accuracy]
  weight: 1
told:
  kind: text
  columns: [text]
  metrics: [em]
  weight: 1
"""
SEQ2SEQ = {**override(test_seq2seq.EXP, {"loop.best_metric": "val_loss", "loop.best_mode": "min"}), "predictions": None}
METRICS = [{"name": "squad"}]
ANSWERS = {"questions": 1, "max_new_tokens": 3, "metrics": METRICS}
SAMPLED = {**ANSWERS, "samples": 2}
CROSSATTN = override(
    toy.CROSSATTN,
    {
        "model.base": toy.BASE["model"],
        "model.train_all_params": True,  # as the base is not trained
        "answers": ANSWERS,
        "inference": {"max_new_tokens": 4, "metrics": METRICS},
    },
)
TOKENS = override(toy.BASE, {"data.corpus": "tokens"})
SPANS = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {**SEQ2SEQ["model"], "random": {**SEQ2SEQ["model"]["random"], "vocabulary_multiple": 64}},
    "data": {"name": "prefix_lm", "corpus": "tokens", "sequence_tokens": 16},
    "loop": toy.BASE["loop"],
}
SFT = train_assistants.SFT
GRPO: dict[str, Any] = {
    **override(SFT, {"answers.questions": 1, "loop.best_metric": "f1", "loop.best_mode": "max"}),
    "recipe": "grpo",
    "data": {"name": "rollouts", "prompts": train_assistants.TALK, "rollouts": 4, "group_size": 2, "max_new_tokens": 4},
    "rewards": [{"name": "expressions"}],
}
PARTS = {"name": "mixture", "parts": {"a": train_assistants.TALK, "b": train_assistants.TALK}}
MIXTURE = override(SFT, {"data": PARTS, "answers": None})
COUNTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "questions about images": (train_pages.PAGES, "answers.questions", 20),
    "questions of a data set": (CROSSATTN, "answers.questions", 16),
    "questions of conversations": (SFT, "answers.questions", 6),
    "sampled questions": (override(SFT, {"sampled": SAMPLED}), "sampled.questions", 6),
    "questions of prompts": (GRPO, "answers.questions", 6),
    "rows of an inference": (CROSSATTN, "inference.rows", 16),
    "rows of an inference on another split": (override(CROSSATTN, {"inference.split": "train"}), "inference.rows", 48),
    "rows of an inference on a source": (
        override(CROSSATTN, {"data.corpus": "sources", "inference.datasets": ["b"]}),
        "inference.rows",
        4,
    ),
    "rows of an inference on an index": (override(CROSSATTN, {"data.corpus": "sources"}), "inference.rows", 12),
    "validation rows": (CROSSATTN, "data.val_samples", 16),
    "validation rows of a source": (
        override(CROSSATTN, {"data.corpus": "sources", "data.val_datasets": ["a"]}),
        "data.val_samples",
        8,
    ),
    "validation rows of Fusion-in-Decoder": (FID, "data.val_samples", 16),
    "validation conversations": (SFT, "data.val_samples", 6),
    "validation rows of a part": (MIXTURE, "data.parts.b.val_samples", 6),
    "validation rows of a task": (SEQ2SEQ, "data.val_samples", 16),
    "validation documents with metadata": (WITH_GAINS, "data.val_documents", 32),
    "validation documents": (override(toy.BASE, {"data.name": "documents"}), "data.val_sequences", 16),
    "validation sequences of token files": (TOKENS, "data.val_sequences", 41),
    "validation sequences for T5": (SPANS, "data.val_sequences", 41),
    "samples of a part": (override(MIXTURE, {"data.draw": {"a": {"size": 1}}}), "data.draw.a.size", 24),
}
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a source that no row has": (
        override(CROSSATTN, {"data.corpus": "sources"}),
        {"inference.datasets": ["a", "c"]},
        r"inference\.datasets: .*unknown source 'c'.* Known: a, b\.",
    ),
    "a source of the data that no row has": (
        override(CROSSATTN, {"data.corpus": "sources"}),
        {"data.train_datasets": ["c"]},
        r"data\.train_datasets: .*unknown source 'c'.* Known: a, b\.",
    ),
    "a row number that is out of range": (
        override(CROSSATTN, {"data.corpus": "sources"}),
        {"inference.index_file": "bad.txt"},
        r"inference\.index_file: bad\.txt: row 12 is out of range, expected 0 to 11",
    ),
    "a split that does not exist": (CROSSATTN, {"inference.split": "test"}, r"toy_qa: has no test\.jsonl"),
    "rows without a field": (
        CROSSATTN,
        {"data.corpus": "toy_text", "inference.rows": 1},
        r"toy_text/train\.jsonl:1: field 'context' is missing",
    ),
    "a metric of contexts on rows without contexts": (
        SFT,
        {"answers.metrics": [{"name": "knowledge"}]},
        r"answers\.metrics: 'knowledge' .*'conversations' data have no contexts",
    ),
    "a metric of expressions on other questions": (
        SFT,
        {"answers.metrics": [{"name": "expressions"}]},
        r"metric 'expressions': expected questions such as .*, got '.*'",
    ),
    "labels that are not the answers of conversations": (
        SFT,
        {"answers.metrics": [{"name": "classification", "scores": ["accuracy"], "labels": ["left", "right"]}]},
        r"metric 'classification': .* labels left, right, got '",
    ),
    "labels that are not the answers of questions with contexts": (
        CROSSATTN,
        {"inference.metrics": [{"name": "classification", "scores": ["accuracy"], "labels": ["left", "right"]}]},
        r"metric 'classification': .* labels left, right, got '",
    ),
    "a score of all answers for sampled answers": (
        override(SFT, {"sampled": SAMPLED}),
        {"sampled.metrics": [{"name": "classification", "scores": ["accuracy", "f1"], "labels": ["a", "b"]}]},
        r"sampled.*: 'f1' is not a score of single answers",
    ),
    "one context for all rows": (CROSSATTN, {"data.val_samples": 1}, r"data\.val_samples: 1: .*same"),
    "questions without room for the template": (
        CROSSATTN,
        {"data.sequence_tokens": 3},
        r"data\.sequence_tokens: .*3\.",
    ),
    "contexts without room for the template": (CROSSATTN, {"data.context_tokens": 3}, r"data\.context_tokens: .*3\."),
    "text that is shorter than a sequence": (
        override(toy.BASE, {"model.max_positions": 9000}),
        {"data.sequence_tokens": 9000},
        r"data\.corpus: toy_text: split 'val' has at most \d{4} tokens",
    ),
    "text without text": (toy.BASE, {"data.corpus": "sources"}, r"sources/train\.jsonl:1: field 'text' is missing"),
    "labels that are longer than a target": (
        override(SEQ2SEQ, {"data.task": "phrases", "data.corpus": "phrases"}),
        {"data.target_tokens": 3},
        r"the target 'it is red' has 4 tokens .*data\.target_tokens is 3",
    ),
    "texts that are longer than a target": (
        override(SEQ2SEQ, {"data.task": "told", "data.corpus": "told"}),
        {"data.target_tokens": 3},
        r"the target 'it is red' has 4 tokens .*data\.target_tokens is 3\. 15 more",
    ),
    "ranked replies without ranks": (
        override(train_assistants.REWARD, {"model.base": SFT["model"]}),
        {"data.corpus": "numbers"},
        r"numbers/train\.jsonl: no row of the kinds that 'ranked_replies' data read: ranked, scored",
    ),
    "a share of less than a sample": (
        MIXTURE,
        {"data.rates": {"a": 1.0, "b": 99.0}, "data.samples_per_epoch": 9},
        r"data\.parts\.a: its rate gives less than one of the 9 samples",
    ),
    "a fraction of less than a sample": (
        MIXTURE,
        {"data.draw": {"a": {"fraction": 0.01}}},
        r"data\.draw\.a\.fraction: 0\.01 of 24 samples",
    ),
    "tiles for images of a model without tiles": (
        train_pages.PAGES,
        {"model.max_tiles": 1},
        r"model\.max_tiles: 1, .*data\.images\.max_size \d+ .* 2 tiles per side",
    ),
    "images of another family": (
        override(train_pages.PAGES, {"data.images.max_size": pages.SIDE}),
        {"data.images.style": "idefics2"},
        r"data\.images\.style: expected the model's 'idefics3', got 'idefics2'",
    ),
    "gains from a column that no document has": (
        override(WITH_GAINS, {"data.writing.keys": ["title", "entity", "url"], "data.weights": {"url": 1.0}}),
        {"gains.columns": ["url"]},
        r"gains\.columns: fewer than two documents of the validation split have url",
    ),
}


OTHER_TOKENIZER = {
    "of text": (TOKENS, "data.corpus"),
    "of text for T5": (SPANS, "data.corpus"),
    "of a part": (
        {**SPANS, "data": {"name": "mixture", "parts": {"a": SPANS["data"], "b": SPANS["data"]}}},
        "data.parts.b.corpus",
    ),
    "of a model with control tokens": (override(TOKENS, {"model.extra_tokens": ["<a>"]}), "data.corpus"),
}


READERS: dict[str, tuple[dict[str, Any], str]] = {
    "text": (TOKENS, "data.corpus"),
    "text for T5": (SPANS, "data.corpus"),
    "a part of a mixture": (
        {**SPANS, "data": {"name": "mixture", "parts": {"a": SPANS["data"], "b": SPANS["data"]}}},
        "data.parts.b.corpus",
    ),
}
LORA = {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["c_attn"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits")
    test_seq2seq.write_data(folder)
    data = train_assistants.write_data(folder / "data")
    train_pages.write_data(data)
    write_metadata(data)
    rows = [json.loads(line) for line in (data / "toy_qa" / "train.jsonl").read_text().splitlines()[:12]]
    rows = [{**row, "dataset": "aab"[i % 3]} for i, row in enumerate(rows)]
    with new_directory(data / "sources") as new:
        for split in ("train", "val"):
            toy._write_rows(new / f"{split}.jsonl", rows)
        (new / "all.txt").write_text("\n".join(map(str, range(12))))
        (new / "bad.txt").write_text("0\n12\n")
    (folder / "own.yaml").write_text(LONG_TASKS)
    for task in ("phrases", "told"):
        words = list[str]()
        for split in ("train", "val"):
            path = folder / f"long.{split}.jsonl"
            toy._write_rows(path, [{"text": f"{split} {i}", "label": "it is red"} for i in range(8)])
            words += [f"--{split}", str(path)]
        names = ["--data_path", str(data), "--task", task, "--task_file", str(folder / "own.yaml")]
        assert prepare_task.main([*names, *words]) == 0
    words = [word for split in ("train", "val") for word in (f"--{split}", str(data / "toy_text" / f"{split}.jsonl"))]
    for name, tokenizer in (("tokens", "toy_tokenizer"), ("other_tokens", "pages_tokenizer")):
        assert tokenize.main(["--data_path", str(data), "--name", name, "--tokenizer", tokenizer, *words]) == 0
    return folder


def messages(exp: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and errors of a dry run."""
    capsys.readouterr()
    return toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, folder), capsys.readouterr().err


@pytest.mark.parametrize("case", COUNTS)
def test_a_limit_is_compared_with_the_data(case: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    exp, path, available = COUNTS[case]
    assert messages(override(exp, {path: available}), folder, capsys) == (0, "")
    code, error = messages(override(exp, {path: available + 1}), folder, capsys)
    assert code == 1
    assert re.fullmatch(rf"error: x\[0\]: {re.escape(path)}: {available + 1}\D+{available} .*\n", error), error


@pytest.mark.parametrize("case", MISTAKES)
def test_data_that_do_not_fit_are_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    exp, changes, message = MISTAKES[case]
    assert messages(exp, folder, capsys) == (0, "")
    code, error = messages(override(exp, changes), folder, capsys)
    assert code == 1
    assert re.search(message, error), error


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("case", READERS)
def test_token_files_of_another_tokenizer_are_refused(
    case: str, depth: int, folder: Path, capsys: pytest.CaptureFixture[str]
):
    """Also where the tokenizer is that of a parent which is not trained yet, or of the parent's parent."""
    exp, path = READERS[case]
    parents = list[dict[str, Any]]()
    for _ in range(depth):
        parents.append(exp)
        exp = {**exp, "model": ref(exp), "seed": 1}
    for corpus, code in (("tokens", 0), ("other_tokens", 1)):
        capsys.readouterr()
        groups = {"x": [override(exp, {path: corpus})], "parents": parents}
        assert toy.main(["-e", "x", "--dry-run", "--with-parents"], groups, folder) == code
        error = capsys.readouterr().err
        assert bool(re.search(r"error: x\[0\]: .*/other_tokens: .*'pages_tokenizer'", error)) == bool(code), error


def test_targets_are_compared_with_the_tokenizer_of_an_untrained_parent(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    child = override(SEQ2SEQ, {"data.task": "told", "data.corpus": "told", "model": ref(SEQ2SEQ)})
    for tokens, code in ((4, 0), (3, 1)):
        groups = {"x": [override(child, {"data.target_tokens": tokens})], "parent": [SEQ2SEQ]}
        assert toy.main(["-e", "x", "--dry-run", "--with-parents"], groups, folder) == code
    assert "the target 'it is red' has 4 tokens" in capsys.readouterr().err


def test_tokenizer_is_found_before_a_model_is_built(folder: Path):
    experiments = {exp_id(exp): exp for exp in (toy.BASE, train_pages.PAGES)}
    places = Places(folder / "data", folder / "runs", experiments)
    toy_tokenizer = TokenizerSource(folder / "data" / "toy_tokenizer")
    for model in (toy.BASE["model"], ref(toy.BASE), {**LORA, "base": ref(toy.BASE)}):
        assert bind(MODELS, model).find_tokenizer(places) == toy_tokenizer
    pages_tokens = tuple(bind(MODELS, train_pages.PAGES["model"]).new_tokens())
    assert bind(MODELS, ref(train_pages.PAGES)).find_tokenizer(places) == TokenizerSource(
        folder / "data" / "pages_tokenizer", pages_tokens
    )
    for model in (ref(SFT), {"name": "hf", "path": "nowhere"}, {**toy.BASE["model"], "tokenizer": "nowhere"}):
        assert bind(MODELS, model).find_tokenizer(places) is None


def test_a_limit_reads_no_more_rows_than_it_needs(folder: Path, capsys: pytest.CaptureFixture[str]):
    rows = (folder / "data" / "toy_qa" / "val.jsonl").read_text().splitlines()
    with new_directory(folder / "data" / "torn") as new:
        for split in ("train", "val"):
            (new / f"{split}.jsonl").write_text("\n".join([*rows[:4], "not JSON", *rows]) + "\n")
    exp = override(CROSSATTN, {"data.corpus": "torn", "data.val_datasets": ["toy"], "answers": ANSWERS})
    assert messages(override(exp, {"answers.questions": 4}), folder, capsys) == (0, "")
    assert "val.jsonl:5: not valid JSON" in messages(override(exp, {"answers.questions": 5}), folder, capsys)[1]


def test_forwarded_methods_of_a_wrapper_are_cached_separately(tmp_path: Path):
    model: Any = bind(MODELS, CROSSATTN["model"])
    places = Places(toy.write_data(tmp_path), tmp_path)
    with remember_calls():
        sizes, folder = call_once(model.architecture, places), call_once(model.tokenizer_folder, places)
    assert (sizes.max_positions, folder) == (64, tmp_path / "toy_tokenizer")
