"""Models of llama2.c: the same logits as its own arithmetic, and the real one tells its stories."""

import math
import os
import re
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep import llama2c

SIZES = (8, 12, 2, 4, 2, 262, 16)  # width, inner width, layers, heads, key heads, vocabulary, positions


def write(folder: Path, sizes: tuple[int, ...] = SIZES, tail: bytes = b"") -> tuple[list[str], dict[str, torch.Tensor]]:
    """Random weights and a vocabulary of one word more than the bytes; returns the command's arguments and the
    matrices."""
    D, inner, L, heads, groups, vocabulary, positions = SIZES
    shared, half = groups * D // heads, D // heads // 2
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed": (vocabulary, D),
        "n1": (L, D),
        "q": (L, D, D),
        "k": (L, shared, D),
        "v": (L, shared, D),
        "o": (L, D, D),
    }
    shapes |= {
        "n2": (L, D),
        "w1": (L, inner, D),
        "w2": (L, D, inner),
        "w3": (L, inner, D),
        "n": (D,),
        "c": (positions, half),
        "s": (positions, half),
    }
    weights = {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}
    content = b"".join(tensor.numpy().tobytes() for tensor in weights.values())
    (folder / "Tiny.bin").write_bytes(struct.pack("<7i", *sizes) + content + tail)
    tokens = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{i:02X}>".encode() for i in range(256)), b" ", b"a", b" a"]
    words = b"".join(struct.pack("<fi", -float(i), len(text)) + text for i, text in enumerate(tokens))
    (folder / "tok.bin").write_bytes(struct.pack("<i", 6) + words)
    return [str(folder / "Tiny.bin"), str(folder / "tok.bin"), "--data_path", str(folder)], weights


def add_token(path: Path, text: bytes, score: float = 0.0) -> None:
    path.write_bytes(path.read_bytes() + struct.pack("<fi", score, len(text)) + text)


def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
    """run.c: neighbours (x[i], x[i + 1]) of a head turned by position * 10000^(-i / width)."""
    out = x.clone()
    for i in range(0, len(x), 2):
        angle = position * 10000.0 ** (-(i % 2) / 2)  # two numbers to a head: one pair, i = 0
        a, b = x[i].item(), x[i + 1].item()
        out[i], out[i + 1] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return out


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean() + 1e-5)


def plain_logits(w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """One token at a time, as run.c goes."""
    keys: list[list[torch.Tensor]] = [[], []]
    values: list[list[torch.Tensor]] = [[], []]
    logits = []
    for position, token in enumerate(ids):
        x = w["embed"][token].clone()
        for i in range(2):
            h = norm(x, w["n1"][i])
            q = rotate(w["q"][i] @ h, position)
            keys[i].append(rotate(w["k"][i] @ h, position))
            values[i].append(w["v"][i] @ h)
            read = []
            for head in range(4):
                head_slice, group = slice(2 * head, 2 * head + 2), slice(head // 2 * 2, head // 2 * 2 + 2)
                scores = torch.stack([q[head_slice] @ k[group] / math.sqrt(2) for k in keys[i]]).softmax(0)
                read.append(sum(s * v[group] for s, v in zip(scores, values[i], strict=True)))
            x = x + w["o"][i] @ torch.cat(read)
            h = norm(x, w["n2"][i])
            x = x + w["w2"][i] @ (torch.nn.functional.silu(w["w1"][i] @ h) * (w["w3"][i] @ h))
        logits.append(w["embed"] @ norm(x, w["n"]))
    return torch.stack(logits)


def test_logits_are_those_of_its_own_arithmetic(tmp_path: Path):
    words, weights = write(tmp_path)
    assert llama2c.main(words) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    ids = [1, 261, 70, 4, 259]
    with torch.no_grad():
        torch.testing.assert_close(
            model(torch.tensor([ids])).logits[0], plain_logits(weights, ids), rtol=1e-4, atol=1e-4
        )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert tokenizer("a\u00e9")["input_ids"] == [1, 261, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([261, 3 + 0xC3, 3 + 0xA9]) == "a\u00e9"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"abc"), r"Tiny.bin: 3 bytes, too few for a header"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-4]),
            r"Tiny.bin: \d+ bytes, but its header \(8, 12, 2, 4, 2, 262, 16\) says",
        ),
        (
            lambda path: path.write_bytes(struct.pack("<7i", 8, 12, 2, 3, 2, 262, 16)),
            r"\(8, 12, 2, 3, 2, 262, 16\)",
        ),
        (
            lambda path: path.write_bytes(struct.pack("<7i", 12, 12, 2, 4, 2, 262, 16)),
            r"Tiny.bin: .*\(12, 12, 2, 4, 2, 262, 16\)",
        ),
        (
            lambda path: path.write_bytes(struct.pack("<7i", 8, 12, 2, 2, 4, 262, 16)),
            r"Tiny.bin: .*\(8, 12, 2, 2, 4, 262, 16\)",
        ),
        (lambda path: add_token(path.with_name("tok.bin"), b"\xff"), r"tok.bin: token 262: b'\\xff' is not UTF-8"),
        (lambda path: add_token(path.with_name("tok.bin"), b"a"), r"tok.bin: token 262: b'a' is also token 260"),
        (lambda path: add_token(path.with_name("tok.bin"), b"b", math.nan), r"tok.bin: token 262: .*got nan"),
        (
            lambda path: path.with_name("tok.bin").write_bytes(b"\0" * 14),
            r"tok.bin: token 1: .*Expected the tokenizer file",
        ),
        (
            lambda path: path.with_name("tok.bin").write_bytes(struct.pack("<ifi", 1, 0.0, 1) + b"x"),
            r"tok.bin: 1 tokens, too few",
        ),
        (lambda path: add_token(path.with_name("tok.bin"), b"b"), r"tok.bin: 263 tokens, but the model has 262"),
        (lambda path: path.unlink(), r"Tiny.bin: no such file"),
    ],
)
def test_other_files_are_refused_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change, message: str
):
    words, _ = write(tmp_path)
    change(tmp_path / "Tiny.bin")
    assert llama2c.main(words) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "tiny").exists()


def test_the_real_model_predicts_its_stories(tmp_path: Path):
    data = os.environ.get("TRAINVAL_DATA")
    if not data:
        pytest.skip("TRAINVAL_DATA is not set")
    folder = Path(data) / "weights" / "stories260K"
    assert (
        llama2c.main(
            [
                str(folder / "stories260K.bin"),
                str(folder / "tok512.bin"),
                "--data_path",
                str(tmp_path),
                "--name",
                "stories",
            ]
        )
        == 0
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stories").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "stories")
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == text
    with torch.no_grad():
        loss, shuffled = (
            model(x, labels=x).loss.item()
            for x in (ids, ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))])
        )
    assert loss < 0.6
    assert shuffled > 4


def test_other_files_in_the_folder_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words, _ = write(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").touch()
    assert llama2c.main(words) == 1
    assert str(tmp_path / "tiny" / "notes.txt") in capsys.readouterr().err
    assert (tmp_path / "tiny" / "notes.txt").exists()
