"""Sites that do not speak one language: what stops, what is said, the draft of a mapping, and where it is applied."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from fedbilevel.fairness.saving import FittedModel
from fedbilevel.tables.mapping import Mapping
from fedbilevel.tables.reading import open_table

ASKED = ["--target", "outcome", "--sensitive", "sex"]
QUICK = [*ASKED, "--steps", "10", "--weight-steps", "5", "--batch-size", "16", "--compare-with", "none"]


def patients(seed, rows=120):
    """One site of a hospital, in the common language: a fifth of the rows is positive."""
    rng = np.random.default_rng(seed)
    creatinine = rng.uniform(0.6, 1.4, rows).round(2)
    return pd.DataFrame(
        {
            "age": rng.integers(30, 80, rows),
            "creatinine": creatinine,
            "smoker": rng.choice(["no", "yes"], rows),
            "admitted": [f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(rows)],
            "sex": rng.choice(["F", "M"], rows),
            "outcome": np.where(creatinine + 0.1 * rng.normal(size=rows) > 1.2, "Yes", "No"),
        }
    ).astype(object)


@pytest.fixture
def sites(tmp_path):
    """Write three sites, the tables of some changed; the files."""

    def write(**changes):
        files = []
        for seed, name in enumerate(("north", "south", "east")):
            table = patients(seed)
            files.append(tmp_path / f"{name}.csv")
            changes.get(name, lambda table: table)(table).to_csv(files[-1], index=False)
        return files

    return write


def recoded(**columns):
    return lambda table: table.assign(
        **{name: table[name].map(lambda v, m=m: m.get(v, v)) for name, m in columns.items()}
    )


LOWER = recoded(outcome={"Yes": "yes", "No": "no"})
DIGITS = recoded(outcome={"Yes": "1", "No": "0"})
WORDS = recoded(sex={"F": "female", "M": "male"})


def coded(table):
    return table.assign(creatinine=table["creatinine"].where(table.index % 10 != 0, -999))


def day_first(table):
    return table.assign(admitted=[f"{1 + i % 28}/{1 + i % 12}/2024" for i in range(len(table))])


def month_first(table):
    return table.assign(admitted=[f"{1 + i % 12}/{1 + i % 28}/2024" for i in range(len(table))])


CONTRADICTIONS = {
    "labels": (
        {"south": LOWER, "east": DIGITS},
        "The target 'outcome' is spelled differently: north has 'No', 'Yes'; south has 'no', 'yes'; east has '0', '1'",
    ),
    "no positives": (
        {"south": recoded(outcome={"Yes": "No"})},
        "The target 'outcome' has no row with 'Yes' at south ('No')",
    ),
    "other labels": (
        {"south": recoded(outcome={"Yes": "ill", "No": "well"})},
        "The target 'outcome' has 'ill', 'well' at south, and 'No', 'Yes' elsewhere",
    ),
    "groups": (
        {"east": WORDS},
        "The sensitive column 'sex' is spelled differently: north has 'F', 'M'; south has 'F', 'M'; east has 'female', 'male'",
    ),
    "other groups": (
        {"east": recoded(sex={"F": "K", "M": "V"})},
        "The sensitive column 'sex' has 'K', 'V' at east, and 'F', 'M' elsewhere",
    ),
    "yes and 1": (
        {"east": recoded(smoker={"yes": "1", "no": "0"})},
        "The column 'smoker' is spelled differently",
    ),
    "text": (
        {"east": lambda table: table.assign(age=np.where(table["age"] > 50, "old", "young"))},
        "The column 'age' holds numbers at north",
    ),
    "units": (
        {"south": lambda table: table.assign(creatinine=(table["creatinine"] * 88.42).astype(float).round(1))},
        "The column 'creatinine' has another scale at south: its median is",
    ),
    "extra column": (
        {"north": lambda table: table.assign(ward="A")},
        "north has the column 'ward', but south and east have not",
    ),
    "another name": (
        {"north": lambda table: table.rename(columns={"sex": "Gender"})},
        "The column 'sex' is called 'Gender' at north",
    ),
    "dates": (
        {"south": day_first, "east": month_first},
        "The dates of 'admitted' are written dmy at south, mdy at east",
    ),
}
SETTLED = ("labels", "groups", "yes and 1", "extra column", "another name", "dates")
"""What the draft settles by itself; the rest is for a person to decide."""


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_stop_and_the_draft_settles_what_is_obvious(case, call, refused, sites, tmp_path):
    changes, words = CONTRADICTIONS[case]
    files = sites(**changes)
    draft = tmp_path / "mapping.toml"
    for command in (
        ["schema", *files, *ASKED],
        ["fit", *files, *ASKED, "--positive", "Yes", "--out", tmp_path / "run"],
    ):
        refused(call(*command), words)
    assert not (tmp_path / "run").exists()
    said = call("schema", *files, *ASKED, "--propose", draft)
    if case in SETTLED:
        assert (said.code, said.err) == (0, "")
        assert "mapped" in said.out
        assert call("schema", *files, *ASKED, "--mapping", draft).code == 0
    else:
        refused(said, "for you to decide: ")
        assert words in draft.read_text()
        column = next(name for name in ("outcome", "sex", "age", "creatinine") if f"'{name}'" in words)
        draft.write_text(draft.read_text().replace("checked = []", f'checked = ["{column}"]'))
        assert call("schema", *files, *ASKED, "--mapping", draft, "--positive", "Yes").code == 0


def test_a_draft_applied_as_it_is_gives_the_model_of_tables_that_agreed(call, sites, tmp_path):
    mapping, run = tmp_path / "mapping.toml", tmp_path / "run"
    plain = sites()
    assert call("fit", *plain, *QUICK, "--out", tmp_path / "plain").code == 0
    new = patients(9).head(5).drop(columns="outcome")
    files = sites(south=LOWER, east=lambda table: DIGITS(WORDS(table)))
    assert call("schema", *files, *ASKED, "--propose", mapping).code == 0
    said = call("fit", *files, *QUICK, "--mapping", mapping, "--out", run, "--json")
    assert said.code == 0, said.err
    models = [FittedModel.read(home / "models" / "fedpath.npz") for home in (run, tmp_path / "plain")]
    np.testing.assert_array_equal(*(model.params for model in models))
    assert models[0].schema == models[1].schema
    kept = Mapping.read(run / "mapping.toml")
    assert kept == Mapping.read(mapping)
    assert kept.sites["east"].columns["outcome"].values == {"0": "No", "1": "Yes"}
    changes = pd.read_csv(run / "mapping.csv")
    assert ("east", "sex", "'female' is 'F'") in changes.itertuples(index=False, name=None)
    assert "&#39;female&#39; is &#39;F&#39;" in (run / "page.html").read_text()
    # Another mapping is another run.
    said = call("fit", *files, *QUICK, "--mapping", mapping, "--out", tmp_path / "plain")
    assert said.code == 2

    # Predictions read the mapping of the run folder.
    smokers = recoded(smoker={"yes": "1", "no": "0"})
    (tmp_path / "rows.csv").write_text(smokers(new).to_csv(index=False))
    (tmp_path / "common.csv").write_text(new.to_csv(index=False))
    mapping.write_text(
        mapping.read_text().replace(
            "[sites.east.columns.outcome]",
            '[sites.east.columns.smoker]\nvalues = {1 = "yes", 0 = "no"}\n\n[sites.east.columns.outcome]',
        )
    )
    common = call("predict", run, tmp_path / "common.csv")
    assert "no site of the mapping is called 'common'" in common.err
    mapped = call("predict", run, tmp_path / "rows.csv", "--mapping", mapping, "--site", "east")
    assert (mapped.code, mapped.out) == (0, common.out)
    assert "called" not in mapped.err


def test_a_schema_that_lists_every_spelling_does_not_help(call, refused, sites, tmp_path):
    """Two of three sites would have no positives."""
    out = tmp_path / "schema.toml"
    assert call("schema", *sites(), *ASKED, "--out", out).code == 0
    out.write_text(out.read_text().replace('["No", "Yes"]', '["No", "Yes", "no", "yes", "0", "1"]'))
    files = sites(south=LOWER, east=DIGITS)
    refused(call("fit", *files, "--schema", out, "--out", tmp_path / "run", "--quiet"), "is spelled differently")


def test_what_is_only_odd_is_a_warning(call, sites, tmp_path):
    files = sites(
        north=coded, south=lambda table: table.assign(smoker="").assign(age=table["age"].where(table.index > 2, 431))
    )
    said = call("fit", *files, *QUICK, "--out", tmp_path / "run", "--json")
    notes = json.loads(said.out)["notes"]
    assert (
        "The column 'creatinine' has -999 in 12 rows at north, far from all other values; it looks like a code for missing."
        in notes
    )
    assert "The column 'age' has 431 in 3 rows at south, far from all other values." in notes
    assert "The column 'smoker' is empty at south." in notes
    draft = tmp_path / "mapping.toml"
    assert call("schema", *files, *ASKED, "--propose", draft).code == 0
    assert Mapping.read(draft).sites["north"].columns["creatinine"].missing == ("-999",)
    assert '# missing = ["431"]' in draft.read_text()
    notes = json.loads(call("schema", *files, *ASKED, "--mapping", draft, "--json").out)["warnings"]
    assert not any("-999" in note for note in notes)


def test_small_sites_may_lack_a_class(call, sites):
    """Ten rows without a positive are nothing odd where a fifth is positive."""
    files = sites(south=lambda table: table[table["outcome"] == "No"].head(10))
    assert call("schema", *files, *ASKED).code == 0


def test_one_file_with_a_site_column(call, refused, tmp_path):
    """Sites are compared, and rows mapped, by that column."""
    tables = [patients(0).assign(site="north"), LOWER(patients(1)).assign(site="south")]
    file, draft = tmp_path / "all.csv", tmp_path / "mapping.toml"
    pd.concat(tables).to_csv(file, index=False)
    asked = [*ASKED, "--site", "site"]
    refused(call("schema", file, *asked), "north has 'No', 'Yes'; south has 'no', 'yes'")
    assert call("schema", file, *asked, "--propose", draft).code == 0
    shown = ["--minimum-cell", "1", "--json"]
    said = call("fit", file, *QUICK, "--site", "site", "--mapping", draft, "--out", tmp_path / "run", *shown)
    assert said.code == 0, said.err
    (mapped,) = Mapping.read(draft).applied([open_table(file)], "site")
    frame = pd.concat(mapped.chunks())
    for name, table in zip(("north", "south"), tables, strict=True):
        assert frame.loc[frame["site"] == name, "outcome"].tolist() == table["outcome"].str.capitalize().tolist()
    draft.write_text(draft.read_text().replace("checked = []", '[sites.south]\nleave_out = ["age"]'))
    refused(call("schema", file, *asked, "--mapping", draft), "all sites share one file: do that in [all]")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("format = 2", "reads format 1"),
        ("format = 1\n[sites.nort]", "a section for the site 'nort', which is none of them; did you mean 'north'?"),
        ("format = 1\n[site.north]", "'site' is unknown; did you mean 'sites'?"),
        ("format = 1\n[sites.north]\nrenam = {}", "[sites.north] 'renam' is unknown; did you mean 'rename'?"),
        ('format = 1\n[sites.north]\nrename = {ages = "x"}', "there is no column 'ages'; did you mean 'age'?"),
        ("format = 1\n[sites.north.columns.creatinin]\nfactor = 2", "did you mean 'creatinine'?"),
        ("format = 1\n[all.columns.age]\nfactor = 0", "factor must not be 0"),
        ('format = 1\n[all.columns.age]\nfactor = "2"', "factor must be a number, not '2'"),
        ('format = 1\n[all.columns.admitted]\ndates = "ydm"', "write 'dmy' or 'mdy'"),
        ("format = 1\n[all]\nleave_out = [[]]", "all.leave_out must hold texts"),
        ("format = [", "is no valid TOML"),
        (None, "There is no file"),
    ],
)  # fmt: skip
def test_a_bad_mapping_is_one_sentence(text, words, call, refused, sites, tmp_path):
    file = tmp_path / "bad.toml"
    if text is not None:
        file.write_text(text)
    refused(call("schema", *sites(), *ASKED, "--mapping", file), words)


def test_units_missing_codes_and_dates(call, sites, tmp_path):
    """Cells of a site that measures in other units become those of the common language, to rounding."""

    def other(table):
        return table.assign(
            creatinine=(table["creatinine"] * 88.42).where(table.index > 4, -999),
            admitted=pd.to_datetime(table["admitted"]).dt.strftime("%m/%d/%Y"),
        )

    files = sites(south=other)
    mapping = tmp_path / "mapping.toml"
    mapping.write_text(
        "format = 1\n[sites.south.columns.creatinine]\nmissing = [-999]\nfactor = 0.01130966\n"
        '[sites.south.columns.admitted]\ndates = "mdy"\n'
    )
    out = tmp_path / "schema.toml"
    assert call("schema", *files, *ASKED, "--mapping", mapping, "--out", out).code == 0
    (south,) = [t for t in Mapping.read(mapping).applied([open_table(f) for f in files]) if t.path.stem == "south"]
    frame = pd.concat(south.chunks(["creatinine", "admitted"]))
    assert frame["admitted"].tolist() == patients(1)["admitted"].tolist()
    assert frame["creatinine"].isna().sum() == 5
    np.testing.assert_allclose(
        frame["creatinine"][5:].astype(float), patients(1)["creatinine"][5:].astype(float), rtol=1e-5
    )
