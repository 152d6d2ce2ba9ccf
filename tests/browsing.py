"""Pages in the browser of a test (fixture `browser`), which ask nothing of another machine."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from playwright import sync_api as playwright
from playwright.sync_api import Browser, Page, Route, expect

SLOW = 120_000
"""Milliseconds that a page may take where two cores are busy."""


@contextmanager
def open_page(browser: Browser, address: str) -> Iterator[Page]:
    """A page that shows `address`. At the end: no error was told on its console, and it asked nothing of another
    machine."""
    strange: list[str] = []

    def guard(route: Route) -> None:
        if re.match(r"(http://(127\.0\.0\.1|localhost):|data:|blob:|file:)", route.request.url):
            route.continue_()
        else:
            strange.append(route.request.url)
            route.abort()

    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    try:
        page.route("**/*", guard)
        page.on(
            "websocket", lambda socket: None if socket.url.startswith("ws://127.0.0.1:") else strange.append(socket.url)
        )
        page.on("console", lambda message: strange.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: strange.append(f"{error}\n{error.stack}"))
        page.set_default_timeout(SLOW)
        expect.set_options(timeout=SLOW)
        page.goto(address)
        yield page
        page.unroute_all(behavior="ignoreErrors")
    finally:
        with suppress(playwright.Error):
            page.close()
    assert not strange, "\n".join(strange)
