"""The commands `kvd key new` and `kvd key rotate`, for master keys. No kvd may run meanwhile."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvd import config
from kvd.cli.options import AsJson, Config, print_json
from shared.config.lazy_commands import WholeHelp
from shared.encryption.key_file import CREDENTIALS_ENV, KeyFileError, is_credential

key_app = typer.Typer(
    cls=WholeHelp,
    help="Make and change the key that encrypts SSD.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="A new file for the key.")]
StateDir = Annotated[Path | None, typer.Option(help="Directory of index and volumes.")]


@key_app.command("new")
def key_new(file: KeyFile, as_json: AsJson = False) -> None:
    """Write a new random key to a file that only its owner may read."""
    from shared.encryption.key_file import new_key, write_key

    key = new_key()
    write_key(file, key)
    if as_json:
        print_json({"file": str(file), "fingerprint": key.fingerprint})
    else:
        typer.echo(f"{file}: key {key.fingerprint[:8]}; keep a copy: without it nothing is read")


@key_app.command("rotate")
def key_rotate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new key, of kvd key new.")],
    old: Annotated[
        Path | None, typer.Option(help="File of the previous key. Default: encryption.key_file.")
    ] = None,
    config_file: Config = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Wrap every tenant's key with a new master key while kvd is stopped."""
    from kvd.caches.layout_opening import VOLUMES
    from kvd.caches.tenant_secrets import rotate_master_key
    from kvd.tiers.faults import NoFaults
    from kvd.tiers.index_database import MANIFEST_NAME
    from shared.encryption.key_file import read_key

    settings = config.load(config_file, {"state_dir": state_dir}).settings
    before = read_key(str(old.absolute()) if old else _key_in_force(settings))
    after = read_key(str(file.absolute()))
    with _no_kvd_running(settings.state_dir):
        index, volumes = settings.state_dir / MANIFEST_NAME, settings.state_dir / VOLUMES
        num_tenants = rotate_master_key(index, volumes, before, after, NoFaults())
    if as_json:
        print_json({"tenants": num_tenants, "fingerprint": after.fingerprint})
        return
    typer.echo(f"{num_tenants} tenants' keys are wrapped by key {after.fingerprint[:8]}")
    typer.echo(f"set encryption.key_file to {file.absolute()}, start kvd, and destroy the old key")


def _key_in_force(settings: config.Settings) -> str:
    """Return the setting encryption.key_file, if this process can read what it names.

    Raises:
        KeyFileError: it is not set, or is a credential that systemd passes to kvd alone.
    """
    name, remedy = settings.encryption.key_file, "give the file of the old key with --old"
    if not name:
        raise KeyFileError("encryption.key_file is not set", remedy)
    if is_credential(name) and CREDENTIALS_ENV not in os.environ:
        raise KeyFileError(
            f"encryption.key_file is the credential {name!r}, which systemd passes to kvd alone",
            remedy,
        )
    return name


@contextmanager
def _no_kvd_running(state_dir: Path) -> Iterator[None]:
    """Hold the lock of an existing state directory, so that no kvd can start.

    Raises:
        RunningError: a kvd holds it.
    """
    from kvd.host.directories import claim_directory

    if not state_dir.is_dir():  # claiming it would make it
        raise KeyFileError(
            f"the state directory {state_dir} does not exist",
            "give kvd's state directory with --state-dir",
        )
    lock_fd = claim_directory(state_dir, "state", "--state-dir")
    try:
        yield
    finally:
        os.close(lock_fd)
