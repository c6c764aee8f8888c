"""The permissions of an identity."""

import pytest

from shared.access.identity import Identity, RoleDeniedError, TenantDeniedError, socket_identity


def _identity(*tenants: str, roles: tuple[str, ...] = ()) -> Identity:
    return Identity("it", "token", tenants, frozenset(roles))


@pytest.mark.parametrize(
    ("tenants", "requested", "meant"),
    [
        (("a", "b"), "", "a"),
        (("a", "b"), "b", "b"),
        (("*",), "", "default"),
        (("*",), "anybody", "anybody"),
        (("a", "*"), "", "a"),
        (("a", "*"), "z", "z"),
    ],
)
def test_a_request_has_a_tenant_of_its_caller(tenants, requested, meant):
    """The named one, or the caller's first."""
    assert _identity(*tenants).tenant(requested) == meant


@pytest.mark.parametrize(("tenants", "requested"), [(("a",), "b"), (("a",), "*"), ((), "")])
def test_other_tenants_are_denied(tenants, requested):
    """Existing or not; "*" cannot be named."""
    with pytest.raises(TenantDeniedError) as denied:
        _identity(*tenants).tenant(requested)
    assert denied.value.remedy
    assert denied.value.exit_code == 7


def test_operators_may_read():
    """The role operator includes reader, and no role includes operator."""
    operator = _identity("*", roles=("operator",))
    operator.check_role("reader")
    with pytest.raises(RoleDeniedError, match="engine"):
        operator.check_role("engine")
    with pytest.raises(RoleDeniedError, match="operator"):
        _identity("*", roles=("reader",)).check_role("operator")


def test_calls_for_all_tenants_need_all_tenants():
    """Others get a remedy."""
    socket_identity("s", ("*",), ("reader",)).check_all_tenants("GetStats")
    with pytest.raises(TenantDeniedError, match="GetStats, which concerns all tenants"):
        _identity("a").check_all_tenants("GetStats")
    assert _identity("a", "b").allowed_tenants == {"a", "b"}
    assert _identity("a", "*").allowed_tenants is None
