"""Real Natural Questions, prepared from their files, train cross-attention layers end to end."""

import shutil

import pytest

from data_prep.crossattn import prepare_qa
from data_prep.crossattn.qa_splits import Options
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.files import new_directory
from tests import toy


@pytest.fixture
def folder(shared_data, tmp_path):
    """A toy world with the questions of NQ-open, each on its gold passage between two others, and StarCoder's
    tokenizer."""
    sources = sorted(shared_data.glob("nq_oracle/*.jsonl"))
    tokenizer = shared_data / "tokenizer" / "starcoder"
    if not sources or not tokenizer.is_dir():
        pytest.skip(f"{shared_data} lacks nq_oracle or tokenizer/starcoder")
    toy.write_data(tmp_path / "data")
    with new_directory(tmp_path / "data" / "starcoder") as partial_folder:
        for path in tokenizer.iterdir():
            shutil.copyfile(path, partial_folder / path.name)
    options = {"distractors": 2, "distractors_from": "rows", "position": "middle", "max_rows": 60, "val_percent": 20}
    prepare_qa.prepare(tmp_path / "data", Options(name="nq", train=(str(sources[0]),), **options))
    return tmp_path


BASE = override(toy.BASE, {"model.tokenizer": "starcoder", "loop.steps": 1, "loop.eval_every": 1})
SHORT = override(
    toy.CROSSATTN,
    {
        "model.base": toy.ref(BASE),
        "data.corpus": "nq",
        "data.context_tokens": 60,
        "data.sequence_tokens": 40,
        "loop.steps": 2,
        "loop.sequences_per_step": 4,
        "loop.micro_batch": 4,
        "loop.eval_every": 2,
        "answers.questions": 4,
    },
)
WITH_QUESTIONS = {key: SHORT[key] for key in ("loop", "answers", "seed")}
RANDOM_T5 = {"tokenizer": "starcoder", "hidden_size": 32, "feed_forward_size": 48, "num_layers": 1, "num_heads": 2}
VARIANTS = [
    override(SHORT, {"model.shared_weights": True, "model.num_layers": 2, "data.chunked_contexts": True}),
    override(SHORT, {"data.questions_on_contexts": True, "data.include_contexts": True, "data.loss_on": "all"}),
    {
        "recipe": "prompted",
        "model": SHORT["model"]["base"],
        "data": {
            "name": "prompted_qa",
            "corpus": "nq",
            "contexts": "useful",
            "context_tokens": 36,
            "sequence_tokens": 24,
            "loss_on": "answer",
        },
        **WITH_QUESTIONS,
    },
    {
        "recipe": "fid",
        "model": {"name": "fusion_in_decoder", "base": {"name": "t5", "random": RANDOM_T5}},
        "data": {
            "name": "fid_qa",
            "corpus": "nq",
            "contexts": "all",
            "num_passages": 2,
            "passage_tokens": 60,
            "answer_tokens": 12,
        },
        **WITH_QUESTIONS,
    },
]


def test_variants_train_and_answer(folder):
    assert toy.main(["-e", "g", "--with-parents"], {"base": [BASE], "g": VARIANTS}, folder) == 0
    for exp in VARIANTS:
        (row,) = toy.rows(folder, exp_id(exp))
        assert 0 < row["val_loss"] < 12
        assert 0 <= row["em"] <= row["f1"] <= 1
