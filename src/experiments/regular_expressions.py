"""Regular expressions that are searched in time linear in the text: a person's pattern must not hang a table, or a server.

Python's `re` tries one way after the other, and of (a+)+b there are 2^n; here all ways are followed at once (Thompson 1968). Syntax and
meaning are those of `re`; what no such search can do (backreferences, lookaround, atomic groups) is refused.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

_parser: Any = re._parser  # pyright: ignore[reportAttributeAccessIssue]  not in its stubs
MOST_STATES = 5000
"""A pattern has a state for each of its characters; counted repetitions are written out."""
_Test = Callable[[str], bool]
_At = Callable[[str, int], bool]
_CATEGORIES: dict[str, _Test] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda character: character == "_" or character.isalnum(),
}


class Pattern:
    """A parsed pattern."""

    def __init__(self, text: str) -> None:
        """Raises:
        re.error: malformed, too long, or with what cannot be searched in linear time.
        """
        parsed = _parser.parse(text)
        self._steps: list[tuple[_Test | None, _At | None, tuple[int, ...]]] = []
        self._flags = parsed.state.flags
        self._start = self._sequence(parsed, self._add(None, None, ()))

    def search(self, text: str) -> bool:
        """Whether it matches anywhere in `text`."""
        active: set[int] = set()
        for place in range(len(text) + 1):
            active = self._follow([self._start, *active], text, place)
            if 0 in active:  # the end, which was added first
                return True
            character = text[place : place + 1]
            active = {
                target
                for state in active
                for test, _, targets in [self._steps[state]]
                if test and character and test(character)
                for target in targets
            }
        return False

    def _follow(self, states: Iterable[int], text: str, place: int) -> set[int]:
        """The states that are reached without reading a character."""
        reached, left = set[int](), list(states)
        while left:
            state = left.pop()
            if state not in reached:
                reached.add(state)
                test, at, targets = self._steps[state]
                if test is None and (at is None or at(text, place)):
                    left += targets
        return reached

    def _add(self, test: _Test | None, at: _At | None, targets: tuple[int, ...]) -> int:
        if len(self._steps) >= MOST_STATES:
            raise re.error(f"it has more than {MOST_STATES} states; write smaller repetitions")
        self._steps.append((test, at, targets))
        return len(self._steps) - 1

    def _sequence(self, items: Any, then: int) -> int:
        """The state from which `items` lead to the state `then`."""
        for operation, value in reversed(list(items)):
            then = self._item(str(operation), value, then)
        return then

    def _item(self, operation: str, value: Any, then: int) -> int:
        match operation:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._add(self._test(operation, value), None, (then,))
            case "BRANCH":
                return self._add(None, None, tuple(self._sequence(branch, then) for branch in value[1]))
            case "SUBPATTERN":
                _, added, removed, inner = value
                before, self._flags = self._flags, (self._flags | added) & ~removed
                start = self._sequence(inner, then)
                self._flags = before
                return start
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(value[0], value[1], value[2], then)
            case "AT":
                return self._add(None, _position(str(value), self._flags), (then,))
        raise re.error(
            "backreferences, lookaround and atomic groups may take forever and are not allowed; combine several matches() instead"
        )

    def _repeat(self, least: int, most: Any, inner: Any, then: int) -> int:
        if most is _parser.MAXREPEAT:
            loop = self._add(None, None, ())
            self._steps[loop] = (None, None, (self._sequence(inner, loop), then))
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._add(None, None, (self._sequence(inner, then), end))
        for _ in range(least):
            then = self._sequence(inner, then)
        return then

    def _test(self, operation: str, value: Any) -> _Test:
        ignore_case = bool(self._flags & re.IGNORECASE)
        single = self._case_sensitive(operation, value)
        if not ignore_case:
            return single
        if operation == "NOT_LITERAL" or (operation == "IN" and str(value[0][0]) == "NEGATE"):
            return lambda character: single(character.lower()) and single(character.upper())
        return lambda character: single(character) or single(character.lower()) or single(character.upper())

    def _case_sensitive(self, operation: str, value: Any) -> _Test:
        match operation:
            case "LITERAL":
                return lambda character: ord(character[0]) == value
            case "NOT_LITERAL":
                return lambda character: ord(character[0]) != value
            case "ANY":
                return (lambda _: True) if self._flags & re.DOTALL else (lambda character: character != "\n")
            case "RANGE":
                return lambda character: value[0] <= ord(character[0]) <= value[1]
            case "CATEGORY":
                kind = str(value).removeprefix("CATEGORY_")
                known, ascii_only = _CATEGORIES[kind.removeprefix("NOT_")], bool(self._flags & re.ASCII)
                return lambda character: (known(character) and (character.isascii() or not ascii_only)) != kind.startswith("NOT_")
        negated = str(value[0][0]) == "NEGATE"
        tests = [self._case_sensitive(str(kind), of) for kind, of in value[negated:]]
        return lambda character: any(test(character) for test in tests) != negated


def _position(kind: str, flags: int) -> _At:
    def is_word(character: str) -> bool:
        return _CATEGORIES["WORD"](character) and (character.isascii() or not flags & re.ASCII)

    def is_boundary(text: str, place: int) -> bool:
        before, after = text[max(0, place - 1) : place], text[place : place + 1]
        return is_word(before) != is_word(after)

    match kind.removeprefix("AT_"):
        case "BEGINNING" if flags & re.MULTILINE:
            return lambda text, place: place == 0 or text[place - 1] == "\n"
        case "BEGINNING" | "BEGINNING_STRING":
            return lambda _, place: place == 0
        case "END" if flags & re.MULTILINE:
            return lambda text, place: place == len(text) or text[place] == "\n"
        case "END":
            return lambda text, place: place == len(text) or (place == len(text) - 1 and text[place] == "\n")
        case "END_STRING":
            return lambda text, place: place == len(text)
        case "BOUNDARY":
            return is_boundary
    return lambda text, place: bool(text) and not is_boundary(text, place)  # \B, which in re matches no empty text
