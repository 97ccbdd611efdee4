"""Agreement: what docs/families.md says of every family of transformers' experts interface is what is found."""

from __future__ import annotations

import pytest
import torch

from tests.families import PAGE, WORKS, Row, committed, families, page, try_family

ROWS = committed()


@pytest.fixture(scope="module")
def known():
    import transformers

    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield families()
    torch.set_num_threads(threads)


def test_the_page_is_of_the_families_there_are(known):
    assert list(dict.fromkeys(row.family for row in ROWS)) == list(known)
    assert PAGE.read_text(encoding="utf-8") == page(ROWS)
    assert sum(row.outcome == WORKS for row in ROWS) > len(ROWS) / 2


@pytest.mark.parametrize("name", dict.fromkeys(row.family for row in ROWS))
def test_a_family_does_what_the_page_says(name, known):
    """Whatever else goes wrong is raised: a model that cannot be built, or that computes something else."""
    found: list[Row] = try_family(name, known[name])
    assert found == [row for row in ROWS if row.family == name]
