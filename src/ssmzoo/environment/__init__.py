"""The machine that a figure depends on, what may leave it, and how much libraries say on it.

From outside: ``hardware.environment``, ``portable.portable``, ``messages.first_line``.
"""
