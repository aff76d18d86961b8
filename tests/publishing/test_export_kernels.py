"""Our ops as a kernel repository: loaded as ``kernels`` does, they need nothing else of ours.

``kernels`` imports ``build/<variant>/__init__.py`` under the ``id`` of the variant's metadata.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

import ssmzoo_kernels
from ssmzoo.publishing.export_kernels import export_kernels

pytestmark = pytest.mark.xdist_group("export_kernels")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    export_kernels(folder)
    return folder


def facts(variant):
    return json.loads((variant / "metadata.json").read_text())


def load(variant):
    """Import a variant as ``kernels`` does."""
    name = facts(variant)["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tensors():
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 9, 8), (2, 9, 4), (2, 9, 4), (2, 9, 8))
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def results(package, **options):
    inputs = tensors()
    y, state = package.longhorn_scan(*inputs, **options)
    return [y, state, *torch.autograd.grad(y.sum() + state.sum(), inputs)]


@pytest.mark.parametrize("variant", ["torch-cpu", "torch-cuda"])
def test_every_op_is_there_and_gives_the_same_bits(variant, repository):
    copy = load(repository / "build" / variant)
    assert copy.__all__ == ssmzoo_kernels.__all__
    assert all(callable(getattr(copy, name)) for name in copy.__all__)
    for backend in ("cpu", "eager", "reference"):
        pairs = zip(
            results(copy, backend=backend), results(ssmzoo_kernels, backend=backend), strict=True
        )
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs), backend
        assert copy.last_backend("longhorn_scan") == backend


def test_the_layers_of_transformers_slots_go_along(repository):
    copy = load(repository / "build" / "torch-cuda")
    inputs = tensors()
    conv = {"hidden_states": inputs[0].transpose(1, 2), "weight": torch.ones(8, 4)}
    for slot in ssmzoo_kernels.layers.SLOTS:
        assert issubclass(getattr(copy.layers, slot), torch.nn.Module)
    ours, theirs = (package.layers.causal_conv1d_fn() for package in (ssmzoo_kernels, copy))
    assert torch.equal(theirs(**conv), ours(**conv))


def test_a_variant_names_its_backend_and_its_versions_have_ids_of_their_own(repository, tmp_path):
    told = [facts(repository / "build" / f"torch-{backend}") for backend in ("cpu", "cuda")]
    assert [fact["backend"] for fact in told] == [{"type": "cpu"}, {"type": "cuda"}]
    assert {fact["name"] for fact in told} == {"ssmzoo-kernels"}
    assert {fact["version"] for fact in told} == {1}
    assert {fact["license"] for fact in told} == {"Apache-2.0"}
    export_kernels(tmp_path, kernel_version=2)
    ids = [fact["id"] for fact in [*told, facts(tmp_path / "build" / "torch-cpu")]]
    assert len(set(ids)) == 3
    assert all(name.isidentifier() for name in ids)


def test_exported_code_and_the_installed_package_coexist(repository, tmp_path):
    expected = results(ssmzoo_kernels, backend="eager")
    export_kernels(tmp_path, kernel_version=3)
    first = load(repository / "build" / "torch-cpu")
    second = load(tmp_path / "build" / "torch-cpu")
    for package in (first, second, ssmzoo_kernels):
        pairs = zip(results(package, backend="eager"), expected, strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert second.last_backend("causal_conv1d") is None  # what others run is not noted there


def test_modules_import_only_each_other_torch_triton_and_python(repository):
    for path in (repository / "build").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            roots = {name.split(".")[0] for name in names} - {"torch", "triton"}
            assert roots <= sys.stdlib_module_names, path


def test_a_repository_is_written_again_and_foreign_builds_are_left_alone(tmp_path):
    written = export_kernels(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    assert export_kernels(tmp_path) == written
    assert (tmp_path / "README.md").read_text() == "mine"
    (tmp_path / "build" / "torch212-cxx11-cu130-x86_64-linux").mkdir()
    with pytest.raises(ValueError, match=r"holds torch212-.*, which no export wrote; move it away"):
        export_kernels(tmp_path)
    assert all(path.is_file() for path in written)
    with pytest.raises(ValueError, match="kernel_version must be at least 1, got 0"):
        export_kernels(tmp_path / "other", kernel_version=0)
    assert not (tmp_path / "other").exists()


ALONE = """
import importlib.abc, importlib.util, json, sys
from pathlib import Path

class RefuseOurs(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ssmzoo", "ssmzoo_kernels"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, RefuseOurs())
import torch

variant = Path(sys.argv[1])
%s
sizes = ((1, 5, 4), (1, 5, 2), (1, 5, 2), (1, 5, 4))
u, q, k, dt = (torch.randn(size, requires_grad=True) for size in sizes)
for backend in sys.argv[2:]:
    y, _ = ops.longhorn_scan(u, q, k, dt, backend=backend)
    expected, _ = ops.longhorn_scan(u, q, k, dt, backend="reference")
    grads, judges = (torch.autograd.grad(x.sum(), (u, q, k, dt)) for x in (y, expected))
    for got, judge in zip((y, *grads), (expected, *judges), strict=True):
        assert (got - judge).abs().max() <= 1e-5 * judge.abs().max(), backend
print("equal")
"""
AS_THE_LOADER_DOES = """
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
ops = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ops)
"""


def alone(script, *arguments, **more):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "equal"


@pytest.mark.long
def test_triton_kernels_run_where_ssmzoo_is_not_installed(repository):
    variant = repository / "build" / "torch-cuda"
    alone(ALONE % AS_THE_LOADER_DOES, variant, "triton", "eager", TRITON_INTERPRET="1")


def test_the_kernels_package_loads_it(repository):
    try:
        version("kernels")
    except PackageNotFoundError:  # asked thus, because our folder of that name can be imported
        pytest.skip("kernels is not installed")
    script = ALONE % "from kernels import get_local_kernel\nops = get_local_kernel(variant)"
    alone(script, repository, "cpu", "eager")
