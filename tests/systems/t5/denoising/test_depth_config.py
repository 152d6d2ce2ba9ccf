"""What an experiment may say of depth, and what is refused."""

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import Places, load
from src.experiments.kinds import TokenizerSource
from src.systems.t5.denoising.depth import dataset


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"input_tokens": 5},
            r"data: input_tokens 5 and target_tokens 512, with at most 5 sentinels, leave no room for text\.",
        ),
        ({"target_tokens": 4}, r"data: input_tokens 512 and target_tokens 4, .* leave no room"),
        ({"noise_density": 0.7, "mean_span_tokens": 1.0}, "data: .*too few to separate the runs"),
        ({"num_sentences": 0}, "data.num_sentences: expected"),
        ({"shuffle_rate": 1.5}, "data.shuffle_rate: expected"),
        ({"sentence_weight": -1.0}, "data.sentence_weight: expected"),
    ],
)
def test_config_refuses(values, message):
    with pytest.raises(ConfigError, match=message):
        load(dataset.Config, {"corpus": "t", **values}, "data")


def test_a_model_of_few_positions_is_refused():
    config = load(dataset.Config, {"corpus": "t", "target_tokens": 600}, "data")
    config.check_length(None)
    config.check_length(600)
    with pytest.raises(ConfigError, match=r"data\.target_tokens: 600 tokens are more than the 599"):
        config.check_length(599)


def test_tokenizer_without_special_tokens_is_refused_without_loading_it(make_tokenizer, tmp_path):
    sentences, names = [dataset.EOSEN, "<sent_0>", "<sent_1>"], [f"<extra_id_{n}>" for n in range(100)]
    for name, more in {"whole": sentences + names, "one": names, "no_sentinels": sentences}.items():
        make_tokenizer(["<|endoftext|>", *more], None).save_pretrained(tmp_path / name)
    config = load(dataset.Config, {"corpus": "t", "num_sentences": 2}, "data")
    config.check_tokenizer(Places(tmp_path, tmp_path), None)
    config.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path))
    config.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "whole"))
    with pytest.raises(
        DataError,
        match=r"one: has no special token <eosen>; data\.num_sentences 2 needs <eosen> and <sent_0> to <sent_1>",
    ):
        config.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "one"))
    with pytest.raises(DataError, match="no_sentinels: the tokenizer has no sentinels"):
        config.check_tokenizer(Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "no_sentinels"))
    with pytest.raises(DataError, match=r"<sent_2>; data\.num_sentences 3 needs"):
        load(dataset.Config, {"corpus": "t", "num_sentences": 3}, "data").check_tokenizer(
            Places(tmp_path, tmp_path), TokenizerSource(tmp_path / "whole")
        )
