"""Settings of the object store that services share: the section [remote]."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shared.types.setting_types import Duration, Section, TextList


class RemoteSettings(Section):
    """The object store in which services share transcripts, and its keys.

    Attributes:
        url: the store, as in kvd's remote.url, but one that keeps what it has: not Mooncake; "":
            transcripts are on this server alone.
        unnamed: whether those of sessions that no client has named are there, too.
        key_file: file of the key that seals transcripts there, of `kvd key new`, or the name of a
            systemd credential; the same on all servers. "": they lie there as they are.
        old_key_files: files of keys that only open what lies there: the last one, after a change,
            or the next one, before it.
        plain: what becomes of transcripts there that are not sealed although there is a key:
            "read", or "refuse", which takes them for damaged.
        deadline_s: most seconds that a turn waits for an answer of it, each time.
    """

    url: Annotated[str, StringConstraints(pattern=r"^$|^(s3|gs|az|file)://[^@?#]+$")] = ""
    unnamed: bool = True
    key_file: str = ""
    old_key_files: TextList = ()
    plain: Literal["read", "refuse"] = "read"
    deadline_s: Duration = Field(default=2.0, gt=0, le=60)
