"""What several modules read: the tiny pipeline's story (test_pipeline.py), told once."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    from test_pipeline import tell

    return tell(tmp_path_factory.mktemp("pipeline"))
