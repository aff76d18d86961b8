"""The device and the versions, what may leave this machine, and how much libraries say on it.

From outside: ``hardware.usable_device``, ``portable.portable``, ``messages.first_line``.
"""
