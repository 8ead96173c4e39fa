"""Runs benchmarks: `python -m benchmarks NAME|all [--json]`, one line each. It exits with 1 if a budget is broken."""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("__main__", "common", "following", "workers")
)


def main() -> None:
    """Run the named benchmark, or all of them one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    chosen = parser.parse_args()
    broken: list[str] = []
    for name in NAMES if chosen.name == "all" else [chosen.name]:
        result = importlib.import_module(f"benchmarks.{name}").run()
        if chosen.json:
            print(json.dumps(result), flush=True)
        else:
            rest = ", ".join(f"{key} {value}" for key, value in result.items() if key not in ("name", "ratio"))
            print(f"{name}: {result['ratio']} of the raw loop ({rest})", flush=True)
        broken += [f"{name}: {one}" for one in broken_budgets(result.get("budgets", {}))]
    if broken:
        sys.exit("\n".join(broken))


def broken_budgets(budgets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each of these budgets that does not hold: the figure, what was measured, and the budget."""
    return [
        f"{figure} was {one['measured']}, and its budget is {'at most' if 'most' in one else 'at least'} "
        f"{one.get('most', one.get('least'))}"
        for figure, one in budgets.items()
        if not one["holds"]
    ]


if __name__ == "__main__":
    main()
