"""The dashboard in docs/results.md, of runs that are trained for it: `python -m benchmarks.dashboard_screenshot [--runs DIR]`."""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from src.experiments.grid import grid
from src.experiments.identity import exp_id
from tests import toy

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "resources" / "dashboard.png"
WIDTH, HEIGHT = 1400, 1000
MILLISECONDS = 60_000
TRAINING_SECONDS = 1200
STEPS = 120
BASE = {**toy.BASE, "loop": {**toy.BASE["loop"], "steps": STEPS, "eval_every": 6, "micro_batch": 8}}
GROUP = grid(BASE, {"loop.learning_rate": [1e-3, 3e-3, 1e-2], "model.num_layers": [1, 3], "seed": [0, 1, 2]})
DIVERGING = grid(BASE, {"loop.learning_rate": [1e30]})


def main() -> int:
    """Train, and write the picture while the last experiment is running."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard_screenshot", description=__doc__)
    parser.add_argument("--runs", type=Path, help="a folder of save directories to show as it is (default: train a toy group)")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    if options.runs:
        photograph(options.runs, options.output)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "results"
        with training(folder):
            photograph(folder / "runs", options.output)
    return 0


@contextlib.contextmanager
def training(folder: Path) -> Iterator[None]:
    """A toy group of which one experiment failed, the last is held in the middle of its training, and all others are done."""
    toy.write_data(folder / "data")
    root = toy.project(folder, f"EXP_GROUPS = {{'diverging': {DIVERGING!r}, 'learning_rates': {GROUP!r}}}\n")
    process = None
    with (folder / "printed.log").open("w") as log:
        try:
            for group in ("diverging", "learning_rates"):
                command = toy.command(root, ["-e", group, "--log_every", "6"], folder)
                process = subprocess.Popen(command, stdout=log, stderr=log, env=toy.environment())
                if group == "diverging":
                    process.wait(timeout=TRAINING_SECONDS)
            hold_in_the_last(folder / "runs", process)
            yield
        finally:
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def hold_in_the_last(runs: Path, process: "subprocess.Popen[bytes] | None") -> None:
    """Stop the clock of the training when only its last experiment is not done, and that has come half of its way."""
    until = time.monotonic() + TRAINING_SECONDS
    last = runs / exp_id(GROUP[-1])
    while process is not None and process.poll() is None and time.monotonic() < until:
        scores = last / "scores.jsonl"
        if scores.exists() and scores.read_text().count("\n") >= STEPS // 12:
            process.send_signal(signal.SIGSTOP)
            return
        time.sleep(0.02)
    raise SystemExit(f"{runs}: the toy group did not train to its last experiment; see printed.log")


def photograph(runs: Path, output: Path) -> None:
    """Serve the folder, open it as a reader would, write the picture."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    folder = runs.resolve().parents[1]  # the page shows the path as it is given: results/runs
    command = [sys.executable, "-m", "results.dashboard", str(runs.resolve().relative_to(folder)), "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.set_default_timeout(MILLISECONDS)
            page.goto(address)
            arrange(page)
            output.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=output, full_page=True)
            browser.close()
    finally:
        server.terminate()
        server.communicate()
    print(f"{output}  {output.stat().st_size / 1000:.0f} kB")


def arrange(page: Page) -> None:
    """Wait until everything is drawn, and choose what the picture shows."""
    rows = page.locator(".jobs .tabulator-row")
    expect(rows.first).to_be_visible(timeout=MILLISECONDS)
    running = rows.filter(has_text="running")
    chosen = (running if running.count() else rows).first
    chosen.click()
    name = chosen.locator(".tabulator-cell").first.inner_text()
    expect(page.get_by_label("Experiment").locator("option:checked")).to_contain_text(name, timeout=MILLISECONDS)
    expect(page.locator(".tail pre")).to_be_visible(timeout=MILLISECONDS)
    page.wait_for_function("Bokeh.documents[0].is_idle")
    page.mouse.move(0, 0)


if __name__ == "__main__":
    sys.exit(main())
