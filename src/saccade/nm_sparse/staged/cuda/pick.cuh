// The selection among neighbouring scores in single instructions. Comparisons, minima and selects share a pipe of half rate, and there are many of
// them. So codes add up in a float, and kept scores are picked by predicated multiplications with the scale: both run on the other pipe.
//
// codes: 2^23 plus 16 bits of metadata, which the float holds exactly; u is 16^i for the i-th four bits. NaN loses here to any number, but
// `largest` is NaN then. Equal scores leave the lower index.
#pragma once

// Two of a, b, c, d. codes start at 0x8, one of each pair: then 1 is added for b and 4 for d; both of the first pair are 0x4, of the
// second 0xE. `neither | both23` of the second comparison are its two results, joined with `not both01`.
__device__ __forceinline__ void pick_two_of_four(
    float a, float b, float c, float d, float scale, float u, float& first, float& second, float& codes, float& largest) {
    asm("{ .reg .pred both01, both23, apart, later;\n"
        ".reg .f32 most01, most23, least;\n"
        "max.NaN.f32 most01, %4, %5;\n"
        "max.NaN.f32 most23, %6, %7;\n"
        "min.f32 least, %4, %5;\n"
        "setp.ge.f32 both01, least, most23;\n"
        "min.f32 least, %6, %7;\n"
        "setp.gt.and.f32 both23|apart, least, most01, !both01;\n"
        "setp.gt.and.f32 later, %5, %4, apart;\n"
        "@later add.f32 %2, %2, %9;\n"
        "setp.gt.and.f32 later, %7, %6, apart;\n"
        "@later add.f32 %2, %2, %10;\n"
        "@both01 add.f32 %2, %2, %11;\n"
        "@both23 add.f32 %2, %2, %12;\n"
        "mul.f32 %0, most01, %8;\n"
        "mul.f32 %1, most23, %8;\n"
        "@both01 mul.f32 %0, %4, %8;\n"
        "@both01 mul.f32 %1, %5, %8;\n"
        "@both23 mul.f32 %0, %6, %8;\n"
        "@both23 mul.f32 %1, %7, %8;\n"
        "add.f32 %3, most01, most23; }"
        : "=&f"(first), "=&f"(second), "+f"(codes), "=&f"(largest)
        : "f"(a), "f"(b), "f"(c), "f"(d), "f"(scale), "f"(u), "f"(4 * u), "f"(-4 * u), "f"(6 * u));
}

// One of a, b and one of c, d: codes as above.
__device__ __forceinline__ void pick_one_of_each(
    float a, float b, float c, float d, float scale, float u, float& first, float& second, float& codes, float& largest) {
    asm("{ .reg .pred later;\n"
        ".reg .f32 most01, most23;\n"
        "max.NaN.f32 most01, %4, %5;\n"
        "max.NaN.f32 most23, %6, %7;\n"
        "setp.gt.f32 later, %5, %4;\n"
        "@later add.f32 %2, %2, %9;\n"
        "setp.gt.f32 later, %7, %6;\n"
        "@later add.f32 %2, %2, %10;\n"
        "mul.f32 %0, most01, %8;\n"
        "mul.f32 %1, most23, %8;\n"
        "add.f32 %3, most01, most23; }"
        : "=&f"(first), "=&f"(second), "+f"(codes), "=&f"(largest)
        : "f"(a), "f"(b), "f"(c), "f"(d), "f"(scale), "f"(u), "f"(4 * u));
}

// One of a, b in float32, whose codes start at 0x4 and end at 0xE.
__device__ __forceinline__ void pick_one(float a, float b, float scale, float u, float& kept, float& codes, float& largest) {
    asm("{ .reg .pred later;\n"
        "max.NaN.f32 %2, %3, %4;\n"
        "setp.gt.f32 later, %4, %3;\n"
        "@later add.f32 %1, %1, %6;\n"
        "mul.f32 %0, %2, %5; }"
        : "=&f"(kept), "+f"(codes), "=&f"(largest) : "f"(a), "f"(b), "f"(scale), "f"(10 * u));
}
