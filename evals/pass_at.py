"""Placeholder until running generated code is merged: pass@1 is not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.errors import error

NOT_RUN = "not run (opt-in)"


def pass_at_1(completions: Sequence[str], rows: Sequence[Mapping[str, str]], allowed: bool) -> dict:
    """One completion a problem: {status, problems, pass_at_1, counts, outcomes}."""
    if allowed:
        raise error("generated code to run", "nothing of the kind", "say tasks.run_code: false")
    return {"status": NOT_RUN, "problems": len(rows), "pass_at_1": None, "counts": {}, "outcomes": []}
