"""The pages of the site that are generated from the code: components and their fields, commands and their flags."""

import argparse
import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

from pydantic.fields import FieldInfo

from docs import json_documents
from src.experiments.config import Config
from src.experiments.registry import DATASETS, LAUNCHERS, METRICS, MODELS, RECIPES, REWARDS
from src.support.documents import Document

ROOT = Path(__file__).resolve().parents[1]
TABLES = {
    "recipes": (
        RECIPES,
        "An experiment names one of these recipes as `recipe`; its other keys are fields of the recipe.",
    ),
    "models": (MODELS, "Values of `model.name`, and of the same key of models within models."),
    "datasets": (DATASETS, "Values of `data.name`, and of the same key of data sets within mixtures and phases."),
    "metrics": (METRICS, "Values of `name` in the lists `metrics` of answers and of inference."),
    "rewards": (REWARDS, "Values of `name` in the list `rewards` of policies."),
    "launchers": (LAUNCHERS, "Values of `launcher` in an entry of `job_configs.py`, which `-j` selects."),
}
SETTINGS = "settings"
PAGE_OF_FIELD_TYPE = {
    "ModelField": "models",
    "DatasetField": "datasets",
    "MetricField": "metrics",
    "RewardField": "rewards",
    "ModelConfig": "models",
    "DatasetConfig": "datasets",
    "MetricConfig": "metrics",
    "RewardConfig": "rewards",
}
"""Fields that name a component, by their type as it is written."""
CONSTRAINTS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "min_length": "length ≥", "max_length": "length ≤"}
COMMANDS = ("trainval.py", "data_prep", "results", "src")
TRAINVAL: list[type] = [
    *(json_documents.Groups, json_documents.Experiments, json_documents.Plan, json_documents.Jobs),
    *(json_documents.Status, json_documents.Logs, json_documents.Training),
]
"""The documents of trainval.py."""


def pages() -> dict[str, str]:
    """{path below docs/: Markdown} of each generated page."""
    return component_pages() | {
        "reference/commands.md": commands_page(),
        "reference/documents.md": documents_page(),
    }


def component_pages() -> dict[str, str]:
    """One page for each table of the registry, and one for the types of fields that have fields."""
    sections = {
        name: {key: _load(module) for key, module in table.modules.items()} for name, (table, _) in TABLES.items()
    }
    components = {cls: (name, key) for name, classes in sections.items() for key, cls in classes.items()}
    nested = {cls for top in components for cls in _nested(top) if cls.model_fields}
    shared = sorted(nested - components.keys(), key=lambda cls: _title(cls).lower())
    anchors = {cls: f"{name}.md#{key}" for cls, (name, key) in components.items()}
    anchors |= {cls: f"{SETTINGS}.md#{_anchor(cls)}" for cls in shared}
    texts = {}
    for name, (_, introduction) in TABLES.items():
        parts = [f"# {name.capitalize()}", introduction]
        for key, cls in sections[name].items():
            parts += [f"## {key}", _introduction(cls), f"Code: `{_path(cls)}`", _fields(cls, anchors)]
        texts[f"reference/{name}.md"] = "\n\n".join(parts)
    parts = [
        "# Settings",
        "The types of fields that have fields of their own: training loop, evaluation, generation and others.",
    ]
    counts = Counter(map(_title, shared))
    for cls in shared:
        title = _title(cls) + (f" ({_path(cls).split('/')[2]})" if counts[_title(cls)] > 1 else "")
        parts += [
            f"## {title} {{ #{_anchor(cls)} }}",
            _introduction(cls),
            f"Code: `{_path(cls)}`",
            _fields(cls, anchors),
        ]
    texts[f"reference/{SETTINGS}.md"] = "\n\n".join(parts)
    return texts


def _load(module: str) -> type[Config]:
    return importlib.import_module(module).Config


def _nested(cls: type[Config]) -> Iterator[type[Config]]:
    """The config classes in the annotations of the fields of `cls`, and theirs."""
    for info in cls.model_fields.values():
        for inner in _configs_in(info.annotation):
            yield inner
            if inner is not cls:
                yield from _nested(inner)


def _configs_in(annotation: Any) -> Iterator[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _configs_in(argument)


def _path(cls: type) -> str:
    return cls.__module__.replace(".", "/") + ".py"


def _title(cls: type) -> str:
    """The name of the class; with its module for one of the many that are called Config."""
    return (
        f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
        if cls.__name__ in ("Config", "Settings")
        else cls.__name__
    )


def _anchor(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}".removeprefix("src.").replace(".", "-").replace("_", "-").lower()


def _introduction(cls: type[Config]) -> str:
    """The docstring of the class, or of its module if the class is a plain `Config`."""
    text = inspect.getdoc(cls) if "__doc__" in vars(cls) and cls.__doc__ else ""
    module = inspect.getdoc(sys.modules[cls.__module__]) or ""
    return _prose("\n\n".join(dict.fromkeys([module, text or ""])) if cls.__name__ == "Config" else text or "")


def _prose(text: str) -> str:
    """Markdown that shows `<` outside of code, too."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def declarations(cls: type[Config]) -> dict[str, tuple[type, ast.expr, str]]:
    """{field: (the class that declares it, its annotation, its docstring)}."""
    fields: dict[str, tuple[type, ast.expr, str]] = {}
    for base in cls.__mro__:
        if not (isinstance(base, type) and issubclass(base, Config)) or base is Config:
            continue
        for name, annotation, text in _annotated_names(base):
            owner, first_annotation, first_text = fields.setdefault(name, (base, annotation, text))
            fields[name] = owner, first_annotation, first_text or text
    return {name: fields[name] for name in cls.model_fields}


def _annotated_names(cls: type) -> Iterator[tuple[str, ast.expr, str]]:
    """(name, annotation, docstring) in the body of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for node, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            has_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = " ".join(str(following.value.value).split()) if has_text else ""  # type: ignore[attr-defined]
            yield node.target.id, node.annotation, text


def document_types() -> dict[str, list[type]]:
    """{command line: the types of its documents} of each command with --json, errors left out."""
    types: dict[str, list[type]] = {}
    for line, parser in commands().items():
        if any("--json" in action.option_strings for action in parser._actions) and not line.startswith(
            "python -m src."
        ):
            module = importlib.import_module(
                line.removeprefix("python ").removeprefix("-m ").split()[0].removesuffix(".py")
            )
            shared = {"python trainval.py": TRAINVAL, "python -m results.dashboard": [json_documents.Address]}
            document = json_documents.Steps if "data_prep" in line else getattr(module, "Document", json_documents.File)
            types[line] = shared.get(line) or [document]
    agent_types = [json_documents.AgentFields, json_documents.AgentStart, json_documents.AgentStop]
    return types | {"python -m src.serving.mcp": agent_types}


def documents_page() -> str:
    commands_by_type: dict[type, list[str]] = {}
    for line, types in document_types().items():
        for cls in types:
            commands_by_type.setdefault(cls, []).append(f"`{line.removeprefix('python ')}`")
    parts = [
        "# JSON documents",
        "What commands print with `--json`: [Machine-readable output](../machine_readable.md).",
    ]
    for cls in [Document, json_documents.Failure, *commands_by_type]:
        schema = [
            ast.literal_eval(node.slice)
            for name, node, _ in _annotated_names(cls)
            if name == "schema" and isinstance(node, ast.Subscript)
        ]
        fields = [(name, node, text) for name, node, text in _annotated_names(cls) if name != "schema"]
        lines = ["| member | type | meaning |", "|---|---|---|"] if fields else []
        lines += [f"| `{name}` | `{ast.unparse(node)}` | {_cell(text)} |" for name, node, text in fields]
        title = schema[0] if schema else "Every document" if cls is Document else cls.__name__
        parts += [f"## {title}", _prose(inspect.getdoc(cls) or ""), "\n".join(lines)]
        parts += [f"Printed by {', '.join(commands_by_type[cls])}."] if cls in commands_by_type else []
    return "\n\n".join(part for part in parts if part)


def _fields(cls: type[Config], anchors: dict[type, str]) -> str:
    if not cls.model_fields:
        return "It has no fields."
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, (owner, annotation, text) in declarations(cls).items():
        info = cls.model_fields[name]
        inner = next(_configs_in(info.annotation), None)
        meaning = text or (inspect.getdoc(inner) or "").partition("\n\n")[0] if inner else text
        limits = ", ".join(_limits(info))
        kind = _type(annotation, owner, anchors) + (f"; {limits}" if limits else "")
        lines.append(f"| `{name}` | {kind} | {_default(info)} | {_cell(' '.join(meaning.split()))} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text of a table. A pipe within code ends no cell, so only others are escaped."""
    parts = re.split(r"(`[^`]*`)", _prose(text))
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts)


def _type(node: ast.expr, owner: type, anchors: dict[type, str]) -> str:
    """An annotation in words; a link where it is a config or a component of a table."""
    namespace = vars(sys.modules[owner.__module__])
    if isinstance(node, ast.BinOp):
        return f"{_type(node.left, owner, anchors)} or {_type(node.right, owner, anchors)}"
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
        kind, *extra = node.slice.elts
        calls = [each for each in extra if isinstance(each, ast.Call)]
        limits = [(CONSTRAINTS.get(word.arg or ""), word.value) for call in calls for word in call.keywords]
        return _type(kind, owner, anchors) + "".join(f", {sign} {ast.unparse(limit)}" for sign, limit in limits if sign)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return ", ".join(f"`{ast.unparse(value)}`" for value in values)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "list":
        return f"list of {_type(node.slice, owner, anchors)}"
    text = ast.unparse(node)
    alias = namespace.get(text) if isinstance(node, ast.Name) else None
    if isinstance(node, ast.Attribute):
        alias = getattr(namespace.get(ast.unparse(node.value)), node.attr, None)
    if get_origin(alias) is Literal:
        return ", ".join(f"`{value!r}`" for value in get_args(alias))
    for word in re.findall(r"\w+", text):
        if word in PAGE_OF_FIELD_TYPE:
            return f"[{_brackets(text)}]({PAGE_OF_FIELD_TYPE[word]}.md)"
        if (target := anchors.get(namespace.get(word))) is not None:  # type: ignore[arg-type]
            return f"[{_brackets(text)}]({target})"
    return f"`{text}`"


def _brackets(text: str) -> str:
    return text.replace("[", "&#91;").replace("]", "&#93;")


def _limits(info: FieldInfo) -> Iterator[str]:
    for constraint in info.metadata:
        for attribute, sign in CONSTRAINTS.items():
            if (limit := getattr(constraint, attribute, None)) is not None:
                yield f"{sign} {limit}"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    return f"`{type(default).__name__}()`" if isinstance(default, Config) else f"`{default!r}`"


class _Parser(BaseException):
    """Carries the parser of a command out of it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def commands() -> dict[str, argparse.ArgumentParser]:
    """{command line: its parser}, subcommands included, of each module that is run as a command."""
    listing = subprocess.check_output(["git", "ls-files", *COMMANDS], cwd=ROOT, text=True).splitlines()
    modules = [path for path in listing if path.endswith(".py") and _is_command(path)]
    modules.sort(key=lambda path: ("/" in path, path))
    parsers: dict[str, argparse.ArgumentParser] = {}
    for path in modules:
        module = path.removesuffix(".py").replace("/", ".")
        line = f"python {path}" if "/" not in path else f"python -m {module.removesuffix('.__main__')}"
        parser = parser_of(module)
        parsers[line] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers |= {f"{line} {name}": inner for name, inner in action.choices.items()}
    return parsers


def _is_command(path: str) -> bool:
    """Whether a user can run it. Workers that we start ourselves parse no arguments."""
    text = (ROOT / path).read_text()
    return path.endswith("__main__.py") or (
        '__name__ == "__main__"' in text and bool(re.search("ArgumentParser|make_parser|arguments", text))
    )


def parser_of(module: str) -> argparse.ArgumentParser:
    """The parser that `main` of a module uses, taken at the moment at which it parses."""

    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _Parser(self)

    with (
        mock.patch.object(sys, "argv", [module]),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        mock.patch.object(argparse.ArgumentParser, "parse_known_intermixed_args", stop),
    ):
        try:
            importlib.import_module(module).main()
        except _Parser as result:
            return result.parser
    raise TypeError(f"{module}: main() parses no arguments")


def commands_page() -> str:
    parts = ["# Commands", "Every command, its flags and their defaults. `--help` prints the same."]
    for line, parser in commands().items():
        module = sys.modules.get(line.removeprefix("python ").removeprefix("-m ").removesuffix(".py"))
        text = (inspect.getdoc(module) if module else None) or parser.description or ""
        summary, _, more = text.strip().partition("\n\n")
        parts += [f"## {line}", _prose(summary), *([f"```text\n{more.strip()}\n```"] if more else []), _flags(parser)]
    return "\n\n".join(parts)


def _flags(parser: argparse.ArgumentParser) -> str:
    """One table for each group of arguments; a heading if there are several."""
    parts = []
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if action.help != argparse.SUPPRESS
            and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        ]
        if actions:
            parts.append("\n".join(["| argument | value | meaning |", "|---|---|---|", *map(_flag, actions)]))
            if group.title not in ("positional arguments", "options"):
                parts.insert(-1, f"**{group.title}**")
    subcommands = [
        name for action in parser._actions if isinstance(action, argparse._SubParsersAction) for name in action.choices
    ]
    if subcommands:
        parts.append(f"Subcommands: {', '.join(f'`{name}`' for name in subcommands)}.")
    return "\n\n".join(parts) or "It has no flags."


def _flag(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    value = action.metavar if isinstance(action.metavar, str) else ", ".join(map(str, action.choices or ()))
    if not value and action.option_strings and action.nargs != 0:
        value = action.dest.upper()
    if action.nargs in ("+", "*") and value:
        value += " ..."
    meaning = (action.help or "") % {"default": action.default, "prog": ""} if action.help else ""
    return f"| {names} | {_cell(value if action.nargs != 0 else '')} | {_cell(meaning)} |"
