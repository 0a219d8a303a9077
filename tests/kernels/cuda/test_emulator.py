from __future__ import annotations

import pytest

from tests.helpers.emulator import compile_library
from tests.helpers.hopper_prefill import missing_compiler


@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_emulators_do_not_share_their_variables() -> None:
    """Their headers have variables of the same names and other types."""
    text = 'namespace emulated { inline int blocks; } extern "C" int count() { return ++emulated::blocks; }'
    first, second = compile_library(text), compile_library(text + "\n")
    assert (first.count(), first.count(), second.count()) == (1, 2, 1)
