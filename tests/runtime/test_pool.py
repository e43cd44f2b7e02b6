"""The pool of one process: opened once, in order, and not at all for nothing."""

from collections.abc import Callable

from rein.protocols import Tell
from rein.runtime.pool import OneProcess


def test_what_is_needed_is_opened_once() -> None:
    opened, steps = list[int](), list[int]()

    def make() -> Callable[[str, Tell], str]:
        opened.append(1)

        def work(piece: str, tell: Tell) -> str:
            tell(len(piece))
            return piece.upper()

        return work

    assert list(OneProcess().map(make, ["ab", "c"], steps.append)) == [(0, "AB"), (1, "C")]
    assert (opened, steps) == ([1], [2, 1])
    assert list(OneProcess().map(make, [], steps.append)) == []
    assert opened == [1]
