"""Learning rates step by step."""

import pytest

from rein.functional.schedules import lr_multiplier


def rates(total: int, kind: str, warmup: int = 0, min_ratio: float = 0.0) -> list[float]:
    return [
        lr_multiplier(step, total=total, kind=kind, warmup=warmup, min_ratio=min_ratio)
        for step in range(total)
    ]


def test_cosine_falls_to_its_floor_exactly_at_the_last_step() -> None:
    assert rates(5, "cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)
    assert rates(5, "cosine", min_ratio=0.1)[-1] == pytest.approx(0.1)
    assert rates(12, "cosine", warmup=4, min_ratio=0.2)[-1] == pytest.approx(0.2)


def test_warm_up_moves_from_the_first_step_and_ends_at_the_whole_rate() -> None:
    assert rates(8, "constant", warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert rates(8, "cosine", warmup=4)[:5] == [0.25, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_warm_up_may_take_all_steps(kind: str) -> None:
    assert rates(4, kind, warmup=4) == [0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_one_step_moves_at_the_whole_rate(kind: str) -> None:
    assert rates(1, kind) == [1]


def test_a_step_past_the_last_stays_at_the_floor() -> None:
    assert lr_multiplier(99, total=10, kind="cosine", warmup=2, min_ratio=0.1) == pytest.approx(0.1)
