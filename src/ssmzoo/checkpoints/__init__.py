"""Saved models in folders and on the Hub: found, trusted or refused, loaded; and their weights.

From outside: ``load.load_model``, ``load.load_tokenizer``, ``weights.weights_revision``.
"""
