"""Score models with lm-eval, keep the scores in results files, and continue prompts.

From outside: ``evaluate.evaluate``, ``generate.generate``, ``results.read_results``.
"""
