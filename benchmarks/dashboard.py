"""The dashboard of many runs in a browser: `python -m benchmarks.dashboard [--experiments 500] [--minutes 10] [-o FILE]`.

Prints how long the first paint takes and each kind of click, then keeps three tabs open, which refresh every two seconds, and prints what
memory the server and the browser take at the begin and at the end. -o: pictures of the page, of all runs and filtered, in windows of two
widths.
"""

import argparse
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from src.runs.environment import describe
from src.runs.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]
WIDTHS, HEIGHT, TALL = (1280, 800), 1000, 1700
SCALE, GAP = 0.4, 12
MILLISECONDS = 120_000
TURNS = 6
PAUSE = 2000
"""Milliseconds between two clicks: a reader looks at what the first has shown."""
RATES, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 10
Result = TypeVar("Result")


def main() -> int:
    """Measure, print a line for each figure. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__)
    parser.add_argument("--experiments", type=int, default=500)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10, help="how long the tabs stay open")
    parser.add_argument("-o", "--output", type=Path, help="a file for pictures, such as docs/dashboard.webp")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="benchmark-dashboard-"))
    try:
        running = generate(folder / "runs", options.experiments, options.steps)
        print(f"{options.experiments} runs of {options.steps} points, load {os.getloadavg()[0]:.1f}", flush=True)
        command = [sys.executable, "-m", "results.dashboard", "runs", "--port", "0"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with sync_playwright() as started:
                browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                _measure(browser, address, running, server.pid, options.minutes)
                if options.output:
                    _draw(browser, address, options.output)
                browser.close()
        finally:
            server.terminate()
            server.communicate()
    finally:
        shutil.rmtree(folder)
    return 0


def generate(runs: Path, count: int, steps: int) -> RunDir:
    """A grid of rates and strides, ten seeds each, of which some failed or were stopped; and one that goes on, which is returned."""
    rng, facts = random.Random(0), {**describe(["trainval.py", "-e", "grid"]), "groups": ["grid"]}
    for number in range(count):
        configuration, seed = divmod(number, SEEDS)
        stride, rate = divmod(configuration, len(RATES))
        exp = {
            "recipe": "toy",
            "seed": seed,
            "model": {"name": "m", "stride": stride},
            "loop": {"steps": steps, "learning_rate": RATES[rate]},
        }
        last, state, reason = steps, "done", ""
        if number % 23 == 5:
            last, state, reason = steps // 3, "failed", "CUDA out of memory. Tried to allocate 2.50 GiB. Use a smaller micro_batch."
        elif number % 37 == 9:
            last, state, reason = steps // 2, "stopped", "SIGTERM: start it again to continue"
        run = RunDir.open(runs, exp, exp, facts=facts)
        loss, noise = 2 + rate / 5, rng.random() / 20
        for step in range(1, last + 1):
            loss += (0.3 + stride / 50 - loss) * 0.03 + rng.gauss(0, 0.01)
            run.scores.append({"step": step, "train_loss": loss, "val_loss": loss + noise, "val_accuracy": 1 / (1 + loss)})
        if number == count - 1:
            return run
        run.set_status(state, step=last, **({"reason": reason} if reason else {}))  # pyright: ignore[reportArgumentType]
        run.close()
    raise AssertionError("no experiments")


def _measure(browser: Browser, address: str, running: RunDir, server: int, minutes: float) -> None:
    _opened(browser, address).close()  # the server's own first page compiles its templates
    page, seconds = _timed(lambda: _opened(browser, address))
    print(f"first paint      {seconds:6.2f} s  (the table of jobs, of results and the curves)")
    clicks: dict[str, Callable[[int], None]] = {
        "a job": lambda turn: _click_job(page, turn),
        "a row of results": lambda turn: _click_result(page, turn),
        "a tab": lambda turn: _click_tab(page, turn),
        "another metric": lambda turn: _click_metric(page, turn),
        "a state": lambda turn: _click_state(page, turn),
        "an expression": lambda turn: _type_expression(page, turn),
    }
    page.locator(".live-switch").click()  # so that no refresh stands between a click and its answer
    for name, click in clicks.items():
        seconds = []
        for turn in range(TURNS):
            page.wait_for_timeout(PAUSE)
            if name == "a state" and turn % 2 == 0:
                page.locator(".states input").click()  # opens the list of them
            seconds.append(_timed(partial(click, turn))[1])
        seconds.sort()
        print(f"{name:16} {seconds[TURNS // 2]:6.2f} s median of {TURNS}, most {seconds[-1]:.2f} s", flush=True)
    page.close()
    pages = [_opened(browser, address) for _ in range(3)]
    for tab in pages:
        tab.locator("select").filter(has_text="every 2 s").select_option(label="every 2 s")
    until, step, rows = time.monotonic() + 60 * minutes, 10**6, []
    while time.monotonic() < until:
        step += 1
        running.scores.append({"step": step, "train_loss": 0.3, "val_loss": 0.3, "val_accuracy": 0.7})
        pages[0].wait_for_timeout(5000)
        heaps = [tab.evaluate("performance.memory.usedJSHeapSize") / 1e6 for tab in pages]
        rows.append((_megabytes(server), sum(heaps)))
    third = max(1, len(rows) // 3)
    for name, values in zip(("server", "tabs"), zip(*rows, strict=True), strict=True):
        begin, end = (sum(part) / len(part) for part in (values[third : 2 * third] or values, values[-third:]))
        print(f"memory of {name:7}{begin:6.0f} MB in the second third, {end:6.0f} MB in the last, most {max(values):6.0f} MB")


def _opened(browser: Browser, address: str, width: int = WIDTHS[0], height: int = HEIGHT) -> Page:
    page = browser.new_context(viewport={"width": width, "height": height}).new_page()
    page.set_default_timeout(MILLISECONDS)
    page.goto(address)
    page.locator(".jobs .tabulator-row").first.wait_for()
    page.locator(".results .tabulator-row").first.wait_for()
    page.locator(".legend").first.wait_for()
    page.wait_for_function("Bokeh.documents[0].is_idle")
    return page


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def _click_job(page: Page, turn: int) -> None:
    row = page.locator(".jobs .tabulator-row").nth(1 + turn)
    name = row.get_by_role("link").inner_text()
    row.locator(".tabulator-cell").nth(2).click()
    expect(page.get_by_label("Experiment", exact=True).locator("option:checked")).to_contain_text(name[:8])


def _click_result(page: Page, turn: int) -> None:
    """Until its curve alone is bright."""
    lines = "[...Bokeh.documents[0].all_models].filter(m => m.type === 'Line' && m.line_width.value === 2)"
    bright = f"{lines}.filter(m => m.line_alpha.value === 1).map(m => m.id).join(' ')"
    before = page.evaluate(bright)
    page.locator(".results .tabulator-row").nth(1 + turn).locator(".tabulator-cell").nth(1).click()
    page.wait_for_function(f"before => {{ const found = {bright}; return found !== before && !found.includes(' ') }}", arg=before)


def _click_tab(page: Page, turn: int) -> None:
    name, text = (("Config", "loop.learning_rate"), ("Lineage", "toy"))[turn % 2]
    page.get_by_text(name, exact=True).click()
    page.get_by_text(text).last.wait_for()


def _click_metric(page: Page, turn: int) -> None:
    if turn % 2:
        page.locator(".metrics .choices__button").first.click()
        return _wait_for_axis(page, "val_loss")
    page.locator(".metrics input").click()
    page.locator(".metrics").get_by_role("option", name="val_accuracy", exact=True).click()
    return _wait_for_axis(page, "val_accuracy")


def _wait_for_axis(page: Page, name: str) -> None:
    page.wait_for_function("name => [...Bokeh.documents[0].all_models].some(m => m.axis_label === name)", arg=name)


def _click_state(page: Page, turn: int) -> None:
    if turn % 2:
        page.locator(".states .choices__button").first.click()
    else:
        page.locator(".states").get_by_role("option", name="done", exact=True).click()
    _wait_for_count(page, turn % 2 == 0)


def _type_expression(page: Page, turn: int) -> None:
    field = page.get_by_label("Expression")
    field.fill("" if turn % 2 else f"model.stride > {turn}")
    field.press("Enter")
    _wait_for_count(page, turn % 2 == 0)


def _wait_for_count(page: Page, filtered: bool) -> None:
    """Until the page tells how many of the experiments it shows, and has painted what it was told."""
    told = r"\d of \d+ experiments" if filtered else r"· \d+ experiments"
    page.wait_for_function(f"[...Bokeh.documents[0].all_models].some(m => /{told}/.test(m.text)) && Bokeh.documents[0].is_idle")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def _draw(browser: Browser, address: str, output: Path) -> None:
    """The page of all runs and of some, side by side, in each width."""
    pictures = []
    for width in WIDTHS:
        for words in ("", "&where=model.stride%20%3C%203&states=%5B%22done%22%2C%22failed%22%5D"):
            page = _opened(browser, address + words, width, TALL)
            page.wait_for_timeout(PAUSE)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            pictures.append(picture.resize((round(SCALE * width), round(SCALE * TALL)), Image.Resampling.LANCZOS))
            page.close()
    sheet = Image.new("RGB", (sum(picture.width + GAP for picture in pictures) + GAP, pictures[0].height + 2 * GAP), "#8a93a3")
    x = GAP
    for picture in pictures:
        sheet.paste(picture, (x, GAP))
        x += picture.width + GAP
    sheet.save(output, quality=72, method=6)
    print(f"{output}  {output.stat().st_size / 1000:.0f} kB")


def _megabytes(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


if __name__ == "__main__":
    sys.exit(main())
