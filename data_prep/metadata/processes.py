"""Make the parts of a data set in processes of this machine or as a Slurm array."""

import concurrent.futures
import logging
import multiprocessing
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep import sources
from data_prep.metadata import extraction, page_sources
from data_prep.metadata.extraction import Options, Part
from src.errors import ConfigError, DataError
from src.files import ROOT

log = logging.getLogger(__name__)


def run(parts: Sequence[Part], options: Options, workers: int, settings: dict[str, Any], logs: Path) -> None:
    """Make the missing parts.

    Raises:
        DataError: one line per source that cannot be read, after all readable ones are done.
    """
    missing = [part for part in parts if not part.report.exists()]
    if missing:
        log.info("processing %d of %d sources ...", len(missing), len(parts))
        if settings:
            _run_array(missing, options, workers, settings, logs)
        else:
            _run_here(missing, options, workers)
    failed = [part for part in missing if not part.report.exists()]
    if failed:
        unknown = "its process was killed, or could not write its error. Check memory (--workers) and disk space"
        raise DataError(
            "\n".join(
                part.failure.read_text() if part.failure.exists() else f"{part.source}: {unknown}." for part in failed
            )
        )


def _run_here(parts: Sequence[Part], options: Options, workers: int) -> None:
    """Make the parts on this machine, each in a separate process: a killed process does not stop the rest.

    datatrove's local executor waits forever for the task of a killed process (0.10.1).
    """
    if workers == 1:
        for part in parts:
            extraction.make_part(part, options)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([extraction.__name__])

    def make(part: Part) -> None:
        process = context.Process(target=_make_in_process, args=(part, options))
        process.start()
        process.join()

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(make, parts))


def _make_in_process(part: Part, options: Options) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at Ctrl-C only the command reports it
    extraction.make_part(part, options)


class Step:
    """Step of a datatrove pipeline: task `rank` makes one part."""

    def __init__(self, parts: Sequence[Part], options: Options) -> None:
        from loguru import logger

        self.parts, self.options = parts, options
        logger.disable("datatrove")  # in each process, because it logs a dozen lines per task

    def __reduce__(self) -> Any:
        return Step, (self.parts, self.options)

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        """Make part `rank`."""
        extraction.make_part(self.parts[rank], self.options)

    def __repr__(self) -> str:
        return f"{len(self.parts)} sources"


def _run_array(parts: Sequence[Part], options: Options, workers: int, settings: dict[str, Any], logs: Path) -> None:
    """Make the parts as a Slurm array, and wait for all of its jobs."""
    try:
        from datatrove.executor import SlurmPipelineExecutor
    except ModuleNotFoundError:
        needs = f"pip install -r {page_sources.PACKAGES}"
        raise ConfigError(f"--slurm: needs a package that is not installed: {needs}") from None
    shutil.rmtree(logs, ignore_errors=True)  # datatrove skips tasks that are logged here, even if they failed
    environment = f"export PYTHONPATH={ROOT} PATH={Path(sys.executable).parent}:$PATH"
    arguments: dict[str, Any] = {
        "pipeline": [Step(parts, options)],
        "tasks": len(parts),
        "logging_dir": str(logs),
        "skip_completed": False,
        "job_name": "metadata",
        "env_command": environment,
        "requeue": False,
        "sbatch_args": {"wait": ""},
        "workers": workers,
    }
    try:
        executor = SlurmPipelineExecutor(**{**arguments, **settings})
    except TypeError as error:
        raise ConfigError(
            f"--slurm: datatrove does not accept a setting ({sources.first_line(error).rstrip('.')}). "
            "Correct or remove it."
        ) from None
    executor.launch_merge_stats = lambda: None  # it would submit another job, for unused statistics
    try:
        executor.run()
    except (OSError, subprocess.CalledProcessError) as error:
        if not getattr(error, "output", None):  # submitted jobs that failed leave missing parts
            raise ConfigError(
                f"--slurm: the job could not be submitted ({sources.first_line(error).rstrip('.')}). "
                "Correct the settings."
            ) from None
