"""The page of a conversation in a real browser: two sides, what a person prefers, and text that is shown and never
obeyed."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from src.experiments.identity import exp_id
from tests import toy
from tests.conftest import ROOT
from tests.systems.assistants.serving.test_page import TALKER
from tests.systems.assistants.train_assistants import write_data

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, expect

from tests.browsing import open_page
from tests.servers import running_server

pytestmark = [pytest.mark.browser, pytest.mark.slow]
HOSTILE = '2 < 3? <img src=x onerror="window.hacked=1"> *&lt;*'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_data(folder / "data")
    assert toy.main(["-e", "sft"], {"sft": [TALKER]}, folder) == 0
    return folder


def command(folder: Path, runs: int) -> list[str]:
    places = ["--data_path", str(folder / "data"), "-sb", str(folder / "runs"), "--device", "cpu", "--port", "0"]
    return [
        "src.systems.assistants.serving.page",
        *[exp_id(TALKER)[:8]] * runs,
        *places,
        "--temperature",
        "2",
        "--max_new_tokens",
        "8",
    ]


def say(page: Page, text: str, enter: bool = False) -> None:
    """Send it once the page takes it: until an answer is whole, nothing is sent. enter: by that key, of which nobody
    sees whether it is."""
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.locator("textarea").fill(text)
    if enter:
        page.locator("textarea").press("Enter")
    else:
        page.get_by_role("button", name="Send").click()


def test_preferences_of_a_browser_are_in_the_file(browser: Browser, folder: Path):
    better, output = "role=button[name='Better']", folder / "data" / "preferences.jsonl"
    with running_server(command(folder, 2)) as address:
        with open_page(browser, address) as page:
            say(page, HOSTILE)
            expect(page.locator(better)).to_have_count(2)
            expect(page.get_by_text(HOSTILE, exact=True)).to_be_visible()
            expect(page.get_by_text(f"2: {exp_id(TALKER)[:8]} step-00000004")).to_be_visible()
            page.locator(better).nth(1).click()
            expect(page.get_by_text(f"2 is better: saved to {output}.")).to_be_visible()
            expect(page.locator(better)).to_have_count(0)
            say(page, "x" * 90)
            expect(
                page.get_by_text(
                    "exceed the 96 positions of the model. Write less, or lower --max_new_tokens. /reset restarts it."
                )
            ).to_be_visible()
            say(page, "!reset")
            expect(page.get_by_text(HOSTILE, exact=True)).to_have_count(0)
            say(page, "2?")
            expect(page.locator(better)).to_have_count(2)
            page.get_by_role("button", name="Clear").click()
            expect(page.locator(better)).to_have_count(0)
            say(page, "3?")
            page.locator(better).nth(0).click()
            expect(page.get_by_text("1 is better")).to_be_visible()
            assert page.evaluate("window.hacked") is None
        with open_page(browser, address) as page:
            say(page, "another's", enter=True)
            page.locator(better).nth(0).click()
            expect(page.get_by_text("1 is better")).to_be_visible()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["messages"] for row in rows] == [
        [{"role": "user", "content": text}] for text in (HOSTILE, "3?", "another's")
    ]
    assert [[reply["rank"] for reply in row["replies"]] for row in rows] == [[1, 0], [0, 1], [0, 1]]


def test_one_run_is_talked_with_and_its_port_is_not_another_ones(browser: Browser, folder: Path):
    with running_server(command(folder, 1)) as address, open_page(browser, address) as page:
        for number, text in enumerate(("2?", "3?"), 1):
            say(page, text)
            expect(page.get_by_text(text, exact=True)).to_be_visible()
            expect(page.get_by_text(f"1: {exp_id(TALKER)[:8]}")).to_have_count(number)
        expect(page.get_by_role("button", name="Better")).to_have_count(0)
        port = str(urlsplit(address).port)
        second = [sys.executable, "-m", *command(folder, 1), "--port", port]
        done = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    refusal = (
        f"error: --port {port}: cannot listen on 127.0.0.1: Address already in use. Choose another port, or 0 "
        f"for a free one."
    )
    assert done.stderr.splitlines()[-1:] == [refusal]
