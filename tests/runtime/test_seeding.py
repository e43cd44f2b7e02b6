"""One seed, many streams that do not follow from each other."""

from rein.runtime.seeding import derive


def test_the_same_names_give_the_same_seed_in_every_process() -> None:
    assert derive(0, "actor", 3) == 6390549284162043818


def test_another_seed_or_name_gives_another_stream() -> None:
    found = {
        derive(seed, name, epoch) for seed in range(5) for name in ("actor", "critic") for epoch in range(5)
    }
    assert len(found) == 50


def test_names_do_not_run_into_each_other() -> None:
    assert derive(0, "a", "bc") != derive(0, "ab", "c")


def test_seeds_fit_every_generator() -> None:
    assert all(0 <= derive(seed, "rollout") < 2**63 for seed in range(100))
