"""Launchers and their resources by name, as given to -j. They never change a result."""

JOB_CONFIGS = {
    "local": {"launcher": "local", "slots": 1},
    "slurm": {"launcher": "slurm", "max_running": 32},  # the cluster's default partition and limits
}
