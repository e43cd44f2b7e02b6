"""vLLM itself, in the environment of REIN_VLLM_PYTHON (`make vllm` makes it), and what goes wrong without."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rows_made import prompts, row
from transformers import AutoModelForCausalLM

from rein.cli import main
from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data import addition
from rein.engines.hf import HfEngine
from rein.engines.piped import Piped
from rein.engines.vllm import VllmEngine
from rein.errors import ConfigError, EngineError
from rein.models.actor import Actor, load_actor
from rein.models.load import load_tokenizer
from rein.models.tiny import make_tiny
from rein.stages import pipeline
from rein.stages.engines import KEPT, close_engines, engine_of
from rein.tracking.console import Console
from rein.types import Completion

PYTHON = os.environ.get("REIN_VLLM_PYTHON")
SMOLLM2 = Path(os.environ.get("REIN_SMOLLM2", "runs/smollm2"))
TEXTS = [[3, 4, 13, 5, 15], [7], [3, 3, 3, 3, 3, 3, 3, 9], [5, 6], [12, 11, 10], [8, 8, 8]]
NEAR = 1e-2  # nats between vLLM's log-probs and the training forward's, in float32
SMALL = {"max_model_len": 64, "gpu_memory_utilization": 0.05, "enforce_eager": True, "threads": 1}


def vllm(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs vLLM itself."""
    there = pytest.mark.skipif(PYTHON is None, reason="REIN_VLLM_PYTHON is not set; make vllm")
    marked: Callable[..., None] = pytest.mark.slow(there(test))
    return marked


def test_an_interpreter_that_is_none_is_named(tiny_lm: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.python: /nowhere/python cannot be run \(No such"):
        VllmEngine(tiny_lm, [1], python="/nowhere/python", max_model_len=64)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is in this environment")
def test_an_environment_without_vllm_is_told_of_one_of_its_own(tiny_lm: str) -> None:
    with pytest.raises(ConfigError, match=r"has no vLLM \(No module named 'vllm'\); make an environment of"):
        VllmEngine(tiny_lm, [1], max_model_len=64)


def shell(folder: Path, text: str) -> str:
    """What stands where an interpreter should."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_a_process_that_dies_is_quoted(tiny_lm: str, tmp_path: Path) -> None:
    dies = shell(tmp_path, "echo 'not the reason' >&2; echo 'no room on the device' >&2; exit 3")
    with pytest.raises(
        EngineError, match=r"ended with exit 3 .* \| no room on the device; run the stage"
    ) as told:
        VllmEngine(tiny_lm, [1], python=dies, max_model_len=64)
    assert told.value.exit_code == 7


def test_a_process_that_is_never_ready_is_ended(tiny_lm: str, tmp_path: Path) -> None:
    waits = shell(tmp_path, f"echo $$ > {tmp_path}/pid; echo loading >&2; while read line; do :; done")
    with pytest.raises(
        EngineError, match=r"not ready after 1 s \| loading; set rollout\.vllm\.start_timeout"
    ):
        VllmEngine(tiny_lm, [1], python=waits, max_model_len=64, start_timeout=1.0)
    assert gone(int((tmp_path / "pid").read_text()))


def gone(*pids: int, within: float = 15.0) -> bool:
    end = time.monotonic() + within
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def with_weights(folder: Path, seed: int, base: Path) -> Path:
    """The model of `base` with larger random weights, so that answers differ and end at different lengths."""
    made = load_actor(str(base))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25, generator=generator)
    made.save(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four of one architecture; heads of 32 numbers, the fewest that vLLM computes on a CPU."""
    folder = tmp_path_factory.mktemp("vllm")
    base = make_tiny(folder / "base", seed=0)
    return [with_weights(folder / f"model{seed}", seed, base) for seed in range(4)]


@pytest.fixture(scope="module")
def actor(models: list[Path]) -> Actor:
    return load_actor(str(models[0]))


@pytest.fixture(scope="module")
def kept(models: list[Path]) -> Iterator[VllmEngine]:
    made = VllmEngine(str(models[0]), [1], python=PYTHON, **SMALL)  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.fixture
def engine(kept: VllmEngine, models: list[Path]) -> VllmEngine:
    """With the first model's weights, whatever the test before did."""
    kept.load(str(models[0]))
    return kept


def answers(
    made: Any, *, texts: list[list[int]] = TEXTS, n: int = 3, temperature: float = 1.0, top_p: float = 1.0,
    room: int = 12, seed: int = 0, **options: Any,
) -> list[list[Completion]]:  # fmt: skip
    found: list[list[Completion]] = made.generate(
        prompts(texts), n=n, temperature=temperature, top_p=top_p, max_new_tokens=room, seed=seed, **options
    )
    return found


def ids(found: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.response_ids.tolist() for completion in some] for some in found]


def apart(
    found: list[list[Completion]], actor: Actor, temperature: float = 1.0, texts: list[list[int]] = TEXTS
) -> float:
    """The largest difference from the training forward."""
    rows = [row(text, c.response_ids.tolist()) for text, some in zip(texts, found, strict=True) for c in some]
    with torch.no_grad():
        trained, _ = actor.log_probs(rows, torch.full((len(rows),), temperature))
    mine = [torch.from_numpy(completion.log_probs) for some in found for completion in some]
    return max(float((one - trained[i, : len(one)]).abs().max()) for i, one in enumerate(mine))


@vllm
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_log_probs_are_those_of_the_training_forward(
    engine: VllmEngine, actor: Actor, temperature: float, top_p: float
) -> None:
    """At the sampling temperature, over the whole vocabulary, whatever top-p cuts."""
    assert apart(answers(engine, temperature=temperature, top_p=top_p), actor, temperature) < NEAR


@vllm
def test_greedy_answers_are_those_of_the_hf_engine(engine: VllmEngine, actor: Actor) -> None:
    found = answers(engine, temperature=0.0)
    ours = answers(HfEngine(actor.model, actor.tokenizer, [1]), temperature=0.0)
    assert ids(found) == ids(ours)
    for some, others in zip(found, ours, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.finish_reason == other.finish_reason
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=NEAR)


@vllm
def test_an_answer_is_drawn_by_seed_place_and_sample(engine: VllmEngine) -> None:
    told: list[int] = []
    found = ids(answers(engine, seed=3, advance=told.append))
    assert told == [1] * len(TEXTS)
    assert found == ids(answers(engine, seed=3))
    assert found != ids(answers(engine, seed=4))
    assert found[2:4] == ids(answers(engine, texts=TEXTS[2:4], seed=3, places=[2, 3]))
    assert all(len({tuple(answer) for answer in some}) > 1 for some in ids(answers(engine, temperature=1.7)))


@vllm
def test_an_answer_ends_with_the_first_stop_id_or_at_the_limit(engine: VllmEngine) -> None:
    found = [c for some in answers(engine) for c in some]
    assert {c.finish_reason for c in found} == {"stop", "length"}
    for completion in found:
        written = completion.response_ids.tolist()
        assert len(completion.log_probs) == len(written)
        assert 1 not in written[:-1]
        assert (written[-1] == 1) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(written) == 12


@vllm
def test_a_prompt_that_fills_the_context_is_named_and_a_long_one_gets_what_is_left(
    engine: VllmEngine,
) -> None:
    with pytest.raises(EngineError, match=r"made prompt 1: prompt of 64 tokens fills .* context of 64"):
        answers(engine, texts=[[3], [3] * 64])
    ((completion,),) = answers(engine, texts=[[3] * 60], n=1, temperature=0.0)
    assert len(completion.response_ids) <= 4


@vllm
def test_refreshed_weights_are_taken_without_a_restart(engine: VllmEngine, models: list[Path]) -> None:
    """Prompts stay the same, so keys and values of the former weights would be found again were they kept."""
    pid = engine.pid
    for folder in (*models[1:], models[0]):
        engine.load(str(folder))
        found = answers(engine)
        near = {other.name: apart(found, load_actor(str(other))) < NEAR for other in models}
        assert near == {other.name: other == folder for other in models}
        assert engine.pid == pid


@vllm
def test_an_interruption_ends_the_process_and_the_next_load_starts_another(
    engine: VllmEngine, actor: Actor, models: list[Path]
) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    pid = engine.pid
    with pytest.raises(KeyboardInterrupt):
        answers(engine, advance=interrupt)
    assert gone(pid)
    with pytest.raises(EngineError, match="its process is closed"):
        answers(engine)
    engine.load(str(models[0]))
    assert engine.pid != pid
    assert apart(answers(engine), actor) < NEAR


@vllm
def test_stop_texts_and_a_death(models: list[Path], actor: Actor) -> None:
    plain = answers(HfEngine(actor.model, actor.tokenizer, []), n=1, temperature=0.0, room=20)
    texts = ["never", actor.tokenizer.decode(plain[0][0].response_ids[5:7])]
    ours = HfEngine(actor.model, actor.tokenizer, [1], stop_texts=texts)
    made = VllmEngine(str(models[0]), [1], python=PYTHON, stop_texts=texts, **SMALL)  # type: ignore[arg-type]
    found = answers(made, temperature=0.0, room=20)
    expected = answers(ours, temperature=0.0, room=20)
    assert ids(found) == ids(expected)
    assert [c.finish_reason for (c, *_) in found] == [c.finish_reason for (c, *_) in expected]
    assert apart(answers(made, room=20), actor) < NEAR
    os.kill(made.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="its process ended with SIGKILL"):
        answers(made)


DRIVER = """
import sys, time
from rein.engines.vllm import VllmEngine
folder, python = sys.argv[1:]
engine = VllmEngine(folder, [1], python=python, max_model_len=64, gpu_memory_utilization=.05,
                    enforce_eager=True)
print(engine.pid, flush=True)
time.sleep(600)
"""


@vllm
def test_nothing_is_left_of_a_process_that_is_killed(models: list[Path]) -> None:
    assert PYTHON
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, models[0], PYTHON], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    group = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _group(int(p.name)) == pid]
    assert pid in group
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert gone(*group)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def recipe(folder: Path, out: Path, *words: str) -> Recipe:
    own = [
        f"out={out}", f"model.path={folder}", f"rollout.path={folder}", f"rollout.files={out}/prompts.jsonl",
        "rollout.engine=vllm", f"rollout.vllm.python={PYTHON}", "rollout.vllm.enforce_eager=true",
        "rollout.gpu_memory_utilization=0.1", "threads=1", "rollout.n=4", "data.max_prompt_length=64",
        "data.max_response_length=24",
    ]  # fmt: skip
    given = {word.partition("=")[0] for word in words}
    return load(None, [*(word for word in own if word.partition("=")[0] not in given), *words])[0]


@pytest.fixture
def no_engine() -> Iterator[None]:
    close_engines()
    yield
    close_engines()


@vllm
@pytest.mark.usefixtures("no_engine")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own use of it
def test_stages_of_one_process_share_the_engine(models: list[Path], tmp_path: Path) -> None:
    """A folder written anew is seen, and an adapter's weights are put into those it stands on."""
    folder = tmp_path / "policy"
    shutil.copytree(models[0], folder)
    first = engine_of(recipe(folder, tmp_path), load_actor(str(folder)))
    assert engine_of(recipe(folder, tmp_path), load_actor(str(folder))) is first
    pid = KEPT[0].engine.pid
    shutil.rmtree(folder)
    shutil.copytree(models[1], folder)
    again = load_actor(str(folder))
    assert engine_of(recipe(folder, tmp_path), again) is first
    assert apart(answers(first), again) < NEAR
    adapter = adapter_of(folder, tmp_path / "adapter")
    adapted = load_actor(str(adapter))
    assert engine_of(recipe(adapter, tmp_path), adapted) is first
    found = answers(first)
    assert apart(found, adapted) < NEAR < apart(found, again)
    assert KEPT[0].engine.pid == pid
    close_engines()
    assert gone(pid)


def adapter_of(base: Path, folder: Path) -> Path:
    """An adapter folder of peft's that changes what the model says."""
    model = AutoModelForCausalLM.from_pretrained(base)
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=generator)
    made.save_pretrained(folder)
    load_tokenizer(str(base)).save_pretrained(str(folder))
    return folder


def rolled_out(
    folder: Path, out: Path, texts: list[str], capsys: pytest.CaptureFixture[str], *words: str
) -> float:
    """`rein rollout` with vLLM; the largest difference that it found itself."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": text}) for text in texts]
    (out / "prompts.jsonl").write_text("\n".join(lines))
    options = [
        f"out={out}", f"rollout.path={folder}", f"rollout.files={out}/prompts.jsonl", "rollout.engine=vllm",
        f"rollout.vllm.python={PYTHON}", "rollout.gpu_memory_utilization=0.2", "threads=1", "rollout.n=4",
        "data.max_prompt_length=128", "resume=never", *words,
    ]  # fmt: skip
    assert main(["rollout", *options]) == 0, capsys.readouterr().err
    table = pq.read_table(out / "rollout" / "trajectories.parquet")
    assert table.num_rows == 4 * len(texts)
    rows = table.to_pylist()
    assert all(len(one["response_ids"]) == len(one["behavior_log_probs"]) for one in rows)
    assert len({tuple(one["response_ids"]) for one in rows}) > len(texts)
    return float(table.schema.metadata[b"rein.log_prob_diff_max"])


SUMS = [f"{i * 37 % 1000}+{i * 91 % 1000}=" for i in range(40)]
QUESTIONS = [f"Write one sentence about the number {i}." for i in range(6)]


@vllm
@pytest.mark.usefixtures("no_engine")
def test_the_demos_model_and_refreshed_weights_through_rein_rollout(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = set()
    for i, folder in enumerate((models[0], models[1], models[2])):
        words = ("data.max_response_length=48", f"rollout.policy_version={i}")
        assert rolled_out(folder, tmp_path / f"run{i}", SUMS, capsys, *words) < NEAR
        pids.add(KEPT[0].engine.pid)
    assert len(pids) == 1


@vllm
@pytest.mark.usefixtures("no_engine")
@pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not made; make vllm")
def test_smollm2_and_refreshed_weights_through_rein_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = set()
    folder = SMOLLM2
    for i in range(3):
        words = ("data.max_response_length=24", "rollout.temperature=0.8", "rollout.top_p=0.95")
        difference = rolled_out(folder, tmp_path / f"run{i}", QUESTIONS, capsys, *words)
        with capsys.disabled():
            print(f"\nSmolLM2, round {i}: log-probs within {difference:.2g}")
        assert difference < NEAR
        pids.add(KEPT[0].engine.pid)
        if i < 2:
            folder = shaken(folder, tmp_path / f"model{i}", seed=i)
    assert len(pids) == 1


@vllm
@pytest.mark.usefixtures("no_engine")
def test_rounds_of_fresh_rollouts_share_one_process(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On-policy PPO: each round's answers are drawn from the actor as training left it."""
    addition.write(tmp_path / "data", 0)
    words = f"""
        out={tmp_path}/run cache={tmp_path}/cache stages=[rollout,score,train]
        rollout.files={tmp_path}/data/prompts.parquet rollout.n=1
        data.max_prompt_length=16 data.max_response_length=6 rollout.max_prompts=160 score.reward=length
        data.train_batch_size=48 actor.ppo_mini_batch_size=24 actor.ppo_epochs=1 trainer.critic_warmup=1
        actor.optim.lr=1e-3 trainer.total_training_steps=3 trainer.refresh_every=1 trainer.val_prompts=2
        trainer.val_before_train=false guards.preset=off
    """.split()
    pids = []
    started = VllmEngine._started

    def noted(engine: VllmEngine, folder: str) -> Piped:
        process = started(engine, folder)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(VllmEngine, "_started", noted)
    pipeline.run(recipe(models[0], tmp_path, *words), Console(quiet=True))
    assert pids == [KEPT[0].engine.pid]
    for number, folder in enumerate((tmp_path / "run", tmp_path / "run/round-1", tmp_path / "run/round-2")):
        table = pq.read_table(folder / "rollout" / "trajectories.parquet")
        assert set(table["policy_version"].to_pylist()) == {number}
        assert float(table.schema.metadata[b"rein.log_prob_diff_max"]) < NEAR


def shaken(base: Path, folder: Path, seed: int) -> Path:
    """Each weight a little larger or smaller, by far more than NEAR in log-probs."""
    made = load_actor(str(base))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
    made.save(folder)
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Start vLLM's own server for a folder; its address, with the version part."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> str:
        assert PYTHON
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # Not `vllm serve`, which looks for a package called vllm: that for CPUs is called otherwise.
        words = [
            PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
            "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64",
            "--gpu-memory-utilization", "0.1", "--served-model-name", "policy",
        ]  # fmt: skip
        environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        log = folder.with_suffix(".log").open("wb")
        with log:
            started.append(
                subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
        until = time.monotonic() + 400
        while time.monotonic() < until and started[-1].poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return f"http://127.0.0.1:{port}/v1"
            except OSError:
                time.sleep(1)
        pytest.fail(folder.with_suffix(".log").read_text()[-2000:])

    yield start
    for process in started:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@vllm
@pytest.mark.usefixtures("no_proxy")
def test_vllm_serve_answers_with_log_probs_and_token_ids(
    models: list[Path], actor: Actor, serve: Callable[[Path], str]
) -> None:
    url = serve(models[0])
    for text in TEXTS:
        body = {
            "model": "policy", "prompt": text, "max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 5,
            "logprobs": 0, "return_token_ids": True, "stop_token_ids": [1],
        }  # fmt: skip
        choices = asked(url, body)["choices"]
        assert len(choices) == 2
        found = [
            Completion(
                np.array(choice["token_ids"]),
                np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32),
                choice["finish_reason"],
            )
            for choice in choices
        ]
        assert apart([found], actor, texts=[text]) < NEAR
