"""Learning rates step by step, coefficients over a run."""

import pytest

from rein.functional.schedules import lr_multiplier, over_progress


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


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_warm_up_may_take_all_steps(kind: str) -> None:
    assert rates(4, kind, warmup=4) == [0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_one_step_moves_at_the_whole_rate(kind: str) -> None:
    assert rates(1, kind) == [1]


def test_a_step_past_the_last_stays_at_the_floor() -> None:
    assert lr_multiplier(99, total=10, kind="cosine", warmup=2, min_ratio=0.1) == pytest.approx(0.1)


def test_wsd_is_constant_and_then_falls_as_a_cosine() -> None:
    """9 steps after warm-up of which half, 4, are whole; the floor is reached at the last."""
    found = [
        lr_multiplier(step, total=11, kind="wsd", warmup=2, min_ratio=0.1, stable_ratio=0.5)
        for step in range(11)
    ]
    assert found[:7] == [0.5, 1, 1, 1, 1, 1, 1]
    assert found[8] == pytest.approx(0.1 + 0.9 * 0.5)
    assert found[10] == pytest.approx(0.1)
    assert found == sorted(found[:2]) + sorted(found[2:], reverse=True)


def test_an_unknown_kind_of_schedule_is_named() -> None:
    with pytest.raises(ValueError, match="'linear' is unknown; known: constant"):
        rates(4, "linear")
    with pytest.raises(ValueError, match="'steps' is unknown; known: pieces"):
        over_progress(0.5, [(0.0, 1.0)], shape="steps")


PIECES = [(0.0, 0.08), (0.2, 0.05), (0.8, 0.06)]


@pytest.mark.parametrize(
    ("progress", "value"), [(0, 0.08), (0.199, 0.08), (0.2, 0.05), (0.5, 0.05), (0.8, 0.06), (1, 0.06)]
)
def test_a_coefficient_in_pieces(progress: float, value: float) -> None:
    assert over_progress(progress, PIECES, shape="pieces") == value


def test_a_coefficient_that_passes_through_its_points() -> None:
    decay = [(0.0, 0.005), (1.0, 0.001)]
    for shape in ("linear", "smooth"):
        assert over_progress(0, decay, shape=shape) == pytest.approx(0.005)
        assert over_progress(0.5, decay, shape=shape) == pytest.approx(0.003)
        assert over_progress(1, decay, shape=shape) == pytest.approx(0.001)
        assert over_progress(7, decay, shape=shape) == pytest.approx(0.001)
    assert over_progress(0.25, decay, shape="linear") == pytest.approx(0.004)
    assert over_progress(0.25, decay, shape="smooth") == pytest.approx(0.001 + 0.004 * (2 + 2**0.5) / 4)


@pytest.mark.parametrize("points", [[], [(0.1, 1.0)], [(0.0, 1.0), (0.5, 2.0), (0.5, 3.0)]])
def test_points_that_do_not_cover_the_run_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="must start at progress 0 and rise"):
        over_progress(0.5, points, shape="pieces")
