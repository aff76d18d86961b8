"""The command line: a module for each group of verbs; options are declared once.

From outside: nothing; ``main.main`` is the program ``ssmzoo``.
"""
