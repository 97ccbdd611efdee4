"""Scenes of money: buying, earning, saving, selling."""

# ruff: noqa: E501 - a wording is not broken
# fmt: off - a phrase a line would make the scene three times as long
from __future__ import annotations

from evals.stories import phrases
from evals.stories.shared import cents, listing, plural, require
from evals.stories.story import Person, Story, dollars

CHANGES = ("refund", "discount", "coupon", "tax", "tip", "fee")  # of a bill, in the order in which they count


def shopping(story: Story) -> None:
    who = story.person(plural=True)
    items = story.rng.sample(list(phrases.GOODS), story.pick((1, 2, 2, 3)))
    lots = [(item, story.between(2, 9), cents(story, *phrases.GOODS[item])) for item in items]
    have = story.between(60, 900, 10) if story.rng.random() < 0.25 else 0
    if have:
        story.say("purse", who, p=dollars(have))
    form = story.pick(
        "{k} {item} at {p} each | {k} {item} for {p} each | {k} {item} that cost {p} each | {k} {item} priced at {p} apiece"
    )
    story.say(
        "shop",
        who,
        list=listing([form.format(k=story.spell(k), item=plural(item), p=dollars(p)) for item, k, p in lots]),
    )
    costs = [story.work("cost", f"{k}*{dollars(p)}", who, item=plural(item)) for item, k, p in lots]
    total = story.work("bill", "+".join(map(dollars, costs)), who) if len(lots) > 1 else costs[0]
    changes = sorted(story.rng.sample(CHANGES, story.pick((0, 1, 1, 2))), key=CHANGES.index)
    for kind in changes:
        total = adjust(story, who, kind, total, lots)
    end = "left" if have else story.pick("cost | cost | note | split")
    if end == "left":
        require(have > total)
        story.work("money left", f"{dollars(have)}-{dollars(total)}", who)
        story.ask("money left", who)
    elif end == "note":
        note = next((note for note in (20, 50, 100, 200, 300, 500, 1000) if note > total), 2000)
        story.say("note", who, p=f"a {dollars(note)} bill" if note <= 100 else dollars(note))
        story.work("change", f"{dollars(note)}-{dollars(total)}", who)
        story.ask("change", who)
    elif end == "split":
        k = story.between(2, 6)
        story.say("split", who, k=k)
        story.work("pays each", f"{dollars(total)}/{k}", who)
        story.ask("pays each", who)
    else:
        require(len(lots) + len(changes) > 1)
        story.ask("cost", who)


def adjust(story: Story, who: Person, kind: str, total: float, lots: list) -> float:
    """A change of the bill; returns the new bill."""
    if kind == "discount":
        q = story.pick((5, 10, 15, 20, 25, 30, 40, 50))
        story.say(kind, who, q=f"{q}%")
        off = story.work("off", f"{dollars(total)}*{q}/100", who, q=f"{q}%")
        return story.work("new price", f"{dollars(total)}-{dollars(off)}", who)
    if kind == "coupon":
        p = story.between(2, 15)
        require(p < total / 2)
        story.say(kind, who, p=dollars(p))
        return story.work("new price", f"{dollars(total)}-{dollars(p)}", who)
    if kind == "refund":
        item, _, p = story.pick(lots)
        story.say(kind, who, thing=item)
        return story.work(
            "without the {thing} the cost is {c} | after the refund {s} <have> paid {c}",
            f"{dollars(total)}-{dollars(p)}",
            who,
            thing=item,
        )
    if kind == "fee":
        extra = story.between(2, 20)
        story.say(kind, who, p=dollars(extra))
    else:
        q = story.pick((5, 10, 15, 20))
        story.say(kind, who, q=f"{q}%")
        extra = story.work("extra", f"{dollars(total)}*{q}/100", who, kind=kind)
    return story.work("with extra", f"{dollars(total)}+{dollars(extra)}", who, kind=kind)


def wages(story: Story) -> None:
    who = story.person()
    p, n, k = cents(story, 8, 35), story.between(2, 9), story.between(2, 6)
    story.say("wage", who, job=story.pick(phrases.JOBS), p=dollars(p))
    story.say("hours", who, n=n, k=k)
    hours = story.work("week hours", f"{n}*{k}", who)
    span = "one week"
    if story.rng.random() < 0.3 and hours > 8:
        usual, rate = story.between(5, hours - 2), p + story.between(2, 10)
        story.say("overtime", who, n=usual, p=dollars(rate))
        over = story.work("{s} <work> {c} hours of overtime | the overtime is {c} hours", f"{hours}-{usual}", who)
        base = story.work("for the normal hours {s} <get> {c} | the usual pay is {c}", f"{usual}*{dollars(p)}", who)
        extra = story.work("for overtime {s} <get> {c} | the overtime pay is {c}", f"{over}*{dollars(rate)}", who)
        pay = story.work("pay", f"{dollars(base)}+{dollars(extra)}", who, span=span)
    else:
        pay = story.work("pay", f"{hours}*{dollars(p)}", who, span=span)
    if story.rng.random() < 0.4:
        x = story.between(10, 90)
        story.say("second job", who, p=dollars(x), chore=story.pick(phrases.CHORES))
        pay = story.work("money now", f"{dollars(pay)}+{dollars(x)}", who)
    end = story.pick("week | weeks | saves | rent | year | goal")
    weeks = 52 if end == "year" else story.between(2, 12)
    if end in ("weeks", "year"):
        span = f"{weeks} weeks" if end == "weeks" else "a year of 52 weeks"
        story.work("pay", f"{dollars(pay)}*{weeks}", who, span=span)
        story.ask("pay", who, span=span)
    elif end == "saves":
        q = story.pick((10, 20, 25, 30, 40, 50))
        story.say("saves", who, q=f"{q}%")
        story.work("{s} <save> {c} every week | the savings are {c} a week", f"{dollars(pay)}*{q}/100", who)
        story.ask("how much {does} {s} save in a week | how many dollars go into savings each week", who)
    elif end == "rent":
        cost = story.between(20, 200, 5)
        require(cost < pay)
        story.say("rent", who, p=dollars(cost), need=story.pick(phrases.NEEDS))
        left = story.work("money left", f"{dollars(pay)}-{dollars(cost)}", who)
        story.work(
            "after {k} weeks {s} <have> {c} | in {k} weeks that adds up to {c}",
            f"{dollars(left)}*{weeks}",
            who,
            k=weeks,
        )
        story.ask("saved", who, k=weeks)
    elif end == "goal":
        thing, price = story.pick(phrases.GOALS), dollars(pay * weeks)
        story.say("goal", who, thing=thing, p=price)
        story.work("weeks", f"{price}/{dollars(pay)}", who, money=False)
        story.ask("weeks", who, thing=thing)
    else:
        story.ask("pay", who, span=span)


def saving(story: Story) -> None:
    who, thing = story.person(), story.pick(phrases.GOALS)
    rate, weeks, have = story.between(3, 40), story.between(3, 20), story.between(10, 150, 5)
    extra = story.between(5, 60) if story.rng.random() < 0.5 else 0
    price = rate * weeks + have + extra
    story.say("goal", who, thing=thing, p=dollars(price))
    story.say("purse", who, p=dollars(have))
    if extra:
        story.say(
            "{his} {kin} <add:o> {p} | {s} <get> another {p} for {chore}",
            who,
            p=dollars(extra),
            chore=story.pick(phrases.CHORES),
        )
        have = story.work("money now", f"{dollars(have)}+{dollars(extra)}", who)
    story.say("weekly", who, p=dollars(rate))
    missing = story.work("missing", f"{dollars(price)}-{dollars(have)}", who)
    story.work("weeks", f"{dollars(missing)}/{dollars(rate)}", who, money=False)
    story.ask("weeks", who, thing=thing)


def business(story: Story) -> None:
    who = story.person()
    good = story.pick(
        "cakes | candles | scarves | necklaces | paintings | cups of lemonade | wooden toys | bouquets | T-shirts | jars of jam | bracelets | birdhouses | pots | soaps"
    )
    n, p = story.between(5, 60), cents(story, 3, 30)
    cost = cents(story, 1, max(2, int(p) - 1))
    require(cost < p)
    story.say(
        "{s} <make> {good} to sell at {place} | {s} <run> a small shop that <sell:o> {good} | {s} <sell> home-made {good}",
        who,
        good=good,
    )
    story.say(
        "the material for each <cost:o> {cost} and {s} <sell> them for {p} each | each one <cost:o> {him} {cost} to make, and the price <be:o> {p} | {s} <pay> {cost} for the material of each and <ask> {p} for it",
        who,
        cost=dollars(cost),
        p=dollars(p),
    )
    if story.rng.random() < 0.5:
        days = story.between(2, 7)
        story.say(
            "{s} <sell> {n} a day for {k} days | on each of {k} days, {n} of the {good} <be:p> sold",
            who,
            n=n,
            k=days,
            good=good,
        )
        n = story.work("are", f"{n}*{days}", what=f"{good} sold")
    else:
        story.say("one week {s} <sell> {n} of them | {s} <sell> {n} {good} in a month", who, n=n, good=good)
    if story.rng.random() < 0.5:
        gain = story.work(
            "the profit on each is {c} | {s} <earn> {c} for each | one of them brings a profit of {c}",
            f"{dollars(p)}-{dollars(cost)}",
            who,
        )
        profit = story.work(
            "the total profit is {c} | the {good} bring a profit of {c}", f"{n}*{dollars(gain)}", who, good=good
        )
    else:
        income = story.work("{s} <take> in {c} | the sales bring {c}", f"{n}*{dollars(p)}", who)
        spent = story.work("the material costs {c} | {s} <spend> {c} on material", f"{n}*{dollars(cost)}", who)
        profit = story.work("the profit is {c} | {s} <keep> {c}", f"{dollars(income)}-{dollars(spent)}", who)
    if story.rng.random() < 0.3:
        fee = story.between(5, 50)
        story.say(
            "the stand <cost:o> {p} | {s} also <pay> {p} for the stall | {s} <rent> a table for {p}",
            who,
            p=dollars(fee),
        )
        story.work(
            "after paying for the stand, {s} <have> {c} | taking off the rent leaves {c}",
            f"{dollars(profit)}-{dollars(fee)}",
            who,
        )
    story.ask(
        "how much profit {does} {s} make | what is {his} profit, in dollars | how many dollars {does} {s} gain in total",
        who,
    )


def subscription(story: Story) -> None:
    who = story.person()
    what = story.pick(
        "a gym | a film service | a music app | a swimming club | a phone plan | a newspaper | a language course | a car park | a chess club"
    )
    p, months = story.between(5, 60), story.pick((3, 4, 6, 9, 12, 18, 24))
    story.say(
        "{s} <sign> up for {what} that <cost:o> {p} a month | {s} <pay> {p} a month for {what} | the monthly price of {what} <be:o> {p}, and {s} <join>",
        who,
        what=what,
        p=dollars(p),
    )
    total = story.work(
        "{months} months cost {c} | the monthly payments add up to {c} | over {months} months {s} <pay> {c}",
        f"{dollars(p)}*{months}",
        who,
        months=months,
    )
    kind = story.pick("join | free | off")
    if kind == "join":
        join = story.between(10, 80, 5)
        story.say("there <be:o> also a joining fee of {p} | to begin, {s} <pay> {p} once", who, p=dollars(join))
        story.work("with extra", f"{dollars(total)}+{dollars(join)}", who, kind="fee")
    elif kind == "off":
        q = story.pick((5, 10, 20, 25, 50))
        story.say(
            "people who pay everything at once <get:p> {q} off | students like {him} <get:p> a discount of {q}",
            who,
            q=f"{q}%",
        )
        off = story.work("off", f"{dollars(total)}*{q}/100", who, q=f"{q}%")
        story.work("new price", f"{dollars(total)}-{dollars(off)}", who)
    else:
        free = story.pick((2, 3))
        require(free < months)
        story.say("the first {free} months <be:p> free | for the first {free} months {s} <pay> nothing", who, free=free)
        off = story.work("the free time is worth {c} | what {s} <do> not pay is {c}", f"{free}*{dollars(p)}", who)
        story.work("{s} <pay> {c} | the real cost is {c}", f"{dollars(total)}-{dollars(off)}", who)
    story.ask(
        "how much {does} {s} pay for {months} months | what {do} {months} months cost {him} | how many dollars {does} {s} spend in {months} months",
        who,
        months=months,
    )


def coins(story: Story) -> None:
    who = story.person()
    kinds = story.rng.sample(
        (("quarters", 25), ("dimes", 10), ("nickels", 5), ("pennies", 1), ("half dollars", 50)), story.pick((2, 3))
    )
    lots = [(name, worth, story.between(2, 30)) for name, worth in kinds]
    story.say(
        "{s} <have> {l} in {his} pocket | in a jar {s} <find> {l} | {s} <count> {his} coins: {l}",
        who,
        l=listing([f"{story.spell(n)} {name}" for name, _, n in lots]),
    )
    values = [
        story.work("the {k} are worth {c} cents | {c} cents come from the {k}", f"{n}*{worth}", k=name)
        for name, worth, n in lots
    ]
    total = story.work("in total, that is {c} cents | {s} <have> {c} cents", "+".join(map(str, values)), who)
    if story.rng.random() < 0.3:
        story.ask("how many cents {does} {s} have | how many cents are the coins worth", who)
        return
    p, k = story.pick((20, 25, 30, 40, 45, 50, 60, 75)), story.between(2, 6)
    good = story.pick("sweets | stickers | stamps | pencils | rolls | apples")
    story.say(
        "{s} <buy> {k} {g} for {p} cents each | {k} {g} at {p} cents each <be:p> bought with it", who, k=k, g=good, p=p
    )
    spent = story.work("the {g} cost {c} cents | {s} <spend> {c} cents", f"{k}*{p}", who, g=good)
    story.work("{c} cents are left | {s} <have> {c} cents left", f"{total}-{spent}", who)
    story.ask("how many cents {does} {s} have left | how many cents are left", who)
