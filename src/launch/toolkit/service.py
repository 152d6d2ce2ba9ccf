"""What the toolkit is told of a job and says of it, whichever way leads there."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import AfterValidator, Field, field_validator, model_validator

from src import config as configs
from src.errors import LaunchError
from src.launch.command import Environment

SUBMISSION, EXPERIMENT, OWNER = "hv_submission", "hv_exp", "hv_owner"
"""Names of a job's tags."""
SUITE = ("hv_suite", "trainval")
"""The tag of every job of ours."""
_SECRET_NAME = re.compile(r"(?:^|_)(?:API)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(?:_ID)?(?:$|_)", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|AKIA|xox[bp]-)\w{8,}|://[^/\s:@]+:[^/\s@]+@")
_MOUNT = re.compile(r"[^\s:]+:(/[^:]*)(?::(ro|rw))?")


class Unreached(LaunchError):
    """The service was not reached, or did not know who asked: nothing was done, and asking again does no harm."""


class Doubtful(LaunchError):
    """It may have been done: the service failed, did not answer in time, or answered in words that cannot be read."""


class Taken(LaunchError):
    """There is a job of this name already, perhaps one that has ended."""


class Gone(LaunchError):
    """There is no such job, or it has ended."""


def _check_image(image: str) -> str:
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@" not in image and tag in ("", "latest"):
        raise ValueError(f"expected an image with a tag that stays what it is, such as name:v3 or name@sha256:…, got {image!r}.")
    return image


def _check_mount(mount: str) -> str:
    if not _MOUNT.fullmatch(mount):
        raise ValueError(f"expected 'account.name@branch:/folder', then ':ro' or ':rw' if need be, got {mount!r}.")
    return mount


class JobConfig(configs.Config):
    """What the toolkit is told of every job."""

    account: str = Field(min_length=1)
    """Id or full name; "$NAME" is read from the environment."""
    image: Annotated[str, Field(min_length=1), AfterValidator(_check_image)]
    """Docker image, never `:latest`: a job that is started again must find what it had."""
    data: list[Annotated[str, AfterValidator(_check_mount)]] = []
    """Mounts, "account.name@branch:/folder[:ro|rw]", rw where nothing else is said."""
    environment: Environment = {}
    """Variables of the job. They can be read by everybody who sees the job, so no secrets."""
    cpu: int = Field(default=4, ge=1)
    mem_gb: int = Field(default=16, ge=1)
    gpus: int = Field(default=0, ge=0)
    """Of each node."""
    gpu_mem_gb: int | None = Field(default=None, ge=1)
    """Least memory of each GPU."""
    gpu_model: str | None = None
    """Such as "A100" or "!A100"."""
    preemptable: bool = True
    restartable: bool = True
    """True: the toolkit starts it again after a preemption, and it goes on from its last checkpoint."""
    bid: int | None = Field(default=None, ge=0, le=9999)
    max_run_seconds: int = Field(ge=60)
    """The toolkit ends the job after this; the time that a child waits for its parents counts."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """How long one call of the toolkit may take."""
    retries: int = Field(default=5, ge=0)
    """How often a call that failed is made again."""
    backoff_seconds: float = Field(default=2.0, ge=0)
    """Pause before the first of them; each is twice the one before, at most a minute."""

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value):
                raise ValueError(
                    f"{name} looks like a secret, and everybody who sees the job would see it. Put it into the account's secret store, "
                    "or where the job finds it itself, such as ~/.netrc on a mount."
                )
        return environment

    @model_validator(mode="after")
    def _gpus_that_are_there(self) -> "JobConfig":
        if self.gpus == 0 and (self.gpu_mem_gb is not None or self.gpu_model is not None):
            raise ValueError("gpu_mem_gb and gpu_model say something of GPUs, but gpus is 0.")
        return self

    def account_id(self) -> str:
        """The account, looked up where it is a variable.

        Raises:
            LaunchError: the variable is not set.
        """
        if not self.account.startswith("$"):
            return self.account
        name = self.account[1:].strip("{}")
        if not os.environ.get(name):
            raise LaunchError(
                f"toolkit: account is {self.account!r}, but {name} is not set. Set it: `export {name}=$(eai account get --field id)`."
            )
        return os.environ[name]

    def mounts(self) -> dict[Path, bool]:
        """Folder of each mount, and True where it can be written."""
        found = [match for mount in self.data if (match := _MOUNT.fullmatch(mount))]
        return {Path(match[1]): match[2] != "ro" for match in found}


@dataclass(frozen=True)
class Spec:
    """One job to be created."""

    name: str
    """Of [a-z0-9_]; no two jobs of an account share one, not even with one that was cancelled."""
    command: tuple[str, ...]
    workdir: Path
    tags: Mapping[str, str]
    nodes: int
    config: JobConfig


@dataclass(frozen=True)
class Listed:
    """What the toolkit says of one job."""

    job_id: str
    word: str
    """Its state, in capitals."""
    name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    node: str = ""
    seconds: float | None = None
    runs: int = 1


class Service(Protocol):
    """A way to the toolkit. Each method makes one call, and raises one of the errors above, or LaunchError for a plain no."""

    def create(self, spec: Spec) -> str: ...

    def listed(self, limit: int, tag: tuple[str, str] | None = None, name: str | None = None) -> list[Listed]:
        """At most `limit` jobs, the newest first. A job that is not among them may still exist."""
        ...

    def get(self, job_id: str) -> Listed | None:
        """None: there is no such job."""
        ...

    def cancel(self, job_id: str) -> None: ...
