"""Write model cards, publish to folders and the Hub, export standalone code, graphs and kernels.

From outside: ``card.render_card``, ``hub.publish``, ``export_code.export_code``,
``export_graphs.export_onnx`` and ``export_program``.
"""
