"""The command line: ``main.main`` is the program ``ssmzoo``, and nothing else is used from outside.

The docstrings of ``models``, ``training``, ``scoring``, ``publishing`` and ``machine`` name the
commands that they hold; ``options`` declares all options. ``demo`` is ``make demo``, ``zoo`` is
``make zoo`` and ``make small``; ``stages`` has what both do.
"""
