"""Credentials: struck out of cards and results, refused in what is published, in no output."""

from __future__ import annotations

import hashlib
import json
import shlex
import zlib

import pytest
import torch
from safetensors.torch import save_file

from ssmzoo.checkpoints.weights import weights_revision
from ssmzoo.cli.main import main
from ssmzoo.environment.credentials import (
    credential_in_file,
    find_credential,
    without_credentials,
)
from ssmzoo.environment.portable import portable, portable_command
from ssmzoo.evaluation.results import write_results
from ssmzoo.publishing.card import render_card
from ssmzoo.publishing.hub import publish

# put together here, so that no scanner takes this file for a leak: kind, before, secret, after
PLANTED = [
    ("a password in an address", "https://me:", "pa5s/w@rd", "@host.example/data"),
    ("a token in an address", "https://", "0a1b2c3d4e5f6" + "7a8b9c0d1e2f3", "@host.example/x"),
    ("a signature in an address", "https://host.example/x?e=1&X-Amz-Signature=", "0f" * 32, "&y=2"),
    ("a Hugging Face token", "https://", "hf" + "_aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567", "@host"),
    ("a Hugging Face token", "", "hf" + "_oauth_eyJhbGciOiJFZERTQSJ9", " here"),
    ("a Hugging Face token", "", "hf" + "_jwt_eyJhbGciOiJFZERTQSJ9-x", " here"),
    ("a GitHub token", "git+https://", "gh" + "p_0123456789abcdefghij0123456789abcdef", "@host"),
    ("a GitHub token", "", "github" + "_pat_11ABCDEFG0123456789_abcdefghijklmnop", " here"),
    ("an API key", "key ", "sk" + "-proj-abc_DEF-0123456789abcdefghijklmn", " here"),
    ("a GitLab token", "https://oauth2@", "gl" + "pat-aB3_dE5-gH7jK9mN1pQ2", "@host"),
    ("a Slack token", "", "xo" + "xb-123456789012-abcdefghijkl", " here"),
    ("a Slack webhook", "https://", "hooks.slack" + ".com/services/T0AB1CD2/B0AB1CD2/x1Y2", "z"),
    (
        "a Discord webhook",
        "https://discord.com",
        "/api/web" + "hooks/123456789012345678/" + "aB3_" * 17,
        "",
    ),
    ("a Google key", "?key ", "AI" + "za" + "Sy0123456789-_abcdefghijklmnopqrstu", "&x"),
    ("a Google secret", "", "GOC" + "SPX-aB3_dE5-gH7jK9mN1pQ2rS4tU6vW", " here"),
    ("a Google secret", "", "ya2" + "9.a0AfB_byC-aB3_dE5-gH7jK9mN", " here"),
    ("a token of a package index", "", "py" + "pi-AgEIcHlwaS5vcmcC" + "aB3_" * 10, " here"),
    ("an AWS key", "key ", "AK" + "IAIOSFODNN7EXAMPLE", " here"),
    (
        "an AWS secret",
        "aws_secret_access_key=",
        "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY",
        "",
    ),
    (
        "an AWS secret",
        '{"SecretAccessKey": "',
        "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY",
        '"}',
    ),
    ("an Azure key", "AccountName=x;", "Account" + "Key=" + "aB3/" * 21 + "aA==", ";x"),
    ("a JSON web token", "", "ey" + "JhbGciOiJI.ey" + "JzdWIiOiIx.dozjgNryP4J3jVmN", " bearer"),
    ("a Weights & Biases key", "", "wandb" + "_v1_aB3_dE5gH7jK9mN1pQ2rS4", " here"),
    ("a Weights & Biases key", "WANDB_API_KEY=", "0123456789" * 4, " here"),
    ("an NVIDIA key", "", "nv" + "api-" + "aB3_dE5-" * 8, " here"),
    ("a Groq key", "", "gs" + "k_" + "aB3dE5gH" * 6, " here"),
    ("an xAI key", "", "xa" + "i-" + "aB3dE5gH" * 10, " here"),
    ("a Perplexity key", "", "pp" + "lx-" + "aB3dE5gH" * 6, " here"),
    ("a Replicate token", "", "r" + "8_" + "aB3dE5gH" * 4 + "aB3dE", " here"),
    ("a Databricks token", "", "da" + "pi" + "0123456789abcdef" * 2, " here"),
    ("a Stripe key", "", "sk" + "_live_51aB3dE5gH7jK9mN1pQ2", " here"),
    ("a SendGrid key", "", "S" + "G.aB3_dE5-gH7jK9mN1pQ2rS." + "aB3_dE5-" * 5 + "xyz", " here"),
    ("a Docker token", "", "dckr" + "_pat_aB3_dE5-gH7jK9mN1pQ2rS4tU6v", " here"),
    ("a DigitalOcean token", "", "dop" + "_v1_" + "0123456789abcdef" * 4, " here"),
    ("an age key", "", "AGE-SECRET" + "-KEY-1" + "QP0ZRY9X8GF2TVDW" * 3, " here"),
    ("a private key", "", "-----BEGIN RSA PRIVATE" + " KEY-----MIIE", ""),
    ("a private key", "", "-----BEGIN PGP PRIVATE" + " KEY BLOCK-----\n\nlQOY\n", ""),
    ("a private key", "", "PuTTY-User-Key" + "-File-3: ssh-ed25519\nPrivate-MAC: 0a1b", ""),
]
KEY_AND_SECRET = ("s3://AK" + "IAIOSFODNN7EXAMPLE:", "wJalr/K7MDENG/bPxRf", "@bucket/data")
HARMLESS = (
    hashlib.sha256(b"").hexdigest(),
    "sha256:" + hashlib.sha256(b"x").hexdigest(),
    hashlib.sha1(b"").hexdigest(),
    "you/ssmzoo-longhorn-1.3b-slimpajama-2026-11-22",
    "HF_TOKEN or hf_hub_download_of_a_long_name and hf_internal/tiny-random",
    "task-sk-learn-like-name-of-many-parts and sk-bert-base-uncased-v2-large-cased",
    "https://user@host/x http://127.0.0.1:8080/a@b https://[::1]:80/x ssh://git@host:22/me",
    "https://***@host and https://host/x?page=2&tokens=5",
    "me@example.org, time 12:34:56@noon, {a: b@c}",
    "https://a-long-organisations-name-of-2024@dev.example/x/_git/y",
    "openxai-" + "a1" * 40 + " MSG." + "a" * 20 + "." + "b" * 40,
    "wandb_api_key or AccountKey=short, r8_short, dapi, sk_live_, /api/webhooks/1/x",
    "torch.float32 AKIRA ASIAN eyJustAName",
)


IDS = [f"{number} {kind}" for number, (kind, *_) in enumerate(PLANTED)]


@pytest.mark.parametrize(("kind", "before", "secret", "after"), PLANTED, ids=IDS)
def test_every_kind_of_credential_is_found_named_and_struck_out(kind, before, secret, after):
    text = f"first\n{before}{secret}{after}\nlast"
    assert find_credential(text) == (kind, 2)
    shown = without_credentials({"a": [text]})["a"][0]
    assert secret not in shown
    assert shown.startswith("first\n")
    assert after == "" or "***" in shown
    assert find_credential(shown) is None
    assert portable(text) == shown
    assert secret not in portable_command(["ssmzoo", "train", f"data.text={before}{secret}{after}"])


def png(kind: bytes, body: bytes) -> bytes:
    """Return a picture with one chunk; nothing looks at sums and sizes."""
    return b"\x89PNG\r\n\x1a\n" + len(body).to_bytes(4) + kind + body + bytes(4)


def as_numbers(text: str, form: str = "\\u{:04x}") -> str:
    return "".join(form.format(ord(character)) for character in text)


# a file that holds a text, by name: each hides the text from who reads it as it stands
FILES = {
    "as it stands": ("x.jinja", lambda text: f"{{{{ '{text}' }}}}".encode()),
    "after an escaped newline": ("x.json", lambda text: json.dumps({"a": f"x\n{text}"}).encode()),
    "after an escaped tab in a key": ("x.json", lambda text: json.dumps({f"\t{text}": 1}).encode()),
    "escaped twice": ("x.json", lambda text: json.dumps({"a": json.dumps(f"x\n{text}")}).encode()),
    "after a number": ("x.jinja", lambda text: f'{{{{ "\\x0a{text}" }}}}'.encode()),
    "in numbers": ("x.json", lambda text: f'{{"a": "{as_numbers(text)}"}}'.encode()),
    "in a field that comes twice": (
        "x.json",
        lambda text: f'{{"a": "{as_numbers(text)}", "a": 1}}'.encode(),
    ),
    "in quoted YAML": (
        "x.yaml",
        lambda text: f'- a: "x\\n{as_numbers(text)}"\n'.encode(),
    ),
    "in a YAML key that goes on": (
        "x.yaml",
        lambda text: f'"x {text[:8]}\\\n  {text[8:]}": 1\n'.encode(),
    ),
    "in a card's block": (
        "README.md",
        lambda text: f'---\na: "{as_numbers(text)}"\n---\n# b: c: d\n'.encode(),
    ),
    "in percent signs": ("x.md", lambda text: as_numbers(text, "%{:02x}").encode()),
    "in entities": ("x.SVG", lambda text: as_numbers(text, "&#{};").encode()),
    "in a file's name": ("{}.png", lambda text: b""),
    "UTF-16": ("x.txt", lambda text: f"\u4e2d {text}".encode("utf-16")),
    "UTF-16 without a mark": ("x.txt", lambda text: text.encode("utf-16-be")),
    "among bytes": ("x.model", lambda text: b"\xff\xfe\xfd\0" + text.encode() + b"\0\xff"),
    "a picture's text": ("x.png", lambda text: png(b"tEXt", b"Comment\0" + text.encode())),
    "a picture's packed text": (
        "x.png",
        lambda text: png(b"zTXt", b"Comment\0\0" + zlib.compress(text.encode())),
    ),
    "a picture's packed Unicode": (
        "x.PNG",
        lambda text: png(b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(text.encode())),
    ),
    "metadata of weights": (
        "x.safetensors",
        lambda text: json.dumps({"__metadata__": {"a": f"x\n{text}"}}).encode(),
    ),
}
TOKEN = "hf" + "_aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"


@pytest.mark.parametrize("way", FILES)
def test_a_credential_is_found_however_a_file_holds_it(way):
    name, write = FILES[way]
    found = credential_in_file(name.format(TOKEN), write(TOKEN))
    assert found is not None
    assert found[0] == "a Hugging Face token"
    assert credential_in_file(name.format("curve"), write("no secret at all, sixty times")) is None


def test_the_scan_reads_a_large_tokenizer_once_and_does_not_stall():
    words = json.dumps({"vocab": {f"w\n{number}x_sk-hf_": number for number in range(20_000)}})
    assert credential_in_file("tokenizer.json", words.encode()) is None
    assert credential_in_file("x.json", b'{"a": "\\ud800"}' + b"[" * 100_000) is None
    assert credential_in_file("x.yaml", b"[" * 2_000 + b"&a *a") is None


@pytest.mark.parametrize(
    ("word", "portable_word"),
    [
        ("/home/me/data/x.csv", "x.csv"),
        ("data.text=[/home/me/a.txt, '/home/me/b.txt']", "data.text=[a.txt, 'b.txt']"),
        ("data.task_args={data: /home/me/x.csv, lag: 8}", "data.task_args={data: x.csv, lag: 8}"),
        ('data.task_args={"data":"~/d/x.csv"}', 'data.task_args={"data":"x.csv"}'),
        ("{a: {b:   '/home/me/x'}}", "{a: {b:   'x'}}"),
        ("{/home/me/x: 1}", "{x: 1}"),
        ("folder:/home/me/out", "folder:out"),
        ("file:///home/me/x.txt", "file://x.txt"),
        ("data=('/home/me/a','/home/me/b')", "data=('a','b')"),
        ("prompt=What is 3: / 4, or ~1/2", "prompt=What is 3: / 4, or ~1/2"),
        ("https://host/me/x", "https://host/me/x"),
        ("you/repo", "you/repo"),
        ("s5:s5-lra", "s5:s5-lra"),
    ],
)
def test_a_recorded_command_names_no_folder_of_this_machine(word, portable_word):
    assert portable_command([word]) == shlex.join([portable_word])


def test_values_and_names_that_are_paths_are_cut():
    told = {"/home/me/a": ["file:///home/me/b", "~/c", "you/d", "half: ~1/2"]}
    assert portable(told) == {"a": ["b", "c", "you/d", "half: ~1/2"]}


def test_a_key_with_its_secret_is_struck_out_whole():
    before, secret, after = KEY_AND_SECRET
    assert without_credentials(f"[{before}{secret}{after}, x]") == "[s3://***@bucket/data, x]"


@pytest.mark.parametrize("text", HARMLESS)
def test_hashes_names_ports_and_plain_addresses_are_no_credentials(text):
    assert find_credential(text) is None
    assert without_credentials(text) == text


@pytest.fixture
def model(tmp_path):
    """A run's model, as small as a file can be, with a credential of each kind in all that is said
    of it."""
    run = tmp_path / "run"
    folder = run / "model"
    folder.mkdir(parents=True)
    addresses = ["".join(parts[-3:]) for parts in (*PLANTED, KEY_AND_SECRET)]
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": addresses[0]}))
    save_file({"x": torch.zeros(2)}, folder / "model.safetensors")
    facts = {"command": " ".join(addresses), "data": {"names": addresses}}
    (run / "run.json").write_text(json.dumps(facts))
    recipe = "".join(f"- {json.dumps(address)}\n" for address in addresses)
    (run / "recipe.yaml").write_text(recipe)
    (run / "metrics.jsonl").write_text("")
    score = {"task": addresses[0], "metric": "m", "value": 1.0, "settings": {"text": addresses[1]}}
    results = {
        "model": {"name": "x", "source": "x", "revision": weights_revision(folder)},
        "results": [score],
        "command": "\n".join(addresses),
        "hardware": addresses[2],
    }
    (run / "raw.json").write_text(json.dumps(results))
    write_results(run / "written.json", results)  # type: ignore[arg-type]
    return folder


def holds_a_secret(text):
    secrets = [parts[-2] for parts in (*PLANTED, KEY_AND_SECRET)]
    return [secret for secret in secrets if secret in text or json.dumps(secret)[1:-1] in text]


def test_no_credential_gets_into_a_card_the_file_beside_it_or_results(model, tmp_path):
    run = model.parent
    assert len(holds_a_secret((run / "raw.json").read_text())) == len(PLANTED) + 1
    assert not holds_a_secret((run / "written.json").read_text())
    card = render_card(model, results=[run / "raw.json"], output=tmp_path / "card.md")
    assert not holds_a_secret(card.read_text())
    assert not holds_a_secret((tmp_path / "card.json").read_text())


@pytest.mark.parametrize(
    "file", ["config.json", "README.md", "tokenizer_config.json", "escaped", "linked"]
)
def test_a_credential_is_not_published_and_not_shown(file, tmp_path, capsys):
    kind, *parts = PLANTED[3]
    secret = "".join(parts)
    folder = tmp_path / "model"
    folder.mkdir()
    texts = {
        "config.json": '{\n"model_type": "gpt2"\n}',
        "tokenizer_config.json": "{}",
        "README.md": "---\nlibrary_name: transformers\n---\n\n# tiny\n",
    }
    if file in ("README.md", "linked"):
        texts["README.md"] += secret
    elif file == "escaped":
        written = "".join(f"\\u{ord(character):04x}" for character in secret)
        texts["config.json"] = f'{{"model_type": "gpt2", "note": "{written}"}}'
    else:
        texts[file] = json.dumps({"model_type": "gpt2", "note": [secret]}, indent=1)
    for name, text in texts.items():
        (folder / name).write_text(text)
    if file == "linked":  # to what by its own name is no text
        (folder / "README.md").rename(folder / "card")
        (folder / "README.md").symlink_to("card")
    save_file({"x": torch.zeros(2)}, folder / "model.safetensors")
    for options in (["--dry-run"], []):
        assert main(["publish", str(folder), f"folder:{tmp_path / 'out'}", *options]) == 2
        out, err = capsys.readouterr()
        name = {"escaped": "config.json", "linked": "README.md"}.get(file, file)
        place = "line 6" if name == "README.md" else "line 4"
        place = "with escaped characters" if file == "escaped" else place
        assert f"{name} must hold no credential, got {kind} ({place}); take it out" in err
        assert err.count("\n") == 1
        assert not holds_a_secret(out + err)
    assert not (tmp_path / "out").exists()


def test_a_commit_message_and_an_error_show_no_credential(tmp_path, capsys):
    secret = "".join(PLANTED[3][1:])
    with pytest.raises(ValueError, match="commit_message must hold no credential") as caught:
        publish(tmp_path, "tester/x", commit_message=secret)
    assert not holds_a_secret(str(caught.value))
    assert main(["train", f"{secret}.yaml"]) == 2
    err = capsys.readouterr().err
    assert "no recipe 'https://***@host.yaml'" in err
    assert main(["train", f"{secret}.yaml", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert not holds_a_secret(err)
