"""Where experiments run: name (given to -j) -> launcher and resources. Nothing here may change a number."""

JOB_CONFIGS = {
    "local": {"launcher": "local", "slots": 1},
}
