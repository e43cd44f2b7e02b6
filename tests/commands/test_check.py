"""`rein check`: counts what stages will do, sizes models without loading them, refuses what cannot run."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rein.commands import check
from rein.commands.check_memory import Parts
from rein.commands.check_plan import open_encoder
from rein.commands.check_shapes import read_shape
from rein.commands.demo import recipe_of
from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data import addition
from rein.data.fast_tokenizer import open_fast_tokenizer
from rein.errors import CheckpointError, ConfigError, DataError
from rein.models.load import load_tokenizer
from rein.models.tiny import make_tiny
from rein.tracking.console import Console

ROOT = Path(__file__).parents[2]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's own data."""
    out = tmp_path_factory.mktemp("run")
    addition.write(out / "data", 0)
    make_tiny(out / "base", seed=0)
    return out


@pytest.fixture(scope="module")
def small(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first rows of it."""
    out = tmp_path_factory.mktemp("small")
    shutil.copytree(whole / "base", out / "base")
    (out / "data").mkdir()
    for file in (whole / "data").iterdir():
        pq.write_table(pq.read_table(file).slice(0, 200), out / "data" / file.name)
    return out


def demo_recipe(out: Path, *words: str) -> Recipe:
    size = () if any("train_batch_size" in word for word in words) else ("data.train_batch_size=256",)
    return recipe_of([f"out={out}", *size, *words])[0]


def test_the_demos_plan_counts_rows_steps_and_updates(whole: Path) -> None:
    found = check.run(recipe_of([f"out={whole}"])[0], QUIET)["plans"]
    assert (found["sft"].rows_in, found["sft"].left_out, found["sft"].used) == (6000, 0, 6000)
    assert found["sft"].work == "300 steps of 96 rows"
    assert found["rollout"].used * 8 == found["score"].rows_in == found["train"].rows_in == 3840
    assert found["train"].used == 3840 - 64 * 8  # 64 prompts are held out with all their answers
    assert found["train"].made_by == "score"
    assert found["evaluate"].used == 500


def test_nothing_is_written_and_no_weights_are_read(small: Path, tmp_path: Path) -> None:
    before = sorted(p.relative_to(small) for p in small.rglob("*"))
    code = (
        "import sys; from pathlib import Path\n"
        "from rein.commands.demo import recipe_of; from rein.commands import check\n"
        "from rein.tracking.console import Console\n"
        f"check.run(recipe_of(['out={small}', 'data.train_batch_size=256'])[0], Console(quiet=True))\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())
    assert sorted(p.relative_to(small) for p in small.rglob("*")) == before


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_thousand_rows_are_checked_within_three_seconds(small: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}+{i}=", "response": f"#{2 * i}", "score": float(i % 2), "behavior_log_probs": None}
        for i in range(1000)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"model.path={small}/base", f"data.train_files={file}", "data.train_batch_size=256"]
    spent = []
    for _ in range(2):
        started, worked = time.monotonic(), cpu_of_children()
        done = subprocess.run(
            [sys.executable, "-m", "rein", "check", *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ,
            check=False,
        )
        spent += [time.monotonic() - started, cpu_of_children() - worked]  # others may use the machine
    assert done.returncode == 0, done.stderr
    assert "1,000" in done.stdout
    assert min(spent) < 3, spent


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["data.train_batch_size=4000"], ConfigError, "4000 is larger than the 1088 rows"),
        (["sft.batch_size=7000"], ConfigError, "sft.batch_size 7000 is larger than the 200 rows"),
        (["model.path=/nothere"], ConfigError, "/nothere does not exist"),
        (["sft.files=/nothere.parquet"], DataError, "/nothere.parquet"),
        (["evaluate.files=/nothere.parquet"], DataError, "/nothere.parquet"),
        (["score.reward=exactly"], ConfigError, "did you mean exact?"),
        (["score.reward=no.such:reward"], ConfigError, "no.such"),
        (["stages=[train]"], ConfigError, "data.train_files is missing"),
        (["sft.response_key=answer"], DataError, "answer"),
    ],
)
def test_what_cannot_run_is_refused(words: list[str], error: type[Exception], said: str, small: Path) -> None:
    with pytest.raises(error) as caught:
        check.run(demo_recipe(small, *words), QUIET)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.optim.lr=1e-1"], "actor.optim.lr 0.1 is outside the usual"),
        (["actor.optim.lr=1e-9"], "actor.optim.lr 1e-09 is outside the usual"),
        (["critic.optim.lr=1"], "critic.optim.lr 1 is outside"),
        (["actor.ppo_mini_batch_size=4"], "actor.ppo_mini_batch_size 4 rows is outside"),
        (["actor.ppo_max_token_len_per_gpu=20"], "more memory"),
    ],
)
def test_unusual_settings_are_warned_of(words: list[str], said: str, small: Path) -> None:
    assert any(said in warning for warning in check.run(demo_recipe(small, *words), QUIET)["warnings"])


def test_the_demo_itself_gives_no_warning(small: Path) -> None:
    assert check.run(demo_recipe(small), QUIET)["warnings"] == []


def test_what_guards_will_watch_is_said(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check.run(demo_recipe(small), Console())
    check.run(demo_recipe(small, "stages=[sft]"), Console())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("guards: ")]
    assert len(lines) == 1
    assert lines[0].startswith("guards: standard, ")
    assert lines[0].endswith(" MiB")


def test_what_is_mixed_in_is_said_and_read_before(small: Path) -> None:
    plan = check.run(demo_recipe(small, "sft.share=0.05"), QUIET)["plans"]["train"]
    assert any("sft.share 0.05: 6.4 of 200 demonstrations to an actor update" in note for note in plan.notes)
    words = ("sft.share=0.05", f"sft.files={small}/data/nothere.parquet", "stages=[rollout,score,train]")
    with pytest.raises(DataError, match=r"nothere\.parquet"):
        check.run(demo_recipe(small, *words), QUIET)


def test_models_of_very_different_sizes_are_warned_of(small: Path, tmp_path: Path) -> None:
    critic = make_tiny(tmp_path / "critic", seed=0, hidden=32, layers=1)
    found = check.run(demo_recipe(small, f"critic.model.path={critic}"), QUIET)
    assert any("times the critic's size" in warning for warning in found["warnings"])
    equal = check.run(demo_recipe(small, f"critic.model.path={small}/base"), QUIET)
    assert equal["warnings"] == []


def test_sizes_come_from_headers_alone(small: Path) -> None:
    import safetensors

    shape = read_shape(small / "base")
    assert shape is not None
    with safetensors.safe_open(small / "base" / "model.safetensors", framework="np") as file:
        total = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    assert shape.parameters == total
    assert (shape.hidden, shape.layers, shape.key_value) == (128, 3, 64)
    assert read_shape(small) is None


def test_memory_grows_with_the_token_budget_and_shrinks_with_lora(small: Path) -> None:
    def train_part(*words: str) -> Parts:
        found: Parts = check.run(demo_recipe(small, *words), QUIET)["memory"]["train"]
        return found

    plain = train_part()
    assert train_part("actor.ppo_max_token_len_per_gpu=8192").activations > plain.activations
    assert train_part("model.lora_rank=2").adam < plain.adam / 4
    assert train_part("model.enable_gradient_checkpointing=true").activations < plain.activations
    assert train_part("model.logits_chunk=64").probe < plain.probe
    assert train_part("model.dtype=float64").weights == 2 * plain.weights
    exact = train_part("actor.kl_loss_type=full")
    shape = read_shape(small / "base")
    assert shape is not None
    assert exact.weights - plain.weights == 4 * shape.parameters  # a frozen copy of the start policy
    adapted, words = train_part("model.lora_rank=2"), ("model.lora_rank=2", "actor.kl_loss_type=full")
    assert train_part(*words).weights == adapted.weights
    assert train_part(*words).activations >= adapted.activations


def test_a_critic_on_the_actor_s_trunk_costs_its_adapters_alone(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = read_shape(small / "base")
    assert shape is not None
    adapters = 4 * sum(rows + columns for rows, columns in shape.linear)
    share = "critic.model.share_trunk=true"
    for precision, width in (("exact", 4), ("fast", 6)):  # bytes of a weight, with its copy
        words = ("model.lora_rank=4", f"model.precision={precision}")
        one, other = (check.run(demo_recipe(small, *words, *more), QUIET) for more in ((), (share,)))
        apart, shared, plan = one["memory"]["train"], other["memory"]["train"], other["plans"]["train"]
        states = 64 * (plan.mean_tokens - plan.mean_prompt) * shape.hidden * 4  # kept by the probe
        assert shared.weights - states == width * (shape.parameters + 2 * adapters)
        assert apart.weights - shared.weights == width * shape.parameters
        assert (shared.adam, shared.activations) == (apart.adam, apart.activations)
    check.run(demo_recipe(small, "model.lora_rank=4", share), Console())
    assert "  critic: adapters on the trunk of the actor\n" in capsys.readouterr().out


def test_a_thousand_chats_are_rendered_within_a_second(small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small / "base", tmp_path / "base")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim }}{% endif %}{% endfor %}"
    )
    tokenizer = open_fast_tokenizer(folder, "model.path")
    assert tokenizer is not None
    started = time.process_time()
    for i in range(1000):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": f"{i}+1="}])
        assert ids == tokenizer.encode(f"{i}+1=")
    assert time.process_time() - started < 1


def test_the_fast_tokenizer_gives_the_ids_of_the_real_one(small: Path) -> None:
    folder = small / "base"
    fast, real = open_fast_tokenizer(folder, "model.path"), load_tokenizer(str(folder))
    assert fast is not None
    for text in ("347+258=", "7+8+0=15;#605", "", "0" * 50):
        assert fast.encode(text) == real.encode(text)
        assert fast.decode(real.encode(text)) == real.decode(real.encode(text))
    assert (fast.eos_token_id, fast.pad_token_id, fast.bos_token_id) == (
        real.eos_token_id,
        real.pad_token_id,
        real.bos_token_id,
    )
    assert len(fast) == len(real)


def test_the_fast_tokenizer_renders_the_chat_template_as_the_real_one(small: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small / "base")
    tokenizer.chat_template = (
        "{% for m in messages %}\n{% if m['role'] == 'user' %}+{{ m['content'] }}{% else %}"
        "-{{ m['content'] }}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}#{% endif %}"
        "{% for t in tools or [] %}{{ t | tojson | length }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    fast = open_fast_tokenizer(tmp_path, "model.path")
    assert fast is not None
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    tool = {"type": "function", "function": {"name": "é", "parameters": {"b": [1, None], "a": 0.5}}}
    for marker, tokenize, tools in product((True, False), (True, False), (None, [tool])):
        asked = {"tools": tools, "tokenize": tokenize, "add_generation_prompt": marker}
        ours, theirs = (each.apply_chat_template(messages, **asked) for each in (fast, tokenizer))
        assert ours == (theirs["input_ids"] if tokenize and not isinstance(theirs, list) else theirs)


def test_a_folder_without_tokenizer_json_falls_back_to_transformers(small: Path, tmp_path: Path) -> None:
    assert open_fast_tokenizer(tmp_path, "model.path") is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_encoder(load(None, [])[0], tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json"])
def test_a_damaged_model_folder_is_told_by_the_plan_too(name: str, small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small / "base", tmp_path / "base")
    (folder / name).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read .*; write it anew"):
        open_encoder(load(None, [])[0], folder)


def test_rounds_of_fresh_rollouts_are_counted(whole: Path) -> None:
    words = ["trainer.refresh_every=2", "rollout.max_prompts=200"]
    found = check.run(recipe_of([f"out={whole}", *words])[0], QUIET)["plans"]["train"]
    assert found.batches == 3  # of 1,088 rows that are fewer than train_batch_size, thrice over
    (said,) = [note for note in found.notes if "refresh_every" in note]
    assert said.endswith(
        "1 more rounds, in each of which up to 200 of 480 prompts get 8 fresh answers, scored by exact"
    )
