"""A server for agents, over standard input and output: `python -m src.serving.mcp [--allow run] [--max-runs N]`.

Its tools are the commands with --json: groups, experiments, fields, plan, status, logs, table, compare, diff, lineage
and progress; start, stop and submit are refused without --allow run. Nothing is deleted. Each call is a line of
<runs>/agent_audit.jsonl, from which the limits are counted, also after a restart.
"""

import argparse
import importlib
import json
import logging
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any

from src.errors import ConfigError, UserError
from src.experiments import expressions
from src.experiments.config import unknown
from src.experiments.registry import TABLES
from src.files import ROOT, read_bytes, write_atomic, writing
from src.launch import logs
from src.runs import jsonl_records
from src.runs.environment import now
from src.runs.store import RunStore, SavedRun, unknown_run
from src.support import documents
from src.support.command_line import make_parser, parse_arguments, require_at_least, run_command
from src.support.parsing import parse_json

AUDIT = "agent_audit.jsonl"
LOG_FOLDER = "agent_logs"
"""Folder next to the save directories with the output of `start` and `submit`."""
_WAIT_SECONDS, _COMMAND_SECONDS = 30.0, 600.0
_STOP_MARK = b"agent\n"
"""Content of the files `stop` of the tool `stop`; those of persons are empty."""
_WORD = re.compile(r"\w[\w./@+-]*(\[\d{1,9}\])?", re.ASCII)
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+|\[\d+\])*", re.ASCII)
Json = dict[str, Any]

log = logging.getLogger(__name__)


class Agent:
    """The tools. Each public method is one, and returns a JSON document: that of its command, or `error/1`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.runs = options.savedir_base.resolve()
        self._places = ["-sb", str(self.runs), "--data_path", str(options.data_path.resolve())]
        self.can_run = "run" in options.allow
        self.max_runs, self.max_hours = options.max_runs, options.max_hours
        with writing(self.runs):
            self.runs.mkdir(parents=True, exist_ok=True)

    def groups(self) -> Json:
        """List the groups of experiments."""
        return self._trainval("--list")

    def experiments(self, group: str) -> Json:
        """List the experiments of a group: ids, dicts, and what differs between them."""
        return self._trainval("--list", *option("-e", group))

    def fields(self, kind: str, name: str) -> Json:
        """Types and defaults of the settings of a component. kind: recipe, model, dataset, metric, reward, launcher."""
        tables = {table.kind: table for table in TABLES}
        if kind not in tables:
            raise unknown("kind", kind, tables, "kind")
        if name not in tables[kind].modules:
            raise unknown(kind, name, tables[kind].modules, "name")
        fields = importlib.import_module(tables[kind].modules[name]).Config.model_fields
        rows = {
            field: {"type": str(info.annotation), "is_required": info.is_required(), "default": repr(info.default)}
            for field, info in fields.items()
        }
        return {"schema": "agent.fields/1", "fields": rows}

    def plan(self, group: str, changes: Json | None = None, where: str | None = None, memory: bool = False) -> Json:
        """Check the experiments of a group without running them. changes: values by dotted path, such as
        {"loop.steps": 20}. where: a condition, such as "seed == 0". memory: estimate GPU memory and GPU hours."""
        estimates = ["--memory", "--cost"] if memory else []
        return self._trainval("--dry-run", *selection(group, changes, where), *estimates)

    def start(self, group: str, changes: Json | None = None, where: str | None = None, hours: float = 1.0) -> Json:
        """Train experiments on this machine, one after another, for at most `hours` together. See their `status`.
        The same call resumes runs that were stopped."""
        if not 0 < hours <= 24 * 365:
            raise ConfigError(f"hours: expected a number above 0 and at most {24 * 365}, got {hours:g}.")
        words = selection(group, changes, where)
        exp_ids = self._book("start", words, hours)
        for exp_id in exp_ids:
            self._withdraw_stop(exp_id)
        return self._launch([*words, "--stop_after", str(hours * 3600)], exp_ids, 0.0)

    def submit(self, job_config: str, group: str, changes: Json | None = None, where: str | None = None) -> Json:
        """Submit experiments to a launcher of job_configs.py."""
        if self.max_hours is not None:
            raise ConfigError("--max-hours: cannot limit jobs, which launchers restart. Use start, or only --max-runs.")
        words = [*selection(group, changes, where), *option("-j", job_config)]
        exp_ids = self._book("submit", words, 0.0)
        return self._launch(words, exp_ids, _WAIT_SECONDS)

    def stop(self, exp_id: str) -> Json:
        """Stop a run that `start` started: it writes a checkpoint and ends."""
        self._require_run("stop")
        started_ids = {name for row in self._starts() for name in row["exp_ids"]}
        if exp_id not in started_ids:
            raise ConfigError(
                f"exp_id: {exp_id!r:.60} was not started here. Name one of {len(started_ids)} complete ids."
            )
        file = self.runs / exp_id / "stop"
        with writing(self.runs):
            file.parent.mkdir(exist_ok=True)
            if not file.exists():
                write_atomic(file, _STOP_MARK)
        return {"schema": "agent.stop/1", "exp_id": exp_id}

    def _withdraw_stop(self, exp_id: str) -> None:
        """Remove the file of `stop`. Raises ConfigError for one that a person wrote."""
        file = self.runs / exp_id / "stop"
        if file.exists():
            if read_bytes(file) != _STOP_MARK:
                raise ConfigError(f"{file}: a person stopped this run. Ask before it is started again.")
            file.unlink(missing_ok=True)

    def status(self, group: str, changes: Json | None = None, where: str | None = None) -> Json:
        """State, step, loss and reason of a failure of each experiment of a group."""
        return self._trainval("--job_option", "status", *selection(group, changes, where))

    def logs(self, exp_id: str, lines: int = 50) -> Json:
        """The last lines of the logs of a run."""
        run = self._run(exp_id)
        return {"schema": "trainval.logs/1", "lines": logs.last_lines(self.runs, [run], max(1, min(lines, 1000)))}

    def table(
        self, group: str | None = None, by: list[str] | None = None, scores: list[str] | None = None,
        where: str | None = None,
    ) -> Json:  # fmt: skip
        """Means over seeds, best first. by: dotted keys of the rows. scores: names; default: all."""
        words = [*option("-e", group), *option("--by", *(by or ())), *option("--scores", *(scores or ()))]
        return self._results("table", *words, *condition(where))

    def diff(self, a: str, b: str) -> Json:
        """What differs between two runs: dict, code, environment, data, scores."""
        return self._results("diff", self._run(a), self._run(b))

    def lineage(self, group: str | None = None, exp_id: str | None = None) -> Json:
        """Parents and children of experiments."""
        return self._results("lineage", *([] if exp_id is None else [self._run(exp_id)]), *option("-e", group))

    def compare(self, base: str, candidates: list[str], metric: str = "val_loss", min_effect: float = 0.0) -> Json:
        """Compare candidates with a base, paired by seed: difference, interval and verdict. Each is a group, or the id
        of a run, which stands for its experiment with all seeds. min_effect: in units of the metric."""
        words = [*map(word, [base, *candidates]), *option("--metric", metric), f"--min-effect={min_effect}"]
        return self._results("compare", *words)

    def progress(self, group: str, metric: str = "val_loss", min_effect: float = 0.0) -> Json:
        """The runs of a group in order of time, with the best so far."""
        words = [*option("-e", group), *option("--metric", metric), f"--min-effect={min_effect}"]
        return self._results("progress", *words)

    def _run(self, prefix: str) -> str:
        """The id that starts with `prefix`."""
        names = RunStore(self.runs).ids(prefix)
        if len(names) != 1:
            raise unknown_run(f"exp_id: {prefix!r:.60}", prefix, self.runs, names)
        return names[0]

    def _results(self, name: str, *words: str) -> Json:
        return _run_json(["-m", f"results.{name}", "-r", str(self.runs), *words])

    def _trainval(self, *words: str) -> Json:
        return _run_json(["trainval.py", *words, *self._places])

    def _require_run(self, tool: str) -> None:
        if not self.can_run:
            raise ConfigError(f"{tool}: this server only reads. Start it with --allow run.")

    def _starts(self) -> list[Json]:
        return [row for row in jsonl_records.rows(self.runs / AUDIT) if row.get("event") == "booked"]

    def _book(self, tool: str, words: Sequence[str], hours: float) -> list[str]:
        """Check the plan, and count its runs against the limits; returns the ids to run."""
        self._require_run(tool)
        plan = self._trainval("--dry-run", *words)
        if plan["error"]:
            errors = [plan["error"], *plan["more_errors"]]
            raise ConfigError("\n".join(": ".join(filter(None, [e["where"], e["found"]])) for e in errors))
        exp_ids = [row["exp_id"] for row in plan["experiments"] if row["state"] != "done"]
        self._count(tool, exp_ids, hours)
        return exp_ids

    def _count(self, tool: str, exp_ids: Sequence[str], hours: float) -> None:
        with jsonl_records.open_locked(self.runs / AUDIT) as records:
            rows = self._starts()
            runs = sum(len(row["exp_ids"]) for row in rows) + len(exp_ids)
            if self.max_runs is not None and runs > self.max_runs:
                raise ConfigError(f"--max-runs {self.max_runs}: this would be run {runs}. Ask a person for more.")
            used_hours = sum(map(self._used_hours, rows))
            if self.max_hours is not None and used_hours + hours > self.max_hours:
                rest = f"{max(0.0, self.max_hours - used_hours):.3g}"
                raise ConfigError(
                    f"--max-hours {self.max_hours:g}: {rest} hours are left. Set `hours` to at most that."
                )
            records.append({"event": "booked", "when": now(), "tool": tool, "exp_ids": exp_ids, "hours": hours})

    def _used_hours(self, row: Json) -> float:
        """The hours of a start: until the last of its runs ended, and all booked hours if one has not."""
        begin, runs = datetime.fromisoformat(row["when"]), [SavedRun(self.runs / exp_id) for exp_id in row["exp_ids"]]
        if any(run.state_or_damage not in ("done", "failed", "stopped") for run in runs):
            return float(row["hours"])
        end = max((datetime.fromisoformat(run.status["updated"]) for run in runs), default=begin)
        if end <= begin and runs:
            return float(row["hours"])  # not started yet: the states are those of an earlier start
        return min(float(row["hours"]), (end - begin).total_seconds() / 3600)

    def _launch(self, words: Sequence[str], exp_ids: Sequence[str], wait_seconds: float) -> Json:
        """Run trainval.py in a session of its own, so that it outlives this server."""
        folder = self.runs / LOG_FOLDER
        path = folder / f"{time.time_ns()}.log"
        with writing(path):
            folder.mkdir(exist_ok=True)
            with open(path, "wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "trainval.py", *words, *self._places, "--json"],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        try:
            code = process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            code = None
        content = {"schema": "agent.start/1", "exp_ids": list(exp_ids), "log": str(path), "exit_code": code}
        if code:
            content["error"] = documents.mistakes("RunError", f"{path}: trainval.py ended with {code}. Read it.")[0]
        return content


def word(text: str, where: str = "name") -> str:
    """`text` if it can be a group, an id, a score or a dotted key, and is no option and no path outside this folder."""
    if not _WORD.fullmatch(text) or ".." in text:
        raise ConfigError(f"{where}: expected a name, got {text!r:.60}.")
    return text


def option(name: str, *values: str | None) -> list[str]:
    """The words of an option with these values; none without values."""
    words = [word(value, name) for value in values if value is not None]
    return [name, *words] if words else []


def condition(where: str | None) -> list[str]:
    """--where with a condition that the parser of conditions accepts."""
    if where is None:
        return []
    expressions.compile(where, "where")
    return [f"--where={where}"]


def selection(group: str, changes: Mapping[str, Any] | None, where: str | None) -> list[str]:
    """The arguments that select experiments.

    Raises:
        ConfigError: a malformed group, path or condition, or a value that can read files or run programs.
    """
    words = [*option("-e", group), *condition(where)]
    for path, value in (changes or {}).items():
        if not _PATH.fullmatch(path):
            raise ConfigError(f"changes: expected a dotted path such as loop.steps, got {path!r:.60}.")
        _refuse_places(path, value)
        words += ["--set", f"{path}={json.dumps(value)}"]
    return words


def _refuse_places(path: str, value: Any) -> None:
    """Refuse paths outside the project, addresses and commands, wherever they are in a value."""
    for each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _refuse_places(f"{path}.{each[0]}", each[1])
        _refuse_places(path, each[0])
    if isinstance(value, str) and re.search(r"^\s*[/~\\]|(^|[/\\])\.\.([/\\]|$)|://|pipe:", value):
        raise ConfigError(
            f"changes: {path}: {value!r:.60} names a place outside the data folder. Ask a person to add it."
        )


def _run_json(words: Sequence[str]) -> Json:
    """The document of a command."""
    try:
        done = subprocess.run(
            [sys.executable, *words, documents.OPTION],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{' '.join(words[:2])}: took more than {_COMMAND_SECONDS:g} s. Select fewer runs.") from None
    if not done.stdout:
        raise ConfigError(f"{' '.join(words[:2])}: {done.stderr.decode(errors='replace')[-500:]}")
    return parse_json(done.stdout, " ".join(words[:2]), ConfigError)


def write_audit(agent: Agent, tool: Callable[..., Json]) -> Callable[..., Json]:
    """`tool` with a line in the audit log before and after each call. Errors are documents."""

    def record(event: str, **facts: Any) -> None:
        with jsonl_records.open_locked(agent.runs / AUDIT) as records:
            records.append({"event": event, "when": now(), "tool": tool.__name__, **facts})

    @wraps(tool)
    def call(**arguments: Any) -> Json:
        record("call", arguments=documents.plain(arguments))
        try:
            document = {"error": None, "more_errors": [], "warnings": [], **tool(**arguments)}
        except UserError as error:
            first, *more = documents.mistakes(type(error).__name__, str(error))
            document = {"schema": "error/1", "error": first, "more_errors": more, "warnings": []}
        record("result", schema=document["schema"], error=document.get("error"))
        return document

    return call


TOOLS = tuple(name for name in vars(Agent) if not name.startswith("_"))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until standard input is closed. Returns the exit code."""
    parser = make_parser("src.serving.mcp", __doc__)
    add = parser.add_argument
    add("-sb", "--savedir_base", type=Path, default=ROOT / "results" / "runs", metavar="DIR", help="save directories")
    add("--data_path", type=Path, default=ROOT / "results" / "data", metavar="DIR", help="prepared data sets")
    add(
        "--allow", nargs="+", choices=("run",), default=[], help="run: also start, stop and submit (default: only read)"
    )
    add("--max-runs", type=int, metavar="N", help="of all starts in the audit log (default: any number)")
    add("--max-hours", type=float, metavar="H", help="of all starts in the audit log (default: any number)")
    options = parse_arguments(parser, argv)
    return run_command(lambda: _serve(options), logging.WARNING)


def _serve(options: argparse.Namespace) -> int:
    require_at_least(0, **{"max-runs": options.max_runs, "max-hours": options.max_hours})
    if options.max_hours is not None and not math.isfinite(options.max_hours):
        raise ConfigError(f"--max-hours: expected a number, got {options.max_hours}. Leave it out for no limit.")
    try:
        from mcp.server import MCPServer
    except ModuleNotFoundError:
        raise ConfigError("mcp: this package is not installed. Run: pip install -r requirements/mcp.txt") from None
    agent = Agent(options)
    server = MCPServer("trainval", instructions="Experiments: plan, run and compare. Read docs/agents.md first.")
    for name in TOOLS:
        server.add_tool(write_audit(agent, getattr(agent, name)), name, structured_output=False)
    server.run("stdio")
    return 0


if __name__ == "__main__":
    sys.exit(main())
