"""Build a code-reading data set from the Python standard library of this machine: `python -m
data_prep.crossattn.stdlib_qa`.

Writes three folders below --data_path: stdlib_qa (questions about functions, classes and methods), stdlib_text
(complete modules, for a language model) and stdlib_tokenizer (byte-level BPE, trained on the train split). A module or
context is in one split only. Two runs on the same Python give the same bytes.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import command
from data_prep.crossattn import code_questions
from src import files
from src.errors import DataError
from src.support.command_line import require_at_least

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COMMAND = "python -m data_prep.crossattn.stdlib_qa"
FOLDERS = ("stdlib_qa", "stdlib_text", "stdlib_tokenizer")
SPLITS = ("train", "val")
MIN_CONTEXT_CHARS = 40
MAX_CONTEXT_CHARS = 1000
VAL_PERCENT = 8
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (
    END_OF_TEXT, "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|user|>", "<|assistant|>", "<|C|>", PAD,
)  # fmt: skip
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# Nearly every function has these. A context gets only one question about them, so that other kinds are not rare.
_FREQUENT_KINDS = ("name", "parameters", "calls")
_SKIPPED_FOLDERS = {
    "__pycache__",
    "_bundled",
    "dist-packages",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
# Chosen so that tkinter, one question in twenty, is not a third of the validation split.
_SALT = "stdlib_qa/"
_SKIPPED_PREFIX = "_sysconfigdata"  # paths and flags of this machine

Rows = dict[str, list[dict[str, Any]]]


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    parser.add_argument("--vocab_size", type=int, default=4096, help="tokens of the tokenizer (default: %(default)s)")


def prepare(data_path: Path, vocab_size: int = 4096, stdlib: Path | None = None) -> bool:
    """Make the three folders below `data_path`; False if they are complete and have the same provenance.

    Raises:
        DataError: there are no sources to read, or a folder has other files; see `command.require_replaceable`.
        ConfigError: the vocabulary is too small for the 256 bytes and the control tokens.
        RunError: the disk refuses.
    """
    start = time.monotonic()
    require_at_least(MIN_VOCAB_SIZE, vocab_size=vocab_size)
    stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
    sources = read_sources(stdlib)
    made_from = _provenance(sources, vocab_size)
    if command.is_made([data_path / name for name in FOLDERS], made_from):
        return False
    for name in FOLDERS:
        command.require_replaceable(data_path / name)
    questions, skipped = question_rows(sources)
    texts = text_rows(sources)
    if not questions["train"] or not questions["val"]:
        raise DataError(
            f"{stdlib}: its {len(sources)} modules give too few questions for both splits. "
            "Use a complete standard library."
        )
    facts = {"command": COMMAND, "made_from": made_from}
    counts = {split: dict(sorted(Counter(row["kind"] for row in rows).items())) for split, rows in questions.items()}
    _write_rows(data_path / "stdlib_qa", questions, {**facts, "counts": counts, "modules_that_do_not_parse": skipped})
    _write_rows(
        data_path / "stdlib_text", texts, {**facts, "counts": {split: len(rows) for split, rows in texts.items()}}
    )
    lines = [row["text"] for row in texts["train"]] + [
        f"{row['question']}\n{row['answer']}" for row in questions["train"]
    ]
    _write_tokenizer(data_path / "stdlib_tokenizer", lines, vocab_size, facts)
    _print_summary(data_path, counts, texts, time.monotonic() - start)
    return True


def read_sources(stdlib: Path) -> dict[str, str]:
    """{module name: source with "\\n" line ends}, sorted by name, without tests and third-party packages.

    Raises:
        DataError: the folder has no Python sources (a zipped or frozen standard library).
    """
    sources = {}
    for folder, below, names in os.walk(stdlib):
        below[:] = [name for name in below if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIX):
                path = Path(folder, name)
                module = ".".join(path.relative_to(stdlib).with_suffix("").parts).removesuffix(".__init__")
                if (source := _read(path)) is not None:
                    sources[module] = source
    if not sources:
        raise DataError(
            f"{stdlib}: no Python sources. The standard library of this Python is zipped, frozen or compiled; "
            f"run `{COMMAND}` with a Python that has .py files."
        )
    return dict(sorted(sources.items()))


def split_of(module: str) -> str:
    """Split of a module: "val" for about VAL_PERCENT of them. Uses a hash of the name, the same on every machine."""
    return "val" if hashlib.sha256(f"{_SALT}{module}".encode()).digest()[0] * 100 < VAL_PERCENT * 256 else "train"


def question_rows(sources: Mapping[str, str]) -> tuple[Rows, list[str]]:
    """Rows of both splits, and the modules that do not parse.
    A duplicate context is used only where it first appears, train before val."""
    rows: Rows = {split: [] for split in SPLITS}
    skipped: list[str] = []
    seen: set[str] = set()
    for split in SPLITS:
        for module in [name for name in sources if split_of(name) == split]:
            try:
                snippets = list(code_questions.snippets(sources[module], MIN_CONTEXT_CHARS, MAX_CONTEXT_CHARS))
            except (SyntaxError, ValueError):
                skipped.append(module)
                continue
            for snippet in snippets:
                if snippet.context not in seen:
                    seen.add(snippet.context)
                    rows[split] += _rows_of(snippet, module, len(rows[split]))
    return rows, skipped


def text_rows(sources: Mapping[str, str]) -> Rows:
    """One row per module that is not blank, with the same splits as the questions."""
    rows: Rows = {split: [] for split in SPLITS}
    for module, source in sources.items():
        if source.strip():
            rows[split_of(module)].append({"text": source, "source": module})
    return rows


def _read(path: Path) -> str | None:
    """Read a file in the encoding that it declares; None if it is not text."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return None


def _rows_of(snippet: code_questions.Snippet, module: str, first_index: int) -> Iterator[dict[str, Any]]:
    frequent = [q for q in snippet.questions if q.kind in _FREQUENT_KINDS]
    frequent_question = (
        frequent[hashlib.sha256(snippet.context.encode()).digest()[0] % len(frequent)] if frequent else None
    )
    selected_questions = [q for q in snippet.questions if q is frequent_question or q.kind not in _FREQUENT_KINDS]
    for index, question in enumerate(selected_questions, first_index):
        yield {
            "context": snippet.context,
            "question": question.text,
            "answer": question.answer,
            "sample_idx": index,
            "dataset": "stdlib",
            "kind": question.kind,
            "module": module,
        }


def _provenance(sources: Mapping[str, str], vocab_size: int) -> dict[str, Any]:
    """Everything that the content of the folders depends on."""
    return {
        "python": platform.python_version(),
        "stdlib_sha256": _digest(part for item in sources.items() for part in item),
        "scripts_sha256": command.digest_files((__file__, code_questions.__file__)),
        "packages": {name: importlib.metadata.version(name) for name in ("tokenizers", "transformers")},
        "vocab_size": vocab_size,
        "context_chars": [MIN_CONTEXT_CHARS, MAX_CONTEXT_CHARS],
        "val_percent": VAL_PERCENT,
    }


def _digest(texts: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _write_rows(folder: Path, rows: Rows, facts: Mapping[str, Any]) -> None:
    with files.new_directory(folder, dict(facts)) as partial_folder:
        for split in SPLITS:
            with open(partial_folder / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows[split])


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> "Tokenizer":
    """Train byte-level BPE, with `special_tokens` first. Digits are split, as in StarCoder's tokenizer.
    Equal texts give equal tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_tokenizer(folder: Path, lines: Sequence[str], vocab_size: int, facts: Mapping[str, Any]) -> None:
    """Train the tokenizer on `lines`, which are all from the train split."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=train_byte_level_bpe(lines, vocab_size, SPECIAL_TOKENS),
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (END_OF_TEXT, PAD)],
        clean_up_tokenization_spaces=False,
    )
    with files.new_directory(folder, {**facts, "tokens": len(fast)}) as partial_folder:
        fast.save_pretrained(partial_folder)


def _print_summary(data_path: Path, counts: Mapping[str, Mapping[str, int]], texts: Rows, seconds: float) -> None:
    names = ", ".join(FOLDERS)
    command.report(f"{data_path}: {names} made in {seconds:.1f} s", folder=data_path, made=True, seconds=seconds)
    columns = {
        split: {
            **{kind: counts[split].get(kind, 0) for kind in code_questions.KINDS},
            "questions": sum(counts[split].values()),
            "modules": len(texts[split]),
        }
        for split in SPLITS
    }
    lines = [f"{'':12}" + "".join(f"{split:>8}" for split in SPLITS)]
    lines += [f"{row:12}" + "".join(f"{columns[split][row]:8}" for split in SPLITS) for row in columns[SPLITS[0]]]
    command.report("\n".join(lines), counts=columns)


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
