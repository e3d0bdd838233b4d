"""A diagnosis as text, and as JSON."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from jaxpaged.diagnose.findings import Change, Evidence, Finding
from jaxpaged.diagnose.rules import RULES
from jaxpaged.diagnose.windows import Observation


def as_json(findings: Sequence[Finding], seen: Observation) -> dict[str, Any]:
    """{healthy, findings: [{id, severity, since, evidence: [{metric, value, unit, threshold, from, to}], change, expect}]}."""
    return {"healthy": not findings, "findings": [_finding(finding, seen.is_dated) for finding in findings]}


def _finding(finding: Finding, is_dated: bool) -> dict[str, Any]:
    change = finding.change
    told: dict[str, Any] = {"option": change.option, "from": change.from_value, "to": change.to_value} if change.option else {}
    if change.advice:
        told["advice"] = change.advice
    return {
        "id": finding.id,
        "severity": finding.severity,
        "since": time_text(finding.since, is_dated),
        "evidence": [
            {
                "metric": item.metric,
                "value": round(item.value, 6),
                "unit": item.unit,
                "threshold": round(item.threshold, 6),
                "from": time_text(item.from_time, is_dated),
                "to": time_text(item.to_time, is_dated),
            }
            for item in finding.evidence
        ],
        "change": told,
        "expect": finding.expect,
    }


def as_text(findings: Sequence[Finding], seen: Observation) -> str:
    """The verdict for people: what, why, what to change and what to expect; the first finding first."""
    seconds = sum(window.seconds for window in seen.windows)
    lines = [f"{seen.source}: {len(seen.windows)} samples over {seconds:.0f} s", ""]
    if not findings:
        return "\n".join([*lines, "healthy: nothing found", *_figures(seen)]) + "\n"
    for number, finding in enumerate(findings):
        lines.append(f"{'also ' if number else ''}{finding.severity}: {finding.title} ({finding.id})")
        lines.append(f"  since   {time_text(finding.since, seen.is_dated)}")
        lines += [f"  because {_evidence(item)}" for item in finding.evidence]
        lines.append(f"  change  {remedy_of(finding)}")
        lines += [f"  expect  {finding.expect}", ""]
    return "\n".join(lines)


def remedy_of(finding: Finding) -> str:
    """What to change, in words, with the present and the better value where they are known."""
    return _change(finding.change, next(rule.remedy for rule in RULES if rule.id == finding.id))


def _evidence(item: Evidence) -> str:
    return f"{item.metric}: {_number(item.value)} {item.unit} (threshold {_number(item.threshold)})".replace("  ", " ")


def _change(change: Change, remedy: str) -> str:
    if not change.option:
        return change.advice
    value = (
        ""
        if change.to_value is None
        else f"{change.option}: {'' if change.from_value is None else f'{change.from_value} -> '}{change.to_value}; "
    )
    return f"{value}{remedy.replace('`', '')}"


def _figures(seen: Observation) -> list[str]:
    lines = []
    for name, unit in (("first_tokens", "first token"), ("gaps", "gap between tokens")):
        if spread := seen.spread(name):
            lines.append(f"  {unit}: median {_number(spread.quantile(0.5))} s, P95 {_number(spread.quantile(0.95))} s")
    generated, seconds = seen.total("generated"), sum(window.seconds for window in seen.working)
    if generated and seconds:
        lines.append(f"  generation: {_number(generated / seconds)} tokens/s while there was work")
    return lines


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"


def time_text(at_s: float, is_dated: bool) -> str:
    """A date where there is one, else seconds from the first sample."""
    if not is_dated:
        return f"{at_s:.1f} s"
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def rule_table() -> str:
    """The table of docs/operations.md."""
    lines = ["| finding | severity | what is wrong | asked | change | expect |", "|---|---|---|---|---|---|"]
    lines += [f"| `{rule.id}` | {rule.severity} | {rule.title} | {rule.question} | {rule.remedy} | {rule.expect} |" for rule in RULES]
    return "\n".join(lines) + "\n"


def flow_chart() -> str:
    """The flow chart of docs/operations.md: the questions one after another, in mermaid."""
    lines = ["```mermaid", "flowchart TD"]
    for number, rule in enumerate(RULES):
        following = f"q{number + 1}" if number + 1 < len(RULES) else "healthy"
        question = rule.question.replace("`", "").replace('"', "'")
        lines += [f'  q{number}{{"{question}"}} -- yes --> {rule.id}["{rule.title}"]', f"  q{number} -- no --> {following}"]
    return "\n".join([*lines, '  healthy(["healthy"])', "```"]) + "\n"
