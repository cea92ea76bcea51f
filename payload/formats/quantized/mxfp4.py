"""MXFP4: quant_method `mxfp4`, the format of the experts of gpt-oss.

`NAME_blocks` is U8 of (experts, outputs, groups, 16): each byte has two 4-bit floats (E2M1), the
first in the low bits, so a group has 32 numbers along the inputs. `NAME_scales` is U8 of (experts,
outputs, groups): a group's factor is 2 ** (byte - 127), and 255 is NaN. The weight `NAME` is
(experts, inputs, outputs), so the last two dimensions are swapped.

Source: OCP Microscaling Formats, version 1.0, sections 5.2 and 5.4; transformers,
integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from payload.formats.quantized.stored_weight import (
    Format,
    StoredWeight,
    part,
    refuse,
    require_kind,
    stored,
)
from payload.formats.tensor_headers import TensorHeader

GROUP_BYTES = 16
_VALUES, _SCALES = "_blocks", "_scales"


class Mxfp4(Format):
    """Experts in 4-bit floats. Each group of 32 numbers has a scale that is a power of two."""

    def describe(self) -> str:
        """Return the format's name."""
        return "MXFP4"

    def weights(
        self, headers: Mapping[str, TensorHeader], *, dtype: str
    ) -> Iterator[tuple[str, StoredWeight]]:
        """Yield each stack of experts."""
        for values_name, values in headers.items():
            if not values_name.endswith(_VALUES) or values.dtype != "U8":
                continue
            name = values_name.removesuffix(_VALUES)
            scales_name = name + _SCALES
            scales = part(headers, scales_name, weight=values)
            if len(values.shape) != 4 or values.shape[-1] != GROUP_BYTES or 0 in values.shape:
                refuse(
                    values,
                    values_name,
                    f"has the shape {list(values.shape)}, but must be experts x outputs x groups x "
                    f"{GROUP_BYTES}",
                )
            experts, outputs, groups, _ = values.shape
            require_kind(scales, scales_name, dtypes=("U8",), shape=(experts, outputs, groups))
            inputs = groups * GROUP_BYTES * 2
            yield stored(
                name,
                values,
                parts={"scales": scales},
                layout="mxfp4",
                shape=(experts, inputs, outputs),
                dtype=dtype,
                bits=4,
                block=(GROUP_BYTES * 2, 1),
            )
