"""Text of the Long Range Arena: is a film review good or bad, read character by character?"""

from __future__ import annotations

from ssmzoo.tasks import data_sets
from ssmzoo.tasks.common import at_least
from ssmzoo.tasks.data_sets import Characters, class_labels, open_split, texts
from ssmzoo.tasks.supervised import Ragged, Supervised, token_rows


def load_imdb(
    split: str,
    seed: int,
    *,
    data: str = "stanfordnlp/imdb",
    max_length: int = 2048,
    min_frequency: int = 15,
    hold_out: float = 0.1,
) -> Supervised:
    """Return IMDB reviews as characters.

    The vocabulary is that of all training reviews. Which reviews are held out never changes.

    Args:
        data: A Hub id or a folder with the splits train and test, columns ``text`` and ``label``.
        max_length: Characters that are read, the end of the text counted. The RTF paper has 4096.
        min_frequency: Rarer characters are unknown.
        hold_out: Share of the training reviews for validation; 0 validates on the test reviews, as
            the papers do.

    Raises:
        LookupError: No such data.
        ValueError: An argument is out of range.
    """
    at_least("max_length", max_length, 1)
    if not 0 <= hold_out < 1:
        raise ValueError(f"hold_out must be at least 0 and below 1, got {hold_out}")
    columns = ("text", "label")
    train = open_split("imdb", data, "train", columns)
    characters = Characters(texts(train, "text"), min_frequency=min_frequency)
    if split == "test" or (split == "validation" and not hold_out):
        rows = open_split("imdb", data, "test", columns)
    else:
        count = round(hold_out * len(train))
        rows = data_sets.hold_out(train, split, count, "hold_out") if hold_out else train
    tokens = Ragged.of([characters.encode(text, max_length) for text in texts(rows, "text")])
    labels = class_labels(data, rows, "label", 2)
    return token_rows(
        tokens, labels, vocab_size=characters.vocab_size, label_names=("negative", "positive")
    )
