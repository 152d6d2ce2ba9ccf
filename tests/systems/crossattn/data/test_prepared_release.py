"""A release that data_prep.crossattn.prepare_qa has prepared is a data set to train on as it stands."""

import json

from data_prep.crossattn import prepare_qa
from data_prep.crossattn.qa_splits import Options
from src.systems.crossattn.data import cross_attention

QUESTIONS = [
    {
        "_id": f"h{i}",
        "question": f"is {i} odd?",
        "answer": "yes" if i % 2 else "no",
        "supporting_facts": [["A", 0]],
        "context": [["A", [f"{i} is", " seen."]], ["B", ["b."]], ["C", ["c."]]],
    }
    for i in range(6)
]


def test_contexts_questions_and_answers_reach_the_samples(places, tokenizer, tmp_path):
    for name, rows in (("train", QUESTIONS[:4]), ("dev", QUESTIONS[4:])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    sources = {"train": (str(tmp_path / "train.json"),), "val": (str(tmp_path / "dev.json"),)}
    prepare_qa.prepare(places.data, Options(name="hotpotqa", **sources, position="last", distractors=1))
    config = cross_attention.Config(
        corpus="hotpotqa",
        context_tokens=60,
        sequence_tokens=60,
        loss_on="answer",
        chunked_contexts=True,
        include_contexts=True,
    )
    train = config.build(places, tokenizer, "train", seed=0)
    assert len(train) == 8, "twice, once as contexts"
    sample = train.sample(0, 3)
    texts = [tokenizer.decode(chunk) for chunk in sample["context_chunks"]]
    assert len(texts) == 2
    assert "b." in texts[0]
    assert "3 is seen." in texts[1]
    assert "is 3 odd?" in tokenizer.decode(sample["input_ids"])
    assert tokenizer.decode(
        [i for i, is_scored in zip(sample["input_ids"], sample["loss_mask"], strict=True) if is_scored]
    ).startswith("Yes")
    assert (train.row(2)["answers"], train.source(2)) == (["No"], "hotpotqa")
    assert len(config.build(places, tokenizer, "val", seed=0)) == 2


def test_questions_without_contexts_can_be_trained_on(places, tokenizer, tmp_path):
    (tmp_path / "o.jsonl").write_text(
        "".join(json.dumps({"question": f"who is {i}", "answer": [f"a{i}"]}) + "\n" for i in range(40))
    )
    prepare_qa.prepare(
        places.data, Options(name="open", train=(str(tmp_path / "o.jsonl"),), val_percent=30, without_contexts=True)
    )
    config = cross_attention.Config(corpus="open", context_tokens=60, sequence_tokens=60, loss_on="answer")
    val = config.build(places, tokenizer, "val", seed=0)
    sample = val.sample(0, 0)
    assert len(sample["context_chunks"]) == 1
    assert all(sample["context_chunks"]), "no chunk is empty"
    assert "who is" in tokenizer.decode(sample["input_ids"])
