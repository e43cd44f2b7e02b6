"""What torchrun, or whatever sets its variables, tells a process. Imports nothing heavy."""

import os

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether it started this process."""
    return all(os.environ.get(name) for name in VARIABLES)


def started() -> int:
    """How many processes it started, this one included; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def follows() -> bool:
    """Whether it started this process to follow another one."""
    return under_torchrun() and os.environ["RANK"] != "0"
