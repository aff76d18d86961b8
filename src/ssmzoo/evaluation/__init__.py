"""Score models with lm-eval, write the scores to results files, and generate text.

From outside: ``evaluate.evaluate``, ``generate.generate``, ``results.read_results``.
"""
