"""Break the code on purpose and see a test fail: `make mutants`, or `make mutants ARGS="-k rescue"`.

Each mutant is one change to a copy of the package. A mutant with which its tests pass has survived, and fails the run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import fits, relocate
from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent.parent
HANGS_AFTER_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="only mutants whose file, text or test contains this")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="how many at once")
    parser.add_argument(
        "--fits", action="store_true", help="run nothing: list the mutants whose text or tests are missing"
    )
    parser.add_argument("--relocate", action="store_true", help="after code has moved: correct the file of each mutant")
    options = parser.parse_args()
    if options.fits:
        sys.exit(show_misfits())
    if options.relocate:
        relocate.show(relocate.relocate(ROOT))
    chosen = [mutant for mutant in MUTANTS if options.k in " ".join(mutant)]
    with ThreadPoolExecutor(options.j) as threads:
        verdicts = [show(mutant, verdict) for mutant, verdict in zip(chosen, threads.map(judge, chosen), strict=True)]
    survivors = len(verdicts) - sum(verdicts)
    print(f"{sum(verdicts)} of {len(verdicts)} mutants were noticed" + (f", {survivors} survived" if survivors else ""))
    sys.exit(1 if survivors or not verdicts else 0)


def show_misfits() -> int:
    """Print the mutants that cannot be judged; return 1 if there are any."""
    misfits = fits.misfits(ROOT, MUTANTS)
    for mutant, reason in misfits.items():
        print(f"{mutant.file}  {mutant.tests}\n    {reason}\n    {mutant.old!r}")
    print(f"{len(MUTANTS) - len(misfits)} of {len(MUTANTS)} mutants fit")
    return 1 if misfits else 0


def judge(mutant: Mutant) -> str:
    """Run the guarding tests on the broken package; empty when they turned red or hang, else what went wrong."""
    with tempfile.TemporaryDirectory(prefix="duly-mutant-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        broken = Path(folder) / mutant.file
        text = broken.read_text("utf-8")
        if text.count(mutant.old) != 1:
            return f"its text stands {text.count(mutant.old)} times in the file, not once"
        broken.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        environ = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(mutant.tests)]
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=HANGS_AFTER_S, check=False
            )
        except subprocess.TimeoutExpired:
            return ""
    match run.returncode:
        case 1:
            return ""
        case 0:
            return "no test noticed"
        case code:
            return f"the tests did not run (exit code {code}): {run.stdout[-300:]}"


def show(mutant: Mutant, verdict: str) -> bool:
    print(f"{'SURVIVED' if verdict else 'red':<9} {mutant.file.removeprefix('src/duly/')}  {mutant.tests}", flush=True)
    if verdict:
        print(f"          {verdict}\n          {mutant.old!r}\n       -> {mutant.new!r}", flush=True)
    return not verdict


if __name__ == "__main__":
    main()
