"""Token records: the rows that moved furthest, what is said of their tokens, and which files stay."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from guarded import BATCH, HALVE_AT_3, Course, guarded, ran, same_end
from rows_made import random_trajectories

from rein.data.pieces import pieces
from rein.stages.token_records import FOLDER, MOST_FILES, SCHEMA, furthest, staying
from rein.types import Experience


def records(some: Any) -> dict[str, list[dict[str, Any]]]:
    folder = Path(some.out) / "train" / FOLDER
    return {file.stem: pq.read_table(file).to_pylist() for file in sorted(folder.glob("*"))}


def experience_of(gap: torch.Tensor, mask: torch.Tensor) -> Experience:
    zeros = torch.zeros_like(gap)
    rows = random_trajectories(len(gap))
    return Experience(rows, mask, torch.ones(len(gap)), gap, zeros, ref_log_probs=zeros)


def test_the_furthest_rows_and_both_ends_are_chosen() -> None:
    gap = torch.tensor([[0.1, 0.1], [5, -5], [3, -3], [0.9, 0.9], [-0.8, -0.8], [4, -4], [9, 9]])
    mask = torch.ones(7, 2, dtype=torch.bool)
    mask[6] = False  # left out by a guard
    some = experience_of(gap, mask)
    assert furthest(some, 3) == [1, 3, 4]
    assert furthest(some, 4) == [1, 5, 3, 4]
    assert furthest(some, 1) == [1]
    assert sorted(furthest(some, 99)) == [0, 1, 2, 3, 4, 5]


def test_not_more_than_64_batches_stay_the_first_and_the_last_among_them() -> None:
    assert staying(3) == {0, 1, 2}
    for batches in (64, 65, 1000, 100_000):
        found = sorted(staying(batches))
        assert len(found) == MOST_FILES
        assert (found[0], found[-1]) == (0, batches - 1)
        gaps = {b - a for a, b in pairwise(found)}
        assert max(gaps) - min(gaps) <= 1


def test_every_number_is_that_of_the_batch(tiny: Path, tmp_path: Path) -> None:
    """Against log-probs of the start policy: in batch 0 the actor is where it starts."""
    some = guarded(str(tiny), tmp_path, trainer={"total_epochs": 1, "critic_warmup": 0, "val_prompts": 1})
    ran(some)
    found = records(some)
    assert list(found) == ["000000", "000001"]
    assert len(found["000000"]) == 4
    for rows in found.values():
        for row in rows:
            assert list(row) == SCHEMA.names
            length = len(row["response_ids"])
            for name in ("old_log_probs", "reference_log_probs", "advantages", "values", "kl", "tokens"):
                assert len(row[name]) == length
            gaps = [r - o for r, o in zip(row["reference_log_probs"], row["old_log_probs"], strict=True)]
            assert max(z for z in gaps) < 2.6
            assert row["kl"] == pytest.approx([math.exp(z) - z - 1 for z in gaps], abs=1e-6)
    assert all(max(row["kl"]) < 1e-9 for row in found["000000"])
    assert any(max(row["kl"]) > 1e-6 for row in found["000001"])
    stored = {row.response_ids.tobytes(): row for row in random_trajectories(14)}
    for row in found["000000"]:
        ids = torch.tensor(row["response_ids"]).numpy().tobytes()
        assert row["score"] == stored[ids].score


@pytest.mark.long
def test_records_change_no_bit_of_the_training(tiny: Path, tmp_path: Path) -> None:
    one, none = (
        guarded(str(tiny), tmp_path, f"run{n}", trainer=TRAINER | {"keep_trajectories": n}) for n in (32, 0)
    )
    ran(one)
    ran(none)
    assert same_end(one, none)
    assert len(records(one)) == 4
    assert not (Path(none.out) / "train" / FOLDER).exists()


TRAINER = {"critic_warmup": 0, "val_prompts": 1, "val_before_train": False, "total_epochs": 2}


@pytest.mark.long
def test_a_rollback_leaves_no_record_of_a_batch_it_undid(tiny: Path, tmp_path: Path) -> None:
    """Paused right after the rollback: batches 1 and 2 were made, and the state is batch 0's again."""
    rule = HALVE_AT_3 | {"for": 9, "then": ["rollback", {"lr": 0.5}], "name": "late"}
    some = guarded(str(tiny), tmp_path, rules=[rule], guards={"max_rollbacks": 0})
    seen: list[list[str]] = []
    course = Course(some, also=lambda job: seen.append(sorted(records(some))), stop_at_rollback=1)
    with pytest.raises(Exception, match="rollback 1"):
        course.run()
    assert max(len(files) for files in seen) == 3
    assert records(some) == {}


@pytest.mark.long
def test_a_resumed_run_has_the_records_of_an_unbroken_one(tiny: Path, tmp_path: Path) -> None:
    whole, broken = (guarded(str(tiny), tmp_path, name) for name in ("whole", "broken"))
    ran(whole)
    Course(broken, stop_at=2 * BATCH + 3).run()  # mid-batch
    assert list(records(broken)) == ["000000", "000001", "000002"]
    ran(broken)
    rows = {name: [row | {"row": ""} for row in found] for name, found in records(whole).items()}
    assert {name: [row | {"row": ""} for row in found] for name, found in records(broken).items()} == rows
    anew = broken.model_copy(update={"resume": "never"})
    Course(anew, stop_at=1).run()
    assert list(records(anew)) == ["000000"]


class Hostile:
    """Decodes to what no file and no page should trip over."""

    texts = ("</script>", "\ud800", "\x00", "\u202e", "é")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if max(ids) >= len(self.texts):
            raise OverflowError("no such token")
        return "".join(self.texts[i] for i in ids)


class Words(Hostile):
    texts = (" the", " cat")

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return super().decode(ids).removeprefix(" ")  # as sentencepiece does


def test_pieces_are_text_that_a_file_can_hold() -> None:
    found = pieces(Hostile(), [0, 1, 2, 3, 4, 99])  # type: ignore[arg-type]
    assert found == {0: "</script>", 1: "?", 2: "\x00", 3: "\u202e", 4: "é", 99: "<99>"}
    assert pieces(Words(), [0, 1]) == {0: " the", 1: " cat"}  # type: ignore[arg-type]
