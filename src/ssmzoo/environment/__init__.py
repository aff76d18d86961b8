"""The device, package versions, removal of paths and credentials, quieter libraries.

From outside: ``hardware.usable_device``, ``portable.portable``, ``messages.first_line``.
"""
