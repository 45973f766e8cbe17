"""Where webhooks may go, and how they are signed."""

import base64
import ipaddress

import pytest

from common.job_settings import webhook_key
from common.key_settings import KeySettings
from common.settings import GatewaySettings
from gateway.webhook import RETRIES_S, UnsafeUrlError, again_s, check_url, public, signed

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

PRIVATE = [
    "http://127.0.0.1/", "http://127.1.2.3:80/x", "https://10.0.0.1", "http://192.168.1.1/",
    "http://172.16.0.9/", "http://169.254.169.254/latest", "http://0.0.0.0/", "http://[::1]/",
    "http://[::ffff:127.0.0.1]/", "http://[fe80::1]/", "http://[fd00::1]/", "http://[::]/",
    "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://100.64.0.1/",
    "http://224.0.0.1/", "http://localhost/", "http://LOCALHOST./", "http://a.localhost:1/",
    "http://127.0.0.1./", "http://metadata.google.internal/",
]  # fmt: skip
NEVER = [
    "http://127.1/", "http://2130706433", "http://0177.0.0.1/", "http://0/", "http://1.2.3.4.5/",
    "", "x", "ftp://example.org/", "//example.org/", "http://", "http:///x", "http://u@example.org/",
    "http://u:p@example.org/", "http://:p@example.org/", "http://example.org:0/",
    "http://example.org:99999/", "http://example.org/\r\nx: y", "http://exa mple.org/",
    "http://example.org\\@127.0.0.1/", "http://127%2e0.0.1/", "http://[fe80::1%25eth0]/",
    "http://ex\u00e4mple.org/", "http://example.org/" + "x" * 2_048, "javascript:alert(1)",
    "http://[::1/", "file:///etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("url", ["https://example.org/a?b=c#d", "http://93.184.216.34:8080/",
                                 "https://[2606:2800:220:1::1]/"])  # fmt: skip
def test_public_urls(url: str) -> None:
    check_url(url, False)


@pytest.mark.parametrize("url", PRIVATE)
def test_private_urls_only_where_allowed(url: str) -> None:
    with pytest.raises(UnsafeUrlError):
        check_url(url, False)
    check_url(url, True)


@pytest.mark.parametrize("url", NEVER)
def test_what_is_no_webhooks_url(url: str) -> None:
    for private in (False, True):
        with pytest.raises(UnsafeUrlError):
            check_url(url, private)


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("8.8.8.8", True), ("127.0.0.1", False), ("192.0.2.1", False), ("240.0.0.1", False),
        ("255.255.255.255", False), ("::ffff:8.8.8.8", True), ("::ffff:10.0.0.1", False),
        ("2001:db8::1", False), ("2606:4700::1", True), ("64:ff9b::808:808", False),
        ("64:ff9b::a00:1", False), ("ff02::1", False), ("2002:a00:1::", False),
    ],
)  # fmt: skip
def test_which_addresses_are_public(address: str, is_public: bool) -> None:
    assert public(ipaddress.ip_address(address)) is is_public


def test_signed_as_standard_webhooks_has_it() -> None:
    """The values are those of the specification's own libraries' tests."""
    body = b'{"test": 2432232314}'
    made = signed("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, [webhook_key(SECRET)] * 2)
    one = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert made["webhook-signature"] == f"{one} {one}"
    assert made["webhook-id"] == "msg_p5jXN8AQM9LWM0D4loKWxJek"
    assert made["webhook-timestamp"] == "1614265330"


def test_secrets() -> None:
    for bad in (
        "",
        "x" * 40,
        "whsec_",
        "whsec_!!!!",
        "whsec_" + base64.b64encode(b"x" * 23).decode(),
    ):
        with pytest.raises(ValueError, match="whsec_ and 24 to 64 bytes") as told:
            GatewaySettings(webhook_secret=bad)
        with pytest.raises(ValueError, match="whsec_ and 24"):
            KeySettings(secret="x" * 8, user="u", webhook_secret=bad)
        assert bad == "" or bad == "whsec_" or bad not in str(told.value)
    assert KeySettings(secret="x" * 8, user="u", webhook_secret=SECRET).stands_for("u")
    separate = KeySettings(secret="x" * 8, user="u", user_from=["header:X"], sub_users="separate")
    assert separate.stands_for("u/a") and not separate.stands_for("ua")
    assert not KeySettings(secret="x" * 8, user="u").stands_for("u/a")


def test_when_it_is_sent_again() -> None:
    first, last = "0" * 32, "f" * 32
    assert [again_s(first, n + 1) for n in range(len(RETRIES_S))] == list(RETRIES_S)
    for n, base in enumerate(RETRIES_S):
        later = again_s(last, n + 1)
        assert later is not None and base < later <= base * 1.2
    assert again_s(first, len(RETRIES_S) + 1) is None
