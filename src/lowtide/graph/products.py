"""Which operators multiply matrices with the BLAS library, at whose first product a thread takes a workspace."""

_PRODUCTS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "_addmm_activation",
    "_scaled_mm", "_int_mm",
})  # fmt: skip


def is_product(op_name: str) -> bool:
    """``"aten.mm.default" -> True``."""
    _, _, rest = op_name.partition(".")
    return rest.partition(".")[0] in _PRODUCTS
