"""What every data set of the registry promises: pure samples, the same batches however they are read, and what its kind
of model reads."""

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from src.data.orders import IndexedOrder, RankShare, order_of
from src.experiments.batches import (
    ContextBatch,
    DepthBatch,
    InterleavedBatch,
    PackedBatch,
    RankedBatch,
    Seq2SeqBatch,
    TokenBatch,
)
from src.experiments.config import Places, Problems
from src.experiments.dataset_protocols import Dataset, content_of
from src.experiments.kinds import CROSS_ATTENTION, DECODER, ENCODER_DECODER, FUSION_IN_DECODER, REWARD, VISION_LANGUAGE
from src.experiments.registry import DATASETS, MODELS, bind
from src.files import new_directory
from src.systems.assistants.conversations.templates import OASST_TOKENS
from src.systems.assistants.preferences.losses import ranking_loss
from src.training import loader, loss
from src.training.config import LoopConfig
from src.training.state import State
from tests.systems.interleaved.streaming import pages

CONTROLS = (
    "<|endoftext|>",
    "<|pad|>",
    *pages.TOKENS,
    *OASST_TOKENS,
    *(f"<extra_id_{n}>" for n in range(40)),
    "<eosen>",
    *(f"<sent_{n}>" for n in range(4)),
)
TEXTS = [f"Document {i} says {'more and ' * (i % 5)}no more. Does it? It does." for i in range(9)]
QUESTIONS = [
    {
        "question": f"what {'ever ' * (i % 3)}{i}?",
        "answer": f"a{i}",
        "contexts_list": [f"context {i}", "other"][: 1 + i % 2],
    }
    for i in range(11)
]
CORPORA: dict[str, list[dict[str, Any]]] = {
    "texts": [{"text": text} for text in TEXTS],
    "questions": [{"context": row["contexts_list"][0], "dataset": "d", **row} for row in QUESTIONS],
    "pages": [
        {"text": text, "metadata": [{"key": "title", "type": "global", "value": f"page {i}"}]}
        for i, text in enumerate(TEXTS)
    ],
    "talk": [
        {"messages": [{"role": "user", "content": f"what {i}?"}, {"role": "assistant", "content": f"{i} " * i}]}
        for i in range(9)
    ],
    "replies": [
        {
            "messages": [{"role": "user", "content": f"what {i}?"}],
            "replies": [{"content": f"{i} {n}", "rank": n} for n in range(2 + i % 5)],
        }
        for i in range(9)
    ],
    "rte": [{"index": i, "sentence1": "a" * i, "sentence2": "b", "label": "entailment"} for i in range(10)],
}
STREAM_DATA = pages.config({"shown": {"path": "shown"}}, sequence_tokens=48)
DENOISERS = [{"rate": 1.0, "mode": "R", "mean_span_tokens": 3.0, "noise_density": 0.15}, {"rate": 1.0}]
CASES: dict[str, dict[str, Any]] = {
    "conversations": {"corpus": "talk", "sequence_tokens": 16, "random_offset": 0.7},
    "depth": {"corpus": "texts", "input_tokens": 96, "target_tokens": 64, "num_sentences": 4},
    "documents": {"corpus": "texts", "sequence_tokens": 40},
    "fid_qa": {"corpus": "questions", "contexts": "all", "passage_tokens": 48, "answer_tokens": 8},
    "metadata": {"corpus": "pages", "sequence_tokens": 80, "probability": 0.5},
    "mixture": {
        "parts": {
            "cut": {"name": "prefix_lm", "corpus": "texts", "sequence_tokens": 16},
            "masked": {"name": "span_corruption", "corpus": "texts", "input_tokens": 32, "mean_span_tokens": 1.5},
        }
    },
    "packed": {"documents": {"name": "documents", "corpus": "texts"}, "sequence_tokens": 48, "open_rows": 3},
    "phases": {
        "phases": [
            {
                "until": 0.6,
                "data": {"name": "span_corruption", "corpus": "texts", "input_tokens": 32, "mean_span_tokens": 1.5},
            },
            {"data": {"name": "prefix_lm", "corpus": "texts", "sequence_tokens": 16}},
        ]
    },
    "labeled_replies": {"corpus": "replies", "sequence_tokens": 64, "group_size": 2},
    "prefix_lm": {"corpus": "texts", "sequence_tokens": 16},
    "prompted_qa": {
        "corpus": "questions",
        "contexts": "all",
        "context_tokens": 32,
        "sequence_tokens": 64,
        "loss_on": "answer",
    },
    "qa": {
        "corpus": "questions",
        "context_tokens": 48,
        "sequence_tokens": 64,
        "loss_on": "answer",
        "include_contexts": True,
    },
    "ranked_replies": {"corpus": "replies", "sequence_tokens": 64, "max_replies": 3},
    "span_corruption": {"corpus": "texts", "input_tokens": 32, "mean_span_tokens": 1.5},
    "streamed": {key: value for key, value in STREAM_DATA.items() if key != "name"},
    "task": {"corpus": "rte", "task": "rte"},
    "text": {"corpus": "texts", "sequence_tokens": 16},
    "ul2": {"corpus": "texts", "input_tokens": 24, "denoisers": DENOISERS},
}


def rewards_loss(model: Any, batch: Any) -> torch.Tensor:
    return ranking_loss(model(batch["input_ids"], batch["attention_mask"]), batch["sample_of_row"], batch["ranks"])


BATCHES = {
    DECODER: TokenBatch,
    CROSS_ATTENTION: ContextBatch,
    FUSION_IN_DECODER: ContextBatch,
    ENCODER_DECODER: Seq2SeqBatch,
}
BATCHES |= {VISION_LANGUAGE: InterleavedBatch, REWARD: RankedBatch}
LOSSES = {DECODER: loss.causal_lm_loss, CROSS_ATTENTION: loss.context_lm_loss, FUSION_IN_DECODER: loss.context_lm_loss}
LOSSES |= {VISION_LANGUAGE: loss.interleaved_lm_loss, REWARD: rewards_loss}
GPT = {
    "name": "gpt_bigcode",
    "tokenizer": "tokenizer",
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "max_positions": 128,
}
T5 = {
    "name": "t5",
    "random": {"tokenizer": "tokenizer", "hidden_size": 16, "feed_forward_size": 16, "num_layers": 1, "num_heads": 2},
}
READERS: dict[str, dict[str, Any]] = {
    DECODER: GPT,
    CROSS_ATTENTION: {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": GPT, "train_all_params": True},
    ENCODER_DECODER: T5,
    FUSION_IN_DECODER: {"name": "fusion_in_decoder", "base": T5},
    REWARD: {"name": "reward", "base": GPT},
    VISION_LANGUAGE: {
        "name": "vision_language",
        "vision": {"frame_size": pages.SIDE, "patch_size": 4, "hidden_size": 16, "num_layers": 1, "num_heads": 2},
        "max_tiles": 2,
        **{key: value for key, value in GPT.items() if key != "name"},
    },
}
NOISY = {
    "conversations",
    "ranked_replies",
    "depth",
    "metadata",
    "mixture",
    "phases",
    "prefix_lm",
    "qa",
    "span_corruption",
    "ul2",
}
"""Data sets whose samples differ from epoch to epoch and by seed; of others only the order does."""
PER_STEP, STEPS = 6, 5
LOOP = LoopConfig(steps=1, sequences_per_step=PER_STEP, micro_batch=1, learning_rate=1.0, eval_every=1)
EVERY = pytest.mark.parametrize("name", CASES)
Build = Callable[..., Dataset]


def write_world(
    folder: Path, tokenizer: Any, corpora: dict[str, list[dict[str, Any]]] = CORPORA, short: str = ""
) -> Places:
    """short: a split that gets a row less."""
    left_out = {split: int(split == short) for split in ("train", "val")}
    for corpus, rows in corpora.items():
        with new_directory(folder / corpus) as beside:
            for split, count in left_out.items():
                lines = [json.dumps(row) + "\n" for row in rows[: len(rows) - count]]
                (beside / f"{split}.jsonl").write_text("".join(lines))
    for split, count in left_out.items():
        pages.write_pages(folder / "shown" / split, len(corpora["texts"]) - count, per_shard=4)
    tokenizer.save_pretrained(folder / "tokenizer")
    return Places(folder, folder)


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer(CONTROLS, "<|pad|>")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Places:
    return write_world(tmp_path_factory.mktemp("world"), tokenizer)


@pytest.fixture
def build(world: Places, tokenizer: Any) -> Build:
    def make(name: str, split: str = "train", seed: int = 0, places: Places = world, **options: Any) -> Dataset:
        config = bind(DATASETS, {"name": name, **CASES[name], **options})
        config.check(places)
        return config.build(places, tokenizer, split, seed)

    return make


def plain(value: Any) -> Any:
    """A sample, a batch or a list of them such that == compares every bit and type."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype), value.tolist()
    if is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def read(data: Dataset, keys: Sequence[tuple[int, int]]) -> list[Any]:
    return [plain(data.sample(*key)) for key in keys]


def read_steps(data: Dataset, count: int, start: State | None = None, workers: int = 0) -> list[Any]:
    """The micro-batches of `count` optimizer steps of this rank, as the training loop gets them."""
    return [[plain(batch) for batch in step.batches] for step in load_steps(data, count, start or State(), workers)]


def load_steps(data: Dataset, count: int, start: State, workers: int = 0) -> list[loader.Step]:
    order = order_of(data, 0, PER_STEP, STEPS)
    stream = loader.StepLoader(data, order, LOOP, torch.device("cpu"), num_workers=workers).steps(start)
    try:
        return list(itertools.islice(stream, count))
    finally:
        stream.close()


def test_every_data_set_has_a_case():
    by_policies = {"rollouts"}  # samples are what a policy makes: tests/systems/assistants/test_policy_training.py
    assert CASES.keys() == DATASETS.modules.keys() - by_policies, "a new data set belongs in CASES"


@pytest.fixture(scope="module")
def short_worlds(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Places]:
    return {split: write_world(tmp_path_factory.mktemp(split), tokenizer, short=split) for split in ("train", "val")}


@EVERY
def test_the_content_of_validation_data_does_not_depend_on_training_data(
    build: Build, short_worlds: dict[str, Places], name: str
):
    """`results.compare` then compares runs that were trained on other data."""
    data = build(name, "val")
    other_training = build(name, "val", places=short_worlds["train"])
    assert content_of(other_training) == content_of(data)
    assert content_of(build(name, "val", places=short_worlds["val"])) != content_of(data)


@EVERY
def test_a_sample_is_a_pure_function_of_epoch_and_index(build: Build, name: str):
    data, again = build(name), build(name)
    keys = [(epoch, index) for epoch in (0, 1) for index in range(len(data))]
    whole = read(data, keys)
    assert read(data, keys) == whole, "the same bits twice"
    assert read(again, keys[::-1]) == whole[::-1], "whatever was read before"
    middle = len(keys) // 3
    assert read(pickle.loads(pickle.dumps(again)), keys[middle:]) == whole[middle:]
    for index in (-1, len(data)):
        with pytest.raises(IndexError, match=f"sample {index} of {len(data)}"):
            data.sample(0, index)


@EVERY
def test_a_config_says_whether_there_are_questions(build: Build, name: str):
    val: Any = build(name, "val")
    config = bind(DATASETS, {"name": name, **CASES[name]}).validation
    assert hasattr(val, "num_questions") == config.has_questions
    assert not getattr(val, "reads_contexts", False) or config.reads_contexts


@EVERY
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_and_resumption_change_no_batch(build: Build, name: str, workers: int):
    data = build(name)
    alone = read_steps(data, 5)
    assert read_steps(data, 5, workers=workers) == alone
    start = State(step=3, cursor=load_steps(data, 3, State())[-1].cursor)
    assert read_steps(data, 2, start, workers=workers) == alone[3:]


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"metadata", "packed", "phases", "streamed", "task"}))
def test_feistel_shuffle_permutes_epochs_without_memory(build: Build, name: str):
    data, other = build(name, shuffle="feistel"), build(name)
    orders = [order_of(dataset, 0, PER_STEP, STEPS) for dataset in (data, other)]
    assert [order.shuffle for order in orders if isinstance(order, IndexedOrder)] == ["feistel", "numpy"]
    assert data.fingerprint == other.fingerprint, "the samples are the same"
    alone = read_steps(data, 5)
    assert read_steps(data, 2, State(step=3), workers=1) == alone[3:]
    assert alone != read_steps(other, 5)


@pytest.mark.parametrize(
    "whole", [{"name": "mixture", "parts": {"a": ...}}, {"name": "packed", "sequence_tokens": 48, "documents": ...}]
)
def test_where_it_would_be_ignored_it_is_refused(whole: dict[str, Any]):
    part = {"name": "documents", **CASES["documents"], "shuffle": "feistel"}
    raw = {key: {"a": part} if key == "parts" else part if value is ... else value for key, value in whole.items()}
    with pytest.raises(Problems, match=r"(parts\.a|documents)\.shuffle: ignored, .* Remove it\."):
        bind(DATASETS, raw)


@EVERY
def test_ranks_read_disjoint_shares_of_the_same_samples(build: Build, name: str, monkeypatch: pytest.MonkeyPatch):
    data = build(name)
    count = len(data)  # steps, which are PER_STEP epochs
    for world_size in (1, 2, 3):
        shares = [RankShare(PER_STEP, 1, rank, world_size) for rank in range(world_size)]
        streams = [IndexedOrder(0, len(data), PER_STEP).micro_batches(0, share, {}) for share in shares]
        each = [
            [keys[0] for keys, *_ in itertools.islice(stream, count * PER_STEP // world_size)] for stream in streams
        ]
        read_keys = Counter(key for keys in each for key in keys)
        assert read_keys == Counter((epoch, index) for epoch in range(PER_STEP) for index in range(len(data))), (
            "each sample once an epoch"
        )
    alone = read_steps(data, 3)
    for world_size in (2, 3):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        ranks = []
        for rank in range(world_size):
            monkeypatch.setenv("RANK", str(rank))
            ranks.append(read_steps(data, 3))
        together = [
            [step[g % world_size][g // world_size] for g in range(PER_STEP)] for step in zip(*ranks, strict=True)
        ]
        assert together == alone


@EVERY
def test_another_seed_or_epoch_trains_on_another_order_or_noise(build: Build, name: str):
    def epoch(number: int, seed: int) -> list[Any]:
        data = build(name, seed=seed)
        return read(
            data, list(itertools.islice(IndexedOrder(seed, len(data), PER_STEP).keys(number * len(data)), len(data)))
        )

    assert epoch(0, 0) == epoch(0, 0)
    assert epoch(0, 0) != epoch(1, 0)
    assert epoch(0, 0) != epoch(0, 1)
    data, other = build(name), build(name, seed=1)
    first, second = ([(number, i) for i in range(len(data))] for number in (0, 1))
    assert (read(data, first) != read(data, second)) == (read(data, first) != read(other, first)) == (name in NOISY)


@EVERY
def test_validation_is_the_same_for_every_seed_and_epoch(build: Build, name: str):
    fields = type(bind(DATASETS, {"name": name, **CASES[name]})).model_fields
    some = {field: 3 for field in ("val_samples", "val_sequences") if field in fields}
    data, other = build(name, "val", **some), build(name, "val", seed=1, **some)
    assert len(data) == 3 or not some
    assert read(data, [(0, i) for i in range(len(data))]) == read(other, [(3, i) for i in range(len(data))])


@EVERY
def test_the_fingerprint_changes_with_content_and_not_with_location(
    build: Build, name: str, tmp_path: Path, tokenizer: Any
):
    moved_world = write_world(tmp_path / "moved", tokenizer)
    changed = {corpus: [*rows, rows[0]] for corpus, rows in CORPORA.items()}
    other = write_world(tmp_path / "other", tokenizer, changed)
    assert build(name).fingerprint == build(name, seed=1).fingerprint == build(name, places=moved_world).fingerprint
    assert build(name).fingerprint != build(name, places=other).fingerprint


@EVERY
def test_batch_loss_is_the_sum_of_sample_losses(build: Build, name: str, world: Places):
    """Padding changes no loss, so masks and labels are right; and the tensors are those of the typed batch."""
    data, kind = build(name), bind(DATASETS, {"name": name, **CASES[name]}).reader
    samples = [data.sample(0, i) for i in range(4)]
    batch: dict[str, Any] = dict(data.collate(samples))
    declared_type = {"depth": DepthBatch, "packed": PackedBatch}.get(name, BATCHES[kind])
    assert (
        declared_type.__required_keys__
        <= batch.keys()
        <= declared_type.__required_keys__ | declared_type.__optional_keys__
    )
    for key, tensor in batch.items():
        assert len(tensor) == len(batch.get("sample_of_row", samples)) or key in (
            "frames",
            "source_counts",
            "cached",
        ), key
        assert tensor.dtype == (torch.bool if "mask" in key else torch.float32 if key == "frames" else torch.int64), key
    if "labels" in batch:
        assert batch["loss_mask"].equal(batch["labels"] != -100)
    else:
        assert not batch["loss_mask"][:, 0].any(), "nothing is predicted from nothing"
        assert not (batch["loss_mask"] & ~batch["attention_mask"]).any()
    model = bind(MODELS, READERS[kind]).build(world).eval()
    measure = LOSSES.get(kind) or (loss.depth_loss if "cross_mask" in batch else loss.seq2seq_loss)
    together = measure(model, batch)
    alone = sum(measure(model, data.collate([sample])).item() for sample in samples)
    assert batch["loss_mask"].any(dim=1).all(), "every sample teaches something"
    assert together.item() == pytest.approx(alone, rel=1e-4)
