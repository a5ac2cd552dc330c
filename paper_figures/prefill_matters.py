"""What the gain hangs on: HexGen-Flow's gain over vLLM against the share of every prompt that is cached.

Reads `prefill_matters`: the share goes from 0 (every prompt computed in full) to 1 (prompts cost next to nothing).
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hexrepro.report.charts import bands, label_ends
from hexrepro.report.claims import over_vllm
from hexrepro.report.results import Results, where
from hexrepro.report.style import PAGE_IN, SHADES, drawing, empty, headline, name_of

EXPERIMENT = "prefill_matters"
TITLE = "Prefill decides the gain"
SEES = (
    "The line at 1 is no gain. What is left at the right end comes from decoding and memory alone. The arrival rate stays, so "
    "the load falls as more is cached."
)


def draw(results: Results) -> Figure:
    """A panel for each hardware view and cluster, a line for each trace and rate."""
    rows = over_vllm(results["summary"], "p95_s")
    rows = rows.assign(
        setting=[f"{name_of(t)}, {r:g}/s" for t, r in zip(rows["trace"], rows["rate_qps"], strict=True)],
        share=100 * rows["cached_share"],
    )
    settings = list(dict.fromkeys(rows["setting"]))
    looks = {s: (SHADES[i % len(SHADES)], "--" if i >= len(SHADES) else "-") for i, s in enumerate(settings)}
    profiles, clusters = (list(dict.fromkeys(rows[c])) for c in ("profile", "cluster"))
    with drawing(PAGE_IN, 0.6 + 2.0 * len(profiles), len(profiles), len(clusters), sharex=True) as (
        figure,
        axes,
    ):
        for i, profile in enumerate(profiles):
            for j, cluster in enumerate(clusters):
                ax = axes[i, j]
                here = where(rows, profile=profile, cluster=cluster)
                if here.empty:
                    empty(ax)
                    continue
                ends = bands(ax, here, "share", "setting", looks=looks, strong=(), marker="o")
                ax.axhline(1, color="0.4", lw=0.7, zorder=0)
                ax.set_title(f"{name_of(cluster)}, {profile} step times")
                ax.set_xlim(-2, 102)
                if i == len(profiles) - 1:
                    ax.set_xlabel("share of the prompt that is cached (%)")
                if j == 0:
                    ax.set_ylabel("P95: vLLM's / HexGen-Flow's")
                label_ends(ax, ends, looks=looks)
        headline(figure, "Gain of HexGen-Flow over vLLM, seeds paired; 95 % intervals")
    return figure
