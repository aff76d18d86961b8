"""Examine models and machines: inspect, doctor, describe, bench, and sweeps of small models.

From outside: ``inspect_model``, ``examine_model``, ``describe``, ``bench``, ``sweep``.
"""
