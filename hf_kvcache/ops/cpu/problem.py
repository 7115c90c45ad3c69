"""The records that Python hands to the compiled code: all sizes, offsets and addresses of one call."""

from __future__ import annotations

import numpy as np

DIRECT, INNER, OUTER = 0, 1, 2
PASS_FIELDS = ("kernel", "weights", "first", "rows", "codes", "head", "stride", "out")

_LONG, _REAL = np.int64, np.float64


def _longs(names: str) -> list[tuple[str, type]]:
    return [(name, _LONG) for name in names.split()]


# One side of a page. `mode` says where scales go: DIRECT has none to apply here, INNER scales the weights (a scale for
# each summed index), OUTER the sums (a scale for each column). Kernels run in `passes`, int64 [count, 8]:
# address; then, in numbers, where its weights start (past `first`); first byte row and byte rows; bytes to its codes in
# the page, from head to head, from row to row; where its sums go. OUTER sums have `chunks`: the group of each.
SIDE = np.dtype(
    _longs("mode passes pass_count blocks block summed weight_stride width planes groups group scale zero")
    + _longs("scale_step chunks chunk_count")
    + [("factor", _REAL)]
)

# What changes from call to call; strides in numbers for the query and the output, in bytes for keys and values.
CALL = np.dtype(
    _longs("query query_row query_head query_token out out_row out_head out_token sinks")
    + _longs("addresses table table_row starts lengths sealed counter ticket items splits scratch partial")
    + _longs("columns offset window")
    + _longs("sink_keys sink_values sink_row sink_head sink_value_row sink_value_head sink_count")
    + _longs("ring_keys ring_values ring_row ring_head ring_value_row ring_value_head ring_size")
    + _longs("new_keys new_values new_row new_head new_token new_value_row new_value_head new_value_token new_count")
    + [("scale", _REAL), ("slope", _REAL), ("cap", _REAL)]
)

# What follows from the layout, the shape and the dtypes. `rows` = query heads of a KV head times query tokens, padded
# to `padded` where kernels work on blocks of rows; `at_*` are bytes into one thread's scratch of `scratch_bytes`.
PLAN = np.dtype(
    _longs("heads groups tokens rows padded key_dim value_dim page query_kind query_stride exact_bytes")
    + _longs("key_rotation value_rotation key_codes value_codes k_scale k_zero k_step v_scale v_zero v_step")
    + _longs("softmax exact_softmax dots exact_product exact_blocks exact_block softcap")
    + _longs("at_query at_rotated at_scores at_out at_weights at_parts at_state at_ranges scratch_bytes")
    + [("key", SIDE), ("value", SIDE)]
)

PROBLEM = np.dtype([("call", CALL), ("plan", PLAN)])

# Encoding. One side: where its numbers come from (address and strides in numbers, of the exact ring and of the call's
# own tokens), and where a page keeps what they become. `kind`: see `encoder`; `bits` of the arrays of codes.
# `steer`: float32 [heads, dim, 2, rank] of `formats.steering`, or 0.
ENCODED_SIDE = np.dtype(
    _longs("new new_row new_head new_token ring ring_row ring_head ring_token")
    + _longs("is_key dim stored kind bits rotation per_channel group groups symmetric")
    + _longs("codes codes_head more more_head scale zero scale_head steer rank")
    + [("clip", _REAL)]
)

# What is written: `count` tokens (rows, columns of the call, pages, slots) or whole pages (rows, pages, and for each
# slot of each the ring slot, or `ring_size` plus the column, that it comes from). Lists of int64.
APPEND = np.dtype(
    _longs("addresses count rows columns pages slots ring_size heads page scratch")
    + [("key", ENCODED_SIDE), ("value", ENCODED_SIDE)]
)
