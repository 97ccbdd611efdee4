"""What tests of figures share: a figure drawn as its script draws it, its words with their boxes, and its markers."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.collections import PathCollection
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from evals.figures import STYLE

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "workflow" / "scripts"


def script(name: str) -> Path:
    return SCRIPTS / f"plot_{name}.py"


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def draw(name: str, table: pd.DataFrame):
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(STYLE)
    return module(script(name)).draw(table)


def shown_words(figure) -> list[tuple[str, object]]:
    """Every text on a picture with its box in pixels; tick labels outside the view are not drawn."""
    figure.canvas.draw()
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-9 * (high - low)
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden |= {tick.label1 for tick in ticks if not low - slack <= tick.get_loc() <= high + slack}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in hidden]
    words = []
    for text in texts:
        box = Text.get_window_extent(text)
        lines = text.get_text().split("\n")
        blank = sum(not line.strip() for line in lines)  # the title's second line is the legend's
        words.append((text.get_text(), Bbox([[box.x0, box.y0 + box.height * blank / len(lines)], [box.x1, box.y1]])))
    return words


def legible_words(figure) -> str:
    """Every word of a picture, asserting that none overlaps another or leaves the picture."""
    words = shown_words(figure)
    for (one, box), (other, other_box) in itertools.combinations(words, 2):
        apart = box.x1 < other_box.x0 + 1 or other_box.x1 < box.x0 + 1
        assert apart or box.y1 < other_box.y0 + 1 or other_box.y1 < box.y0 + 1, (one, other)
    width, height = figure.canvas.get_width_height()
    outside = [word for word, box in words if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    assert not outside, outside
    return " ".join(" ".join(word for word, _ in words).split())


def markers(figure) -> list[tuple[float, float]]:
    """Data coordinates of every marker; the caps of error bars are not markers."""
    found = []
    for ax in figure.axes:
        for artist in ax.get_children():
            if isinstance(artist, PathCollection):
                found += [tuple(xy) for xy in artist.get_offsets().data]
        for line in ax.lines:
            if line.get_marker() in ("o", "s", "D", "x"):
                found += list(zip(*line.get_data(), strict=True))
    return [(float(x), float(y)) for x, y in found]
