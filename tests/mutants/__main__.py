"""Break the code on purpose and see a test fail: `make mutants`, or `make mutants ARGS="-k rescue"`.

Each mutant is one change to a copy of the package. A mutant with which its tests pass has survived, and fails the run.
"""

from __future__ import annotations

import argparse
import random
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutants import catalogue, fits, generate
from tests.mutants.catalogue import Mutant
from tests.mutants.drill import judged
from tests.mutants.relocate import relocate

ROOT = Path(__file__).parent.parent.parent
SECTION = re.compile(r"^(?=-- (?:name|fragment): )", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="only mutants whose file, text or test contains this")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="how many at once")
    parser.add_argument(
        "--generated", action="store_true", help="those that are made of the SQL, in place of the listed"
    )
    parser.add_argument("--sample", type=int, default=sys.maxsize, metavar="N", help="only so many, chosen at random")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10_000), help="repeat the choice of another run")
    parser.add_argument(
        "--changed", nargs="?", const="HEAD", metavar="COMMIT", help="only of what has changed since then"
    )
    parser.add_argument(
        "--fits", action="store_true", help="run nothing: list the mutants whose text or tests are missing"
    )
    parser.add_argument("--relocate", action="store_true", help="after code has moved: correct the lists")
    options = parser.parse_args()
    mutants = generate.generated(ROOT) if options.generated else catalogue.load()
    if options.relocate:
        catalogue.save(relocate(ROOT, mutants))
    if options.relocate or options.fits:
        sys.exit(show_misfits(catalogue.load()))
    chosen = [mutant for mutant in mutants if options.k in "\n".join(filter(None, mutant))]
    if not chosen:
        parser.error(f"no mutant contains {options.k!r}")
    if options.changed:
        chosen = changed(chosen, options.changed)
    if options.sample < len(chosen):
        print(f"{options.sample} of {len(chosen)} mutants by --seed {options.seed}", flush=True)
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    verdicts = [show(*each) for each in zip(chosen, judged(ROOT, chosen, options.j), strict=True)]
    survivors = verdicts.count(False)
    print(
        f"the tests of {len(verdicts) - survivors} of {len(verdicts)} mutants fail"
        + f", {survivors} survived" * bool(survivors)
    )
    sys.exit(1 if survivors else 0)


def changed(mutants: Sequence[Mutant], commit: str) -> list[Mutant]:
    """Choose the mutants of what has changed since a commit: modules, and sections of SQL."""
    parts: dict[str, list[str]] = {}
    for file in {mutant.file for mutant in mutants}:
        before = subprocess.run(
            ["git", "show", f"{commit}:{file}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        now = (ROOT / file).read_text("utf-8") if (ROOT / file).exists() else ""
        separate = SECTION.split if file.endswith(".sql") else lambda text: [text]
        parts[file] = [part for part in separate(now) if part not in separate(before.stdout)]
    return [mutant for mutant in mutants if any(mutant.old in part for part in parts[mutant.file])]


def show_misfits(mutants: Sequence[Mutant]) -> int:
    """Print the mutants that cannot be judged; return 1 if there are any."""
    misfits = fits.misfits(ROOT, mutants)
    for mutant, reason in misfits.items():
        print(f"{mutant.file}  {mutant.tests}\n    {reason}\n    {mutant.old!r}")
    print(f"{len(mutants) - len(misfits)} of {len(mutants)} mutants fit")
    return 1 if misfits else 0


def show(mutant: Mutant, verdict: str) -> bool:
    what = mutant.name or f"{mutant.file.removeprefix('src/duly/')}  {mutant.tests}"
    print(f"{'SURVIVED' if verdict else 'red':<9} {what}", flush=True)
    if verdict:
        print(f"          {verdict}", flush=True)
    if verdict and not mutant.name:
        print(f"          {mutant.old!r}\n       -> {mutant.new!r}", flush=True)
    return not verdict


if __name__ == "__main__":
    main()
