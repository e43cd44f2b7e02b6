"""The structural audit: data files in, a dict of facts for JSON out. No model; a tokenizer if there is one.

FACTS says what is in it. Rows are judged by the loader's own rules (reading.py), counted as they pass
(tally.py) and never all held: memory is one batch, and some 50 bytes a usable row.
"""

from rein.data.audit.run import FACTS as FACTS
from rein.data.audit.run import audit as audit
