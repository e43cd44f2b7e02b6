"""The pages of `rein ui` in a headless Chromium: nothing from outside, no complaint, hostile text is text."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs_made import HOSTILE, make_run, metrics_line, write_tokens, write_trajectories

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FILE = "score/trajectories.parquet"
LONG = 120  # seconds, on a machine with other work
TOKENS = "train/tokens/000000.parquet"
PAGES = [
    "/",
    "/run?name=first",
    "/compare?run=first&run=second",
    f"/rows?name=first&file={FILE}",
    f"/row?name=first&file={FILE}&row=0",
    f"/row?name=first&file={TOKENS}&row=0",
]
Go = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    first = make_run(folder / "first", updates=60, settings={"notes": HOSTILE + "x" * 300})
    make_run(folder / "second", updates=30, done=["train"])
    make_run(folder / ("long" * 40))
    write_trajectories(first / FILE, texts={0: HOSTILE, 1: "y" * 3000})
    write_tokens(first / TOKENS, piece=HOSTILE)
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "rein", "ui", str(runs), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://[\d.:]+", process.stdout.readline())
        assert found
        yield found[0]
        process.terminate()


def becomes(opened: Any, expression: str, wanted: object) -> None:
    """Wait for it; wait_for_function would evaluate text in the page, which its policy forbids."""
    until = time.monotonic() + LONG
    while (found := opened.page.evaluate(expression)) != wanted and time.monotonic() < until:
        opened.page.wait_for_timeout(100)
    assert found == wanted


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_pages_ask_nothing_of_others_complain_of_nothing_and_fit(
    address: str, tab: Go, page: str, scheme: str, width: int
) -> None:
    opened = tab(address + page, width=width, scheme=scheme, allow=(address,))
    if opened.page.locator(".plot").count():
        opened.page.locator(".plot").first.scroll_into_view_if_needed()
        becomes(opened, "!!document.querySelector('.plot').data", True)
    assert opened.complaints() == []
    assert opened.overflow == 0
    assert opened.page.locator("img").count() == 0


def test_curves_are_drawn_and_follow_a_running_run(address: str, tab: Go, runs: Path) -> None:
    make_run(runs / "live", done=[], updates=3)
    opened = tab(f"{address}/run?name=live", allow=(address,))
    points = "document.querySelector('.plot').data?.[0].x.length"
    becomes(opened, points, 3)
    with (runs / "live" / "train" / "metrics.jsonl").open("a") as file:
        file.write(metrics_line(4))
    opened.page.evaluate("refresh()")
    becomes(opened, points, 4)
    assert opened.page.locator("dd").first.inner_text() == "4"
    assert opened.complaints() == []


def test_runs_are_marked_and_compared_with_the_keyboard(address: str, tab: Go) -> None:
    opened = tab(address, allow=(address,))
    for name in ("first", "second"):
        opened.page.get_by_label(f"Mark {name}").focus()
        opened.page.keyboard.press("Space")
    opened.page.evaluate("mark = null; refresh()")
    opened.page.wait_for_timeout(300)
    assert opened.page.locator("input:checked").count() == 2  # what was marked stays when the list is renewed
    opened.page.get_by_role("button", name="Compare").press("Enter")
    opened.page.wait_for_url("**/compare**")
    assert opened.page.get_by_role("heading", level=1).inner_text() == "2 runs side by side"
    assert opened.complaints() == []


def test_a_filter_is_a_form(address: str, tab: Go) -> None:
    opened = tab(f"{address}/rows?name=first&file={FILE}", allow=(address,))
    opened.page.get_by_label("score at least").fill("5.5")
    opened.page.get_by_label("score at least").press("Enter")
    opened.page.wait_for_url("**score_min=5.5**")
    assert opened.page.locator("li.row").count() == 5
    assert opened.complaints() == []


def test_tokens_have_colors_and_exact_numbers_on_focus(address: str, tab: Go) -> None:
    opened = tab(f"{address}/row?name=first&file={TOKENS}&row=0", allow=(address,))
    background = "e => getComputedStyle(e).backgroundColor"
    tokens = opened.page.locator("#tokens .t")
    plain, strong = tokens.nth(0).evaluate(background), tokens.nth(1).evaluate(background)
    assert plain != strong
    opened.page.locator("#tokens").focus()
    opened.page.keyboard.press("ArrowRight")
    said = opened.page.locator("#token").inner_text()
    assert "log-ratio to the reference -1" in said
    assert "<script>alert(1)</script>" in said  # as text
    opened.page.get_by_role("link", name="KL", exact=True).click()
    opened.page.wait_for_url("**color=kl**")
    assert tokens.nth(1).evaluate(background) != plain
    assert opened.complaints() == []


def test_without_javascript_the_list_and_rows_are_whole(address: str, tab: Go) -> None:
    for page in ("/", f"/rows?name=first&file={FILE}&q=number+60", f"/row?name=first&file={TOKENS}&row=0"):
        opened = tab(address + page, allow=(address,), java_script_enabled=False)
        assert opened.page.get_by_role("heading", level=1).is_visible()
        assert opened.page.locator(".card").count() >= 1
