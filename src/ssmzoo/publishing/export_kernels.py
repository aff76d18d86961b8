"""Our ops as a kernel repository, in the layout that Hugging Face's ``kernels`` loads.

``kernels`` imports a folder under a name of its own, so several versions may live in one process:
the package's imports become relative, and its ops get a namespace of their own. Nothing is built:
Triton compiles on the GPU at hand, the C sources travel as they are and are compiled on first use.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from importlib.metadata import metadata, version
from pathlib import Path

from ssmzoo.files import write_folder
from ssmzoo.publishing.rewriting import Editor, Source

NAME = "ssmzoo_kernels"
BACKENDS = ("cpu", "cuda")  # a variant each, since a variant's metadata names one
_CARRIED = (".py", ".c", ".h")


def export_kernels(directory: str | Path, kernel_version: int = 1) -> list[Path]:
    """Write the ops of the installed ``ssmzoo_kernels`` as a kernel repository.

    ``kernels.get_local_kernel(directory)`` loads it, and ``get_kernel(repo, version=...)`` if its
    ``build`` folder lies in a Hub repository of the kind ``kernel``, on the branch ``v<version>``.

    Args:
        directory: The repository's folder; its ``build`` folder is replaced, other files stay.
        kernel_version: The version that users ask for, which counts changes of the ops' interface.

    Returns:
        The files written.

    Raises:
        ValueError: The version is no positive number, or ``build`` holds what is not of an export.
    """
    if kernel_version < 1:
        raise ValueError(f"kernel_version must be at least 1, got {kernel_version}")
    build = Path(directory) / "build"
    foreign = sorted(p.name for p in build.glob("*")) if build.is_dir() else []
    if foreign := [name for name in foreign if not _is_ours(build / name)]:
        raise ValueError(f"{build} holds {', '.join(foreign)}, which no export wrote; move it away")
    texts = _texts()
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:12]

    def write(folder: Path) -> None:
        for backend in BACKENDS:
            variant = folder / f"torch-{backend}"
            told = {
                "id": f"{NAME}_{backend}_{kernel_version}_{digest}",
                "name": NAME.replace("_", "-"),
                "version": kernel_version,
                "license": metadata("ssmzoo").json["license_expression"],
                "python-depends": [],
                "backend": {"type": backend},
                "ssmzoo": version("ssmzoo"),
            }
            files = {**texts, "metadata.json": json.dumps(told, indent=2) + "\n"}
            for name, text in files.items():
                path = variant / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")

    write_folder(build, write)
    return sorted(path for path in build.rglob("*") if path.is_file())


def _is_ours(variant: Path) -> bool:
    try:
        told = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and "ssmzoo" in told


def _texts() -> dict[str, str]:
    """Return the package's files by their path in it."""
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    texts = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in _CARRIED:
            inside = path.relative_to(root)
            text = path.read_text(encoding="utf-8")
            texts[inside.as_posix()] = _relative(inside, text) if path.suffix == ".py" else text
    return texts


def _relative(path: Path, text: str) -> str:
    """Return a module's text with relative imports, and with ops under names of their own."""
    is_package = path.name == "__init__.py"
    parts = path.parent.parts if is_package else path.with_suffix("").parts
    source = Source(".".join((NAME, *parts)), text, is_package)
    editor = Editor(source)
    root = "." * len(source.package.split("."))  # the package's root, seen from this module
    for node in source.imports():
        if isinstance(node, ast.Import):
            if any(alias.name.split(".")[0] == NAME for alias in node.names):
                raise ValueError(f"{source.name}, line {node.lineno}: say from {NAME} import ...")
        elif not node.level and source.absolute(node).split(".")[0] == NAME:
            below = source.absolute(node).removeprefix(NAME).removeprefix(".")
            editor.replace(
                node, editor.segment(node).replace(source.absolute(node), root + below, 1)
            )
    for call in source.imports_by_name():
        name = editor.segment(call.args[0])
        if not name.startswith(f'f"{NAME}.'):
            raise ValueError(
                f'{source.name}, line {call.lineno}: an import by name must begin f"{NAME}.'
            )
        editor.replace(call.args[0], f"{name.replace(f'{NAME}.', root, 1)}, __package__")
    return editor.result()
