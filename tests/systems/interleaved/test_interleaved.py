"""Trainings on streamed pages: what images are worth, kills and other numbers of processes, deny lists, and the audit
of what was read."""

import json
import multiprocessing
import os
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.interleaved import digit_pages, index
from data_prep.interleaved.write import Document, Part, Writing, write
from src.errors import ConfigError, DataError, RunError
from src.experiments.config import Places
from src.experiments.grid import override, parse_assignments
from src.experiments.interfaces import load_experiment
from src.operations import interventions
from src.runs import ledger, plan
from src.runs.history import branches
from src.systems.interleaved.groups import INTERLEAVED_PHOTOGRAPHS
from src.systems.interleaved.streaming import audit, manifest, tar_index
from src.training.checkpointing import continuation
from tests import toy
from tests.faults import harness
from tests.systems.interleaved import train_pages
from tests.systems.interleaved.streaming import pages, test_streamed
from tests.systems.interleaved.train_pages import PAGES, write_data


def exp_id(exp: dict[str, Any]) -> str:
    """The id as trainval.py computes it, without operational fields."""
    return plan.load(exp, "", "").exp_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interleaved")
    write_data(folder / "data")
    assert toy.main(["-e", "pages"], {"pages": [PAGES]}, folder) == 0
    return folder


def test_a_continuation_can_change_operational_fields_and_validation(tmp_path: Path):
    parent = override(PAGES, {"data.errors": {"max_documents": 0.02}, "data.prefetch_shards": 3})
    child = override(parent, {"model": {"name": "experiment", "exp_id": exp_id(parent), "step": 2}})
    places = Places(tmp_path, tmp_path, {exp_id(parent): plan.load(parent, "", "").exp})
    for change in ({}, {"data.errors.max_documents": 1.0, "data.prefetch_shards": 1, "data.val_documents": 1}):
        continuation.check(load_experiment(override(child, change), ""), places)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\.window"):
        continuation.check(load_experiment(override(child, {"data.window": 7}), ""), places)  # type: ignore[arg-type]


def damage_images(train: Path, images: int) -> None:
    """Overwrite the first images of the tars of a folder."""
    dataset_manifest = manifest.load(train)
    for shard in dataset_manifest.shards:
        parts = tar_index.load_file(train / shard.index, shard.bytes, shard.url, shard.index_digest).parts
        content = bytearray((train / shard.url).read_bytes())
        for part in parts[parts["kind"] == tar_index.IMAGE][:images]:
            content[int(part["offset"]) + 20] ^= 0xFF
        pages.damage(train / shard.url, content)


def test_a_run_stopped_by_its_error_budget_resumes_with_another_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_data(tmp_path / "data")
    damage_images(tmp_path / "data" / "toy_pages" / "train", 4)
    strict = override(PAGES, {"data.errors": {"max_documents": 0.02}, "loop.steps": 8})
    default, generous = override(PAGES, {"loop.steps": 8}), override(strict, {"data.errors.max_documents": 1.0})
    assert exp_id(strict) == exp_id(generous) == exp_id(default)
    run = tmp_path / "runs" / exp_id(strict)
    assert toy.main(["-e", "pages"], {"pages": [strict]}, tmp_path) == 1
    advice = re.search(r"data\.errors\.max_documents=\S+", capsys.readouterr().err)
    assert advice
    assert json.loads((run / "exp_dict.json").read_text()) == plan.load(default, "", "").exp
    resume_args = ["--exp_id", exp_id(strict), "--set", "data.errors.max_documents=1.0"]
    assert toy.main([*resume_args, "--dry-run"], {"pages": [default]}, tmp_path) == 0
    assert toy.main(resume_args, {"pages": [default]}, tmp_path) == 0
    (event,) = [event for event in ledger.read(run) if event["event"] == "policy"]
    assert event["changes"] == {"data.errors.max_documents": ["0.02", "1.0"]}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").symlink_to(tmp_path / "data")
    assert toy.main(["-e", "pages"], {"pages": [generous]}, tmp_path / "other") == 0
    scores = [toy.evaluations(place, exp_id(strict))[-1] for place in (tmp_path, tmp_path / "other")]
    assert scores[0]["unreadable/pages"] == scores[1]["unreadable/pages"] > 0
    assert {key: scores[0][key] for key in scores[1] if "loss" in key} == {
        key: scores[1][key] for key in scores[1] if "loss" in key
    }


def test_a_launched_run_gets_the_error_policy_of_its_experiment(tmp_path: Path):
    (item,) = plan.load_groups({"g": [override(PAGES, {"data.errors": {"bad_document": "raise"}})]}, ["g"], [])
    assert item.set_arguments == ["--set", 'data.errors={"bad_document": "raise"}']
    assert plan.load(item.exp, "", "").recipe.data.errors.bad_document == "skip_document"  # type: ignore[attr-defined]
    ((assignment,),) = parse_assignments(item.set_arguments[1:])
    (again,) = plan.load_groups({"g": [item.exp]}, ["g"], [assignment])
    assert (again.exp_id, again.recipe) == (item.exp_id, item.recipe)


def test_scores_include_the_sources_and_the_control(folder: Path):
    *_, last = toy.evaluations(folder, exp_id(PAGES))
    for kind in ("documents", "images", "image_tokens", "text_tokens", "unreadable", "loss"):
        assert {f"{kind}/more", f"{kind}/pages"} <= last.keys()
    assert last["documents/pages"] / last["documents/more"] == pytest.approx(2, rel=0.2), "by their rates"
    assert {
        "data/padding",
        "data/left_out",
        "data/left_out/pages",
        "val_loss/more",
        "val_loss_shuffled_context/pages",
    } <= last.keys()
    assert {"word_accuracy", "word_accuracy_shuffled_context"} <= last.keys()
    assert last["val_loss"] != last["val_loss_shuffled_context"], "other images give another loss"
    tokens = last["loss/more"], last["loss/pages"]
    assert min(tokens) < last["train_loss"] < max(tokens)


@pytest.mark.slow
def test_weights_of_sources_change_the_loss_and_its_count(folder: Path, tmp_path: Path):
    """Both halved, nothing changes; one alone changes the mean."""
    (tmp_path / "data").symlink_to(folder / "data")
    halved_weights = override(
        PAGES, {"data.sources.pages.loss_weight": 0.5, "data.sources.more.loss_weight": 0.5, "loop.steps": 8}
    )
    one = override(PAGES, {"data.sources.pages.loss_weight": 0.25, "loop.steps": 8})
    plain = override(PAGES, {"loop.steps": 8})
    assert toy.main(["-e", "pages"], {"pages": [halved_weights, one, plain]}, tmp_path) == 0
    losses = [toy.evaluations(tmp_path, exp_id(exp))[-1] for exp in (halved_weights, one, plain)]
    assert losses[0]["train_loss"] == pytest.approx(losses[2]["train_loss"], rel=1e-5)
    assert losses[0]["val_loss"] == pytest.approx(losses[2]["val_loss"], rel=1e-4)
    assert losses[1]["train_loss"] != pytest.approx(losses[2]["train_loss"], rel=1e-4)


def run_audit(folder: Path, run: Path, step: int | None = None) -> audit.Delivery:
    return audit.replay(run, folder / "data", step)


def test_an_audit_reports_the_documents_read(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run = folder / "runs" / exp_id(PAGES)
    audit_report = run_audit(folder, run)
    assert audit_report.step == 24
    assert run_audit(folder, run, 16).documents() <= audit_report.documents()
    arguments = [str(run), "--data_path", str(folder / "data"), "--documents", str(tmp_path / "documents.tsv")]
    assert audit.main(arguments) == 0
    output = capsys.readouterr().out
    assert "up to step 24" in output
    assert "shard-00002.tar" in output
    counts = [int(line.split("\t")[3]) for line in (tmp_path / "documents.tsv").read_text().splitlines()]
    assert len(counts) == 100
    assert sum(counts) == audit_report.documents().total()
    assert audit.main([str(run), "--data_path", str(folder / "data"), "--step", "5"]) == 1
    assert "no checkpoint of step 5" in capsys.readouterr().err


def test_an_audit_refuses_another_history(folder: Path, tmp_path: Path):
    run = tmp_path / exp_id(PAGES)
    shutil.copytree(folder / "runs" / exp_id(PAGES), run)
    state = run / "checkpoints" / "step-00000024" / "state.json"
    raw = json.loads(state.read_text())
    raw["cursor"]["1"][0] += 1
    state.write_text(json.dumps(raw))
    with pytest.raises(RunError, match=r"its cursor differs from the one recomputed"):
        audit.replay(run, folder / "data", 24)


@pytest.mark.slow
def test_denied_documents_are_not_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """From the newest checkpoint on; undone to the byte; and kept by a rewind to before it."""
    write_data(tmp_path / "data")
    whole, run = {"pages": [PAGES]}, tmp_path / "runs" / exp_id(PAGES)
    assert toy.main(["-e", "pages"], whole, tmp_path) == 0
    assert interventions.main(["rewind", str(run), "--to", "16"]) == 0
    deny_list = tmp_path / "list.txt"
    deny_list.write_text("# spoilt\nsource more\nshard  pages shard-00001.tar\n")
    before = json.loads((run / "checkpoints" / "step-00000016" / "state.json").read_text())
    assert interventions.main(["deny", str(run), str(deny_list), "--why", "spoilt"]) == 0
    assert "without 2 denied: source more, shard pages shard-00001.tar" in capsys.readouterr().out
    assert interventions.main(["undo", str(run)]) == 0
    assert [branch.deny_list for branch in branches.read(run)] == [None]
    assert interventions.main(["deny", str(run), str(deny_list), "--why", "spoilt"]) == 0
    assert toy.main(["-e", "pages"], whole, tmp_path) == 0
    last, first = run_audit(tmp_path, run), run_audit(tmp_path, run, 16)
    later = last.documents() - first.documents()
    data = last.data
    denied_documents = {*data.find("source more"), *data.find("shard pages shard-00001.tar")}
    assert first.documents().keys() & denied_documents
    assert not later.keys() & denied_documents
    assert later.keys() - denied_documents
    assert json.loads((run / "checkpoints" / "step-00000016" / "state.json").read_text()) == before
    assert interventions.main(["rewind", str(run), "--to", "16", "--data", "skip:2"]) == 0
    (branch,) = branches.read(run)
    assert (branch.deny_list, branch.data) == (["source more", "shard pages shard-00001.tar"], "skip:2")
    deny_list.write_text("source pages\n")
    assert interventions.main(["deny", str(run), str(deny_list)]) == 0
    (branch,) = branches.read(run)
    assert (branch.deny_list, branch.data) == (["source more", "shard pages shard-00001.tar", "source pages"], "skip:2")
    assert toy.main(["-e", "pages"], whole, tmp_path) == 1
    assert "none of 100 documents fits into a row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "has no entries"),
        ("source\n", 'list.txt:1: expected "source NAME"'),
        ("\n# x\nshards a\n", "list.txt:3: expected"),
        ("document a pages 3.tar", "expected the number of a document, counted from 0, got 'a'"),
    ],
)
def test_a_wrong_deny_list_is_an_error(
    folder: Path, tmp_path: Path, text: str, match: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "list.txt").write_text(text)
    assert (
        interventions.main(["deny", str(folder / "runs" / exp_id(PAGES)), str(tmp_path / "list.txt"), "--dry-run"]) == 1
    )
    assert match in capsys.readouterr().err


def test_other_data_have_no_deny_list(tmp_path: Path):
    from src.data.orders import order_of
    from src.data.text import tokenizers
    from src.experiments.registry import DATASETS, bind
    from src.runs.history.branches import Branch

    toy.write_data(tmp_path / "data")
    data = bind(DATASETS, toy.BASE["data"]).build(
        Places(tmp_path / "data", tmp_path), tokenizers.load(tmp_path / "data" / "toy_tokenizer"), "train", 0
    )
    with pytest.raises(RunError, match=r"^deny list: .* undo RUN"):
        order_of(data, 0, 4, 10, [Branch(number=1, from_step=2, deny_list=["source a"])])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"data": toy.BASE["data"]}, "data: expected 'streamed'|this recipe reads data for"),
        ({"model": toy.BASE["model"]}, "model: expected a decoder that reads images"),
        ({"answers.num_beams": 2}, "answers.num_beams: 2, but models that read images"),
    ],
)
def test_untrainable_experiments_are_refused(changes: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        load_experiment(override(PAGES, changes), "here")


@pytest.mark.parametrize(
    ("questions", "match"),
    [(13, "answers.questions: 13 requested, only 10 available"), (2, None)],
)
def test_questions_must_be_there(
    folder: Path, tmp_path: Path, questions: int, match: str | None, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "data").symlink_to(folder / "data")
    exp = override(PAGES, {"answers.questions": questions, "loop.steps": 2, "loop.eval_every": 2})
    assert toy.main(["-e", "pages"], {"pages": [exp]}, tmp_path) == (1 if match else 0)
    assert (match or "") in capsys.readouterr().err


def test_pages_without_images_have_no_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_data(tmp_path / "data")
    plain = [Document(f"{i:03}", [Part("text", b"text alone")]) for i in range(8)]
    for split in ("train", "val"):
        write(tmp_path / "data" / "plain" / split, plain, {}, Writing(source="plain"))
    exp = override(PAGES, {"data.sources": {"plain": {"path": "plain"}}, "loop.steps": 2, "loop.eval_every": 2})
    asking, exp = exp, {name: value for name, value in exp.items() if name != "answers"}
    assert toy.main(["-e", "pages"], {"pages": [exp]}, tmp_path) == 0
    assert not [name for name in toy.evaluations(tmp_path, exp_id(exp))[-1] if "shuffled" in name]
    asking = override(asking, {"answers.questions": 1})
    assert toy.main(["-e", "pages"], {"pages": [asking]}, tmp_path) == 1
    assert "answers.shuffled_context: these data have no contexts" in capsys.readouterr().err


def test_frames_must_be_those_of_the_model(folder: Path):
    experiment: Any = load_experiment(override(PAGES, {"data.images.image_tokens": 4}), "here")
    with pytest.raises(
        ConfigError,
        match="frame_size is 8 and image_tokens is 4, but the model reads frames of 8 pixels a side as 1 tokens each",
    ):
        experiment.check(Places(folder / "data", folder / "runs"))


@pytest.mark.slow
def test_bad_documents_are_counted_and_recorded_in_the_run(tmp_path: Path):
    write_data(tmp_path / "data")
    (tmp_path / "data" / "pages").symlink_to("toy_pages")
    for document_number in (3, 20):
        test_streamed.damage(tmp_path / "data", document_number, image=False)
    lenient = override(PAGES, {"data.errors.max_documents": 0.1})
    assert toy.main(["-e", "pages"], {"pages": [lenient]}, tmp_path) == 0
    run = tmp_path / "runs" / exp_id(PAGES)
    records = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    assert {record["document"] for record in records} <= {3, 20}
    assert sum(row["unreadable/pages"] for row in toy.evaluations(tmp_path, exp_id(PAGES))) > 0
    audit_report = run_audit(tmp_path, run)
    read = {(record["shard"], record["document"]) for record in records}
    assert {
        audit_report.data.documents[1].locate(document - audit_report.data.first(1))
        for _, document, _ in audit_report.unreadable
    } == {(int(shard[-9:-4]), document) for shard, document in read}
    assert not audit_report.documents().keys() & {document for _, document, _ in audit_report.unreadable}, (
        "an audit takes padding for no reading"
    )
    strict = override(PAGES, {"data.errors": {"bad_document": "raise"}})
    assert toy.main(["-e", "pages", "-r", "1"], {"pages": [strict]}, tmp_path) == 1
    assert not multiprocessing.active_children(), "a process that reads ends with the training, also where that fails"
    experiment: Any = load_experiment(strict, "here")
    data = experiment.data.build(Places(tmp_path / "data", tmp_path), pages.tokenizer(), "train", 0)
    with pytest.raises(DataError, match=r"pages: document 3 of shard-00000\.tar"):
        data.sample(0, data.first(1) + 3)


@pytest.mark.slow
def test_a_shard_that_was_replaced_between_two_starts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By another of the same size."""
    write_data(tmp_path / "data")
    assert toy.main(["-e", "pages"], {"pages": [PAGES]}, tmp_path) == 0
    run = tmp_path / "runs" / exp_id(PAGES)
    (run / "status.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000024")
    path = tmp_path / "data" / "more_pages" / "train" / "shard-00001.tar"
    content = bytearray(path.read_bytes())
    content[512:514] = b"zz"
    path.write_bytes(content)
    assert toy.main(["-e", "pages"], {"pages": [PAGES]}, tmp_path) == 1
    assert "inputs changed since the start of the run: content of data.sources.more" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("trainings", [3, pytest.param(10, marks=pytest.mark.matrix)])
def test_trainings_are_killed_and_end_with_the_same_bits(tmp_path: Path, trainings: int):
    """And the audit agrees with what the processes themselves have written down."""
    write_data(tmp_path / "data")
    draw, log = random.Random(3), tmp_path / "log"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    command = [sys.executable, *launcher, "--rdzv-endpoint", "localhost:0", train_pages.__file__, str(tmp_path)]
    training = harness.Training(command, tmp_path / "runs" / exp_id(train_pages.EXP), toy.environment(), warm=True)
    expected = harness.run_undisturbed(training, log)
    for number in range(trainings):
        for path in tmp_path.glob("keys-*.jsonl"):
            path.unlink()
        report = harness.Report(("SIGKILL", "SIGTERM"))
        harness._train(training, 2, draw, log, 2, report)
        assert training.fingerprints() == expected, f"training {number}: {report.faults}"
        audit_report = run_audit(tmp_path, training.run)
        assert audit_report.pieces == train_pages.delivered_documents(tmp_path, audit_report.step), (
            f"training {number}: {report.faults}"
        )
        shutil.rmtree(training.run)


@pytest.mark.slow
def test_trainings_resume_with_other_numbers_of_processes(tmp_path: Path):
    """One, three and two: the same rows; the weights differ in their last digits."""
    write_data(tmp_path / "data")
    ends: list[Counter[Any]] = []
    for worlds in ((2,), (1, 3, 2)):
        for path in tmp_path.glob("keys-*.jsonl"):
            path.unlink()
        for number, world_size in enumerate(worlds):
            stop = [str((number + 1) * 7)] if number + 1 < len(worlds) else []
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(world_size),
                "--master-port",
                "0",
            ]
            words = [
                *command,
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "localhost:0",
                train_pages.__file__,
                str(tmp_path),
                *stop,
            ]
            training = harness.Training(
                words, tmp_path / "runs" / exp_id(train_pages.EXP), toy.environment(), warm=True
            )
            training.start(tmp_path / "log").wait(300)
        audit_report = run_audit(tmp_path, training.run)
        ends.append(train_pages.delivered_documents(tmp_path, audit_report.step))
        assert audit_report.pieces == ends[-1]
        shutil.rmtree(training.run)
    assert ends[0] == ends[1]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--fsdp"], ["--deepspeed", str(toy.ROOT / "resources" / "ds_config_zero3.json")]])
def test_answers_are_generated_with_sharded_weights(folder: Path, tmp_path: Path, words: list[str]):
    """The prompts of one process have an image, and those of the other have none."""
    (tmp_path / "data").symlink_to(folder / "data")
    exp = override(PAGES, {"loop.steps": 8})
    done = toy.run(toy.project(tmp_path, f"EXP_GROUPS = {{'x': [{exp!r}]}}\n"), ["-e", "x", *words], tmp_path, 2)
    assert "word_accuracy_shuffled_context" in toy.evaluations(tmp_path, exp_id(exp))[-1], done.stderr[-3000:]


def test_a_control_token_of_an_image_is_never_learned(folder: Path):
    experiment: Any = load_experiment(PAGES, "here")
    data = experiment.data.build(Places(folder / "data", folder), pages.tokenizer(), "train", 0)
    ids = torch.tensor([pages.tokenizer().convert_tokens_to_ids(token) for token in pages.TOKENS])
    for document in range(len(data)):
        for piece in data.pieces(document):
            row = data.read_piece(document, piece)
            assert not (torch.isin(torch.tensor(row.input_ids), ids) & torch.tensor(row.loss_mask)).any()


@pytest.mark.skipif(
    "TRAINVAL_DATA" not in os.environ, reason="TRAINVAL_DATA is not set: it names a folder with real data sets"
)
def test_released_photographs_are_mixed_with_pages(tmp_path: Path):
    """Tars as they were released: pairs of a photograph and its caption, and a JSON that is not read."""
    digit_pages.prepare(tmp_path / "data", pages=60, val_pages=20)
    (tar,) = (Path(os.environ["TRAINVAL_DATA"]) / "image" / "cc12m_wds").glob("*.tar")
    tokenizer = str(tmp_path / "data" / "digit_pages" / "tokenizer")
    for split in ("train", "val"):
        output = str(tmp_path / "data" / "photographs" / split)
        assert (
            index.main([str(tar), "--verify", "--tokenizer", tokenizer, "--output", output, "--source", "photographs"])
            == 0
        )
    exp = override(INTERLEAVED_PHOTOGRAPHS, {"loop.steps": 8, "loop.eval_every": 8, "answers.questions": 4})
    assert toy.main(["-e", "x"], {"x": [exp]}, tmp_path) == 0
    *_, last = toy.evaluations(tmp_path, exp_id(exp))
    assert last["documents/digits"] / last["documents/photographs"] == pytest.approx(3, rel=0.7)
    assert last["images/photographs"] > 0
    assert last["unreadable/photographs"] == 0
    assert last["val_loss/photographs"] != last["val_loss_shuffled_context/photographs"]
