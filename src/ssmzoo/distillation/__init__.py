"""Long filters replaced by filters of small order with a state.

From outside: ``distill.distill``, ``fit.fit_modal``, ``fit.fit_rational``.
"""
