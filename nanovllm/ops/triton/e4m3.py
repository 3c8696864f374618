"""8-bit floats (e4m3: a sign, 4 bits of exponent with bias 7, 3 of mantissa) in the bytes of a KV cache.

Triton knows the type from sm_89 on only, and there alone cards convert it. So the cache is bytes (uint8), written by
integer arithmetic everywhere and read by it before sm_89. Both are exact: the same bits as torch.float8_e4m3fn, but
that a number beyond +-448, the largest, becomes that one. NaN is 0x7f or 0xff; there are no infinities.

Reading: an fp16 has 5 bits of exponent with bias 15 and 10 of mantissa. The seven bits below the sign, shifted by 7,
are an fp16 of the same number divided by 2^(15 - 7), whether it is normal or subnormal.

Writing: three of 23 bits of mantissa stay. Adding half of what is cut, less one unless the last bit that stays is odd,
rounds to the nearest and ties to even; a carry into the exponent is right as it is. Below 2^-6, where all numbers are
multiples of 2^-9, the sum with 2^14 rounds for us: fp32 numbers there are multiples of 2^-9 as well.
"""

import triton
import triton.language as tl

from nanovllm.ops.fp8 import E4M3_MAX
from nanovllm.ops.triton.common import capability

PLAIN, BY_SHIFTS, BY_CARD = 0, 1, 2  # FORM of the kernels: numbers of the model's dtype; bytes, and how they are read
FP8_UNITS = (8, 9)  # the first card that converts and multiplies 8-bit floats
LARGEST = tl.constexpr(E4M3_MAX)
SMALLEST_NORMAL = tl.constexpr(0.015625)  # 2^-6
SUBNORMAL_SUM = tl.constexpr(16384.0)  # 2^14
FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def to_e4m3(x):
    """fp32 -> uint8."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    normal = size.to(tl.int32, bitcast=True)
    normal = ((normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (size + SUBNORMAL_SUM).to(tl.int32, bitcast=True) & 0x7FFFFF
    number = tl.where(size < SMALLEST_NORMAL, subnormal, normal)
    return (sign | tl.where(x == x, number, 0x7F)).to(tl.uint8)


@triton.jit
def beside_e4m3(q):
    """q in the dtype in which it meets numbers of the cache: float16 instead of bfloat16. A card converts two bytes to
    float16 by one instruction, to bfloat16 by four; float16 holds every e4m3 number, and more bits of q and of the
    softmax's weights than bfloat16. What it cannot hold of q becomes its largest number: an infinity would make NaN."""
    if q.dtype == tl.bfloat16:
        return tl.clamp(q.to(tl.float32), -FLOAT16_MAX, FLOAT16_MAX).to(tl.float16)
    else:
        return q


@triton.jit
def from_e4m3(stored, FLOAT: tl.constexpr, FORM: tl.constexpr):
    """uint8 -> FLOAT: fp16, bf16 and fp32 hold every e4m3 number."""
    if FORM == 2:  # BY_CARD
        number = stored.to(tl.float8e4nv, bitcast=True)
        if FLOAT is tl.bfloat16:
            # By way of fp32: from fp16 to bfloat16 Hopper converts 16 numbers a clock on each multiprocessor, hardly as
            # many as it reads.
            number = number.to(tl.float16).to(tl.float32)
        return number.to(FLOAT)
    number = (stored & 0x7F).to(tl.uint16)
    half = ((stored & 0x80).to(tl.uint16) << 8) | (number << 7)
    half = tl.where(number == 0x7F, 0x7E00, half).to(tl.uint16)
    return (half.to(tl.float16, bitcast=True) * 256.0).to(FLOAT)


def form_of(cache, scales) -> int:
    """The FORM in which kernels read a cache on its card."""
    if scales is None:
        return PLAIN
    return BY_CARD if capability(cache.device) >= FP8_UNITS else BY_SHIFTS
