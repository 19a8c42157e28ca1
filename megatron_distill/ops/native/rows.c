/* Row functions of a CPU in one pass each. In torch every operation of these formulas is a pass
 * through the cache.
 *
 * Matrices are fp32 with columns side by side; strides count elements from row to row. A result may
 * lie where an operand does. A row's sum is added up in the same order whatever threads there are.
 */

#include <math.h>
#include <stdint.h>
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
