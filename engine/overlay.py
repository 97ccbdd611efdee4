"""How is one configuration laid over another? Key by key, as Snakemake does it; but the keys WHOLE names are replaced.

Of these a user leaves members out, which no merge can: with `slots: {s25: 25}` there are no others.

config = laid_over(default, own)
replace_whole(merged, own)      # of what Snakemake has merged, in place
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

WHOLE = (("slots",), ("measure", "links"))


def laid_over(config: Mapping, own: Mapping) -> dict:
    """A new configuration; neither is changed."""
    merged = _merged(config, own)
    replace_whole(merged, own)
    return merged


def replace_whole(merged: dict, own: Mapping) -> None:
    for *above, last in WHOLE:
        value, into = own, merged
        for key in above:
            value, into = value.get(key), into.get(key)
            if not (isinstance(value, Mapping) and isinstance(into, dict)):
                break
        else:
            if last in value:
                into[last] = copy.deepcopy(value[last])


def _merged(config: Mapping, own: Mapping) -> dict:
    merged = copy.deepcopy(dict(config))
    for key, value in own.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merged(below, value) if both else copy.deepcopy(value)
    return merged
