"""Settings of the object store that services share: the section [remote]."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shared.types.setting_types import Duration, Section, TextList


class RemoteSettings(Section):
    """The object store in which services share transcripts, and its keys.

    Attributes:
        url: the store, as in kvd's remote.url, but a durable one, so not Mooncake; "": transcripts
            are on this server only.
        unnamed: whether transcripts of sessions that no client has named are shared, too.
        key_file: file of the key that seals transcripts there, made by `kvd key new`, or the name
            of a systemd credential; the same on all servers. "": they are not sealed.
        old_key_files: files of keys that only open transcripts there: the last one, after a change,
            or the next one, before it.
        plain: how transcripts there are treated that are not sealed although there is a key:
            "read", or "refuse", which takes them for damaged.
        deadline_s: most seconds that a turn waits for each answer of the store.
    """

    url: Annotated[str, StringConstraints(pattern=r"^$|^(s3|gs|az|file)://[^@?#]+$")] = ""
    unnamed: bool = True
    key_file: str = ""
    old_key_files: TextList = ()
    plain: Literal["read", "refuse"] = "read"
    deadline_s: Duration = Field(default=2.0, gt=0, le=60)
