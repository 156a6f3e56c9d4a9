/* The resize that OpenCV 4.6 calls INTER_AREA, for 8-bit RGB, with the same result in every bit.
 *
 * Its arithmetic has four cases:
 * - The same size: a copy.
 * - Smaller by whole numbers: the mean over a box, as a product of the sum and a float reciprocal, rounded half to
 *   even; for 2 × 2 in integers, rounded half up.
 * - Not larger in both directions: weights proportional to the covered length, in floats, summed left to right and
 *   then top to bottom, and rounded half to even.
 * - Larger in a direction: in both directions two neighbours, with weights of 11 bits, and a vertical pass that drops
 *   4, then 16 and then 2 bits.
 * The second case is chosen only where the ratio, computed as below, is a whole number to within DBL_EPSILON.
 */
#include "core.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { LONGEST = 65535, ALIGNMENT = 64 };

/* One direction of a resize: each output is a weighted sum of inputs. Outputs with fewer inputs have zero weights. */
typedef struct {
    int64_t count, most; /* outputs, and the most inputs of one */
    int32_t *first;      /* (count) first input of each */
    int32_t *used;       /* (count) number of inputs of each */
    float *weights;      /* (count, most) */
} taps;

/* The working memory, split. */
typedef struct {
    taps across, down;
    float *line;      /* a source line as floats, with zeros behind it */
    float *blended;   /* the line after the horizontal pass */
    float *total;     /* its vertical sum */
    int16_t *near[2]; /* two lines after the horizontal pass, for enlarging */
    uint32_t *box;    /* sums of source lines */
    uint16_t *pairs;  /* sums of two source lines */
    const dt_limits *limits;
} workspace;

/* Four values at a time: the three of a pixel, and one that the next pixel overwrites. */
typedef float quad __attribute__((vector_size(16)));

static inline quad load(const float *from)
{
    quad value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* source / target as OpenCV computes it: by two divisions, which can differ from the exact ratio in the last bit. */
static double ratio(int64_t source, int64_t target) { return 1.0 / ((double)target / (double)source); }

static void *take(char *base, size_t *used, size_t bytes)
{
    void *piece = base ? base + *used : NULL;
    *used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return piece;
}

static void take_taps(char *base, size_t *used, taps *taps, int64_t source, int64_t target)
{
    taps->count = target;
    taps->most = (int64_t)ratio(source, target) + 3; /* a part at each end, and one for rounding */
    taps->first = take(base, used, sizeof(int32_t) * (size_t)target);
    taps->used = take(base, used, sizeof(int32_t) * (size_t)target);
    taps->weights = take(base, used, sizeof(float) * (size_t)(target * taps->most));
}

/* Splits the memory at `base`, or only counts when it is NULL; returns the bytes. */
static size_t split(char *base, workspace *work, int64_t height, int64_t width, int64_t out_height, int64_t out_width)
{
    size_t used = 0, lanes = 3 * (size_t)out_width + 1; /* one for the last quad */
    take_taps(base, &used, &work->across, width, out_width);
    take_taps(base, &used, &work->down, height, out_height);
    work->line = take(base, &used, sizeof(float) * (3 * (size_t)(width + work->across.most) + 1));
    work->blended = take(base, &used, sizeof(float) * lanes);
    work->total = take(base, &used, sizeof(float) * lanes);
    for (int i = 0; i < 2; i++)
        work->near[i] = take(base, &used, sizeof(int16_t) * lanes);
    work->box = take(base, &used, sizeof(uint32_t) * 3 * (size_t)width);
    work->pairs = take(base, &used, sizeof(uint16_t) * 3 * (size_t)width);
    return used;
}

/* Sets the weights of a direction that does not grow: input k counts as far as the output's interval covers it. */
static void cover(taps *taps, int64_t limit, double scale)
{
    const double least = 1e-3; /* shorter ends are dropped */
    for (int64_t i = 0; i < taps->count; i++) {
        float *weights = taps->weights + i * taps->most;
        double begin = (double)i * scale, end = begin + scale;
        double length = fmin(scale, (double)limit - begin);
        int64_t last = (int64_t)floor(end), whole = (int64_t)ceil(begin), count = 0;
        if (last > limit - 1)
            last = limit - 1;
        if (whole > last)
            whole = last;
        double head = (double)whole - begin, tail = end - (double)last;
        taps->first[i] = (int32_t)whole;
        if (head > least) {
            taps->first[i]--;
            weights[count++] = (float)(head / length);
        }
        for (int64_t k = whole; k < last; k++)
            weights[count++] = (float)(1.0 / length);
        if (tail > least)
            weights[count++] = (float)(fmin(fmin(tail, 1.0), length) / length);
        taps->used[i] = (int32_t)count;
        while (count < taps->most)
            weights[count++] = 0;
    }
    int64_t most = 1;
    for (int64_t i = 0; i < taps->count; i++)
        if (taps->used[i] > most)
            most = taps->used[i];
    for (int64_t i = 1; i < taps->count; i++) /* without the columns that no output needs */
        memmove(taps->weights + i * most, taps->weights + i * taps->most, sizeof(float) * (size_t)most);
    taps->most = most;
}

/* Sets the weights of a direction when the picture grows in some direction: two inputs, weights of 2048. */
static void neighbours(taps *taps, int64_t limit, int64_t target, double scale, int clamp)
{
    double inverse = (double)target / (double)limit;
    taps->most = 2;
    for (int64_t i = 0; i < taps->count; i++) {
        int64_t at = (int64_t)floor((double)i * scale);
        float part = (float)((double)(i + 1) - (double)(at + 1) * inverse);
        part = part <= 0 ? 0 : part - floorf(part);
        if (clamp && at >= limit - 1)
            at = limit - 1, part = 0;
        taps->first[i] = (int32_t)at;
        taps->used[i] = 2;
        taps->weights[2 * i] = rintf((1.0f - part) * 2048);
        taps->weights[2 * i + 1] = rintf(part * 2048);
    }
}

DT_CLONES static void to_floats(const uint8_t *restrict from, int64_t count, float *restrict to)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i];
}

/* The horizontal pass. `line` is longer than its pixels by `across->most` - 1 pixels of any numbers. */
static inline void blend(const float *restrict line, const taps *across, int64_t most, float *restrict target)
{
    const float *weights = across->weights;
    for (int64_t i = 0; i < across->count; i++, weights += most) {
        const float *from = line + 3 * (int64_t)across->first[i];
        quad sum = load(from) * weights[0];
        for (int64_t k = 1; k < most; k++)
            sum += load(from + 3 * k) * weights[k];
        memcpy(target + 3 * i, &sum, sizeof sum);
    }
}

DT_CLONES static void blend_columns(const float *restrict line, const taps *across, float *restrict target)
{
    switch (across->most) { /* the compiler unrolls the usual ones */
    case 2: blend(line, across, 2, target); break;
    case 3: blend(line, across, 3, target); break;
    case 4: blend(line, across, 4, target); break;
    default: blend(line, across, across->most, target);
    }
}

DT_CLONES static void scale_line(const float *restrict line, float weight, int64_t count, float *restrict total)
{
    for (int64_t i = 0; i < count; i++)
        total[i] = line[i] * weight;
}

DT_CLONES static void add_line(const float *restrict line, float weight, int64_t count, float *restrict total)
{
    for (int64_t i = 0; i < count; i++)
        total[i] += line[i] * weight;
}

/* A float in 0 to 255, rounded half to even: adding 1.5 · 2²³ leaves no bits for a fraction. */
static inline uint8_t rounded(float value)
{
    float shifted = value + 12582912.0f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits -= 0x4B400000;
    return (uint8_t)(bits > 255 ? 255 : bits);
}

DT_CLONES static void round_line(const float *restrict total, int64_t count, uint8_t *restrict target)
{
    for (int64_t i = 0; i < count; i++)
        target[i] = rounded(total[i]);
}

DT_CLONES static void drop_bits(const float *restrict from, int64_t count, int16_t *restrict to)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = (int16_t)((int32_t)from[i] >> 4);
}

DT_CLONES static void mix_lines(const int16_t *restrict above, const int16_t *restrict below, int16_t first,
                                int16_t second, int64_t count, uint8_t *restrict target)
{
    for (int64_t i = 0; i < count; i++) {
        int sum = (((int)above[i] * first) >> 16) + (((int)below[i] * second) >> 16);
        target[i] = (uint8_t)((sum + 2) >> 2);
    }
}

DT_CLONES static void sum_lines(const uint8_t *restrict source, size_t stride, int64_t lines, int64_t count,
                                uint32_t *restrict sums)
{
    for (int64_t i = 0; i < count; i++)
        sums[i] = source[i];
    for (int64_t k = 1; k < lines; k++)
        for (int64_t i = 0; i < count; i++)
            sums[i] += source[(size_t)k * stride + (size_t)i];
}

static void box_means(const uint32_t *sums, int64_t high, int64_t wide, int64_t count, uint8_t *target)
{
    float share = 1.0f / (float)(high * wide);
    for (int64_t i = 0; i < count; i++, sums += 3 * wide)
        for (int c = 0; c < 3; c++) {
            uint64_t sum = 0;
            for (int64_t k = 0; k < wide; k++)
                sum += sums[3 * k + c];
            target[3 * i + c] = rounded((float)sum * share);
        }
}

DT_CLONES static void add_lines(const uint8_t *restrict first, const uint8_t *restrict second, int64_t count,
                                uint16_t *restrict sums)
{
    for (int64_t i = 0; i < count; i++)
        sums[i] = (uint16_t)(first[i] + second[i]);
}

/* The means of neighbouring pixels, from the sums of two lines; four bytes at a time, but for the last pixel. */
DT_CLONES static void halve(const uint16_t *restrict sums, int64_t count, uint8_t *restrict target)
{
    typedef uint16_t four __attribute__((vector_size(8)));
    typedef uint8_t bytes __attribute__((vector_size(4)));
    for (int64_t i = 0; i < count - 1; i++) {
        four left, right;
        memcpy(&left, sums + 6 * i, sizeof left);
        memcpy(&right, sums + 6 * i + 3, sizeof right);
        bytes mean = __builtin_convertvector((left + right + 2) >> 2, bytes);
        memcpy(target + 3 * i, &mean, sizeof mean);
    }
    sums += 6 * (count - 1), target += 3 * (count - 1);
    for (int c = 0; c < 3; c++)
        target[c] = (uint8_t)((sums[c] + sums[3 + c] + 2) >> 2);
}

static void boxes(const uint8_t *source, size_t stride, int64_t high, int64_t wide, int64_t out_height,
                  int64_t out_width, const workspace *work, uint8_t *target)
{
    for (int64_t i = 0; i < out_height && !dt_is_stopped(work->limits); i++, target += 3 * out_width) {
        const uint8_t *from = source + (size_t)(i * high) * stride;
        if (high == 2 && wide == 2) {
            add_lines(from, from + stride, 6 * out_width, work->pairs);
            halve(work->pairs, out_width, target);
        } else {
            sum_lines(from, stride, high, 3 * out_width * wide, work->box);
            box_means(work->box, high, wide, out_width, target);
        }
    }
}

static void shrink(const uint8_t *source, size_t stride, int64_t width, const workspace *work, uint8_t *target)
{
    const taps *down = &work->down;
    int64_t lanes = 3 * work->across.count, ready = -1; /* the line that `blended` has */
    for (int64_t i = 0; i < down->count && !dt_is_stopped(work->limits); i++, target += lanes) {
        for (int32_t k = 0; k < down->used[i]; k++) {
            int64_t at = down->first[i] + k;
            if (at != ready) {
                to_floats(source + (size_t)at * stride, 3 * width, work->line);
                blend_columns(work->line, &work->across, work->blended);
                ready = at;
            }
            float weight = down->weights[i * down->most + k];
            (k == 0 ? scale_line : add_line)(work->blended, weight, lanes, work->total);
        }
        round_line(work->total, lanes, target);
    }
}

static void enlarge(const uint8_t *source, size_t stride, int64_t height, int64_t width, const workspace *work,
                    uint8_t *target)
{
    const taps *down = &work->down;
    int64_t lanes = 3 * work->across.count, ready[2] = {-1, -1}; /* line k is in near[k % 2] */
    for (int64_t i = 0; i < down->count && !dt_is_stopped(work->limits); i++, target += lanes) {
        int64_t at[2] = {down->first[i], down->first[i] + 1};
        for (int k = 0; k < 2; k++) {
            if (at[k] > height - 1)
                at[k] = height - 1;
            if (ready[at[k] % 2] == at[k])
                continue;
            to_floats(source + (size_t)at[k] * stride, 3 * width, work->line);
            blend_columns(work->line, &work->across, work->blended);
            drop_bits(work->blended, lanes, work->near[at[k] % 2]);
            ready[at[k] % 2] = at[k];
        }
        const float *weights = down->weights + 2 * i;
        mix_lines(work->near[at[0] % 2], work->near[at[1] % 2], (int16_t)weights[0], (int16_t)weights[1], lanes,
                  target);
    }
}

static int is_side(int64_t side) { return side >= 1 && side <= LONGEST; }

DT_API size_t dt_area_bytes(int64_t height, int64_t width, int64_t out_height, int64_t out_width)
{
    workspace work;
    if (!is_side(height) || !is_side(width) || !is_side(out_height) || !is_side(out_width))
        return 0;
    return split(NULL, &work, height, width, out_height, out_width);
}

DT_API int dt_area(const uint8_t *source, size_t stride, int64_t height, int64_t width, const dt_limits *limits,
                   uint8_t *target, int64_t out_height, int64_t out_width, void *memory, size_t bytes)
{
    size_t needed = dt_area_bytes(height, width, out_height, out_width);
    if (needed == 0)
        return DT_WRONG_SIZE;
    if (memory == NULL || bytes < needed)
        return DT_NO_MEMORY;
    if (height == out_height && width == out_width) {
        size_t line = 3 * (size_t)width;
        for (int64_t i = 0; i < height; i++)
            memcpy(target + (size_t)i * line, source + (size_t)i * stride, line);
        return DT_OK;
    }
    workspace work;
    split(memory, &work, height, width, out_height, out_width);
    work.limits = limits;
    double down = ratio(height, out_height), across = ratio(width, out_width);
    if (down < 1 || across < 1) {
        neighbours(&work.down, height, out_height, down, 0);
        neighbours(&work.across, width, out_width, across, 1);
        memset(work.line + 3 * width, 0, sizeof(float) * 4); /* what a zero weight meets must be a number */
        enlarge(source, stride, height, width, &work, target);
    } else if (fabs(down - rint(down)) < DBL_EPSILON && fabs(across - rint(across)) < DBL_EPSILON) {
        boxes(source, stride, (int64_t)rint(down), (int64_t)rint(across), out_height, out_width, &work, target);
    } else {
        cover(&work.down, height, down);
        cover(&work.across, width, across);
        memset(work.line + 3 * width, 0, sizeof(float) * (3 * (size_t)work.across.most + 1));
        shrink(source, stride, width, &work, target);
    }
    return DT_OK;
}
