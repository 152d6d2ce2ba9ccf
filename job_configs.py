"""Where experiments run: name (given to -j) -> launcher and resources. Nothing here may change a number."""

JOB_CONFIGS = {
    "local": {"launcher": "local", "slots": 1},
    "slurm": {"launcher": "slurm", "max_running": 32},  # the cluster's default partition and limits
}
