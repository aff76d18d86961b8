"""Turn a saved model into files for people who have neither the run nor this checkout.

These are its card, a publication in a folder or on the Hub, code that loads without ssmzoo, graphs
without Python, and the ops as a kernel repository.

From outside: ``card.render_card``, ``hub.publish``, ``export_code.export_code``,
``export_graphs.export_onnx`` and ``export_program``.
"""
