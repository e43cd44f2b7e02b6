"""A headless Chromium for tests of pages, without network: `tab(address)` opens one and watches it.

`make browser` makes the environment that has playwright; the browser is the machine's own chromium, the one
that REIN_CHROMIUM names, or playwright's. Where one of them is missing the tests are skipped and say so.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
HEIGHT = 900
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Tab:
    """An open page, and what it did: what it asked the network for, what it complained of."""

    page: Any  # playwright's Page
    asked: list[str] = field(default_factory=list)  # addresses outside the allowed ones; each was refused
    errors: list[str] = field(default_factory=list)  # of the console, and of scripts

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate(WIDER))

    def complaints(self) -> list[str]:
        """All that should not have happened."""
        return [*(f"asked for {address}" for address in self.asked), *self.errors]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, started once."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed; run make browser")
    from playwright.sync_api import Error, sync_playwright

    program = os.environ.get("REIN_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as play:
        try:
            found = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(
                "no chromium starts; install Debian's chromium, or run "
                f".bench/browser/bin/playwright install chromium ({str(error).splitlines()[0]})"
            )
        yield found
        found.close()


@pytest.fixture
def tab(chromium: Any) -> Iterator[Callable[..., Tab]]:
    """Open an address in a window of its own: its width, light or dark, what it may ask for by its beginning.

    `more` goes to playwright's new_context (reduced_motion="reduce", viewport=...).
    """
    opened: list[Any] = []

    def go(
        address: str, *, width: int = 1280, scheme: str = "light", allow: tuple[str, ...] = (), **more: Any
    ) -> Tab:
        size = {"width": width, "height": HEIGHT}
        context = chromium.new_context(**{"viewport": size, "color_scheme": scheme} | more)
        opened.append(context)
        tab = Tab(context.new_page())
        beginnings = (address, "data:", "blob:", *allow)

        def pass_or_refuse(route: Any) -> None:
            if route.request.url.startswith(beginnings):
                route.continue_()
            else:
                tab.asked.append(route.request.url)
                route.abort()

        context.route("**/*", pass_or_refuse)
        tab.page.on("console", lambda said: said.type == "error" and tab.errors.append(said.text))
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.goto(address)
        return tab

    yield go
    for context in opened:
        context.close()
