"""The table of methods: what `algorithm.method` fixes.

Imports nothing, so that a recipe is checked without torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Method:
    """What a method needs and optimises."""

    loss_mode: str  # an entry of learner.POLICY_LOSSES
    critic: bool  # has a value function
    corrects: bool  # can weigh tokens by old / behavior
    reference: bool  # keeps near the reference when a KL is on
    filters: bool = False  # trains only on rows that score at least algorithm.filter_threshold


METHODS = {
    "ppo": Method("ppo_clip", critic=True, corrects=True, reference=True),
    "filtered_bc": Method("nll", critic=False, corrects=False, reference=False, filters=True),
}
