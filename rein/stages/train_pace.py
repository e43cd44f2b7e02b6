"""How quick a training run is and where its time goes: metrics of each step, and the end's summary.

Part of stages/train.py. A second belongs to one phase. Phases bear verl's names where verl has them; ours are
`data` (rows read, tokenised, chosen), `behavior`, `budget` (timing token budgets), `critic_fit`, `probe`,
`reward` (held-out answers judged), `peak` (MFU's denominator, once) and `other`. *Outside models* is the time
in none of MODELS: neither a forward or backward pass, nor an optimizer's step, nor generation. What a pass
needs besides, cutting and packing its rows, is part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rein.models.actor import Actor
from rein.models.critic import Critic
from rein.models.flops import Flops
from rein.models.precision import is_fast
from rein.runtime.clock import Clock, Spent
from rein.runtime.memory import peak_resident_gb
from rein.runtime.peak import core_flops
from rein.tracking.console import Console
from rein.types import Metrics, TokenRow

UPDATES = {"actor": ("update_actor",), "critic": ("update_critic", "critic_fit")}
PER_TOKEN = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
GROUPS = {
    "models": ("behavior", "ref", "budget", "old_log_prob", "values", *UPDATES["critic"], *UPDATES["actor"]),
    "validating": ("probe", "testing", "reward"),
    "data": ("data",),
    "saving": ("save_checkpoint",),
}
MODELS = (*GROUPS["models"], "probe", "testing")


class Pace:
    """Reads the clock; counts tokens, each batch's once, since this process began."""

    def __init__(self, clock: Clock, actor: Actor, critic: Critic | None, *, alone: bool = True) -> None:
        self.clock = clock
        self.flops = {"actor": Flops(actor.model)}
        if critic is not None:
            self.flops["critic"] = Flops(critic.model)
        self.tokens, self.seconds, self.cpu = 0, 0.0, 0.0  # of the steps
        weight = next(actor.model.parameters())
        self.dtype = torch.bfloat16 if is_fast(actor.model) else weight.dtype
        # Of a GPU the rate at best is not known, and CPU seconds say nothing of it.
        self.on_cpu = weight.device.type == "cpu"
        self.alone = alone  # else CPU seconds are one rank's, and tokens all ranks'
        self.has_mfu = alone and self.on_cpu and all(flops.known for flops in self.flops.values())

    def work(self, role: str, rows: Sequence[TokenRow]) -> float:
        """Useful FLOPs of an update on these rows."""
        return self.flops[role].update(rows)

    def metrics(self, rows: Sequence[TokenRow] = ()) -> Metrics:
        """Of the time since the last call; `rows`: it was the step of a batch of these."""
        if rows and self.has_mfu:
            with self.clock("peak"):
                core_flops(self.dtype)  # measured at the first step, known from then on
        lap = self.clock.lap()
        found = {f"timing_s/{phase}": seconds for phase, seconds in lap.seconds.items()}
        if not rows:
            return found
        tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        seconds, cpu = sum(lap.seconds.values()), sum(lap.cpu.values())
        self.tokens, self.seconds, self.cpu = self.tokens + tokens, self.seconds + seconds, self.cpu + cpu
        per_token = {phase: lap.seconds[phase] for phase in PER_TOKEN if phase in lap.seconds}
        found |= {f"timing_per_token_ms/{phase}": 1000 * s / tokens for phase, s in per_token.items()}
        return found | {
            "timing_s/step": seconds,
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds,
            **({"perf/cpu_seconds_per_token": cpu / tokens} if self.alone else {}),
            "perf/peak_resident_gb": peak_resident_gb(),
            **(
                {}
                if self.on_cpu
                else {"perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30}
            ),
            **{f"perf/mfu/{role}": share for role, share in self._mfu(lap).items()},
        }

    def _mfu(self, spent: Spent) -> dict[str, float]:
        """Useful FLOPs of a role's updates over what one core could have done in their CPU seconds."""
        cpu = {role: sum(spent.cpu.get(phase, 0.0) for phase in UPDATES[role]) for role in self.flops}
        work = {role: sum(spent.work.get(phase, 0.0) for phase in UPDATES[role]) for role in self.flops}
        return {
            role: work[role] / (cpu[role] * core_flops(self.dtype))
            for role in self.flops
            if self.has_mfu and cpu[role]
        }

    def summary(self) -> dict[str, Any]:
        """Of the whole stage, as far as this process made it."""
        spent = self.clock.whole()
        seconds = sum(spent.seconds.values())
        shares = {phase: s / seconds for phase, s in sorted(spent.seconds.items(), key=lambda item: -item[1])}
        groups = {name: sum(shares.get(phase, 0.0) for phase in phases) for name, phases in GROUPS.items()}
        groups["rest"] = 1 - sum(groups.values())
        found: dict[str, Any] = {
            "seconds": round(seconds, 2),
            "shares": {name: round(share, 4) for name, share in groups.items()},
            "outside_models": _outside(spent.seconds),
            "outside_models_cpu": _outside(spent.cpu),  # what a busy machine leaves as it is
            "phases": {phase: round(share * seconds, 3) for phase, share in shares.items()},
        }
        if self.tokens:
            found |= {
                "tokens": self.tokens,
                "tokens_per_second": round(self.tokens / self.seconds, 2),
                **(
                    {"cpu_seconds_per_1000_tokens": round(1000 * self.cpu / self.tokens, 4)}
                    if self.alone
                    else {}
                ),
                "mfu": {role: round(share, 4) for role, share in self._mfu(spent).items()},
            }
        if found.get("mfu"):
            found["core_gflops"] = round(core_flops(self.dtype) / 1e9, 1)
        return found


def _outside(spent: Mapping[str, float]) -> float:
    """The share of no phase of MODELS."""
    return round(1 - sum(spent.get(phase, 0.0) for phase in MODELS) / sum(spent.values()), 4)


def say(found: Mapping[str, Any], console: Console) -> None:
    """The summary in three lines."""
    if "tokens" in found:
        cpu = found.get("cpu_seconds_per_1000_tokens")
        mfu = ", ".join(f"{share:.2f} {role}" for role, share in found["mfu"].items())
        console.say(
            f"speed: {found['tokens_per_second']:.4g} tokens/s"
            + (f", {cpu:.3g} CPU-s per 1,000 tokens" if cpu is not None else "")
            + (f", MFU {mfu} (of {found['core_gflops']:.4g} GFLOP/s a core)" if mfu else "")
        )
    groups = ", ".join(f"{name} {100 * share:.1f} %" for name, share in found["shares"].items())
    console.say(
        f"time: {found['seconds']:.0f} s: {groups}; outside models {100 * found['outside_models']:.1f} % "
        f"({100 * found['outside_models_cpu']:.1f} % of CPU seconds)"
    )
    phases = {name: s / found["seconds"] for name, s in found["phases"].items()}
    largest = [f"{name} {100 * share:.1f} %" for name, share in phases.items() if share >= 0.001]
    console.say(f"phases: {', '.join(largest)}")
