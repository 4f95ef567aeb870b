"""From a parser's complaint to one line that names file, line and key. style.md "Errors speak to the user".

In:  jsonargparse's message, the YAML files of the command, and the arguments. Out: what the user reads.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

SECTIONS = ("model", "data", "trainer", "checkpoint", "progress")
TOP_LEVEL = (
    *SECTIONS,
    "seed_everything",
    "name",
    "overwrite",
    "ckpt_path",
)
_OPTION = re.compile(r"Option '([\w.]+)' is not accepted")
_NO_OPTION = re.compile(r"does not accept option '([\w.]+)'")
_UNRECOGNISED = re.compile(r"unrecognized arguments: (\S+?)(?:[ =]|$)")
_UNION = re.compile(r'Parser key "([\w.]+)": Does not validate against any of the Union subtypes')
_NO_SUBCLASS = re.compile(r"Import path ([\w.]+) does not correspond to a subclass of (\w+)")
_TYPE = re.compile(r'(?:Parser key "([\w.]+)"): (Expected .*?)\. Got value: (.+?)(?: - |$)')
_SECTION = re.compile(r'Parser key "([\w.]+)"')
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)': (.+?)(?: - |$)")


def check_yaml(file: str) -> None:
    """Raise ValueError naming file and line where a YAML file is no YAML, or holds no mapping of distinct names."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise ValueError(f"{file}: holds no settings")
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(
                f"{file}, line {node.start_mark.line + 1}: the file must hold `key: value` lines"
            )
        _check_keys(node, file, ())
        yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error.reason}), so not YAML") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{file}{line}: not valid YAML ({error.problem})") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not valid YAML ({str(error).splitlines()[0]})") from None


def _check_keys(node: Any, file: str, above: tuple[Any, ...]) -> None:
    """ValueError for a key that is no name or stands twice, a section without content, a node inside itself."""
    line = f"{file}, line {node.start_mark.line + 1}"
    if any(node is outer for outer in above):
        raise ValueError(f"{line}: the alias of this node stands inside it")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, file, (*above, node))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = f"{file}, line {key.start_mark.line + 1}"
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if key.tag != "tag:yaml.org,2002:str":
            raise ValueError(f"{line}: a key must be a name, such as `trainer:`")
        if key.value in seen:
            raise ValueError(
                f"{line}: key {key.value} stands here a second time (first in line {seen[key.value]})"
            )
        seen[key.value] = key.start_mark.line + 1
        if not above and key.value in SECTIONS and not isinstance(value, yaml.MappingNode):
            raise ValueError(
                f"{line}: {key.value} must hold `key: value` lines of its own; fill it or remove it"
            )
        _check_keys(value, file, (*above, node))


def explain(message: str, files: Sequence[str], arguments: Sequence[str]) -> str:
    """One line about a parser's error.

    Args:
        message: what jsonargparse says, on one line.
        files: the YAML files of the command, in order.
        arguments: its command-line arguments.
    """
    section = match[1] if (match := _SECTION.search(message)) else ""
    if match := _UNRECOGNISED.search(message):
        kind = "option" if match[1].startswith("-") else "argument"
        return f"the command line: unknown {kind} {match[1]}"
    if "arguments are required" in message:
        return f"{message}: name a recipe, such as --config stage2.yaml"
    if match := _OPTION.search(message) or _NO_OPTION.search(message):
        key = match[1]
        if not section and key.partition(".")[0] not in TOP_LEVEL:
            key = key.partition(".")[0]
        where, full = _find(key, section, files, arguments)
        return f"{where}: unknown key {full}{_suggestion(key.rpartition('.')[2], section, files)}"
    if match := _TYPE.search(message):
        where, full = _find(match[1], section, files, arguments)
        return f"{where}: {full} is {match[3].strip()!r}, {_plain_type(match[2])}"
    if match := _CLASS.search(message):
        where, _ = _find("class_path", section, files, arguments, value=match[1])
        return f"{where}: class_path {match[1]} cannot be loaded: {match[2]}"
    if unions := _UNION.findall(message):  # the innermost is the value, those around it are its section
        where, full = _find(unions[-1], unions[0] if len(unions) > 1 else "", files, arguments)
        if wrong := _NO_SUBCLASS.search(message):
            return f"{where}: {full}: class_path {wrong[1]} is no {wrong[2]}"
        kinds = message.rpartition("Subtypes: [")[2].partition("] Errors:")[0]
        names = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", kinds).replace("NoneType", "null")
        return f"{where}: {full} has a value of the wrong type, expected one of {names}"
    return f"{message} (from {', '.join(files)} and the command line)" if files else message


def _find(
    key: str, section: str, files: Sequence[str], arguments: Sequence[str], value: str | None = None
) -> tuple[str, str]:
    """Where a key stands (the last file wins, as in parsing), and its full name."""
    wanted = key.split(".")
    for argument in reversed(arguments):
        name = argument.partition("=")[0].removeprefix("--")
        if argument.startswith("--") and value is None and name.split(".")[-1] == wanted[-1]:
            return "the command line", f"--{name}"
    for file in reversed(files):
        node = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        for path, key_node, value_node in _keys(node):
            inside = not section or path[: len(section.split("."))] == section.split(".")
            if (
                inside
                and path[-len(wanted) :] == wanted
                and value in (None, getattr(value_node, "value", None))
            ):
                return f"{file}, line {key_node.start_mark.line + 1}", ".".join(path)
    # An option like modell.init_args.lr: its first unknown part is what stands in the file.
    if len(wanted) > 1:
        return _find(".".join(wanted[:-1]), section, files, arguments, value)
    return "the command line or its files", f"{section}.{key}" if section else key


def _keys(node: Any, above: tuple[str, ...] = ()) -> list[tuple[list[str], Any, Any]]:
    """All keys of a YAML tree: path, key node, value node."""
    found: list[tuple[list[str], Any, Any]] = []
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, str(key.value))
            found.append((list(path), key, value))
            found += _keys(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            found += _keys(item, above)
    return found


def _suggestion(key: str, section: str, files: Sequence[str]) -> str:
    """` (did you mean …?)` from the signature of the section's class, or from the Trainer's."""
    known: set[str] = set()
    for file in files:
        config = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
        part = config.get(section) if section else None
        if isinstance(part, dict) and isinstance(part.get("class_path"), str):
            module, _, name = part["class_path"].rpartition(".")
            known |= set(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    if not section:
        from lightning.pytorch import Trainer

        known |= {*TOP_LEVEL, *inspect.signature(Trainer).parameters}
    close = difflib.get_close_matches(key, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _plain_type(text: str) -> str:
    return (
        re.sub(r"<class '([\w.]+)'>", r"\1", text)
        .replace("Expected a ", "expected ")
        .replace("Expected", "expected")
    )
