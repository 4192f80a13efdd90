"""Who may ask: API keys compared in constant time, each with a cache namespace and a limit of its own."""

import hashlib
import hmac
from collections import Counter
from collections.abc import Mapping

from gateway_proc.errors import ApiError
from gateway_proc.key_file import digest_of


class Keys:
    """The keys of a running gateway: names by digest. With none of them, everybody may ask. `concurrency` bounds the
    live requests of each name, 0 is no limit."""

    def __init__(self, names: Mapping[bytes, str], concurrency: int = 0):
        self._names = names
        self._concurrency = concurrency
        self._live: Counter[str] = Counter()

    @property
    def required(self) -> bool:
        return bool(self._names)

    def name_of(self, authorization: str | None) -> str:
        """Whose key an Authorization header holds; "-" where no keys are asked for. Raises ApiError(401).

        Every key is compared, so that the time tells nothing about them.
        """
        if not self._names:
            return "-"
        if authorization is None:
            problem = "no API key was given; send it as: Authorization: Bearer KEY"
            raise ApiError(401, problem, code="missing_api_key")
        scheme, _, key = authorization.partition(" ")
        given = digest_of(key.strip().encode("utf-8", "surrogateescape"))
        found = ""
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, given):
                found = name
        if not found or scheme.lower() != "bearer":
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")
        return found

    def enter(self, name: str) -> None:
        """A request of `name` begins. Raises ApiError(429) when too many are live."""
        if self._concurrency and self._names and self._live[name] >= self._concurrency:
            problem = f"this API key has {self._concurrency} requests in work, which is its limit; try again later"
            raise ApiError(429, problem, code="concurrency_limit", retry_after_s=1.0)
        self._live[name] += 1

    def leave(self, name: str) -> None:
        self._live[name] -= 1
        if not self._live[name]:
            del self._live[name]


def namespace(key_name: str, salt: str | None) -> str:
    """The prefix cache namespace of a request: one for each key, and within it for each salt of the client."""
    if key_name == "-" and (salt is None or len(salt) <= 64):
        return salt or ""
    return hashlib.sha256(f"{key_name}\0{salt or ''}".encode()).hexdigest()
