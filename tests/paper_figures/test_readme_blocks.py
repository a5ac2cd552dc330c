"""Blocks of a page are rewritten, and nothing beside them."""

from __future__ import annotations

import pytest

from paper_figures.readme import replace

PAGE = "before\n<!-- one -->\n{}<!-- end -->\nbetween\n<!-- two -->\nkept\n<!-- end -->\nafter\n"


@pytest.mark.parametrize("old", ["", "old\n", "| a |\n| b |\n"])
def test_a_block_is_replaced_whether_or_not_it_was_empty(old):
    assert replace(PAGE.format(old), "one", "new") == PAGE.format("new\n")


def test_a_block_that_is_not_there():
    with pytest.raises(SystemExit, match="no block 'three'"):
        replace(PAGE.format(""), "three", "new")
