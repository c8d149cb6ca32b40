"""The figures of a run's page, each as a `Chart`; a figure whose numbers the run does not hold is left out."""

from __future__ import annotations

from collections.abc import Callable

from fedbilevel.report.charts import Chart
from fedbilevel.report.page.groups import rates, weights
from fedbilevel.report.page.plane import differences, plane
from fedbilevel.report.page.progress import convergence, costs
from fedbilevel.report.reading import Study


def figures(study: Study) -> list[Chart]:
    """All figures of the page, in its order."""
    makers: tuple[Callable[[Study], Chart | None], ...] = (plane, differences, rates, weights, convergence, costs)
    return [chart for chart in (make(study) for make in makers) if chart is not None]
