"""Read the machine and environment that a figure depends on; let no secret or path out of it.

Device, versions and variables; marked credentials and local paths, struck out of texts; the
Hub's rules for a card; parts of error messages.

From outside: ``hardware.usable_device``, ``portable.portable``, ``messages.first_line``.
"""
