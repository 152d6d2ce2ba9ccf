"""Cost of documents with metadata: extraction, pieces, evaluation, waiting for data, and memory of a preparation.

    python -m benchmarks.metadata.rows --data_path results/data [--rounds 5] [--gigabytes 1]

Run `data_prep.crossattn.stdlib_qa` and `data_prep.metadata.stdlib_pages` first. Extraction and pieces are compared with
plain implementations of the algorithms of BigScience's metadata project. These parse, serialise, minify and parse a
page again; they build texts and masks by single characters, and tokenise each document with a call of transformers.
Both sides alternate in this process, on the same documents.
"""

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from lxml import etree, html  # pyright: ignore[reportAttributeAccessIssue]

from data_prep.metadata import stdlib_pages
from data_prep.metadata.html import BLOCKS, extract
from src.data.text import tokenizers
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.systems.metadata import gains
from src.systems.metadata.data.annotations import Document
from src.systems.metadata.data.examples import ExampleMaker
from src.systems.metadata.data.processors import global_text, local_markers
from src.systems.metadata.groups import METADATA_TINY
from src.training.loss import causal_lm_loss
from src.training.validation import token_losses
from tests import toy

PREPARE = """
import re, sys
from data_prep.metadata import prepare
code = prepare.main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
sys.exit(code)
"""


def alternate(sides: Sequence[tuple[str, Callable[[], object]]], items: int, unit: str, rounds: int) -> None:
    """Print the rate of each side, and the ratio of the first to the second: medians over the rounds."""
    seconds = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        for name, run in sides:
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    middle = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    (first, _), (second, _) = sides
    rates = ", ".join(f"{name} {items / times:,.1f} {unit}/s" for name, times in middle.items())
    print(f"{rates}: {middle[second] / middle[first]:.1f} times as fast")


class Minifier(HTMLParser):
    """Rewrites a page with each run of blanks as one, except in `pre`, like htmlmin in the reference."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.out, self.depth_of_pre = list[str](), 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth_of_pre += tag == "pre"
        self.out.append("".join([f"<{tag}", *(f' {name}="{value}"' for name, value in attrs), ">"]))

    def handle_endtag(self, tag: str) -> None:
        self.depth_of_pre -= tag == "pre"
        self.out.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.out.append(data if self.depth_of_pre else re.sub(r"\s+", " ", data))

    def handle_entityref(self, name: str) -> None:
        self.out.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.out.append(f"&#{name};")


def minify(source: str) -> str:
    """Minify a page."""
    parser = Minifier()
    parser.feed(source)
    return "".join(parser.out)


def plain_extraction(source: str) -> str:
    """Extract the text of a page like the reference, and its tags with their spans."""
    body = html.fromstring(source).find(".//body")
    root = html.fromstring(minify(f"<html>{etree.tostring(body, method='html', encoding='unicode')}</html>"))
    for name in ("script", "style", "header", "iframe", "footer", "form"):
        for element in root.iter(name):
            element.drop_tree()
    for name in ("div", "p", "section", "table", "ul", "ol", "dl"):
        for element in list(root.iter(name)):
            if len("".join(element.itertext())) <= 64 and element.getparent() is not None:
                element.drop_tree()
    root = html.fromstring(minify(etree.tostring(root, method="html", encoding="unicode")))
    text, tags = "", []

    def add(tag: Any, new: str | None) -> None:
        nonlocal text
        if tag in BLOCKS and text and text[-1] != "\n":
            text = text[:-1] + "\n" if text[-1] == " " else text + "\n"
        last = text[-1] if text else " "
        for character in (new or "").replace("\u00a0", " "):
            current = " " if character in "\r\n" else character
            if not (last.isspace() and current.isspace()):
                text += current
            last = current

    def visit(element: Any) -> None:
        start = len(text)
        add(element.tag, element.text)
        for child in element:
            visit(child)
        tags.append((element.tag, start, len(text)))
        add(element.tag, element.tail)

    visit(root)
    return text


class PlainWriting:
    """Prefix, markers and blocks of the reference."""

    def __init__(self, tokenizer: Any, config: Any) -> None:
        self._tokenizer, self._config, self._room = tokenizer, config.writing, config.sequence_tokens

    def blocks(self, document: Document) -> list[Any]:
        """Make the padded ids and masks of each block."""
        writing = self._config
        phrases = {item.key: global_text(item, writing.separators) for item in document.items if item.start is None}
        prefix = " | ".join(phrases[key] for key in writing.keys if key in phrases)
        prefix_ids = self._tokenizer(prefix + " |||")["input_ids"] if prefix else []
        before, behind = defaultdict(list), defaultdict(list)
        for item in document.items:
            texts = local_markers(item, writing.html, "beginning") if item.start is not None else None
            if texts:
                before[item.span[0]].insert(0, texts[0])
                behind[item.span[1]].append(texts[1])
        text, mask = "", []
        for index, character in enumerate([*document.text, ""]):
            for marker in [*behind[index], *before[index]]:
                for each in marker:
                    text += each
                    mask.append(True)
            text += character
            mask += [False] * len(character)
        encoded = self._tokenizer(text)
        metadata_flags = []
        for place in range(len(encoded["input_ids"])):
            span = encoded.token_to_chars(place)
            metadata_flags.append(any(mask[span.start : span.end]))
        blocks, size = [], self._room - len(prefix_ids)
        for begin in range(0, len(metadata_flags), size):
            ids, is_metadata = (
                prefix_ids + encoded["input_ids"][begin : begin + size],
                metadata_flags[begin : begin + size],
            )
            pad = self._room - len(ids)
            blocks.append(
                (ids + [0] * pad, [1] * len(ids) + [0] * pad, [1] * len(prefix_ids) + is_metadata + [0] * pad)
            )
        return blocks


def measure_evaluation(recipe: Any, places: Places, tokenizer: Any, documents: int, rounds: int) -> None:
    """Measure gains of HTML in batches and one document at a time, on one model; the scores must agree."""
    torch.manual_seed(0)
    model = recipe.model.build(places).eval()
    val = recipe.data.build(places, tokenizer, "val", 0).documents
    config = gains.Gains(columns=["html"], documents=documents)
    scores: dict[int, dict[str, float]] = {}

    def run(batch: int) -> None:
        with torch.no_grad():
            scores[batch] = gains.measure(
                config,
                val,
                lambda data: token_losses(
                    model, data, causal_lm_loss, batch, torch.device("cpu"), tokenizers.control_ids(tokenizer)
                ),
            )

    alternate([("evaluation by 16:", lambda: run(16)), ("one by one:", lambda: run(1))], 4 * documents, "rows", rounds)
    worst = max(abs(scores[16][name] - scores[1][name]) for name in scores[1] if "perplexity" not in name)
    print(f"their scores differ by at most {worst:.1e} nats a token")


def measure_waiting(folder: Path) -> None:
    """Print the share of the training time of `metadata_tiny` spent waiting for data of unknown lengths."""
    short = override(
        METADATA_TINY, {"loop.steps": 200, "loop.eval_every": 200, "gains": None, "data.val_documents": 10}
    )
    assert toy.main(["-e", "short"], {"short": [short]}, folder) == 0
    rows = [json.loads(line) for line in (folder / "runs" / exp_id(short) / "perf.jsonl").read_text().splitlines()]
    rates = [row["data_wait_rate"] for row in rows if "data_wait_rate" in row]
    print(
        "data_wait_rate of metadata_tiny: "
        f"{sum(rates) / len(rates):.4f} on average over {len(rates)} rows, last {rates[-1]:.4f}"
    )


def measure_memory(source: str, gigabytes: float, folder: Path) -> None:
    """Print the peak memory of preparing a small file of pages, and one of `gigabytes`."""
    for name, size in (("small", 0.02), ("large", gigabytes)):
        lines, count = [(json.dumps({"url": "https://example.org/page", "doc_html": source}) + "\n").encode() * 10], 0
        with gzip.open(folder / f"{name}.jsonl.gz", "wb", compresslevel=1) as file:
            while count < size * 1e9:
                count += file.write(lines[0])
        (folder / "val.jsonl").write_text(
            json.dumps({"url": "https://example.org/", "text": "held out", "doc_html": f"<p>{'words ' * 20}</p>"})
            + "\n"
        )
        words = ["--data_path", str(folder / name), "--name", "made", "--train", str(folder / f"{name}.jsonl.gz")]
        words += ["--val", str(folder / "val.jsonl"), "--extract", "html", "url", "text", "--workers", "1"]
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", PREPARE, *words], check=True, capture_output=True, text=True)
        peak = int(done.stdout.split()[-1]) / 1024
        print(
            f"preparation of {count / 1e9:.2f} GB of JSON lines: "
            f"{time.perf_counter() - begin:.0f} s, peak {peak:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_path", type=Path, default=Path("results/data"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    places = Places(args.data_path, args.data_path)
    tokenizer = tokenizers.load(args.data_path / "stdlib_tokenizer")
    sources = list(
        stdlib_pages.render(
            ["argparse", "asyncio", "collections", "logging", "os", "pathlib", "typing", "unittest"]
        ).values()
    )
    kib = sum(map(len, sources)) / 1024
    for source in sources:
        assert abs(len(plain_extraction(source)) - len(extract(source).text)) < 0.05 * len(source)
    sides = [
        ("extraction:", lambda: [extract(source) for source in sources]),
        ("plain:", lambda: [plain_extraction(s) for s in sources]),
    ]
    alternate(sides, int(kib), "KiB", args.rounds)

    recipe: Any = load_experiment(
        override(METADATA_TINY, {"data.writing.linearisation": "compatible"}), "metadata_tiny"
    )
    data = recipe.data.build(places, tokenizer, "train", 0).documents
    documents = [data[number] for number in range(1500)]
    plain = PlainWriting(tokenizer, recipe.data)
    for linearisation in ("compatible", "nested"):
        writing = recipe.data.writing.model_copy(update={"linearisation": linearisation})
        maker = ExampleMaker(writing, tokenizers.SafeTokenizer(tokenizer), recipe.data.sequence_tokens)
        ours, theirs = ([maker.pieces(each) for each in documents], [plain.blocks(each) for each in documents])
        assert abs(sum(map(len, ours)) - sum(map(len, theirs))) < 0.05 * sum(map(len, theirs))
        sides = [
            (f"writing, {linearisation}:", lambda maker=maker: [maker.pieces(each) for each in documents]),
            ("plain:", lambda: [plain.blocks(each) for each in documents]),
        ]
        alternate(sides, len(documents), "documents", args.rounds)
    measure_evaluation(load_experiment(METADATA_TINY, "metadata_tiny"), places, tokenizer, 100, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").symlink_to(args.data_path.resolve())
        measure_waiting(Path(folder))
        measure_memory(sources[0][:10_000], args.gigabytes, Path(folder))


if __name__ == "__main__":
    main()
