"""Colours, markers and dashes: told apart by everybody, on either background."""

import itertools

import numpy as np
import pytest

from fedbilevel.report.charts import DARK, DASHES, LIGHT, MARKERS, SERIES, styles

# Machado, Oliveira & Fernandes (2009), full severity, for linear RGB.
SIGHT = {
    "usual": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
THEMES = {"light": (LIGHT, SERIES["light"]), "dark": (DARK, SERIES["dark"])}


def linear(colour):
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    light, dark = sorted((float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
AXES = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def oklab(rgb):
    return np.array(AXES) @ np.cbrt(np.array(CONES) @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_marks_stand_out(theme):
    colours, series = THEMES[theme]
    for text, ground in itertools.product(("ink", "soft", "accent"), ("page", "card")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["warn"], colours["warn-tint"]) >= 4.5
    assert contrast(colours["accent"], colours["tint"]) >= 4.5
    assert contrast(colours["ink"], colours["tint"]) >= 4.5
    assert min(contrast(colour, colours["card"]) for colour in series) >= 3


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", SIGHT)
def test_colours_differ_for_colour_blind_readers(theme, sight):
    seen = [oklab(np.array(SIGHT[sight]) @ linear(colour)) for colour in THEMES[theme][1]]
    nearest = min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2))
    assert nearest > 0.06  # a just noticeable difference is about 0.02


def test_usual_methods_look_the_same_on_every_page():
    few, all_of_them = styles(["FedAvg", "FedBiOAcc, cells"]), styles(["FedReg", "FedAvg", "FedBiOAcc, cells", "new"])
    assert few[0] == all_of_them[1]
    assert few[1] == all_of_them[2]
    assert styles(["FedBiO, paper"]) == styles(["FedBiO"])


def test_no_two_series_look_alike():
    names = [f"method {number}" for number in range(20)]
    given = styles(["FedBiO", "FedBiO, paper", *names])
    assert len({(style.slot, style.marker) for style in given}) == 22
    assert len({style.slot for style in given[:8]}) == 8
    assert len(DASHES) == len(MARKERS) == len(SERIES["light"]) == len(SERIES["dark"])
