"""Models of llama.cpp: the weights, tokens and template of the file, and one line for a bad file."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from data_prep import gguf

SIZES = LlamaConfig(
    vocab_size=262,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def random_model() -> LlamaForCausalLM:
    """A tiny Llama; the scale makes wrong permutations visible."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SIZES)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return model


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The weights as llama.cpp stores them: it rotates adjacent dimensions of queries and keys together."""
    tensors = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    for name, weight in model.state_dict().items():
        if ".layers." not in name:
            continue
        number, _, rest = name.split(".layers.")[1].partition(".")
        kind = NAMES[rest.removesuffix(".weight")]
        if kind in ("attn_q", "attn_k"):
            heads = SIZES.num_attention_heads if kind == "attn_q" else SIZES.num_key_value_heads
            assert heads
            weight = weight.view(heads, 2, -1, SIZES.hidden_size).transpose(1, 2).reshape(weight.shape)
        tensors[f"blk.{number}.{kind}.weight"] = weight
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    architecture: str = "llama",
    pre: str = "smollm",
) -> Path:
    """A GGUF file whose vocabulary has 256 bytes, three control tokens, and merges of two line breaks and of "12"."""
    from gguf import GGUFWriter
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    line_break = bytes_to_unicode()[10]
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *bytes_to_unicode().values(),
        line_break * 2,
        "12",
        "\u0120a",
    ]
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(SIZES.hidden_size)
    writer.add_block_count(SIZES.num_hidden_layers)
    writer.add_feed_forward_length(SIZES.intermediate_size)
    writer.add_head_count(SIZES.num_attention_heads)
    writer.add_head_count_kv(SIZES.num_key_value_heads or 0)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(SIZES.rms_norm_eps)
    writer.add_vocab_size(len(tensors["token_embd.weight"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges([f"{line_break} {line_break}", "1 2", "\u0120 a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(path: Path, *options: str) -> tuple[int, Path]:
    """Run the command; returns its exit code and the folder."""
    code = gguf.main([str(path), "--name", "team/model", "--data_path", str(path.parent), *options])
    return code, path.parent / "team" / "model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_tokens_are_those_of_the_file(tmp_path: Path, dtype: str):
    model = random_model()
    code, folder = convert(write(tmp_path / "tiny.gguf", gguf_tensors(model)), "--dtype", dtype)
    assert code == 0
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.config.tie_word_embeddings
    expected = {name: weight.to(loaded.dtype) for name, weight in model.state_dict().items()}
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("a b\n\n12")["input_ids"]) == "a b\n\n12"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (1, 2, 64)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("smollm", ["x", "\n\n", "1", "2", " a"]), ("gpt-2", ["x", "\n", "\n", "12", " a"])],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, pre: str, expected: list[str]):
    _, folder = convert(write(tmp_path / "tiny.gguf", gguf_tensors(random_model()), pre=pre))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer.decode([i]) for i in tokenizer("x\n\n12 a")["input_ids"]] == expected


def test_files_of_another_model_in_the_folder_are_not_read(tmp_path: Path):
    other = tmp_path / "other"
    BertConfig(vocab_size=5).save_pretrained(other)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(other)
    code, folder = convert(write(other / "tiny.gguf", gguf_tensors(random_model())))
    assert code == 0
    assert len(AutoTokenizer.from_pretrained(folder)) == SIZES.vocab_size
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "llama"


def test_the_same_file_is_converted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path / "tiny.gguf", gguf_tensors(random_model()))
    _, folder = convert(path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert(path)[0] == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "nothing to do" in capsys.readouterr().out
    convert(path, "--dtype", "float32")
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


def _damage(tensors: dict[str, torch.Tensor], case: str, path: Path) -> Path:
    if case in ("mystery", "t5"):
        return write(path, tensors, architecture=case)
    if case == "missing tensor":
        del tensors["blk.1.ffn_up.weight"]
    if case == "few embeddings":
        tensors["token_embd.weight"] = tensors["token_embd.weight"][:261].contiguous()
    write(path, tensors)
    content = path.read_bytes()
    if case == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif case == "truncated header":
        path.write_bytes(content[:100])
    elif case == "empty":
        path.write_bytes(b"")
    elif case == "other format":
        path.write_bytes(b"PK\3\4" + content)
    elif case == "missing":
        path.unlink()
    return path


@pytest.mark.parametrize(
    ("case", "value"),
    [
        ("mystery", "mystery"),
        ("t5", "encoder-decoder"),
        ("missing tensor", "model.layers.1.mlp.up_proj.weight"),
        ("few embeddings", "261"),
        ("truncated", ""),
        ("truncated header", ""),
        ("empty", "b''"),
        ("other format", "PK"),
        ("missing", ""),
    ],
)
def test_a_bad_file_is_one_line_and_leaves_no_folder(
    tmp_path: Path, case: str, value: str, capsys: pytest.CaptureFixture[str]
):
    path = _damage(gguf_tensors(random_model()), case, tmp_path / "tiny.gguf")
    code, folder = convert(path)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1
    assert str(path) in error
    assert value in error
    assert not folder.exists()
