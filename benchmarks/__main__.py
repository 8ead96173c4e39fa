"""Runs benchmarks: `python -m benchmarks NAME|all [--json]`, one line each."""

import argparse
import importlib
import json
from pathlib import Path

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
    for name in NAMES if chosen.name == "all" else [chosen.name]:
        result = importlib.import_module(f"benchmarks.{name}").run()
        if chosen.json:
            print(json.dumps(result), flush=True)
        else:
            rest = ", ".join(f"{key} {value}" for key, value in result.items() if key not in ("name", "ratio"))
            print(f"{name}: {result['ratio']} of the raw loop ({rest})", flush=True)


if __name__ == "__main__":
    main()
