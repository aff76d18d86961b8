"""What a run reads: documents, tokens, rows of tokens, labelled examples, tokenizers.

From outside: ``documents`` to read files, ``tokenizer.byte_tokenizer``.
"""
