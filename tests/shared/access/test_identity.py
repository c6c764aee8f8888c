"""What an identity allows."""

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
def test_a_request_means_a_tenant_of_its_caller(tenants, requested, meant):
    """The one it names, or the caller's first."""
    assert _identity(*tenants).tenant(requested) == meant


@pytest.mark.parametrize(("tenants", "requested"), [(("a",), "b"), (("a",), "*"), ((), "")])
def test_a_tenant_of_others_is_denied(tenants, requested):
    """Be it there or not; "*" is no tenant that can be named."""
    with pytest.raises(TenantDeniedError) as denied:
        _identity(*tenants).tenant(requested)
    assert denied.value.remedy
    assert denied.value.exit_code == 7


def test_operators_may_look():
    """The role operator includes reader, and nothing includes operator."""
    operator = _identity("*", roles=("operator",))
    operator.check_role("reader")
    with pytest.raises(RoleDeniedError, match="engine"):
        operator.check_role("engine")
    with pytest.raises(RoleDeniedError, match="operator"):
        _identity("*", roles=("reader",)).check_role("operator")


def test_what_concerns_all_tenants_is_for_who_may_name_all():
    """Others get a remedy."""
    socket_identity("s", ("*",), ("reader",)).check_all_tenants("GetStats")
    with pytest.raises(TenantDeniedError, match="GetStats, which concerns all tenants"):
        _identity("a").check_all_tenants("GetStats")
    assert _identity("a", "b").allowed_tenants == {"a", "b"}
    assert _identity("a", "*").allowed_tenants is None
