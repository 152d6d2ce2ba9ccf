# PYTHON_ARGCOMPLETE_OK
"""The lineage of experiments as a table, tree or graph: `python -m results.lineage [RUNS] [-e GROUP] [--exp_id ID]`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from results.table import default_metric
from src.errors import print_errors
from src.support import documents
from src.support.command_line import aligned_lines, make_parser
from src.tables import lineage, run_arguments
from src.tables.lineage import Edge, Lineage, Node

SHORT = 8
"""Number of displayed characters of an id."""
_COLOURS = {
    "done": "#c8e6c9",
    "haven": "#c8e6c9",
    "foreign": "#c8e6c9",
    "running": "#bbdefb",
    "stopped": "#fff9c4",
    "new": "#eeeeee",
}
_BAD_COLOUR = "#ffcdd2"


class Document(documents.Document):
    """A lineage."""

    schema: Literal["results.lineage/1"]
    nodes: list[Node]
    edges: list[Edge]
    problems: list[str]
    """One for each parent without a usable checkpoint."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lineage; skipped directories and unusable parents go to stderr. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    graph = lineage.build(options.runs)
    if options.groups:
        graph = graph.family(
            name for group in options.groups for name in lineage.group_family(options.runs, graph, group).nodes
        )
    if options.where:
        graph = graph.family(row["exp_id"] for row in run_arguments.select(options)[0])
    elif options.exp_id or options.paths:
        graph = graph.family(
            [
                *([graph.find(options.exp_id)] if options.exp_id else []),
                *(path.resolve().name for path in options.paths),
            ]
        )
    run_arguments.warn([*graph.warnings, *graph.problems])
    content = {"nodes": list(graph.nodes.values()), "edges": graph.edges, "problems": graph.problems}
    write = FORMATS[options.format]
    run_arguments.show(options.output, "results.lineage/1", content, lambda: print(write(graph), end=""))
    return 0


def table(graph: Lineage) -> str:
    """One row per experiment, with the checkpoint and state of each parent."""
    rows = [("experiment", "group", "recipe", "state", "step", "score", "parents")]
    for node in _ancestors_first(graph):
        parents = ", ".join(
            f"{_short(e.parent)} {e.checkpoint} ({graph.nodes[e.parent].state})" for e in graph.parents(node.exp_id)
        )
        step = " ".join(text for text in ("-" if node.step is None else str(node.step), _branch(node)) if text)
        rows.append(
            (
                _short(node.exp_id),
                node.group or "-",
                node.recipe or "-",
                node.state,
                step,
                _score(node) or "-",
                parents or "-",
            )
        )
    return "".join(f"{line}\n" for line in aligned_lines(rows))


def tree(graph: Lineage) -> str:
    """An indented tree. A child of several parents appears under each; its own children only once."""
    lines: list[str] = []
    printed_ids: set[str] = set()
    roots = [node.exp_id for node in graph.nodes.values() if not graph.parents(node.exp_id)]
    stack = [(name, "", "", "") for name in reversed(roots)]
    while stack:
        name, stem, branch, checkpoint = stack.pop()
        children = graph.children(name)
        is_repeated = name in printed_ids and bool(children)
        lines.append(
            f"{stem}{branch}{'  '.join(_label(graph.nodes[name]))}{f' from {checkpoint}' if checkpoint else ''}"
            f"{' (its children: above)' if is_repeated else ''}"
        )
        if is_repeated:
            continue
        printed_ids.add(name)
        inner = stem + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        last = len(children) - 1
        child_lines = [
            (edge.child, inner, "└─ " if i == last else "├─ ", edge.checkpoint) for i, edge in enumerate(children)
        ]
        stack += reversed(child_lines)
    return "".join(line + "\n" for line in lines)


def dot(graph: Lineage) -> str:
    """A graph for Graphviz: `… --format dot | dot -Tsvg > lineage.svg`."""
    lines = ["digraph lineage {", "  rankdir=LR;", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for node in graph.nodes.values():
        label = "\\n".join(_escape(line, {"\\": "\\\\", '"': '\\"', "\n": " "}) for line in _label(node))
        lines.append(f'  "{node.exp_id}" [label="{label}", fillcolor="{_colour(node)}"];')
    lines += [
        f'  "{edge.parent}" -> "{edge.child}" [label="{_escape(edge.checkpoint, {chr(34): ""})}"];'
        for edge in graph.edges
    ]
    return "\n".join([*lines, "}"]) + "\n"


def mermaid(graph: Lineage) -> str:
    """A graph for Markdown pages, in a ```mermaid block."""
    escapes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;", "\n": " "}
    lines = ["flowchart LR"]
    for node in graph.nodes.values():
        label = "<br/>".join(_escape(line, escapes) for line in _label(node))
        lines += [f'  e{node.exp_id}["{label}"]', f"  style e{node.exp_id} fill:{_colour(node)}"]
    lines += [f'  e{edge.parent} -- "{_escape(edge.checkpoint, escapes)}" --> e{edge.child}' for edge in graph.edges]
    return "\n".join(lines) + "\n"


FORMATS: dict[str, Callable[[Lineage], str]] = {
    "table": table,
    "tree": tree,
    "dot": dot,
    "mermaid": mermaid,
}


def _ancestors_first(graph: Lineage) -> list[Node]:
    """Nodes in topological order: each after its parents."""
    parents = {name: [edge.parent for edge in graph.parents(name)] for name in graph.nodes}
    nodes: dict[str, Node] = {}
    for start in graph.nodes:
        stack = [start]
        while stack:
            missing_parents = [parent for parent in parents[stack[-1]] if parent not in nodes]
            if missing_parents:
                stack.append(missing_parents[0])
            else:
                name = stack.pop()
                nodes[name] = graph.nodes[name]
    return list(nodes.values())


def _short(exp_id: str) -> str:
    return exp_id[:SHORT]


def _score(node: Node) -> str:
    name = default_metric(list(node.scores))
    if name is None:
        return ""
    value = node.scores[name]
    return f"{name} NaN" if value is None else f"{name} {value:.4g}"


def _label(node: Node) -> list[str]:
    words = (_short(node.exp_id), node.group, f"{node.recipe} {node.state}".strip(), _branch(node), _score(node))
    return [text for text in words if text]


def _branch(node: Node) -> str:
    """The current branch of a run that was rewound: its number and the step where it starts."""
    return f"(branch {node.branches[-1][0]} from step {node.branches[-1][1]})" if node.branches else ""


def _colour(node: Node) -> str:
    return _COLOURS.get(node.state, _BAD_COLOUR)


def _escape(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.lineage", __doc__)
    run_arguments.add(parser, "only the runs of these groups, their ancestors and descendants")
    parser.add_argument(
        "--exp_id", help="only this experiment, its ancestors and descendants; the start of an id is enough"
    )
    parser.add_argument("--format", choices=list(FORMATS), default="table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
