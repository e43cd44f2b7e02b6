"""verl's spellings: every key is read, refused by name, or named in a note; none is dropped in silence."""

from typing import Any

import pytest

from rein.config.keys import LEAVES
from rein.config.load import load, resolved
from rein.config.recipe import Recipe
from rein.config.verl_keys import ALWAYS, FOLLOWS, INSTEAD, NOT_YET, RENAMED, SETTLED, UNUSED
from rein.errors import ConfigError

PREFIX = "actor_rollout_ref."

# verl's key, a value, Rein's key, what it becomes
READ: list[tuple[str, str, str, Any]] = [
    ("data.train_files", "a.parquet", "data.train_files", ["a.parquet"]),
    ("data.val_files", "[a.parquet]", "data.val_files", ["a.parquet"]),
    ("data.train_batch_size", "256", "data.train_batch_size", 256),
    ("data.max_prompt_length", "512", "data.max_prompt_length", 512),
    ("data.max_response_length", "512", "data.max_response_length", 512),
    ("data.shuffle", "False", "data.shuffle", False),
    ("data.seed", "3", "data.seed", 3),
    ("data.filter_overlong_prompts", "True", "data.truncation", "drop"),
    ("actor.optim.lr", "1e-6", "actor.optim.lr", 1e-6),
    ("actor.ppo_epochs", "2", "actor.ppo_epochs", 2),
    ("actor.clip_ratio", "0.3", "actor.clip_ratio", 0.3),
    ("actor.clip_ratio_low", "0.1", "actor.clip_ratio_low", 0.1),
    ("actor.clip_ratio_high", "0.28", "actor.clip_ratio_high", 0.28),
    ("actor.clip_ratio_c", "10.0", "actor.clip_ratio_c", 10.0),
    ("actor.use_kl_loss", "False", "actor.use_kl_loss", False),
    ("actor.use_torch_compile", "True", "model.use_torch_compile", True),
    ("model.use_liger", "True", "model.use_liger", True),
    ("trainer.device", "cuda", "model.device", "cuda"),
    ("actor.kl_loss_coef", "0.001", "actor.kl_loss_coef", 0.001),
    ("actor.kl_loss_type", "low_var_kl", "actor.kl_loss_type", "low_var_kl"),
    ("actor.entropy_coeff", "0.01", "actor.entropy_coeff", 0.01),
    ("actor.grad_clip", "0.5", "actor.grad_clip", 0.5),
    ("actor.max_grad_norm", "0.5", "actor.grad_clip", 0.5),
    ("actor.optim.warmup_style", "cosine", "actor.optim.lr_scheduler_type", "cosine"),
    ("actor.use_dynamic_bsz", "True", "actor.use_dynamic_bsz", True),
    ("actor.ppo_micro_batch_size", "8", "actor.ppo_micro_batch_size", 8),
    ("actor.ppo_micro_batch_size_per_gpu", "8", "actor.ppo_micro_batch_size", 8),
    ("actor.ppo_micro_batch_size_per_gpu", "8", "actor.use_dynamic_bsz", False),
    ("actor.ppo_max_token_len_per_gpu", "8192", "actor.ppo_max_token_len_per_gpu", 8192),
    ("model.path", "/m", "model.path", "/m"),
    ("model.lora_rank", "8", "model.lora_rank", 8),
    ("model.lora_alpha", "32", "model.lora_alpha", 32.0),
    ("model.enable_gradient_checkpointing", "True", "model.enable_gradient_checkpointing", True),
    ("rollout.n", "4", "rollout.n", 4),
    ("rollout.temperature", "0.7", "rollout.temperature", 0.7),
    ("rollout.response_length", "99", "rollout.max_new_tokens", 99),
    ("critic.optim.lr", "1e-5", "critic.optim.lr", 1e-5),
    ("critic.ppo_mini_batch_size", "32", "critic.ppo_mini_batch_size", 32),
    ("critic.ppo_micro_batch_size", "8", "critic.ppo_micro_batch_size", 8),
    ("critic.cliprange_value", "0.5", "critic.cliprange_value", 0.5),
    ("critic.value_clip_range", "0.5", "critic.cliprange_value", 0.5),
    ("algorithm.adv_estimator", "gae", "algorithm.adv_estimator", "gae"),
    ("algorithm.gamma", "0.99", "algorithm.gamma", 0.99),
    ("algorithm.lam", "1.0", "algorithm.lam", 1.0),
    ("algorithm.clip_ratio", "0.2", "actor.clip_ratio", 0.2),
    ("algorithm.use_kl_in_reward", "False", "algorithm.use_kl_in_reward", False),
    ("algorithm.kl_ctrl.type", "adaptive", "algorithm.kl_ctrl.type", "adaptive"),
    ("algorithm.kl_ctrl.kl_coef", "0.01", "algorithm.kl_ctrl.kl_coef", 0.01),
    ("algorithm.kl_ctrl.target_kl", "0.2", "algorithm.kl_ctrl.target_kl", 0.2),
    ("algorithm.kl_ctrl.horizon", "1000", "algorithm.kl_ctrl.horizon", 1000.0),
    ("algorithm.rollout_correction.rollout_is", "token", "algorithm.rollout_correction.rollout_is", "token"),
    ("algorithm.rollout_correction.rollout_is", "null", "algorithm.rollout_correction.rollout_is", None),
    (
        "algorithm.rollout_correction.rollout_is",
        "sequence",
        "algorithm.rollout_correction.rollout_is",
        "sequence",
    ),
    (
        "algorithm.rollout_correction.rollout_is_threshold",
        "2_3",
        "algorithm.rollout_correction.rollout_is_threshold",
        "2_3",
    ),
    ("algorithm.rollout_correction.bypass_mode", "true", "algorithm.rollout_correction.bypass_mode", True),
    ("algorithm.adv_estimator", "grpo_vectorized", "algorithm.adv_estimator", "grpo"),
    ("actor.policy_loss.loss_mode", "gspo", "actor.policy_loss.loss_mode", "gspo"),
    ("actor.tau_neg", "1.1", "actor.policy_loss.tau_neg", 1.1),
    ("algorithm.filter_groups.enable", "true", "algorithm.filter_groups.enable", True),
    (
        "algorithm.rollout_correction.rollout_is_threshold",
        "3.0",
        "algorithm.rollout_correction.rollout_is_threshold",
        3.0,
    ),
    ("reward_manager.clip_range", "[-2,2]", "reward_manager.clip_range", [-2.0, 2.0]),
    ("reward_model.overlong_buffer.len", "99", "reward_manager.overlong_buffer.len", 99),
    (
        "reward_model.overlong_buffer.penalty_factor",
        "0.5",
        "reward_manager.overlong_buffer.penalty_factor",
        0.5,
    ),
    (
        "reward.reward_kwargs.overlong_buffer_cfg.len",
        "99",
        "reward_manager.overlong_buffer.len",
        99,
    ),
    ("trainer.critic_warmup", "20", "trainer.critic_warmup", 20),
    ("trainer.test_freq", "5", "trainer.test_freq", 5),
    ("actor.strategy", "fsdp", "runtime", "fsdp"),
    ("actor.strategy", "fsdp2", "runtime", "fsdp"),
    ("trainer.save_freq", "20", "trainer.save_freq", 20),
    ("trainer.total_epochs", "15", "trainer.total_epochs", 15),
    ("trainer.logger", '["console"]', "trainer.logger", ["console"]),
    ("trainer.default_local_dir", "runs/x", "out", "runs/x"),
    ("trainer.experiment_name", "gsm8k", "out", "runs/gsm8k"),
    ("trainer.experiment_name", "7", "trainer.experiment_name", "7"),
    ("trainer.project_name", "verl_examples", "trainer.project_name", "verl_examples"),
    ("trainer.logger", '["console","wandb"]', "trainer.logger", ["console", "wandb"]),
    ("trainer.logger", "my.mod:Mine", "trainer.logger", ["my.mod:Mine"]),
    ("trainer.resume_mode", "disable", "resume", "never"),
    ("trainer.resume_mode", "auto", "resume", "auto"),
    ("trainer.resume_from_path", "/s/step-3", "resume", "/s/step-3"),
    ("rollout.name", "vllm", "rollout.engine", "vllm"),
    ("rollout.gpu_memory_utilization", "0.6", "rollout.gpu_memory_utilization", 0.6),
    ("rollout.tensor_model_parallel_size", "2", "rollout.tensor_model_parallel_size", 2),
]
PREFIXED = [row for row in READ if row[0].partition(".")[0] in ("actor", "model", "rollout")]

REFUSED = [
    ("trainer.logger", '["console","clearml"]', "clearml is not built yet"),
    ("data.truncation", "middle", "not built yet"),
    ("data.prompt_key", "question", "prompt column"),
]
ELSEWHERE = [
    ("actor.fsdp_config.offload_policy", "true", "true, but nothing is cut"),
    ("actor.fsdp_config.param_offload", "true", "follows fsdp.offload_policy (false)"),
    ("actor.fsdp_config.fsdp_size", "8", "the rest is not built yet"),
    ("actor.fsdp_config.forward_prefetch", "true", "fsdp.forward_prefetch"),
    ("critic.model.fsdp_config.param_offload", "true", "follows fsdp.offload_policy (false)"),
    ("trainer.nnodes", "2", "write runtime=fsdp"),
    ("trainer.n_gpus_per_node", "8", "write runtime=fsdp"),
    ("actor.ulysses_sequence_parallel_size", "2", "does not divide 1 processes"),
]
BESIDE = {  # what a key is read with only
    "actor.policy_loss.tau_neg": ["actor.policy_loss.loss_mode=sapo"],
    "reward_manager.overlong_buffer.len": ["reward_manager.overlong_buffer.enable=true"],
}
OFF = [
    ("actor.use_torch_compile", "False"),
    ("ref.use_torch_compile", "False"),
    ("actor.strategy", "null"),
    ("critic.strategy", "fsdp2"),
    ("ref.strategy", "fsdp2"),
    ("actor.fsdp_config.offload_policy", "false"),
    ("actor.fsdp_config.forward_prefetch", "False"),
    ("actor.ulysses_sequence_parallel_size", "1"),
    ("rollout.tensor_model_parallel_size", "1"),
    ("rollout.name", "hf"),
    ("algorithm.rollout_correction.rollout_rs", "null"),
    ("trainer.nnodes", "1"),
    ("reward.reward_manager.name", "dapo"),
    ("reward_model.reward_kwargs.max_resp_len", "2048"),
    ("trainer.n_gpus_per_node", "1"),
    ("data.filter_overlong_prompts", "False"),
    ("data.prompt_key", "prompt"),
]


def value_at(recipe: Recipe, key: str) -> Any:
    found: Any = resolved(recipe)
    for part in key.split("."):
        found = found[part]
    return found


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("key", "value", "ours", "wanted"), READ)
def test_verls_key_is_read(key: str, value: str, ours: str, wanted: Any) -> None:
    recipe, notes = load(None, [f"{key}={value}", *BESIDE.get(ours, [])])
    assert value_at(recipe, ours) == wanted
    if key != ours:
        assert any(key in note for note in notes)


@pytest.mark.parametrize(("key", "value", "ours", "wanted"), PREFIXED)
def test_the_prefix_changes_nothing(key: str, value: str, ours: str, wanted: Any) -> None:
    recipe, notes = load(None, [f"{PREFIX}{key}={value}", *BESIDE.get(ours, [])])
    assert value_at(recipe, ours) == wanted
    assert notes


@pytest.mark.parametrize(("key", "value", "feature"), REFUSED)
def test_what_is_not_built_is_refused_by_name(key: str, value: str, feature: str) -> None:
    message = refusal(f"{key}={value}")
    assert key in message
    assert "not built" in message
    assert feature in message


@pytest.mark.parametrize(("key", "value", "instead"), ELSEWHERE)
def test_what_is_said_otherwise_is_refused_with_the_way(key: str, value: str, instead: str) -> None:
    message = refusal(f"{key}={value}")
    assert key in message
    assert instead in message


@pytest.mark.parametrize(("key", "value"), OFF)
def test_a_value_that_asks_for_nothing_is_accepted(key: str, value: str) -> None:
    plain = load(None, [])[0]
    assert load(None, [f"{key}={value}"])[0] == plain


@pytest.mark.parametrize("key", sorted(ALWAYS))
def test_what_is_always_done_accepts_true_and_refuses_false_with_why(key: str) -> None:
    _, notes = load(None, [f"{key}=True"])
    assert any(key in note and ALWAYS[key] in note for note in notes)
    assert ALWAYS[key] in refusal(f"{key}=False")


def test_chunked_entropy_is_always_done() -> None:
    for key in ("actor", f"{PREFIX}actor"):
        assert load(None, [f"{key}.entropy_from_logits_with_chunking=True"])[1]


@pytest.mark.parametrize("key", sorted(UNUSED))
def test_what_is_not_used_says_so(key: str) -> None:
    _, notes = load(None, [f"{key}=1"])
    assert any(key in note and "is not used" in note for note in notes)


@pytest.mark.parametrize("key", sorted(INSTEAD))
def test_what_has_another_form_says_which(key: str) -> None:
    assert "write score.reward" in refusal(f"{key}=true")


@pytest.mark.parametrize("key", sorted(NOT_YET))
def test_every_key_not_built_accepts_its_off_values_and_nothing_else(key: str) -> None:
    for off in NOT_YET[key].values:
        load(None, [f"{key}={'null' if off is None else off}"])
    assert "not built" in refusal(f"{key}=surely_not_off")


def test_the_tables_do_not_overlap() -> None:
    tables = [set(RENAMED), set(SETTLED), set(NOT_YET), set(ALWAYS), set(UNUSED), set(INSTEAD), set(LEAVES)]
    seen: set[str] = set()
    for table in tables:
        assert not seen & table
        seen |= table
    assert set(RENAMED.values()) <= set(LEAVES)
    assert set(FOLLOWS.values()) <= set(LEAVES)


# batch sizes: prompts in verl, rows here


def test_batch_sizes_in_verls_spelling_count_prompts_and_the_result_is_printed() -> None:
    words = [
        "data.train_batch_size=256",
        f"{PREFIX}actor.ppo_mini_batch_size=64",
        "critic.ppo_mini_batch_size=32",
        f"{PREFIX}rollout.n=4",
    ]
    recipe, notes = load(None, words)
    assert recipe.data.train_batch_size == 1024
    assert recipe.actor.ppo_mini_batch_size == 256
    assert recipe.critic.ppo_mini_batch_size == 128
    assert "data.train_batch_size 256 prompts x rollout.n 4 = 1024 rows" in notes
    assert f"{PREFIX}actor.ppo_mini_batch_size 64 prompts x rollout.n 4 = 256 rows" in notes
    assert "critic.ppo_mini_batch_size 32 prompts x rollout.n 4 = 128 rows" in notes


def test_batch_sizes_in_our_spelling_count_rows() -> None:
    recipe, notes = load(None, ["data.train_batch_size=256", "actor.ppo_mini_batch_size=64", "rollout.n=4"])
    assert (recipe.data.train_batch_size, recipe.actor.ppo_mini_batch_size) == (256, 64)
    assert notes == []


def test_a_verl_file_counts_prompts_on_the_command_line_too(tmp_path: Any) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("actor_rollout_ref:\n  rollout: {n: 2}\ndata: {train_batch_size: 128}\n")
    assert load(file)[0].data.train_batch_size == 256
    assert (
        load(file, ["data.train_batch_size=64", "actor.ppo_mini_batch_size=32"])[0].data.train_batch_size
        == 128
    )
    file.write_text("data: {train_batch_size: 128}\n")  # our file: a verl word beside it does not change it
    assert load(file, [f"{PREFIX}rollout.n=2"])[0].data.train_batch_size == 128


def test_rollout_n_may_come_from_the_other_source(tmp_path: Any) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("actor_rollout_ref:\n  actor: {ppo_mini_batch_size: 64}\n")
    assert load(file, ["rollout.n=8"])[0].actor.ppo_mini_batch_size == 512


# keys that say something together


def test_micro_batches_of_rows_beside_dynamic_ones_are_named_as_not_used() -> None:
    recipe, notes = load(None, ["actor.ppo_micro_batch_size_per_gpu=8", "actor.use_dynamic_bsz=True"])
    assert recipe.actor.use_dynamic_bsz
    assert any("is not used" in note for note in notes)
    recipe, notes = load(None, ["critic.ppo_micro_batch_size_per_gpu=8"])
    assert recipe.actor.use_dynamic_bsz
    assert any("is not used" in note for note in notes)


def test_filtering_wins_over_truncation_and_says_so() -> None:
    recipe, notes = load(None, ["data.truncation=error", "data.filter_overlong_prompts=True"])
    assert recipe.data.truncation == "drop"
    assert any("data.truncation drop" in note for note in notes)


@pytest.mark.parametrize(("key", "leader"), sorted(FOLLOWS.items()))
def test_a_key_that_follows_another_must_equal_it(key: str, leader: str) -> None:
    value = value_at(load(None, [])[0], leader)
    value = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    load(None, [f"{key}={value}"])
    message = refusal(f"{key}=surely_other")
    assert leader in message
    assert "not built yet" in message


def test_the_experiments_name_yields_to_the_runs_folder() -> None:
    recipe, notes = load(None, ["trainer.experiment_name=x", "out=runs/y"])
    assert (recipe.out, recipe.trainer.experiment_name) == ("runs/y", "x")
    assert any("names the run in trackers alone" in note for note in notes)


def test_resume_path_needs_a_path() -> None:
    assert "resume=FOLDER" in refusal("trainer.resume_mode=resume_path")
    assert "contradicts" in refusal("trainer.resume_mode=disable", "trainer.resume_from_path=/s")
    assert load(None, ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/s"])[0].resume == "/s"
    assert load(None, ["trainer.resume_from_path=null"])[0].resume == "auto"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("actor.clip_ratio", f"{PREFIX}actor.clip_ratio"),
        ("algorithm.clip_ratio", f"{PREFIX}actor.clip_ratio"),
        ("actor.grad_clip", "actor.max_grad_norm"),
    ],
)
def test_two_spellings_of_one_thing_are_refused(first: str, second: str) -> None:
    message = refusal(f"{first}=0.1", f"{second}=0.2")
    assert first in message
    assert second in message


def test_dapos_soft_limit_is_read_whole() -> None:
    kwargs = "+reward.reward_kwargs"
    words = f"""{kwargs}.overlong_buffer_cfg.enable=True {kwargs}.overlong_buffer_cfg.len=4096
        {kwargs}.overlong_buffer_cfg.penalty_factor=1.0 {kwargs}.overlong_buffer_cfg.log=False
        {kwargs}.max_resp_len=20480 reward.reward_manager.name=dapo data.max_response_length=20480""".split()
    buffer = load(None, words)[0].reward_manager.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 4096, 1.0)
    assert "follows data.max_response_length" in refusal(*words[:-1])


def test_an_unknown_verl_key_is_refused() -> None:
    assert "is unknown" in refusal(f"{PREFIX}actor.wxyz=1")


def test_a_usual_verl_run_is_read_whole() -> None:
    words = f"""
        algorithm.adv_estimator=gae data.train_files=train.parquet data.val_files=test.parquet
        data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512
        data.filter_overlong_prompts=True data.truncation=error {PREFIX}model.path=/m
        {PREFIX}actor.optim.lr=1e-6 {PREFIX}model.use_remove_padding=True
        {PREFIX}actor.ppo_mini_batch_size=256 {PREFIX}actor.ppo_micro_batch_size_per_gpu=16
        {PREFIX}actor.fsdp_config.param_offload=False {PREFIX}actor.fsdp_config.optimizer_offload=False
        {PREFIX}model.enable_gradient_checkpointing=True {PREFIX}actor.use_kl_loss=False
        {PREFIX}rollout.log_prob_micro_batch_size_per_gpu=32 {PREFIX}rollout.tensor_model_parallel_size=1
        {PREFIX}rollout.name=hf critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path=/m
        critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size_per_gpu=32
        critic.model.fsdp_config.param_offload=False algorithm.use_kl_in_reward=False trainer.critic_warmup=0
        trainer.logger=["console"] trainer.project_name=p trainer.experiment_name=e trainer.n_gpus_per_node=1
        trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=1 trainer.total_epochs=15
    """.split()
    recipe, notes = load(None, words)
    assert recipe.data.train_batch_size == 1024
    assert recipe.actor.ppo_micro_batch_size == 16
    assert recipe.critic.ppo_micro_batch_size == 32
    assert recipe.out == "runs/e"
    assert notes
