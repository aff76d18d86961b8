"""Find saved models in folders and on the Hub, trust or refuse them, load them and their weights.

The checkpoints of a training run are in ``ssmzoo.training.checkpoint``.

From outside: ``load.load_model``, ``load.load_tokenizer``, ``weights.weights_revision``.
"""
