"""The same requests through static batches and through continuous batching: what is compared, and how, is told in
`jaxpaged.bench.static_batches`, which `jaxpaged bench static` runs too.

    python scripts/bench_static_vs_continuous.py [--model smollm2-135m] [--requests 64] [--rate R] [--seed 0] [--static-batch 16]

The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpaged.bench.static_batches import compare, ratio, table


def main() -> None:
    """Runs all ways and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second (default: all at the start)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--static-batch", type=int, default=16)
    args = parser.parse_args()
    rows = compare(args.model, args.requests, rate=args.rate, seed=args.seed, static_batch=args.static_batch)
    print(table(rows))
    print(f"\ncontinuous / static: {ratio(rows):.2f}x the tokens/s")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
