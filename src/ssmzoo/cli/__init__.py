"""The command line: ``main.main`` is the program ``ssmzoo``, and nothing else is used from outside.

``models``, ``training``, ``scoring``, ``publishing`` and ``machine`` hold the commands that their
docstrings name; ``options`` declares the options that several commands share.
"""
