"""The notebooks as tests: run from top to bottom (by nbmake) on few seeds, without touching the user's cache of results."""

from __future__ import annotations

import tempfile

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """What a notebook's kernel inherits while it runs. (The hook is called for every test of a session.)"""
    if item.path.suffix != ".ipynb":
        return (yield)
    from hexrepro.compiled import numba  # has chosen the place of the compiled code

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as cache:
        patch.setenv("HEXREPRO_NOTEBOOK_SEEDS", "2")
        patch.setenv("NUMBA_CACHE_DIR", numba.config.CACHE_DIR)
        patch.setenv("HEXREPRO_CACHE", cache)
        return (yield)
