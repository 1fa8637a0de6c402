"""score_mods in the Hopper kernels, in the interpreter: see score_mod_cases. test_compile_features compiles them."""

import cases_interpreter
import pytest
import score_mod_cases
import tiers

QUICK = {"relative_64"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", tiers.groups(score_mod_cases.CASES, QUICK, 2))
def test_interpreted(names):
    cases_interpreter.check("score_mod_cases", 1, races=False, names=list(names))
