"""Questions about Python source, with answers from the syntax tree."""

import ast
import builtins
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS = ("does", "name", "parameters", "default", "raises", "calls", "decorators")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_MAX_ANSWER_CHARS = 160
_MAX_NAMES = 8
_MAX_DEFAULTS = 2
_ARTICLES = {"a", "an", "the"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Question:
    """A question about a context, its kind (one of KINDS) and its only answer."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Snippet:
    """A function, class or method: its source, dedented and without docstrings, and questions about it."""

    context: str
    questions: tuple[Question, ...]


def snippets(source: str, min_chars: int, max_chars: int) -> Iterator[Snippet]:
    """Yield the functions, classes and methods of a module in source order; nested functions are part of the outer one.

    `source` has "\\n" line ends. Leaves out contexts with fewer or more characters than the limits, and definitions
    with a docstring that shares its line with code.

    Raises:
        SyntaxError: `source` does not parse.
        ValueError: `source` has null bytes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the source can have invalid escapes
        tree = ast.parse(source)
    lines = source.split("\n")
    for node, word in _definitions(tree.body, "function"):
        context = _without_docstrings(node, lines)
        if context is not None and min_chars <= len(context) <= max_chars:
            yield Snippet(context, tuple(q for q in _questions(node, word, lines) if _is_fair(q)))


def reveals(question: str, answer: str) -> bool:
    """Whether the question contains the answer: as characters, or as the same sequence of words, ignoring case."""
    if answer.lower() in question.lower():
        return True
    question_words, answer_words = (re.findall(r"\w+", text.lower()) for text in (question, answer))
    return any(
        question_words[i : i + len(answer_words)] == answer_words
        for i in range(len(question_words) - len(answer_words) + 1)
    )


def _is_fair(question: Question) -> bool:
    """Whether an answer is short, is not in the question, and has more than articles and punctuation for metrics."""
    words = [w for w in re.findall(r"[^\W_]+", question.answer.lower()) if w not in _ARTICLES]
    return bool(words) and len(question.answer) <= _MAX_ANSWER_CHARS and not reveals(question.text, question.answer)


def _definitions(body: Sequence[ast.stmt], word: str) -> Iterator[tuple[Definition, str]]:
    """Yield the definitions in `body` and in its classes, `if`, `try` and `with`, each with the word for its kind."""
    for node in body:
        if isinstance(node, _FUNCTIONS):
            yield node, word
        elif isinstance(node, ast.ClassDef):
            yield node, "class"
            yield from _definitions(node.body, "method")
        else:
            yield from _definitions(_below(node), word)


def _below(node: ast.stmt) -> list[ast.stmt]:
    """Statements inside a statement, one level down."""
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [part.body for name in ("handlers", "cases") for part in getattr(node, name, [])]
    return [statement for block in blocks for statement in block]


def _definitions_in(node: Definition) -> list[Definition]:
    """`node` and every definition inside it. Only statements contain definitions, so expressions are not searched."""
    definitions, todo = [], [node]
    while todo:
        statement = todo.pop()
        if isinstance(statement, _DEFINITIONS):
            definitions.append(statement)
        todo += _below(statement)
    return definitions


def _docstring(node: Definition) -> ast.Expr | None:
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first
    return None


def _without_docstrings(node: Definition, lines: Sequence[str]) -> str | None:
    """Dedented source of `node` with decorators, without docstrings; None if a docstring shares its line with code."""
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    remaining: list[str | None] = list(lines[start : node.end_lineno])
    for inner in _definitions_in(node):
        if (doc := _docstring(inner)) is None:
            continue
        first, last = doc.lineno - 1, (doc.end_lineno or doc.lineno) - 1
        before = lines[first].encode()[: doc.col_offset].decode()
        after = lines[last].encode()[doc.end_col_offset :].decode().strip()
        if before.strip() or (after and not after.startswith("#")):
            return None
        if last + 1 < (node.end_lineno or 0) and not lines[last + 1].strip():
            last += 1
        remaining[first - start : last + 1 - start] = [None] * (last + 1 - first)
        if len(inner.body) == 1:
            remaining[first - start] = before + "pass"
    indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
    return "\n".join(line.removeprefix(indent).rstrip() for line in remaining if line is not None).strip("\n")


def _questions(node: Definition, word: str, lines: Sequence[str]) -> Iterator[Question]:
    doc = ast.get_docstring(node)
    if doc and (sentence := _first_sentence(doc)):
        yield Question("does", f"What does this {word} do?", sentence)
    yield Question("name", f"What is the name of this {word}?", node.name)
    if isinstance(node, _FUNCTIONS):
        yield from _signature_questions(node, word, lines)
        yield from _body_questions(node, word)
    decorators = [_segment(d, lines) for d in node.decorator_list]
    if decorators and all(decorators):
        yield Question("decorators", f"Which decorators does this {word} have?", ", ".join(d for d in decorators if d))


def _body_questions(node: ast.FunctionDef | ast.AsyncFunctionDef, word: str) -> Iterator[Question]:
    if (running := _running(node)) is None:
        return
    if 0 < len(exceptions := _raised_classes(node, running)) <= _MAX_NAMES:
        yield Question("raises", f"Which exceptions does this {word} raise?", ", ".join(exceptions))
    if 0 < len(callees := _called_names(running)) <= _MAX_NAMES:
        yield Question("calls", f"Which names does this {word} call?", ", ".join(callees))


def _signature_questions(
    node: ast.FunctionDef | ast.AsyncFunctionDef, word: str, lines: Sequence[str]
) -> Iterator[Question]:
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    names = [a.arg for a in positional]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [a.arg for a in args.kwonlyargs]
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    besides = ""
    if word == "method" and positional and names[0] in ("self", "cls"):
        besides = f" besides {names.pop(0)}"
    if names:
        yield Question("parameters", f"Which parameters does this {word} take{besides}?", ", ".join(names))
    pairs = [*zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None]
    for argument, default in pairs[:_MAX_DEFAULTS]:
        if text := _segment(default, lines):
            yield Question("default", f"What is the default of the parameter {argument.arg}?", text)


def _first_sentence(doc: str) -> str | None:
    """First sentence of a docstring, in one line; None for a signature or a single word."""
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    match = re.match(r"(.+?(?<!e\.g)(?<!i\.e)[.!?])(?=\s+[^a-z\s]|$)", paragraph)
    sentence = match.group(1) if match else paragraph
    is_prose = (
        " " in sentence and "->" not in sentence and not re.match(r"[\w.]+\(", sentence) and not sentence.endswith(":")
    )
    return sentence if is_prose else None


def _segment(node: ast.expr, lines: Sequence[str]) -> str | None:
    """Source of a node on one line, else None."""
    if node.lineno != node.end_lineno:
        return None
    return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()


def _running(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.AST] | None:
    """Nodes that run when the function is called; None if some run later, so "calls" and "raises" are ambiguous."""
    nodes: list[ast.AST] = list(node.body)
    for inner in nodes:  # the loop appends to the list
        if isinstance(inner, (*_DEFINITIONS, ast.Lambda)):
            return None
        nodes += ast.iter_child_nodes(inner)
    return nodes


def _raised_classes(node: ast.FunctionDef | ast.AsyncFunctionDef, running: Sequence[ast.AST]) -> list[str]:
    """Exception classes in the order of their raise statements; empty if a statement does not name a class."""
    local = {inner.id for inner in running if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
    local |= {inner.name for inner in running if isinstance(inner, ast.ExceptHandler) and inner.name}
    local |= {inner.arg for inner in ast.walk(node.args) if isinstance(inner, ast.arg)}
    positions = []
    for inner in running:
        if isinstance(inner, ast.Raise):
            name = inner.exc and _dotted_name(inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc)
            if not name or name in local or not _is_class_name(name.split(".")[-1]):
                return []
            positions.append((inner.lineno, inner.col_offset, name))
    return _in_order(positions)


def _called_names(running: Sequence[ast.AST]) -> list[str]:
    """Last name of each callee (`join` for `os.path.join(…)`), in source order, without duplicates."""
    positions = []
    for inner in running:
        if isinstance(inner, ast.Call) and isinstance(inner.func, (ast.Name, ast.Attribute)):
            name = inner.func.id if isinstance(inner.func, ast.Name) else inner.func.attr
            positions.append((inner.func.end_lineno or 0, inner.func.end_col_offset or 0, name))
    return _in_order(positions)


def _in_order(positions: Sequence[tuple[int, int, str]]) -> list[str]:
    """Sort (line, column, name) by position; return the names without duplicates."""
    return list(dict.fromkeys(name for _, _, name in sorted(positions)))


def _dotted_name(node: ast.expr) -> str | None:
    """`a.b.c` as written; None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := _dotted_name(node.value)):
        return f"{head}.{node.attr}"
    return None


def _is_class_name(name: str) -> bool:
    bare = name.lstrip("_")
    return bare[:1].isupper() or name == "error" or isinstance(getattr(builtins, name, None), type)
