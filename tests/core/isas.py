"""The same work on every instruction set this machine runs."""

from pagedkv.core._kernels import _use_isa, isa, isa_names


def on_every_isa(work, names=None):
    """{ISA name: work()}, the ISA in use restored. `names`: only these."""
    before = isa()
    results = {}
    try:
        for name in names or isa_names():
            _use_isa(name)
            assert isa() == name
            results[name] = work()
    finally:
        _use_isa(before)
    return results


def assert_one_result(results):
    """Every entry of a dict of bytes is the same; else says which differ from the last."""
    *others, (reference, expected) = results.items()
    different = [name for name, found in others if found != expected]
    assert not different, f"{different} differ from {reference}"
