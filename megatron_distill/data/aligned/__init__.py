"""Documents in the tokens of two tokenizers, aligned by bytes and packed by one plan."""
