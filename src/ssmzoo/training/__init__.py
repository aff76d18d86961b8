"""Train a model as a recipe says: data in, checkpoints and metrics out, on Accelerate.

From outside: ``run.train``, ``callbacks``.
"""
