"""One frozen model per section of a recipe; every key, its unit and its default on one page.

Names follow verl where the concept is verl's. Batch sizes count rows (trajectories). Unknown keys are errors
(config/load.py names the nearest). Knows nothing of files or models: what feeds what is config/paths.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rein.config.guards import GuardRules
from rein.config.names import Estimator, KlKind, KlLossKind, LossAggMode, LossMode, MethodName, Preset
from rein.config.values import (
    HIGHEST,
    MOST,
    MOST_THREADS,
    Above,
    Count,
    Every,
    Files,
    MaybePlace,
    Place,
    Positive,
    PpoEpochs,
    Rate,
    Schedule,
    Share,
    TrackerName,
    as_list,
    expression,
    ordered,
    weight_bounds_ok,
)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Optim(Section):
    """AdamW and its schedule; warm-up and decay count optimizer steps."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    weight_decay: Rate = 0.01
    betas: tuple[Share, Share] = (0.9, 0.999)
    lr_scheduler_type: Literal["constant", "cosine", "wsd"] = (
        "constant"  # wsd: constant, the last tenth cosine
    )
    lr_warmup_steps: Every = -1  # -1: lr_warmup_steps_ratio decides
    lr_warmup_steps_ratio: Share = 0.0
    min_lr_ratio: Share = 0.0


class Model(Section):
    """The start policy: what sft or train begins from, and the reference. `path` is a Hugging Face folder."""

    path: MaybePlace = None
    lora_rank: Count = 0  # 0: full fine-tuning
    lora_alpha: Above = 16
    target_modules: str | list[str] = "all-linear"
    enable_gradient_checkpointing: bool = False
    dtype: Literal["float32", "float64"] = "float32"  # of the weights that are trained and saved
    # What the trained models compute in: their dtype, or bfloat16 with float32 weights, heads and sums.
    precision: Literal["exact", "fast"] = "exact"
    use_torch_compile: bool = False  # of what blocks do between matrix products; needs a C++ compiler
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU where there is one; each rank its own
    # What attends over packed rows on a GPU. auto: by what is installed; all but sdpa and flex_attention read
    # bfloat16 alone.
    attn_implementation: Literal["auto", "flash_attention_2", "varlen", "flex_attention", "sdpa"] = "auto"
    use_liger: bool = False  # Liger's kernels for norms, gates and rotary positions, on a GPU
    logits_chunk: Positive = 2**24  # logits (positions x vocabulary) held at once
    trust_remote_code: bool = False


class Fsdp(Section):
    """How runtimes fsdp and ray cut every model over processes, block by block."""

    forward_prefetch: Count = 1  # blocks gathered ahead of the one that computes
    ulysses_sequence_parallel_size: Positive = 1  # processes that share each pack's positions (train, sft)
    offload_policy: bool = False  # weights, gradients and moments in the CPU's memory between passes on a GPU


class Ray(Section):
    """Where the processes of runtime: ray are, and what each of them asks for."""

    address: str | None = None  # of a cluster to join (auto: the one here); default: one is started here
    cpus_per_worker: Annotated[float, Field(ge=0.01, le=MOST)] = 1.0
    gpus_per_worker: Rate = 0.0
    shard_rows: Positive = 256  # of rollout and score: what a worker of a pool does at once, and is kept


class Data(Section):
    """The rows of the run. `train_files` holds whatever kind of rows the first stage reads."""

    train_files: Files = []
    val_files: Files = []  # prompts for validation; default: the hold-out split of train_files
    train_batch_size: Positive = 1024  # rows for which old log-probs and advantages are made once
    max_prompt_length: Positive = 1024  # tokens
    max_response_length: Positive = 2048  # tokens
    # A prompt over the limit: left out, cut on the named side (the template's end stays), or refused. A
    # response over its limit is left out, or refused.
    truncation: Literal["drop", "left", "right", "error"] = "drop"
    drop_duplicates: bool = False  # rows whose tokens stood before
    max_copies: Positive | None = None  # rows of the same tokens that are kept
    keep_groups: bool = False  # all rows of a prompt in one mini-batch, so mini-batches differ a little
    shuffle: bool = True
    seed: int | None = None  # hold-out split and order of rows; default: the recipe's seed
    max_bad_fraction: Share = 0.01
    behavior: Literal["stored", "recomputed", "unknown"] | None = None  # default: stored where there are any
    behavior_model: MaybePlace = None  # who wrote the responses, for recomputed
    leave_out: Files = []  # the prompts of these files are not trained on, and not answered by rollout
    holdout_fraction: Share = 0.05  # of prompts, at least 64 and at most 500
    apply_chat_template: bool | None = None  # default: where there is one; false: raw text


class Sft(Section):
    """Causal LM fine-tuning on responses only: a stage, and with `share` a part of train's actor updates."""

    files: Files = []  # default: data.train_files
    prompt_key: str = "prompt"  # a column; dots reach into structs (extra_info.question)
    response_key: str = "response"
    share: Share = (
        0.0  # demonstrations beside each actor update of train, of its mini-batch's rows; 0.05 is usual
    )
    coef: Rate = 1.0  # of their loss: (sum RL + coef sum NLL) / (RL tokens + SFT tokens)
    optim: Optim = Optim(lr=1e-5, lr_scheduler_type="cosine")
    batch_size: Positive = 32
    epochs: Positive = 1
    total_steps: Positive | None = None  # stops earlier than `epochs`, or goes round again until then
    grad_clip: Above = 1.0
    ppo_max_token_len_per_gpu: Positive = 4096
    save_freq: Every = -1


class RewardModel(Section):
    """Bradley-Terry reward model from preference pairs."""

    files: Files = []  # default: data.train_files
    path: MaybePlace = None  # the trunk it starts from; default: what train would start from
    optim: Optim = Optim(lr=1e-5, lr_scheduler_type="cosine")
    batch_size: Positive = 32  # pairs
    epochs: Positive = 1
    grad_clip: Above = 1.0
    ppo_max_token_len_per_gpu: Positive = 4096
    save_freq: Every = -1


class Vllm(Section):
    """vLLM in a process of its own, which may be of another environment."""

    python: MaybePlace = None  # that environment's interpreter; default: this one's
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of its weights; auto: as saved
    enforce_eager: bool = False
    max_model_len: Positive | None = None  # default: prompts and responses at their limits
    start_timeout: Above = 600.0  # seconds


class Server(Section):
    """An OpenAI-compatible completions endpoint that returns log-probs."""

    url: str | None = None  # with its version part: http://localhost:8000/v1
    model: str | None = None  # as the server calls it; default: the first that it lists
    api_key_env: str | None = None  # the environment variable that holds the key
    concurrency: Positive = 16  # requests under way at once; fewer while the server says that it is busy
    timeout: Above = 600.0  # seconds for one request
    retries: Count = 8  # of a request, waiting longer each time


class Rollout(Section):
    """Stored prompts -> trajectories."""

    files: Files = []  # prompts; default: data.train_files
    path: MaybePlace = None  # the policy that writes them; default: what train would start from
    engine: str = "hf"  # hf: in this process; vllm; server; or `pkg.mod:name`
    tensor_model_parallel_size: Positive = 1  # of vllm
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5  # of vllm, a share of each GPU's memory
    vllm: Vllm = Vllm()
    server: Server = Server()
    n: Positive = 1
    temperature: Rate = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive | None = None  # default: data.max_response_length
    batch_size: Positive = 128  # rows decoded together; of an engine other than hf, kept on disk together
    max_prompts: Positive | None = None
    skip_prompts: Count = 0  # passed over before max_prompts are taken; beyond the end it goes round
    stop: list[str] = []  # texts that end a response, beside the model's own stop ids
    policy_version: Count = 0


class RewardSpec(Section):
    """One reward: a name of `rewards.REWARDS` or `pkg.mod:name`, its weight in the mix, its options."""

    name: str
    weight: float = 1.0
    options: dict[str, Any] = {}


def _as_reward(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Rewards = Annotated[
    list[Annotated[RewardSpec, BeforeValidator(_as_reward)]],
    BeforeValidator(as_list),
    Field(min_length=1),
]


class Score(Section):
    """Trajectories -> scores. `model` as a reward name uses the reward model at `path`."""

    files: Files = []  # default: what rollout wrote, else data.train_files
    reward: Rewards = [RewardSpec(name="math")]
    path: MaybePlace = None  # reward model folder; default: what the reward stage wrote


class PolicyLoss(Section):
    """Which policy loss, and what only that loss reads."""

    loss_mode: LossMode = "ppo_clip"
    tau_pos: Above = 1.0  # sapo
    tau_neg: Above = 1.05
    dro_beta: Above | None = None  # must be given for dro
    topr_ratio_max: Above = 1.0
    awr_beta: Above = 1.0
    awr_weight_max: Annotated[float, Field(ge=1, le=HIGHEST)] = 20.0
    m2po_threshold: Above = 0.04  # mean squared log-ratio of the tokens that stay
    opsm_threshold: Rate | None = (
        None  # any loss: bad rows this far from behavior (nats per token) are left out
    )
    sppo_eta: Above = 1000.0
    dpo_beta: Above = 0.1
    dpo_nll_coef: Rate = 0.0  # of the chosen response's negative log-likelihood per token
    dpo_label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0


class Actor(Section):
    """The policy's update."""

    policy_loss: PolicyLoss = PolicyLoss()

    optim: Optim = Optim()
    ppo_mini_batch_size: Positive = 64
    ppo_micro_batch_size: Positive | None = None  # rows; only with use_dynamic_bsz=false
    ppo_epochs: PpoEpochs = 4
    shuffle: bool = True
    clip_ratio: Above = 0.2
    clip_ratio_low: Above | None = None
    clip_ratio_high: Above | None = None
    clip_ratio_c: Annotated[float, Field(gt=1, le=HIGHEST)] = 3.0
    use_kl_loss: bool = True
    kl_loss_coef: Rate | None = None  # default: algorithm.kl_ctrl.kl_coef, else 0.05
    kl_loss_type: KlLossKind | None = None  # default: off_policy where behavior is known, else k3_soft
    entropy_coeff: float = 0.0
    grad_clip: Above = 1.0
    loss_agg_mode: LossAggMode = "token-mean"
    use_dynamic_bsz: bool = True
    # Token budget of a micro-batch, of both roles; auto: timed when training starts, and kept.
    ppo_max_token_len_per_gpu: Positive | Literal["auto"] = 4096

    @property
    def token_budget(self) -> int:
        """As given; where it is still to be timed, the default."""
        given = self.ppo_max_token_len_per_gpu
        return 4096 if given == "auto" else given


class CriticModel(Section):
    path: MaybePlace = None  # default: the actor's start policy with a new head
    # With model.lora_rank: adapters and a head on the actor's own frozen weights, in place of a second model.
    share_trunk: bool = False


class Critic(Section):
    """The value function's fit and update. What is not given follows the actor."""

    model: CriticModel = CriticModel()
    optim: Optim = Optim(lr=1e-5)
    ppo_mini_batch_size: Positive | None = None
    ppo_micro_batch_size: Positive | None = None
    ppo_epochs: PpoEpochs | None = None
    cliprange_value: Above = 0.2
    grad_clip: Above = 1.0
    # With runtime: ray, on workers of its own, which update while the actor's do; as many as the actor has.
    placement: Literal["colocated", "separate"] = "colocated"
    fit_until: float = 0.5  # explained variance on the hold-out at which fitting before PPO ends


class KlCtrl(Section):
    """How the coefficient of the KL that is on moves between batches."""

    type: Literal["fixed", "adaptive", "moving_average", "schedule"] = "fixed"
    kl_coef: Rate | None = None  # of the KL that is on: the loss's unless kl_loss_coef is given
    target_kl: Above = 0.1  # nats per token
    horizon: Above = 10000  # rows; a moving average forgets as fast
    schedule: Schedule | None = None  # [[share of the batches done, coefficient], ...]
    shape: Literal["pieces", "linear", "smooth"] = "pieces"  # of the schedule between its points


class RolloutCorrection(Section):
    """Off-policy correction by old / behavior; `preset` sets the others where they are not given."""

    preset: Preset | None = None
    rollout_is: Literal["auto", "token", "sequence", "geometric"] | None = (
        "auto"  # auto: token if behavior known
    )
    rollout_is_threshold: Annotated[float | str, AfterValidator(weight_bounds_ok)] = (
        2.0  # u, or "lo_hi": 0 outside
    )
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None  # rejection rules, separated by commas
    rollout_rs_threshold: float | str | None = None  # one for all rules, or one for each
    bypass_mode: bool = False  # behavior is the ratio's denominator; no old policy
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"  # of bypass mode


class FilterGroups(Section):
    enable: bool = False


class Algorithm(Section):
    """What is maximised. `method` sets estimator, loss and correction where they are not given themselves."""

    method: MethodName = "ppo"
    adv_estimator: Estimator | None = "gae"  # null: no advantages (bc, dpo)
    norm_adv_by_std_in_grpo: bool = True
    gamma: Share = 1.0
    lam: Share = 0.95
    use_kl_in_reward: bool = False
    kl_penalty: KlKind = "k1"
    kl_ctrl: KlCtrl = KlCtrl()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    filter_threshold: float | None = None  # train only on rows that score at least this
    filter_groups: FilterGroups = FilterGroups()  # leave out prompts whose responses all score the same
    insist: bool = False  # allow what is known not to restrain on stored data (k1 as a loss, two KLs at once)


class OverlongBuffer(Section):
    """A soft limit (DAPO): what is taken off grows over the last `len` tokens before the limit."""

    enable: bool = False
    len: Positive | None = None  # tokens; the limit is data.max_response_length
    penalty_factor: Rate = 1.0  # taken off at the limit


class RewardManager(Section):
    """Shaping of scores, in the order of the keys; `score:` says which of them move a row's total."""

    normalize: Literal["dataset"] | None = None  # score: (s - mean) / std over the training rows, once
    clip_range: Annotated[tuple[float, float], AfterValidator(ordered)] | None = None  # score: clipped
    missing_eos_penalty: Rate = 0.0  # score: less this where finish_reason is not stop (an end token is one)
    overlong_buffer: OverlongBuffer = OverlongBuffer()  # score: less what DAPO's soft limit takes
    length_penalty: Rate = 0.0  # score: less this for each counted token beyond length_penalty_free
    length_penalty_free: Count = 0
    repetition_penalty: Rate = 0.0  # score: less this times the share of n-grams that stood there before
    repetition_ngram: Positive = 4
    placement: Literal["last", "uniform", "exponential"] | None = None  # default: as stored, or last
    placement_decay: Annotated[float, Field(gt=0, le=1)] | None = None  # exponential's: a token / the next


class Trainer(Section):
    """The training loop: lengths and intervals count global steps (one step = one batch)."""

    total_epochs: Positive = 1
    total_training_steps: Positive | None = None
    critic_warmup: Count = 100  # critic updates before the actor moves; see fit_until
    test_freq: Every = -1  # validate every so many steps, and always at the end; -1: only at the end
    val_before_train: bool = True
    val_prompts: Positive = 200
    save_freq: Every = -1  # snapshot every so many steps, and always at the end
    # By `rein run`: after so many steps fresh rollouts of the actor, scored, and on with them; 1 is on-policy
    # PPO. -1: only where a guard asks for them.
    refresh_every: Every = -1
    keep_versions: Positive = 1  # of the policies whose rows are trained on after that: the newest
    keep_trajectories: Count = 32  # of each batch, the furthest moved, in train/tokens/; 0: none
    profile: list[Positive] = []  # steps of which train/profile/ gets a trace, of rank 0
    # console jsonl (always) tensorboard wandb mlflow swanlab trackio, or "pkg.mod:name"
    logger: Annotated[list[TrackerName], BeforeValidator(as_list)] = ["console", "jsonl"]
    project_name: str = "rein"  # of trackers
    experiment_name: str | None = None  # of the run in trackers; default: the last part of `out`


class Guards(Section):
    """What is checked before and after updates, and the probe; counts are of updates."""

    preset: Literal["cautious", "standard", "off"] = "standard"
    rules: GuardRules = []  # beside the preset's, or of its names; a function: "pkg.mod:name"
    probe_every: Annotated[int, Field(ge=8, le=MOST)] = 8  # updates between probes of 64 held-out rows
    max_skips: Positive = 10  # updates in a row with a non-finite loss or gradient before the run stops
    snapshot_every: Every = 32  # updates between rollback points; -1: only the start and the best
    confirm_steps: Positive = 16  # a rollback point is good when probes so many updates later are healthy
    max_rollbacks: Count = 3  # the next one pauses the run
    calm: Count = 0  # healthy probes after which remedies give back half; 0: they hold
    webhook: str | None = None  # URL that every event is posted to as JSON


class Evaluate(Section):
    """Before and after, on prompts nothing else has touched."""

    files: Files = []  # prompts; default: data.val_files
    reward: Rewards | None = None  # the truth; default: score.reward
    generate: bool = True  # false: nothing is generated; held-out stored rows are weighed, in train too
    before: MaybePlace = None  # default: what train started from
    after: MaybePlace = None  # default: train's best
    pass_k: Count = 8  # answers sampled per prompt for pass@k; 0: greedy only
    seeds: Positive = 1  # so many times, each from a seed of its own
    temperature: Above = 1.0  # of those samples
    pattern: Annotated[str, AfterValidator(expression)] | None = None  # what a well-formed answer matches
    max_prompts: Positive | None = None
    batch_size: Positive = 128


class Gate(Section):
    """What a model must show before it is exported; null turns a check off. A number not known is no pass."""

    enable: bool | None = None  # default: where evaluate is among stages, or has judged what is exported
    min_score: float | None = None  # held out
    min_lift_low: float | None = 0.0  # the lower end of the lift's 95 % interval lies above this
    min_prompts: Positive | None = 50  # judged
    max_kl: Rate | None = 0.3  # to the reference on the probe, nats per token
    max_length_ratio: Above | None = 2.0  # tokens of an answer over the start model's
    max_format_drop: Share | None = 0.05  # of well-formed answers: those that end and match evaluate.pattern
    max_repetition: Share | None = 0.2  # repeated 4-grams, beyond the start model's share
    proxy_agrees: bool = True  # the proxy does not rise while the held-out score falls
    require_no_guard_stop: bool = True  # no guard ended the run, or it was taken up again


class Export(Section):
    """A Hugging Face folder, written where the gate lets it pass and its reload equals what was exported."""

    path: MaybePlace = None  # what to export; default: train's best
    to: MaybePlace = None  # default: <out>/export/model
    kind: Literal["actor", "critic", "reward"] = (
        "actor"  # the last two: default train's critic, reward's model
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None  # default: the source's own
    adapter_only: bool = False  # the adapters alone, of an actor that has any
    force: bool = False  # also what did not pass the gate; recorded


Stage = Literal["sft", "reward", "rollout", "score", "train", "evaluate", "export", "report"]


class Recipe(Section):
    """A whole run. Sections of stages that are not run may be left out."""

    out: Place = "runs/run"
    seed: int = 0
    resume: Place = "auto"  # auto | never | a snapshot folder
    cache: MaybePlace = None  # what frozen models said; default: rein-cache beside `out`, shared by its runs
    # fsdp: sft, reward and train over several processes; ray: over workers of a Ray cluster, other work too.
    runtime: Literal["single", "fsdp", "ray"] = "single"
    nproc: Positive = 1  # of them on each machine; under torchrun the number that it was given
    nnodes: Positive = 1  # machines; with runtime: fsdp torchrun starts what is on more than one
    restarts: Count = 0  # times that a stage which lost a process begins again from its newest snapshot
    fsdp: Fsdp = Fsdp()
    ray: Ray = Ray()
    threads: Annotated[int, Field(gt=0, le=MOST_THREADS)] | None = None  # CPU threads; default: all cores
    stages: Annotated[list[Stage], BeforeValidator(as_list), Field(min_length=1)] = ["train"]
    model: Model = Model()
    data: Data = Data()
    sft: Sft = Sft()
    reward: RewardModel = RewardModel()
    rollout: Rollout = Rollout()
    score: Score = Score()
    actor: Actor = Actor()
    critic: Critic = Critic()
    algorithm: Algorithm = Algorithm()
    reward_manager: RewardManager = RewardManager()
    trainer: Trainer = Trainer()
    guards: Guards = Guards()
    evaluate: Evaluate = Evaluate()
    gate: Gate = Gate()
    export: Export = Export()

    @property
    def ranks(self) -> int:
        """Processes that share the models of a stage."""
        return 1 if self.runtime == "single" else self.nproc * self.nnodes

    @property
    def data_seed(self) -> int:
        """What the hold-out split and the order of rows follow from."""
        return self.seed if self.data.seed is None else self.data.seed

    @model_validator(mode="after")
    def _sizes_fit(self) -> Recipe:
        mini = self.actor.ppo_mini_batch_size
        if mini > self.data.train_batch_size:
            raise ValueError(
                f"actor.ppo_mini_batch_size {mini} is larger than data.train_batch_size "
                f"{self.data.train_batch_size}; both count rows, so lower the first or raise the second"
            )
        if not self.actor.use_dynamic_bsz and self.actor.ppo_micro_batch_size is None:
            raise ValueError("actor.use_dynamic_bsz is false; give actor.ppo_micro_batch_size (rows) too")
        return self
