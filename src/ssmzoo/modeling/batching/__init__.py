"""Continuous batching: many requests at once, behind transformers' own door.

``model.generate_batch``, ``continuous_batching_context_manager`` and ``transformers serve
--continuous-batching`` are transformers'; here is what they find in place of pages of attention.
"""
