"""Logging to stderr: one line per event, with the process that speaks."""

import logging
import sys


def set_up_logging(process: str, level: str) -> None:
    """Send this process's log lines to stderr, marked with its name."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d %(levelname).1s {process:<12} %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
