"""`python -m payload.orchestrate` with the stand-in program as the trainer.

cli.py OPTIONS_OF_THE_STAND_IN -- ARGUMENTS
"""

from __future__ import annotations

import os
import sys

from payload.orchestrate.__main__ import main
from tests.supervise.planned import StandInAccess

if __name__ == "__main__":
    split = sys.argv.index("--")
    access = StandInAccess(os.environ)
    access.options = sys.argv[1:split]
    sys.exit(main(sys.argv[split + 1 :], os.environ, access=access))
