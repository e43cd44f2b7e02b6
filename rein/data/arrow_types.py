"""Arrow types in, what Rein makes of them out: which are text, and times in the unit that Python has."""

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def has_empty_struct(kind: pa.DataType) -> bool:
    """Whether a struct without fields is inside: Parquet cannot store it."""
    if pa.types.is_struct(kind) and kind.num_fields == 0:
        return True
    return any(has_empty_struct(kind.field(i).type) for i in range(kind.num_fields))


def in_microseconds(batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
    """The batch with times as Python can hold them: pandas writes nanoseconds."""
    if batch is None:
        return None
    kinds = [_microseconds(kind) for kind in batch.schema.types]
    if kinds == batch.schema.types:
        return batch
    columns = [c.cast(kind, safe=False) for c, kind in zip(batch.columns, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _microseconds(kind: pa.DataType) -> pa.DataType:
    """The type with each `ns` inside as `us`; other types as they are."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz) if kind.unit == "ns" else kind
    if pa.types.is_duration(kind):
        return pa.duration("us") if kind.unit == "ns" else kind
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_microseconds(f.type)) for f in kind])
    for is_kind, make in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return make(kind.value_field.with_type(_microseconds(kind.value_type)))
    return kind
