"""Commands that write models and ops in other forms: publish, convert, export, export-kernels."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ssmzoo.cli.options import (
    DTYPE,
    JSON,
    LOCAL_MODEL,
    OUTPUT,
    SAVED_MODEL,
    SET,
    TRUST,
    Option,
    Verb,
    in_folder,
)
from ssmzoo.cli.show import in_bytes, print_json, print_table, quieten_bars


def _publish(options: argparse.Namespace) -> int:
    from ssmzoo.publishing.hub import publish

    report = publish(
        in_folder(options.model),
        options.target,
        code=options.code,
        include_state=options.include_state,
        dry_run=options.dry_run,
        private=options.private,
        revision=options.revision,
        commit_message=options.message,
    )
    if options.json:
        print_json(dataclasses.asdict(report))
        return 0
    print_table({"file": file.path, "size": in_bytes(file.size)} for file in report.files)
    if report.left_out:
        print(f"left out: {', '.join(report.left_out)}")
    if report.deleted:
        print(f"deleted there: {', '.join(report.deleted)}")
    done = "would go to" if report.dry_run else "published to"
    size = in_bytes(report.size)
    print(f"{len(report.files)} files, {size}, {done} {report.url or report.target}")
    print(report.load)
    return 0


PUBLISH = Verb(
    "publish",
    "publish a model into a folder or to the Hub",
    "ssmzoo publish runs/longhorn-demo/model ./my-model\n"
    "ssmzoo publish runs/longhorn-demo/model you/longhorn-demo --dry-run",
    (
        LOCAL_MODEL,
        Option("target", metavar="TARGET", help="a folder (./x, /x, folder:x) or user/name"),
        Option(
            "--no-code",
            dest="code",
            action="store_false",
            help="leave out the model's code, with which it loads where ssmzoo is not "
            "installed (with trust_remote_code=True)",
        ),
        Option(
            "--include-state",
            action="store_true",
            help="publish the state of a prompt, too: state.safetensors in MODEL",
        ),
        Option("--dry-run", action="store_true", help="list the files; write nothing"),
        Option(
            "--private",
            action="store_true",
            help="create the repository private, or refuse a public one",
        ),
        Option("--revision", metavar="NAME", help="the branch (default: main)"),
        Option("--message", metavar="TEXT", help="the commit's title"),
        JSON,
    ),
    _publish,
)


def _convert(options: argparse.Namespace) -> int:
    from ssmzoo.checkpoints.convert import OFFICIAL, to_family, to_official

    quieten_bars()
    if options.to == OFFICIAL:
        if options.config is not None or options.set:
            raise ValueError(
                f"--config and --set must be absent with --to {OFFICIAL}: MODEL has its "
                "configuration"
            )
        print(to_official(options.source, options.output))
        return 0
    target = to_family(
        options.source,
        options.to,
        options.output,
        config=options.config,
        overrides=options.set,
    )
    print(target)
    return 0


CONVERT = Verb(
    "convert",
    "convert weights from or to a family's official code",
    "ssmzoo convert theirs.safetensors --to rtf --set trunc_len=512 --output my-rtf\n"
    "ssmzoo convert my-rtf --to official --output theirs.safetensors",
    (
        Option(
            "source",
            metavar="SOURCE",
            help="weights of the official code: a .safetensors file, or a folder with them; "
            "with --to official, a folder with a saved model",
        ),
        Option(
            "--to",
            metavar="FAMILY|official",
            required=True,
            help="the family to convert to, or official to write the official code's weights",
        ),
        OUTPUT.but(
            required=True,
            help="the model's new folder; with --to official, a .safetensors file, or a folder "
            "where the family writes the official configuration, too",
        ),
        Option(
            "--config",
            metavar="FILE",
            type=Path,
            help="the official configuration as JSON (default: config.json beside the weights)",
        ),
        SET.but(help="a field of the official configuration, over the file's; may be repeated"),
    ),
    _convert,
)


def _export(options: argparse.Namespace) -> int:
    from ssmzoo.checkpoints.load import load_model, model_folder
    from ssmzoo.publishing.export_graphs import export_onnx

    if options.to != "onnx":
        raise ValueError(f"--to must be onnx, got {options.to!r}")
    quieten_bars()
    folder = model_folder(options.model)
    model: Any = load_model(options.model, folder, options.dtype, options.trust_remote_code)
    files = export_onnx(model, options.output)
    if options.json:
        print_json([str(file) for file in files])
        return 0
    print_table({"file": file.name, "size": in_bytes(file.stat().st_size)} for file in files)
    return 0


EXPORT = Verb(
    "export",
    "write a model as a graph without Python: ONNX",
    "ssmzoo export runs/longhorn-demo/model --to onnx --output my-onnx",
    (
        SAVED_MODEL,
        Option("--to", metavar="onnx", required=True, help="the graph's format: onnx"),
        OUTPUT.but(required=True, help="the folder of the graph and the list of its states"),
        DTYPE,
        TRUST,
        JSON,
    ),
    _export,
)


def _export_kernels(options: argparse.Namespace) -> int:
    from ssmzoo.publishing.export_kernels import export_kernels

    files = export_kernels(options.output, options.kernel_version)
    if options.json:
        print_json([str(file) for file in files])
    else:
        print(f"{len(files)} files in {options.output / 'build'}")
    return 0


EXPORT_KERNELS = Verb(
    "export-kernels",
    "write the ops as a repository for Hugging Face's kernels",
    "ssmzoo export-kernels --output my-kernels",
    (
        OUTPUT.but(required=True, help="the repository's folder"),
        Option(
            "--kernel-version",
            metavar="N",
            type=int,
            default=1,
            help="the version that users ask for (default: 1)",
        ),
        JSON,
    ),
    _export_kernels,
)
