"""Read a run's data: documents, tokens, rows of tokens, labelled examples, tokenizers.

``sources`` gives a recipe's data to a trainer, the same at any number of processes and resumes.
From outside also: ``readers`` and ``paths`` to read files, ``tokenizer.byte_tokenizer``.
"""
