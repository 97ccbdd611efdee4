"""The one error a user can mend, and how it reaches the terminal.

A message has three parts: what was found, what was expected, what to do. `main_guard` prints it as one line on
standard error and exits with code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """Something the user can mend: one line, exit code 2."""


def error(found: str, expected: str, todo: str) -> UserError:
    """Build the three-part message (found; expected; what to do)."""
    return UserError(f"{found}; expected {expected}; {todo}")


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? known: a, b, c`, for messages about unknown names."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names)}"


def main_guard(main: Callable[[], None]) -> None:
    """Run a command line's `main`; a UserError becomes one line and exit code 2."""
    try:
        main()
    except UserError as exc:
        print(f"error: {' '.join(str(exc).split())}", file=sys.stderr)
        raise SystemExit(2) from None
