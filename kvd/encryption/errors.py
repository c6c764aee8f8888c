"""What can be wrong with keys, and with erasing by them."""

from shared.types.errors import ConfigError, StateError


class KeyFileError(ConfigError):
    """The file of the master key cannot be read, written or used."""

    reason = "key_file"


class WrongKeyError(ConfigError):
    """The master key is not the one that the state directory was encrypted with."""

    reason = "wrong_key"


class KeyNeededError(ConfigError):
    """The state directory has encrypted blocks, and no key file is set."""

    reason = "key_needed"


class NotErasableError(StateError):
    """What is asked for is not erased by deleting a key."""

    reason = "not_erasable"
