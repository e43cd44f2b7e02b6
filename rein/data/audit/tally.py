"""Blocks and rejects in, one after the other; the facts of the whole data out, as a dict for JSON.

Per usable row some 50 bytes are kept (keys, lengths, score); everything else is counted as it passes.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rein.data.audit.behavior import Behavior
from rein.data.audit.block import LENGTH, OTHER, STOP, UNKNOWN, Block, Side
from rein.data.audit.hashing import NONE, Keys, pair_keys
from rein.data.audit.numbers import Fact, correlation, distribution, share
from rein.data.audit.overlap import Overlap
from rein.data.audit.sample import Sample, near_duplicates, repetition
from rein.data.audit.texts import TextScan
from rein.data.rejects import Reject
from rein.data.schemas import Kind

NAMED = 3  # rejects of a kind that are named
KEPT = 10_000  # rejects that are kept
SHOWN = 50  # different names of a column
REPETITIVE = 0.5


@dataclass(slots=True)
class Lengths:
    """Lengths of one side; those that count tokens are kept apart from characters."""

    values: list[NDArray[np.int32]] = field(default_factory=list)
    in_tokens: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, side: Side) -> None:
        self.values.append(side.length.astype(np.int32))
        self.in_tokens.append(side.in_tokens.astype(np.bool_))

    def of_one_unit(self) -> tuple[str, NDArray[np.bool_], NDArray[np.int32]]:
        """The unit that most rows have, which rows those are, and all rows' lengths."""
        values, tokens = _all(self.values, np.int32), _all(self.in_tokens, np.bool_)
        most = 2 * int(tokens.sum()) >= len(tokens)
        return ("tokens" if most else "characters"), (tokens if most else ~tokens), values


@dataclass(slots=True)
class Tally:
    """What has passed so far."""

    kind: Kind
    tokens: tuple[str, ...]  # special tokens to look for
    stop_ids: frozenset[int]  # empty without a tokenizer
    overlap: Overlap | None = None
    total: int = 0
    rejects: list[Reject] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    noticed: Counter[str] = field(default_factory=Counter)
    names: dict[str, Counter[str]] = field(default_factory=dict)
    last_ids: Counter[int] = field(default_factory=Counter)
    behavior: Behavior = field(default_factory=Behavior)
    sample: Sample = field(default_factory=Sample)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    scans: dict[str, TextScan] = field(default_factory=dict)
    _rows: list[Keys] = field(default_factory=list)
    _prompts: list[Keys] = field(default_factory=list)
    _groups: list[Keys] = field(default_factory=list)
    _scores: list[NDArray[np.float64]] = field(default_factory=list)
    _finish: list[NDArray[np.int8]] = field(default_factory=list)

    def reject(self, rejects: list[Reject]) -> None:
        self.total += len(rejects)
        self.reasons.update(reject.kind for reject in rejects)
        self.rejects += rejects[: max(0, KEPT - len(self.rejects))]

    def add(self, block: Block) -> None:
        if not block.rows:
            return
        self.total += block.rows
        self.noticed.update(block.noticed)
        self.behavior.add(block.log_probs)
        for name, counter in block.names.items():
            self.names.setdefault(name, Counter()).update(counter)
        sides = {"prompt": block.prompt, self._answer: block.response, "rejected": block.rejected}
        for name, side in sides.items():
            if side is not None:
                self.lengths.setdefault(name, Lengths()).add(side)
                self.scans.setdefault(name, TextScan(self.tokens)).add(side)
        key = block.prompt.key
        self._prompts.append(key)
        self._groups.append(np.where(block.group != NONE, block.group, key))
        if block.response is not None:
            key = pair_keys(key, block.response.key)
            self._ends(block.response)
        if block.rejected is not None:
            key = pair_keys(key, block.rejected.key)
        self._rows.append(key)
        if block.score is not None:
            self._scores.append(block.score)
        else:
            self._scores.append(np.full(block.rows, np.nan))
        if block.finish is not None:
            self._finish.append(self._settled(block.finish, block.response))
        self._sampled(block)
        if self.overlap is not None:
            self.overlap.add(block)

    @property
    def _answer(self) -> str:
        return "chosen" if self.kind == "preferences" else "response"

    def _sampled(self, block: Block) -> None:
        side = block.response or block.prompt
        for place in self.sample.add(side.key):
            self.sample.keep(place, block.rows, side.content(place))

    def _ends(self, side: Side) -> None:
        ids, counts = np.unique(side.last[side.last >= 0], return_counts=True)
        if len(self.last_ids) < 100_000:
            self.last_ids.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))

    def _settled(self, finish: NDArray[np.int8], response: Side | None) -> NDArray[np.int8]:
        """An end token says that a response of unknown end has finished."""
        if response is None or not self.stop_ids:
            return finish
        ended = np.isin(response.last, list(self.stop_ids))
        return np.where((finish == UNKNOWN) & ended, STOP, finish).astype(np.int8)

    def facts(self) -> dict[str, Any]:
        """The sections of facts that the rows give; None where a kind of file has no such thing."""
        rows, prompts, groups = (_all(keys, np.uint64) for keys in (self._rows, self._prompts, self._groups))
        scores = _all(self._scores, np.float64)
        return {
            "rows": self._row_facts(len(rows)),
            "lengths": {name: _length_facts(each) for name, each in self.lengths.items()},
            "endings": self._endings(),
            "duplicates": self._duplicates(rows, prompts),
            "overlap": None if self.overlap is None else self.overlap.facts(prompts),
            "groups": _groups(groups, scores) if self.kind in ("trajectories", "prompts") else None,
            "score": self._scored(scores),
            "text": self._text(),
            "behavior": self.behavior.facts(len(rows)),
            "names": {name: _most(counter) for name, counter in self.names.items()},
            "pairs": self._pairs(),
        }

    def _row_facts(self, usable: int) -> Fact:
        named: dict[str, list[dict[str, str]]] = {}
        for reject in self.rejects:
            if len(named.setdefault(reject.kind, [])) < NAMED:
                named[reject.kind].append({"where": reject.where, "reason": reject.reason})
        return {
            "total": self.total,
            "usable": usable,
            "rejected": self.total - usable,
            "rejected_share": share(self.total - usable, self.total),
            "by_reason": dict(self.reasons.most_common()),
            "first": named,
            "noticed": {what: n for what, n in self.noticed.most_common() if n},
        }

    def _endings(self) -> Fact | None:
        if not self._finish or "response" not in self.lengths:
            return None
        finish = _all(self._finish, np.int8)
        counts = {name: int((finish == code).sum()) for name, code in _FINISH.items()}
        known = counts["stop"] + counts["length"]
        unit, which, lengths = self.lengths["response"].of_one_unit()
        longest = int(lengths[which].max()) if which.any() else 0
        with_ids = sum(self.last_ids.values())
        top = self.last_ids.most_common(1)
        missing = None
        if self.stop_ids and with_ids:
            missing = with_ids - sum(n for i, n in self.last_ids.items() if i in self.stop_ids)
        return {
            "rows": len(finish),
            **counts,
            "truncated_share": share(counts["length"], known),
            "unit": unit,
            "longest": longest,
            "at_longest": int((lengths[which] == longest).sum()),
            "rows_with_ids": with_ids,
            "last_id": {"id": top[0][0], "share": top[0][1] / with_ids} if top else None,
            "missing_end": missing,
        }

    def _duplicates(self, rows: Keys, prompts: Keys) -> Fact:
        distinct, counts = np.unique(rows, return_counts=True)
        compared, near = near_duplicates(self.sample)
        return {
            "distinct_rows": len(distinct),
            "copies": len(rows) - len(distinct),
            "copies_share": share(len(rows) - len(distinct), len(rows)),
            "most_copies": int(counts.max()) if len(counts) else 0,
            "distinct_prompts": len(np.unique(prompts)),
            "near": {"compared": compared, "alike": near, "share": share(near, compared)},
        }

    def _scored(self, scores: NDArray[np.float64]) -> Fact | None:
        there = ~np.isnan(scores)
        if self.kind != "trajectories" or not there.any():
            return None
        unit, which, lengths = self.lengths["response"].of_one_unit()
        both = there & which
        return {
            "missing": int((~there).sum()),
            "distribution": distribution(scores[there]),
            "against_length": correlation(scores[both], lengths[both]),
            "by_length": _by_length(scores[both], lengths[both]),
            "length_unit": unit,
        }

    def _text(self) -> Fact:
        said = [r for row in self.sample.units.values() if (r := repetition(row)) is not None]
        shares = np.array(said)
        return {
            "sides": {
                name: {
                    "rows": scan.rows,
                    "special": dict(scan.special.most_common()),
                    "with_special": scan.with_special,
                    "replacement_marks": scan.replaced,
                    "blank": scan.blank,
                }
                for name, scan in self.scans.items()
                if scan.rows
            },
            "repetition": distribution(shares),
            "repetitive_share": share(int((shares > REPETITIVE).sum()), len(shares)),
        }

    def _pairs(self) -> Fact | None:
        if self.kind != "preferences" or "chosen" not in self.lengths:
            return None
        unit, which, chosen = self.lengths["chosen"].of_one_unit()
        rejected = _all(self.lengths["rejected"].values, np.int32)
        longer, n = (chosen > rejected)[which], int(which.sum())
        return {
            "unit": unit,
            "rows": n,
            "identical": self.reasons["chosen equals rejected"],
            "empty": self.reasons["empty answer"],
            "chosen_longer_share": share(int(longer.sum()), n),
            "chosen_shorter_share": share(int((chosen < rejected)[which].sum()), n),
            "difference": distribution((chosen - rejected)[which]),
        }


_FINISH = {"stop": STOP, "length": LENGTH, "other": OTHER, "unknown": UNKNOWN}


def _all(parts: list[Any], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _length_facts(lengths: Lengths) -> Fact:
    unit, which, values = lengths.of_one_unit()
    return {"unit": unit, "distribution": distribution(values[which]), "other_unit": int((~which).sum())}


def _most(counter: Counter[str]) -> Fact:
    return {"distinct": len(counter), "rows": counter.total(), "most": dict(counter.most_common(SHOWN))}


def _groups(groups: Keys, scores: NDArray[np.float64]) -> Fact:
    """Answers per prompt, and prompts whose answers all score the same."""
    order = np.argsort(groups)
    keys, sorted_scores = groups[order], scores[order]
    starts = (
        np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        if len(keys)
        else np.zeros(0, np.int64)
    )
    sizes = np.diff(np.append(starts, len(keys)))
    found: Fact = {"groups": len(starts), "answers": distribution(sizes), "single": int((sizes == 1).sum())}
    several = sizes > 1
    found |= {"several": int(several.sum()), "without_spread": None, "without_spread_rows": None}
    if len(starts) and not np.isnan(scores).all():
        low, high = np.fmin.reduceat(sorted_scores, starts), np.fmax.reduceat(sorted_scores, starts)
        flat = several & (low == high)
        found |= {"without_spread": int(flat.sum()), "without_spread_rows": int(sizes[flat].sum())}
    found["without_spread_share"] = share(found["without_spread"] or 0, found["several"])
    return found


def _by_length(scores: NDArray[np.float64], lengths: NDArray[np.int32]) -> list[Fact]:
    """Mean score of each tenth of the lengths."""
    if not len(scores):
        return []
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 11)))
    place = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, max(len(edges) - 2, 0))
    found = []
    for tenth in np.unique(place):
        inside = place == tenth
        at = {"from": int(lengths[inside].min()), "to": int(lengths[inside].max())}
        found.append(at | {"rows": int(inside.sum()), "mean": float(scores[inside].mean())})
    return found
