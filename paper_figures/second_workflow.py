"""A second workflow: SLO attainment on Trace 4 (Selector → Decomposer → Refiner) with a smaller model.

Reads `second_workflow`: Trace 4 with the Qwen3-30B profiles at 2.5 and 5.0 queries/s on three clusters.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hexrepro.report.figures import Curve, attainment_panels
from hexrepro.report.results import DEFAULTS, Results, where
from hexrepro.report.style import view_of

EXPERIMENT = "second_workflow"
TITLE = "A second workflow"
SEES = (
    "The line that rises further left is the better one; the numbers say where a heavy line passes 95 %. Here calls are "
    "short, prompts are short, and decoding decides."
)


def draw(results: Results) -> dict[str, Figure]:
    """A figure for each hardware view: a row of panels a rate, a column a cluster."""
    figures = {}
    for profile, caching in DEFAULTS:
        labels = {"profile": profile, "prefix_caching": caching, "tenant": "all"}
        curves = where(results["curves"], **labels)
        if len(curves):
            at_95 = where(results["summary"], metric="scale_at_95", **labels)
            figures[f"second_workflow_{profile}"] = _view(curves, at_95, view_of(profile, caching))
    return figures


def _view(curves, at_95, view: str) -> Figure:
    keys = ["cluster", "rate_qps", "policy"]
    scales = at_95.set_index(keys)["value"]
    panels: dict = {}
    for key, part in curves.groupby(keys, sort=False):
        cluster, rate, policy = key
        columns = (part[c].to_numpy(float) for c in ("scale", "attainment", "ci_low", "ci_high"))
        panels.setdefault((f"{rate:g} queries/s", cluster), {})[policy] = Curve(*columns, float(scales[key]))
    seeds = int(at_95["seeds"].max())
    title = f"Trace 4 with Qwen3-30B, {view}; mean and 95 % interval over {seeds} arrival seeds"
    return attainment_panels(panels, title=title)
