"""The picture of measured against simulated: one can tell whose curve is whose."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import rgb_to_hsv, to_rgb

from hexrepro.report.agreement import agreement_figure

POLICIES = ("hexgen_flow", "fixed", "vllm")


def test_both_curves_of_a_policy_are_shades_of_its_colour() -> None:
    rows = [
        dict(load="light", rate_qps=1.0, policy=policy, measured_s=1.0 + i + q, measured_sd_s=0.1)
        | dict(simulated_s=1.1 + i + q, simulated_sd_s=0.1)
        for i, policy in enumerate(POLICIES)
        for q in range(4)
    ]
    figure = agreement_figure(pd.DataFrame(rows), title="made up")
    curves = figure.axes[1].lines
    assert len(curves) == 2 * len(POLICIES)
    assert len({to_rgb(curve.get_color()) for curve in curves}) == len(curves)
    for i, (measured, simulated) in enumerate(zip(curves[::2], curves[1::2], strict=True)):
        assert np.array_equal(measured.get_xdata(), 1.0 + i + np.arange(4))
        assert np.array_equal(simulated.get_xdata(), 1.1 + i + np.arange(4))
        assert (measured.get_linestyle(), simulated.get_linestyle()) == ("-", "--")
        assert measured.get_linewidth() > 2 * simulated.get_linewidth()
        assert measured.get_zorder() < simulated.get_zorder()
        light, dark = (rgb_to_hsv(to_rgb(curve.get_color())) for curve in (measured, simulated))
        assert abs(light[0] - dark[0]) < 0.01  # one hue
        assert dark[2] < light[2]
