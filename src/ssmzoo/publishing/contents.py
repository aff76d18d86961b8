"""Choose and check the files of a publication.

The files are a closed list, by name: configuration, safetensors weights, tokenizer or image
processor, generation configuration, card, the pictures and the licence's text that the card links,
scores of benchmarks on the Hub, golden logits and, where asked for, the model's code and the state
of a prompt. All but weights are read once, so the bytes that were checked are those published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from urllib.parse import unquote

from ssmzoo.checkpoints.load import TOKENIZER_FILES
from ssmzoo.checkpoints.loader import AUTO_MAP, LOADER, is_loader
from ssmzoo.checkpoints.trust import refuse_requests
from ssmzoo.checkpoints.weights import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    OPTIMIZER,
    STATE,
    WEIGHTS_INDEX,
    is_state_adapter,
    listed,
    read_adapter_config,
    read_header,
    read_tensors,
    read_weights,
)
from ssmzoo.environment.credentials import credential_in_file, without_credentials
from ssmzoo.environment.hub_metadata import LICENSE_FILES
from ssmzoo.files import parse_json, parse_yaml

CARD = "README.md"
EVAL_RESULTS = ".eval_results"  # read by the Hub's leaderboards
ENTRIES = f"{EVAL_RESULTS}/ssmzoo.yaml"  # ours there

_NAMES = {
    CARD,
    ENTRIES,
    WEIGHTS_INDEX,
    ADAPTER_CONFIG,
    *TOKENIZER_FILES,
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
}
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"}
_CODE = {".py", ".pyc", ".so", ".sh", ".ipynb"}
_PICTURES = {".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp"}
# documents, which no loader reads; LICENSE and .gitattributes have no ending
_DOCUMENTS = {"", ".md", ".txt", ".pdf", ".html", ".bib", ".cff", ".csv", ".tsv", ".yaml", ".yml"}
_LINKED_PICTURE = re.compile(r"""!\[[^\]]*\]\(\s*<?([^)\s>]+)|<img\b[^>]*?\bsrc=["']([^"']+)["']""")
_ELSEWHERE = re.compile(r"^(https?:|data:)", re.IGNORECASE)

Content: TypeAlias = bytes | Path  # a path for weights, which are too large for memory


@dataclass(frozen=True)
class Publication:
    """The files to publish, and the names in the model's folder that stay.

    Attributes:
        sources: Content by path inside the target, sorted.
        left_out: Names in the model's folder that stay; folders end in ``/``.
    """

    sources: Mapping[str, Content]
    left_out: tuple[str, ...]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.sources.items()
        }

    def text(self, name: str) -> str:
        """Return the text of a file other than weights."""
        content = self.sources[name]
        assert isinstance(content, bytes)
        return content.decode("utf-8")

    def with_code(self, texts: Mapping[str, str]) -> Publication:
        """Return the publication with newly written code in place of any code it had."""
        sources = {name: x for name, x in self.sources.items() if not name.endswith(".py")}
        sources |= {name: text.encode() for name, text in texts.items()}
        gone = self.sources.keys() - sources.keys() - {LOADER}  # replaced by the code
        left_out = {*self.left_out, *gone}
        return Publication(dict(sorted(sources.items())), tuple(sorted(left_out)))


def is_of_publications(name: str) -> bool:
    """Tell whether a name is one of a publication's files, code and pictures aside."""
    return name in _NAMES or ("/" not in name and name.endswith(".safetensors"))


def is_document(name: str) -> bool:
    """Tell whether a file is a document or a picture, which no loader reads."""
    return PurePosixPath(name).suffix.lower() in _DOCUMENTS | _PICTURES


def publication_of(folder: Path, *, code: bool, state: bool) -> Publication:
    """Return the files to publish of a model's folder, after checking each.

    Args:
        folder: The folder, without links in its path.
        code: Whether an export's modules are published.
        state: Whether a saved prompt's state is published.

    Raises:
        ValueError: The folder cannot be published; the message says why.
        FileNotFoundError: It holds a part of a state adapter.
    """
    sources, left_out = _collected(folder, code, state)
    if not sources.keys().isdisjoint((ADAPTER_CONFIG, ADAPTER_FILE)):
        read_adapter_config(folder)
    if is_state_adapter(folder):
        if state:
            raise ValueError(
                f"include_state must be absent with {folder}, a state adapter: the state of a "
                "prompt is published with the model that read it"
            )
    else:
        _check_model(folder, sources, code, state)
    for content in sources.values():
        if isinstance(content, Path):  # whatever its name says
            read_tensors(content)
    if CARD not in sources:
        raise ValueError(f"{folder} has no card {CARD}; write one with: ssmzoo card {folder}")
    for name in _linked(folder, sources[CARD]):
        sources[name] = _bytes(folder, folder / name)
    left_out = [name for name in left_out if name not in sources]
    return Publication(dict(sorted(sources.items())), tuple(left_out))


def _collected(folder: Path, code: bool, state: bool) -> tuple[dict[str, Content], list[str]]:
    """Return the files to publish, and the names that stay."""
    from ssmzoo.publishing.export_code import is_exported

    sources: dict[str, Content] = {}
    left_out: list[str] = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if path.is_dir() and name == EVAL_RESULTS:
            for file in sorted(path.iterdir()):
                if file.suffix == ".yaml":
                    sources[f"{name}/{file.name}"] = _eval_results(folder, file)
                else:
                    left_out.append(f"{name}/{file.name}")
        elif path.is_dir():
            left_out.append(name + "/")
        elif path.suffix in _PICKLES:
            raise ValueError(
                f"{path} is a pickle, which can run code on the reader's machine; move it away "
                "(weights are published as safetensors only)"
            )
        elif is_loader(path):
            sources[name] = _bytes(folder, path)
        elif path.suffix == ".py" and path.is_file() and is_exported(path):
            if not code:
                raise ValueError(
                    f"{path} is the model's own code; publish without --no-code, or move it away"
                )
            sources[name] = _bytes(folder, path)
        elif path.suffix in _CODE:
            raise ValueError(f"{path} is code, which is not published with a model; move it away")
        elif name == OPTIMIZER or (name == STATE and not state):
            left_out.append(name)
        elif path.suffix == ".safetensors":
            sources[name] = _inside(folder, path)
        elif is_of_publications(name):
            sources[name] = _bytes(folder, path)
        else:
            left_out.append(name)
    return sources, left_out


def _check_model(folder: Path, sources: Mapping[str, Content], code: bool, state: bool) -> None:
    """Check configuration and weights, and that a prompt's state to publish is there."""
    if "config.json" not in sources:
        inside = folder / "model"
        hint = f", here {inside}" if (inside / "config.json").exists() else ""
        raise ValueError(
            f"{folder} has no config.json; give the folder that save_pretrained wrote{hint}"
        )
    texts = {name: x for name, x in sources.items() if isinstance(x, bytes)}
    parsed = {n: parse_json(x, folder / n) for n, x in texts.items() if n.endswith(".json")}
    named = parsed["config.json"].get("auto_map")
    if not (code or named is None or (named == AUTO_MAP and LOADER in sources)):
        raise ValueError(
            f"{folder / 'config.json'} has an auto_map to code, which would stay behind; take it "
            "out, or, with a model of ssmzoo's families, publish without --no-code"
        )
    read_weights(folder)
    refuse_requests(folder)
    if state and STATE not in sources:
        raise ValueError(
            f"{folder} holds no {STATE}; save a prompt with "
            "model.prefill(input_ids).save_pretrained(folder), or publish without --include-state"
        )


def refuse_credentials(folder: Path, plan: Publication) -> None:
    """Refuse a publication that holds a credential; the error does not show it.

    Raises:
        ValueError: It holds one; the message says where.
    """
    for name, content in plan.sources.items():
        read = content if isinstance(content, bytes) else read_header(content)
        if found := credential_in_file(name, read):
            kind, where = found
            shown = without_credentials(unquote(name))
            raise ValueError(
                f"{folder / shown} must hold no credential, got {kind} ({where}); take it out, "
                "and revoke it if others have seen it"
            )


def _eval_results(folder: Path, path: Path) -> bytes:
    """Return a file of scores for the Hub's leaderboards, and check that the Hub can read it."""
    from huggingface_hub import parse_eval_result_entries

    content = _bytes(folder, path)
    try:
        parse_eval_result_entries(parse_yaml(content.decode("utf-8"), path.name))
    except Exception as error:  # ValueError, KeyError, TypeError: all mean one thing
        raise ValueError(
            f"{path} must be a list of entries as the Hub reads them, each with dataset.id, "
            f"dataset.task_id and value, got {type(error).__name__}: {' '.join(str(error).split())}"
            "; move it away, or write it again with: ssmzoo card"
        ) from error
    return content


def _linked(folder: Path, content: Content) -> list[str]:
    """Return the pictures and the licence that the card links, and check that it has metadata."""
    from huggingface_hub import ModelCard

    path = folder / CARD
    assert isinstance(content, bytes)
    try:
        card = ModelCard(content.decode("utf-8"))
    except Exception as error:  # yaml.YAMLError, ValueError, UnicodeDecodeError: all mean one thing
        raise ValueError(f"{path} has no readable metadata block: {error}") from error
    names = set()
    if (licence := card.data.get("license_link")) in LICENSE_FILES:
        if not (folder / licence).is_file():
            raise ValueError(f"{path} names the file {licence!r}, which is missing; put it there")
        names.add(licence)
    for match in _LINKED_PICTURE.finditer(card.text):
        link = match[1] or match[2]
        if _ELSEWHERE.match(link):
            continue
        name = PurePosixPath(unquote(re.split(r"[?#]", link)[0]))
        if name.is_absolute() or ".." in name.parts or "\\" in str(name):
            raise ValueError(f"{path} links {link!r}, which lies outside the model folder")
        if name.suffix.lower() not in _PICTURES:
            raise ValueError(f"{path} shows {link!r}, which is no picture ({listed(_PICTURES)})")
        if not (folder / name).is_file():
            raise ValueError(f"{path} links the picture {link!r}, which is missing")
        names.add(str(name))
    return sorted(names)


def _inside(folder: Path, path: Path) -> Path:
    real = path.resolve()
    if not real.is_relative_to(folder):
        raise ValueError(
            f"{path} is a link out of the model folder; copy the folder with its links followed "
            "(cp -rL) and publish the copy"
        )
    if not real.is_file():
        raise ValueError(f"{path} must be a regular file")
    return real


def _bytes(folder: Path, path: Path) -> bytes:
    real = _inside(folder, path)
    try:
        return real.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} must be readable: {error.strerror}; change its mode") from error
