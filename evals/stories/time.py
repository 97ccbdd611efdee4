"""Scenes of roads, weekly schedules and books."""

# ruff: noqa: E501 - a wording is not broken
# fmt: off - a phrase a line would make the scene three times as long
from __future__ import annotations

from evals.stories import phrases
from evals.stories.shared import TIMES, cents, divisor, require
from evals.stories.story import Story, dollars


def travel(story: Story) -> None:
    who = story.person()
    end = story.pick("distance | speed | round | fuel | time | commute")
    n, v = story.between(2, 6), story.between(20, 70, 5)
    if end in ("distance", "speed"):
        m, w = story.between(2, 6), story.between(10, 65, 5)
        story.say("leg", who, n=n, v=v)
        story.say(
            "after that, {s} <go> on for {n} hours at {v} miles per hour | for the next {n} hours {his} speed <be:o> {v} miles per hour | the second part of the way <take:o> {n} hours at {v} miles per hour",
            who,
            n=m,
            v=w,
        )
        one, two = story.work("distance", f"{n}*{v}", who), story.work("distance", f"{m}*{w}", who)
        total = story.work("in total {s} <travel> {c} miles | the whole way is {c} miles", f"{one}+{two}", who)
        if end == "speed":
            hours = story.work("hours taken", f"{n}+{m}", who)
            story.work("speed", f"{total}/{hours}", who)
        story.ask(end, who)
    elif end == "round":
        back = [w for w in range(10, 80, 5) if n * v % w == 0 and w not in (v, n * v)]
        require(bool(back))
        w = story.pick(back)
        story.say("leg", who, n=n, v=v)
        story.say(
            "{s} <come> back on the same road at {v} miles per hour | on the way back {s} <drive> at {v} miles per hour",
            who,
            v=w,
        )
        way = story.work("distance", f"{n}*{v}", who)
        hours = story.work("the way back takes {c} hours | {s} <need> {c} hours to return", f"{way}/{w}", who)
        story.work("the whole trip takes {c} hours | in total {s} <be> on the road for {c} hours", f"{n}+{hours}", who)
        story.ask("time", who)
    elif end == "fuel":
        per, gallons, p = story.pick((15, 20, 25, 30, 32, 40)), story.between(2, 14), cents(story, 2, 5)
        car, both, miles = story.pick(phrases.VEHICLES), story.rng.random() < 0.6, per * gallons
        story.say("trip", who, n=miles, town=story.pick(phrases.TOWNS))
        story.say(
            "{his} {car} <go:o> {per} miles on a gallon of fuel, and a gallon <cost:o> {p} | the {car} <need:o> a gallon for every {per} miles; fuel <cost:o> {p} a gallon",
            who,
            car=car,
            per=per,
            p=dollars(p),
        )
        if both:
            miles = story.work("there and back is {c} miles | the round trip is {c} miles", f"{miles}*2", who)
        need = story.work(
            "the {car} <use:o> {c} gallons | the fuel needed is {c} gallons", f"{miles}/{per}", who, car=car
        )
        story.work("the fuel costs {c} | {s} <spend> {c} on fuel", f"{need}*{dollars(p)}", who)
        story.ask(
            "how much {does} {s} pay for fuel {way} | what does the fuel cost {way}",
            who,
            way="for the trip there and back" if both else "to get there",
        )
    elif end == "time":
        rest = story.between(10, 50, 5)
        story.say("trip", who, n=v * n, town=story.pick(phrases.TOWNS))
        story.say("{his} speed <be:o> {v} miles per hour | {s} <travel> at {v} miles an hour", who, v=v)
        story.say(
            "{s} <take> a rest of {r} minutes on the way | traffic <cost:o> {him} another {r} minutes", who, r=rest
        )
        hours = story.work("hours taken", f"{v * n}/{v}", who)
        minutes = story.work("that is {c} minutes | in minutes this is {c}", f"{hours}*60", who)
        story.work("with the delay, {s} <need> {c} minutes | in total that makes {c} minutes", f"{minutes}+{rest}", who)
        story.ask("how many minutes {does} {s} need | how long is {s} on the way, in minutes", who)
    else:
        miles, days, weeks = story.between(2, 25), story.between(3, 6), story.between(2, 10)
        story.say(
            "{s} <live> {n} miles from {his} {work} | the way from {name}'s home to {his} {work} <be:o> {n} miles",
            who,
            n=miles,
            work=story.pick("office | school | shop | club"),
        )
        story.say(
            "{s} <go> there and back {k} days a week | {s} <ride> both ways by bicycle on {k} days every week",
            who,
            k=days,
        )
        day = story.work("{s} <travel> {c} miles a day | both ways are {c} miles", f"{miles}*2", who)
        week = story.work("{s} <travel> {c} miles a week | a week has {c} miles", f"{day}*{days}", who)
        story.work(
            "in {k} weeks, {s} <travel> {c} miles | after {k} weeks it is {c} miles", f"{week}*{weeks}", who, k=weeks
        )
        story.ask(
            "how many miles {does} {s} travel in {k} weeks | how far {does} {s} go in {k} weeks, in miles", who, k=weeks
        )


def schedule(story: Story) -> None:
    who, hobby = story.person(), story.pick(phrases.HOBBIES)
    story.in_past = False
    a, b, k = story.between(10, 90, 5), story.between(15, 150, 5), story.between(2, 4)
    story.say(
        "{s} {hobby} for {a} minutes on weekdays | from Monday to Friday {s} {hobby} for {a} minutes a day | {s} {hobby} {a} minutes every weekday",
        who,
        hobby=hobby,
        a=a,
    )
    first = story.work(
        "the weekdays give {c} minutes | on weekdays that is {c} minutes | from Monday to Friday it is {c} minutes",
        f"{a}*5",
        who,
    )
    if story.rng.random() < 0.5:
        story.say(
            "on Saturday and on Sunday it <be:o> {b} minutes each | on both days of the weekend {s} {hobby} for {b} minutes",
            who,
            hobby=hobby,
            b=b,
        )
        second = story.work("the weekend adds {c} minutes | on the weekend it is {c} minutes", f"{b}*2", who)
    else:
        story.say(
            "on Saturday it <be:o> {times} as long, and on Sunday there <be:o> a rest | on Saturdays {s} {hobby} {times} as long, never on Sundays",
            who,
            hobby=hobby,
            times=TIMES[k],
        )
        second = story.work("on Saturday it is {c} minutes | Saturday gives {c} minutes", f"{a}*{k}", who)
    week, when = (
        story.work("in a week that is {c} minutes | the week has {c} minutes of it", f"{first}+{second}", who),
        "in a week",
    )
    if story.rng.random() < 0.5:
        weeks = story.between(2, 8)
        week, when = (
            story.work(
                "in {k} weeks there are {c} minutes | {k} weeks have {c} minutes", f"{week}*{weeks}", who, k=weeks
            ),
            f"in {weeks} weeks",
        )
    unit = "minutes"
    if week % 60 == 0:
        story.work("in hours, this is {c} | an hour has 60 minutes, so it is {c} hours", f"{week}/60", who)
        unit = "hours"
    story.ask("how many {unit} is that {when} | how many {unit} of it are there {when}", unit=unit, when=when)


def reading(story: Story) -> None:
    who = story.person()
    pages, days, rate = story.between(120, 700, 10), story.between(2, 6), story.between(8, 60)
    story.say(
        "{s} <read> a book of {n} pages | the book that {s} <read> <have:o> {n} pages | {s} <get> a book with {n} pages from the library",
        who,
        n=pages,
    )
    story.say(
        "in the first {k} days {s} <read> {m} pages a day | {s} <read> {m} pages on each of the first {k} days",
        who,
        k=days,
        m=rate,
    )
    done = story.work(
        "{s} <read> {c} pages in the first days | the first {k} days make {c} pages", f"{days}*{rate}", who, k=days
    )
    left = story.work("{c} pages are left | {s} still <have> {c} pages to read", f"{pages}-{done}", who)
    end = story.pick("left | rest | deadline | minutes")
    if end == "rest":
        new = divisor(story, left, 5, 70)
        story.say("from then on, {s} <read> {m} pages a day | after that, it <be:o> {m} pages every day", who, m=new)
        rest = story.work("this takes {c} more days | {s} <need> {c} more days", f"{left}/{new}", who)
        story.work("in total, it takes {c} days | altogether that makes {c} days", f"{days}+{rest}", who)
        story.ask("how many days {does} {s} need for the whole book | how many days does the book take in all", who)
    elif end == "deadline":
        k = divisor(story, left, 2, 15)
        story.say("the book must be returned in {k} days | {s} <want> to finish in {k} more days", who, k=k)
        story.work("{s} <have> to read {c} pages a day | each day there are {c} pages to read", f"{left}/{k}", who)
        story.ask(
            "how many pages a day must {s} read to finish in time | how many pages are left for each of these days", who
        )
    elif end == "minutes":
        k = story.between(2, 4)
        story.say("a page <take:o> {him} {k} minutes | {s} <need> {k} minutes for a page", who, k=k)
        story.work("the rest takes {c} minutes | {s} <need> {c} minutes for the rest", f"{left}*{k}", who)
        story.ask("how many minutes will the rest of the book take | how many minutes of reading are left")
    else:
        story.ask("how many pages are left | how many pages {does} {s} still have to read", who)
