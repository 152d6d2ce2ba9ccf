"""A stand-in for sbatch, squeue, sacct, scancel and scontrol: `program.py COMMAND ARGUMENTS…`, with its state below
$FAKE_SLURM.

It knows one user, the partitions and accounts of its state, and arrays of tasks; messages are those of Slurm 22.05.
state.json is the cluster, calls.jsonl every call, faults.json what goes wrong: [{"command": "sbatch", "do": "say" |
"hang" | "say_after" | "hang_after" | "garbage", "text": …, "skip": well before, "times": calls}]. "say_after" and
"hang_after" do the work first: the answer alone is lost.
"""

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOME = Path(os.environ.get("FAKE_SLURM", "."))
STATE_NAME, FAULTS_NAME, CALLS_NAME = "state.json", "faults.json", "calls.jsonl"
STATE, FAULTS, CALLS = HOME / STATE_NAME, HOME / FAULTS_NAME, HOME / CALLS_NAME
EMPTY: dict[str, Any] = {
    "next": 1,
    "partitions": ["low", "high"],
    "accounts": ["lab"],
    "max_array": 1001,
    "accounting": True,
    "run": False,  # whether sbatch runs the tasks, one after another, before it returns
    "arrays": {},
}
END_STATES = {
    "COMPLETED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "CANCELLED by 0",
    "CANCELLED",
}


def fail(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(1)


def fault(command: str) -> dict[str, Any] | None:
    """The next fault of `command`, taken off the list."""
    faults = json.loads(FAULTS.read_text()) if FAULTS.exists() else []
    for item in faults:
        if item["command"] == command and item.get("times", 1) > 0:
            if item.get("skip", 0) > 0:
                item["skip"] -= 1
                item = None
            else:
                item["times"] = item.get("times", 1) - 1
            FAULTS.write_text(json.dumps(faults))
            return item
    return None


def main(command: str, arguments: list[str]) -> None:
    with open(HOME / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with CALLS.open("a") as calls:
            calls.write(json.dumps([command, *arguments]) + "\n")
        wrong = fault(command)
        if wrong is None or wrong["do"].endswith("_after"):
            state = json.loads(STATE.read_text()) if STATE.exists() else EMPTY
            output = COMMANDS[command](state, arguments)
            STATE.write_text(json.dumps(state))
    if wrong is None:
        sys.stdout.write(output)
    elif wrong["do"].startswith("hang"):
        time.sleep(600)
    elif wrong["do"] == "garbage":
        sys.stdout.write(wrong["text"])
    else:
        fail(wrong["text"])


def sbatch(state: dict[str, Any], arguments: list[str]) -> str:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "job-name",
        "array",
        "chdir",
        "output",
        "open-mode",
        "kill-on-invalid-dep",
        "dependency",
        "signal",
        "nodes",
        "partition",
    ):
        parser.add_argument(f"--{name}")
    for name in (
        "ntasks-per-node",
        "cpus-per-task",
        "gpus-per-node",
        "account",
        "qos",
        "constraint",
        "time",
        "mem",
        "exclude",
        "nice",
    ):
        parser.add_argument(f"--{name}")
    for name in ("parsable", "requeue", "no-requeue", "exclusive"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    if args.partition and args.partition not in state["partitions"]:
        fail(
            f"sbatch: error: invalid partition specified: {args.partition}\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified"
        )
    if args.account and args.account not in state["accounts"]:
        fail("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified")
    first, last, throttle = re.fullmatch(r"(\d+)-(\d+)(?:%(\d+))?", args.array).groups()  # type: ignore[union-attr]
    if int(last) >= state["max_array"]:
        fail("sbatch: error: Batch job submission failed: Invalid job array specification")
    array_id = str(state["next"])
    tasks = {
        str(i): {
            "state": "PENDING",
            "reason": "Priority",
            "node": "",
            "exit": "0:0",
            "seconds": 0,
            "restarts": 0,
            "forgotten": False,
        }
        for i in range(int(first), int(last) + 1)
    }
    state["arrays"][array_id] = {"name": args.job_name, "throttle": throttle, "tasks": tasks}
    state["next"] += 1
    if state["run"]:
        for i in tasks:
            run(state, array_id, i, args)
    return f"{array_id}\n"


def run(state: dict[str, Any], array_id: str, i: str, args: argparse.Namespace) -> None:
    task = state["arrays"][array_id]["tasks"][i]
    for parent in re.findall(r"\d+_\d+", args.dependency or ""):
        array, _, number = parent.partition("_")
        if state["arrays"][array]["tasks"][number]["state"] != "COMPLETED":
            task.update(state="CANCELLED", reason="DependencyNeverSatisfied")
            return
    names = {
        "SLURM_ARRAY_JOB_ID": array_id,
        "SLURM_ARRAY_TASK_ID": i,
        "SLURM_JOB_ID": f"{array_id}00{i}",
        "SLURM_NNODES": "1",
    }
    command = ["bash", args.script, *args.arguments]
    with open(Path(args.chdir) / args.output.replace("%%", "%"), "ab") as log:
        done = subprocess.run(command, cwd=args.chdir, stdout=log, stderr=log, env={**os.environ, **names}, check=False)
    task.update(state="FAILED" if done.returncode else "COMPLETED", exit=f"{done.returncode}:0", node="n1", seconds=1)


def select_tasks(state: dict[str, Any], arguments: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """(array id, task, facts) of all that --jobs or --name asks for."""
    options = dict(word.removeprefix("--").partition("=")[::2] for word in arguments if word.startswith("--"))
    rows = []
    for array_id, array in state["arrays"].items():
        jobs = options.get("jobs", array_id).split(",")
        if "name" in options and array["name"] not in options["name"].split(","):
            continue
        rows += [(array_id, i, task) for i, task in array["tasks"].items() if {array_id, f"{array_id}_{i}"} & set(jobs)]
    return rows


def squeue(state: dict[str, Any], arguments: list[str]) -> str:
    rows = [row for row in select_tasks(state, arguments) if not row[2]["forgotten"] and not row[2].get("vanished")]
    requested_jobs = next((word.partition("=")[2].split(",") for word in arguments if word.startswith("--jobs=")), [])
    if len(requested_jobs) == 1 and requested_jobs[0] not in {row[0] for row in rows}:
        fail("slurm_load_jobs error: Invalid job id specified")
    if "--format=%F|%j" in arguments:
        return "".join(f"{array}|{state['arrays'][array]['name']}\n" for array, _, _ in rows)
    lines = []
    for array, i, task in rows:
        code, _, number = task["exit"].partition(":")
        minutes, seconds = divmod(task["seconds"], 60)
        word = task["state"].split()[0]
        cells = [
            f"{array}_{i}",
            word,
            task["reason"],
            task["node"],
            f"{minutes}:{seconds:02}",
            task["restarts"],
            int(code) * 256 + int(number),
            task.get("start", "N/A"),
        ]
        lines.append("".join(f"{cell!s:<20}|" for cell in cells) + "\n")
    return "".join(lines)


def sacct(state: dict[str, Any], arguments: list[str]) -> str:
    if not state["accounting"]:
        fail("Slurm accounting storage is disabled")
    rows = [row for row in select_tasks(state, arguments) if row[2]["forgotten"] != "everywhere"]
    vanished_arrays = sorted({array for array, _, task in rows if task.get("vanished")})
    rows = [row for row in rows if not row[2].get("vanished")]
    if any(word.endswith("JobID,JobName") for word in arguments):
        job_ids = [*(f"{array}_{i}" for array, i, _ in rows), *vanished_arrays]
        return "".join(f"{job}|{state['arrays'][job.partition('_')[0]]['name']}\n" for job in job_ids)
    if any(word.endswith("MaxRSS,ReqMem") for word in arguments):
        steps = [(f"{array}_{i}", *task["memory"]) for array, i, task in rows if task.get("memory")]
        return "".join(
            f"{job}||{options}\n{job}.batch|{max_rss}|\n{job}.extern|4K|\n" for job, max_rss, options in steps
        )
    lines = []
    for array, i, task in rows:
        node = task["node"] or "None assigned"
        earlier = "REQUEUED|None|" + node + "|1|0:0|2026-01-01T00:00:"
        lines += [f"{array}_{i}|{earlier}{n:02}\n" for n in range(task["restarts"])]
        elapsed, submit = task["seconds"], f"2026-01-01T00:01:{task['restarts']:02}"
        lines.append(f"{array}_{i}|{task['state']}|{task['reason']}|{node}|{elapsed}|{task['exit']}|{submit}\n")
    lines += [f"{array}|CANCELLED by 0|None|None assigned|0|0:0|2026-01-01T00:02:00\n" for array in vanished_arrays]
    return "".join(reversed(lines))


def scancel(state: dict[str, Any], arguments: list[str]) -> str:
    tasks = []
    for word in arguments:
        if word.startswith("--name="):
            tasks += [
                task
                for array in state["arrays"].values()
                if array["name"] == word[7:]
                for task in array["tasks"].values()
            ]
            continue
        array, _, rest = word.partition("_")
        if array not in state["arrays"]:
            continue
        numbers = [*state["arrays"][array]["tasks"]] if not rest else []
        for piece in filter(None, rest.strip("[]").split(",")):
            first, _, last = piece.partition("-")
            numbers += [str(i) for i in range(int(first), int(last or first) + 1)]
        tasks += [state["arrays"][array]["tasks"][number] for number in numbers]
    for task in tasks:
        if task.get("pid"):
            subprocess.run(
                ["pkill", "-TERM", "-s", str(task["pid"])], check=False
            )  # all of its session, which Cluster.start made
        if task["state"] == "PENDING":
            task.update(state="CANCELLED", vanished=True)  # Slurm keeps no record of a task that never started
        if task["state"] not in END_STATES:
            task.update(state="CANCELLED by 0", reason="None")
    return ""


def scontrol(state: dict[str, Any], arguments: list[str]) -> str:
    if arguments == ["show", "config"]:
        return (
            f"Configuration data as of 2026-01-01T00:00:00\nMaxArraySize            = "
            f"{state['max_array']}\nMaxJobCount   = 10000\n"
        )
    if arguments == ["--oneliner", "show", "partition"]:
        return "".join(f"PartitionName={name} AllowGroups=ALL State=UP TotalNodes=4\n" for name in state["partitions"])
    if arguments[0] == "update":
        facts = dict(word.split("=") for word in arguments[1:])
        state["arrays"][facts["JobId"]]["throttle"] = facts["ArrayTaskThrottle"]
        return ""
    if arguments[0] == "requeue":
        return ""
    fail(f"scontrol: error: fake: {arguments}")
    return ""


COMMANDS = {"sbatch": sbatch, "squeue": squeue, "sacct": sacct, "scancel": scancel, "scontrol": scontrol}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
