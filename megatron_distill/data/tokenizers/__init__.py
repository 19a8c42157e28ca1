"""Tokenizers of Hugging Face, SentencePiece and tiktoken behind one protocol."""
