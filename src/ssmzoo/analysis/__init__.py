"""Look at models and machines: inspect, doctor, describe, bench, and the recall ledger.

From outside: ``inspect_model``, ``examine_model``, ``describe``, ``bench``, ``recall``.
"""
