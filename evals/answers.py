r"""What number does a generation state as its answer?

    last_answer("He sells 18 eggs.\n#### $29.00.\n\nQuestion: How many of the 7 ...")        "29"

The rules, in this order:

1.  Thinking is not stating. `<think> ... </think>` is left out; so is all that stands before a closing tag without an
    opening one (the prompt opened it), and all that follows a block which is not closed: a generation that ends while
    it thinks has stated nothing.
2.  What comes after the own answer is not its answer. A generation is cut where a next question begins (`Question:`,
    `Q:`, `Problem 2:`, `Example:` at the beginning of a line, bold or not), where another speaker does (`User:`,
    `Human:`), and after an end-of-text token; the first part that states an answer counts. Where the generation itself
    opens with a question, it recites: then the last part that states an answer counts, and of a recited question only
    what follows its `Answer:` or, without one, its first line.
3.  The last marked answer counts: `####`, `\boxed{}`, `answer is`, `Answer:` and the like, with the number right behind
    it; between them may stand spaces, line ends, bold, brackets, a currency, `about`, a name as in `x = 5`, `Total:`. A
    mark without a number is none, so a heading (`#### Step 2`) is not read and an example that was recited before
    (`#### 5`) gives way to the own answer. Of a calculation behind a mark (`Answer: 4 * 5 = 20`) what follows the last
    `=` of its line counts; of a list the first.
4.  Without a mark the last number counts, of a list so the last. What stands in round brackets is an aside: `40 (25%)`
    is 40. It counts only where no number stands outside.

What a number is, and what only looks like one, is said in evals/answer_numbers.py; commas are not decimal. The answer
is a text, the same for equal values: `18`, `-0.5`, `1/3`. None is no answer. A wrong question without a heading, an
example without an own answer, and a year in passing at the end cannot be told from an answer.
"""

from __future__ import annotations

import re

from engine.errors import error
from evals.answer_numbers import Number, numbers, plain, spelled

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_LINE = r"^[ \t>*_\#-]{0,8}+"
_BOUNDARY = re.compile(
    rf"{_LINE}(?:(?:new|next|another)[ ])?(?P<question>question|problem|exercise|examples?|q)"
    r"(?:[ ]?\#?[0-9]{1,3})?[ *_]{0,4}+:"
    rf"|{_LINE}(?:user|human)[ *_]{{0,4}}+:"
    r"|</s>|<\|(?:im_end|endoftext|eot_id|end|return)\|>",
    re.IGNORECASE | re.MULTILINE,
)
_SOLUTION = re.compile(rf"(?:\b(?:answer|solution)|{_LINE}a)[ *_]{{0,4}}+:", re.IGNORECASE | re.MULTILINE)
_MARK = re.compile(
    r"""\#{4,6}+ | \\(?:boxed|fbox)\b
    | \banswers?\b [ *_]{0,4}+
      (?:(?:to|for|of|the|this|your|our|question|problem|then|thus|therefore|would|will|should|must|can|only)[ ]){0,8}+
      (?:(?:is|are|was|be|equals)\b | [:=])""",
    re.VERBOSE | re.IGNORECASE,
)
_BETWEEN = re.compile(
    r"""(?: [\s*_:=~≈≃$£€¥₹("'`\[{}] | -[ ] | \\[a-z]{1,12}+\b
      | (?:therefore|thus|then|about|around|approximately|exactly|simply|just|only|equal|to|a|total|of|now)\b
      | [a-z]{1,20}+[ ]?[=:] ){0,60}+""",
    re.VERBOSE | re.IGNORECASE,
)
_CALCULATES = re.compile(r"(?:[ _]|\*\*){0,4}+(?:[-+*/×÷·=]|x(?=[ ]?[0-9]))[ $£€¥₹(]{0,4}+[0-9]")


def last_answer(text: str) -> str | None:
    """The answer that a generation states, None where it states none. Never raises on a text."""
    parts, recites = _parts(plain(_spoken(text)))
    for part in reversed(parts) if recites else parts:
        if (value := _stated(part)) is not None:
            return value
    return None


def gold_answer(worked: str) -> str:
    """The number behind the last `####` of a worked answer. UserError where none stands there."""
    _, mark, gold = worked.rpartition("####")
    gold = plain(gold).strip()
    found = list(numbers(gold))
    if not mark or [(number.start, number.end) for number in found] != [(0, len(gold))]:
        raise error(f"a worked answer that ends with '{worked[-30:]}'", "#### and a number", "mend its row")
    return spelled(found[0].value)


def same_answer(one: str | None, other: str | None) -> bool:
    """Whether two answers of `last_answer` or `gold_answer` are equal. No answer equals none, not even itself."""
    return one is not None and one == other


# ---- what counts -----------------------------------------------------------------------------------------------------
def _spoken(text: str) -> str:
    """What is left without the thinking (rule 1)."""
    kept, start, open_since = [], 0, None
    for tag in _THINK.finditer(text):
        if not tag[1]:
            if open_since is None:
                kept.append(text[start : tag.start()])
                open_since = tag.start()
        else:
            if open_since is None:
                kept.clear()
            start, open_since = tag.end(), None
    return "".join(kept if open_since is not None else [*kept, text[start:]])


def _parts(text: str) -> tuple[list[str], bool]:
    """The text between questions, other speakers and ends, and whether it opens with a question (rule 2)."""
    cuts = list(_BOUNDARY.finditer(text))
    starts = [*(cut.start() for cut in cuts), len(text)]
    first = text[: starts[0]]
    behind = [_behind(cut, text[cut.end() : end]) for cut, end in zip(cuts, starts[1:], strict=True)]
    return [first, *behind], bool(cuts) and cuts[0]["question"] is not None and not first.strip()


def _behind(cut: re.Match, part: str) -> str:
    """A part without the question that it opens with."""
    if cut["question"] is None:
        return part
    solution = _SOLUTION.search(part)
    return part[solution.start() :] if solution else part.partition("\n")[2]


def _stated(part: str) -> str | None:
    found = list(numbers(part))
    chosen = _marked(part, found) or _last(part, found)
    return None if chosen is None else spelled(chosen.value)


def _marked(part: str, found: list[Number]) -> Number | None:
    """The number of the last mark that has one (rule 3). A mark is read up to the next: nothing is read twice."""
    by_start, end = {number.start: number for number in found}, len(part)
    for mark in reversed(list(_MARK.finditer(part))):
        number = by_start.get(_BETWEEN.match(part, mark.end(), end).end())
        if number is not None and _CALCULATES.match(part, number.end, end):
            line_end = part.find("\n", number.end, end)
            equals = part.rfind("=", number.end, end if line_end < 0 else line_end)
            number = by_start.get(_BETWEEN.match(part, equals, end).end()) if equals >= 0 else None
        if number is not None:
            return number
        end = mark.start()
    return None


def _last(part: str, found: list[Number]) -> Number | None:
    """The last number outside round brackets, else the last (rule 4)."""
    opened: list[int] = []
    asides: list[tuple[int, int]] = []  # outermost pairs so far, in order
    for place in re.finditer(r"[()]", part):
        if place[0] == "(":
            opened.append(place.start())
        elif opened:
            start = opened.pop()
            while asides and asides[-1][0] > start:
                asides.pop()
            asides.append((start, place.start()))
    for number in reversed(found):
        while asides and asides[-1][0] > number.start:
            asides.pop()
        if not asides or asides[-1][1] < number.start:
            return number
    return found[-1] if found else None
