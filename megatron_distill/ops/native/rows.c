/* Row functions of a CPU in one pass each. In torch every operation of these formulas is a pass
 * through the cache.
 *
 * Matrices are fp32 where nothing else is said, with columns side by side; strides count elements
 * from row to row. A result may lie where an operand does. A row's sum is added up in the same order
 * whatever threads there are.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__FMA__) && !defined(__aarch64__)
#error "the exponent's rounding is found by fused multiply-adds"
#endif

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 2^(exponent + rest) for a small rest; nothing below the normal numbers, NaN of NaN.
 * The polynomial is the one of least relative error, 2e-9, on [-1/2, 1/2]. */
static inline float two_to(float exponent, float rest) {
    const float whole = rintf(exponent);
    const float part = (exponent - whole) + rest;
    float power = 0.00015353362f;
    power = fmaf(power, part, 0.0013398875f);
    power = fmaf(power, part, 0.0096184374f);
    power = fmaf(power, part, 0.055503325f);
    power = fmaf(power, part, 0.24022648f);
    power = fmaf(power, part, 0.6931472f);
    power = fmaf(power, part, 1.0f);
    const float scale = float_of(((int32_t)whole + 127) << 23);
    return whole < -126.0f ? 0.0f : power * scale;
}

/* log((low + rise) / low) for low > 0 and rise >= 0, to all digits however small the rise is; NaN
 * of NaN.
 * With s = (high - low)/(high + low) it is 2 atanh(s); s is kept below 1/5 by a power of two, and
 * the polynomial is the one of least relative error, 3e-9, there. */
static inline float log_of_rise(float low, float rise) {
    const float high = low + rise;
    const int32_t doublings = (bits_of(high) - bits_of(low) + (1 << 22)) >> 23;
    const float near = float_of(bits_of(high) - (doublings << 23));
    /* Of the sum, a small rise has few digits left. */
    const float s = (doublings == 0 ? rise : near - low) / (near + low);
    const float square = s * s;
    float series = 0.30365252f;
    series = fmaf(series, square, 0.39957608f);
    series = fmaf(series, square, 0.66666950f);
    series = fmaf(series * square, s, 2.0f * s);
    const float logarithm = fmaf((float)doublings, 0.69314718f, series);
    return high == high ? logarithm : high;
}

/* Columns of which the largest is found before its column is looked for. */
enum { SEGMENT = 2048 };

/* The largest value of each row, NaN if there is one, and the lowest column that has it. */
void tops(const float *values, int64_t values_stride, float *top, int64_t *top_columns,
          int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *from = values + row * values_stride;
        float best = -INFINITY;
        int64_t column = 0;
        for (int64_t first = 0; first < columns && best == best; first += SEGMENT) {
            const int64_t end = first + SEGMENT < columns ? first + SEGMENT : columns;
            float most = -INFINITY;
            int32_t has_nan = 0;
#pragma omp simd reduction(max : most) reduction(| : has_nan)
            for (int64_t at = first; at < end; ++at) {
                most = from[at] > most ? from[at] : most;
                has_nan |= from[at] != from[at];
            }
            if (has_nan || most > best) {
                best = has_nan ? NAN : most;
                column = first;
            }
        }
        while (best == best ? from[column] != best : from[column] == from[column])
            ++column;
        top[row] = best;
        top_columns[row] = column;
    }
}

/* out = values factor with one factor per row, and no less than least; NaN of NaN. */
void bounded_products(const float *values, int64_t values_stride, const float *factors,
                      float least, float *out, int64_t out_stride, int64_t rows, int64_t columns,
                      int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *from = values + row * values_stride;
        const float factor = factors[row];
        float *to = out + row * out_stride;
#pragma omp simd
        for (int64_t column = 0; column < columns; ++column) {
            const float product = from[column] * factor;
            to[column] = product < least ? least : product;
        }
    }
}

/* out = e^((logits - point) / temperature) for one point per row; sums[row] in fp64, if wanted.
 * The slope is log2(e)/temperature in two parts; lowest, which is finite, is far enough below. */
void exponentials(const float *logits, int64_t logits_stride, const float *points, float slope,
                  float slope_rest, float lowest, float *out, int64_t out_stride, double *sums,
                  int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *from = logits + row * logits_stride;
        float *to = out + row * out_stride;
        const float point = points[row];
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (int64_t column = 0; column < columns; ++column) {
            const float gap = from[column] - point;
            const float bounded = gap < lowest ? lowest : gap;
            const float exponent = bounded * slope;
            const float rounded_off = fmaf(bounded, slope, -exponent);
            to[column] = two_to(exponent, fmaf(bounded, slope_rest, rounded_off));
            sum += to[column];
        }
        if (sums)
            sums[row] = sum;
    }
}

/* out = log(m/of) in m = own of + share other, own + share = 1; in rows that are not anchored
 * log(m/(own of)). The first is exact near of == other, the second near other == 0. */
void surprises(const float *of, int64_t of_stride, const float *other, int64_t other_stride,
               float own, float share, const uint8_t *anchored, float *out, int64_t out_stride,
               int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *mine = of + row * of_stride;
        const float *others = other + row * other_stride;
        float *to = out + row * out_stride;
        if (anchored[row]) {
#pragma omp simd
            for (int64_t column = 0; column < columns; ++column) {
                const float gap = others[column] - mine[column];
                const float mixture = fmaf(share, others[column], own * mine[column]);
                const float low = gap < 0.0f ? mixture : mine[column];
                to[column] = copysignf(log_of_rise(low, share * fabsf(gap)), gap);
            }
        } else {
#pragma omp simd
            for (int64_t column = 0; column < columns; ++column)
                to[column] = log_of_rise(own * mine[column], share * others[column]);
        }
    }
}

/* sums[row] = sum of weight (left - right), a difference being no larger than most, which is finite,
 * and nothing where it is not a number: where both are infinite. */
void weighted_gaps(const float *weights, int64_t weights_stride, const float *left,
                   int64_t left_stride, const float *right, int64_t right_stride, float most,
                   double *sums, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *weight = weights + row * weights_stride;
        const float *lefts = left + row * left_stride;
        const float *rights = right + row * right_stride;
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (int64_t column = 0; column < columns; ++column) {
            const float gap = lefts[column] - rights[column];
            const float above = gap > -most ? gap : -most;
            const float bounded = above < most ? above : most;
            sum += weight[column] * (gap == gap ? bounded : 0.0f);
        }
        sums[row] = sum;
    }
}

/* out = left left_factor - right right_factor, with one factor of each per row. Both products are
 * rounded before: of equal ones nothing is left. */
void differences(const float *left, int64_t left_stride, const float *left_factors,
                 const float *right, int64_t right_stride, const float *right_factors, float *out,
                 int64_t out_stride, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *lefts = left + row * left_stride;
        const float *rights = right + row * right_stride;
        const float left_factor = left_factors[row];
        const float right_factor = right_factors[row];
        float *to = out + row * out_stride;
#pragma omp simd
        for (int64_t column = 0; column < columns; ++column)
            to[column] = lefts[column] * left_factor - rights[column] * right_factor;
    }
}

/* out = weight (scale slope - reference) with one reference per row, and its sums in fp64. */
void pulls(const float *slopes, int64_t slopes_stride, float scale, const float *references,
           const float *weights, int64_t weights_stride, float *out, int64_t out_stride,
           double *sums, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *slope = slopes + row * slopes_stride;
        const float *weight = weights + row * weights_stride;
        const float reference = references[row];
        float *to = out + row * out_stride;
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (int64_t column = 0; column < columns; ++column) {
            const float pull = weight[column] * fmaf(scale, slope[column], -reference);
            to[column] = pull;
            sum += pull;
        }
        sums[row] = sum;
    }
}

/* Columns of which the largest is found first. */
enum { PART = 64 };

/* bf16 is the upper half of fp32. */
static inline float value_at(const void *row, int64_t column, int is_bf16) {
    if (is_bf16)
        return float_of((int32_t)((uint32_t)((const uint16_t *)row)[column] << 16));
    return ((const float *)row)[column];
}

/* A number whose order is that of the values, the largest first, and of equal ones' columns. */
static inline uint64_t rank_of(float value, int64_t column) {
    const uint32_t bits = (uint32_t)bits_of(value + 0.0f); /* minus zero is zero */
    const uint32_t descending = bits >> 31 ? bits : ~(bits | 0x80000000u);
    return (uint64_t)descending << 32 | (uint64_t)column;
}

static int by_rank(const void *left, const void *right) {
    const uint64_t one = *(const uint64_t *)left, other = *(const uint64_t *)right;
    return (one > other) - (one < other);
}

/* The number that has so many before it in descending order; exchanges the numbers. */
static float selected(float *numbers, int64_t count, int64_t before) {
    int64_t first = 0, last = count - 1;
    while (first < last) {
        const float pivot = numbers[first + (last - first) / 2];
        int64_t up = first, down = last;
        while (up <= down) {
            while (numbers[up] > pivot)
                ++up;
            while (pivot > numbers[down])
                --down;
            if (up <= down) {
                const float held = numbers[up];
                numbers[up++] = numbers[down];
                numbers[down--] = held;
            }
        }
        if (before <= down)
            last = down;
        else if (before >= up)
            first = up;
        else
            break;
    }
    return numbers[before];
}

/* Whether the k largest of a row were found: among what reaches the k-th of the parts' maxima, which
 * is hardly more. Not if that is more than most, as of equal values, or if there is a NaN. */
static inline __attribute__((always_inline)) int
largest_of_row(const void *row, int is_bf16, int64_t columns, int64_t k, float *maxima,
               float *exchanged, uint64_t *ranks, int64_t most, int64_t *largest) {
    const int64_t parts = (columns + PART - 1) / PART;
    int32_t has_nan = 0;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = part * PART;
        float maximum = -INFINITY;
        if (first + PART <= columns) {
#pragma omp simd reduction(max : maximum) reduction(| : has_nan)
            for (int64_t at = 0; at < PART; ++at) {
                const float value = value_at(row, first + at, is_bf16);
                maximum = value > maximum ? value : maximum;
                has_nan |= value != value;
            }
        } else {
            for (int64_t column = first; column < columns; ++column) {
                const float value = value_at(row, column, is_bf16);
                maximum = value > maximum ? value : maximum;
                has_nan |= value != value;
            }
        }
        maxima[part] = exchanged[part] = maximum;
    }
    if (has_nan)
        return 0;
    const float least = selected(exchanged, parts, k - 1);
    int64_t count = 0;
    for (int64_t part = 0; part < parts; ++part) {
        if (maxima[part] < least)
            continue;
        const int64_t first = part * PART;
        const int64_t end = first + PART < columns ? first + PART : columns;
        for (int64_t column = first; column < end; ++column) {
            const float value = value_at(row, column, is_bf16);
            if (value < least)
                continue;
            if (count == most)
                return 0;
            ranks[count++] = rank_of(value, column);
        }
    }
    qsort(ranks, (size_t)count, sizeof *ranks, by_rank);
    for (int64_t place = 0; place < k; ++place)
        largest[place] = (int64_t)(ranks[place] & 0xffffffffu);
    return 1;
}

/* The columns of the k largest of each row, fp32 or bf16, by (value, column), where found. Asks for
 * k parts at least. */
void largest(const void *values, int64_t values_stride, int is_bf16, int64_t k, int64_t most,
             int64_t *largest_columns, uint8_t *found, int64_t rows, int64_t columns,
             int threads) {
    const int64_t parts = (columns + PART - 1) / PART;
    const int64_t size = is_bf16 ? sizeof(uint16_t) : sizeof(float);
#pragma omp parallel num_threads(threads)
    {
        float *maxima = malloc(2 * (size_t)parts * sizeof *maxima);
        uint64_t *ranks = malloc((size_t)most * sizeof *ranks);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const void *from = (const char *)values + row * values_stride * size;
            int64_t *to = largest_columns + row * k;
            found[row] = maxima && ranks &&
                         (is_bf16 ? largest_of_row(from, 1, columns, k, maxima, maxima + parts,
                                                   ranks, most, to)
                                  : largest_of_row(from, 0, columns, k, maxima, maxima + parts,
                                                   ranks, most, to));
        }
        free(maxima);
        free(ranks);
    }
}
