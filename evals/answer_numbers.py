r"""Which numbers stand in a text, and what is each worth, exactly?

    [spelled(number.value) for number in numbers(plain("$1,450.50 for 3/4 of 70 000 on 5 May 2024"))]
    ['1450.5', '0.75', '70000']

A number is

    whole, decimal       18  29.00  .5  72...           a full stop behind it ends the sentence
    grouped in threes    1,450,000  70 000  1'000       one separator throughout; so `100,200` is one number, `3,5` two:
                                                        a comma is never a decimal comma, and `12,50` are 12 and 50
    a quotient           3/4  48 / 2  1 1/2  5 and 1/4  of two numbers; a proper fraction behind a whole is added to it
    scientific           1.5e6  1.5 x 10^6  10^-3
    scaled               1.45 million
    negative             -5  -$5                        the sign touches; behind a number or a bracket it subtracts

None is what only looks like one: dates (2024-05-01, 5/12/2024, on May 5, 5 May 2024; a year alone is a number), times
and ratios (3:30), versions (1.2.3), ordinals (3rd), labels (step 2, question 3), the items of a list (1. 2. 3. at line
beginnings, in this order), exponents and their base (m^2, 2^3), digits that touch a letter before them (x2, H2O), a
quotient by zero, and what has more than 100 digits. Units, currencies and `%` change nothing: 25% is 25. Number words
are not read.

Steps grow with the length of a text alone: every repetition in a pattern is bounded, and one inside another is
possessive, so that no position costs more than a constant.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

LARGEST_EXPONENT = 100
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# ---- characters ------------------------------------------------------------------------------------------------------
_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_CHARACTERS = (
    {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full width
    | dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"), " ")
    | dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-")
    | dict.fromkeys(map(ord, "\u2044\u2215\uff0f"), "/")
    | dict.fromkeys(map(ord, "\u00ad\u200b\u200c\u200d\u2060\ufeff"), None)
    | {ord("\u2019"): "'", ord("\u2026"): "..."}
    | {ord(c): unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in _VULGAR}
)
_SPELLINGS = [  # LaTeX, and what would run together with the digit before it
    (re.compile(rf"(?<=[0-9])(?=[{_VULGAR}]|\\[dt]?frac)"), " "),
    (re.compile(r"(?<=10)[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]{1,4}+"), lambda match: "^" + match[0].translate(_RAISED)),
    (re.compile(r"\\[dt]?frac ?\{([^{}\n]{1,100})\} ?\{([^{}\n]{1,100})\}"), r"\1/\2"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,;: ]|~"), " "),
    (re.compile(r"\\([$%#])"), r"\1"),
    (re.compile(r"\\!|\\left|\\right|\\displaystyle"), ""),
    (re.compile(r"\\[()\[\]]"), " "),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
]


def plain(text: str) -> str:
    """The text with one spelling for every space, minus, slash, apostrophe and fraction, LaTeX among them."""
    for pattern, replacement in _SPELLINGS[:2]:
        text = pattern.sub(replacement, text)
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _SPELLINGS[2:]:
        text = pattern.sub(replacement, text)
    return text


# ---- patterns --------------------------------------------------------------------------------------------------------
_DIGITS = "[0-9]{1,100}+"
_UNSIGNED = rf"""
    (?: [1-9][0-9]{{0,2}}+ (?: (?:,[0-9]{{3}}){{1,12}}+ | (?:'[0-9]{{3}}){{1,12}}+ | (?:[ ][0-9]{{3}}){{1,12}}+ )
        (?![0-9]) (?:\.{_DIGITS})?+
      | {_DIGITS} (?:\.{_DIGITS})?+
      | (?<![0-9A-Za-z.])\.{_DIGITS} )
    (?![0-9])"""
_TEN = r"10\^\{?(?P<%s>[+-]?[0-9]{1,4}+)(?![0-9])\}?"
_MONTH = r"""(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|
    Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?"""
_YEAR, _DAY = r"(?:19|20)[0-9]{2}\b", r"[0-9]{1,2}(?:st|nd|rd|th)"
_TOKEN = re.compile(
    rf"""
    ^[ \t\#>*_-]{{0,8}}+ (?P<item>[0-9]{{1,3}}) [.)]\*{{0,2}} (?=[ \t]{{1,8}}\S)      # `2. text` at a line's beginning
  | \b(?:on|by|until|till|from|to|since|before|after)[ ]{_MONTH}[ ][0-9]{{1,2}}\b(?:,?[ ]{_YEAR})?   # dates
  | \b{_MONTH}(?:[ ]{_DAY}\b(?:,?[ ]{_YEAR})? | (?:[ ][0-9]{{1,2}})?,?[ ]{_YEAR})
  | (?<![0-9])[0-9]{{1,2}}(?:st|nd|rd|th)?[ ](?:of[ ])?{_MONTH}(?:,?[ ]{_YEAR})?
  | (?<![0-9])(?:[0-9]{{4}}-[0-9]{{1,2}}-[0-9]{{1,2}}|[0-9]{{1,2}}-[0-9]{{1,2}}-[0-9]{{4}})(?![0-9])
  | (?<![0-9])[0-9][0-9.,]{{0,99}}+ (?:[ ]?/[ ]?[0-9][0-9.,]{{0,99}}+){{2,6}}+                        # 5/12/2024
  | (?<![0-9])[0-9]{{1,4}}(?::[0-9]{{1,4}}+){{1,3}}+                                                  # 3:30
  | (?<![0-9]){_DIGITS}(?:\.[0-9]{{1,100}}+){{2,20}}+                                                 # 1.2.3
  | (?<![0-9])[0-9][0-9,]{{0,99}}+(?:st|nd|rd|th)\b                                                   # 3rd
  | (?i:\b(?:step|example|question|problem|part|case|option))[ ]?\#?[0-9]{{1,4}}(?![0-9])             # step 2
  | (?: [A-Za-z](?:_\{{?|-)? | \^\{{?[+-]? ) [0-9][0-9.]{{0,99}}+                                    # x2, m^2
  | (?P<minus>-[$£€¥₹]?)?+ (?<![0-9A-Za-z^])
    (?: (?P<whole>[0-9]{{1,9}}+)(?:[ ]|[ ]and[ ])(?![0-9]{{3}}/)(?P<top>[0-9]{{1,9}}+)/(?P<under>[0-9]{{1,9}}+)
        (?![0-9.]|[ ]?/)
      | {_TEN % "ten"}
      | (?P<value>{_UNSIGNED}) (?: [eE](?P<e>[+-]?[0-9]{{1,4}}+)(?![0-9A-Za-z]) | [ ]?[x×*·][ ]?{_TEN % "times"} )?+
        (?: [ ]?/[ ]?(?P<per>{_UNSIGNED}) )?+ )
    (?: [ -]?(?P<scale>(?i:{"|".join(SCALES)}))\b )?+
    (?![ ]?\^)
    """,
    re.VERBOSE | re.MULTILINE | re.ASCII,
)
_SUBTRACTS = re.compile(r"(?:[0-9A-Za-z)\]}%]|[0-9)\]}%] {1,2})\Z", re.ASCII)


# ---- numbers ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Number:
    """text[start:end] of a plain text, worth `value`."""

    start: int
    end: int
    value: Fraction


def numbers(text: str) -> Iterator[Number]:
    """The numbers of a plain text, in order."""
    item = 0  # the last of a list
    for match in _TOKEN.finditer(text):
        if match["item"]:
            before, item = item, int(match["item"])
            if item not in (1, before + 1):
                yield Number(match.start("item"), match.end("item"), Fraction(item))
            continue
        value = _value(match)
        if value is None:
            continue
        start = match.start()
        if match["minus"]:
            if _SUBTRACTS.search(text[max(0, start - 3) : start]):
                start = match.end("minus")
            else:
                value = -value
        yield Number(start, match.end(), value)


def _value(match: re.Match) -> Fraction | None:
    """None for what only looks like a number."""
    if match["whole"]:
        whole, top, under = int(match["whole"]), int(match["top"]), int(match["under"])
        if not under:
            return None
        value = Fraction(top, under) + (whole if top < under else 0)  # `5 10/2` are two numbers, the last is 10/2
    elif match["ten"]:
        value = Fraction(1)
    elif match["value"]:
        value = _unsigned(match["value"])
        if match["per"]:
            per = _unsigned(match["per"])
            if not per:
                return None
            value /= per
    else:
        return None
    exponent = int(match["ten"] or match["times"] or match["e"] or 0)
    if abs(exponent) > LARGEST_EXPONENT:
        return None
    return value * Fraction(10) ** (exponent + SCALES.get((match["scale"] or "").lower(), 0))


def _unsigned(digits: str) -> Fraction:
    return Fraction(re.sub("[, ']", "", digits))


def spelled(value: Fraction) -> str:
    """One text for every value: a whole number, else an exact decimal where there is one, else a/b in lowest terms."""
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest > 1 or not places:
        return str(value)
    digits = str(abs(value.numerator) * (10**places // value.denominator)).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
