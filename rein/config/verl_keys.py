"""verl's spellings -> Rein's keys: the only place they live.

Entries in, entries with Rein's keys and notes to print out. A key is renamed, accepted because its value
asks for nothing (off) or for what Rein always does, or refused with what to do; none is dropped in silence.
In verl's spelling batch sizes count prompts; Rein counts rows. verl 0.9 is meant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rein.config.keys import LEAVES
from rein.config.reading import Entry
from rein.errors import ConfigError

PREFIX = "actor_rollout_ref."
PREFIXES = ("actor", "model", "rollout", "ref")

RENAMED = {
    "train.refresh_every": "trainer.refresh_every",
    "algorithm.clip_ratio": "actor.clip_ratio",
    "actor.max_grad_norm": "actor.grad_clip",
    "actor.tau_pos": "actor.policy_loss.tau_pos",
    "actor.tau_neg": "actor.policy_loss.tau_neg",
    "actor.optim.clip_grad": "actor.grad_clip",
    "actor.optim.warmup_style": "actor.optim.lr_scheduler_type",
    "actor.ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size",
    "actor.use_torch_compile": "model.use_torch_compile",
    "critic.max_grad_norm": "critic.grad_clip",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.ppo_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size",
    "critic.value_clip_range": "critic.cliprange_value",
    "data.trust_remote_code": "model.trust_remote_code",
    "reward_model.model.path": "score.path",
    "reward.reward_model.model_path": "score.path",
    "rollout.response_length": "rollout.max_new_tokens",
    "rollout.name": "rollout.engine",
    "trainer.default_local_dir": "out",
    "actor.strategy": "runtime",
    "actor.ulysses_sequence_parallel_size": "fsdp.ulysses_sequence_parallel_size",
    "actor.fsdp_config.offload_policy": "fsdp.offload_policy",
    "trainer.device": "model.device",
    "trainer.n_gpus_per_node": "nproc",
    "trainer.nnodes": "nnodes",
    "trainer.resume_from_path": "resume",
}

RENAMED_VALUES: dict[str, dict[str, Any]] = {
    "algorithm.adv_estimator": {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
}
VALUES_OF_VERL: dict[str, dict[str, Any]] = {  # only of keys in verl's spelling
    "runtime": {"fsdp2": "fsdp", "None": "single"},
    "nproc": {"0": 1, "None": 1},
    "nnodes": {"None": 1},
    "rollout.engine": {"None": "hf"},
}
# DAPO's soft limit, as its recipe and as verl 0.9's reward managers spell it.
OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
RENAMED |= {
    f"{section}.{name}": f"reward_manager.overlong_buffer.{name}"
    for section in OVERLONG
    for name in ("enable", "len", "penalty_factor")
}

# Kept under their own name until every source is read; `settle` decides.
EXPERIMENT = "trainer.experiment_name"
FILTER = "data.filter_overlong_prompts"
RESUME_MODE = "trainer.resume_mode"
FOLLOWS = {
    "critic.model.enable_gradient_checkpointing": "model.enable_gradient_checkpointing",
    "critic.model.lora_alpha": "model.lora_alpha",
    "critic.model.lora_rank": "model.lora_rank",
    "critic.model.trust_remote_code": "model.trust_remote_code",
    "critic.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len_per_gpu",
    "critic.shuffle": "actor.shuffle",
    "critic.use_dynamic_bsz": "actor.use_dynamic_bsz",
    "critic.ulysses_sequence_parallel_size": "fsdp.ulysses_sequence_parallel_size",
    "ref.ulysses_sequence_parallel_size": "fsdp.ulysses_sequence_parallel_size",
    "ref.use_torch_compile": "model.use_torch_compile",
    "reward.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    "rollout.prompt_length": "data.max_prompt_length",
}
FOLLOWS |= {  # FSDP2's policy is of weights and moments, and one of all models
    f"{section}.fsdp_config.{name}": "fsdp.offload_policy"
    for section in ("actor", "critic", "critic.model", "ref")
    for name in ("offload_policy", "param_offload", "optimizer_offload")
    if (section, name) not in (("actor", "offload_policy"), ("ref", "param_offload"))
}
SETTLED = frozenset((FILTER, RESUME_MODE, *FOLLOWS))


class Off(NamedTuple):
    """The values of a key that ask for nothing, and the feature that every other value asks for."""

    values: tuple[Any, ...]
    feature: str


_NO, _ONE, _NULL = (False, None), (1, None), (None,)
_ENGINE = "an inference engine beside the trainer"

NOT_YET = {
    "actor.loss_scale_factor": Off(_NULL, "a constant scale of the loss"),
    "actor.use_prefix_grouper": Off(_NO, "sharing a prompt's computation over its responses"),
    "actor.optim.optimizer": Off(("AdamW", None), "an optimizer other than AdamW"),
    "critic.optim.optimizer": Off(("AdamW", None), "an optimizer other than AdamW"),
    "model.use_fused_kernels": Off(_NO, "fused kernels"),
    "model.enable_activation_offload": Off(_NO, "activation offloading"),
    "model.exclude_modules": Off(_NULL, "leaving modules out of LoRA"),
    "model.lora_adapter_path": Off(_NULL, "a separate adapter path (model.path may be an adapter folder)"),
    "model.override_config": Off((None, {}), "overriding a model's configuration"),
    "rollout.top_k": Off((-1, 0, None), "top-k sampling"),
    "rollout.do_sample": Off((True, None), "rollouts without sampling (write rollout.temperature=0)"),
    "rollout.calculate_log_probs": Off((True, None), "rollouts without log-probs"),
    "rollout.multi_turn.enable": Off(_NO, "rollouts of many turns"),
    "algorithm.use_pf_ppo": Off(_NO, "resampling by score"),
    "critic.loss_agg_mode": Off(("token-mean", None), "another aggregation of the value loss"),
    "algorithm.bootstrap_truncated": Off(_NO, "bootstrapping rows that were cut off"),
    "data.prompt_key": Off(("prompt", None), "another prompt column (name the column `prompt`)"),
    "data.reward_fn_key": Off(("data_source", None), "another data-source column"),
    "data.train_max_samples": Off((-1, None), "training on part of a file"),
    "data.val_max_samples": Off((-1, None), "part of a file (write trainer.val_prompts)"),
    "data.custom_cls.path": Off(_NULL, "a dataset class of your own"),
    "data.apply_chat_template_kwargs": Off((None, {}), "options of the chat template"),
    "reward_model.reward_manager": Off(("naive", "dapo", None), "another reward manager"),
    "reward.reward_manager.name": Off(("naive", "dapo", None), "another reward manager"),
    "trainer.max_actor_ckpt_to_keep": Off(_NULL, "limiting the number of snapshots"),
    "trainer.max_critic_ckpt_to_keep": Off(_NULL, "limiting the number of snapshots"),
    "trainer.default_hdfs_dir": Off(_NULL, "remote folders"),
    "trainer.val_only": Off(_NO, "this switch (run `rein evaluate`)"),
    "trainer.log_val_generations": Off((0, None), "logging generations"),
}
NOT_YET |= {
    f"rollout.{knob}": Off(_NO, _ENGINE)
    for knob in (
        *("disable_log_stats", "dtype", "enable_chunked_prefill", "enable_prefix_caching", "enforce_eager"),
        *("free_cache_engine", "ignore_eos", "load_format", "max_model_len", "max_num_batched_tokens"),
        *("max_num_seqs", "mode", "data_parallel_size", "skip_tokenizer_init"),
    )
}
NOT_YET_SECTIONS = {
    "actor.megatron.": "Megatron",
    "rollout.val_kwargs.": "sampling options for validation (it decodes greedily)",
    "rollout.multi_turn.": "rollouts of many turns",
}
INSTEAD_SECTIONS = {  # refused unless off: Rein has the thing in another form
    f"{section}.fsdp_config.": "fsdp.forward_prefetch or fsdp.offload_policy; the rest is not built yet"
    for section in ("actor", "critic", "critic.model", "ref")
}
_SECTION_OFF = (False, None, -1, 0, 1, "fp32", "float32")

ALWAYS = {  # true: Rein does this always; false: refused, for there is nothing to switch off
    "model.use_remove_padding": "models are always fed packed rows without padding",
    "critic.model.use_remove_padding": "models are always fed packed rows without padding",
    "data.use_sequence_packing": "rows are always packed into token-budget micro-batches",
}

_SPEED = "log-probs are made under the token budget of actor.ppo_max_token_len_per_gpu; results are the same"
UNUSED = {  # any value: accepted, because no result depends on it; the reason is printed
    "actor.entropy_from_logits_with_chunking": "the entropy is always made in chunks; results are the same",
    "ref.entropy_from_logits_with_chunking": "the entropy is always made in chunks; results are the same",
    "actor.calculate_entropy": "the probe always logs the entropy",
    "ref.fsdp_config.param_offload": "the reference's log-probs are kept, not its weights",
    "critic.forward_micro_batch_size_per_gpu": _SPEED,
    "critic.forward_max_token_len_per_gpu": _SPEED,
    **dict.fromkeys(("critic.strategy", "ref.strategy"), "all models of a run are under one runtime"),
    "actor_rollout_ref.hybrid_engine": "one process holds actor and rollouts by turns",
    "data.return_raw_chat": "prompts are kept as messages",
    "data.filter_overlong_prompts_workers": "the loader uses one process",
    "data.dataloader_num_workers": "the loader uses one process",
    "data.gen_batch_size": "training generates nothing",
    "data.val_batch_size": "validation decodes rollout.batch_size rows together",
    "trainer.balance_batch": "ranks always get rows balanced by tokens",
    "algorithm.filter_groups.metric": "groups are told apart by their stored scores",
    "algorithm.filter_groups.max_num_gen_batches": "training generates nothing",
    "critic.enable": "there is a critic where the estimator reads values",
}
UNUSED |= {
    f"{role}.log_prob_{size}": _SPEED
    for role in ("ref", "rollout")
    for size in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
}
UNUSED |= {f"{section}.log": "the mean of each shaping term is always logged" for section in OVERLONG}

INSTEAD = {  # refused: Rein has the thing in another form
    "reward_model.enable": "write score.reward=model and score.path=FOLDER",
    "reward.reward_model.enable": "write score.reward=model and score.path=FOLDER",
    "custom_reward_function.path": "write score.reward=pkg.mod:name, a function of your own",
    "custom_reward_function.name": "write score.reward=pkg.mod:name, a function of your own",
    "reward.custom_reward_function.path": "write score.reward=pkg.mod:name, a function of your own",
    "reward.custom_reward_function.name": "write score.reward=pkg.mod:name, a function of your own",
}

COUNTS_PROMPTS = ("data.train_batch_size", "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")


def is_leaf(key: str) -> bool:
    """True where a mapping given under this spelling is one value, not a section."""
    return _rein_key(key) in LEAVES


def speaks_verl(entries: Sequence[Entry]) -> bool:
    """True when any key is spelled as only verl spells it, so that batch sizes beside it count prompts."""
    return any(entry.spelled.startswith(PREFIX) for entry in entries)


def translate(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """The same entries under Rein's keys, and a note for each that was more than renamed by its prefix.

    Raises ConfigError for what is asked and not built. Unknown keys pass through; load.py refuses them.
    """
    kept: list[Entry] = []
    notes: list[str] = []
    prefixed = 0
    for entry in entries:
        bare = _bare(entry.key)
        key = RENAMED.get(bare, bare)
        if key in LEAVES or key in SETTLED:
            values = RENAMED_VALUES | (VALUES_OF_VERL if key != bare else {})
            kept.append(_renamed_value(replace(entry, key=key), values.get(key, {})))
            if key != bare:
                notes.append(f"{entry.spelled} is read as {key}")
            prefixed += bare != entry.key
        elif (note := _accept(entry, bare)) is None:
            kept.append(replace(entry, key=bare))
        elif note:
            notes.append(f"{entry.spelled} {note}")
    if prefixed:
        plural = "key is" if prefixed == 1 else "keys are"
        notes.insert(0, f"{prefixed} {plural} read without verl's prefix {PREFIX.rstrip('.')}")
    return kept, notes


def _renamed_value(entry: Entry, values: dict[str, Any]) -> Entry:
    value = values.get(str(entry.value))
    return entry if value is None else replace(entry, value=value, text=value)


def _bare(key: str) -> str:
    rest = key.removeprefix(PREFIX)
    return rest if rest.partition(".")[0] in PREFIXES else key


def _rein_key(key: str) -> str:
    bare = _bare(key)
    return RENAMED.get(bare, bare)


def _accept(entry: Entry, key: str) -> str | None:
    """The note for an accepted key ("" when its value asks for nothing), None for a key not known here."""
    where, value = f"{entry.where}: {entry.spelled}", entry.value
    if key in NOT_YET:
        return _off(where, value, NOT_YET[key].values, NOT_YET[key].feature)
    if key in ALWAYS:
        if value is True:
            return f"true: {ALWAYS[key]}"
        raise ConfigError(f"{where}={_word(value)}: {ALWAYS[key]} and cannot be otherwise; remove this key")
    if key in UNUSED:
        return f"is not used: {UNUSED[key]}"
    if key in INSTEAD:
        if value in (False, None, ""):
            return ""
        raise ConfigError(f"{where}: Rein has no such key; {INSTEAD[key]}")
    for section, own in INSTEAD_SECTIONS.items():
        if key.startswith(section):
            if _is_one_of(value, _SECTION_OFF):
                return ""
            raise ConfigError(f"{where}: Rein has no such key; write {own}")
    for section, feature in NOT_YET_SECTIONS.items():
        if key.startswith(section):
            return _off(where, value, _SECTION_OFF, feature)
    return None


def _off(where: str, value: Any, off: tuple[Any, ...], feature: str) -> str:
    if _is_one_of(value, off):
        return ""
    words = " or ".join(_word(known) for known in off[:2] if known is not None) or "null"
    raise ConfigError(
        f"{where}={_word(value)}: asks for {feature}, which is not built yet; remove it, or write {words}"
    )


def _is_one_of(value: Any, off: tuple[Any, ...]) -> bool:
    return any(value == known and type(value) is type(known) for known in off)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
