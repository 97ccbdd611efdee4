"""A word problem while it is written: how phrases get their names, verbs and numbers, and how steps are worked out.

Every worked line is written from an expression that is evaluated as it is written, so text and arithmetic cannot part.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from evals.stories import phrases

NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


class DrawAgainError(Exception):
    """This draw has a quantity that is not whole, not positive or not sensible."""


@dataclass(frozen=True)
class Person:
    """Who a sentence is about. `plural` ones take plural verbs."""

    name: str
    he: str
    his: str
    him: str
    plural: bool = False


def third_person(verb: str) -> str:
    if re.search(r"(s|sh|ch|x|o)$", verb):
        return verb + "es"
    return re.sub(r"(?<=[^aeiou])y$", "ie", verb) + "s"


def past(verb: str) -> str:
    return re.sub(r"(?<=[^aeiou])y$", "i", verb) + ("d" if verb.endswith("e") else "ed")


def inflect(verb: str, in_past: bool, plural: bool) -> str:
    """`buy` -> buys, buy or bought; `be` -> is, are, was or were."""
    if verb == "be":
        return ("were" if plural else "was") if in_past else ("are" if plural else "is")
    singular, before = phrases.IRREGULAR.get(verb, (third_person(verb), past(verb)))
    return before if in_past else verb if plural else singular


def number(value: float, money: bool = False) -> str:
    """Digits as GSM8K writes them: 12, 2.5, and for money 2.50."""
    if float(value).is_integer():
        return str(int(value))
    return f"{value:.2f}" if money else f"{value:g}"


def dollars(value: float) -> str:
    return "$" + number(value, True)


class Story:
    """A problem while it is written: sentences said, lines worked, the question, and the last value."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.said: list[str] = []
        self.lines: list[str] = []
        self.question = ""
        self.value: float = 0
        self.in_past = rng.random() < 0.5
        self.space = rng.choice(("", "", " "))
        self.times = "x" if rng.random() < 0.08 else "*"
        self.show_dollar = rng.random() < 0.6
        self.stop = rng.choice((".", ".", ""))
        self.words = rng.random() < 0.25
        self.leads = rng.choice((0.0, 0.15, 0.4))
        self.spoken: Person | None = None
        self.crowd = False  # several people: worked lines then use names

    def pick(self, options):
        """One of a list, or of the alternatives of a string."""
        return self.rng.choice(options.split(" | ") if isinstance(options, str) else options)

    def between(self, low: int, high: int, step: int = 1) -> int:
        return self.rng.randrange(low, high + 1, step)

    def person(self, plural: bool = False) -> Person:
        if plural and self.rng.random() < 0.05:
            return Person(self.pick("the twins | the neighbours | the scouts"), "they", "their", "them", True)
        woman = self.rng.random() < 0.5
        name = self.rng.choice(phrases.WOMEN if woman else phrases.MEN)
        if self.rng.random() < 0.08:
            name = f"{'Mrs.' if woman else 'Mr.'} {self.rng.choice(phrases.SURNAMES)}"
        return Person(name, *(("she", "her", "her") if woman else ("he", "his", "him")))

    def people(self, count: int) -> list[Person]:
        """`count` persons of different names."""
        self.crowd = True
        found = [self.person() for _ in range(count)]
        if len({person.name for person in found}) < count:
            raise DrawAgainError
        return found

    def spell(self, value) -> str:
        if isinstance(value, int):
            return NUMBER_WORDS[value] if self.words and 0 <= value <= 12 else f"{value:,}"
        return str(value)

    def fill(self, template: str, who: Person | None, slots: dict) -> str:
        """The phrase with its slots and verbs; a pronoun only where the same person was spoken of last."""
        if who is not None:
            named = self.crowd and "c" in slots
            again = self.spoken == who and self.rng.random() < 0.6 and not named
            own = {"s": who.he if again else who.name, "name": who.name, "he": who.he, "his": who.his, "him": who.him}
            own |= {"does": inflect("do", self.in_past, who.plural), "had": inflect("have", self.in_past, who.plural)}
            slots = own | slots
        slots = {"do": inflect("do", self.in_past, True), **slots}
        used = set(re.findall(r"\{(\w+)\}", template))
        tables = {"kin": phrases.KIN, "place": phrases.PLACES, "day": phrases.DAYS, "pet": phrases.PETS}
        slots = {slot: self.rng.choice(tables[slot]) for slot in sorted(used & set(tables))} | slots
        if used & {"s", "name"}:
            self.spoken = who
        elif used & {"other", "third", "a"}:
            self.spoken = None
        text = template.format(**{name: self.spell(value) for name, value in slots.items()})

        def verb(match: re.Match) -> str:
            plural = match[2] == "p" or (match[2] is None and who is not None and who.plural)
            return inflect(match[1], self.in_past, plural)

        text = re.sub(r"<([a-z]+)(?::([op]))?>", verb, text)
        return re.sub(r"\b([Aa]) (?=hour|[aeio]\w|umb)", r"\1n ", text)

    def say(self, phrase: str, who: Person | None = None, **slots) -> None:
        """One sentence of the story; `phrase` is a key of phrases.SAY or the alternatives themselves."""
        template = self.pick(phrases.SAY.get(phrase, phrase))
        self.said.append(sentence(self.fill(template, who, slots)) + ".")

    def ask(self, phrase: str, who: Person | None = None, **slots) -> None:
        """The question; `phrase` is a key of phrases.ASK or the alternatives themselves."""
        self.question = sentence(self.fill(self.pick(phrases.ASK.get(phrase, phrase)), who, slots)) + "?"

    def work(
        self, phrase: str, expression: str, who: Person | None = None, money: bool | None = None, **slots
    ) -> float:
        """One worked line, and its value; `$` before operands makes the result money unless `money` says otherwise."""
        money = "$" in expression if money is None else money
        plain = expression.replace("$", "")
        self.value = evaluate(plain, money)
        shown = expression if self.show_dollar else plain
        shown = re.sub(r"(?<=[\d)])([-+*/])", lambda m: f"{self.space}{m[1]}{self.space}", shown)
        shown = shown.replace("*", self.times)
        result = number(self.value, money)
        calculation = f"{shown}{self.space}={self.space}{'$' if money else ''}<<{plain}={result}>>{result}"
        text = self.fill(self.pick(phrases.WORK.get(phrase, phrase)), who, {"c": calculation, **slots})
        if self.rng.random() < self.leads and re.match(r"(the |there |they |he |she |[A-Z$\d])", text):
            text = f"{self.pick(phrases.LEADS)} {text}"
        self.lines.append(sentence(text) + self.stop)
        return int(self.value) if float(self.value).is_integer() else self.value

    def note(self, text: str) -> None:
        """A worked line without a calculation."""
        self.lines.append(sentence(text) + self.stop)

    def finished(self) -> tuple[str, str]:
        """(question, worked answer with calculator marks)."""
        question = " ".join([*self.said, self.question])
        return question, "\n".join([*self.lines, f"#### {number(self.value, True)}"])


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def evaluate(expression: str, money: bool) -> float:
    """The value of digits and + - * / ( ), in cents for money, else whole; DrawAgainError where it is not."""
    value = eval(expression, {"__builtins__": {}})
    rounded = round(value, 2 if money else 0)
    if abs(value - rounded) > 1e-9 or rounded <= 0 or rounded >= 1e6:
        raise DrawAgainError
    return rounded
