"""The Hub's rules for a model card's metadata, checked without the Hub.

The Hub lists models by licence, language, data and base. It refuses a wrong value when the card is
sent, after the model was trained; here it is refused before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ssmzoo.environment.credentials import find_credential
from ssmzoo.environment.messages import suggestion

FIELDS = (
    "license",
    "license_name",
    "license_link",
    "language",
    "datasets",
    "base_model",
    "pipeline_tag",
)
# those that a model made from another one takes over
BASE_METADATA = ("base_model", "license", "license_name", "license_link")
LISTS = ("language", "datasets", "base_model")
LICENSE_FILES = ("LICENSE", "LICENSE.md")  # the Hub takes them in place of an address
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|code|multilingual")
# https://huggingface.co/docs/hub/repositories-licenses
_LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m
bigscience-bloom-rail-1.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear
bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0
cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3
llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++
osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
"""
# https://huggingface.co/tasks
_PIPELINES = """
any-to-any audio-classification audio-text-to-text audio-to-audio automatic-speech-recognition
depth-estimation document-question-answering feature-extraction fill-mask graph-ml
image-classification image-feature-extraction image-segmentation image-text-to-text image-to-3d
image-to-image image-to-text image-to-video keypoint-detection mask-generation multiple-choice
object-detection question-answering reinforcement-learning robotics sentence-similarity
summarization table-question-answering table-to-text tabular-classification tabular-regression
tabular-to-text text-classification text-generation text-ranking text-retrieval text-to-3d
text-to-audio text-to-image text-to-speech text-to-video time-series-forecasting
token-classification translation unconditional-image-generation video-classification
video-text-to-text video-to-video visual-document-retrieval visual-question-answering
voice-activity-detection zero-shot-classification zero-shot-image-classification
zero-shot-object-detection
"""


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a recipe's section ``card`` as a card's metadata has them, lists as lists.

    Args:
        fields: Some of :data:`FIELDS`; None is absent.

    Raises:
        LookupError: An unknown field; the message suggests one.
        TypeError: A value that is no string, nor a list of strings where there may be several.
        ValueError: A value that the Hub would refuse, or one that holds a credential.
    """
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            hint = suggestion(name, FIELDS) or f"; it has {', '.join(FIELDS)}"
            raise LookupError(f"card has no field {name!r}{hint}")
        if value is None:
            continue
        several = value if isinstance(value, list) and name in LISTS else [value]
        for part in several:
            if not isinstance(part, str):
                raise TypeError(f"card.{name} must be a text, got {part!r}")
            _check(name, part)
        if several:
            found[name] = list(dict.fromkeys(several)) if name in LISTS else value
    for name in ("license_name", "license_link"):
        if name in found and found.get("license") != "other":
            raise ValueError(
                f"card.{name} needs card.license 'other', got {found.get('license', 'none')!r}; "
                f"give that, or leave out card.{name}"
            )
    return {name: found[name] for name in FIELDS if name in found}


def joined(told: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with fields that win over it; another licence has another name and link.

    Raises:
        LookupError: See :func:`checked`.
        TypeError: See :func:`checked`.
        ValueError: See :func:`checked`.
    """
    given = checked(given)
    if "license" in given:
        told = {name: value for name, value in told.items() if not name.startswith("license")}
    return checked({**told, **given})


def _check(name: str, value: str) -> None:
    credential = find_credential(value)
    if credential is not None:  # which no message shows
        raise ValueError(f"card.{name} must hold no credential, got {credential[0]}; take it out")
    if name == "license" and value not in (known := _LICENSES.split()):
        raise ValueError(
            "card.license must be a licence's id on the Hub, such as 'apache-2.0', or 'other' with "
            f"card.license_name and card.license_link, got {value!r}"
            f"{suggestion(value.lower(), known)}"
        )
    address = value.startswith(("https://", "http://"))
    if name == "license_link" and not (address or value in LICENSE_FILES):
        raise ValueError(
            "card.license_link must be an address (https://...), or LICENSE or LICENSE.md for that "
            f"file in the model's folder, got {value!r}"
        )
    if name == "pipeline_tag" and value not in (known := _PIPELINES.split()):
        raise ValueError(
            f"card.pipeline_tag must be a task of the Hub, such as 'text-generation', got {value!r}"
            f"{suggestion(value, known)}"
        )
    if name == "language" and not _LANGUAGE.fullmatch(value):
        raise ValueError(
            "card.language must be codes such as 'en', or 'code' or 'multilingual', got "
            f"{value!r}; give an ISO 639 code"
        )
    if name in ("datasets", "base_model") and not is_hub_id(value):
        raise ValueError(
            f"card.{name} must be ids on the Hub, such as 'user/name', got {value!r}; leave out "
            "others"
        )
    if not value.strip() or not value.isprintable():
        raise ValueError(f"card.{name} must be a line of text, got {value!r}")


def is_hub_id(value: str) -> bool:
    """Tell whether a name can be that of a repository on the Hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    return True
