"""score_mods in the Hopper kernels, in the interpreter: see score_mod_cases. test_compile_features compiles them."""

import itertools

import cases_interpreter
import pytest
import score_mod_cases

# Cases of one process, which takes as long to start as a case.
GROUPS = list(itertools.batched(score_mod_cases.CASES, 3))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_interpreted(names):
    cases_interpreter.check("score_mod_cases", 1, races=False, names=list(names))
