"""docs/pictures.py draws the pictures of docs/guides/: the tokens that each token sees, by the definition."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from tests.support.oracles import dilated as dilated_oracle
from tests.support.processes.python import done_by

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs" / "pictures.py"
GUIDES = SCRIPT.parent / "guides"


@pytest.mark.slow
def test_every_picture_is_current_and_shown(tmp_path):
    done_by(SCRIPT, tmp_path / "new", JAX_PLATFORMS="cpu")
    written = {path.name: path.stat().st_size for path in (tmp_path / "new").iterdir()}
    assert set(written) == {path.name for path in GUIDES.glob("*.svg")}
    assert max(written.values()) < 60_000
    pages = "".join(page.read_text() for page in GUIDES.glob("*.md"))
    assert not [name for name in written if f'src="{name}"' not in pages]


def test_drawings_match_the_definition():
    pictures = runpy.run_path(str(SCRIPT))
    for name, (num_heads, arguments) in pictures["MODES"].items():
        got = pictures["seen"](pictures["TOKENS"], num_heads, **arguments)
        want = sum(x.astype(int) for x in dilated_oracle.sees(pictures["TOKENS"], num_heads, **arguments))
        np.testing.assert_array_equal(got, want, err_msg=name)
