"""What a person sees when the server is ready: what fits in memory, where it listens, and lines to copy."""

import json
import shlex
from collections.abc import Mapping

from jaxpaged import events
from server.dashboard.files import PAGE_PATH

MIB = 2**20


def memory_table(started: events.EngineStarted) -> list[str]:
    """Weights, pool, and what fits in it; of one copy of the model, where there are several."""
    num_tokens = started.num_pages * started.page_size
    pages_of_longest = -(-started.max_model_len // started.page_size)
    rows = [
        ("weights", f"{started.weight_bytes / MIB:,.1f} MiB ({started.quantization or started.dtype})"),
        ("page pool", f"{started.pool_bytes / MIB:,.1f} MiB"),
        ("pages", f"{started.num_pages:,} of {started.page_size} tokens"),
        ("tokens that fit", f"{num_tokens:,}"),
        ("requests at full length", f"{started.num_pages // pages_of_longest:,} of {started.max_model_len:,} tokens"),
        ("requests at once", f"{started.max_num_seqs:,}"),
        *([("copies", f"{started.num_engines:,}, each with all of this")] if started.num_engines > 1 else []),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return [f"  {name:<{width}}{value}" for name, value in rows]


def phase_times(phases: Mapping[str, float], total_s: float) -> str:
    """`ready in 8.1 s (find 0.1, load 2.0, pool 0.3, compile 5.4, warm up 0.2)`."""
    parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in phases.items())
    return f"ready in {total_s:.1f} s" + (f" ({parts})" if parts else "")


def lines_to_copy(url: str, model: str, *, has_key: bool) -> list[str]:
    """How to call it: with curl, from Python, and from any program that speaks OpenAI's protocol."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    header = ' -H "authorization: Bearer $OPENAI_API_KEY"' if has_key else ""
    key = '"YOUR KEY"' if has_key else '"EMPTY"'
    return [
        f"  curl {url}/v1/chat/completions{header} -H 'content-type: application/json' -d {shlex.quote(body)}",
        "",
        f'  from openai import OpenAI; client = OpenAI(base_url="{url}/v1", api_key={key})',
        "",
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={'...' if has_key else 'EMPTY'}",
    ]


def ready_report(
    started: events.EngineStarted, phases: Mapping[str, float], *, url: str, model: str, has_key: bool, admin: str | None
) -> str:
    """The whole text."""
    lines = [f"{model}: {phase_times(phases, started.seconds)}", "", *memory_table(started), ""]
    lines += [f"serving {model} at {url}/v1 (Ctrl-C stops it)", *([f"operators' calls at {admin}"] if admin else [])]
    lines += [f"the live page at {url}{PAGE_PATH}", ""]
    return "\n".join([*lines, *lines_to_copy(url, model, has_key=has_key)]) + "\n"
