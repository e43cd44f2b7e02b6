"""What a person sees of a run: in a real pseudo-terminal, and where output is piped."""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rein.protocols import Tracker
from rein.tracking.console import Console
from rein.tracking.curves import WATCHED
from rein.tracking.fanout import open_trackers
from rein.tracking.frame import Bar
from rein.tracking.run import Run
from rein.types import Metrics

pytest.importorskip("pyte", reason="pyte reads the screen; run make setup")
from screen import Screen, in_terminal, opened

Opened = Callable[..., Screen]
Tracked = Callable[..., Tracker]
FIVE = ("val/score", "probe/kl_reference", "actor/entropy", "actor/pg_clipfrac", "critic/vf_explained_var")
COLOR = re.compile(rb"\x1b\[[0-9;]*m")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Makes standard output and standard error a terminal of that size."""
    files: list[io.TextIOBase] = []
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def make(columns: int = 80, rows: int = 24, encoding: str = "utf-8") -> Screen:
        screen, file = opened(columns, rows, encoding)
        files.append(file)  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        return screen

    yield make
    for file in files:
        with contextlib.suppress(OSError):  # hung up
            file.close()


@pytest.fixture
def tracker_of(tmp_path: Path) -> Iterator[Tracked]:
    """Opens the trackers of a run that has a console."""
    made: list[Tracker] = []

    def make(console: Console, from_number: int = 0) -> Tracker:
        made.append(open_trackers(["console"], Run(tmp_path, from_number), console=console.watch))
        return made[-1]

    yield make
    for tracker in made:
        tracker.close()


def told(number: int) -> Metrics:
    return {name: (place + 1) * number / 100 for place, name in enumerate(FIVE)} | {"actor/grad_norm": 1.0}


def spark(screen: Screen, name: str) -> str:
    """The curve of a metric as it was last drawn."""
    line = [line for line in screen.lines if line.startswith(name)][-1]
    found = re.search(r"[x▁-█]+( |$)", line)
    assert found, line
    return found[0].strip()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_five_numbers_the_bar_and_every_said_line_at_each_width(
    columns: int, terminal: Opened, tracker_of: Tracked
) -> None:
    screen, console = terminal(columns), Console()
    tracker = tracker_of(console)
    said = [f"guard: update {number}: said" for number in range(1, 101)]
    with console.progress(200, "train") as advance:
        for number in range(1, 101):
            tracker.log(told(number), number)
            advance(1, "kl 0.1")
            console.say(said[number - 1])
        console.pin("softened: lr x0.5")
    console.say("after")
    text = screen.until(lambda text: "after" in text)
    lines = text.splitlines()
    assert [line for line in lines if "said" in line] == said
    assert all(len(line) < columns for line in lines)
    first = len(lines) - 8
    assert re.match(r"train ━+─+ 100/200.*  eta \d+:\d\d$", lines[first]), text
    for place, name in enumerate(FIVE):
        line = lines[first + 1 + place]
        assert line.startswith(name if columns > 40 else name.partition("/")[2]), line
        assert float(line.split()[1]) == place + 1
        assert re.search("▁+.*█+", line)
    assert lines[first + 6 :] == ["softened: lr x0.5", "after"]
    assert screen.cursor == (len(lines), True)
    assert sys.stdout is sys.stderr  # given back


def test_nothing_that_anyone_writes_is_lost(terminal: Opened, tracker_of: Tracked) -> None:
    screen, console = terminal(), Console()
    tracker = tracker_of(console)
    with console.progress(10, "train") as advance:
        tracker.log(told(1), 1)
        advance()
        console.say("first")
        print("printed", "twice", sep="\n")
        print("warned", file=sys.stderr)
        sys.stderr.write("50 %\r100 %")  # a bar that rewrites its line
        for word in ("one", "two"):
            subprocess.run(["sh", "-c", f"echo foreign {word} >&2"], stderr=screen_end(), check=True)
            console.say(f"after {word}")
        console.say("last")
    lines = screen.until(lambda text: "100 %\n" in text + "\n").splitlines()
    wanted = ["first", "printed", "twice", "warned"]
    wanted += ["foreign one", "after one", "foreign two", "after two", "last"]
    assert [line for line in lines if line in wanted] == wanted


def screen_end() -> int:
    return getattr(sys.stdout, "rich_proxied_file", sys.stdout).fileno()  # type: ignore[no-any-return]


def test_text_of_a_model_is_shown_as_it_is(terminal: Opened) -> None:
    screen, console = terminal(), Console()
    with console.progress(2, "[red]rollout[/red]") as advance:
        advance(1, "[b]note[/b] \x1b[2J")
        console.say("[bold]a[/bold] :smile: \x1b[2J\x07é 你好")
    lines = screen.until(lambda text: "[b]note" in text).splitlines()
    assert lines[0].replace(" ", "") == r"[bold]a[/bold]:smile:\x1b[2J\x07é你好"
    assert lines[-1].startswith("[red]rollout[/red] ")
    assert r" 1/2  [b]note[/b] \x1b[2J " in lines[-1]


def test_after_a_rollback_the_curve_shows_what_was_undone(terminal: Opened, tracker_of: Tracked) -> None:
    screen, console = terminal(), Console()
    tracker = tracker_of(console)
    with console.progress(20, "train") as advance:
        for number in range(1, 13):
            tracker.log({"probe/kl_reference": 1.0 if number < 9 else 50.0}, number)
            advance()
        screen.until(lambda text: "50" in text)
        tracker.log({"guard/rolled_back_to": 8.0}, 12)
        advance(-4)
        tracker.log({"probe/kl_reference": 2.0}, 13)
        advance()
    text = screen.until(lambda text: "9/20" in text and "rolled" in text)
    assert spark(screen, "probe/kl_reference") == "▁" * 8 + "xxxx" + "█"
    assert text.splitlines()[-1] == "rolled back once, last to update 8"


def test_a_resumed_run_has_its_history_with_its_rollback(terminal: Opened, tracker_of: Tracked) -> None:
    first = tracker_of(Console(quiet=True))
    for number in range(1, 11):
        first.log({"probe/kl_reference": float(number)}, number)
        if number == 6:
            first.log({"guard/rolled_back_to": 4.0}, number)
    first.close()
    screen, console = terminal(), Console()
    tracker = tracker_of(console, from_number=8)  # 9 and 10 were after the snapshot
    with console.progress(20, "train", 8) as advance:
        tracker.log({"probe/kl_reference": 11.0}, 9)
        advance()
    text = screen.until(lambda text: "9/20" in text)
    assert spark(screen, "probe/kl_reference") == "▁▁▂▃xx▅▆█"  # 1 2 3 4, undone, 7 8, 11
    assert "rolled back once, last to update 4" in text
    assert " 11  " in text


def test_an_error_in_drawing_warns_once_and_plain_lines_follow(
    terminal: Opened, tracker_of: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, console = terminal(120), Console()
    tracker = tracker_of(console)
    before = sys.stdout
    with console.progress(3, "train") as advance:
        tracker.log({"probe/kl_reference": 1.0}, 1)
        advance()
        screen.until(lambda text: "1/3" in text)
        monkeypatch.setattr("rein.tracking.console.lines", lambda *given: 1 / 0)
        advance(1)
        screen.until(lambda text: "plain lines" in text)
        assert sys.stdout is before
        advance(1, "loss 0.5")
        console.say("said")
    with console.progress(1, "evaluate") as advance:
        advance()
    text = screen.until(lambda text: "evaluate 1/1" in text)
    assert re.sub(r"\d+s", "0s", text).splitlines() == [
        "warning: the live view: ZeroDivisionError (division by zero); plain lines from here on",
        "train 3/3 0s eta 0s loss 0.5",
        "said",
        "evaluate 1/1 0s eta 0s",
    ]


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_without_utf_8_curves_are_ascii_and_the_rest_is_escaped(
    encoding: str, terminal: Opened, tracker_of: Tracked
) -> None:
    screen, console = terminal(encoding=encoding), Console()
    tracker = tracker_of(console)
    with console.progress(8, "train") as advance:
        for number in range(1, 9):
            tracker.log({"probe/kl_reference": float(number)}, number)
            advance()
        console.say("你好")
        print("你")
    text = screen.until(lambda text: "8/8" in text)
    assert text.splitlines()[:2] == [r"\u4f60\u597d", r"\u4f60"]
    assert re.search(r"^probe/kl_reference +8  \.:-=\+\*#@$", text, re.MULTILINE)
    assert re.search(r"^train #+ 8/8", text, re.MULTILINE)


def test_no_color_is_obeyed(terminal: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    for no_color in (False, True):
        screen = terminal()
        if no_color:
            monkeypatch.setenv("NO_COLOR", "1")
        with Console().progress(1, "train") as advance:
            advance()
        screen.until(lambda text: "1/1" in text)
        assert bool(COLOR.search(screen.raw)) is not no_color


def test_a_window_that_changes_its_size_is_drawn_anew(terminal: Opened, tracker_of: Tracked) -> None:
    screen, console = terminal(120, 2), Console()
    tracker = tracker_of(console)
    sizes = [(120, 2), (40, 5), (90, 10), (20, 15), (120, 15), (60, 24)]  # pyte loses lines where rows go
    with console.progress(9, "train") as advance:
        for number, (columns, rows) in enumerate(sizes, 1):
            screen.resize(columns, rows)
            tracker.log(told(number), number)
            advance()
            console.say(f"at {columns}")
            screen.until(lambda text, number=number: f"{number}/9" in text)  # type: ignore[misc]
            time.sleep(0.3)
            wide = [line for line in screen.lines[screen.cursor[0] :] if len(line) >= columns]
            assert not wide
    lines = screen.until(lambda text: "6/9" in text).splitlines()
    assert [line for line in lines if line.startswith("at ")] == [f"at {columns}" for columns, _ in sizes]
    assert sum(line.startswith("train ") for line in lines) == 1, screen.text


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_terminal_is_whole_after_an_error(
    error: type[BaseException], terminal: Opened, tracker_of: Tracked
) -> None:
    screen, console = terminal(), Console()
    tracker, before = tracker_of(console), sys.stdout

    def work() -> None:
        with console.progress(9, "train"):
            tracker.log(told(1), 1)
            raise error

    with pytest.raises(error):
        work()
    assert sys.stdout is before
    console.say("after")
    screen.until(lambda text: text.endswith("after"))
    assert screen.cursor == (len(screen.lines), True)
    assert screen.raw.count(b"\x1b[?7l") == screen.raw.count(b"\x1b[?7h") == screen.raw.count(b"\x1b[?") // 2


def test_a_terminal_that_goes_away_ends_no_run(terminal: Opened, tracker_of: Tracked) -> None:
    screen, console = terminal(), Console()
    tracker = tracker_of(console)
    with console.progress(9, "train") as advance:
        tracker.log(told(1), 1)
        advance()
        screen.until(lambda text: "1/9" in text)
        hang_up(screen)
        for number in range(2, 9):
            tracker.log(told(number), number)
            advance()
            console.say("said to nobody")
    console.say("said to nobody")
    assert console.quiet


def hang_up(screen: Screen) -> None:
    """Close the terminal's own end: the reader is given something to read first, to let go of it."""
    spare, other = os.pipe()
    os.dup2(spare, screen.fd)
    os.close(other)
    screen.join()
    os.close(screen.fd)
    os.close(spare)


@pytest.mark.parametrize(("slow", "most"), [(0.0, 6), (0.03, 3)])  # the start, the end, those in between
def test_it_is_drawn_at_most_four_times_a_second_and_less_where_that_is_slow(
    slow: float, most: int, terminal: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[float] = []

    def slowly(*given: object) -> list[str]:
        drawn.append(time.monotonic())
        while time.monotonic() - drawn[-1] < slow:
            pass
        return ["line"]

    terminal()
    monkeypatch.setattr("rein.tracking.console.lines", slowly)
    with Console().progress(10**9, "train") as advance:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            advance()
            time.sleep(0.001)
    assert 2 <= len(drawn) <= most


PLAIN = [{"TERM": "dumb"}, {"CI": "true"}, {}]


@pytest.mark.parametrize("plain", PLAIN, ids=["dumb", "CI", "piped"])
def test_elsewhere_plain_lines_come_at_most_every_ten_seconds(
    plain: dict[str, str], terminal: Opened, tracker_of: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = terminal()
    for name, value in plain.items():
        monkeypatch.setenv(name, value)
    pipe = io.StringIO()
    if not plain:
        monkeypatch.setattr(sys, "stdout", pipe)
    console = Console()
    tracker = tracker_of(console)
    with console.progress(1000, "train") as advance:
        for number in range(1, 1001):
            tracker.log(told(number), number)
            advance(1, "kl 0.1")
        console.say("[said]")
    wanted = r"train 1000/1000 \d+s eta 0s kl 0\.1\n\[said\]\n?"
    text = screen.until(lambda text: "said" in text) if plain else pipe.getvalue()
    assert re.fullmatch(wanted, text)
    assert b"\x1b" not in screen.raw


def test_quiet_says_nothing_in_a_terminal_or_out_of_it(
    terminal: Opened, tracker_of: Tracked, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        console = Console(quiet=True)
        tracker = tracker_of(console)
        with console.progress(1, "train") as advance:
            tracker.log(told(1), 1)
            advance()
            console.say("said")

    work()
    assert capsys.readouterr() == ("", "")
    screen = terminal()
    work()
    sys.stdout.close()
    screen.join()
    assert screen.raw == b""


def test_in_the_background_of_a_shell_lines_are_said_and_nothing_is_drawn(tmp_path: Path) -> None:
    work = (
        "from rein.tracking.console import Console\n"
        "console = Console()\n"
        "with console.progress(2, 'train') as advance:\n"
        "    advance()\n"
        "    console.say('said')\n"
    )
    file = tmp_path / "work.py"
    file.write_text(work)
    shell = (
        "import subprocess, sys\n"
        "for group in (0, None):\n"  # a group of its own: in the background
        f"    subprocess.run([sys.executable, {str(file)!r}], process_group=group, check=True)\n"
        "    print('done', flush=True)\n"
    )
    screen, process = in_terminal([sys.executable, "-c", shell])
    assert process.wait(60) == 0
    screen.join()
    lines = screen.text.splitlines()
    assert lines[:2] == ["said", "done"]
    assert [line.split()[0] for line in lines[2:] if line] == ["said", "train", "done"]


def test_the_pace_is_of_the_time_whether_steps_come_singly_or_many_at_once() -> None:
    bar = Bar(1000, "rollout", done=500)
    for _ in range(4):
        time.sleep(0.05)
        for _ in range(25):  # a batch that tells of each of its prompts
            bar.advance(1, "", None)
    taken = bar.elapsed
    assert bar.pace == pytest.approx(taken / 100, rel=0.3)
    assert bar.left == pytest.approx(4 * taken, rel=0.3)
    bar.advance(-100, "", None)
    assert bar.left == pytest.approx(5 * taken, rel=0.3)


def test_every_metric_that_is_watched_is_one_that_the_package_logs() -> None:
    package = Path(__file__).parents[2] / "rein"
    files = [file for file in package.rglob("*.py") if file.name != "curves.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    for names in WATCHED:
        for name in names:
            assert f'"{name}"' in text, name
