"""The keyring: each tenant's secret, which is a random data key and the salt of its block keys.

Secrets are stored wrapped by the master key, and bound to the tenant's name. Key and salt are
deleted together: without the key the tenant's blocks on SSD cannot be read; without the salt it
cannot be tested by trial which text a block key in the index stands for.

Any thread may look keys up; only the event loop adds and removes secrets.
"""

import secrets
from dataclasses import dataclass, field

from shared.encryption.key_file import SecretKey
from shared.encryption.sealing import KEY_BYTES, key_id, unwrap, wrap
from shared.types.block_key import SALT_BYTES
from shared.types.errors import ConfigError

_CHUNK_KEY = b"kvd chunk key"  # context that a wrapped key is bound to


class WrongKeyError(ConfigError):
    """The master key is not the one with which the state directory was encrypted."""

    reason = "wrong_key"


class KeyNeededError(ConfigError):
    """The state directory has encrypted blocks, and no key file is set."""

    reason = "key_needed"


@dataclass(frozen=True, slots=True)
class TenantSecret:
    """A tenant's data key, which opens its blocks, and salt, without which none is found."""

    key: bytes = field(repr=False)
    salt: bytes = field(repr=False)


class Keyring:
    """The secrets of all tenants.

    Args:
        master: master key, which wraps the secrets.
        is_sealing: whether new extents are sealed; otherwise keys only open old ones.

    Attributes:
        is_sealing: see Args.
        fingerprint: fingerprint of the master key.
    """

    def __init__(self, master: SecretKey, *, is_sealing: bool) -> None:
        self.is_sealing = is_sealing
        self.fingerprint = master.fingerprint
        self._master = master
        self._secrets: dict[str, TenantSecret] = {}
        self._keys: dict[bytes, bytes] = {}  # key id, which extents name → key

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._secrets

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenants that have a secret."""
        return tuple(self._secrets)

    def adopt(self, tenant: str, wrapped: bytes) -> bool:
        """Unwrap and add a tenant's secret; return False if it is damaged or another tenant's."""
        secret = open_secret(self._master, tenant, wrapped)
        if secret is not None:
            self._add(tenant, secret)
        return secret is not None

    def create(self, tenant: str, salt: bytes | None = None) -> bytes:
        """Create a tenant's secret, and return it wrapped.

        Args:
            tenant: name of the tenant.
            salt: salt that the tenant has already; None: create one.
        """
        salt = salt or secrets.token_bytes(SALT_BYTES)
        secret = TenantSecret(secrets.token_bytes(KEY_BYTES), salt)
        self._add(tenant, secret)
        return wrap_secret(self._master, tenant, secret)

    def salt_of(self, tenant: str) -> bytes:
        """Return the salt of a tenant that has a secret."""
        return self._secrets[tenant].salt

    def key_of(self, tenant: str) -> bytes:
        """Return the key that seals a tenant's new blocks."""
        return self._secrets[tenant].key

    def wrap_key(self, tenant: str) -> bytes:
        """Wrap a tenant's key for chunks that another kvd with this master key can open."""
        name = tenant.encode()
        return wrap(self._master.key, self.key_of(tenant) + name, _CHUNK_KEY)

    def unwrap_key(self, wrapped: bytes) -> tuple[str, bytes] | None:
        """Return the (tenant, key) of wrap_key(); None if another master key has wrapped it."""
        both = unwrap(self._master.key, wrapped, _CHUNK_KEY)
        if both is None:
            return None
        return both[KEY_BYTES:].decode(), both[:KEY_BYTES]

    def find_key(self, tenant_key_id: bytes) -> bytes | None:
        """Return the key with this id; None if it is unknown, or forgotten."""
        return self._keys.get(tenant_key_id)

    def forget(self, tenant: str) -> None:
        """Remove the secret of a tenant, if it has one."""
        secret = self._secrets.pop(tenant, None)
        if secret is not None:
            del self._keys[key_id(secret.key)]

    def _add(self, tenant: str, secret: TenantSecret) -> None:
        self.forget(tenant)
        self._secrets[tenant] = secret
        self._keys[key_id(secret.key)] = secret.key


def wrap_secret(master: SecretKey, tenant: str, secret: TenantSecret) -> bytes:
    """Wrap a secret for the index."""
    return wrap(master.key, secret.key + secret.salt, tenant.encode())


def open_secret(master: SecretKey, tenant: str, wrapped: bytes) -> TenantSecret | None:
    """Unwrap a secret; return None if it is damaged, or of another master key or tenant."""
    both = unwrap(master.key, wrapped, tenant.encode())
    if both is None or len(both) != KEY_BYTES + SALT_BYTES:
        return None
    return TenantSecret(both[:KEY_BYTES], both[KEY_BYTES:])
