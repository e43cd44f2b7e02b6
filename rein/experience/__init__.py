"""A batch made ready for updates: maker.py puts it together; passes.py asks the models, on all ranks."""

from rein.experience.maker import ExperienceMaker as ExperienceMaker
from rein.experience.maker import value_metrics as value_metrics
from rein.experience.passes import Passes as Passes
from rein.experience.passes import in_micro_batches as in_micro_batches
from rein.experience.passes import padded as padded
from rein.experience.passes import temperatures as temperatures
