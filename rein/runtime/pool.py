"""The pool of one process: pieces of work in order, here."""

from collections.abc import Callable, Generator, Sequence

from rein.protocols import Found, Piece, Tell


class OneProcess:
    """Implements protocols.Pool: what is needed is opened when the first piece is there."""

    def map(
        self, make: Callable[[], Callable[[Piece, Tell], Found]], pieces: Sequence[Piece], tell: Tell
    ) -> Generator[tuple[int, Found]]:
        if pieces:
            work = make()
            for index, piece in enumerate(pieces):
                yield index, work(piece, tell)
