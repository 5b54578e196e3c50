"""Turning words of fp8 values into words of bf16 values, two to a word: what the formats of the Hopper path decode by.

Words instead of bytes, because Triton keeps every byte of a tensor in a register of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(4)  # at once: neighbours, so that they share a scale


def _e4m3_to_bf16(n):
    """PTX that turns n words into 2 * n, step by step for all of them: one after the other, each would wait for itself.

    The product in fp32 is rounded once.
    """
    words, scale = [f"${2 * n + i}" for i in range(n)], f"${3 * n}"
    values = range(4 * n)
    code = [
        f"{{ .reg .b16 half<{2 * n}>, h<{4 * n}>;",
        f".reg .b32 pair<{2 * n}>;",
        f".reg .f32 x<{4 * n}>;",
        *(f"mov.b32 {{half{2 * i}, half{2 * i + 1}}}, {words[i]};" for i in range(n)),
        *(f"cvt.rn.f16x2.e4m3x2 pair{i}, half{i};" for i in range(2 * n)),
        *(f"mov.b32 {{h{2 * i}, h{2 * i + 1}}}, pair{i};" for i in range(2 * n)),
        *(f"cvt.f32.f16 x{i}, h{i};" for i in values),
        *(f"mul.f32 x{i}, x{i}, {scale};" for i in values),
        *(f"cvt.rn.bf16x2.f32 ${i // 2 + i % 2 * n}, x{2 * i + 1}, x{2 * i};" for i in range(2 * n)),
        "}",
    ]
    return " ".join(code), ",".join(["=&r"] * (2 * n) + ["r"] * n + ["f"] * n)


CODE, CONSTRAINTS = map(gl.constexpr, _e4m3_to_bf16(WORDS.value))


@gluon.jit
def e4m3_to_bf16(words, scale):
    """int32 [rows, n], four e4m3 values in each, times fp32 scales [rows, n] or [rows, 1]: int32 [rows, 2 * n], two bf16.

    `WORDS` neighbours lie in a thread, and have one scale.
    """
    words, scale = gl.broadcast(words, scale)
    first, second = gl.inline_asm_elementwise(
        CODE, CONSTRAINTS, [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=WORDS
    )
    return gl.reshape(gl.join(first, second), [words.shape[0], 2 * words.shape[1]])
