from __future__ import annotations

import base64

import pytest

from gateway.core.http.signing import signature, signing_key

#: the example of the Standard Webhooks specification
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_the_example_of_the_specification_is_signed_as_it_says() -> None:
    body = b'{"test": 2432232314}'
    signed = signature(signing_key(SECRET), "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("length", [24, 32, 64])
def test_a_secret_is_a_key_as_base64(length: int) -> None:
    key = bytes(range(length))
    assert signing_key("whsec_" + base64.b64encode(key).decode()) == key


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "whsec_",
        SECRET.removeprefix("whsec_"),
        "whsec_" + base64.b64encode(bytes(23)).decode(),
        "whsec_" + base64.b64encode(bytes(65)).decode(),
        SECRET + "!",
        "whsec_ü",
    ],
)
def test_invalid_signing_secret_is_refused(secret: str) -> None:
    with pytest.raises(ValueError):
        signing_key(secret)
