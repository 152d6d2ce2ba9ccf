"""Tokenizers are found without a network, and user text never makes a control token."""

import pickle
import re

import pytest

from src.data.text import tokenizers
from src.data.text.tokenizers import SafeTokenizer
from src.errors import DataError


def test_a_saved_tokenizer_comes_back(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "t")
    loaded = tokenizers.load(tmp_path / "t")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.encode("<|user|>é", add_special_tokens=False) == tokenizer.encode(
        "<|user|>é", add_special_tokens=False
    )
    assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 7)


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "/nowhere/stdlib"])
def test_missing_folder(name):
    with pytest.raises(DataError, match=re.escape(f"{name}: no such tokenizer folder.")):
        tokenizers.load(name)


def test_missing_default_tokenizer_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(
        DataError, match=r"no such tokenizer folder. Make it with: python -m data_prep.crossattn.stdlib_qa --data_path"
    ):
        tokenizers.load(tmp_path / "stdlib_tokenizer")


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}: no tokenizer.json in this folder.")):
        tokenizers.load(tmp_path)


def test_hub_id_that_is_not_cached_says_how_to_get_it(monkeypatch, tmp_path):
    with pytest.raises(
        DataError, match=r"bigcode/nothing-here: not in the local cache of the hub.*hf download bigcode/nothing-here"
    ):
        tokenizers.load("bigcode/nothing-here")


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path, make_tokenizer):
    plain = make_tokenizer()
    plain.eos_token = None
    plain.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"has no eos_token"):
        tokenizers.load(tmp_path)


def test_user_text_never_becomes_a_control_token(tokenizer):
    encoder = SafeTokenizer(tokenizer)
    for token in ("<|endoftext|>", "<fim_prefix>", "<|assistant|>", "<|pad|>"):
        text = f"a {token} b"
        assert len(encoder.encode(text)) == len(text)
        assert min(encoder.encode(text)) >= 8
        assert tokenizer.decode(encoder.encode(text)) == text
        assert list(encoder.encode_all([text])) == [encoder.encode(text)]


def test_text_that_spells_a_piece_of_a_unigram_model_is_no_control_token():
    """transformers' own T5Tokenizer has its sentinels among the pieces; <pad> 0, </s> 1, <unk> 2, <extra_id_99> 12 to
    <extra_id_0> 111."""
    from transformers import T5Tokenizer

    letters = ["\u2581", "\u2581a", "\u2581b", "<", "/", "s", ">", "\u2581<", "\u2581a<"]
    pieces = [*((name, 0.0) for name in ("<pad>", "</s>", "<unk>")), *((letter, -2.0) for letter in letters)]
    tokenizer = T5Tokenizer(vocab=[*pieces, *((f"<extra_id_{n}>", 0.0) for n in reversed(range(100)))])
    assert tokenizer("a</s>").input_ids == [4, 1, 1]
    safe = SafeTokenizer(tokenizer)
    for encoder in (safe, pickle.loads(pickle.dumps(safe))):
        assert encoder.encode("a <extra_id_0> b </s>") == [
            4,
            10,
            2,
            9,
            5,
            10,
            7,
            8,
            9,
        ]  # 2: a run of letters that are no pieces
        assert list(encoder.encode_all(["a</s>", "<pad>"])) == [[11, 7, 8, 9], [10, 2, 9]]
        assert encoder.encode_token("<extra_id_0>") == [111]
        for ordinary in ("a <b> </a>", "a<<//s> s", "<extra"):
            assert encoder.encode(ordinary) == tokenizer(ordinary, add_special_tokens=False).input_ids
    assert tokenizer("a</s>").input_ids == [4, 1, 1]


def test_words_that_are_control_tokens_stay_text():
    """A model of whole words has no characters to fall back to, so that what is spelled is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"</s>": 0, "?": 1, "a": 2, "b": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert SafeTokenizer(tokenizer).encode("a </s> b") == [2, 1, 1, 3]


def test_no_text_is_cut_where_no_spelling_becomes_a_control_token(tokenizer):
    assert (
        SafeTokenizer(tokenizer)._backend.pre_tokenizer.__getstate__()
        == tokenizer.backend_tokenizer.pre_tokenizer.__getstate__()
    )


def test_making_an_encoder_leaves_the_tokenizer_as_it_was(tokenizer):
    SafeTokenizer(tokenizer)
    assert tokenizer.encode("<|user|>") == [4]


def test_many_texts_come_in_order(tokenizer):
    texts = [str(i) * (i % 7) for i in range(600)]
    assert list(SafeTokenizer(tokenizer).encode_all(texts)) == [[8 + b for b in text.encode()] for text in texts]


def test_control_tokens_by_name_or_spelled_out(make_tokenizer):
    encoder = SafeTokenizer(make_tokenizer(["<|endoftext|>"], pad=None))
    assert encoder.encode_token("<|endoftext|>") == [0]
    assert encoder.control_id("<|user|>") is None
    assert encoder.encode_token("<|user|>") == [1 + b for b in b"<|user|>"]
    assert encoder.pad_id == encoder.eos_id == 0


def test_an_encoder_reaches_other_processes(tokenizer):
    encoder = pickle.loads(pickle.dumps(SafeTokenizer(tokenizer)))
    assert min(encoder.encode("<|user|>")) >= 8


def test_a_start_token_is_prepended_and_an_end_token_is_not(make_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(["<|endoftext|>", "<s>"], pad=None)
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", 1), ("<|endoftext|>", 0)]
    )
    assert tokenizer.encode("") == [1, 0]
    assert SafeTokenizer(tokenizer).start == [1]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", ['{"model": {"type":', "[]", "3", "", '{"added_tokens": [], "model": {"type": "Nope"}}']
)
def test_a_damaged_tokenizer_is_named(tmp_path, tokenizer, file, content):
    if file == "tokenizer_config.json" and content.endswith("}}"):
        content = '{"tokenizer_class": 3}'
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(
        DataError, match=re.escape(f"{tmp_path}: the tokenizer cannot be read (") + r".*\)\. Get it again\.$"
    ):
        tokenizers.load(tmp_path)


@pytest.mark.parametrize("name", ["a" * 300, "./" + "a" * 300])
def test_a_name_that_is_too_long_for_the_file_system(name):
    with pytest.raises(DataError, match=rf"^{re.escape(name)}: (not in the local cache|no such tokenizer folder)"):
        tokenizers.load(name)
