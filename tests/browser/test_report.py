"""The report in a headless Chromium, opened from disk with the network refused."""

from collections.abc import Callable
from typing import Any

import pytest
from page_made import whole_page

from rein.report.html import render

pytestmark = pytest.mark.slow

LOOKS = [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")]
DRAW_ALL = "document.querySelectorAll('.plot').forEach(place => draw(place))"
COLORS = "[...document.querySelectorAll('.tokens span')].map(span => getComputedStyle(span).backgroundColor)"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render(whole_page()), encoding="utf-8", errors="replace")
    return f"file://{file}"


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_it_opens_alone_fits_and_draws_every_plot(
    width: int, scheme: str, address: str, tab: Callable[..., Any]
) -> None:
    found = tab(address, width=width, scheme=scheme)
    page = found.page
    page.evaluate(DRAW_ALL)
    plots = page.locator(".plot").count()
    assert plots >= 6
    assert page.locator(".plot .main-svg .scatterlayer .trace").count() >= plots
    assert page.locator("#train .plot .shapelayer path").count() >= 4  # alert, rollback, veil, round
    assert found.overflow == 0
    assert found.complaints() == []
    assert page.title() != "owned"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 21, 23)"
    assert dark is (scheme == "dark")


def test_plots_far_down_are_drawn_when_they_come_near(address: str, tab: Callable[..., Any]) -> None:
    page = tab(address).page
    last = page.locator(".plot").last
    assert last.get_attribute("data-drawn") is None
    last.scroll_into_view_if_needed()
    last.locator(".main-svg").first.wait_for()
    assert last.get_attribute("data-drawn") == ""


def test_colors_and_batches_switch_by_keyboard(address: str, tab: Callable[..., Any]) -> None:
    found = tab(address)
    page, seen = found.page, []
    page.locator('[name="kind"]').first.focus()
    for _ in range(4):
        seen.append((page.locator("#token-sentence").inner_text(), tuple(page.evaluate(COLORS))))
        page.keyboard.press("ArrowRight")
    assert len({sentence.partition(":")[0] for sentence, _ in seen}) == 4
    assert len({colors for _, colors in seen}) == 4
    assert page.locator(".trajectory").count() == 4
    page.locator("#token-batch").focus()
    page.keyboard.press("ArrowUp")
    assert page.locator("#token-batch").input_value() == "0"
    assert found.complaints() == []


def test_a_focused_answer_tells_each_token_s_numbers(address: str, tab: Callable[..., Any]) -> None:
    page = tab(address).page
    answer, detail = page.locator(".tokens").first, page.locator(".detail").first
    answer.focus()
    assert "token 1 of 60; not trained on" in detail.inner_text()
    page.keyboard.press("ArrowRight")
    assert "token 2 of 60" in detail.inner_text()
    assert "Advantage" in detail.inner_text()
    page.keyboard.press("End")
    assert "token 60 of 60" in detail.inner_text()
    title = answer.locator("span").nth(1).get_attribute("title")
    assert "Log-ratio" in title
    assert "log behavior" not in title  # is not known


def test_hostile_output_is_text(address: str, tab: Callable[..., Any]) -> None:
    page = tab(address).page
    assert page.locator("script").count() == 4
    assert page.locator("img[src=x]").count() == 0
    first = page.locator(".tokens span").first.inner_text()
    assert first == "</script><script>document.title='owned'</script>"
    assert page.locator(".tokens span").nth(1).inner_text() == "⟨202E⟩abc"
    assert "<img src=x" in page.locator(".sample pre").first.inner_text()


def test_everything_is_reached_by_the_tab_key(address: str, tab: Callable[..., Any]) -> None:
    page = tab(address).page
    wanted = page.evaluate(
        "document.querySelectorAll('a, input:checked, select, [tabindex=\"0\"], summary').length"
    )
    reached = set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert len(reached) >= wanted


def test_it_prints_on_paper_in_light_colors_with_every_plot(address: str, tab: Callable[..., Any]) -> None:
    found = tab(address, scheme="dark")
    found.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert found.page.locator(".plot:not([data-drawn])").count() == 0
    paper = "getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()"
    assert found.page.evaluate(paper) == "#fafaf8"
    found.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert found.page.evaluate(paper) == "#141517"
    assert found.page.pdf()[:4] == b"%PDF"
    assert found.complaints() == []


def test_motion_is_left_out_where_it_is_not_wanted(address: str, tab: Callable[..., Any]) -> None:
    behavior = "getComputedStyle(document.documentElement).scrollBehavior"
    assert tab(address).page.evaluate(behavior) == "smooth"
    assert tab(address, reduced_motion="reduce").page.evaluate(behavior) == "auto"
