"""Scenes of measures: gardens, recipes, mixtures, lengths, tanks."""

# ruff: noqa: E501 - a wording is not broken
# fmt: off - a phrase a line would make the scene three times as long
from __future__ import annotations

from evals.stories.shared import TIMES, cents, divisor, part_of, require
from evals.stories.story import Story, dollars


def field(story: Story) -> None:
    who = story.person()
    names = {
        "what": story.pick("garden | field | yard | playground | park | pool | meadow | parking lot | orchard"),
        "u": story.pick("feet | metres | yards"),
    }
    width, k, m = story.between(4, 60), story.between(2, 4), story.between(2, 40)
    kind = story.pick("times | more | given")
    if kind == "given":
        length = width + m
        story.say(
            "{name}'s {what} <be:o> {n} {u} long and {w} {u} wide | {s} <have> a {what} of {n} by {w} {u}",
            who,
            n=length,
            w=width,
            **names,
        )
    elif kind == "times":
        story.say(
            "{name}'s {what} <be:o> {w} {u} wide and {times} as long | the width of {name}'s {what} <be:o> {w} {u}, and its length <be:o> {times} that",
            who,
            times=TIMES[k],
            w=width,
            **names,
        )
        length = story.work("the length is {c} {u} | the {what} is {c} {u} long", f"{width}*{k}", who, **names)
    else:
        story.say(
            "{name}'s {what} <be:o> {w} {u} wide, and its length <be:o> {m} {u} more | {s} <have> a {what} that <be:o> {w} {u} wide and {m} {u} longer than that",
            who,
            m=m,
            w=width,
            **names,
        )
        length = story.work("the length is {c} {u} | the {what} is {c} {u} long", f"{width}+{m}", who, **names)
    (edge if story.rng.random() < 0.5 else inside)(story, who, length, width, names)


def edge(story: Story, who, length: int, width: int, names: dict) -> None:
    """Around the field."""
    half = story.work(
        "one long and one short side make {c} {u} | length and width together are {c} {u}", f"{length}+{width}", **names
    )
    around = story.work("the perimeter is {c} {u} | all four sides are {c} {u}", f"2*{half}", **names)
    end = story.pick("fence | laps | posts | plain")
    if end == "fence":
        p = cents(story, 2, 20)
        story.say(
            "{s} <put> a fence around it that <cost:o> {p} for each of the {u} | a fence <cost:o> {p} for every one of these {u}",
            who,
            p=dollars(p),
            **names,
        )
        story.work("the fence costs {c} | {s} <pay> {c} for the fence", f"{around}*{dollars(p)}", who)
        story.ask(
            "how much does a fence around the {what} cost | what {does} {s} pay for the whole fence", who, **names
        )
    elif end == "laps":
        k = story.between(3, 12)
        story.say("{s} <run> around it {k} times | every morning {s} <walk> {k} rounds around it", who, k=k)
        story.work("{s} <cover> {c} {u} | the rounds make {c} {u}", f"{around}*{k}", who, **names)
        story.ask("how many {u} is that | how many {u} {does} {s} cover", who, **names)
    elif end == "posts":
        k = divisor(story, around, 2, 11)
        story.say(
            "{s} <put> a post every {k} {u} along the edge | along the edge, {s} <plant> a bush every {k} {u}",
            who,
            k=k,
            **names,
        )
        story.work("the number needed is {c} | {s} <need> {c} of them", f"{around}/{k}", who)
        story.ask("how many of them {does} {s} need | how many are needed to go all the way around", who)
    else:
        story.ask("how many {u} is it around the {what} | what is the perimeter of the {what}, in {u}", **names)


def inside(story: Story, who, length: int, width: int, names: dict) -> None:
    """The area of the field."""
    area = story.work("the area is {c} square {u} | the {what} covers {c} square {u}", f"{length}*{width}", **names)
    end = story.pick("seed | part | crop")
    if end == "part":
        part, expression = part_of(story, area)
        crop = story.pick("grass | flowers | potatoes | stone | corn | sand")
        story.say(
            "{part} of it <be:o> covered with {crop} | {s} <keep> {part} of it for {crop}", who, part=part, crop=crop
        )
        taken = story.work(
            "the {crop} takes {c} square {u} | {c} square {u} are {crop}", expression, crop=crop, **names
        )
        story.work("the rest is {c} square {u} | {c} square {u} remain", f"{area}-{taken}", **names)
        story.ask("how many square {u} are left | how large is the rest, in square {u}", **names)
    elif end == "seed":
        k, p = divisor(story, area, 4, 60), story.between(2, 30)
        story.say(
            "a bag of seed <be:o> enough for {k} square {u} and <cost:o> {p} | one bucket of paint, at {p}, <cover:o> {k} square {u}",
            k=k,
            p=dollars(p),
            **names,
        )
        need = story.work("{s} <need> {c} of them | the number needed is {c}", f"{area}/{k}", who)
        story.work("they cost {c} | {s} <pay> {c}", f"{need}*{dollars(p)}", who)
        story.ask(
            "how much {does} {s} pay to cover all of it | what does it cost to cover the whole {what}", who, **names
        )
    else:
        k = story.between(2, 6)
        crop = story.pick("cabbages | carrots | tulips | beans | onions")
        story.say(
            "{s} <plant> {k} {crop} on each square of one by one {u} | there <be:o> room for {k} {crop} in a square of one by one {u}",
            who,
            k=k,
            crop=crop,
            **names,
        )
        story.work("there is room for {c} {crop} | {s} <get> {c} {crop}", f"{area}*{k}", who, crop=crop)
        story.ask("how many {crop} fit into the whole {what} | how many {crop} can {s} plant", who, crop=crop, **names)


def recipe(story: Story) -> None:
    who = story.person()
    dish = story.pick(
        "soup | pancakes | bread | lemonade | stew | cookies | fruit salad | pasta | curry | pudding | pizza dough | jam"
    )
    names = {
        "food": story.pick("flour | sugar | rice | milk | water | butter | honey | oil | cheese"),
        "unit": story.pick("cups | spoons | ounces | grams"),
    }
    n, serves, k = story.between(2, 12), story.between(2, 8), story.between(2, 9)
    story.say(
        "a recipe for {dish} <need:o> {n} {unit} of {food} and <serve:o> {m} people | to make {dish} for {m} people, {s} <use> {n} {unit} of {food} | {s} <make> {dish}; {n} {unit} of {food} <be:p> enough for {m} people",
        who,
        dish=dish,
        n=n,
        m=serves,
        **names,
    )
    story.say(
        "{s} <invite> {g} people | there <be:p> {g} guests to feed | {s} <cook> for {g} people", who, g=serves * k
    )
    times = story.work(
        "the recipe has to be made {c} times | that is {c} times as many people", f"{serves * k}/{serves}", who
    )
    need = story.work(
        "{s} <need> {c} {unit} of {food} | the amount of {food} is {c} {unit}", f"{times}*{n}", who, **names
    )
    end = story.pick("need | have | bags | price")
    if end == "have":
        have = story.between(2, max(3, need - 2))
        story.say(
            "{s} already <have> {h} {unit} | there <be:p> {h} {unit} of {food} in the kitchen", who, h=have, **names
        )
        story.work("{s} <have> to buy {c} {unit} more | {c} {unit} are missing", f"{need}-{have}", who, **names)
        story.ask(
            "how many more {unit} of {food} {does} {s} need | how many {unit} of {food} are missing", who, **names
        )
    elif end == "bags":
        size, p = divisor(story, need, 2, 13), cents(story, 1, 6)
        story.say(
            "a bag <hold:o> {x} {unit} and <cost:o> {p} | {food} <be:o> sold in packs of {x} {unit} for {p}",
            x=size,
            p=dollars(p),
            **names,
        )
        bags = story.work("{s} <need> to buy {c} of these | the number to buy is {c}", f"{need}/{size}", who)
        story.work("they cost {c} | {s} <pay> {c}", f"{bags}*{dollars(p)}", who)
        story.ask("how much {does} {s} pay for the {food} | what does the {food} cost", who, **names)
    elif end == "price":
        p = cents(story, 1, 3)
        story.say(
            "each of the {unit} of {food} <cost:o> {p} | the price <be:o> {p} for one of these {unit}",
            p=dollars(p),
            **names,
        )
        story.work("the {food} costs {c} | {s} <pay> {c}", f"{need}*{dollars(p)}", who, **names)
        story.ask("how much {does} {s} pay for the {food} | what does the {food} cost in all", who, **names)
    else:
        story.ask("how many {unit} of {food} {does} {s} need | how much {food} is needed, in {unit}", who, **names)


def mixture(story: Story) -> None:
    who = story.person()
    a, b = story.rng.sample(
        (
            "apple juice",
            "orange juice",
            "water",
            "lemonade",
            "red paint",
            "white paint",
            "blue paint",
            "milk",
            "syrup",
            "tea",
        ),
        2,
    )
    names = {"a": a, "b": b, "u": story.pick("litres | cups | gallons | ounces")}
    x, y, k = story.between(2, 7), story.between(2, 7), story.between(2, 15)
    require(x != y)
    story.say(
        "{s} <mix> {a} and {b} in the ratio {x} to {y} | for every {x} {u} of {a}, {s} <add> {y} of {b} | a mixture <have:o> {x} parts of {a} and {y} parts of {b}",
        who,
        x=x,
        y=y,
        **names,
    )
    if story.rng.random() < 0.5:
        total = (x + y) * k
        story.say("{s} <make> {n} {u} of it | in all there <be:p> {n} {u}", who, n=total, **names)
        parts = story.work("there are {c} parts | the parts add up to {c}", f"{x}+{y}")
        one = story.work("one part is {c} {u} | each part has {c} {u}", f"{total}/{parts}", **names)
        story.work("the {b} is {c} {u} | there are {c} {u} of {b}", f"{one}*{y}", **names)
        story.ask("how many {u} of {b} are in it | how many {u} of {b} {does} {s} use", who, **names)
    else:
        story.say("{s} <have> {n} {u} of {a} and <use> all of it | {s} <take> {n} {u} of {a}", who, n=x * k, **names)
        one = story.work("one part is {c} {u} | each part has {c} {u}", f"{x * k}/{x}", **names)
        other = story.work("the {b} is {c} {u} | {s} <need> {c} {u} of {b}", f"{one}*{y}", who, **names)
        story.work("the mixture has {c} {u} | in total, that is {c} {u}", f"{x * k}+{other}", **names)
        story.ask("how many {u} of the mixture {does} {s} get | how many {u} are there in all", who, **names)


def lengths(story: Story) -> None:
    who, what = story.person(), story.pick("ribbon | rope | cloth | wire | string | tape | wood | pipe | chain")
    feet, size, pieces = story.between(2, 30), story.pick((2, 3, 4, 6, 8, 9, 12)), story.between(2, 12)
    story.say(
        "{s} <have> {n} feet of {what} | {s} <buy> {n} feet of {what} at {place} | a roll <hold:o> {n} feet of {what}",
        who,
        n=feet,
        what=what,
    )
    inches = story.work("a foot has 12 inches, so that is {c} inches | in inches, this is {c}", f"{feet}*12")
    story.say(
        "{s} <cut> off {k} pieces of {m} inches each | for a project {s} <use> {k} pieces, each {m} inches long",
        who,
        k=pieces,
        m=size,
    )
    used = story.work("the pieces take {c} inches | {s} <use> {c} inches", f"{pieces}*{size}", who)
    left = story.work("{c} inches are left | the rest is {c} inches", f"{inches}-{used}")
    if story.rng.random() < 0.5:
        k = divisor(story, left, 2, 25)
        story.say(
            "the rest <be:o> cut into parts of {k} inches | from the rest {s} <make> parts of {k} inches each", who, k=k
        )
        story.work("{s} <get> {c} parts | the number of parts is {c}", f"{left}/{k}", who)
        story.ask("how many of these parts {does} {s} get | how many parts can be made from the rest", who)
    else:
        story.ask("how many inches of {what} are left | how long is the rest, in inches", what=what)


def tank(story: Story) -> None:
    names = {
        "w": story.pick("tank | pool | barrel | bathtub | pond | aquarium"),
        "u": story.pick("litres | gallons"),
        "t": story.pick("minute | hour"),
    }
    into, out, t = story.between(8, 60), story.between(2, 30), story.between(3, 30)
    require(out < into)
    start = story.pick((0, story.between(10, 90)))
    need = (into - out) * t
    story.say("a {w} <hold:o> {n} {u} | there <be:o> room for {n} {u} of water in a {w}", n=need + start, **names)
    story.say("a pipe <bring:o> in {x} {u} every {t} | water <run:o> in at {x} {u} a {t}", x=into, **names)
    story.say(
        "through a crack it <lose:o> {y} {u} every {t} | {y} {u} a {t} <be:p> lost through a leak", y=out, **names
    )
    gain = story.work(
        "every {t} the {w} gains {c} {u} | the water in it grows by {c} {u} a {t}", f"{into}-{out}", **names
    )
    if start:
        story.say("at the beginning there <be:p> already {n} {u} in it", n=start, **names)
        need = story.work("{c} {u} are missing | there is room for {c} more {u}", f"{need + start}-{start}", **names)
    story.work("it takes {c} {t}s | the {w} is full after {c} {t}s", f"{need}/{gain}", **names)
    story.ask("how many {t}s does it take to fill the {w} | after how many {t}s is the {w} full", **names)
