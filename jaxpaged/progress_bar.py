"""A progress bar for many prompts, on a terminal."""

import sys
from collections.abc import Callable


def progress_bar(total: int) -> Callable[[int | None, float], None] | None:
    """A function (done or None to finish, tokens per second) that draws on a terminal; None without one."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = progress.add_task("generate", total=total, rate=0.0)
    progress.start()

    def draw(done: int | None, rate: float) -> None:
        if done is None:
            progress.stop()
        else:
            progress.update(task, completed=done, rate=rate)

    return draw
