"""The pictures in docs/ of the demo's runs: `make demo`, then `python -m benchmarks.pages.screenshots`.

demo.png is a plot; dashboard.webp, report.webp and run_page.webp are screenshots. All are compressed without loss.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from results import plot, report
from results.pages import run_page
from src.tables import results

ROOT = Path(__file__).resolve().parents[2]
WIDTH, HEIGHT = 1280, 1000
MILLISECONDS = 120_000


def main() -> int:
    """Write the pictures and print their sizes. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages.screenshots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="?", type=Path, default=Path("results/runs"), help="a folder results/runs with the demo's runs"
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    output = options.output.resolve()
    os.chdir(options.runs.resolve().parents[1])  # pages show the path as it is given
    runs = Path(*options.runs.resolve().parts[-2:])
    plot.main(
        [str(runs), "-e", "demo", "--metric", "val_loss", "val_loss_shuffled_context", "-o", str(output / "demo.png")]
    )
    save(Image.open(output / "demo.png"), output / "demo.png")
    best = results.sort_best_first(results.load_rows(runs, "demo")[0], "inference/em")[0]["exp_id"]
    command = [sys.executable, "-P", "-m", "results.dashboard", str(runs), "-e", "demo", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        tempfile.TemporaryDirectory() as scratch,
        sync_playwright() as driver,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light").new_page()
            page.set_default_timeout(MILLISECONDS)
            assert server.stdout is not None
            page.goto(server.stdout.readline().strip())
            page.locator(".jobs .tabulator-row").first.wait_for()
            page.locator(".legend").first.wait_for()
            page.wait_for_function("Bokeh.documents[0].is_idle")
            photograph(page, output / "dashboard.webp")
            file = Path(scratch) / "page.html"
            report.main([str(runs), "-e", "demo", "-o", str(file)])
            page.goto(file.as_uri())
            photograph(page, output / "report.webp")
            run_page.main([str(runs / best), "-o", str(file)])
            page.goto(file.as_uri())
            photograph(page, output / "run_page.webp")
            browser.close()
        finally:
            server.terminate()
    return 0


def photograph(page: Page, output: Path) -> None:
    """Write a screenshot of the window."""
    # Animations end.
    page.evaluate("async () => { for (let i = 0; i < 60; i++) await new Promise(requestAnimationFrame) }")
    save(Image.open(io.BytesIO(page.screenshot())), output)


def save(picture: Image.Image, output: Path) -> None:
    """Compress with every color as it is."""
    picture.convert("RGB").save(output, optimize=True, lossless=True, quality=100, method=6)
    print(f"{output}  {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
