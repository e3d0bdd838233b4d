"""From a model's name to arrays: where the files come from (`sources`), what is in them (`checkpoint`), and filling a model (`fill`)."""
