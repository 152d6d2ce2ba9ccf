"""Write tars of pages with text and images from scikit-learn's digits: `python -m data_prep.interleaved.digit_pages`.

A page has one to four images between words, each of one to three digits side by side, and says which digits they are
and what their sum is. Writes --data_path/digit_pages with train/ and val/, which have different images, and
tokenizer/. With --chats, pages are conversations, in --data_path/digit_chats, whose tokenizer has a chat template. Two
runs give the same bytes.
"""

import argparse
import io
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep import command
from data_prep.crossattn.stdlib_qa import END_OF_TEXT, PAD, train_byte_level_bpe
from data_prep.interleaved.write import Document, Part, Writing, write
from src import files
from src.support.command_line import require_at_least
from src.systems.interleaved.streaming.chats import make_tokens

COMMAND = "python -m data_prep.interleaved.digit_pages"
FOLDER, CHATS = "digit_pages", "digit_chats"
CHAT_TOKENS = ("<|im_start|>", "<end_of_utterance>")
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's."""
VAL_IMAGES = 397
"""Number of validation images: the last ones of 1,797."""
WORDS = ("Here is", "Then comes", "Next to it", "And", "Look at", "After that")
VOCAB_SIZE = 320


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    parser.add_argument("--pages", type=int, default=4000, help="pages of the training split (default: %(default)s)")
    parser.add_argument(
        "--val_pages", type=int, default=200, help="pages of the validation split (default: %(default)s)"
    )
    parser.add_argument("--chats", action="store_true", help="write conversations about the pages")
    parser.add_argument("--per_shard", type=int, default=500, help="pages of a tar (default: %(default)s)")


def prepare(
    data_path: Path, pages: int = 4000, val_pages: int = 200, per_shard: int = 500, chats: bool = False
) -> None:
    """Make the folder `digit_pages`, or `digit_chats`, below `data_path` if it is missing.

    Raises:
        ConfigError: a split would have no page.
        DataError: the folder was made with other options.
        RunError: the disk refuses.
    """
    import sklearn
    from sklearn.datasets import load_digits

    require_at_least(1, pages=pages, val_pages=val_pages)
    folder = data_path / (CHATS if chats else FOLDER)
    texts = make_tokens(_tokenizer(folder / "tokenizer", chats), "idefics3", chats)
    digits: Any = load_digits()
    images, labels = (digits.images * (255 / 16)).round().astype("uint8"), digits.target.tolist()
    parts = {"train": range(len(labels) - VAL_IMAGES), "val": range(len(labels) - VAL_IMAGES, len(labels))}
    made_from = {"command": COMMAND, "script": command.digest_files([__file__]), "scikit-learn": sklearn.__version__}
    for split, count in (("train", pages), ("val", val_pages)):
        how = Writing(per_shard, "digits", texts=texts)
        documents = make_pages(images, labels, parts[split], count, split)
        manifests = write(
            folder / split,
            map(as_chat, documents) if chats else documents,
            {**made_from, "pages": count, "split": split},
            how,
        )
        tars = len(manifests.shards)
        command.report(f"{folder / split}: {count} pages in {tars} tars", folder=folder / split, pages=count, tars=tars)


def make_pages(
    images: Any, labels: Sequence[int], selected_ids: Sequence[int], count: int, seed: str
) -> Iterator[Document]:
    """Yield pages made of the images `selected_ids`. images: (N, 8, 8) uint8. labels: digit of each image."""
    import numpy as np
    from PIL import Image

    for number in range(count):
        draws = random.Random(f"{FOLDER}/{seed}/{number}")
        parts, digits = list[Part](), list[int]()
        for _ in range(draws.randint(1, 4)):
            image_ids = draws.choices(selected_ids, k=draws.choices((1, 2, 3), (6, 1, 1))[0])
            digits += (labels[i] for i in image_ids)
            parts.append(Part("text", draws.choice(WORDS).encode()))
            out = io.BytesIO()
            Image.fromarray(np.concatenate([images[i] for i in image_ids], axis=1)).save(out, "PNG")
            parts.append(Part("image", out.getvalue(), "png"))
        parts.append(Part("prompt", b"The digits are"))
        parts.append(Part("text", f"{' '.join(map(str, digits))}.".encode()))
        parts.append(Part("prompt", b"Their sum is"))
        parts.append(Part("text", f"{sum(digits)}.".encode()))
        yield Document(f"{number:06}", parts)


def as_chat(page: Document) -> Document:
    """A page as a conversation: the user asks for what the page says of its images."""
    *parts, digits, numbers, total, number = page.parts
    question = [Part("prompt", part.content) if part.kind == "text" else part for part in parts]
    return Document(page.key, [*question, digits, numbers, total, number])


def _tokenizer(folder: Path, chats: bool) -> Any:
    """Load the tokenizer of these pages; make it if it is missing."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        lines = [*WORDS, "The digits are 0 1 2 3 4 5 6 7 8 9. Their sum is 45."] * 2
        lines += ["User Assistant"] * 2 if chats else []
        begin, end = CHAT_TOKENS if chats else (None, END_OF_TEXT)
        trained = train_byte_level_bpe(lines, VOCAB_SIZE, [token for token in (begin, end, PAD) if token])
        command.require_replaceable(folder)
        with files.new_directory(folder) as partial_folder:
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, bos_token=begin, eos_token=end, pad_token=PAD)
            tokenizer.chat_template = CHAT_TEMPLATE if chats else None
            tokenizer.save_pretrained(partial_folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
