"""``fedbilevel bench`` as a user meets it: a real process, exit codes, folders and what is printed."""

import json

import pytest

SMALL = ["--tasks", "quadratic", "--algorithms", "fedbio-global", "--seeds", "2", "--budget", "1", "--rounds", "8"]


def test_help_has_an_example_and_names_every_choice_without_jax(imported):
    from fedbilevel.studies.bench import ENTRIES, TASKS

    said, modules = imported("bench", "--help")
    assert "fedbilevel bench --tasks" in said
    text = "".join(said.split())  # lines may be broken behind a hyphen
    assert not {name for name in (*TASKS, *ENTRIES) if f"{name}," not in text and f"{name};" not in text}
    assert not {"jax", "pandas", "sklearn", "matplotlib"} & modules


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tasks", "cifar"), "--tasks names 'cifar', which is unknown"),
        (("--algorithms", "sgd"), "--algorithms names 'sgd', which is unknown"),
        (("--tasks", "ridge", "--data", "."), "none of these tasks uses images"),
        (("--tasks", "cleaning", "--data", "nowhere"), "nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(call, refused, arguments, sentence, tmp_path):
    refused(call("bench", *arguments, "--out", tmp_path / "run"), sentence)
    assert not (tmp_path / "run" / "run.toml").exists()


def test_a_small_bench_its_folder_its_page_and_the_same_again(process, call, tmp_path):
    out = tmp_path / "run"
    done = process("bench", *SMALL, "--out", str(out))
    assert done.code == 0, done.err
    assert "Ranking by bytes" in done.out
    assert "FedBiO, global" in done.out
    assert "1/1, done" in done.err
    again = call("bench", *SMALL, "--out", str(out), "--json")
    told = json.loads(again.out)
    assert {row["method"] for row in told["scores"]} == {"FedBiO, global"}
    assert told["configuration"]["budget"] == 1
    assert told["folder"] == str(out)
    page = call("report", str(out))
    assert page.code == 0, page.err
    html = (out / "page.html").read_text()
    assert "Ranking by bytes to a target" in html
    assert "FedBiO, global" in html
