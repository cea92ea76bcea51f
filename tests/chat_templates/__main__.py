"""`python -m tests.chat_templates`: the table of every chat template, `prepare` and an oracle."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.chat_templates.conversations import ROWS
from tests.chat_templates.sources import all_templates
from tests.chat_templates.table import OUTCOMES, WRONG, outcomes


def main() -> int:
    """Print the table; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="templates whose name has TEXT")
    parser.add_argument("--refusals", action="store_true", help="print the refusals, too")
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    templates = {name: text for name, text in all_templates().items() if arguments.only in name}
    for name, text in templates.items():
        for row, outcome in outcomes(text).items():
            counts[row, outcome.kind] += 1
            if outcome.kind == WRONG or (arguments.refusals and outcome.detail):
                print(f"{name}, {row}: {outcome.kind}: {outcome.detail}", flush=True)
    print(f"\n{len(templates)} templates\n\n| | {' | '.join(OUTCOMES)} |")
    print("|---|" + "--:|" * len(OUTCOMES))
    for row in ROWS:
        print(f"| {row} | " + " | ".join(str(counts[row, kind]) for kind in OUTCOMES) + " |")
    return int(any(counts[row, WRONG] for row in ROWS))


if __name__ == "__main__":
    sys.exit(main())
