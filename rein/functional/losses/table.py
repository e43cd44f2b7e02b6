"""The policy losses by name: the function, whose log-probs its ratio stands against, how it aggregates.

All take `(log_probs, <against>_log_probs, advantages, weights, mask, *, their options)`.
"""

from collections.abc import Callable
from typing import NamedTuple

from rein.functional.losses.awr import awr
from rein.functional.losses.cispo import cispo
from rein.functional.losses.dppo import dppo_kl, dppo_tv
from rein.functional.losses.geo_mean import geo_mean
from rein.functional.losses.gspo import gspo
from rein.functional.losses.imitation import imitate
from rein.functional.losses.m2po import m2po
from rein.functional.losses.policy_gradient import dro, gpg
from rein.functional.losses.ppo import ppo_clip
from rein.functional.losses.result import PolicyLoss
from rein.functional.losses.sapo import sapo
from rein.functional.losses.sppo import sppo
from rein.functional.losses.topr import topr


class Loss(NamedTuple):
    """One row of the table."""

    compute: Callable[..., PolicyLoss]
    options: tuple[str, ...]  # its keywords without a default
    against: str = "old"  # old, behavior or reference: what the second argument holds
    aggregate: str | None = None  # the only mode it is right in, or the one it was made for; None: any


_CLIP = ("clip_ratio_low", "clip_ratio_high")
_DUAL_CLIP = (*_CLIP, "clip_ratio_c")
PER_ROW = "seq-mean-token-mean"

LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(ppo_clip, _DUAL_CLIP),
    "vanilla": Loss(ppo_clip, _DUAL_CLIP),  # verl's name
    "gspo": Loss(gspo, _CLIP, aggregate=PER_ROW),
    "cispo": Loss(cispo, _CLIP),
    "geo_mean": Loss(geo_mean, _CLIP, aggregate=PER_ROW),
    "sapo": Loss(sapo, ("tau_pos", "tau_neg"), aggregate=PER_ROW),
    "gpg": Loss(gpg, ()),
    "dro": Loss(dro, ("beta",)),
    "dppo_tv": Loss(dppo_tv, _DUAL_CLIP),
    "dppo_kl": Loss(dppo_kl, _DUAL_CLIP),
    "topr": Loss(topr, (), against="behavior"),
    "awr": Loss(awr, ()),
    "m2po": Loss(m2po, ("kept",), against="behavior"),
    "sppo": Loss(sppo, (), against="reference", aggregate=PER_ROW),
    "nll": Loss(imitate, ()),
}
