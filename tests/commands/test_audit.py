"""`rein audit`: files or a recipe in, one page out; hostile text stays text; errors say what to do."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rein.cli import main
from rein.commands.audit import run
from rein.errors import ConfigError, DataError
from rein.report.audit import SECTIONS, lines, render, sections
from rein.tracking.console import Console

QUIET = Console(quiet=True)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31m <|im_end|>"


def made(n: int = 40, **columns: Any) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{i // 4}+1=",
            "response": "7",
            "response_ids": [4] * (1 + i % 9) + [1],
            "behavior_log_probs": [-0.25 * (i % 5)] * (2 + i % 9),
            "score": float(i % 3 == 0),
            "finish_reason": "stop" if i % 8 else "length",
            "temperature": 1.0,
            "behavior_policy": "sft",
        }
        | columns
        for i in range(n)
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_the_facts_and_the_rejects_are_written(tmp_path: Path) -> None:
    rows = made()
    rows[5]["score"] = float("nan")
    data = written(tmp_path / "rows.parquet", rows)
    facts = run([data, f"out={tmp_path / 'run'}"], QUIET)
    folder = tmp_path / "run" / "audit"
    assert json.loads((folder / "audit.json").read_text()) == json.loads(json.dumps(facts))
    (reject,) = [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]
    assert reject["where"] == "rows.parquet row 5"
    page = (folder / "audit.html").read_text()
    charts = json.loads(page.partition('id="charts">')[2].partition("</script>")[0])
    drawn = {chart["title"]: chart for chart in charts}
    assert sum(drawn["Scores"]["y"]) == 39
    assert sum(drawn["Length of response"]["y"]) == 39
    assert "39 <span" in page
    elements = Elements()
    elements.feed(page)
    assert len([1 for _, attributes in elements.tags if attributes.get("class") == "plot"]) == len(charts)
    assert not [a for _, a in elements.tags if str(a.get("src", a.get("href", "#")) or "#")[0] != "#"]


def test_hostile_text_stays_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = made(8, prompt=HOSTILE, behavior_policy=HOSTILE)
    for i, row in enumerate(rows):
        row["data_source"] = f"{HOSTILE}{i}"
    data = written(tmp_path / "<img src=x onerror=alert(3)>.parquet", rows)
    run([data, f"out={tmp_path / 'run'}"], Console(), against=[data])
    page = (tmp_path / "run" / "audit" / "audit.html").read_text()
    elements = Elements()
    elements.feed(page)
    tags = [tag for tag, _ in elements.tags]
    assert (tags.count("script"), tags.count("img")) == (3, 0)
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
    assert "\x1b" not in capsys.readouterr().out
    assert "default-src 'none'" in page


def test_the_terminal_says_numbers_and_warnings(tmp_path: Path) -> None:
    facts = run([written(tmp_path / "rows.parquet", made() * 2), f"out={tmp_path / 'run'}"], QUIET)
    said = list(lines(facts, sections(facts)))
    assert "  exact copies          40  (50.0 %)" in said
    assert any(line.startswith("  ! 50.0 % of the rows are exact copies") for line in said)
    assert len(said) < 60


def test_a_model_measures_text_and_brings_its_special_tokens(tmp_path: Path, tiny_lm: str) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+2=<eos>", "response": "3"}]
    facts = run([written(tmp_path / "rows.parquet", rows), f"out={tmp_path / 'run'}"], QUIET, model=tiny_lm)
    assert facts["tokenizer"]
    assert facts["lengths"]["response"]["unit"] == "tokens"
    assert facts["text"]["sides"]["prompt"]["special"] == {"<eos>": 1}


def test_files_that_training_refuses_have_a_page_and_the_verdict_stop(tmp_path: Path, tiny_lm: str) -> None:
    rows = made(temperature=0.5)
    for row in rows[:5]:
        row["score"] = float("nan")
    data = written(tmp_path / "rows.parquet", rows)
    facts = run([data, f"out={tmp_path / 'run'}"], QUIET, model=tiny_lm)
    assert facts["verdict"]["decision"] == "stop"
    assert facts["verdict"]["reasons"][0]["said"].startswith(
        "training refuses the data: rows.parquet: unusable: 5 of 40 rows"
    )
    folder = tmp_path / "run" / "audit"
    assert {path.name for path in folder.iterdir()} == {"audit.html", "audit.json", "rejects.jsonl"}
    assert len((folder / "rejects.jsonl").read_text().splitlines()) == 5
    assert "training refuses the data" in (folder / "audit.html").read_text().lower()


def test_answers_of_one_length_that_all_finished_met_no_limit(tmp_path: Path) -> None:
    for finish, warned in (("stop", False), (None, True)):
        rows = made(finish_reason=finish, response_ids=[4, 1], behavior_log_probs=[-0.5, -0.5])
        rows[0] |= {"response_ids": [1], "behavior_log_probs": [-0.5]}
        facts = run([written(tmp_path / "rows.parquet", rows), f"out={tmp_path / 'run'}"], QUIET)
        said = "\n".join(lines(facts, sections(facts)))
        assert ("a generation limit" in said) == warned


def test_a_recipe_names_the_files(tmp_path: Path) -> None:
    data, held = written(tmp_path / "a.parquet", made()), written(tmp_path / "b.parquet", made(4))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"out: {tmp_path / 'run'}\ndata: {{train_files: [{data}], max_response_length: 5}}\n"
        f"evaluate: {{files: [{held}]}}\n"
    )
    facts = run([str(recipe)], QUIET)
    assert [file["name"] for file in facts["files"]] == ["a.parquet"]
    assert facts["rows"]["by_reason"] == {"response over the limit": 20}
    assert facts["overlap"]["shared_prompts"] == 1


def test_keys_of_demonstrations_are_the_recipes(tmp_path: Path) -> None:
    path = tmp_path / "gsm.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    words = [str(path), "sft.prompt_key=question", "sft.response_key=answer", f"out={tmp_path / 'run'}"]
    facts = run(words, QUIET, against=[str(path)])
    assert (facts["kind"], facts["rows"]["usable"], facts["overlap"]["shared_prompts"]) == ("sft", 1, 1)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give files, or set data\.train_files"):
        run([f"out={tmp_path}"], QUIET)
    with pytest.raises(DataError, match="no such file"):
        run([str(tmp_path / "none.parquet")], QUIET)
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "a", "input": "", "output": "b"}]))
    with pytest.raises(DataError, match=r"alpaca\.json: .*did you mean `instruction`\?.*rein convert"):
        run([str(path)], QUIET)
    chats = written(tmp_path / "chats.parquet", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(DataError, match="of several kinds"):
        run([chats, written(tmp_path / "rows.parquet", made(3))], QUIET)


def test_options_stand_anywhere_on_the_command_line(tmp_path: Path, tiny_lm: str) -> None:
    data = written(tmp_path / "rows.parquet", made(8, prompt="1+1="))
    out = f"out={tmp_path / 'run'}"
    assert main(["audit", "--model", tiny_lm, data, "--against", data, out]) == 0
    facts = json.loads((tmp_path / "run" / "audit" / "audit.json").read_text())
    assert facts["tokenizer"]
    assert facts["overlap"]["shared_rows"] == 8
    assert main(["audit", data, out, f"--against={data}"]) == 0
    assert main(["audit"]) == 2


def test_every_section_takes_facts_without_rows_and_what_a_model_adds(tmp_path: Path) -> None:
    rows = made(3, score=float("nan"))
    facts = run([written(tmp_path / "rows.parquet", rows), f"out={tmp_path / 'run'}"], QUIET)
    for make in SECTIONS:
        make(facts)
    facts["model"] = {
        "path": "models/some",
        "rows": 3,
        "tokens": 12,
        "nll": 0.5,
        "perplexity": 1.65,
        "surprise": {"mean": 0.1, "low": 0.0, "high": 0.2},
        "temperatures": {"0.7": -0.6, "1": -0.5},
    }
    facts["verdict"] = {"word": "Do not train", "tone": "bad", "sentences": ["Because."]}
    page = render(facts, sections(facts), "title")
    assert page.index("Because.") < page.index("nats a token")
    assert next(iter(lines(facts, sections(facts)))) == "Do not train: Because."


def test_the_audit_of_data_imports_no_torch(tmp_path: Path) -> None:
    data = written(tmp_path / "rows.parquet", made(4))
    code = (
        "import sys; from rein.cli import main; "
        f"code = main(['audit', {data!r}, 'out={tmp_path / 'run'}']); "
        "sys.exit(code or ('torch' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
