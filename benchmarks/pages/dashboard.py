"""The dashboard of many runs in a browser: `python -m benchmarks.pages.dashboard [--experiments 500] [--minutes 10]`.

Prints the time of the first paint and of each kind of click, the server's processor time for a refresh while ten runs
write scores, and then, with three open tabs, the memory of the server and the browser.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
from playwright.sync_api import Browser, Page, expect, sync_playwright

from src.experiments.identity import exp_id
from src.runs.environment import describe
from src.runs.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
WIDTH, HEIGHT = 1280, 1000
MILLISECONDS = 120_000
TURNS = 6
PAUSE = 2000
"""Milliseconds between two clicks, for the reader to look at the result of the first."""
RATES, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 10
RUNNING, REFRESHES, REFRESH_SECONDS = 10, 6, 2
Result = TypeVar("Result")


def main() -> int:
    """Measure, print a line for each figure. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages.dashboard", description=__doc__)
    parser.add_argument("--experiments", type=int, default=500)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10, help="how long the tabs stay open")
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
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                _measure(browser, address, running, server.pid, options.minutes)
                browser.close()
        finally:
            server.terminate()
            server.communicate()
            for run in running:
                run.close()
    finally:
        shutil.rmtree(folder)
    return 0


def generate(runs: Path, count: int, steps: int) -> list[RunDir]:
    """A grid of rates and strides with ten seeds each, some failed or stopped, and ten that run, which are returned."""
    rng, facts = random.Random(0), {**describe(["trainval.py", "-e", "grid"]), "groups": ["grid"]}
    templates: dict[str, Path] = {}
    for number in range(count - RUNNING):
        configuration, seed = divmod(number, SEEDS)
        stride, rate = divmod(configuration, len(RATES))
        last, state, reason = steps, "done", ""
        if number % 23 == 5:
            last, state, reason = (
                steps // 3,
                "failed",
                "CUDA out of memory. Tried to allocate 2.50 GiB. Use a smaller micro_batch.",
            )
        elif number % 37 == 9:
            last, state, reason = steps // 2, "stopped", "SIGTERM: start it again to continue"
        exp = _experiment(stride, rate, seed, steps)
        if state not in templates:
            run = RunDir.open(runs, exp, exp, facts=facts)
            for row in _scores(range(1, last + 1), stride, rate, rng):
                run.scores.append(row)
            run.set_status(state, step=last, **({"reason": reason} if reason else {}))  # pyright: ignore[reportArgumentType]
            run.close()
            templates[state] = run.path
            continue
        folder = shutil.copytree(templates[state], runs / exp_id(exp))
        (folder / "exp_dict.json").write_text(json.dumps(exp, indent=4, sort_keys=True))
        status = json.loads((folder / "status.json").read_text())
        status.pop("scores", None)
        (folder / "status.json").write_text(json.dumps(status, indent=4))
        (folder / "scores.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in _scores(range(1, last + 1), stride, rate, rng))
        )
    running = []
    for seed in range(RUNNING):
        exp = _experiment(1000, 0, seed, steps)
        running.append(RunDir.open(runs, exp, exp, facts=facts))
        for row in _scores(range(1, steps // 2), 10, 0, rng):
            running[-1].scores.append(row)
    return running


def _experiment(stride: int, rate: int, seed: int, steps: int) -> dict[str, Any]:
    return {
        "recipe": "toy",
        "seed": seed,
        "model": {"name": "m", "stride": stride},
        "loop": {"steps": steps, "learning_rate": RATES[rate]},
    }


def _scores(steps: range, stride: int, rate: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    loss, noise = 2 + rate / 5, rng.random() / 20
    for step in steps:
        loss += (0.3 + stride / 5000 - loss) * 0.03 + rng.gauss(0, 0.01)
        yield {"step": step, "train_loss": loss, "val_loss": loss + noise, "val_accuracy": 1 / (1 + loss)}


def _measure(browser: Browser, address: str, running: list[RunDir], server: int, minutes: float) -> None:
    page, seconds = _time_call(lambda: _open_page(browser, address))
    print(f"first paint      {seconds:6.2f} s  (the table of jobs, of results and the curves)")
    page.locator("select").filter(has_text="every 2 s").select_option(label=f"every {REFRESH_SECONDS} s")
    before = _processor_seconds(server)
    for step in range(10**5, 10**5 + REFRESHES):
        _write_scores(running, step)
        page.wait_for_timeout(1000 * REFRESH_SECONDS)
    print(
        f"a refresh        {(_processor_seconds(server) - before) / REFRESHES:6.2f} s of the server's processor "
        f"time, {RUNNING} running"
    )
    clicks: dict[str, Callable[[int], None]] = {
        "a job": lambda turn: _click_job(page, turn),
        "a row of results": lambda turn: _click_result(page, turn),
        "a tab": lambda turn: _click_tab(page, turn),
        "another metric": lambda turn: _click_metric(page, turn),
        "a state": lambda turn: _click_state(page, turn),
        "an expression": lambda turn: _type_expression(page, turn),
    }
    page.locator(".live-switch").click()  # so that no refresh delays the answer to a click
    for name, click in clicks.items():
        seconds = []
        for turn in range(TURNS):
            page.wait_for_timeout(PAUSE)
            if name == "a state" and turn % 2 == 0:
                page.locator(".states input").click()  # opens the list of them
            seconds.append(_time_call(partial(click, turn))[1])
        seconds.sort()
        print(f"{name:16} {seconds[TURNS // 2]:6.2f} s median of {TURNS}, most {seconds[-1]:.2f} s", flush=True)
    page.close()
    pages = [_open_page(browser, address) for _ in range(3)]
    for tab in pages:
        tab.locator("select").filter(has_text="every 2 s").select_option(label="every 2 s")
    until, step, rows = time.monotonic() + 60 * minutes, 10**6, []
    while time.monotonic() < until:
        step += 1
        _write_scores(running, step)
        pages[0].wait_for_timeout(5000)
        heaps = [tab.evaluate("performance.memory.usedJSHeapSize") / 1e6 for tab in pages]
        rows.append((_megabytes(server), sum(heaps)))
    third = max(1, len(rows) // 3)
    for name, values in zip(("server", "tabs"), zip(*rows, strict=True), strict=True):
        begin, end = (sum(part) / len(part) for part in (values[third : 2 * third] or values, values[-third:]))
        print(
            f"memory of {name:7}{begin:6.0f} MB in the second third, {end:6.0f} MB in the last, most "
            f"{max(values):6.0f} MB"
        )


def _write_scores(running: list[RunDir], step: int) -> None:
    for run in running:
        run.scores.append({"step": step, "train_loss": 0.3, "val_loss": 0.3, "val_accuracy": 0.7})


def _processor_seconds(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:2])


def _open_page(browser: Browser, address: str, width: int = WIDTH, height: int = HEIGHT) -> Page:
    page = browser.new_context(viewport={"width": width, "height": height}).new_page()
    page.set_default_timeout(MILLISECONDS)
    page.goto(address)
    page.locator(".jobs .tabulator-row").first.wait_for()
    page.locator(".results .tabulator-row").first.wait_for()
    page.locator(".legend").first.wait_for()
    page.wait_for_function("Bokeh.documents[0].is_idle")
    return page


def _time_call(work: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def _click_job(page: Page, turn: int) -> None:
    row = page.locator(".jobs .tabulator-row").nth(1 + turn)
    name = row.get_by_role("link").inner_text()
    row.locator(".tabulator-cell").nth(2).click()
    expect(page.get_by_label("Experiment", exact=True).locator("option:checked")).to_contain_text(name[:8])


def _click_result(page: Page, turn: int) -> None:
    """Wait until only its curve is bright."""
    lines = "[...Bokeh.documents[0].all_models].filter(m => m.type === 'Line' && m.line_width.value === 2)"
    bright = f"{lines}.filter(m => m.line_alpha.value === 1).map(m => m.id).join(' ')"
    before = page.evaluate(bright)
    page.locator(".results .tabulator-row").nth(1 + turn).locator(".tabulator-cell").nth(1).click()
    page.wait_for_function(
        f"before => {{ const found = {bright}; return found !== before && !found.includes(' ') }}", arg=before
    )


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


def _wait_for_count(page: Page, has_filter: bool) -> None:
    """Wait until the page shows the count of its experiments and has finished painting."""
    text = r"\d of \d+ experiments" if has_filter else r"· \d+ experiments"
    page.wait_for_function(
        f"[...Bokeh.documents[0].all_models].some(m => /{text}/.test(m.text)) && Bokeh.documents[0].is_idle"
    )
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def _megabytes(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


if __name__ == "__main__":
    sys.exit(main())
