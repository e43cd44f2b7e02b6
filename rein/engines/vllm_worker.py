"""vLLM behind two pipes: run by this file's path, with the interpreter of an environment that has vLLM.

Rein is not installed there, so only the standard library and vllm are imported. Lines of JSON come on
standard input: first the settings of vllm.LLM, then requests; lines of JSON go out on what was standard
output, which from then on is standard error, so that nothing vLLM prints gets between them.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Beside this file lie modules of Rein, one of them called vllm: they are not what `import vllm` means.
sys.path[:] = [
    p for p in sys.path if os.path.realpath(p or ".") != os.path.dirname(os.path.realpath(__file__))
]
PR_SET_PDEATHSIG = 1
GRACE = 5.0  # seconds to end in good order once nobody asks any more
Tell = Callable[[dict[str, Any]], None]


class Added:
    """To each of vLLM's workers, which hold the model."""

    model_runner: Any

    def scale_logits(self, temperature: float) -> None:
        """Let the model itself give logits / temperature.

        vLLM's log-probs are either of the plain logits or of what top-p left; those at the sampling
        temperature over the whole vocabulary are the plain ones of such a model.
        """
        model = self.model_runner.get_model()
        vars(model).pop("compute_logits", None)
        if temperature != 1:
            plain = model.compute_logits

            def compute_logits(*given: Any, **options: Any) -> Any:
                logits = plain(*given, **options)
                return None if logits is None else logits.float() / temperature  # None: of a rank beside

            model.compute_logits = compute_logits

    def take_weights(self, folder: str) -> None:
        """Those of another folder of the same architecture."""
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]
        # On a CPU layers hold their weights in a form of oneDNN's; a head tied to the embeddings, which has
        # none in the folder, is left with its former one.
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "cpu_linear") and module.weight.numel() > 0:
                module.quant_method.process_weights_after_loading(module)


def generate(llm: Any, ask: dict[str, Any], tell: Tell) -> None:
    """Tell each answer when it is done: its place in `asks`, ids, log-probs and why it ended."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm.collective_rpc("scale_logits", args=(ask["temperature"] or 1.0,))
    for i, (prompt, room, seed) in enumerate(ask["asks"]):
        manner = SamplingParams(
            temperature=1.0 if ask["temperature"] else 0.0, top_p=ask["top_p"], max_tokens=room, seed=seed,
            ignore_eos=True, stop_token_ids=ask["stop_ids"], stop=ask["stop_texts"] or None,
            include_stop_str_in_output=True, detokenize=bool(ask["stop_texts"]), skip_special_tokens=False,
            logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": ask["prompts"][prompt]}, manner)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            (answer,) = output.outputs
            ids = list(answer.token_ids)
            log_probs = [some[i].logprob for i, some in zip(ids, answer.logprobs, strict=False)]
            tell({"answer": [int(output.request_id), ids, log_probs, answer.finish_reason]})


def load(llm: Any, folder: str) -> None:
    """Take the weights of another folder of the same architecture."""
    llm.collective_rpc("take_weights", args=(folder,))
    if not llm.reset_prefix_cache():  # holds keys and values of the former weights
        raise RuntimeError("its prefix cache could not be emptied")


def serve(requests: queue.SimpleQueue[str | None], tell: Tell) -> None:
    """Answer requests until there are no more."""
    given = requests.get()
    if given is None:
        return
    settings = json.loads(given)
    try:
        import vllm
    except ModuleNotFoundError as error:
        tell({"missing": str(error)})
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        settings["block_size"] = 32  # its own 128 is longer than most prompts, of which nothing would be kept
    llm = vllm.LLM(**settings, worker_extension_cls="__main__.Added")
    tell({"ready": vllm.__version__})
    while (given := requests.get()) is not None:
        request = json.loads(given)
        if "load" in request:
            load(llm, request["load"])
        else:
            generate(llm, request["generate"], tell)
        tell({"done": True})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _die_with(int(sys.argv[1]))
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        requests.put(None)
        time.sleep(GRACE)
        os._exit(1)

    def tell(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    threading.Thread(target=read, daemon=True).start()
    try:
        serve(requests, tell)
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        raise


def _die_with(parent: int) -> None:
    """End by force with the process that started this one; 0: its pipes alone say that it ended."""
    if parent:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        except (OSError, AttributeError):  # Linux alone knows
            return
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
