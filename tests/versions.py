"""A pytest plugin (``-p tests.versions``): say which versions the tests run on."""

from importlib.metadata import version


def pytest_report_header() -> str:
    names = ("torch", "transformers", "huggingface_hub", "tokenizers")
    return "on " + ", ".join(f"{name} {version(name)}" for name in names)
