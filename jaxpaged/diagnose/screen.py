"""What `jaxpaged top` draws: the last moments of a server on one screen, with the present verdict."""

from collections.abc import Sequence

from jaxpaged.config import DiagnoseConfig
from jaxpaged.diagnose.rules import diagnose
from jaxpaged.diagnose.scrapes import Scrape, observe
from jaxpaged.diagnose.windows import Observation, Window, seconds_of
from jaxpaged.histograms import Spread
from jaxpaged.log_format import clean

UNKNOWN = "-"
BAR_CHARS = 30
MIN_SAMPLES = 3


def draw(scrapes: Sequence[Scrape], source: str, limits: DiagnoseConfig, width: int = 100) -> str:
    """One screen, each line at most `width` characters.

    Args:
        scrapes: the last ones, at least one.
        source: what is watched.
        limits: thresholds of the verdict.
        width: of the terminal.
    """
    seen = observe(scrapes, source)
    facts = " ".join(text for name in ("model", "dtype", "platform") if (text := seen.facts.get(name)))
    lines = [f"jaxpaged top   {clean(source, 80)}   {clean(facts, 80)}".rstrip(), ""]
    if not seen.windows:
        return _cut([*lines, "waiting for a second look"], width)
    now = seen.windows[-1]
    most = seen.limits.get("max_num_seqs")
    lines += [
        f"answers      {_rate(seen, 'generated')} tokens/s",
        f"prompts      {_rate(seen, 'prefill')} tokens/s computed",
        f"requests     {_rate(seen, 'finished')} ended per second, {_text(seen.total('refused'))} refused",
        f"first token  {_quantiles(seen.spread('first_tokens'))}",
        f"token gap    {_quantiles(seen.spread('gaps'))}",
        "",
        f"running      {_text(now.running)}{f' of {most:.0f}' if most else ''} {_bar(now.running, most)}",
        f"waiting      {_text(now.waiting)}",
        f"page pool    {_percent(now.pool)} {_bar(now.pool, 1.0)}",
        f"batch        {_text(now.rows, 1)} sequences, padding {_percent(_padding(now))}",
        f"step         {_step(now)}",
        f"preempted    {_text(seen.total('preempted'))}, {_text(seen.total('recomputed'))} tokens computed again",
        "",
        *_verdict(seen, limits),
    ]
    return _cut(lines, width)


def _verdict(seen: Observation, limits: DiagnoseConfig) -> list[str]:
    if len(seen.windows) < MIN_SAMPLES:
        return ["verdict      too early to say"]
    findings = diagnose(seen, limits)
    if not findings:
        return ["verdict      healthy"]
    return [f"verdict      {finding.severity}: {finding.title} ({finding.id})" for finding in findings[:3]]


def _rate(seen: Observation, name: str) -> str:
    total, seconds = seen.total(name), seconds_of(seen.windows)
    return UNKNOWN if total is None or not seconds else f"{total / seconds:.1f}"


def _quantiles(spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    return "   ".join(f"P{share * 100:.0f} {spread.quantile(share):.3f} s" for share in (0.5, 0.95, 0.99))


def _padding(window: Window) -> float | None:
    if window.padding is None or not window.computed:
        return None
    return window.padding / (window.padding + window.computed)


def _step(window: Window) -> str:
    if not window.steps or not window.busy_s or window.device_s is None:
        return UNKNOWN
    return f"{1000 * window.busy_s / window.steps:.1f} ms, {_percent(window.device_s / window.busy_s)} of it the device's"


def _bar(value: float | None, most: float | None) -> str:
    if value is None or not most:
        return ""
    filled = round(BAR_CHARS * min(1.0, max(0.0, value / most)))
    return "[" + "#" * filled + "." * (BAR_CHARS - filled) + "]"


def _text(value: float | None, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def _cut(lines: Sequence[str], width: int) -> str:
    return "".join(f"{line.rstrip()[:width]}\n" for line in lines)
