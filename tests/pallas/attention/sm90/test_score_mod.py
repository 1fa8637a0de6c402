"""score_mods in the Hopper kernels, in the interpreter: see score_mod_cases. test_compile_features compiles them."""

import pytest

from tests.support.cases import score_mods as score_mod_cases
from tests.support.cases import tiers
from tests.support.interpreters import kernels as cases_interpreter

QUICK = {"relative_64"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", tiers.groups(score_mod_cases.CASES, QUICK, 2))
def test_interpreted(names):
    cases_interpreter.check("tests.support.cases.score_mods", 1, races=False, names=list(names))
