"""An engine on every rank: each answers its share of the prompts, and all know all answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rein.protocols import RolloutEngine
from rein.types import Completion, Prompt


class Gathering(Protocol):
    """The ranks, as far as answers are exchanged."""

    rank: int
    world_size: int

    def gathered(self, value: Any) -> list[Any]: ...


class RankEngine:
    """Implements protocols.RolloutEngine over ranks that have the same prompts.

    Engines are told of each prompt's place among all, so that what is drawn is what one process draws.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        ranks: Gathering,
        within: Callable[[], AbstractContextManager[None]],  # entered while answers are made
    ) -> None:
        self.engine, self.ranks, self.within = engine, ranks, within

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        advance: Callable[[int], None] | None = None,
        places: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].prompt_ids), i))
        shares = [order[rank :: self.ranks.world_size] for rank in range(self.ranks.world_size)]
        mine = [prompts[i] for i in shares[self.ranks.rank]]
        with self.within():
            own = self.engine.generate(
                mine,
                n=n,
                temperature=temperature,
                top_p=top_p,
                max_new_tokens=max_new_tokens,
                seed=seed,
                places=[i if places is None else places[i] for i in shares[self.ranks.rank]],
            )
        found: list[list[Completion]] = [[] for _ in prompts]
        for share, answers in zip(shares, self.ranks.gathered(own), strict=True):
            for i, some in zip(share, answers, strict=True):
                found[i] = some
        if advance is not None:
            advance(len(prompts))
        return found
