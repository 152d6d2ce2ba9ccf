"""The JSON documents of commands without a type of their own, for the reference and for tests.

Documents of results.compare, results.table and others are types in the modules of these commands.
"""

from typing import Any, Literal

from src.support.documents import Document


class Failure(Document):
    """Printed instead of the document of a command that fails. The exit code is the same as without --json."""

    schema: Literal["error/1"]


class File(Document):
    """The result of a command that writes a file."""

    schema: Literal["file/1"]
    path: str


class Steps(Document):
    """The result of a command of data_prep."""

    schema: Literal["data_prep/1"]
    command: str
    steps: list[dict[str, Any]]
    """One for each thing that was made or counted. `folder` or `file` is a path; `made` is false if it was complete."""


class Address(Document):
    """Printed by a command that serves a page, once it can be opened."""

    schema: Literal["address/1"]
    url: str


class Groups(Document):
    """`--list`."""

    schema: Literal["trainval.groups/1"]
    groups: list[dict[str, Any]]
    """`group`, the number of `experiments`, and `about`: recipe, model and data."""


class Experiments(Document):
    """`--list` with `-e` or `--exp_id`."""

    schema: Literal["trainval.experiments/1"]
    experiments: list[dict[str, Any]]
    """`exp_id`, `where` (`group[3]`), `differs` (settings that differ within the group) and the dict `exp`."""


class Plan(Document):
    """`--dry-run`."""

    schema: Literal["trainval.plan/1"]
    experiments: list[dict[str, Any]]
    """`exp_id`, `where`, `state`, `can_run`, and `steps` if `loop.budget` sets them."""
    done: int
    to_run: int
    cannot_run: int
    memory: list[dict[str, Any]]
    """With `--memory`, for experiments with one plan: `where`, number of `parameters` and of `trained` ones, FLOP of a
    step (`operations`), `tokens_per_second`, `hours`, `bytes` of a GPU with their `total`, and the number of
    parameters of each of `groups`."""
    cost: list[dict[str, Any]]
    """With `--cost`, for experiments with one plan, and for all: `where`, `runs`, `tokens`, `operations`, `gpu_hours`
    and `checkpoint_bytes`; null if unknown."""


class Jobs(Document):
    """A submission with `-j`, and `--job_option kill` and `throttle`."""

    schema: Literal["trainval.jobs/1"]
    action: str
    jobs: list[dict[str, str]]
    """`exp_id` and `job_id` of the jobs that were submitted, killed or throttled."""
    skipped: list[str]
    """Ids of the other selected experiments. Standard error has the reasons."""


class Status(Document):
    """`--job_option status`; with `--watch` one document after another."""

    schema: Literal["trainval.status/1"]
    experiments: list[dict[str, Any]]
    """The fields of `Row` (`src/launch/status.py`), and `differs`."""


class Logs(Document):
    """`--job_option logs`, which does not wait for new lines with --json."""

    schema: Literal["trainval.logs/1"]
    lines: dict[str, list[str]]
    """{id: the last lines of its logs}."""


class Training(Document):
    """A training here, without `-j`, at its end."""

    schema: Literal["trainval.training/1"]
    experiments: list[dict[str, str]]
    """`exp_id`, `where` and `state`: done or failed."""


class AgentFields(Document):
    """The tool `fields` of the server for agents."""

    schema: Literal["agent.fields/1"]
    fields: dict[str, dict[str, Any]]
    """{field: `type`, `is_required`, `default`}."""


class AgentStart(Document):
    """The tools `start` and `submit`."""

    schema: Literal["agent.start/1"]
    exp_ids: list[str]
    log: str
    """Path of the output of trainval.py."""
    exit_code: int | None
    """Null while it runs."""


class AgentStop(Document):
    """The tool `stop`."""

    schema: Literal["agent.stop/1"]
    exp_id: str
