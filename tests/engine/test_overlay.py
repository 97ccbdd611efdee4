"""Laws: a configuration over another is what Snakemake would make of the two, but for the keys that are replaced."""

from __future__ import annotations

import copy

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from snakemake.utils import update_config

from engine.overlay import laid_over

LINK = {"documents": 2, "tokens": 8, "repeats": 1}
DEFAULT = {
    "models": ["a", "b"],
    "slots": {"s25": 25, "s50": 50},
    "measure": {"models": ["a"], "links": {"disk": LINK, "sdcard": LINK}},
}
MAPPINGS = st.recursive(
    st.integers(), lambda below: st.dictionaries(st.sampled_from("abc"), below, min_size=1, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


@given(MAPPINGS, MAPPINGS)
def test_what_is_not_replaced_is_merged_as_snakemake_does(config, own):
    expected = copy.deepcopy(config)
    update_config(expected, own)
    assert laid_over(config, own) == expected


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("slots: {s10: 10}", DEFAULT | {"slots": {"s10": 10}}),
        ("models: [c]", DEFAULT | {"models": ["c"]}),
        ("measure: {models: []}", DEFAULT | {"measure": DEFAULT["measure"] | {"models": []}}),
        ("measure: {links: {disk: 1}}", DEFAULT | {"measure": {"models": ["a"], "links": {"disk": 1}}}),
        ("measure: nothing", DEFAULT | {"measure": "nothing"}),
    ],
)
def test_members_of_some_keys_can_be_left_out(own, expected):
    before = copy.deepcopy(DEFAULT)
    assert laid_over(DEFAULT, yaml.safe_load(own)) == expected
    assert before == DEFAULT
