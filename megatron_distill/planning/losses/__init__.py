"""The losses in a plan beside those of the plain heads: between tokenizers, and between layers."""
