"""Converts a GGUF file to other types: every quantized tensor is rewritten as bf16 or q8_0.

    python gguf_again.py SmolLM2-135M-Instruct.Q4_1.gguf bf16 smollm2-bf16.gguf

Needs the package `gguf`. So llama.cpp computes with the very weights that Draftree's catalogue has.
"""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

TYPES = {"bf16": (GGMLQuantizationType.BF16, 32), "q8_0": (GGMLQuantizationType.Q8_0, 7)}


def main(source: str, kind: str, target: str) -> None:
    """Copy all fields, and all matrices in the new type; vectors become float32."""
    wanted, file_type = TYPES[kind]
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
