"""``python -m tests.fuzz [NAME ...] [--seconds S] [--count N] [--seed K] [--option NAME=VALUE] [--out DIR]``: the
campaigns named, or all.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from . import NAMES, campaign, driver


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzzes gradc; the status is 1 where something was found."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"campaigns, all if none is named: {', '.join(NAMES)}")
    parser.add_argument("--seconds", type=float, help="for all campaigns together")
    parser.add_argument("--count", type=int, help="seeds of each campaign")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of a campaign")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder of reproducers")
    given = parser.parse_args()
    names = given.names or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"no campaign {unknown[0]!r}; there are {', '.join(NAMES)}")
    options = dict(text.partition("=")[::2] for text in given.option)
    if given.seconds is None and given.count is None:
        given.seconds = 60.0 * len(names)
    tallies = []
    for name in names:
        chosen = campaign(name)
        absent = [package for package in chosen.needs if importlib.util.find_spec(package) is None]
        strange = options.keys() - chosen.options.keys()
        if absent or chosen.missing():
            print(f"{name}: left out, {f'there is no {absent[0]}' if absent else chosen.missing()}")
            continue
        if strange and len(names) == 1:
            parser.error(f"{name} has no option {min(strange)!r}; it has {', '.join(chosen.options) or 'none'}")
        own = {**chosen.options, **{k: v for k, v in options.items() if k in chosen.options}}
        tallies.append(
            driver.run(chosen, given.seed, given.count, given.seconds and given.seconds / len(names), own, given.out)
        )
        for seed, outcome in tallies[-1].findings.items():
            print(f"--- {name}, seed {seed}: {outcome.verdict} {outcome.kind}\n{outcome.text}\n")
    print(driver.table(tallies))
    return int(any(tally.failed for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
