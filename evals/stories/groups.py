"""Scenes of groups: classes, passengers, farms, factories, guests, marks, colours."""

# ruff: noqa: E501 - a wording is not broken
# fmt: off - a phrase a line would make the scene three times as long
from __future__ import annotations

from evals.stories.shared import TIMES, cents, divisor, listing, part_of, percent_of, require
from evals.stories.story import Story, dollars


def classes(story: Story) -> None:
    n, k, m = story.between(2, 12), story.between(14, 32), story.between(3, 20)
    names = {
        "where": story.pick("a school | a summer camp | a sports club | a music school | a dance school"),
        "group": story.pick("classes | groups | teams"),
    }
    story.say(
        "{where} <have:o> {n} {group} with {k} children in each | there <be:p> {n} {group} of {k} children in {where}",
        n=n,
        k=k,
        **names,
    )
    total = story.work("are", f"{n}*{k}", what="children")
    kind = story.pick("part | percent | ill | new")
    what = story.pick(
        "girls | in the choir | on a trip | good swimmers | left-handed | in the chess club | from another town"
    )
    if kind in ("part", "percent"):
        share, expression = (part_of if kind == "part" else percent_of)(story, total)
        story.say(
            "{share} of the children <be:p> {what} | of all children, {share} <be:p> {what}", share=share, what=what
        )
        some = story.work("{c} children are {what} | the number who are {what} is {c}", expression, what=what)
        total = story.work("{c} are not | the others are {c} children", f"{total}-{some}")
        state = f"not {what}"
    elif kind == "ill":
        story.say("one day {m} children <be:p> ill | {m} children <stay:p> at home", m=m)
        total = story.work("are", f"{total}-{m}", what="children there")
        state = "there"
    else:
        story.say("then {m} new children <join:p> | in spring {m} more children <come:p>", m=m)
        total = story.work("are", f"{total}+{m}", what="children now")
        state = "there now"
    end = story.pick("count | rooms | money | snack")
    if end == "rooms":
        seats = divisor(story, total, 7, 60)
        story.say(
            "the children who are {state} <go:p> on a trip in buses of {k} seats | the children who are {state} <be:p> put into rooms for {k}",
            k=seats,
            state=state,
        )
        story.work("{c} are needed | the number needed is {c}", f"{total}/{seats}")
        story.ask("how many of these are needed | how many full ones does that make")
    elif end == "money":
        p = cents(story, 1, 12)
        story.say(
            "each of the children who are {state} <pay:o> {p} for a trip | the children who are {state} <bring:p> {p} each",
            p=dollars(p),
            state=state,
        )
        story.work("they pay {c} | the money comes to {c}", f"{total}*{dollars(p)}")
        story.ask("how much money is that | how many dollars do they pay in total")
    elif end == "snack":
        j, food = (
            story.between(2, 5),
            story.pick("apples | sandwiches | cookies | pencils | sheets of paper | balloons"),
        )
        story.say("each of the children who are {state} <get:o> {j} {food}", j=j, food=food, state=state)
        story.work("are", f"{total}*{j}", what=food)
        story.ask("how many {food} are needed | how many {food} do they get in all", food=food)
    else:
        story.ask("how many children are {state}", state=state)


def stops(story: Story) -> None:
    vehicle, n = story.pick("bus | train | tram | ferry"), story.between(8, 70)
    story.say(
        "a {v} <leave:o> with {n} people on board | there <be:p> {n} people on a {v} | {n} passengers <be:p> on a {v}",
        v=vehicle,
        n=n,
    )
    for at in range(story.between(2, 3)):
        off, on = story.between(2, max(3, n // 2)), story.between(2, 25)
        first = (
            "at the first stop, {x} people <get:p> off and {y} <get:p> on | soon {x} people <leave:p> and {y} <enter:p>"
        )
        later = "at the next stop {x} <leave:p> and {y} <come:p> in | then {y} people <get:p> on while {x} <get:p> off | after that, {x} people <go:p> and {y} <enter:p>"
        story.say(later if at else first, x=off, y=on)
        n = story.work("after those who left there are {c} people | without them there are {c}", f"{n}-{off}")
        n = story.work("with the new ones, there are {c} | now there are {c} people on the {v}", f"{n}+{on}", v=vehicle)
    if story.rng.random() < 0.3:
        p = story.between(2, 8)
        story.say(
            "each of those still on the {v} <pay:o> {p} | a ticket for those who stay <cost:o> {p}",
            v=vehicle,
            p=dollars(p),
        )
        story.work("they pay {c} | the tickets bring {c}", f"{n}*{dollars(p)}")
        story.ask("how much do they pay together | how much money is that")
    else:
        story.ask("how many people are on the {v} now | how many passengers are left on the {v}", v=vehicle)


def farm(story: Story) -> None:
    who = story.person()
    animal, gives = story.pick(
        (
            ("hens", "eggs"),
            ("cows", "litres of milk"),
            ("goats", "cups of milk"),
            ("ducks", "eggs"),
            ("sheep", "balls of wool"),
        )
    )
    n, each, days = (
        story.between(3, 40),
        story.between(8, 30) if animal == "cows" else story.between(2, 7),
        story.between(2, 14),
    )
    names = {"animal": animal, "things": gives, "per": story.pick("day | week")}
    story.say(
        "{s} <have> {n} {animal} on a farm | {s} <keep> {n} {animal} | on {name}'s farm there <be:p> {n} {animal}",
        who,
        n=n,
        **names,
    )
    story.say(
        "each of the {animal} <give:o> {m} {things} a {per} | every {per}, {s} <get> {m} {things} from each of them",
        who,
        m=each,
        **names,
    )
    day = story.work(
        "the {animal} give {c} {things} a {per} | {s} <get> {c} {things} every {per}", f"{n}*{each}", who, **names
    )
    if story.rng.random() < 0.6:
        own = story.between(2, 12)
        story.say(
            "{his} family <use:o> {m} of these each {per} | {s} <keep> {m} of them for {his} own use each {per}",
            who,
            m=own,
            **names,
        )
        day = story.work("left", f"{day}-{own}", who, **names)
    total = story.work(
        "in {k} {per}s that is {c} {things} | {k} {per}s give {c} {things}", f"{day}*{days}", who, k=days, **names
    )
    end = story.pick("count | sell | dozen")
    if end == "dozen" and gives == "eggs":
        total = story.work("there are {c} dozen | in dozens, that is {c}", f"{total}/12", who)
    if end == "count":
        story.ask(
            "how many {things} {does} {s} have after {k} {per}s | how many {things} are there after {k} {per}s",
            who,
            k=days,
            **names,
        )
        return
    p = cents(story, 1, 6)
    one = "a dozen" if end == "dozen" and gives == "eggs" else "each"
    story.say(
        "{s} <sell> the {things} for {p} {one} | at {place} {s} <get> {p} {one} for the {things}",
        who,
        p=dollars(p),
        one=one,
        **names,
    )
    story.work("sale", f"{total}*{dollars(p)}", who, **names)
    story.ask(
        "how much {does} {s} get in {k} {per}s | how many dollars {does} {s} make in {k} {per}s", who, k=days, **names
    )


def factory(story: Story) -> None:
    names = {
        "g": story.pick(
            "bottles | chairs | toys | shoes | cups | bricks | lamps | tyres | shirts | clocks | boxes of tea | bicycles"
        ),
        "place": story.pick("a factory | a workshop | a plant | a small company"),
    }
    n, rate, hours, k = story.between(2, 15), story.between(4, 60), story.between(3, 12), story.between(2, 20)
    story.say(
        "{place} <have:o> {n} machines that make {r} {g} an hour each | in {place}, each of {n} machines <make:o> {r} {g} an hour | {n} workers in {place} <make:p> {r} {g} an hour each",
        n=n,
        r=rate,
        **names,
    )
    story.say("they <work:p> {h} hours a day | a working day <have:o> {h} hours", h=hours)
    hour = story.work("in one hour they make {c} {g} | the {g} made in an hour are {c}", f"{n}*{rate}", **names)
    day = story.work("in a day they make {c} {g} | a day gives {c} {g}", f"{hour}*{hours}", **names)
    end = story.pick("bad | days | second | order")
    if end == "bad":
        q, expression = percent_of(story, day, (2, 5, 10, 20, 25))
        story.say("{q} of the {g} <be:p> faulty | a check <find:o> that {q} of the {g} <be:p> broken", q=q, **names)
        bad = story.work("{c} of them are faulty | the faulty ones are {c}", expression)
        story.work("{c} {g} are good | the good ones are {c}", f"{day}-{bad}", **names)
        story.ask("how many good {g} are made in a day | how many {g} a day are in order", **names)
    elif end == "days":
        story.work("in {k} days it is {c} {g} | {k} days give {c} {g}", f"{day}*{k}", k=k, **names)
        story.ask("how many {g} are made in {k} days | how many {g} {do} they make in {k} days", k=k, **names)
    elif end == "second":
        x, y = story.between(2, 10), story.between(2, 40)
        story.say(
            "there <be:p> also {x} old ones that make {y} {g} an hour each | another {x} only <make:p> {y} {g} an hour each",
            x=x,
            y=y,
            **names,
        )
        old = story.work("the others make {c} {g} an hour | in an hour the others make {c}", f"{x}*{y}", **names)
        old = story.work("in a day the others make {c} {g} | over the day this is {c}", f"{old}*{hours}", **names)
        story.work("in total there are {c} {g} | all together make {c} {g}", f"{day}+{old}", **names)
        story.ask("how many {g} are made in a day | how many {g} {do} all of them make in a day", **names)
    else:
        story.say("a customer <order:o> {m} {g} | {m} {g} <be:p> ordered", m=day * k, **names)
        story.work("the order takes {c} days | {c} days are needed", f"{day * k}/{day}")
        story.ask("how many days does the order take | after how many days is the order done")


def together(story: Story) -> None:
    a, b = story.people(2)
    story.in_past = False
    names = {
        "job": story.pick("folds | packs | paints | washes | sorts | signs | checks | wraps"),
        "g": story.pick("boxes | plates | letters | apples | posters | cards | parcels | bottles | chairs"),
    }
    x, y, t, k = story.between(3, 25), story.between(3, 25), story.between(3, 20), story.between(2, 3)
    story.say("{s} {job} {x} {g} in an hour | in one hour {s} {job} {x} {g}", a, x=x, **names)
    if story.rng.random() < 0.5:
        story.say("{s} <be> {times} as fast | {s} {job} {times} as many in an hour", b, times=TIMES[k], **names)
        y = story.work("{s} {job} {c} {g} an hour | in an hour {s} {job} {c} {g}", f"{x}*{k}", b, **names)
    else:
        story.say("{s} {job} {x} {g} in an hour | {s} {job} {x} in the same time", b, x=y, **names)
    both = story.work("together they do {c} {g} an hour | both of them finish {c} {g} in an hour", f"{x}+{y}", **names)
    if story.rng.random() < 0.5:
        story.say("there <be:p> {n} {g} to do | they have {n} {g} in front of them", n=both * t, **names)
        story.work("they need {c} hours | it takes {c} hours", f"{both * t}/{both}")
        story.ask("how many hours {do} they need together | how long does it take if both work, in hours")
    else:
        done = story.work("in {t} hours, they do {c} {g} | {t} hours give {c} {g}", f"{both}*{t}", t=t, **names)
        n = done + story.between(5, 90)
        story.say(
            "they start with {n} {g} and work for {t} hours | of {n} {g}, they do as many as they can in {t} hours",
            n=n,
            t=t,
            **names,
        )
        story.work("{c} {g} are left | the rest is {c} {g}", f"{n}-{done}", **names)
        story.ask("how many {g} are still to be done | how many {g} are left", **names)


def grades(story: Story) -> None:
    who, count = story.person(), story.between(3, 5)
    marks = [story.between(60, 99) for _ in range(count)]
    what = story.pick("tests | quizzes | rounds of a game | exams | competitions")
    story.say(
        "{s} <get> {l} points in {k} {what} | in {k} {what}, {name}'s points <be:p> {l}",
        who,
        l=listing(list(map(str, marks))),
        k=count,
        what=what,
    )
    total = story.work("together these are {c} points | the sum is {c}", "+".join(map(str, marks)))
    if story.rng.random() < 0.5:
        story.work("the average is {c} | divided by {k}, that is {c} points on average", f"{total}/{count}", k=count)
        story.ask("what is {his} average | how many points {does} {s} have on average", who)
    else:
        aim = story.between(70, 95)
        story.say("{s} <want> an average of {m} after one more | after one more, the average should be {m}", who, m=aim)
        need = story.work(
            "for that, {s} <need> {c} points in all | the points needed are {c}", f"{aim}*{count + 1}", who
        )
        last = story.work("the last one must bring {c} points | {s} <have> to get {c} points", f"{need}-{total}", who)
        require(last <= 100)
        story.ask("how many points {does} {s} need in the last one | what {does} {s} have to get in the next one", who)


def ratio(story: Story) -> None:
    a, b = story.rng.sample(("red", "blue", "green", "white", "black", "yellow"), 2)
    names = {
        "a": a,
        "b": b,
        "t": story.pick("marbles | balloons | beads | cars | hats | flowers | shirts | cards | chairs | fish"),
        "where": story.pick("in a box | in a shop | at a party | in a bag | in a garden | on a shelf"),
    }
    x, y, k, n, d = (
        story.between(2, 9),
        story.between(2, 9),
        story.between(2, 20),
        story.between(4, 60),
        story.between(2, 30),
    )
    require(x != y)
    form = story.pick("given | times | more")
    if form == "given":
        story.say(
            "for every {x} {a} {t} there <be:p> {y} {b} ones {where} | the ratio of {a} to {b} {t} {where} <be:o> {x} to {y}",
            x=x,
            y=y,
            **names,
        )
        story.say("there <be:p> {n} {t} of these two colours | together they number {n}", n=(x + y) * k, **names)
        parts = story.work("the parts are {c} | there are {c} parts", f"{x}+{y}")
        one = story.work("each part has {c} {t} | a part is {c} {t}", f"{(x + y) * k}/{parts}", **names)
        first = story.work("the {a} ones are {c} | there are {c} {a} {t}", f"{one}*{x}", **names)
        if story.rng.random() < 0.5:
            story.ask("how many {a} {t} are there | how many of the {t} are {a}", **names)
        else:
            second = story.work("the {b} ones are {c} | there are {c} {b} {t}", f"{one}*{y}", **names)
            story.work(
                "the difference is {c} | that is a difference of {c} {t}",
                f"{max(first, second)}-{min(first, second)}",
                **names,
            )
            story.ask(
                "what is the difference between the numbers of {a} and {b} {t} | how far apart are the numbers of {a} and {b} {t}",
                **names,
            )
        return
    story.say("there <be:p> {n} {a} {t} {where} | {where} there <be:p> {n} {a} {t}", n=n, **names)
    if form == "times":
        k = story.between(2, 5)
        story.say(
            "there <be:p> {times} as many {b} ones | the {b} ones <be:p> {times} as many", times=TIMES[k], **names
        )
    else:
        story.say("there <be:p> {d} more {b} ones than {a} ones | the {b} ones <be:p> {d} more", d=d, **names)
    m = story.work(
        "there are {c} {b} {t} | the {b} ones are {c}", f"{n}*{k}" if form == "times" else f"{n}+{d}", **names
    )
    total = story.work(
        "altogether there are {c} {t} | the total is {c} {t} | both colours make {c} {t}", f"{n}+{m}", **names
    )
    part, expression = part_of(story, total)
    story.say(
        "{part} of all the {t} <be:p> taken away | {part} of them <be:p> sold | somebody <take:o> {part} of the {t}",
        part=part,
        **names,
    )
    gone = story.work("{c} {t} are taken | the part that goes is {c}", expression, **names)
    story.work("{c} {t} are left | the rest is {c} {t}", f"{total}-{gone}", **names)
    story.ask("how many {t} are left | how many of the {t} remain", **names)


def party(story: Story) -> None:
    who = story.person()
    n, k, size, p = story.between(4, 40), story.between(2, 6), story.pick((4, 6, 8, 10, 12)), cents(story, 2, 15)
    food, pack = story.pick(
        (
            ("juice boxes", "pack"),
            ("hot dogs", "pack"),
            ("slices of pizza", "pizza"),
            ("balloons", "bag"),
            ("cupcakes", "box"),
            ("paper plates", "stack"),
            ("party hats", "set"),
            ("pieces of cake", "cake"),
        )
    )
    names = {"f": food, "pack": pack}
    story.say(
        "{s} <plan> a party for {n} guests | {n} friends <come:p> to {name}'s party | {s} <invite> {n} people to a picnic",
        who,
        n=n,
    )
    story.say(
        "each of them <get:o> {k} {f} | everyone <be:o> to have {k} {f} | {s} <want> {k} {f} for each guest",
        who,
        k=k,
        **names,
    )
    need = story.work("{s} <need> {c} {f} | the guests need {c} {f}", f"{n}*{k}", who, **names)
    if story.rng.random() < 0.5:
        have = story.between(2, max(3, need // 2))
        story.say("{s} <have> {h} at home already | {his} {kin} <bring:o> {h} of them", who, h=have)
        need = story.work("{s} still <need> {c} | {c} {f} are missing", f"{need}-{have}", who, **names)
    story.say(
        "one {pack} <have:o> {z} {f} and <cost:o> {p} | {f} <come:p> {z} to a {pack}, and a {pack} <cost:o> {p}",
        z=size,
        p=dollars(p),
        **names,
    )
    packs = -(-need // size)
    require(packs > 1)
    if need % size:
        story.note(f"{need} divided by {size} is more than {packs - 1}, so {packs} are needed")
    else:
        story.work("{s} <need> to buy {c} of them | the number to buy is {c}", f"{need}/{size}", who)
    story.work("they cost {c} | {s} <pay> {c} | that costs {c}", f"{packs}*{dollars(p)}", who)
    story.ask("cost", who)
