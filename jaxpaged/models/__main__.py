"""`python -m jaxpaged.models` prints the README's table of models."""

from jaxpaged.models import models_table

print(models_table(), end="")
