"""Conversations: their template, the tokens of their responses, and a cache of both."""
