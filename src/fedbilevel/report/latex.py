"""The main table for a paper: LaTeX with booktabs, in the layout of the paper's Table 1."""

from __future__ import annotations

import math

from fedbilevel.report.reading import WORDS, Block, Metric, Reading
from fedbilevel.report.scales import short, shown, shown_spread
from fedbilevel.report.summary import Estimate, Estimates

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "−": r"$-$",
}  # fmt: skip


def escaped(text: str) -> str:
    r"""Any text as LaTeX shows it.

    >>> escaped("50% of a_b & c")
    '50\\% of a\\_b \\& c'
    """
    return "".join(_SPECIAL.get(letter, letter) for letter in " ".join(text.split()))


def table(reading: Reading, estimates: Estimates) -> str:
    """Bodies by the first facet, side by side by the others; the printed figures below ours where there are any."""
    metrics, blocks = reading.main, reading.blocks
    sides = list(dict.fromkeys(block.key[1:] for block in blocks))
    rule = "% Needs \\usepackage{booktabs}. Mean and standard deviation over seeds."
    lines = [
        rule,
        "% Bold: best, beyond noise (paired by seed, Bonferroni 95 %). Underlined: best mean, not beyond noise.",
    ]
    lines += [rf"\begin{{tabular}}{{ll{'r' * (len(metrics) * len(sides))}}}", r"\toprule"]
    if any(sides):
        titles = [escaped(", ".join(WORDS.get(part, part) for part in side)) for side in sides]
        lines.append(
            " & & " + " & ".join(rf"\multicolumn{{{len(metrics)}}}{{c}}{{{title}}}" for title in titles) + r" \\"
        )
        ends = [(3 + place * len(metrics), 2 + (place + 1) * len(metrics)) for place in range(len(sides))]
        lines.append(" ".join(rf"\cmidrule(lr){{{first}-{last}}}" for first, last in ends))
    heads = [reading.word(reading.facets[0]), reading.word(reading.series), *(m.short for _ in sides for m in metrics)]
    lines.append(" & ".join(map(escaped, heads)) + r" \\")
    for first in dict.fromkeys(block.key[0] for block in blocks):
        lines.append(r"\midrule")
        beside = {block.key[1:]: block for block in blocks if block.key[0] == first}
        columns = [(beside.get(side), metric) for side in sides for metric in metrics]
        label = escaped(WORDS.get(first, first))
        for number, name in enumerate(reading.names):
            ours = [_number(estimates.at(block, number, metric)) if block else "" for block, metric in columns]
            if any(ours):
                lines.append(" & ".join([label, escaped(name), *ours]) + r" \\")
                label = ""
                printed = [_printed(reading, block, name, metric) for block, metric in columns]
                if any(printed):
                    lines.append(" & ".join(["", r"\quad\textit{in the paper}", *printed]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _number(told: Estimate | None) -> str:
    if told is None:
        return ""
    kind = told.metric.format
    text = escaped(shown(told.mean, kind))
    if math.isfinite(told.sd):
        text += rf"\,$\pm$\,{escaped(shown_spread(told.mean, told.sd, kind))}"
    return {"best": rf"\textbf{{{text}}}", "lead": rf"\underline{{{text}}}"}.get(told.verdict, text)


def _printed(reading: Reading, block: Block | None, name: str, metric: Metric) -> str:
    figure = reading.published(block, name, metric.column) if block is not None else None
    return "" if figure is None else rf"\textit{{{short(figure[0], 4)}\,$\pm$\,{short(figure[1], 4)}}}"
