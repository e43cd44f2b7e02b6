"""A device that is not the CPU, on machines that have none: its tensors refuse to be mixed with the CPU's.

They compute on the CPU, so what goes wrong on a GPU because a tensor lies elsewhere goes wrong here, and what
goes right gives the CPU's numbers. Run as a script: a model folder in, one JSON line out, how far everything
that a stage asks of models is from the CPU's answers. torch must not have run a backward pass before it is
imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rows_made import prompts, random_trajectories
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from training_made import experience_of, learner_of, models, recipe

from rein.engines.hf import HfEngine
from rein.models.actor import load_actor
from rein.models.place import CPU, Place
from rein.models.reference import Reference
from rein.models.reward_model import load_reward_model
from rein.probe import Probe
from rein.types import Update

NAME = "elsewhere"
ROWS = 12
aten = torch.ops.aten
# A GPU, too, takes indices from the CPU.
MAY_MIX = {aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put_.default}


class Elsewhere(Tensor):
    """Holds a CPU tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=f"{NAME}:0",
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


def computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator on the CPU; its answer lies where its tensors do, or where it is asked to."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    of_it = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    there, device = bool(of_it), kwargs.get("device")
    if there and function not in MAY_MIX and any(t.dim() for t in tensors if not isinstance(t, Elsewhere)):
        raise RuntimeError(f"{function}: some of its tensors lie on the CPU, some elsewhere")
    if device is not None:
        there = torch.device(device).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu") if there else device}
    if function is aten.copy_.default:
        there = isinstance(args[0], Elsewhere)
    plain_args, plain_kwargs = tree_map_only(Elsewhere, lambda tensor: tensor.inner, (args, kwargs))
    out = function(*plain_args, **plain_kwargs)
    if not there:
        return out
    out = tree_map_only(Tensor, Elsewhere, out)
    return return_and_correct_aliasing(function, args, kwargs, out) if of_it else out


class Factories(TorchDispatchMode):
    """Tensors that are asked for on the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


class Literals(TorchFunctionMode):
    """torch.tensor, which asks no dispatcher."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if function is torch.tensor else None
        found = function(*args, **kwargs)
        return found if device is None else found.to(device)


_setup_privateuseone_for_python_backend(NAME)


@contextmanager
def another_device() -> Iterator[str]:
    torch.__future__.set_swap_module_params_on_conversion(True)  # one matrix for both ends stays one
    with Factories(), Literals():
        yield NAME


def answers(path: str, place: Place, **options: Any) -> dict[str, Tensor]:
    """Passes, an exact KL, both updates, the probe, generation, a restore, scores, a saved folder."""
    actor, critic = models(path, place=place, **options)
    some = recipe(
        ROWS,
        actor={"ppo_mini_batch_size": ROWS, "ppo_epochs": 1, "entropy_coeff": 0.01, "kl_loss_type": "full"},
    )
    rows = random_trajectories(ROWS, holes=True, temperatures=(1.0, 0.7))
    probe, reference = Probe(actor, rows, 64), Reference(actor)
    experience = experience_of(some, actor, critic, rows, start=reference)
    assert experience.values is not None
    learner = learner_of(some, actor, critic, start=reference)
    found = {"old": experience.old_log_probs, "values": experience.values}
    found["plain"] = actor.log_probs(rows, torch.ones(ROWS))[0].detach()
    for role in ("critic", "actor"):
        metrics = learner.backward(Update(role, tuple(range(ROWS)), 0), experience)
        found |= {name: torch.tensor(value) for name, value in metrics.items()}
        learner.apply(role)
    found |= {name: torch.tensor(value) for name, value in probe.measure().items()}
    for fused in (True, False):
        engine = HfEngine(actor.model, actor.tokenizer, actor.stop_ids, batch_size=3, fused=fused)
        asked = prompts([[3, 4, 5], [6, 7], [8, 9, 10, 11], [3, 3]])
        said = engine.generate(asked, n=2, temperature=0.0, top_p=1.0, max_new_tokens=8, seed=0)
        ids = [torch.from_numpy(completion.response_ids) for each in said for completion in each]
        found[f"ids {fused}"] = torch.cat(ids)
    tensors, meta = learner.state()
    saved = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.zero_()
    learner.restore(saved, meta)
    found["restored"] = actor.log_probs(rows, torch.ones(ROWS))[0].detach()
    found["scores"] = load_reward_model(path, place=place, dtype=options["dtype"]).scores(rows).detach()
    with tempfile.TemporaryDirectory() as folder:
        actor.save(Path(folder) / "saved")
        found["saved"] = load_actor(f"{folder}/saved", dtype=options["dtype"]).log_probs(
            rows, torch.ones(ROWS)
        )[0]
    return found


def apart(path: str, **options: Any) -> dict[str, float]:
    """The largest difference of each answer, over the largest number in it."""
    here = answers(path, CPU, **options)
    with another_device() as name:
        there = answers(path, Place(name), **options)
    assert all(tensor.device.type == "cpu" for tensor in there.values())
    sizes = {name: max(float(tensor.abs().max()), 1e-6) for name, tensor in here.items()}
    return {
        name: float((here[name].double() - there[name].double()).abs().max()) / sizes[name] for name in here
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(apart(sys.argv[1], **json.loads(sys.argv[2]))))
