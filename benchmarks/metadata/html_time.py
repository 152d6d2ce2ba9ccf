"""Processor time of extraction per page size: `python -m benchmarks.metadata.html_time [--elements 4000]`.

Each kind of page is extracted in four sizes, each twice as large as the one before. For every doubling the table has
the ratio of the times, which is 2 for linear time. Each page is measured several times and the fastest run counts,
because other processes share the caches. The exit code is 1 if a ratio is 2.6 or more.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from data_prep.metadata import charset, html, text
from src.errors import DataError

LIMIT = 2.6
DOUBLINGS = 3
TRIALS = 4
KINDS: Mapping[str, Callable[[int], str]] = {
    "paragraphs": lambda n: "<p>x</p>" * n,
    "forms before text": lambda n: "<form>1</form>tail" * n,
    "scripts before text": lambda n: "<script>1</script>tail" * n,
    "nested divisions": lambda n: ("<div>" * 200 + "some text " * 20 + "</div>" * 200) * (n // 200),
    "text in 1,500 divisions": lambda n: "<div>ab" * 1500 + "some text " * 20 * n + "</div>" * 1500,
    "nested footers": lambda n: "<footer>" * 1500 + "some text " * 20 * n + "</footer>" * 1500,
    "tags with attributes": lambda n: f"<p {' '.join(f'a{i}=1' for i in range(5))}>x</p>" * n,
    "long attributes": lambda n: f"<p class='{'x ' * 20 * n}'>text</p>",
    "comments": lambda n: "text<!-- comment -->" * n,
    "unclosed comments": lambda n: "text<!-- comment" * 20 * n,
    "unclosed list items": lambda n: "<ul>" + "<li>text " * n,
    "unclosed cells": lambda n: "<table>" + "<tr><td>text " * n,
    "unclosed links": lambda n: "<a href=x>text " * n,
    "end tags": lambda n: "text</b></i></p>" * 4 * n,
    "entities": lambda n: "&lt;&amp;&nbsp;&#x41;" * 4 * n,
    "unknown entities": lambda n: "&unknown" * 4 * n,
    "less-than signs": lambda n: "<" * 40 * n,
    "empty tags": lambda n: "<b></b>" * n,
    "line breaks": lambda n: "text<br>" * n,
    "options": lambda n: "<select>" + "<option>x" * n,
    "sentences": lambda n: "A sentence. " * n,
    "dots": lambda n: "." * 40 * n,
    "preformatted lines": lambda n: f"<pre>{chr(10) * 2 * n}</pre>" + "x\n\n" * n,
    "one word": lambda n: "x" * 100 * n,
    "latin-1 text": lambda n: "größer und schöner " * 4 * n,
}


def seconds(page: bytes) -> float:
    """Processor time of one page: charset, text and tags, paragraphs and sentences."""
    begin, runs, best = time.process_time(), 0, float("inf")
    while time.process_time() < begin + 0.1 or not runs:
        start = time.process_time()
        page_text = html.extract(charset.decode(page).text)
        text.extract({"text": page_text.text, "metadata_html": page_text.tags, "html_title": page_text.title})
        best, runs = min(best, time.process_time() - start), runs + 1
    return best


def measure(make: Callable[[int], str], elements: int) -> list[float]:
    """Times in all sizes, the fastest of up to `TRIALS`; later trials only for ratios above the limit."""
    start = f"<html><head><title>page</title></head><body>{'word ' * 20}"
    pages = [(start + make(elements << doubling)).encode("latin-1") for doubling in range(DOUBLINGS + 1)]
    times = [float("inf")] * len(pages)
    for _ in range(TRIALS):
        times = [min(before, seconds(page)) for before, page in zip(times, pages, strict=True)]
        if max(doublings(times)) < LIMIT:
            break
    return times


def doublings(times: Sequence[float]) -> list[float]:
    """Ratio of each time to the one before."""
    return [after / before for before, after in pairwise(times)]


def main() -> int:
    """Print a table. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=int, default=4000, help="elements of the smallest page (default: %(default)s)"
    )
    options = parser.parse_args()
    slow = []
    for name, make in KINDS.items():
        try:
            times = measure(make, options.elements)
        except DataError as error:
            print(f"{name:25} {error}")
            continue
        ratios = doublings(times)
        print(f"{name:25}", *(f"{value * 1000:8.1f} ms" for value in times), *(f"{ratio:6.2f}" for ratio in ratios))
        slow += [name] if max(ratios) >= LIMIT else []
    print(f"ratios of {LIMIT} or more: {', '.join(slow) or 'none'}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
