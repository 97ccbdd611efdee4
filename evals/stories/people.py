"""Scenes of what one person holds, and of how several people compare."""

# ruff: noqa: E501 - a wording is not broken
# fmt: off - a phrase a line would make the scene three times as long
from __future__ import annotations

from evals.stories import phrases
from evals.stories.shared import TIMES, cents, divisor, part_of, percent_of, require, spend_some, things_of
from evals.stories.story import Person, Story, dollars


def more(story: Story, who: Person, n: int, names: dict) -> int:
    """Something comes in; returns the new number."""
    kind = story.pick("buys | finds | receives | packs | dozens | daily | doubles")
    m, k = story.between(2, 40), story.between(2, 8)
    if kind == "doubles":
        k = story.between(2, 3)
        story.say(kind, who, times=TIMES[k], **names)
        m = story.work("added", f"{n}*{k}", who, **names)
    elif kind in ("packs", "daily"):
        m = story.between(2, 15)
        story.say(kind, who, m=m, k=k, **names)
        m = story.work("added", f"{k}*{m}", who, **names)
    elif kind == "dozens":
        story.say(kind, who, k=k, **names)
        m = story.work("added", f"{k}*12", who, **names)
    else:
        story.say(kind, who, m=m, **names)
    return story.work("now", f"{n}+{m}", who, **names)


def less(story: Story, who: Person, n: int, names: dict) -> int:
    """Something goes out; returns what is left."""
    kind = story.pick("sells | gives | gives one | loses | fraction | percent")
    m, k = story.between(2, max(3, n // 2)), story.between(2, 6)
    if kind == "gives":
        m = story.between(2, 9)
        story.say(kind, who, m=m, k=k, **names)
        m = story.work("gone", f"{k}*{m}", who, **names)
    elif kind == "fraction":
        part, expression = part_of(story, n)
        story.say(kind, who, part=part, **names)
        m = story.work("gone", expression, who, **names)
    elif kind == "percent":
        q, expression = percent_of(story, n)
        story.say(kind, who, q=q, **names)
        m = story.work("gone", expression, who, **names)
    else:
        story.say(kind, who, m=m, **names)
    require(m + 1 < n)
    return story.work("left", f"{n}-{m}", who, **names)


def holdings(story: Story) -> None:
    who, names = story.person(plural=True), things_of(story)
    n = story.between(6, 120)
    story.say("has", who, n=n, **names)
    moves = [story.pick((more, less, less)) for _ in range(story.pick((1, 2, 2, 3, 3, 4)))]
    for move in moves:
        n = move(story, who, n, names)
    end = story.pick("stay | stay | price | shares | groups | use")
    if end == "stay":
        require(len(moves) > 1)
        story.ask("left" if moves[-1] is less else "now", who, **names)
    elif end == "price":
        p = cents(story, 1, 9)
        story.say("price", who, p=dollars(p), **names)
        money = story.work("sale", f"{n}*{dollars(p)}", who, **names)
        if story.rng.random() < 0.5:
            story.ask("sale", who, **names)
        else:
            spend_some(story, who, money)
    elif end == "groups":
        k = story.between(3, 12)
        require(n % k > 0 and n > k)
        story.say("groups", who, k=k, **names)
        story.note(f"{n} divided by {k} is {n // k} with a remainder")
        full = story.work("in full", f"{n // k}*{k}", who, **names)
        story.work("{c} {things} are left over | the rest is {c} {things}", f"{n}-{full}", who, **names)
        story.ask("over", who, **names)
    else:
        k = divisor(story, n, 2, 12)
        story.say("shares" if end == "shares" else "per day use", who, k=k, **names)
        end = "each" if end == "shares" else "days"
        story.work(end, f"{n}/{k}", who, **names)
        story.ask(end, who, **names)


def backwards(story: Story) -> None:
    who, names = story.person(), things_of(story)
    left, m, k = story.between(3, 40), story.between(2, 30), story.pick((2, 3, 4))
    require((left + m) % (k - 1) == 0)
    story.say(
        "{s} <have> some {things} | {s} <bring> a number of {things} to {place} | nobody knows how many {things} {s} <have> at first",
        who,
        **names,
    )
    story.say("fraction", who, part={2: "half", 3: "a third", 4: "a quarter"}[k], **names)
    story.say(
        "after that {s} <lose> {m} more | then {m} more <get:p> lost | later {s} <sell> another {m}", who, m=m, **names
    )
    story.say("now there <be:p> {n} left | in the end {s} <have> {n} {things}", who, n=left, **names)
    rest = story.work(
        "before that, {s} had {c} {things} | going back one step, there were {c} {things}", f"{left}+{m}", who, **names
    )
    if k == 2:
        story.work("half were gone, so at first there were {c} {things} | twice that is {c}", f"{rest}*2", who, **names)
    else:
        share = story.work(
            "this was {l} of {k} equal parts, so one part is {c} | one part is {c} {things}",
            f"{rest}/{k - 1}",
            who,
            l=k - 1,
            k=k,
            **names,
        )
        story.work(
            "all {k} parts are {c} {things} | at first there were {c} {things}", f"{share}*{k}", who, k=k, **names
        )
    story.ask(
        "how many {things} did {s} have at first | how many {things} were there in the beginning | with how many {things} did {s} start",
        who,
        **names,
    )


def relation(story: Story, who: Person, other: Person, n: int, names: dict) -> int:
    """`who` by comparison with `other`, who has `n`."""
    kind = story.pick("times | times | part | part | more | fewer | percent more | more times")
    m, k = story.between(2, max(3, n // 2)), story.between(2, 5)
    why = story.pick(f"the number of {other.name} is {n} | {other.name}'s number is {n} | we know {n} for {other.name}")
    slots = {"other": other.name, "why": why, **names}
    if kind == "times":
        story.say(kind, who, times=TIMES[k], **slots)
        return story.work("amount", f"{n}*{k}", who, **slots)
    if kind == "part":
        part, expression = part_of(story, n)
        story.say(kind, who, part=part, **slots)
        return story.work("amount", expression, who, **slots)
    if kind == "percent more":
        q, expression = percent_of(story, n)
        story.say(kind, who, q=q, **slots)
        m = story.work("{q} of {n} is {c} | {c} is {q} of {n}", expression, n=n, q=q)
    elif kind == "more times":
        k = story.between(2, 3)
        story.say(kind, who, m=m, times=TIMES[k], **slots)
        n = story.work(
            "{times} that number is {c} | {times} {n} is {c} | first, {c}", f"{n}*{k}", times=TIMES[k], n=str(n)
        )
        slots["why"] = f"{m} must be added"
    else:
        require(kind == "more" or m < n)
        story.say(kind, who, m=m, **slots)
    return story.work("amount", f"{n}{'-' if kind == 'fewer' else '+'}{m}", who, **slots)


def comparison(story: Story) -> None:
    things, verb = story.pick(phrases.MEASURES)
    names = {"things": things, "verb": verb}
    crew = story.people(story.pick((2, 3, 3, 3, 4)))
    n = story.between(4, 60, story.pick((1, 2, 2, 4, 10)))
    when = story.pick("on Monday | this week | in June | during the holidays | on Saturday | at camp | in one day")
    story.say("first", crew[0], n=n, when=when, **names)
    values = [n]
    for at, who in enumerate(crew[1:], 1):
        if at == 2 and story.rng.random() < 0.25:
            m = story.between(2, 20)
            story.say("combined", who, m=m, other=crew[0].name, third=crew[1].name, **names)
            both = story.work("sum", f"{values[0]}+{values[1]}", **names)
            values.append(story.work("amount", f"{both}-{m}", who, why=f"the two have {both}", **names))
        else:
            to = story.pick((at - 1, at - 1, 0))
            values.append(relation(story, who, crew[to], values[to], names))
    require(max(values) < 1500)
    a, b = values.index(max(values)), values.index(min(values))
    end = story.pick("sum | sum | sum | gap | mean | amount")
    if end == "gap":
        require(values[a] != values[b])
        story.work("gap", f"{values[a]}-{values[b]}", crew[a], **names)
        story.ask("gap", a=crew[a].name, b=crew[b].name, did=story.fill("<do:o>", None, {}), **names)
    elif end == "amount":
        require(len(crew) > 2)
        story.ask("amount", crew[-1], **names)
    else:
        total = story.work("sum", "+".join(map(str, values)), **names)
        if end == "mean":
            story.work("mean", f"{total}/{len(crew)}", **names)
        story.ask(end, count=len(crew), **names)


def ages(story: Story) -> None:
    a, b, c = story.people(3)
    n, y = story.between(5, 40), story.between(2, 12)
    story.in_past = False
    story.say("{s} <be> {n} years old | {s} <be> now {n} | today {s} <turn> {n} | the age of {name} is {n}", a, n=n)
    k, m, times = story.between(2, 4), story.between(2, 15), story.rng.random() < 0.5
    if times:
        story.say(
            "{s} <be> {times} as old as {other} | {s} <have> lived {times} as long as {other}",
            b,
            times=TIMES[k],
            other=a.name,
        )
        expression = f"{n}*{k}"
    else:
        sign = story.pick("+ | -")
        require(sign == "+" or m < n - 2)
        story.say(
            "{s} <be> {m} years {how} than {other} | {s} <be> {how} than {other} by {m} years",
            b,
            m=m,
            other=a.name,
            how="older" if sign == "+" else "younger",
        )
        expression = f"{n}{sign}{m}"
    older = story.work("{s} <be> {c} years old | {name}'s age is {c} years", expression, b)
    require(older < 95)
    end = story.pick("future | sum | half | past | gap")
    if end == "future":
        story.ask("how old will {s} be in {y} years | what will be the age of {name} {y} years from now", b, y=y)
        story.work("in {y} years {s} will be {c} years old | {y} years later {s} will be {c}", f"{older}+{y}", b, y=y)
    elif end == "past":
        require(older > y + 1)
        story.ask("how old was {s} {y} years ago | what was the age of {name} {y} years ago", b, y=y)
        story.work("{y} years ago {s} was {c} years old | before that, {s} was {c}", f"{older}-{y}", b, y=y)
    elif end == "gap":
        require(times)
        story.ask(
            "how many years older than {other} is {s} | by how many years is {s} older than {other}", b, other=a.name
        )
        story.work("{s} is {c} years older | the difference is {c} years", f"{older}-{n}", b)
    else:
        total = story.work("together they are {c} years old | the sum of the two ages is {c}", f"{n}+{older}")
        if end == "sum":
            story.ask(
                "in {y} years, what will be the sum of their ages | what will their ages add up to {y} years from now",
                y=y,
            )
            both = story.work(
                "in {y} years both have grown older, by {c} years together | two people gain {c} years", f"2*{y}", y=y
            )
            story.work("the sum will be {c} | together they will be {c} years old", f"{total}+{both}")
        else:
            story.say(
                "{s} <be> half as old as the two of them together | {name}'s age is half of the sum of their ages", c
            )
            story.ask("how old is {s} | what is the age of {name}", c)
            story.work("{s} <be> {c} years old | half of that is {c}", f"{total}/2", c)
