"""The tenants' secrets: for each a data key and the salt of its block keys, random.

They are kept wrapped by the master key, bound to the tenant's name. Both go together: without the
key nothing that the tenant has on SSD can be read, without the salt nobody can try out which text a
block key in the index stands for.

Any thread may look keys up; the event loop alone changes what there is.
"""

import secrets
from dataclasses import dataclass, field

from shared.encryption.key_file import SecretKey
from shared.encryption.sealing import KEY_BYTES, key_id, unwrap, wrap
from shared.types.block_key import SALT_BYTES
from shared.types.errors import ConfigError

_CHUNK_KEY = b"kvd chunk key"  # what a wrapped key is for


class WrongKeyError(ConfigError):
    """The master key is not the one that the state directory was encrypted with."""

    reason = "wrong_key"


class KeyNeededError(ConfigError):
    """The state directory has encrypted blocks, and no key file is set."""

    reason = "key_needed"


@dataclass(frozen=True, slots=True)
class TenantSecret:
    """What makes a tenant's blocks readable, and findable."""

    key: bytes = field(repr=False)
    salt: bytes = field(repr=False)


class Keyring:
    """See the module docstring.

    Args:
        master: wraps the secrets.
        is_sealing: whether what is written from now on is sealed; otherwise keys only open.

    Attributes:
        is_sealing: see above.
        fingerprint: of the master key.
    """

    def __init__(self, master: SecretKey, *, is_sealing: bool) -> None:
        self.is_sealing = is_sealing
        self.fingerprint = master.fingerprint
        self._master = master
        self._secrets: dict[str, TenantSecret] = {}
        self._keys: dict[bytes, bytes] = {}  # by key id, which extents name

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._secrets

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those that have a secret."""
        return tuple(self._secrets)

    def adopt(self, tenant: str, wrapped: bytes) -> bool:
        """Take a wrapped secret in; False if it is not what was wrapped for this tenant."""
        secret = open_secret(self._master, tenant, wrapped)
        if secret is not None:
            self._add(tenant, secret)
        return secret is not None

    def make(self, tenant: str, salt: bytes | None = None) -> bytes:
        """Make a tenant's secret, with the salt that it has already if it has one; wrapped."""
        salt = salt or secrets.token_bytes(SALT_BYTES)
        secret = TenantSecret(secrets.token_bytes(KEY_BYTES), salt)
        self._add(tenant, secret)
        return wrap_secret(self._master, tenant, secret)

    def salt_of(self, tenant: str) -> bytes:
        """Return the salt of a tenant that has a secret."""
        return self._secrets[tenant].salt

    def key_of(self, tenant: str) -> bytes:
        """Return the key by which a tenant's blocks are sealed now."""
        return self._secrets[tenant].key

    def wrapped_key_of(self, tenant: str) -> bytes:
        """Wrap a tenant's key, for chunks that another kvd with this master key is to open."""
        name = tenant.encode()
        return wrap(self._master.key, self.key_of(tenant) + name, _CHUNK_KEY)

    def unwrapped_key(self, wrapped: bytes) -> tuple[str, bytes] | None:
        """Undo wrapped_key_of: the tenant and its key; None if another master key wrapped it."""
        both = unwrap(self._master.key, wrapped, _CHUNK_KEY)
        if both is None:
            return None
        return both[KEY_BYTES:].decode(), both[:KEY_BYTES]

    def key_named(self, name: bytes) -> bytes | None:
        """Return the key with this id; None if it is not here (any more)."""
        return self._keys.get(name)

    def forget(self, tenant: str) -> None:
        """Drop the secret of a tenant, if there is one."""
        secret = self._secrets.pop(tenant, None)
        if secret is not None:
            del self._keys[key_id(secret.key)]

    def _add(self, tenant: str, secret: TenantSecret) -> None:
        self.forget(tenant)
        self._secrets[tenant] = secret
        self._keys[key_id(secret.key)] = secret.key


def wrap_secret(master: SecretKey, tenant: str, secret: TenantSecret) -> bytes:
    """Wrap a secret as it is kept in the index."""
    return wrap(master.key, secret.key + secret.salt, tenant.encode())


def open_secret(master: SecretKey, tenant: str, wrapped: bytes) -> TenantSecret | None:
    """Undo wrap_secret; None if key or tenant are others, or it is damaged."""
    both = unwrap(master.key, wrapped, tenant.encode())
    if both is None or len(both) != KEY_BYTES + SALT_BYTES:
        return None
    return TenantSecret(both[:KEY_BYTES], both[KEY_BYTES:])
