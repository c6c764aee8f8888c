"""Names of sessions that are being imported differ from all others."""

from kvd.session_files.target import is_unfinished, unfinished_name


def test_import_names_are_unique():
    """No two are equal, and no session has one."""
    names = {unfinished_name() for _ in range(3)}
    assert len(names) == 3
    assert all(map(is_unfinished, names))
    assert not any(map(is_unfinished, ("import-1", "a", f"x{names.pop()}", "import-" + "g" * 32)))
