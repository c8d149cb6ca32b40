"""The schema: what is inferred, the TOML file, statistics that add up, and the encoding against scikit-learn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.datasets import load_credit
from fedbilevel.tables.columns import numbers_of
from fedbilevel.tables.encoder import Encoder, Statistics, combine, parse, site_statistics, stack
from fedbilevel.tables.reading import Table, open_table
from fedbilevel.tables.schema import MISSING, Column, Schema, infer, learned_columns, misfits

ROWS = 60
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=10)


def sites(rows=ROWS):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "id": np.arange(1, rows + 1),
            "patient_id": rng.permutation(10 * rows)[:rows],
            "name": [f"person {i}" for i in range(rows)],
            "age": rng.integers(20, 70, rows),
            "price": [f"{value:.2f}".replace(".", ",") for value in rng.uniform(1, 9, rows)],
            "income": rng.choice(["12", "15.5", "n.a."], rows, p=[0.5, 0.45, 0.05]),
            "job": np.where(np.arange(rows) < 2, "astronaut", rng.choice(["cook", "judge", "?"], rows)),
            "insured": rng.choice(["yes", "no"], rows),
            "born": [f"19{i % 90 + 10}-01-{i % 28 + 1:02d}" for i in range(rows)],
            "country": "here",
            "empty": "",
            "text": "x" * 300,
            "sex": rng.choice(["f", "m"], rows),
            "site": rng.choice(["A", "B"], rows),
            "ill": rng.choice(["healthy", "ill"], rows, p=[0.7, 0.3]),
        }
    )
    frame.loc[3, "age"] = 41
    return frame.astype(object)


def schema_of(frame, **options):
    chosen = {"target": "ill", "sensitive": "sex", "site": "site"} | options
    return infer([frame] if isinstance(frame, pd.DataFrame) else frame, **chosen)


def encoder_of(schema, frame):
    return Encoder.from_statistics(schema, site_statistics(schema, frame))


def column(schema, name):
    return next(one for one in schema.columns if one.name == name)


def test_what_columns_are_taken_for():
    schema = schema_of(sites())
    assert {one.name: one.kind for one in schema.columns} == {
        "id": "ignore", "patient_id": "ignore", "name": "ignore", "age": "number", "price": "number", "income": "number",
        "job": "category", "insured": "boolean", "born": "date", "country": "ignore", "empty": "ignore", "text": "ignore",
        "sex": "ignore",
    }  # fmt: skip
    notes = {one.name: one.note for one in schema.columns}
    assert "identifier" in notes["id"]
    assert "identifier" in notes["patient_id"]
    assert "identifier" in notes["name"]
    assert column(schema, "born").order == "ymd"
    assert notes["country"] == "one value only"
    assert notes["empty"] == "no values"
    assert "sensitive" in notes["sex"]
    assert column(schema, "price").decimal == ","
    assert column(schema, "income").also_missing == ("n.a.",)
    assert column(schema, "income").missing == "flag"
    job = column(schema, "job")
    assert (job.values, job.pooled, job.missing) == (("cook", "judge"), True, "flag")
    assert column(schema, "insured").values == ("no", "yes")
    assert (schema.classes, schema.positive, schema.labels) == (("healthy", "ill"), "ill", ("healthy", "ill"))
    assert (schema.groups, schema.site, schema.missing) == (("f", "m"), "site", MISSING)


@pytest.mark.parametrize(
    ("values", "positive"),
    [(["0", "1"], "1"), (["-1", "1"], "1"), (["No", "Yes"], "Yes"), (["1", "2"], "2"), (["a", "b"], "b")],
)
def test_the_positive_class(values, positive):
    rows = [values[0]] * 10 + [values[1]] * 5
    if positive == "2":
        assert schema_of(sites(15).assign(ill=rows)).positive == "2"  # the rarer one
        assert schema_of(sites(15).assign(ill=rows[::-1])).positive == "2"
    else:
        assert schema_of(sites(15).assign(ill=rows)).positive == positive
    assert schema_of(sites(15).assign(ill=rows), positive=values[0]).positive == values[0]


def test_several_sensitive_columns_and_their_use_as_features():
    schema = schema_of(sites(), sensitive=["sex", "insured"], keep_sensitive=True)
    assert schema.groups == ("f & no", "f & yes", "m & no", "m & yes")
    assert column(schema, "sex").kind == "category"
    frame = sites().assign(insured=lambda one: one["insured"].where(one.index != 0, "?"))
    encoder = encoder_of(schema, frame)
    codes = encoder.groups(frame)
    assert codes[0] == -1
    joined = frame["sex"] + " & " + frame["insured"]
    np.testing.assert_array_equal(np.array(schema.groups)[codes[1:]], joined[1:])
    own = dataclasses.replace(schema, missing_group="own", groups=(*schema.groups, "f & (missing)", "m & (missing)"))
    assert (
        own.groups[Encoder.from_statistics(own, encoder.statistics).groups(frame)[0]]
        == f"{frame['sex'][0]} & (missing)"
    )


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"target": "il"}, "no column 'il'; did you mean 'ill'"),
        ({}, {"sensitive": "gender"}, "no column 'gender'"),
        ({}, {"sensitive": ["sex", "sex"]}, "named twice"),
        ({"ill": ["a", "b", "c"] * 20}, {"positive": "d"}, "--positive 'd' is no value of 'ill'"),
        ({"ill": [f"v{i}" for i in range(60)]}, {}, "more than 20 values.*must be a class or a number"),
        (
            {"ill": [f"v{i}" for i in range(60)]},
            {"task": "regression"},
            "--task regression needs numbers, but .* holds 'v0'",
        ),
        ({"ill": list(range(60))}, {"task": "classification"}, "more than 20 values"),
        ({"ill": list(range(60))}, {"task": "ranking"}, "--task = 'ranking' is unknown"),
        ({"ill": list(range(60))}, {"task": "regression", "positive": "3"}, "--positive '3' makes .*classes of 'ill'"),
        ({"ill": ["a"] * 60}, {}, "nothing to learn"),
        ({"ill": ["?"] * 60}, {}, "missing in every row"),
        ({"sex": [f"g{i}" for i in range(60)]}, {}, "more than 50 groups.*gather its values"),
        ({"sex": [""] * 60}, {}, "has no values"),
    ],
)
def test_bad_tables_are_one_sentence(change, options, words):
    with pytest.raises(ValueError, match=words) as caught:
        schema_of(sites().assign(**change), **options)
    assert "\n" not in str(caught.value)


def test_a_number_is_predicted_in_spreads_that_the_sites_agree_on():
    """By its values, or because it is asked for; written, read, and encoded alike wherever the rows are."""
    few = schema_of(sites().assign(ill=[0, 1, 2] * 20), task="regression")
    assert (few.task, few.classes, few.labels, few.positive) == ("regression", (), (), None)
    cost = np.random.default_rng(0).normal(900, 70, 60).round(2)
    frame = sites().assign(ill=cost.astype(object))
    frame.loc[4, "ill"] = "?"
    schema = Schema.parse(schema_of(frame).text())
    assert (schema.task, schema.center) == ("regression", pytest.approx(900, abs=20))
    whole = frame.drop(index=4)
    parts = [site_statistics(schema, part) for part in (whole.iloc[:20], whole.iloc[20:])]
    encoder = Encoder.from_statistics(schema, combine(parts))
    known = np.delete(cost, 4)
    np.testing.assert_allclose(encoder.target, (known.mean(), known.std()), rtol=1e-12)
    labels = encoder.labels(frame)
    assert np.isnan(labels[4])
    np.testing.assert_allclose(encoder.standardised(np.delete(labels, 4)), (known - known.mean()) / known.std())
    with pytest.raises(ValueError, match="the column 'ill' must hold numbers"):
        encoder.labels(frame.assign(ill="much"))
    for wrong in ('classes = ["a", "b"]', 'positive = "a"'):
        with pytest.raises(ValueError, match="leave classes and positive out"):
            Schema.parse(wrong + "\n" + schema.text())


def test_several_sensitive_columns_by_themselves():
    schema = schema_of(sites(), sensitive=["sex", "insured"])
    assert [(one.name, one.values, one.places.tolist()) for one in schema.margins] == [
        ("sex", ("f", "m"), [0, 0, 1, 1]),
        ("insured", ("no", "yes"), [0, 1, 0, 1]),
    ]
    assert schema_of(sites()).margins == []
    with pytest.raises(ValueError, match="must name one value of each of 'sex', 'insured'"):
        dataclasses.replace(schema, groups=("f & no", "f & m & yes"))


def test_three_classes_and_three_of_which_one_is_positive():
    frame = sites().assign(ill=["b", "c", "?", "a"] * 15)
    schema = Schema.parse(schema_of(frame).text())
    assert (schema.classes, schema.positive, schema.labels) == (("a", "b", "c"), None, ("a", "b", "c"))
    assert encoder_of(schema, frame).labels(frame)[:4].tolist() == [1, 2, -1, 0]
    schema = schema_of(sites().assign(ill=["a", "b", "c"] * 20), positive="b")
    assert (schema.classes, schema.labels) == (("a", "b", "c"), ("not b", "b"))
    frame = sites().assign(ill=["a", "b", "?"] * 20)
    assert encoder_of(schema, frame).labels(frame)[:3].tolist() == [0, 1, -1]


def test_ten_thousand_groups_stop_early(tmp_path):
    file = tmp_path / "site.csv"
    file.write_text("y,sex,x\n" + "".join(f"{i % 2},g{i},{i / 7}\n" for i in range(10_000)))
    with pytest.raises(ValueError, match=r"sensitive column 'sex' makes more than 50 groups"):
        infer([open_table(file)], target="y", sensitive="sex")


def test_files_that_disagree_and_empty_sites(tmp_path):
    for number, head in enumerate(["y,sex,x", "y,sex,z", "x,sex,y"]):
        (tmp_path / f"{number}.csv").write_text(head + ("\n" if number == 2 else "\n1,f,0\n0,m,1\n"))
    tables = [open_table(tmp_path / f"{number}.csv") for number in range(3)]
    with pytest.raises(ValueError, match=r"0 has the column 'x', but 1 has not; 1 more column"):
        infer(tables[:2], target="y", sensitive="sex")
    with pytest.raises(ValueError, match=r"2\.csv names its columns but has no rows"):
        infer([tables[0], tables[2]], target="y", sensitive="sex")


def test_rare_values_do_not_travel():
    frame = sites(500).assign(job=["common"] * 480 + [f"rare {i}" for i in range(20)])
    assert column(schema_of(frame), "job").values == ("common",)
    many = sites(500).assign(job=[f"value {i % 40:02d}" for i in range(500)])
    job = column(schema_of(many, most=7), "job")
    assert (len(job.values), job.pooled) == (7, True)


def test_a_file_and_a_frame_give_the_same(tmp_path):
    frame = sites()
    frame.to_csv(tmp_path / "all.csv", index=False)
    frame[["id", "patient_id", "age"]] = frame[["id", "patient_id", "age"]].astype("int64")
    frame.to_parquet(tmp_path / "all.parquet")
    assert schema_of([open_table(tmp_path / "all.csv")]) == schema_of(frame)
    from_parquet = open_table(tmp_path / "all.parquet")
    schema = schema_of([from_parquet])
    assert schema == schema_of(frame)
    csv = next(iter(open_table(tmp_path / "all.csv").chunks()))
    np.testing.assert_array_equal(
        encoder_of(schema, csv).transform(csv),
        encoder_of(schema, frame).transform(next(iter(from_parquet.chunks()))),
    )


def test_encoding_is_the_clean_encoding():
    """On a table without missing values: the columns that scikit-learn's transformer gives, plus the constant."""
    data = load_credit("sex")
    frame = data.X.assign(risk=data.y, sex=data.groups)
    schema = infer([frame], target="risk", sensitive="sex", missing=("",), rare=1)
    schema = dataclasses.replace(
        schema,
        columns=tuple(
            dataclasses.replace(one, kind="category") if one.kind == "boolean" else one for one in schema.columns
        ),
    )
    train = frame.iloc[:700]
    encoder = encoder_of(schema, train)
    learned = Encoder.learn(data.X, every_value=True)
    scaling = Encoder.learn(train[learned.numbers])
    reference = dataclasses.replace(learned, means=scaling.means, spreads=scaling.spreads)
    expected, names = reference.transform(data.X), reference.feature_names[:-1]
    mine = encoder.transform(frame)
    assert sorted(names) == sorted(schema.feature_names[:-1])
    for place, name in enumerate(schema.feature_names[:-1]):
        np.testing.assert_allclose(mine[:, place], expected[:, names.index(name)], rtol=1e-5, atol=1e-6, err_msg=name)
    assert (mine[:, -1] == 1).all()
    np.testing.assert_array_equal(encoder.labels(frame), data.y)


def test_sites_agree_without_sharing_rows():
    """Per-site sums give one encoding, whatever the order of the sites; it is that of all rows together."""
    frame = sites(300)
    schema = schema_of(frame)
    parts = [site_statistics(schema, frame.iloc[rows]) for rows in np.array_split(np.arange(300), [7, 90, 211])]
    together = combine(parts)
    for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
        for mine, other in zip(together, combine([parts[i] for i in order]), strict=True):
            np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(
        Encoder.from_statistics(schema, together).transform(frame),
        encoder_of(schema, frame).transform(frame),
    )
    assert all(array.shape in ((1,), (4,)) for array in together)  # nothing else leaves a site
    with pytest.raises(ValueError, match="no statistics"):
        combine([])
    with pytest.raises(ValueError, match="different shapes"):
        combine([together, Statistics(*(np.zeros(2),) * 4)])
    with pytest.raises(ValueError, match="must hold 4 finite numbers"):
        Encoder.from_statistics(schema, Statistics(*(np.zeros(2),) * 4))


def test_large_numbers_keep_their_spread():
    values = 1e9 + np.arange(100.0) % 7
    frame = sites(100).assign(age=values)
    schema = schema_of(frame)
    encoder = encoder_of(schema, frame)
    place = [one.name for one in schema.numbers].index("age")
    np.testing.assert_allclose(encoder.spreads[place], values.std(), rtol=1e-9)
    constant = dataclasses.replace(schema, columns=(Column("age", center=5.0),))
    alike = sites(100).assign(age=0.1)
    assert encoder_of(constant, alike).spreads.tolist() == [1.0]


@pytest.fixture
def small():
    return Schema(
        "y", ("0", "1"), "1", ("sex",), ("f", "m"),
        (Column("n", missing="flag"), Column("c", "category", ("a", "b"), pooled=True, missing="flag"),
         Column("d", "category", ("a", "b")), Column("t", "boolean", ("no", "yes")), Column("r", missing="refuse")),
    )  # fmt: skip


def test_rules_for_missing_and_unknown_cells(small):
    train = pd.DataFrame({"n": ["1", "3"], "c": "a", "d": "b", "t": "no", "r": ["0", "2"]}, dtype=object)
    encoder = encoder_of(small, train)
    frame = pd.DataFrame(
        {
            "n": ["3", "?", None, 1e9],
            "c": ["a", "", "new", None],
            "d": ["b", "NA", "new", "a"],
            "t": ["yes", "", "what", "no"],
            "r": [0, 1, 2, 3.0],
        },
        dtype=object,
    )
    names = ["n", "n missing", "c=a", "c=b", "c=(other)", "c missing", "d=a", "d=b", "t=yes", "r", "1"]
    assert small.feature_names == names
    expected = [
        [1, 0, 1, 0, 0, 0, 0, 1, 1, -1, 1],
        [0, 1, 0, 0, 0, 1, 0, 0, 0.5, 0, 1],
        [0, 1, 0, 0, 1, 0, 0, 0, 0.5, 1, 1],
        [20, 0, 0, 0, 0, 1, 1, 0, 0, 2, 1],
    ]
    np.testing.assert_allclose(encoder.transform(frame), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"rows\.csv, line 7: the column 'r' must not be missing, but it is empty"):
        encoder.transform(frame.assign(r="").set_axis(pd.RangeIndex(7, 11, name="line")), source="rows.csv")
    with pytest.raises(ValueError, match=r"row 1: the column 'n' must hold numbers .*'four'.*and 1 more.*also_missing"):
        encoder.transform(frame.assign(n=["1", "four", "2", "inf"]))
    with pytest.raises(ValueError, match="no column 't'"):
        encoder.transform(frame.drop(columns="t"))
    with pytest.raises(ValueError, match="column 'y' must hold one of '0', '1', but it holds '2'"):
        encoder.labels(frame.assign(y=["1.0", 0, "2", True]))
    with pytest.raises(ValueError, match="must make one of the groups 'f', 'm', but it holds 'x'"):
        encoder.groups(frame.assign(sex=["f", "m", "x", "f"]))


def test_chunks_stack_to_the_table(small):
    frame = pd.DataFrame(
        {"n": ["1", "?", "4"], "c": ["a", "b", "?"], "d": "a", "t": "no", "r": "1", "y": ["0", "1", "1"],
         "sex": ["f", "m", "f"]},
        dtype=object,
    )  # fmt: skip
    whole = parse(small, frame, labelled=True)
    pieces = stack([parse(small, frame.iloc[:1], labelled=True), parse(small, frame.iloc[1:], labelled=True)])
    for name, values in whole.cells.items():
        np.testing.assert_array_equal(values, pieces.cells[name])
    np.testing.assert_array_equal(whole.labels, pieces.labels)
    np.testing.assert_array_equal(whole.groups, pieces.groups)
    with pytest.raises(ValueError, match="without labels"):
        parse(small, frame).labels  # noqa: B018


def test_the_file_comes_back(small, tmp_path):
    for schema in (
        small,
        schema_of(sites()),
        dataclasses.replace(small, site="where", missing_group="own", missing=()),
    ):
        file = schema.write(tmp_path / "schema.toml")
        assert Schema.read(file) == schema
    assert [path.name for path in tmp_path.iterdir()] == ["schema.toml"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("format = 1", "format = 2", "format = 2, but this version"),
        ("positive", "positiv", "'positiv' is unknown; did you mean 'positive'"),
        ('kind = "boolean"', 'kind = "truth"', "kind = 'truth' is unknown"),
        ('kind = "boolean"', 'knd = "boolean"', "'knd' is unknown; did you mean 'kind'"),
        ('target = "y"', "target = 3", "target must be text"),
        ('classes = ["0", "1"]', 'classes = ["1"]', "two values"),
        ('classes = ["0", "1"]', 'classes = ["0", "1", "1"]', "lists '1' twice"),
        ('positive = "1"', 'positive = "2"', "'2' is not among the classes"),
        ('sensitive = ["sex"]', 'sensitive = ["y"]', "cannot be a sensitive column as well"),
        ("pooled = true", 'pooled = "yes"', "pooled must be true or false"),
        ("format = 1", "format = ", "no valid TOML"),
        ('target = "y"', 'target = "n"', "'n' is the target"),
        ('values = ["no", "yes"]', 'values = ["no"]', "the words for false and for true"),
        ("format = 1", "format = 1\nx = " + "[" * 5000, "no valid TOML"),
    ],
)
def test_faults_of_the_file_are_one_sentence(small, old, new, words, tmp_path):
    file = tmp_path / "schema.toml"
    content = small.text()
    assert old in content
    file.write_text(content.replace(old, new))
    with pytest.raises(ValueError, match=words) as caught:
        Schema.read(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_schema(tmp_path):
    file = tmp_path / "schema.toml"
    with pytest.raises(ValueError, match="There is no file"):
        Schema.read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        Schema.read(file)
    with pytest.raises(ValueError, match="cannot be written"):
        schema_of(sites()).write(tmp_path / "none" / "schema.toml")


columns = st.builds(
    Column, TEXT, st.just("category"), st.lists(TEXT, min_size=1, max_size=4, unique=True).map(tuple), st.booleans(),
    st.sampled_from(["flag", "plain", "refuse"]), st.lists(TEXT, max_size=2, unique=True).map(tuple), st.sampled_from(".,"),
    st.floats(allow_nan=False, allow_infinity=False), TEXT,
)  # fmt: skip


@given(
    st.lists(columns, min_size=1, max_size=3, unique_by=lambda one: one.name),
    st.lists(TEXT, min_size=6, max_size=6, unique=True),
)
def test_any_schema_comes_back(made, names):
    taken = {one.name for one in made}
    target, site, *rest = names
    if target in taken or site in taken:
        return
    schema = Schema(target, tuple(rest[:2]), rest[0], (rest[2],), tuple(rest), tuple(made), site, tuple(rest[:1]))
    assert Schema.parse(schema.text()) == schema


@given(st.data())
def test_any_edit_gives_a_schema_or_a_sentence(data):
    content = schema_of(sites(30)).text()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content)))
        length = data.draw(st.integers(0, 12))
        content = content[:place] + data.draw(st.text('=[]{}"\n.,#x1-:T\\\x00', max_size=5)) + content[place + length :]
    sentence = "."
    try:
        assert isinstance(Schema.parse(content), Schema)
    except ValueError as error:
        sentence = str(error)
    assert "\n" not in sentence


@given(
    st.lists(st.one_of(st.floats().map(repr), st.text("0123456789+-.eE,_ xnaif", max_size=8)), min_size=1, max_size=12)
)
def test_numbers_are_what_python_reads(cells):
    values, bad = numbers_of(pd.Series(cells, dtype=object), ".", frozenset(MISSING))
    for cell, value, wrong in zip(cells, values, bad, strict=True):
        if cell in MISSING:
            assert np.isnan(value)
            assert not wrong
            continue
        try:
            expected = float(cell) if "_" not in cell else np.nan
            expected = expected if abs(expected) <= 1e100 else np.nan
        except ValueError:
            expected = np.nan
        if np.isfinite(expected):
            np.testing.assert_allclose(value, expected, rtol=1e-15)
        assert wrong == (not np.isfinite(expected))


@settings(max_examples=40)
@given(st.data())
def test_any_cells_give_finite_features_or_a_sentence(data):
    words = st.one_of(
        st.sampled_from(["", "?", "1", "2.5", "1,5", "yes", "no", "a", "2020-01-01", "1e308", "inf"]), TEXT
    )
    rows = data.draw(st.integers(2, 30))
    frame = pd.DataFrame(
        {
            "y": data.draw(st.lists(st.sampled_from(["0", "1"]), min_size=rows, max_size=rows)),
            "sex": data.draw(st.lists(st.sampled_from(["f", "m"]), min_size=rows, max_size=rows)),
            "a": data.draw(st.lists(words, min_size=rows, max_size=rows)),
            "b": data.draw(st.lists(words, min_size=rows, max_size=rows)),
        },
        dtype=object,
    )
    sentence = "."
    try:
        schema = infer([frame], target="y", sensitive="sex", rare=1)
        features = encoder_of(schema, frame).transform(frame)
        assert features.shape == (rows, len(schema.feature_names))
        assert features.dtype == np.float32
        assert np.isfinite(features).all()
        assert Schema.parse(schema.text()) == schema
    except ValueError as error:
        sentence = str(error)
    assert "\n" not in sentence


def test_what_is_odd_about_one_table_in_the_light_of_a_schema(small):
    """At a real site there is one table and the schema that others made."""
    rng = np.random.default_rng(0)
    schema = dataclasses.replace(small, columns=tuple(dataclasses.replace(one, center=1.0) for one in small.columns))
    frame = pd.DataFrame(
        {
            "n": rng.uniform(0.5, 1.5, 100).round(3), "c": rng.choice(["a", "b"], 100), "d": rng.choice(["a", "b"], 100),
            "t": "no", "r": rng.uniform(0.5, 1.5, 100).round(3), "sex": rng.choice(["f", "m"], 100), "y": "0",
        }
    ).astype(object)  # fmt: skip
    assert misfits(schema, Table.of(frame.assign(y=["0", "1"] * 50))) == []
    odd = frame.assign(n=frame["n"] * 88.4, c="z", t="", r=frame["r"].where(frame.index > 4, -999))
    said = " ".join(misfits(schema, Table.of(odd)))
    for words in (
        "'y' has no row with '1' here", "'n' has another scale here: its median is", "'c' holds mostly values",
        "'t' is empty here", "'r' has -999 in 5 rows",
    ):  # fmt: skip
        assert words in said


def test_a_categorical_column_of_digits_is_a_category():
    codes = pd.Series(["1", "2", "3"] * 20)
    kinds = {
        dtype: learned_columns(pd.DataFrame({"code": codes.astype(dtype)}), named=True)[0].kind
        for dtype in ("category", "str")
    }
    assert kinds == {"category": "category", "str": "number"}
