"""The README's table of models is the registry."""

from pathlib import Path

import pytest

from jaxpaged.models import models_table

pytestmark = pytest.mark.jax

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- models: python -m jaxpaged.models -->\n", "<!-- end of models -->\n"


def test_the_readme_names_the_models_of_the_registry() -> None:
    """If not: put what `python -m jaxpaged.models` prints between the two comments."""
    _, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    table, end, _ = rest.partition(END)
    assert end
    assert table == models_table()
