"""Secrets are masked by name, by form, in addresses and as values of the environment; other text stays."""

from pathlib import Path

import pytest
from forked import run
from limited import under_limits

from draftforge.data.redact import Redactor
from draftforge.masking import holds_key, masked, masked_value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://u:p@h:1/x and mysql://r:s@t/d", "see http://***@h:1/x and mysql://***@t/d"),
        ("postgresql://user:pa/ss@host/db", "postgresql://***@host/db"),
        ("http://me:s3cr@et/x@127.0.0.1:9 and http://token@host", "http://***@127.0.0.1:9 and http://***@host"),
        (f"db://me:{'p' * 5000}@host and https:/me:pw@host", "db://***@host and https:/***@host"),
        ("https://host/x?sig=abc%20&y=1", "https://host/x?sig=***&y=1"),
        ("AWS_SECRET_ACCESS_KEY=abc next", "AWS_SECRET_ACCESS_KEY=*** next"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": "***", "n": 1}'),
        ("curl --auth-token abc -d x", "curl --auth-token *** -d x"),
        ("--password=abc", "--password=***"),
        ("--password 'a b, c' x, token=\"d e\" y", "--password '***' x, token=\"***\" y"),
        ("{'password': 'a b', 'n': 1}", "{'password': '***', 'n': 1}"),
        ("Authorization: Bearer abcdef123", "Authorization: Bearer ***"),
        ("password: hunter2", "password: ***"),
        ("--db-admin-password=abc PGPASSWORD=abc", "--db-admin-password=*** PGPASSWORD=***"),
        (
            "https://h/x?X-Amz-Signature=abc&X-Amz-Security-Token=de",
            "https://h/x?X-Amz-Signature=***&X-Amz-Security-Token=***",
        ),
        ("got hf_abcdefghij0123456789 there", "got *** there"),
        ("curl -u ann:pw -U 'a:p w' x", "curl -u *** -U '***' x"),
        ('curl -uann:pw --user=ann:pw --proxy-user "a b:c" x', 'curl -u*** --user=*** --proxy-user "***" x'),
        ("curl -H 'Cookie: a=b; c=d' -b sid=1 --cookie 's=1; t=2' x", "curl -H 'Cookie: ***' -b *** --cookie '***' x"),
        ('curl -H "Authorization: hunter two" -H X-Api-Key:abc x', 'curl -H "Authorization: ***" -H X-Api-Key:*** x'),
        ("curl -H 'X-Api-Key: abc def' -H \"Token: it's\" x", "curl -H 'X-Api-Key: ***' -H \"Token: ***\" x"),
        ("curl -u 1000:1000x -u ann:1000", "curl -u *** -u ***"),
        ("Set-Cookie: sid=ab; Path=/\nHost: h", "Set-Cookie: ***\nHost: h"),
        ("Authorization: Digest username=u, response=r\nHost: h", "Authorization: ***\nHost: h"),
        ("{'Authorization': 'Basic abcdefgh', 'Cookie': 'a b'}", "{'Authorization': '***', 'Cookie': '***'}"),
    ],
)
def test_secrets_are_masked(text: str, shown: str) -> None:
    assert masked(text, {}) == shown
    assert masked(shown, {}) == shown


@pytest.mark.parametrize(
    "text",
    [
        "eos_token=5 pad_token=<pad> max_new_tokens=8",
        "DRAFTFORGE_WEBHOOK_SECRET: is not set; it must hold the secret",
        "registry.password: unknown key; the nearest known one is registry.model",
        "the prompt has token 128 ('x'), the embeddings have 64 rows",
        "basic functionality of bearer tokens",
        "docker run -u 1000:1000 --user '0:0' i; python -u pkg.mod:main; /usr/bin/python3.12 -u pkg.mod:main",
        "python -u train.py --user ann --cookie-jar jar, -b main, cookie: none, -u http://h/x",
        "see http://h/x?u=a:b@c, git@host:me/it.git and C:/me@work",
        "npm_config_registry_mirror_url and hf_transfer_enable_fast_mode",
    ],
)
def test_what_errors_say_stays(text: str) -> None:
    assert masked(text, {}) == text


def test_values_of_secret_variables_are_masked() -> None:
    variables = {"DB_PASSWORD": "correct horse", "HOME_TOWN": "correct horses", "API_KEY": "short"}
    assert masked("it is correct horse; short", variables) == "it is ***; short"
    # A shell's working folder is no password: every path below it would be hidden.
    assert masked("/data/runs/report.html", {"PWD": "/data/runs", "OLDPWD": "/data/runs"}) == "/data/runs/report.html"


def test_values_are_masked_by_their_keys_and_flags() -> None:
    value = {
        "command": ["/bin/x", "--password", "p", "--out", "f", "TOKEN=z"],
        "api_key": "v",
        "api_key_env": "NAME",
        "deep": [{"secret": "s", "n": 3, "none": None}],
        "curl": [
            "curl",
            "-u",
            "a:b",
            "-H",
            "Cookie: a",
            "-H",
            "Authorization: Custom x",
            "-b",
            "a=b",
            "-u",
            "ann",
            "-",
            3,
        ],
        "headers": {"Authorization": "plain", "cookie": "a=b"},
        "left": ["docker", "run", "-u", "1000:1000", "/bin/python3", "-u", "pkg.mod:main"],
    }
    assert masked_value(value) == {
        "command": ["/bin/x", "--password", "***", "--out", "f", "TOKEN=***"],
        "api_key": "***",
        "api_key_env": "NAME",
        "deep": [{"secret": "***", "n": 3, "none": None}],
        "curl": [
            "curl",
            "-u",
            "***",
            "-H",
            "Cookie: ***",
            "-H",
            "Authorization: ***",
            "-b",
            "***",
            "-u",
            "ann",
            "-",
            3,
        ],
        "headers": {"Authorization": "***", "cookie": "***"},
        "left": value["left"],
    }


@pytest.mark.slow
def test_long_texts_are_masked_in_linear_time(tmp_path: Path) -> None:
    ended = run(under_limits, [256, 30, __file__, "_mask_long_texts"], tmp_path / "log")
    assert ended.code == 0, ended.said  # a quadratic pattern would take many minutes of the CPU


def _mask_long_texts() -> None:
    for piece in (
        "//a:",
        "//a@",
        "--token ",
        "a_",
        "bearer ",
        "sk-",
        "eyJaaaaaaaa.",
        "password",
        "-u a",
        "'cookie:",
        "-b a=",
        "-H ",
    ):
        masked(piece * (200_000 // len(piece)), {})


@pytest.mark.parametrize(
    "key",
    [
        "nvapi-" + "a1B2" * 12,
        "xai-" + "a1B2" * 20,
        "gsk_" + "a1B2" * 13,
        "hvs." + "a1B2" * 9,
        "tskey-auth-" + "a1B2" * 6,
    ],
)
def test_keys_that_redaction_knows_are_masked_too(key: str) -> None:
    assert masked(f"use {key} here", {}) == "use *** here" and holds_key(key)
    assert Redactor(["key"]).text(f"use {key} here") == "use <key> here"


@pytest.mark.parametrize(
    "value", ["topsecretvalue", "topsecretvalue\n", " topsecretvalue\r\n", 'top\\secret"va\tlue\n']
)
def test_a_secret_variable_is_masked_as_errors_quote_it(value: str) -> None:
    """A key that is read from a file often ends with its newline, at which requests fails and quotes the header."""
    for said in (value, value.strip(), f"header value: {'Bearer ' + value!r}"):
        assert "secret" not in masked(f"failed: {said}", {"MLFLOW_TRACKING_TOKEN": value})
