"""python -m rein"""

from rein.cli import main

raise SystemExit(main())
