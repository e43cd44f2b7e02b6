"""A page with something in every section, and text in it that no page should trip over."""

from typing import Any

from rein.report.html import Page

HOSTILE = (
    "</pre></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    " &lt; \u202e\u2066fdsa \x00\x1b[31m 😀 \ud800 " + "w" * 3000
)
TOKENS = [
    "</script><script>document.title='owned'</script>",
    "\u202eabc",
    "\x00",
    "\n",
    "",
    " the",
    "😀",
    "\ud800",
]
METRICS = ("val/score", "probe/kl_reference", "actor/entropy", "actor/lr", "critic/vf_loss", "kl/old")


def side(score: float) -> dict[str, Any]:
    shape = {"response_length": 30.0, "repetition": 0.01, "truncated": 0.0, "well_formed": 0.98}
    passes = {"pass@1": score - 0.1, "pass@8": score + 0.1}
    ends = [score - 0.04, score + 0.04]
    return {"accuracy": score, "n": 500, "score": score, "accuracy_ci95": ends} | passes | shape


def part(lift: float, n: int = 100) -> dict[str, Any]:
    return {"n": n, "before": 0.4, "after": 0.4 + lift, "lift": lift, "lift_ci95": [lift - 0.05, lift + 0.05]}


def evaluation() -> dict[str, Any]:
    """As evaluate writes it, of every kind."""
    return {
        "before": side(0.43),
        "after": side(0.84),
        "lift": 0.41,
        "lift_ci95": [0.36, 0.46],
        "win_rate": 0.71,
        "win_rate_ci95": [0.68, 0.74],
        "n": 500,
        "pass_k": 8,
        "seeds": 2,
        "temperature": 1.0,
        "by_data_source": {"addition": part(0.5), HOSTILE[:60]: part(-0.2)},
        "by_length": [{"tokens": [28, 29]} | part(0.5), {"tokens": [30, 30]} | part(0.01)],
        "sampled": part(0.3) | {"by_seed": [part(0.31), part(0.29)], "lift_std_over_seeds": 0.0141},
        "proxy": part(0.2) | {"win_rate": 0.6, "win_rate_ci95": [0.5, 0.7], "reward": ["noisy"]},
    }


def judged(score: float, *reasons: str) -> dict[str, Any]:
    estimate = {"score": score, "ci95": [score - 0.1, None]}
    return {
        "estimates": {"control_variate": estimate, "clipped": estimate},
        "trust": not reasons,
        "reasons": list(reasons),
        "ess": 12.5,
        "pareto_k": None,
        "products_k": 0.9,
        "mean_weight": 0.7,
        "kl_behavior": 0.04,
    }


def off_policy(*reasons: str) -> dict[str, Any]:
    """As evaluate writes it where nothing is generated; reasons refuse its trust."""
    gap = {"score": 0.2, "ci95": [0.1, 0.3]}
    found = {
        "before": judged(0.4),
        "after": judged(0.6, *reasons),
        "difference": {"control_variate": gap, "clipped": gap},
        "trust": not reasons,
        "reported": "control_variate",
        "prompts": 64,
        "rows": 256,
    }
    return {"generated": False, "off_policy": found, "n": 64, "models": {}}


def gate(*failed: str) -> dict[str, Any]:
    """The gate's lines, of which these failed."""
    known: dict[str, tuple[float | None, float | None]] = {
        "min_lift_low": (0.36, 0.0),
        "max_kl": (0.45, 0.3),
        "require_no_guard_stop": (None, None),
    }
    lines = [
        {
            "check": name,
            "value": value,
            "limit": limit,
            "passed": name not in failed,
            "why": f"{name} {HOSTILE}",
        }
        for name, (value, limit) in known.items()
    ]
    return {"asked": True, "passed": not failed, "forced": False, "lines": lines}


def record(batch: int, number: int, size: int = 60) -> dict[str, Any]:
    """A row of token records."""
    tokens = [TOKENS[i % len(TOKENS)] for i in range(size)]
    wave = [((i * 7 + number) % 11 - 5) / 5 for i in range(size)]
    zeros = [-1.0] * size
    return {
        "row": f"part-0.parquet row {number}",
        "batch": batch,
        "prompt": HOSTILE,
        "response": HOSTILE,
        "tokens": tokens,
        "response_ids": list(range(size)),
        "response_mask": [i % 9 > 0 for i in range(size)],
        "score": 1.0,
        "old_log_probs": [w - 1 for w in wave],
        "reference_log_probs": zeros,
        "behavior_log_probs": None,
        "advantages": [-w for w in wave],
        "values": [abs(w) for w in wave],
        "weights": None,
        "kl": [w * w / 2 for w in wave],
    }


def journal() -> list[dict[str, Any]]:
    """One alert, one rollback with its verdict, one round."""
    spike = {"metric": "probe/kl_reference", "value": 0.4, "limit": 0.3, "reason": HOSTILE, "rule": "kl_high"}
    return [
        {"seq": 1, "number": 9, "kind": "verdict", "action": "alert", **spike},
        {
            "seq": 2,
            "number": 30,
            "kind": "verdict",
            "action": "rollback",
            "changed": {"lr": [1.0, 0.3]},
            **spike,
        },
        {"seq": 3, "number": 30, "kind": "rollback", "from": 30, "to": 18, "reason": "back to update 18"},
        {"seq": 4, "number": 45, "kind": "end", "action": "refresh", "reason": "trainer.refresh_every 3"},
    ]


def whole_page() -> Page:
    lines = [{"number": n} | dict.fromkeys(METRICS, n % 13 / 13) for n in range(1, 61)]
    said = {"before": HOSTILE, "after": HOSTILE, "before_score": 0.0, "after_score": 1.0}
    return Page(
        title=f"Rein: {HOSTILE[:40]}",
        evaluation=evaluation(),
        answers=[{"prompt": HOSTILE, "ground_truth": HOSTILE, **said}],
        metrics={"train": lines, "sft": [{"number": n, "train/loss": 1 / n} for n in range(1, 30)]},
        manifests={"score": {"rows": {"in": 100, "rejected": 3, "scored": 97}, "seconds": 12.0}},
        rounds=1,
        gate=gate("max_kl"),
        trajectories=[record(batch, number) for batch in (0, 3) for number in range(4)],
        journal=journal(),
        settings={"score": {"reward": HOSTILE}},
    )
