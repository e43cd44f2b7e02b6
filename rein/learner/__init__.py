"""The updates: what an experience teaches actor and critic, one mini-batch at a time.

plan.py says which rows and coefficients; learner.py accumulates, applies and keeps state, remote.py has it
done by workers; objective.py is the loss of a micro-batch; pairs.py that of preference pairs; imitation.py
adds demonstrations to the actor's.
"""

from rein.learner.learner import Learner as Learner
from rein.learner.learner import objectives as objectives
from rein.learner.plan import epochs_of as epochs_of
from rein.learner.plan import mini_batch_size as mini_batch_size
from rein.learner.plan import optimizer_steps as optimizer_steps
from rein.learner.remote import RemoteLearner as RemoteLearner
