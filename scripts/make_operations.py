"""Writes the parts of docs/operations.md that are made from tables: figures, findings and their flow chart.

python scripts/make_operations.py
"""

from pathlib import Path

from jaxpaged.diagnose.report import flow_chart, rule_table
from jaxpaged.metric_table import document

PARTS = {"figures": document, "findings": rule_table, "flow chart": flow_chart}
PATH = Path(__file__).parent.parent / "docs" / "operations.md"


def main() -> None:
    """Replaces what is between `<!-- name -->` and the next `<!-- end -->`."""
    text = PATH.read_text(encoding="utf-8")
    for name, make in PARTS.items():
        mark = f"<!-- {name} -->\n"
        head, found, rest = text.partition(mark)
        if not found:
            raise SystemExit(f"{PATH} has no line {mark.strip()}")
        text = f"{head}{mark}\n{make()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
