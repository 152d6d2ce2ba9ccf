"""Mistakes and lacks that the user can mend: printed as one line without a traceback, exit code 1."""


class UserError(Exception):
    """Says where, what came, and what would be right. Anything else that is raised is a bug of ours."""


class ConfigError(UserError):
    """An experiment, a group or a command line that cannot be run as written."""


class DataError(UserError):
    """A data set that is missing, incomplete or malformed."""


class CheckpointError(UserError):
    """A checkpoint that is missing, torn, or of another model."""


class RunError(UserError):
    """A save directory that is held by another process, belongs to another dict, or cannot be written."""


class TrainingError(UserError):
    """A training that must not go on, such as one whose loss is no longer finite."""


class LaunchError(UserError):
    """A launcher that is unknown, or that refused the job."""
