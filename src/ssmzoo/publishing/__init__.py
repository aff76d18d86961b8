"""Write model cards, publish to folders and the Hub, export standalone code and kernels.

From outside: ``card.render_card``, ``hub.publish``, ``export_code.export_code``.
"""
