"""What the runs of stability.py came to: the table, the shares that are asked for, and the figure."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import svg
from results_io import RESULTS, into_page, table, write
from stability_setups import HEALTHY, RECOVERABLE, SETUPS

NAME, HEALTHY_NAME = "stability", "healthy"
LOSS = 0.02  # of accuracy, that a stable run may end below its start
Run = dict[str, Any]


def stable(run: Run) -> bool:
    """Ends finite, and at or above its start less two points."""
    return run["end"] is not None and run["end"] >= run["start"] - LOSS


def lift(run: Run) -> float:
    """What it gained; weights that are not finite answer nothing."""
    return (run["end"] or 0.0) - run["start"]


def report(runs: Sequence[Run], about: str) -> None:
    """Write results/stability.{json,md,svg}."""
    hostile = [run for run in runs if run["setup"] in SETUPS]
    gains = {run["seed"]: lift(run) for run in runs if (run["setup"], run["guards"]) == (HEALTHY_NAME, "off")}
    text = [about, f"![accuracy gained, by set-up]({NAME}.svg)", _setups(hostile)]
    text += ["\n".join(_shares(hostile, gains)), _healthy(runs)]
    settings = {"healthy": HEALTHY, "recoverable": RECOVERABLE}
    settings |= {"setups": {name: list(setup.words) for name, setup in SETUPS.items()}}
    write(NAME, settings, runs, "\n\n".join(text))
    into_page(NAME, "\n".join(_shares(hostile, gains)))
    figure(hostile, mean(gains.values()) if gains else 0.0)


def _of(runs: Sequence[Run], name: str, guards: str) -> list[Run]:
    return [run for run in runs if (run["setup"], run["guards"]) == (name, guards)]


def _setups(hostile: Sequence[Run]) -> str:
    head = ["set-up", "end, on", "stable, on", "end, off", "stable, off", "actions taken", "ended early"]
    body = []
    for name in SETUPS:
        own = [_of(hostile, name, guards) for guards in ("on", "off")]
        if not any(own):
            continue
        cells = [f"{name} *" if name in RECOVERABLE else name]
        for some in own:
            cells += [f"{mean(run['end'] or 0.0 for run in some):.3f}" if some else ""]
            cells += [f"{sum(map(stable, some))} of {len(some)}"]
        body.append([*cells, _actions(own[0]), "; ".join(_early(own))])
    return table(head, body)


def _actions(runs: Sequence[Run]) -> str:
    taken: Counter[str] = Counter()
    for run in runs:
        taken.update(run["actions"])
    return ", ".join(f"{action} {count}" for action, count in taken.most_common())


def _early(own: Sequence[Sequence[Run]]) -> Iterator[str]:
    for guards, some in zip(("on", "off"), own, strict=True):
        found = Counter(run["ended"] for run in some if run["ended"] != "done")
        yield from (f"{guards}: {count} {how}" for how, count in found.items())


def _shares(hostile: Sequence[Run], gains: dict[int, float]) -> Iterator[str]:
    for guards in ("on", "off"):
        own = [run for run in hostile if run["guards"] == guards]
        if not own:
            continue
        kept = [lift(run) >= gains[run["seed"]] / 2 for run in own if run["setup"] in RECOVERABLE]
        finite = sum(run["end"] is not None for run in own)
        yield (
            f"- Guards {guards}: {sum(map(stable, own))} of {len(own)} runs are stable, {finite} end with "
            f"finite weights; of the set-ups that can be saved (*), {sum(kept)} of {len(kept)} runs keep "
            "half of what the healthy run of their seed gains."
        )


def _healthy(runs: Sequence[Run]) -> str:
    by_guards = {
        guards: {run["seed"]: run for run in _of(runs, HEALTHY_NAME, guards)} for guards in ("on", "off")
    }
    seeds = sorted(by_guards["on"].keys() & by_guards["off"].keys())
    if not seeds:
        return "The healthy set-up was not run with guards on and off."
    on, off = ([by_guards[guards][seed] for seed in seeds] for guards in ("on", "off"))
    body = [["start", *(f"{run['start']:.3f}" for run in on), f"{mean(run['start'] for run in on):.3f}"]]
    for guards, some in (("on", on), ("off", off)):
        ends = [run["end"] or 0.0 for run in some]
        body.append([guards, *(f"{end:.3f}" for end in ends), f"{mean(ends):.3f}"])
    taken = sum(count for run in on for action, count in run["actions"].items() if action != "alert")
    alerts = sum(run["actions"].get("alert", 0) for run in on)
    said = f"The healthy set-up on {len(seeds)} seeds; the guards took {taken} actions ({alerts} alerts):"
    return f"{said}\n\n{table(['guards', *(f'seed {seed}' for seed in seeds), 'mean'], body)}"


def figure(hostile: Sequence[Run], healthy: float) -> None:
    """A line a set-up: what each run gained, guards on filled, off hollow."""
    names = [name for name in SETUPS if any(run["setup"] == name for run in hostile)]
    step, left = 22, 230
    ends = (-0.6, 0.6)
    panel = svg.Panel((left, 40, 460, step * len(names)), ends, (0, len(names)), "accuracy gained by the run")
    panel.x_ticks([(tick / 10, f"{tick / 10:+.1f}") for tick in range(-6, 7, 2)])
    for place, color, name in ((-LOSS, "#111", "stable"), (healthy, "#2ca02c", "healthy")):
        panel.line([(place, 0), (place, len(names))], color, dots=False)
        panel.text(name, panel.x(place), 40 + step * len(names) + 32, anchor="middle", color=color)
    for i, name in enumerate(names):
        y = len(names) - i - 0.5
        panel.text(name, left - 8, panel.y(y) + 4, anchor="end")
        for guards, color, off in (("off", "#d62728", -0.2), ("on", "#1f77b4", 0.2)):
            for run in _of(hostile, name, guards):
                at = min(max(lift(run), ends[0]), ends[1])
                panel.dot(at, y + off, color, hollow=guards == "off")
    panel.text("● guards on", left, 20, color="#1f77b4")
    panel.text("○ guards off", left + 100, 20, color="#d62728")
    svg.write(RESULTS / f"{NAME}.svg", (left + 490, 90 + step * len(names)), [panel])
