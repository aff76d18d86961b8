"""Model cards, folders and repositories on the Hub, standalone code, kernel repositories.

From outside: ``card.render_card``, ``hub.publish``, ``export_code.export_code``.
"""
