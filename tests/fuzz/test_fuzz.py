"""A short run of `make fuzz` with each test run."""

import signal
from pathlib import Path

import pytest
from fuzz_run import ENTRIES, Fuzzer, TooSlow, _stop

from rein.data import loader

FILES = 200


def test_every_loader_is_an_entry_of_the_fuzzer() -> None:
    """A new way in is fuzzed by being listed."""
    calls = " ".join(str(entry.call.__code__.co_names) + entry.call.__name__ for entry in ENTRIES.values())  # type: ignore[attr-defined]
    for name in loader.__all__:
        assert not name.startswith("load_") or name in calls, name


@pytest.mark.filterwarnings("ignore")
def test_200_harmed_files_are_loaded_row_by_row_or_refused_in_a_line(tmp_path: Path) -> None:
    former = signal.signal(signal.SIGALRM, _stop)
    try:
        fuzzer, found, ended = Fuzzer(7, tmp_path), list[str](), set[str]()
        for number in range(FILES):
            said, ends = fuzzer.findings(number)
            found, ended = found + said, ended | ends.keys()
    finally:
        signal.signal(signal.SIGALRM, former)
    assert not found, "\n".join(found)
    assert ended >= {"loaded", "loaded, some rejected", "DataError", "TooManyBad"}


def test_a_hang_is_a_finding(tmp_path: Path) -> None:
    """The alarm is no Exception, so that nothing takes it for an error of its own."""
    assert not issubclass(TooSlow, Exception)
