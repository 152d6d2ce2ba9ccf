"""The pictures of two pages in docs/: `python -m benchmarks.screenshots RUNS [-e demo] [-o docs]`, of runs as `make demo` leaves them.

A sheet for the report, and one for the page of a run: in windows of three widths, light and dark. benchmarks.dashboard draws the dashboard.
"""

import argparse
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from results import report, run_page
from src.tables import rows as results

ROOT = Path(__file__).resolve().parents[1]
WIDTHS, HEIGHT = (1280, 800, 400), 900
SCALE, GAP = 0.5, 12


def main() -> int:
    """Write the sheets and print their sizes. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshots", description=__doc__)
    parser.add_argument("runs", type=Path, help="a folder results/runs: the pages show its last two words")
    parser.add_argument("-e", "--group", default="demo")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    output = options.output.resolve()
    os.chdir(options.runs.resolve().parents[1])  # pages show the path as it is given
    runs = Path(*options.runs.resolve().parts[-2:])
    best = results.sort_best_first(results.load_rows(runs, options.group)[0], "inference/em")[0]["exp_id"]
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = Path(scratch) / "page.html"
        report.main(["-e", options.group, str(runs), "-o", str(page)])
        draw(browser, page.as_uri(), output / "report.webp")
        run_page.main([str(runs / best), "-o", str(page)])
        draw(browser, page.as_uri(), output / "run_page.webp")
        browser.close()
    return 0


def draw(browser: Browser, address: str, output: Path) -> None:
    """Write the sheet of the page at `address`."""
    sheet = Image.new("RGB", (round(SCALE * sum(WIDTHS)) + GAP * 4, round(SCALE * HEIGHT) * 2 + GAP * 3), "#8a93a3")
    for row, scheme in enumerate(("light", "dark")):
        x = GAP
        for width in WIDTHS:
            context = browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
            page = context.new_page()
            page.goto(address)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            small = picture.resize((round(SCALE * width), round(SCALE * HEIGHT)), Image.Resampling.LANCZOS)
            sheet.paste(small, (x, GAP + row * (small.height + GAP)))
            x += small.width + GAP
            context.close()
    sheet.save(output, quality=72, method=6)
    print(f"{output}  {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
