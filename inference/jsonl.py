"""JSONL files of other people, read with errors that say where.

In: a file, one JSON object a line (formats.md). Out: each object with its place ("FILE, line 3"); its fields, checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file, line n", object) for every non-empty line of a JSONL file.

    Raises FileNotFoundError, or ValueError naming file and line: not UTF-8, not JSON, not an object, half a character.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give the path of a JSONL file")
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            if not raw.strip():
                continue
            where = f"{path}, line {number}"
            try:
                # The first line may carry a byte order mark.
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                record = json.loads(text)
                if (
                    "\\ud" in text.lower()
                ):  # half a surrogate pair has no UTF-8 form, so no file could hold it
                    json.dumps(record, ensure_ascii=False).encode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{where}: not UTF-8 ({error.reason}); re-encode the file as UTF-8"
                ) from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
            except UnicodeEncodeError:
                raise ValueError(
                    f"{where}: a string holds half a surrogate pair (\\ud800 to \\udfff); write the whole character"
                ) from None
            except (RecursionError, ValueError) as error:  # nested too deeply, or thousands of digits
                raise ValueError(f"{where}: not a record ({error})") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}")
            yield where, record


def field(
    record: dict[str, Any], key: str, kind: type | tuple[type, ...], where: str, parent: str = ""
) -> Any:
    """`record[key]`, checked; the error names file, line and the dotted field."""
    name = f"{parent}.{key}" if parent else key
    if key not in record:
        raise ValueError(f"{where}: field '{name}' is missing")
    value = record[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
        raise ValueError(f"{where}: field '{name}' must be {expected}, got {type(value).__name__}")
    return value
