"""Read what a run trains on: documents, tokens, rows of tokens, labelled examples, tokenizers.

From outside: ``documents`` to read files, ``tokenizer.byte_tokenizer``.
"""
