// The selection in C++. NaN loses to any number.
#pragma once
#include "numbers.cuh"

inline void pick_one_of_each(
    float a, float b, float c, float d, float scale, float u, float& first, float& second, float& codes, float& largest) {
    const float most01 = b > a ? b : a, most23 = d > c ? d : c;
    first = most01 * scale, second = most23 * scale;
    codes += (b > a ? u : 0) + (d > c ? 4 * u : 0);
    largest = max_nan(a, b) + max_nan(c, d);
}

inline void pick_two_of_four(
    float a, float b, float c, float d, float scale, float u, float& first, float& second, float& codes, float& largest) {
    const float all[4] = {a, b, c, d};
    int kept[2], found = 0;
    for (int i = 0; i < 4 && found < 2; i++) {
        int beaten = 0;
        for (int k = 0; k < 4; k++) beaten += all[k] > all[i] || (all[k] == all[i] && k < i);
        if (beaten < 2) kept[found++] = i;
    }
    if (found < 2) kept[0] = 0, kept[1] = 1;  // NaN; the caller looks again
    first = all[kept[0]] * scale, second = all[kept[1]] * scale;
    codes += ((kept[0] | kept[1] << 2) - 8) * u;
    largest = max_nan(a, b) + max_nan(c, d);
}

inline void pick_one(float a, float b, float scale, float u, float& kept, float& codes, float& largest) {
    kept = (b > a ? b : a) * scale;
    codes += b > a ? 10 * u : 0;
    largest = max_nan(a, b);
}
