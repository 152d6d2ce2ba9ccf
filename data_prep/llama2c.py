"""Turn a llama2.c model into a folder that transformers loads: `python -m data_prep.llama2c WEIGHTS.bin TOKENIZER.bin`.

The small models trained on TinyStories come in this form, such as stories260K with its vocabulary of 512. Layout:
karpathy/llama2.c, run.c (checkpoint version 0: seven int32, then float32 matrices) and tokenizer.py (per token a
float32 score, an int32 length, bytes).
"""

import argparse
import math
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import command
from src import files
from src.errors import DataError

COMMAND = "python -m data_prep.llama2c"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
SPECIAL = ("<unk>", "<s>", "</s>")
HEADER_BYTES = 28


class Sizes(NamedTuple):
    """Header of a weight file."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    vocab_size: int
    """Negative if the output matrix is not tied to the embeddings."""
    max_positions: int


def read_tokens(path: Path) -> list[tuple[bytes, float]]:
    """Read (text, score) of each token, in order of ID.

    Raises:
        DataError: the file is not a vocabulary of llama2.c.
    """
    content, place, tokens = files.read_bytes(path, DataError), 4, []
    try:
        while place < len(content):
            score, length = struct.unpack_from("<fi", content, place)
            place += 8 + length
            if length < 0 or place > len(content):
                raise struct.error("its text is truncated")
            tokens.append((content[place - length : place], score))
    except struct.error as error:
        raise DataError(
            f"{path}: token {len(tokens)}: {error}. Expected the tokenizer file of a llama2.c model."
        ) from None
    first = len(SPECIAL) + 256
    if len(tokens) < first:
        raise DataError(f"{path}: {len(tokens)} tokens, too few: {first} are special or bytes. Use another vocabulary.")
    ids: dict[bytes, int] = {}
    for i, (text, score) in enumerate(tokens[first:], first):
        if ids.setdefault(text, i) != i:
            raise DataError(f"{path}: token {i}: {text!r} is also token {ids[text]}. Use another vocabulary.")
        try:
            text.decode()
        except UnicodeDecodeError:
            raise DataError(f"{path}: token {i}: {text!r} is not UTF-8 text. Use another vocabulary.") from None
        if not math.isfinite(score):
            raise DataError(f"{path}: token {i}: expected a finite score, got {score}. Use another vocabulary.")
    return tokens


def tokenizer_of(tokens: Sequence[tuple[bytes, float]]) -> Any:
    """Build a transformers tokenizer for SentencePiece's BPE, which merges the pair with the best score first."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    bytes_from, bytes_to = len(SPECIAL), len(SPECIAL) + 256
    names = [
        *SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(text.decode().replace(" ", SPACE) for text, _ in tokens[bytes_to:]),
    ]
    ids = {name: i for i, name in enumerate(names)}
    ids_by_score = sorted(range(bytes_to, len(names)), key=lambda i: (-tokens[i][1], i))
    merges = [
        (name[:cut], name[cut:])
        for name in (names[i] for i in ids_by_score)
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    ]
    inner = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex("^ "), "")]
    inner.decoder = decoders.Sequence(steps)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    assert bytes_from == ids["<0x00>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def read_model(path: Path) -> Any:
    """Load the model of a weight file, in float32.

    Raises:
        DataError: the size of the file does not match its header.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    content = files.read_bytes(path, DataError)
    if len(content) < HEADER_BYTES:
        raise DataError(
            f"{path}: {len(content)} bytes, too few for a header. Expected the weights of a llama2.c model, version 0."
        )
    sizes = Sizes(*struct.unpack_from("<7i", content))
    shapes = _shapes(sizes, path)
    expected = HEADER_BYTES + 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    if len(content) != expected:
        raise DataError(
            f"{path}: {len(content)} bytes, but its header {tuple(sizes)} says {expected}. "
            "Expected a llama2.c model, version 0."
        )
    numbers, place, read = torch.frombuffer(bytearray(content[HEADER_BYTES:]), dtype=torch.float32), 0, {}
    for name, shape in shapes.items():
        read[name] = numbers[place : place + torch.Size(shape).numel()].view(shape).clone()
        place += read[name].numel()
    settings = LlamaConfig(
        vocab_size=abs(sizes.vocab_size),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        max_position_embeddings=sizes.max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=sizes.vocab_size > 0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(settings)
    model.load_state_dict(_rename_weights(read, sizes), strict=sizes.vocab_size < 0)
    return model


def _shapes(sizes: Sizes, path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, in the order of the file."""
    is_possible = min(sizes[:5]) > 0 and sizes.vocab_size and sizes.max_positions > 0
    if (
        not is_possible
        or sizes.hidden_size % (2 * sizes.num_heads)  # adjacent dimensions of a head are rotated together
        or sizes.num_heads % sizes.num_key_value_heads
    ):
        raise DataError(
            f"{path}: its header {tuple(sizes)} contains impossible sizes. Expected a llama2.c model, version 0."
        )
    D, inner, L = sizes.hidden_size, sizes.intermediate_size, sizes.num_layers
    head = D // sizes.num_heads
    shared = sizes.num_key_value_heads * head
    return {
        "embed": (abs(sizes.vocab_size), D),
        "input_layernorm": (L, D),
        "self_attn.q_proj": (L, D, D),
        "self_attn.k_proj": (L, shared, D),
        "self_attn.v_proj": (L, shared, D),
        "self_attn.o_proj": (L, D, D),
        "post_attention_layernorm": (L, D),
        "mlp.gate_proj": (L, inner, D),
        "mlp.down_proj": (L, D, inner),
        "mlp.up_proj": (L, inner, D),
        "norm": (D,),
        "cosines": (sizes.max_positions, head // 2),
        "sines": (sizes.max_positions, head // 2),
        **({"head": (abs(sizes.vocab_size), D)} if sizes.vocab_size < 0 else {}),
    }


def _rename_weights(read: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Convert the weights to the names and layout of transformers.
    llama2.c rotates adjacent dimensions together; transformers rotates the two halves of a head."""
    top = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    weights = {top[name]: tensor for name, tensor in read.items() if name in top}
    head = sizes.hidden_size // sizes.num_heads
    for name, tensor in read.items():
        if name in top or name in ("cosines", "sines"):
            continue
        for i, one in enumerate(tensor):
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                one = one.view(-1, head // 2, 2, sizes.hidden_size).transpose(1, 2).reshape(one.shape)
            weights[f"model.layers.{i}.{name}.weight"] = one.clone()
    return weights


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokenizer", type=Path)
    command.add_data_path(parser)
    parser.add_argument("--name", help="of the folder, and in an experiment's model (default: that of the weights)")


def convert(weights: Path, tokenizer: Path, data_path: Path, name: str | None) -> None:
    """Make the folder `data_path / name`. name: None uses the name of the weight file.

    Raises:
        DataError: a file is missing or damaged, or the files are of different models.
        RunError: the disk refuses.
    """
    for path in (weights, tokenizer):
        if not path.is_file():
            raise DataError(f"{path}: no such file. Expected the weights and the tokenizer of a llama2.c model.")
    target = data_path / (name or weights.stem.lower())
    command.require_replaceable(target)
    model, tokens = read_model(weights), read_tokens(tokenizer)
    if len(tokens) != model.config.vocab_size:
        raise DataError(
            f"{tokenizer}: {len(tokens)} tokens, but the model has {model.config.vocab_size}. "
            "Use the tokenizer of this model."
        )
    with files.new_directory(target) as partial_folder:
        model.save_pretrained(partial_folder)
        tokenizer_of(tokens).save_pretrained(partial_folder)
    parameters = model.num_parameters()
    text = f"{target}: {parameters} parameters, {len(tokens)} tokens."
    command.report(text, folder=target, parameters=parameters, tokens=len(tokens))


main = command.main_of(COMMAND, __doc__, _add_options, convert)

if __name__ == "__main__":
    sys.exit(main())
