"""Command lines of trainers: options classes become grouped flags, `--config FILE.yaml` sets any of them, flags win.

Names are checked against the options classes, values by `options.convert`, so that flag, file and keyword argument
agree.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from jaxtrl.trainers.options import check_names, convert, fields_of, hints, member_types

_EPILOG = (
    "Truth values: --packing, --packing true, --packing false and --no_packing. JSON values are quoted: "
    "--chat_template_kwargs '{\"enable_thinking\": false}'. Hyphens and underscores in flags are the same. "
    "Options of TRL that are refused, and why: README, 'Coming from TRL'."
)
_METAVARS = {bool: "BOOL", int: "INT", float: "FLOAT", list[float]: "FLOAT", dict: "JSON", str: "TEXT"}


class _Help(argparse.HelpFormatter):
    """Keeps the lines of a description that has several."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(super(_Help, self)._fill_text(line, width, indent) for line in text.splitlines())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence on stderr and exit code 2, without the usage text."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parse(
    classes: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
) -> tuple[Any, ...]:
    """One instance of each options class, from flags and the file that `--config` names.

    `argv` is `sys.argv[1:]` where it is None. An unknown or refused name or a wrong value, wherever it stands, prints
    one sentence on stderr and exits with code 2. Field names must differ between the classes.
    """
    parser = make_parser(classes, prog=prog, description=description)
    flags, rest = parser.parse_known_args([_underscores(text) for text in (sys.argv[1:] if argv is None else argv)])
    try:
        _refuse_rest(classes, rest)
        values = vars(flags)
        config = values.pop("config", None)
        chosen = {} if config is None else read_config(classes, Path(config))
        for name, text in values.items():
            chosen[name] = _convert_at(_owner(classes, name), name, text, "--")
        return tuple(cls(**{name: chosen[name] for name in fields_of(cls) if name in chosen}) for cls in classes)
    except (ValueError, TypeError) as error:
        parser.error(str(error))


def make_parser(classes: Sequence[type], *, prog: str | None = None, description: str | None = None) -> _Parser:
    """The parser of `parse`: every option with help text and default, in the groups of the fields. Values stay text."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--help] [--config FILE.yaml] [--OPTION VALUE ...]",
        description=description,
        epilog=_EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="YAML file with any of the options below; flags win.")
    groups: dict[str, Any] = {}
    for cls in classes:
        for field in fields_of(cls).values():
            title = field.metadata["group"]
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_flag(groups[title], cls, field)
    return parser


def read_config(classes: Sequence[type], path: Path) -> dict[str, Any]:
    """Option name -> value of a YAML file. Raises ValueError or TypeError with file, line and key of what is wrong."""
    chosen: dict[str, Any] = {}
    for name, value, line in _yaml_items(path):
        place = f"{path} line {line}: "
        if name in chosen:
            raise ValueError(f"{place}{name} is set twice")
        try:
            check_names(classes, [name], "key")
        except (ValueError, TypeError) as error:
            raise type(error)(f"{place}{error}") from None
        chosen[name] = _convert_at(_owner(classes, name), name, value, place)
    return chosen


def _yaml_items(path: Path) -> list[tuple[str, Any, int]]:
    """(key, value, line) of each entry of the top-level mapping, in file order; duplicates are kept."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"--config: {path} must hold `option: value` lines")
        return [
            (str(loader.construct_object(key)), loader.construct_object(value, deep=True), key.start_mark.line + 1)
            for key, value in node.value
        ]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(f"--config: cannot read {path}: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path} line {mark.line + 1}" if mark else str(path)
        raise ValueError(f"{place}: not valid YAML: {getattr(error, 'problem', error)}") from None


def _add_flag(group: Any, cls: type, field: dataclasses.Field) -> None:
    members = member_types(hints(cls)[field.name])
    choices = field.metadata["choices"]
    metavar = (
        f"{{{','.join(choices)}}}" if choices else "|".join(_METAVARS[kind] for kind in _METAVARS if kind in members)
    )
    text = f"{field.metadata['help']} (default: {_shown(field.default)})".replace("%", "%%")
    nargs = "+" if members & {list, list[float]} else "?" if bool in members else None
    group.add_argument(
        f"--{field.name}", nargs=nargs, const="true" if nargs == "?" else None, metavar=metavar, help=text
    )
    if bool in members and str not in members:
        group.add_argument(
            f"--no_{field.name}", dest=field.name, action="store_const", const="false", help=argparse.SUPPRESS
        )


def _shown(default: Any) -> str:
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _owner(classes: Sequence[type], name: str) -> type:
    return next(cls for cls in classes if name in fields_of(cls))


def _convert_at(cls: type, name: str, value: Any, place: str) -> Any:
    """`convert`, with the place (`--` or file and line) put before the sentence."""
    if isinstance(value, list) and len(value) == 1 and str in member_types(hints(cls)[name]):
        value = value[0]
    try:
        return convert(cls, name, value)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None


def _underscores(text: str) -> str:
    """`--learning-rate=1e-3` -> `--learning_rate=1e-3`; values keep their hyphens."""
    if not text.startswith("--"):
        return text
    flag, equals, value = text.partition("=")
    return f"--{flag[2:].replace('-', '_')}{equals}{value}"


def _refuse_rest(classes: Sequence[type], rest: Sequence[str]) -> None:
    """Raises for what the parser did not know: unknown or refused flags first, else an argument without a flag."""
    names = [text[2:].partition("=")[0] for text in rest if text.startswith("--")]
    refused = set().union(*(getattr(cls, "REFUSED", ()) for cls in classes))
    check_names(classes, [name if name in refused else name.removeprefix("no_") for name in names], "flag")
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}: every option needs its --name")
