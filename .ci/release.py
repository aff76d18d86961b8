"""Make a release of the commit that is checked out: cut, build, check, tag. Nothing is uploaded.

Usage: python .ci/release.py VERSION TWINE      (make release VERSION=0.1.0)

TWINE is the program that checks what was built. All is made in a work tree of its own. The branch,
the tag and ``dist`` change at the end, when everything has passed. docs/releasing.md says what to
do when it stops.
"""

from __future__ import annotations

import filecmp
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from urllib.parse import quote

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ssmzoo.files import file_digest, write_json

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "## [Unreleased]\n"


class Refused(Exception):
    """What keeps a version from being released, in one line."""


def main() -> int:
    """Release the version that was asked for."""
    if len(sys.argv) != 3:
        print("release: name the version: make release VERSION=0.1.0", file=sys.stderr)
        return 2
    try:
        release(sys.argv[1], sys.argv[2])
    except Refused as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def release(version: str, twine: str) -> None:
    """Cut, build and check a version; then set the tag, move the branch and fill ``dist``.

    Raises:
        Refused: The version cannot be released, or a step failed.
    """
    check(version)
    with tempfile.TemporaryDirectory() as folder:
        tree, built = Path(folder, "tree"), Path(folder, "dist")
        git("worktree", "add", "--quiet", "--detach", tree, "HEAD")
        try:
            changelog = tree / "CHANGELOG.md"
            today = datetime.now(UTC).date().isoformat()
            changelog.write_text(cut(changelog.read_text("utf-8"), version, today), "utf-8")
            git("commit", "--quiet", "--all", "--message", f"Version {version}", at=tree)
            commit = git("rev-parse", "HEAD", at=tree)
            epoch = int(git("log", "-1", "--format=%ct", at=tree))
            wheel, *more = build(tree, built, epoch)
            parts = built / f"ssmzoo-{version}.cdx.json"
            write_json(parts, sbom(wheel, epoch))
            run(twine, "check", "--strict", wheel, *more)
            # away from the checkout, in a fresh environment, with the tests of packaging
            roots = os.pathsep.join(str(tree / name) for name in ("src", "kernels", "plugins"))
            tests = (
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "tests/repository/test_packaging.py",
            )
            told = {"PYTHONPATH": roots, "SSMZOO_TEST_WHEEL": wheel, "SOURCE_DATE_EPOCH": epoch}
            run(sys.executable, *tests, at=tree, **told)
        finally:
            git("worktree", "remove", "--force", tree)
        files, tag = (wheel, *more, parts), f"v{version}"
        digests = "".join(f"{file_digest(path)}  {path.name}\n" for path in files)
        git("tag", "--annotate", tag, "--message", f"ssmzoo {version}\n\n{digests}", commit)
        try:
            git("merge", "--quiet", "--ff-only", commit)
        except BaseException:  # main was moved meanwhile, or Ctrl-C
            git("tag", "--delete", tag)
            raise
        (ROOT / "dist").mkdir(exist_ok=True)
        for path in files:
            shutil.copy(path, ROOT / "dist")
    print(f"v{version} is tagged on main, and dist/ has:\n{digests}Nothing was pushed or uploaded.")


def check(version: str) -> None:
    """Check what must hold before anything is made.

    Raises:
        Refused: What does not hold.
    """
    if changed := git("status", "--porcelain").splitlines():
        raise Refused(f"the work tree is not clean, commit or remove: {changed[0]}")
    if (branch := git("rev-parse", "--abbrev-ref", "HEAD")) != "main":
        raise Refused(f"main must be checked out, got {branch}")
    init = ROOT / "src" / "ssmzoo" / "__init__.py"
    found = re.findall(r'^__version__ = "(.+)"$', init.read_text("utf-8"), re.MULTILINE)
    if found != [version]:
        raise Refused(f"asked for {version}, but src/ssmzoo/__init__.py says {', '.join(found)}")
    if git("tag", "--list", f"v{version}"):
        raise Refused(f"v{version} is tagged already; raise __version__ in src/ssmzoo/__init__.py")
    cut((ROOT / "CHANGELOG.md").read_text("utf-8"), version, "")


def cut(changelog: str, version: str, day: str) -> str:
    """Return a changelog in which what was unreleased is a version's.

    Raises:
        Refused: Nothing is unreleased, or the version has a section already.
    """
    before, _, after = changelog.partition(UNRELEASED)
    heading = f"## [{version}]"
    if heading in changelog:
        raise Refused(f"CHANGELOG.md has a section {heading[3:]}, but there is no tag v{version}")
    if not re.search(r"^- ", after.partition("\n## ")[0], re.MULTILINE):
        raise Refused("CHANGELOG.md lists nothing under [Unreleased]")
    return f"{before}{UNRELEASED}\n{heading} - {day}\n{after}"


def build(tree: Path, folder: Path, epoch: int) -> list[Path]:
    """Build a wheel by way of a source distribution, and those with the kernels of ``KERNELS``.

    Returns:
        The wheel for any machine, the source distribution, the wheels with kernels.

    Raises:
        Refused: Built a second time, straight from the tree, they have other bytes.
    """
    command = (sys.executable, "-m", "build", "--no-isolation", tree, "--outdir")
    places = {folder: (), folder.with_name("again"): ("--sdist", "--wheel")}
    for place, kinds in places.items():
        run(*command, place, *kinds, SOURCE_DATE_EPOCH=epoch)
        for machine in os.environ.get("KERNELS", "").split():
            told = {"SSMZOO_KERNELS": machine, "SOURCE_DATE_EPOCH": epoch}
            run(*command, place, "--wheel", **told)
    first = sorted(folder.iterdir(), key=lambda path: ("-any." not in path.name, path.suffix))
    same, *_ = filecmp.cmpfiles(*places, [path.name for path in first], shallow=False)
    if len(same) != len(first):
        raise Refused(f"two builds of one tree differ; equal: {', '.join(same) or 'none'}")
    return first


def sbom(wheel: Path, epoch: int) -> dict[str, object]:
    """Return what a wheel brings along, with versions and licences as installed here (CycloneDX).

    What an extra alone needs is ``optional``; what only developers need is left out.

    Raises:
        Refused: Something that it needs is not installed.
    """
    [info] = (p for p in zipfile.Path(wheel).iterdir() if p.name.endswith(".dist-info"))
    root = PathDistribution(info)  # pyright: ignore[reportArgumentType]  # a path in an archive
    extras = {"", *_fields(root, "Provides-Extra")} - {"dev", "site"}
    required, _ = needed(root, {""})
    found, needs = needed(root, extras)
    refs = {name: _purl(dist) for name, dist in (found | {_name(root): root}).items()}
    made = {
        "timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "component": _component(root)
        | {"hashes": [{"alg": "SHA-256", "content": file_digest(wheel)}]},
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, file_digest(wheel))}",
        "version": 1,
        "metadata": made,
        "components": [
            _component(dist) | {"scope": "required" if name in required else "optional"}
            for name, dist in sorted(found.items())
        ],
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(refs[n] for n in needs.get(name, ()))}
            for name, ref in sorted(refs.items())
        ],
    }


def needed(
    root: Distribution, extras: Iterable[str]
) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """Return all that a distribution needs with some extras, and what needs what, by name.

    Raises:
        Refused: Something is not installed.
    """
    found, needs = {}, {}
    left, seen = [(root, frozenset(extras))], set()
    while left:
        dist, wanted = left.pop()
        for need in map(Requirement, dist.requires or ()):
            if need.marker and not any(need.marker.evaluate({"extra": e}) for e in wanted):
                continue
            name, also = canonicalize_name(need.name), frozenset({"", *need.extras})
            if name != _name(dist):
                needs.setdefault(_name(dist), set()).add(name)
            if (name, also) in seen:
                continue
            seen.add((name, also))
            try:
                found[name] = distribution(name)
            except PackageNotFoundError:
                raise Refused(f"{dist.name} needs {need}, which is not installed") from None
            left.append((found[name], also))
    return found, needs


def licences(dist: Distribution) -> list[dict[str, object]]:
    """Return a distribution's licences: an SPDX expression, or the names that it states."""
    stated = next(iter(_fields(dist, "License-Expression", "License")), "")
    try:
        return [{"expression": canonicalize_license_expression(stated)}]
    except InvalidLicenseExpression:
        classified = [c for c in _fields(dist, "Classifier") if c.startswith("License ::")]
    names = [c.rpartition(" :: ")[2] for c in classified] or stated.splitlines()[:1]
    names = names or [f"see its file {name}" for name in _fields(dist, "License-File")]
    return [{"license": {"name": name}} for name in names or ["not stated"]]


def _fields(dist: Distribution, *names: str) -> list[str]:
    return [text for name in names for text in dist.metadata.get_all(name) or ()]


def _component(dist: Distribution) -> dict[str, object]:
    return {
        "type": "library",
        "bom-ref": _purl(dist),
        "name": dist.name,
        "version": dist.version,
        "licenses": licences(dist),
        "purl": _purl(dist),
    }


def _purl(dist: Distribution) -> str:
    return f"pkg:pypi/{_name(dist)}@{quote(Version(dist.version).public)}"


def _name(dist: Distribution) -> str:
    return canonicalize_name(dist.name)


def git(*arguments: object, at: Path = ROOT) -> str:
    """Run git; return what it prints.

    Raises:
        Refused: It failed.
    """
    command = ["git", *map(str, arguments)]
    done = subprocess.run(command, cwd=at, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if done.returncode:
        raise Refused(f"nothing was changed; git {arguments[0]} failed, as said above")
    return done.stdout.strip()


def run(*command: object, at: Path = ROOT, **variables: object) -> None:
    """Run a step of the release, without the folders of PYTHONPATH.

    Raises:
        Refused: It failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    environment |= {name: str(value) for name, value in variables.items()}
    if subprocess.run(words, cwd=at, env=environment).returncode:
        raise Refused(f"nothing was changed; this failed: {shlex.join(words)}")


if __name__ == "__main__":
    sys.exit(main())
