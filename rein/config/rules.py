"""Rules that hold between keys of a whole recipe, and which KL coefficient is meant.

Reads a Recipe; opens nothing. A broken rule is the key to blame and what to say of it.
"""

from __future__ import annotations

from typing import NamedTuple

from rein.config.loss_rules import Broken, of_correction, of_loss
from rein.config.methods import ONLY_PER_ROW, needs
from rein.config.recipe import Recipe

KL_LOSS_COEF = 0.05  # where no key gives one
KL_IN_REWARD_COEF = 0.001  # verl's
_K1_VALUED = ("kl", "k1", "kl+", "k1+")  # the forms whose value is log actor - log reference
_K1_LOSSES = ("kl", "k1")
_EXACT = ("full", "full+")
_HALF_KERNELS = ("flash_attention_2", "varlen")
_BEFORE = (  # what must come first where both are run
    ("sft", ("reward", "rollout", "train", "evaluate", "export")),
    ("reward", ("score",)),
    ("rollout", ("score", "train")),
    ("score", ("train",)),
    ("train", ("evaluate", "export", "report")),
    ("evaluate", ("export", "report")),
)


class KlCoefs(NamedTuple):
    """The coefficients of the two KLs (0: off) and the words that say where they come from."""

    in_reward: float
    in_loss: float
    note: str


def kl_coefs(recipe: Recipe, *, known: bool | None = None) -> KlCoefs:
    """`algorithm.kl_ctrl.kl_coef` is of the KL that is on; `actor.kl_loss_coef` wins for the loss's.

    `known`: whether the behavior policy is, where the rows have been seen.
    """
    control, own = recipe.algorithm.kl_ctrl, recipe.actor.kl_loss_coef
    shared, name = control.kl_coef, "algorithm.kl_ctrl.kl_coef"
    if control.schedule is not None:
        shared, name = control.schedule[0][1], "algorithm.kl_ctrl.schedule, at the start"
    in_reward = in_loss = 0.0
    words = []
    if recipe.algorithm.use_kl_in_reward:
        in_reward = KL_IN_REWARD_COEF if shared is None else shared
        words.append(f"KL in reward {in_reward:g} ({'default' if shared is None else name})")
    if recipe.actor.use_kl_loss:
        given = shared if own is None else own
        in_loss = KL_LOSS_COEF if given is None else given
        source = "actor.kl_loss_coef" if own is not None else name
        unsettled = {
            None: "off_policy (k3_soft where behavior is unknown)",
            True: "off_policy",
            False: "k3_soft",
        }
        kind = recipe.actor.kl_loss_type or unsettled[known]
        words.append(f"KL loss {in_loss:g} ({'default' if given is None else source}), {kind}")
    if not words:
        words.append("no KL to the reference in the loss or the reward")
    if shared is not None and not recipe.algorithm.use_kl_in_reward and own is not None:
        words.append(f"algorithm.kl_ctrl.kl_coef {shared:g} is not used")
    return KlCoefs(in_reward, in_loss, "; ".join(words))


def sums_over_vocabulary(recipe: Recipe) -> bool:
    """Whether a KL that is on is exact (`full`): it takes the reference's logits, not just log-probs."""
    kinds = [recipe.actor.kl_loss_type] if recipe.actor.use_kl_loss else []
    kinds += [recipe.algorithm.kl_penalty] if recipe.algorithm.use_kl_in_reward else []
    return any(kind in _EXACT for kind in kinds)


def broken(recipe: Recipe) -> list[Broken]:
    """What a recipe breaks of what holds between its keys."""
    return [
        *_kl(recipe),
        *_controller(recipe),
        *of_loss(recipe),
        *of_correction(recipe),
        *_shaping(recipe),
        *_mixing(recipe),
        *_behavior(recipe),
        *_gpu(recipe),
        *_precision(recipe),
        *_trunk(recipe),
        *_processes(recipe),
        *_stages(recipe),
        *_rounds(recipe),
    ]


def _rounds(recipe: Recipe) -> list[Broken]:
    if recipe.trainer.refresh_every < 1 or recipe.rollout.engine != "server":
        return []
    why = "asks for the actor's own answers, and a server keeps the weights that it was given; write"
    return [Broken("trainer.refresh_every", f"{why} rollout.engine=hf or vllm")]


def _processes(recipe: Recipe) -> list[Broken]:
    ranks, size = recipe.nproc * recipe.nnodes, recipe.fsdp.ulysses_sequence_parallel_size
    found, where = [], f"runtime={recipe.runtime}"
    if recipe.runtime == "single":
        found = [
            Broken(key, f"{getattr(recipe, key)}, but runtime is single; write runtime=fsdp or ray")
            for key in ("nproc", "nnodes")
            if getattr(recipe, key) > 1
        ]
    elif recipe.critic.model.share_trunk:
        key = "critic.model.share_trunk"
        found = [Broken(key, f"true, but under {where} a model has its own trunk; write false")]
    elif recipe.model.precision == "fast" and sums_over_vocabulary(recipe) and not recipe.model.lora_rank:
        why = f"fast, but under {where} the reference of an exact KL is float32's; write exact, or use LoRA"
        found = [Broken("model.precision", why)]
    if ranks % size:
        key = "fsdp.ulysses_sequence_parallel_size"
        do = "write runtime=fsdp or ray with nproc" if recipe.runtime == "single" else "write a divisor"
        found.append(Broken(key, f"{size} does not divide {ranks} processes; {do}"))
    if recipe.critic.placement == "separate" and recipe.runtime != "ray":
        found.append(Broken("critic.placement", f"separate, but {where}; write runtime=ray"))
    elif recipe.critic.placement == "separate" and "critic" not in needs(recipe):
        found.append(Broken("critic.placement", "separate, but the method has no critic; write colocated"))
    if recipe.runtime == "ray" and recipe.model.device == "cuda" and not recipe.ray.gpus_per_worker:
        found.append(
            Broken("model.device", "cuda, but ray.gpus_per_worker is 0; write ray.gpus_per_worker=1")
        )
    if recipe.ray != type(recipe.ray)() and recipe.runtime != "ray":
        found.append(Broken("ray", f"given, but {where}; write runtime=ray"))
    if recipe.trainer.profile and recipe.runtime == "ray":
        found.append(Broken("trainer.profile", "traces one process; write runtime=fsdp or single"))
    return found


def _kl(recipe: Recipe) -> list[Broken]:
    actor, algorithm = recipe.actor, recipe.algorithm
    if algorithm.insist:
        return []
    found = []
    if actor.use_kl_loss and actor.kl_loss_type in _K1_LOSSES:
        found.append(
            Broken(
                "actor.kl_loss_type",
                f"{actor.kl_loss_type} as a loss does not restrain on stored data; write off_policy, k3_soft "
                "or k1+, or set algorithm.insist=true",
            )
        )
    if algorithm.use_kl_in_reward and algorithm.kl_penalty not in _K1_VALUED:
        why = "is not the KL's own value"
        if algorithm.kl_penalty in _EXACT:
            why = "is the same whichever token stands there, so that token is not held back"
        found.append(
            Broken(
                "algorithm.kl_penalty",
                f"{algorithm.kl_penalty} in the reward {why}; write k1, or set algorithm.insist=true",
            )
        )
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        found.append(
            Broken(
                "algorithm.use_kl_in_reward",
                "true beside actor.use_kl_loss true counts the KL twice; set actor.use_kl_loss=false, or "
                "algorithm.insist=true to keep both",
            )
        )
    return found


def _controller(recipe: Recipe) -> list[Broken]:
    control, section = recipe.algorithm.kl_ctrl, "algorithm.kl_ctrl"
    if control.type != "fixed" and not (recipe.actor.use_kl_loss or recipe.algorithm.use_kl_in_reward):
        return [
            Broken(f"{section}.type", f"{control.type}, but no KL is on; write fixed, or use_kl_loss=true")
        ]
    if control.type != "schedule":
        given = [
            name for name, off in (("schedule", None), ("shape", "pieces")) if getattr(control, name) != off
        ]
        return [
            Broken(f"{section}.{name}", f"is not read by {section}.type {control.type}; write type schedule")
            for name in given
        ]
    if control.schedule is None:
        return [Broken(f"{section}.schedule", "is missing; give points such as [[0, 0.08], [0.2, 0.05]]")]
    coefs = {f"{section}.kl_coef": control.kl_coef, "actor.kl_loss_coef": recipe.actor.kl_loss_coef}
    return [
        Broken(key, f"{section}.schedule gives the coefficient; remove one of them")
        for key, coef in coefs.items()
        if coef is not None
    ]


def _shaping(recipe: Recipe) -> list[Broken]:
    manager, limit = recipe.reward_manager, recipe.data.max_response_length
    length, found = manager.overlong_buffer.len, []
    if length is not None and not manager.overlong_buffer.enable:
        found.append(
            Broken("reward_manager.overlong_buffer.len", "is not read without enable; write enable: true too")
        )
    if manager.overlong_buffer.enable and (length is None or length > limit):
        said = "is missing" if length is None else f"{length} is more than data.max_response_length {limit}"
        found.append(
            Broken(
                "reward_manager.overlong_buffer.len", f"{said}; give the tokens before the limit that cost"
            )
        )
    if (manager.placement == "exponential") != (manager.placement_decay is not None):
        found.append(
            Broken(
                "reward_manager.placement_decay", "goes with reward_manager.placement=exponential; give both"
            )
        )
    return found


def _mixing(recipe: Recipe) -> list[Broken]:
    sft, mode, found = recipe.sft, recipe.actor.loss_agg_mode, list[Broken]()
    if sft.share and recipe.actor.policy_loss.loss_mode == "dpo":
        found.append(
            Broken("sft.share", "dpo has an NLL term of its own; write actor.policy_loss.dpo_nll_coef")
        )
    if not sft.share:
        return [Broken("sft.coef", "is not read without sft.share; give both")] if sft.coef != 1 else []
    if not sft.files:
        found.append(
            Broken("sft.files", "is missing; sft.share takes demonstrations from there, so give them")
        )
    if recipe.actor.policy_loss.loss_mode in ONLY_PER_ROW:
        found.append(Broken("sft.share", "this loss counts responses, not tokens; write sft.share=0"))
    elif mode != "token-mean":
        found.append(
            Broken(
                "actor.loss_agg_mode",
                f"{mode} has no token count to share with demonstrations; write token-mean, or sft.share=0",
            )
        )
    return found


def _behavior(recipe: Recipe) -> list[Broken]:
    data = recipe.data
    if data.behavior == "recomputed" and data.behavior_model is None:
        return [
            Broken(
                "data.behavior",
                "recomputed needs the model that wrote the responses; give data.behavior_model",
            )
        ]
    if data.behavior_model is not None and data.behavior != "recomputed":
        return [
            Broken("data.behavior_model", f"data.behavior {data.behavior} reads no model; write recomputed")
        ]
    return []


def _gpu(recipe: Recipe) -> list[Broken]:
    kernel, found = recipe.model.attn_implementation, list[Broken]()
    if kernel in _HALF_KERNELS and recipe.model.precision != "fast":
        why = f"{kernel} reads bfloat16 alone; write model.precision=fast, or auto"
        found.append(Broken("model.attn_implementation", why))
    if recipe.fsdp.offload_policy and recipe.ranks == 1:
        found.append(Broken("fsdp.offload_policy", "true, but nothing is cut; write runtime=fsdp with nproc"))
    return found


def _precision(recipe: Recipe) -> list[Broken]:
    if recipe.model.precision == "fast" and recipe.model.dtype != "float32":
        why = f"fast is for float32 weights; with model.dtype {recipe.model.dtype} write exact"
        return [Broken("model.precision", why)]
    return []


def _trunk(recipe: Recipe) -> list[Broken]:
    critic, found = recipe.critic.model, list[Broken]()
    if critic.share_trunk and not recipe.model.lora_rank:
        why = "needs adapters: the actor trains the whole trunk; write model.lora_rank=16, or false"
        found.append(Broken("critic.model.share_trunk", why))
    if critic.share_trunk and critic.path is not None:
        why = "has weights of its own, but critic.model.share_trunk takes the actor's; remove one of them"
        found.append(Broken("critic.model.path", why))
    return found


def _stages(recipe: Recipe) -> list[Broken]:
    order = list(recipe.stages)
    for stage in order:
        if order.count(stage) > 1:
            return [Broken("stages", f"{stage} is listed twice; list it once")]
    for first, later in _BEFORE:
        for second in later:
            if first in order and second in order and order.index(first) > order.index(second):
                return [Broken("stages", f"{second} comes before {first}, which feeds it; put {first} first")]
    return []
