"""What several scenes use: fractions, prices, plurals, a last purchase."""

# ruff: noqa: E501 - a wording is not broken
# fmt: off - a phrase a line would make the scene three times as long
from __future__ import annotations

from evals.stories import phrases
from evals.stories.story import DrawAgainError, Person, Story, dollars

PARTS = {
    "half": (1, 2),
    "a third": (1, 3),
    "a quarter": (1, 4),
    "a fifth": (1, 5),
    "two thirds": (2, 3),
    "three quarters": (3, 4),
    "two fifths": (2, 5),
}
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


def require(condition: bool) -> None:
    if not condition:
        raise DrawAgainError


def cents(story: Story, low: int, high: int) -> float:
    """A price: whole dollars, or in some cases with .50, .25 or .75."""
    return story.between(low, high) + story.pick((0, 0, 0, 0, 0, 0, 0, 0.5, 0.5, 0.25, 0.75))


def part_of(story: Story, value: int) -> tuple[str, str]:
    """A fraction by which `value` can be divided: its words and the expression."""
    words = story.pick([name for name, (_, bottom) in PARTS.items() if value % bottom == 0] or ["half"])
    top, bottom = PARTS[words]
    return words, f"{value}/{bottom}" if top == 1 else f"{value}*{top}/{bottom}"


def percent_of(
    story: Story, value: int, choices: tuple[int, ...] = (5, 10, 20, 25, 30, 40, 50, 60, 75)
) -> tuple[str, str]:
    """A percentage that comes out whole: its words and the expression."""
    q = story.pick([q for q in choices if value * q % 100 == 0] or [50])
    return f"{q}%", f"{value}*{q}/100"


def divisor(story: Story, value: int, low: int, high: int) -> int:
    found = [k for k in range(low, high + 1) if value % k == 0 and value > k]
    require(bool(found))
    return story.pick(found)


def plural(item: str) -> str:
    head, of, tail = item.partition(" of ")
    if head == "loaf":
        head = "loave"
    elif head.endswith(("s", "x", "ch", "sh")):
        head += "e"
    elif head.endswith("y") and head[-2] not in "aeiou":
        head = head[:-1] + "ie"
    return f"{head}s{of}{tail}"


def listing(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def things_of(story: Story) -> dict:
    things, boxes = story.pick(phrases.THINGS)
    return {"things": story.pick(things), "boxes": story.pick(boxes)}


def spend_some(story: Story, who: Person, money: float) -> None:
    """From money in hand to what is left after buying several of one thing."""
    item = story.pick(list(phrases.GOODS))
    k, p = story.between(2, 4), cents(story, *phrases.GOODS[item])
    require(k * p < money)
    story.say(
        "with the money {s} <buy> {k} {item} for {p} each | {s} <spend> some of it on {k} {item} at {p} each | {s} then <buy> {k} {item}, each of which <cost:o> {p}",
        who,
        k=k,
        item=plural(item),
        p=dollars(p),
    )
    spent = story.work("cost", f"{k}*{dollars(p)}", who, item=plural(item))
    story.work("money left", f"{dollars(money)}-{dollars(spent)}", who)
    story.ask("money left", who)
