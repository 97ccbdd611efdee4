"""What a growth says, as a page for a reader and as an object for a program (engine/plan_growth.py)."""

from __future__ import annotations

from engine.plan_growth import Growth

LIMITS = "limits that jobs ask for at their first attempt, not a forecast of what they take"


def page_of(growth: Growth) -> str:
    lines = ["Jobs", *(f"  {rule:<18}{count:>8,}" for rule, count in growth.jobs.items())]
    lines += [f"  {'all':<18}{sum(growth.jobs.values()):>8,}", "", f"Node hours: {LIMITS}"]
    lines += [f"  {node:<18}{hours:>8,.0f}" for node, hours in growth.asked_hours.items()]
    lines += ["", "Written, at most", *_written(growth)]
    hours = f"{growth.chain_minutes / 60:,.0f} hours"
    lines += ["", f"One after the other, {hours} if each takes all that it asks for", f"  {' > '.join(growth.chain)}"]
    return "\n".join(lines)


def as_json(growth: Growth) -> dict:
    """The numbers of the page, unrounded; bytes are null where no text's tokens are known."""
    return {
        "jobs": growth.jobs,
        "node_hours": {"are": LIMITS, "asked": growth.asked_hours},
        "written_at_most": {
            "trace_bytes": growth.trace_bytes,
            "decision_bytes": growth.decision_bytes,
            "trace_bytes_a_token": growth.trace_bytes_a_token,
            "decision_bytes_a_token": growth.decision_bytes_a_token,
            "texts": growth.texts.kinds,
            "resolve": growth.resolve or None,
        },
        "chain": {"rules": growth.chain, "asked_hours": growth.chain_minutes / 60},
    }


def _written(growth: Growth) -> list[str]:
    texts = growth.texts
    unknown, estimated, absent = map(texts.of_kind, ("unknown", "estimated", "absent"))
    rows = (
        ("router traces", growth.trace_bytes, growth.trace_bytes_a_token),
        ("decision logs", growth.decision_bytes, growth.decision_bytes_a_token),
    )
    lines = []
    for name, known, a_token in rows:
        found = f"{'unknown':>11}" if known is None else f"{known / 1e9:>8.1f} GB"
        lines.append(f"  {name:<18}{found}" + f", {a_token / 1e3:,.1f} GB a million tokens" * bool(unknown))
    if estimated:
        lines.append(
            f"  estimated for {', '.join(estimated)}: {texts.bytes_a_token:.2f} bytes a token, as recorded texts"
        )
    if absent:
        lines.append(f"  nothing for {', '.join(absent)}, absent here and skipped by a run")
    if unknown:
        lines.append(f"  without {', '.join(unknown)}: unknown until resolved, then estimated:")
        lines.append(f"    {growth.resolve}")
    return lines
