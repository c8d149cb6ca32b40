"""The main table for a paper: LaTeX with booktabs, in the layout of the paper's Table 1."""

from __future__ import annotations

import numpy as np

from fedbilevel.report.reading import WORDS, Case, Metric, Study
from fedbilevel.report.scales import short, shown, shown_spread
from fedbilevel.report.summary import Cell, cells

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


def latex_table(study: Study) -> str:
    """Blocks by the first facet, side by side by the others; the printed figures below ours where there are any."""
    columns = study.main
    found = cells(study, columns)
    blocks = list(dict.fromkeys(case.key[0] for case in study.cases))
    sides = list(dict.fromkeys(case.key[1:] for case in study.cases))
    spec = "ll" + "r" * (len(columns) * len(sides))
    heads = [rf"\multicolumn{{{len(columns)}}}{{c}}{{{escaped(_title(side))}}}" for side in sides]
    rules = [
        rf"\cmidrule(lr){{{3 + place * len(columns)}-{2 + (place + 1) * len(columns)}}}" for place in range(len(sides))
    ]
    names = [escaped(metric.short) for _ in sides for metric in columns]
    lines = [
        "% Needs \\usepackage{booktabs}. Mean and standard deviation over seeds.",
        "% Bold: best, beyond noise (paired by seed, Bonferroni 95 %). Underlined: best mean, not beyond noise.",
        rf"\begin{{tabular}}{{{spec}}}",
        r"\toprule",
    ]
    if any(side for side in sides):
        lines += [" & & " + " & ".join(heads) + r" \\", " ".join(rules)]
    first = [escaped(study.word(study.facets[0])), escaped(study.word(study.series))]
    lines += [" & ".join([*first, *names]) + r" \\"]
    for block in blocks:
        lines.append(r"\midrule")
        cases = {case.key[1:]: case for case in study.cases if case.key[0] == block}
        label = escaped(WORDS.get(block, block))
        for number, name in enumerate(study.names):
            own = [_at(found, cases.get(side), number, metric) for side in sides for metric in columns]
            if not any(own):
                continue
            lines.append(" & ".join([label, escaped(name), *own]) + r" \\")
            label = ""
            printed = [_printed(study, cases.get(side), name, metric) for side in sides for metric in columns]
            if any(printed):
                lines.append(" & ".join(["", r"\quad\textit{in the paper}", *printed]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _title(side: tuple[str, ...]) -> str:
    return ", ".join(WORDS.get(part, part) for part in side)


def _at(found: dict[tuple[int, int, str], Cell], case: Case | None, number: int, metric: Metric) -> str:
    cell = found.get((case.number, number, metric.column)) if case is not None else None
    if cell is None:
        return ""
    text = _number(cell.mean, metric.format)
    if np.isfinite(cell.sd):
        text += rf"\,$\pm$\,{escaped(shown_spread(cell.mean, cell.sd, metric.format))}"
    return {"best": rf"\textbf{{{text}}}", "lead": rf"\underline{{{text}}}"}.get(cell.verdict, text)


def _printed(study: Study, case: Case | None, name: str, metric: Metric) -> str:
    figure = study.published(case, name, metric.column) if case is not None else None
    return "" if figure is None else rf"\textit{{{short(figure[0], 4)}\,$\pm$\,{short(figure[1], 4)}}}"


def _number(value: float, kind: str) -> str:
    return escaped(shown(value, kind).replace("\u00a0", " "))
