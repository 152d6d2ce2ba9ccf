"""Single replies with a label: groups, mismatched pairs, refusals, and training on them."""

import json
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import DATASETS, bind
from tests import toy
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.train_assistants import KTO, REPLIES, REWARD, SFT, TALK, write_data

DATA: dict[str, Any] = {"name": "labeled_replies", "corpus": "labeled", "sequence_tokens": 64, "group_size": 4}
ROWS = [{**talk.row(f"{i}?", f"answer {i}"), "label": i % 3 > 0} for i in range(10)]


def build(folder: Path, rows: list[dict[str, Any]], split: str = "train", seed: int = 0, **changes: Any) -> Any:
    talk.write_rows(folder / "data" / "labeled", {"train": rows, "val": rows})
    config = bind(DATASETS, {**DATA, **changes})
    return config.build(Places(folder / "data", folder), talk.tokenizer(), split, seed)


def texts(sample: Any, is_reply: bool) -> list[str]:
    """The replies of a sample, or its prompts."""
    words = talk.tokenizer()
    rows = zip(sample["input_ids"], sample["loss_mask"], strict=True)
    return [
        words.decode([i for i, is_learned in zip(ids, mask, strict=True) if is_learned == is_reply])
        for ids, mask in rows
    ]


def test_each_prompt_is_also_read_with_another_reply_of_its_group(tmp_path: Path):
    """The replies are rotated by one, as TRL does; then prompts and replies are the same sets in both halves."""
    data = build(tmp_path, ROWS)
    assert [len(data.sample(0, i)["ranks"]) for i in range(len(data))] == [8, 6, 6]
    labels = {}
    for index in range(len(data)):
        sample = data.sample(0, index)
        half = len(sample["ranks"]) // 2
        assert sample["mismatch_mask"] == [False] * half + [True] * half
        prompts, replies = texts(sample, is_reply=False), texts(sample, is_reply=True)
        assert prompts[:half] == prompts[half:]
        assert [replies[half - 1], *replies[: half - 1]] == replies[half:]
        labels |= dict(zip(replies[:half], sample["ranks"][:half], strict=True))
    assert labels == {f"answer {i}<end>": int(i % 3 == 0) for i in range(10)}


def test_a_prompt_is_not_paired_with_a_reply_to_itself(tmp_path: Path):
    replies = [{"content": f"{end}", "rank": n} for n, end in enumerate(("good", "so-so", "bad"))]
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}], "replies": [
        {**each, "content": f"{i} {each['content']}"} for each in replies]} for i in range(6)]  # fmt: skip
    data = build(tmp_path, rows)
    matched = 0
    for index in range(len(data)):
        sample = data.sample(0, index)
        for prompt, reply, rank, is_mismatched in zip(
            texts(sample, False), texts(sample, True), sample["ranks"], sample["mismatch_mask"], strict=True
        ):
            number = prompt[len("<|prompter|>")]
            assert reply.startswith(number) != is_mismatched
            assert reply.endswith(("good<end>", "bad<end>")[rank])
            matched += not is_mismatched
    assert matched == 12, "the best and the worst replies"


def test_shuffled_labels_are_a_control_of_the_training_split(tmp_path: Path):
    def labels(split: str, **changes: Any) -> list[int]:
        data = build(tmp_path, ROWS, split, **changes)
        return [rank for i in range(len(data)) for rank in data.sample(0, i)["ranks"][: len(data._content(i))]]

    assert sorted(labels("train", shuffled_labels=True)) == sorted(labels("train"))
    assert labels("train", shuffled_labels=True) != labels("train")
    assert labels("train", shuffled_labels=True) != labels("train", shuffled_labels=True, seed=1)
    assert labels("val", shuffled_labels=True) == labels("val")


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 5), (2, [3, 2]), (4, [3, 2]), (9, [5])])
def test_groups_have_another_prompt(tmp_path: Path, size: int, sizes: list[int]):
    data = build(tmp_path, ROWS[:5], group_size=size)
    assert [len(data._content(i)) for i in range(len(data))] == sizes
    assert len(data.sample(0, 0)["ranks"]) == (1 if size == 1 else 2 * sizes[0])


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([{**talk.row("a", "b"), "label": 1}] * 3, r"labeled/train\.jsonl:1: label: .* 1\."),
        ([talk.row("a", "b")] * 3, "0 replies with a label"),
        (ROWS[:1], "1 replies with a label"),
    ],
)
def test_rows_that_make_no_group_are_refused(tmp_path: Path, rows: list[dict[str, Any]], match: str):
    with pytest.raises(DataError, match=match):
        build(tmp_path, rows)


def test_a_dry_run_refuses_rows_without_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_data(tmp_path / "data")
    exp = override(KTO, {"data.corpus": "numbers", "model": SFT["model"]})
    assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, tmp_path) == 1
    assert "numbers/train.jsonl" in capsys.readouterr().err
    assert toy.main(["-e", "x", "--dry-run"], {"x": [override(exp, {"data.corpus": "replies"})]}, tmp_path) == 0


@pytest.mark.parametrize(
    ("exp", "changes", "match"),
    [
        (KTO, {"data": REPLIES}, "data: .*'labeled_replies'"),
        (KTO, {"data": TALK}, "data: 'conversations'"),
        (KTO, {"data.group_size": 1}, r"data\.group_size: 1"),
        (KTO, {"kto": {"kind": "apo_zero_unpaired"}}, r"data\.group_size: 3"),
        (KTO, {"kto": {"reference": "adapters_off"}}, r"kto\.reference"),
        (KTO, {"data.writing": {"tags": {"dropout": 0.5}}}, r"data\.writing\.tags\.dropout: .*kto\.reference"),
        (KTO, {"model": REWARD["model"]}, "model: "),
        (REWARD, {"data": KTO["data"]}, "data: 'labeled_replies'"),
    ],
)
def test_untrainable_experiments_are_refused(exp: dict[str, Any], changes: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        load_experiment(override(exp, changes), "here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model that the trainings start from."""
    folder = tmp_path_factory.mktemp("labeled")
    write_data(folder / "data")
    assert toy.main(["-e", "sft"], {"sft": [SFT]}, folder) == 0
    return folder


@pytest.mark.parametrize("kto", [{}, {"kind": "apo_zero_unpaired"}])
def test_desirable_replies_become_likelier_and_undesirable_ones_not(folder: Path, kto: dict[str, Any]):
    size = 1 if kto else 3
    exp = override(
        KTO,
        {
            "kto": {**kto, "beta": 0.5},
            "data.group_size": size,
            "loop.steps": 40,
            "loop.sequences_per_step": 12 // size,
            "loop.micro_batch": 2,
        },
    )
    shuffled = override(exp, {"data.shuffled_labels": True})
    assert toy.main(["-e", "x"], {"x": [exp, shuffled]}, folder) == 0
    plain, control = (toy.evaluations(folder, exp_id(each)) for each in (exp, shuffled))
    assert plain[-1]["val_loss"] < 0.45
    assert plain[-1]["val_accuracy"] > control[-1]["val_accuracy"]
    assert plain[-1]["val_desirable_logratio"] > plain[-1]["val_undesirable_logratio"] + 1
    assert plain[-1]["val_loss"] < control[-1]["val_loss"]
    assert (plain[-1]["val_kl_estimate"] == 0) == bool(kto)


def test_adapters_switched_off_are_the_stored_reference(folder: Path):
    lora = {"name": "lora", "rank": 2, "alpha": 8.0, "target_modules": ["c_attn", "c_fc"], "base": SFT["model"]}
    from_file = override(KTO, {"model": lora, "loop.learning_rate": 3e-2})
    by_switching = override(from_file, {"kto": {"reference": "adapters_off"}})
    assert toy.main(["-e", "both"], {"both": [from_file, by_switching]}, folder) == 0
    first, second = (toy.evaluations(folder, exp_id(exp))[-1] for exp in (from_file, by_switching))
    assert abs(first["val_desirable_logratio"]) > 0.01
    assert {name: second[name] for name in first} == pytest.approx(first, rel=1e-4, abs=1e-5)
    assert not (folder / "runs" / exp_id(by_switching) / "reference.json").exists()


@pytest.mark.slow
def test_the_numbers_depend_neither_on_processes_nor_on_the_micro_batch(folder: Path, tmp_path: Path):
    """The KL divergence is estimated by group."""
    exp = override(KTO, {"loop.micro_batch": 4, "loop.learning_rate": 1e-2, "seed": 5})
    assert toy.main(["-e", "x"], {"x": [exp]}, folder) == 0
    expected = toy.evaluations(folder, exp_id(exp))
    assert expected[-1]["val_kl_estimate"] > 0.01
    for micro_batch, processes in ((1, 1), (2, 2), (1, 2)):
        place = tmp_path / f"{micro_batch}-{processes}"
        (place / "runs").mkdir(parents=True)
        (place / "data").symlink_to(folder / "data")
        (place / "runs" / exp_id(SFT)).symlink_to(folder / "runs" / exp_id(SFT))
        changed = override(exp, {"loop.micro_batch": micro_batch})
        root = toy.project(place, f"EXP_GROUPS = {{'x': [{changed!r}]}}\n")
        done = toy.run(root, ["-e", "x"], place, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        for row, other in zip(expected, toy.evaluations(place, exp_id(changed)), strict=True):
            assert {name: other[name] for name in row} == pytest.approx(row, rel=1e-4, abs=1e-5)


def test_prepared_labels_are_read(tmp_path: Path):
    """Rows of TRL's form, prepared with --negatives learn --keep label."""
    from data_prep.assistants.prepare_conversations import prepare

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = str(tmp_path / "rows.jsonl")
    options: dict[str, Any] = {"form": "messages", "negatives": "learn", "keep": ["label"]}
    assert prepare(tmp_path / "data", "labeled", train=[source], val_rate=0.4, **options)
    for split in ("train", "val"):
        data = bind(DATASETS, DATA).build(Places(tmp_path / "data", tmp_path), talk.tokenizer(), split, 0)
        assert {*data.sample(0, 0)["ranks"]} == {0, 1}
