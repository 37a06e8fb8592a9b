"""`python -m tests.proof.program worker …`: the command `duly`, without the defences that `$PROOF_BREAK` names.

Its clock is as wrong as the file says that `$PROOF_CLOCK` names.
"""

from __future__ import annotations

import os
from pathlib import Path

from duly.cli import main
from tests.proof.breaks import apply_named

if __name__ == "__main__":
    apply_named()
    if "PROOF_CLOCK" in os.environ:
        from tests.proof import clocks

        clocks.follow(Path(os.environ["PROOF_CLOCK"]))
    main(prog_name="duly")
