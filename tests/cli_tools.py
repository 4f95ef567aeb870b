"""What the tests of the command line share: small settings, and the one line a failure prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_modules import cli

FAST: dict[str, Any] = {"data.limit_train": 8, "data.batch_size": 4}


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a failing command prints."""
    assert cli.main([str(a) for a in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


def yaml_file(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name
