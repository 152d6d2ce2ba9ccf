"""The server for agents as a process, with the client of the SDK."""

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from src.errors import ConfigError
from src.runs import jsonl_records
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from src.serving import mcp
from tests import toy

GROUP = "base_tiny"
TOY = {
    "model.tokenizer": "toy_tokenizer",
    "data.corpus": "toy_text",
    "data.sequence_tokens": 16,
    "data.val_sequences": 16,
}
"""Changes of the group for the data of tests/toy.py."""
READING: dict[str, dict[str, Any]] = {
    "groups": {},
    "experiments": {"group": GROUP},
    "fields": {"kind": "recipe", "name": "lm"},
    "plan": {"group": GROUP, "changes": {"loop.steps": 3}, "where": "seed == 0"},
    "status": {"group": GROUP},
    "logs": {"exp_id": "FIRST"},
    "table": {"by": ["seed"], "scores": ["val_loss"], "where": "seed < 5"},
    "diff": {"a": "FIRST", "b": "SECOND"},
    "lineage": {"exp_id": "FIRST"},
}
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("plan", {"group": "--allow"}),
    ("plan", {"group": f"{GROUP} --reset"}),
    ("plan", {"group": "../../etc/passwd"}),
    ("plan", {"group": GROUP, "where": "__import__('os').system('x')"}),
    ("plan", {"group": GROUP, "where": "seed.__class__.__bases__ == 1 or open('/etc/passwd')"}),
    ("plan", {"group": GROUP, "changes": {"--job_option": "kill"}}),
    ("plan", {"group": GROUP, "changes": {"loop.steps=1 --reset": 1}}),
    ("plan", {"group": GROUP, "changes": {"data.corpus": "/etc"}}),
    ("plan", {"group": GROUP, "changes": {"data.corpus": "a/../../b"}}),
    ("plan", {"group": GROUP, "changes": {"data": {"shards": ["pipe:touch /tmp/x"]}}}),
    ("plan", {"group": GROUP, "changes": {"model.path": "https://host/x"}}),
    ("logs", {"exp_id": "../../etc"}),
    ("logs", {"exp_id": "*"}),
    ("diff", {"a": "-o", "b": "/etc/passwd"}),
    ("table", {"group": "-o"}),
    ("table", {"by": ["--output=/tmp/x"]}),
    ("table", {"scores": ["-o"]}),
    ("lineage", {"exp_id": "/etc"}),
    ("fields", {"kind": "os", "name": "system"}),
    ("compare", {"base": "-o", "candidates": ["/tmp/x"]}),
    ("progress", {"group": "--output"}),
    ("submit", {"job_config": "--python_binary", "group": GROUP}),
    ("stop", {"exp_id": "../x"}),
    ("plan", {"group": GROUP, "changes": {"data": {"sources": {"/etc/passwd": {}}}}}),
    ("compare", {"base": "toy", "candidates": ["other"], "metric": "-o"}),
    ("progress", {"group": "toy", "metric": "--output=/tmp/x"}),
    ("start", {"group": GROUP, "hours": 0}),
    ("start", {"group": GROUP, "hours": -1}),
    ("start", {"group": GROUP, "hours": 1e300}),
]


@asynccontextmanager
async def client(folder: Path, *options: str) -> AsyncIterator[Any]:
    """A session with a server process on the runs and data of `folder`."""
    from mcp import ClientSession, StdioServerParameters, stdio_client

    places = ["-sb", str(folder / "runs"), "--data_path", str(folder / "data")]
    command = ["-m", "src.serving.mcp", *places, *options]
    server = StdioServerParameters(command=sys.executable, args=command, cwd=toy.ROOT, env=dict(os.environ))
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        yield session


async def call(session: Any, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    result = await session.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return json.loads(result.content[0].text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two seeds of an experiment and one of another, and no data."""
    for group, seed, more in (("toy", 0, {}), ("toy", 1, {}), ("other", 0, {"loop": {"learning_rate": 0.1}})):
        exp = {"recipe": "toy", "seed": seed, **more}
        with RunDir.open(tmp_path / "runs", exp, exp, facts={"groups": [group]}) as run:
            run.scores.append({"step": 1, "val_loss": 0.5 + seed, "em": 0.25})
            run.set_status("done")
            run.logs.mkdir(exist_ok=True)
            (run.logs / "train.log").write_text("one\ntwo\n")
    return tmp_path


def with_ids(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    first, second = sorted(path.name for path in (folder / "runs").iterdir() if (path / "exp_dict.json").exists())[:2]
    ids = {"FIRST": first[:8], "SECOND": second[:8]}
    return {key: ids.get(value, value) if isinstance(value, str) else value for key, value in arguments.items()}


@pytest.mark.slow
def test_every_tool_is_listed_and_called(folder: Path):
    async def session() -> None:
        async with client(folder) as server:
            tools = (await server.list_tools()).tools
            assert {tool.name for tool in tools} == set(mcp.TOOLS)
            assert all(tool.description for tool in tools)
            for tool, arguments in READING.items():
                document = await call(server, tool, with_ids(arguments, folder))
                if tool != "plan":  # its data are missing
                    assert not document.get("error"), document
            assert (await call(server, "table", READING["table"]))["rows"][0]["val_loss"] == 0.5
            assert (await call(server, "logs", with_ids(READING["logs"], folder)))["lines"].popitem()[1] == [
                "one",
                "two",
            ]
            for tool, arguments in (
                ("start", {"group": GROUP}),
                ("submit", {"group": GROUP, "job_config": "local"}),
                ("stop", {"exp_id": "0" * 32}),
            ):
                assert "--allow run" in (await call(server, tool, arguments))["error"]["advice"]
            words = {"base": "toy", "candidates": ["other"], "metric": "em", "min_effect": 0.5}
            report = await call(server, "compare", words)
            assert (report["metric"], report["min_effect"]) == ("em", 0.5)
            assert report["candidates"][0]["difference"] == 0
            (step,) = (await call(server, "progress", {"group": "toy"}))["steps"]
            assert (step["mean"], step["verdict"]) == (1.0, "first")

    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")}
    anyio.run(session)
    after = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*")}
    changed = {path for path in after if before.get(path) != after[path]}
    assert changed <= {folder / "runs", folder / "runs" / mcp.AUDIT, folder / "runs" / "index.sqlite"}
    rows = jsonl_records.rows(folder / "runs" / mcp.AUDIT)
    assert {row["tool"] for row in rows if row["event"] == "call"} == set(mcp.TOOLS)
    assert len([row for row in rows if row["event"] == "result"]) == len(
        [row for row in rows if row["event"] == "call"]
    )


@pytest.mark.parametrize(("tool", "arguments"), HOSTILE)
def test_hostile_arguments_are_refused(
    tool: str, arguments: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """No command is started for them."""
    agent = mcp.Agent(options(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "no_such_program"))
    with pytest.raises(ConfigError):
        getattr(agent, tool)(**arguments)


def options(folder: Path, max_runs: int | None = None, max_hours: float | None = None) -> Any:
    import argparse

    places = {"savedir_base": folder / "runs", "data_path": folder / "data"}
    return argparse.Namespace(**places, allow=["run"], max_runs=max_runs, max_hours=max_hours)


def audit(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "runs").mkdir(exist_ok=True)
    with jsonl_records.open_locked(folder / "runs" / mcp.AUDIT) as records:
        for row in rows:
            records.append({"event": "booked", "when": "2026-01-01T00:00:00+00:00", "tool": "start", **row})


def test_limits_are_counted_from_the_audit_log(folder: Path):
    """A new server reads them, so a restart gives no new runs. Real starts: `test_a_run_of_the_server_equals_...`."""
    audit(folder, {"exp_ids": ["c" * 32], "hours": 2.0})
    with pytest.raises(ConfigError, match="--max-runs 1"):
        mcp.Agent(options(folder, max_runs=1))._count("start", ["a" * 32], 1.0)
    with pytest.raises(ConfigError, match=r"--max-hours 2\.5: 0\.5"):
        mcp.Agent(options(folder, max_hours=2.5))._count("start", ["a" * 32], 1.0)
    with pytest.raises(ConfigError, match="--max-hours"):
        mcp.Agent(options(folder, max_hours=9)).submit("local", GROUP)
    assert len(jsonl_records.rows(folder / "runs" / mcp.AUDIT)) == 1
    mcp.Agent(options(folder, max_runs=2, max_hours=3))._count("start", ["a" * 32], 1.0)
    with pytest.raises(ConfigError, match="--max-runs 2"):
        mcp.Agent(options(folder, max_runs=2))._count("start", ["b" * 32], 0.0)
    mcp.Agent(options(folder, max_runs=2))._count("start", [], 0.0)


def test_a_start_that_ended_early_frees_its_hours(folder: Path):
    agent = mcp.Agent(options(folder))
    run, *_ = [SavedRun(path) for path in sorted((folder / "runs").iterdir()) if (path / "exp_dict.json").exists()]
    row = {"when": run.status["updated"], "exp_ids": [run.name], "hours": 5.0}
    assert agent._used_hours(row) == 5.0  # not started yet
    assert agent._used_hours(row | {"when": "2020-01-01T00:00:00+00:00", "hours": 1e9}) < 1e9
    assert agent._used_hours(row | {"exp_ids": ["d" * 32]}) == 5.0


def test_a_start_leaves_the_stop_file_of_a_person(folder: Path):
    agent = mcp.Agent(options(folder))
    exp_id = next(path.name for path in (folder / "runs").iterdir() if (path / "exp_dict.json").exists())
    audit(folder, {"exp_ids": [exp_id], "hours": 1.0})
    file = folder / "runs" / exp_id / "stop"
    agent.stop(exp_id)
    agent._withdraw_stop(exp_id)
    assert not file.exists()
    file.touch()
    agent.stop(exp_id)
    with pytest.raises(ConfigError, match=exp_id):
        agent._withdraw_stop(exp_id)
    assert file.read_bytes() == b""


def test_nan_is_refused_and_recorded(folder: Path, capsys: pytest.CaptureFixture[str]):
    agent = mcp.Agent(options(folder))
    document = mcp.write_audit(agent, agent.start)(group=GROUP, hours=float("nan"))
    assert document["error"]["where"] == "hours"
    rows = jsonl_records.rows(folder / "runs" / mcp.AUDIT)
    assert [row["event"] for row in rows] == ["call", "result"]
    assert rows[0]["arguments"] == {"group": GROUP, "hours": None}
    for hours in ("nan", "inf"):
        assert mcp.main(["-sb", str(folder / "runs"), "--max-hours", hours]) == 1
        assert "--max-hours" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_the_server_equals_that_of_the_command_line(tmp_path: Path):
    changes = TOY | {"loop.steps": 4, "loop.eval_every": 2}
    for place in ("line", "agent", "job"):
        toy.write_data(tmp_path / place / "data")
    words = ["-e", GROUP, *(word for path, value in changes.items() for word in ("--set", f"{path}={value}"))]
    done = toy.run(toy.ROOT, words, tmp_path / "line")
    assert done.returncode == 0, done.stderr
    (one,) = [path for path in (tmp_path / "line" / "runs").iterdir() if (path / "exp_dict.json").exists()]

    async def wait(server: Any, document: dict[str, Any]) -> None:
        assert (document["exp_ids"], document["error"]) == ([one.name], None), document
        until = time.monotonic() + toy.LONGEST
        while True:
            (row,) = (await call(server, "status", {"group": GROUP, "changes": changes}))["experiments"]
            if row["state"] in ("done", "failed") or time.monotonic() > until:
                break
        assert row["state"] == "done", Path(document["log"]).read_text()

    async def session() -> None:
        async with client(tmp_path / "job", "--allow", "run", "--max-runs", "1") as server:
            await wait(
                server, await call(server, "submit", {"group": GROUP, "changes": changes, "job_config": "local"})
            )
        async with client(tmp_path / "agent", "--allow", "run", "--max-runs", "1", "--max-hours", "1") as server:
            await wait(server, await call(server, "start", {"group": GROUP, "changes": changes, "hours": 0.5}))
            again = await call(server, "start", {"group": GROUP, "changes": changes | {"loop.steps": 5}, "hours": 0.1})
            assert again["error"]["where"] == "--max-runs 1"
            again = await call(server, "start", {"group": GROUP, "changes": changes, "hours": 1.0})  # done: no run
            assert again["error"]["where"] == "--max-hours 1"

    anyio.run(session)
    for place in ("agent", "job"):
        other = tmp_path / place / "runs" / one.name
        assert (other / "scores.jsonl").read_bytes() == (one / "scores.jsonl").read_bytes(), place


@pytest.mark.slow
def test_stop_writes_a_checkpoint(tmp_path: Path):
    changes = TOY | {"loop.steps": 100000}
    toy.write_data(tmp_path / "agent" / "data")

    async def session() -> str:
        async with client(tmp_path / "agent", "--allow", "run") as server:
            (exp_id,) = (await call(server, "start", {"group": GROUP, "changes": changes}))["exp_ids"]
            run = tmp_path / "agent" / "runs" / exp_id
            await until_state(
                server, changes, lambda row: row["state"] == "running" and (run / "scores.jsonl").exists()
            )
            assert (await call(server, "stop", {"exp_id": exp_id}))["schema"] == "agent.stop/1"
            await until_state(server, changes, lambda row: row["state"] == "stopped")
            return exp_id

    async def until_state(server: Any, changes: dict[str, Any], is_reached: Any) -> None:
        until = time.monotonic() + toy.LONGEST
        while not is_reached((await call(server, "status", {"group": GROUP, "changes": changes}))["experiments"][0]):
            assert time.monotonic() < until

    exp_id = anyio.run(session)
    assert list((tmp_path / "agent" / "runs" / exp_id / "checkpoints").glob("step-*"))
