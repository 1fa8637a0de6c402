"""The release tool: reproducible archives, one version in all files, a README without relative links; and the files
around a release.
"""

import gzip
import importlib.util
import io
import re
import tarfile
from email.message import Message
from pathlib import Path

import pytest

import jax_kernels
from tests.tools import release

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FORMS = [path for path in TEMPLATES if path.name != "config.yml"]


def archive(names, mtime):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as target:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uid, info.uname = len(name), mtime, mtime, f"user{mtime}"
            target.addfile(info, io.BytesIO(name.encode()))
    return data.getvalue()


def test_normalized_sdists_are_equal():
    """Two archives that differ in order, times and owners become equal, with the same contents."""
    first, second = (
        release.normalized_sdist(archive(names, mtime), epoch=1000) for names, mtime in (("ab", 5), ("ba", 7))
    )
    assert first == second
    assert gzip.decompress(first) != gzip.decompress(release.normalized_sdist(archive("ab", 5), epoch=1001))
    with tarfile.open(fileobj=io.BytesIO(first)) as found:
        assert [(x.name, x.mtime, x.uid, x.uname) for x in found.getmembers()] == [
            ("a", 1000, 0, ""),
            ("b", 1000, 0, ""),
        ]
        assert found.extractfile("b").read() == b"b"


README = """![plot](a/plot.png) [page](docs/x.md#part), [far](https://x.org), [near](#part)

```python
x[0](path)
```
"""


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (None, " page, [far](https://x.org), [near](#part)"),
        (
            "https://h/r/",
            "![plot](https://h/r/a/plot.png) [page](https://h/r/docs/x.md#part), [far](https://x.org), [near](#part)",
        ),
    ],
)
def test_links_of_the_readme(source, want):
    first, code = release.readme_for_index(README, source).split("\n\n")
    assert first == want
    assert code == README.partition("\n\n")[2]


def test_all_files_have_one_version(tmp_path):
    assert set(release.versions(ROOT).values()) == {jax_kernels.__version__}
    for name in release.versions(ROOT):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text().replace(jax_kernels.__version__, "9.9.9"))
    assert set(release.versions(tmp_path).values()) == {"9.9.9"}
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    assert release.versions(tmp_path)["CHANGELOG.md"] is None


def test_metadata_is_checked():
    found = Message()
    for name in (
        "Summary",
        "Keywords",
        "License-Expression",
        "Classifier",
        "Requires-Python",
        "Description-Content-Type",
    ):
        found[name] = "x"
    found.set_payload("[x](https://x.org)")
    release.check_metadata(found)
    found.set_payload("[x](docs/x.md)")
    with pytest.raises(SystemExit, match=r"relative links.*docs/x\.md"):
        release.check_metadata(found)
    del found["Classifier"]
    with pytest.raises(SystemExit, match="no Classifier"):
        release.check_metadata(found)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="needs the package build")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository")
def test_two_builds_are_equal(tmp_path):
    """Builds of HEAD from two folders have the same bytes, and metadata for the package index."""
    builds = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        builds.append(release.build(tmp_path / name, release.exported(ROOT, tmp_path / name)))
    assert builds[0] == builds[1]
    (wheel,) = (data for name, data in builds[0].items() if name.endswith(".whl"))
    release.check_metadata(release.metadata(wheel))


def test_citation():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license"} <= set(found)
    assert (
        found["abstract"].rstrip(".")
        == release.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    )


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) >= 3
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    for name in re.findall(r"`(?:print\()?(jax_kernels|bridge)\.(\w+)", path.read_text()):
        module = pytest.importorskip("jax_kernels.bridge") if name[0] == "bridge" else jax_kernels
        assert hasattr(module, name[1])


def test_forms_exist():
    assert len(FORMS) == 3
