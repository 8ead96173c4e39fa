"""How to install an extra is said in one place, and that is true for a clone without a release."""

import re
from pathlib import Path

import pytest

from millstream.cli.config_file import require_modules
from millstream.errors import ConfigError, install_hint

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]


def test_a_missing_module_is_installed_from_the_clone() -> None:
    with pytest.raises(ConfigError, match=r"needs no_such_module, .* in your clone .*: pip install '\.\[serve\]'$"):
        require_modules("serve", "no_such_module")


def test_no_other_text_says_how_to_install() -> None:
    texts = [path for path in (ROOT / "src").rglob("*.py") if "pip install" in path.read_text()]
    # The doctor prints how other packages are installed into the Python that runs; so does a starter project's README.
    others = {"machine_checks.py", "starter_project.py"}
    assert {path.name for path in texts} == {"errors.py", *others}
    assert [path.name for path in texts if path.name in others and "millstream[" in path.read_text()] == []


def test_no_page_installs_millstream_from_a_package_index() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    assert [path.name for path in pages if re.search(r"pip install ['\"]?millstream", path.read_text())] == []


def test_the_extras_of_the_page_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", project.partition("\n[")[0], re.M)) - {"dev", "docs"}
    page = (ROOT / "docs/start/install.md").read_text()
    assert set(re.findall(r"^\| `pip install '\.\[(\w+)\]'`", page, re.M)) == extras
    assert install_hint("spark").endswith("pip install '.[spark]'")
