"""Building blocks of models: NNX modules and pure functions over the flat token batch."""
