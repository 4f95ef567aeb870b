"""A progress bar for what takes more than a few seconds, on a terminal only.

In: how much is done. Out: a bar on stderr after PATIENCE seconds; nothing where stderr is no terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

PATIENCE = 3.0  # seconds


@contextmanager
def progress(what: str, total: int, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`, to be called as n of `total` are done."""
    start, done = time.monotonic(), 0
    with ExitStack() as stack:
        bar = task = None

        def advance(n: int) -> None:
            nonlocal bar, task, done
            done += n
            if bar is None and show and sys.stderr.isatty() and time.monotonic() - start > PATIENCE:
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    Progress,
                    TextColumn,
                    TimeRemainingColumn,
                )

                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TimeRemainingColumn(),
                )
                bar = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
                task = bar.add_task(what, total=total)
            if bar is not None and task is not None:
                bar.update(task, completed=done)

        yield advance
