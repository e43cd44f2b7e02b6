"""The names a recipe may choose from: KL kinds, losses, aggregations, estimators, methods, presets.

Tests hold them against the tables of config/methods.py and functional/.
"""

from typing import Literal

KlKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3_soft",
                 "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "k3_soft+",
                 "full", "full+"]  # fmt: skip
KlLossKind = KlKind | Literal["off_policy"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean",
                      "seq-mean-token-sum-norm", "token-sum"]  # fmt: skip
LossMode = Literal["ppo_clip", "vanilla", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dro",
                   "dppo_tv", "dppo_kl", "topr", "awr", "m2po", "sppo", "nll", "dpo"]  # fmt: skip
Estimator = Literal["gae", "vtrace", "monte_carlo", "grpo", "rloo", "reinforce_plus_plus",
                    "reinforce_plus_plus_baseline", "remax", "opo", "win_rate"]  # fmt: skip
MethodName = Literal["auto", "ppo", "grpo", "topr", "awr", "m2po", "sppo", "dpo", "bc", "filtered_bc"]
Preset = Literal["disabled", "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop",
                 "decoupled_seq_is_rs", "decoupled_geo_rs", "decoupled_geo_rs_seq_tis",
                 "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_seq_tis",
                 "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs",
                 "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop", "bypass_pg_geo_rs",
                 "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis"]  # fmt: skip
TRACKERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
