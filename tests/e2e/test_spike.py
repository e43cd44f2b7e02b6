"""A run that blows up, from the command line: seen, gone back, softened, gone on; or paused with a reason."""

from pathlib import Path
from typing import Any

import pytest
from e2e_run import manifest, metrics, recipe, rein, write_recipe

from rein.journal import read, standing

pytestmark = pytest.mark.long

LIMIT = 0.05  # nats per token


@pytest.fixture
def body(whole: Path, data: Path, tmp_path: Path) -> dict[str, Any]:
    """Four batches at a rate that takes the actor far off at once."""
    found = recipe(whole / "sft" / "model", data, tmp_path / "run") | {"stages": ["train"]}
    found["data"] |= {"train_files": str(whole / "score" / "trajectories.parquet")}
    found["actor"] |= {"ppo_mini_batch_size": 8, "optim": {"lr": "3e-2"}}
    found["trainer"] |= {"total_epochs": 2, "test_freq": 1}
    high = {"name": "kl_high", "metric": "probe/kl_reference", "above": LIMIT, "for": 1, "rest": 0}
    found["guards"] = {
        "preset": "off",
        "max_rollbacks": 9,
        "snapshot_every": 8,
        "rules": [high | {"then": ["rollback", {"lr": 0.1}, {"kl_coef": 1.5}]}],
    }
    return found


def test_a_spike_is_seen_undone_softened_and_the_run_ends_well(
    body: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 0
    events = standing(read(tmp_path / "run" / "train" / "journal.jsonl"))
    verdicts = [event for event in events if event["kind"] == "verdict"]
    rollbacks = [event for event in events if event["kind"] == "rollback"]
    assert len(verdicts) == len(rollbacks) >= 1
    first, back = verdicts[0], rollbacks[0]
    assert (first["rule"], first["action"], first["limit"]) == ("kl_high", "rollback", LIMIT)
    assert first["value"] > LIMIT
    assert first["changed"]["lr"] == [1.0, pytest.approx(0.1)]
    assert back["to"] < back["from"]
    for number, event in enumerate(verdicts, 1):  # a second restore does not forget the first
        assert event["changed"]["lr"] == pytest.approx(
            [max(0.1 ** (number - 1), 0.01), max(0.1**number, 0.01)]
        )
    lines = metrics(tmp_path / "run")
    seen = [line for line in lines if "guard/kl_high" in line]
    assert [line["guard/kl_high"] for line in seen] == [event["value"] for event in verdicts]
    assert [line["number"] for line in lines] == sorted(line["number"] for line in lines)
    rates = {line["number"]: line["actor/lr"] for line in lines if "actor/lr" in line}
    assert rates[max(rates)] == pytest.approx(3e-2 * verdicts[-1]["changed"]["lr"][1])
    readings = [line["probe/kl_reference"] for line in lines if "probe/kl_reference" in line]
    assert readings[-1] <= LIMIT < max(readings)
    facts = manifest(tmp_path / "run", "train")["facts"]
    assert facts["rollbacks"] == len(rollbacks)
    said = capsys.readouterr().out
    assert "kl_high: rollback: probe/kl_reference" in said
    assert "(lr 1 -> 0.1; kl_coef 1 -> 1.5)" in said


def test_one_rollback_too_many_pauses_with_the_good_state_and_the_same_command_goes_on(
    body: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body["guards"] |= {"max_rollbacks": 0}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("train", file) == 4
    err = capsys.readouterr().err
    assert "probe/kl_reference" in err
    assert "guards.max_rollbacks is 0" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run" / "train" / "manifest.json").exists()
    assert (tmp_path / "run" / "train" / "last" / "model.safetensors").exists()
    codes = [4]
    while codes[-1] == 4 and len(codes) < 9:  # softer each time
        codes.append(rein("train", file))
    assert codes[-1] == 0
