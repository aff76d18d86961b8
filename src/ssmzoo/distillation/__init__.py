"""Replace long filters by recurrences of small order.

From outside: ``distill.distill``, ``fit.fit_modal``, ``fit.fit_rational``.
"""
