/* Resizing: antialiased bilinear and bicubic, and the nearest pixel.
 *
 * Sums go along the lines' contiguous bytes; for the other direction, the picture is transposed, so that its columns are
 * contiguous, too.
 *
 * Bilinear, the triangle filter of Pillow and torchvision, is the usual case of training and the fast one: weights have
 * 8 bits and sums 16, so that vector instructions take 16 to 32 bytes at a time. Within two levels of Pillow's result.
 * Bilinear in evaluation, bicubic (Keys 1981, a = -1/2) and nearest are Pillow's in every bit: weights of 22 bits,
 * horizontally first, rounded to bytes in between; for the nearest pixel, positions summed in doubles.
 */
#include "core.h"

#include <math.h>
#include <string.h>

int dt_reserve_all(dt_resizing *memory, dt_resizing_bytes bytes)
{
    return (bytes.first == 0 || dt_reserve(&memory->first, bytes.first) != NULL) &&
           (bytes.weights == 0 || dt_reserve(&memory->weights, bytes.weights) != NULL) &&
           (bytes.exact == 0 || dt_reserve(&memory->exact, bytes.exact) != NULL) &&
           (bytes.rows == 0 || dt_reserve(&memory->rows, bytes.rows) != NULL) &&
           (bytes.columns == 0 || dt_reserve(&memory->columns, bytes.columns) != NULL) &&
           (bytes.turned == 0 || dt_reserve(&memory->turned, bytes.turned) != NULL);
}

typedef struct {
    int64_t *first;    /* (count): each output's first source line */
    uint16_t *weights; /* (count, most), of 256 */
    int64_t most;
} filter;

static double part_of(int64_t line, double center, double support)
{
    double share = 1.0 - fabs((double)line + 0.5 - center) / support;
    return share > 0.0 ? share : 0.0;
}

/* The most weights of one output. */
static int64_t most_weights(double length, int64_t count)
{
    double step = length / (double)count;
    return (int64_t)(2 * (step > 1.0 ? step : 1.0)) + 3;
}

/* Weigh the source lines 0 to `limit` - 1 for `count` outputs over the interval of `length` from `start`, in memory that
 * is reserved. The rounding error of each weight is carried to the next, so that they sum to 256. */
static filter weigh(double start, double length, int64_t limit, int64_t count, dt_resizing *memory)
{
    double step = length / (double)count, support = step > 1.0 ? step : 1.0;
    int64_t most = most_weights(length, count);
    filter made = {(int64_t *)(void *)memory->first.data, (uint16_t *)(void *)memory->weights.data, most};
    memset(made.weights, 0, (size_t)count * (size_t)most * sizeof(uint16_t));
    int64_t low = (int64_t)floor(start), high = (int64_t)ceil(start + length);
    low = low > 0 ? low : 0;
    high = high < limit ? high : limit;
    for (int64_t i = 0; i < count; i++) {
        double center = start + ((double)i + 0.5) * step;
        int64_t begin = (int64_t)(center - support + 0.5), end = (int64_t)(center + support + 0.5);
        begin = begin > low ? begin : low;
        begin = begin < high - 1 ? begin : high - 1;
        end = end < high ? end : high;
        end = end > begin + 1 ? end : begin + 1;
        double total = 0.0, reached = 0.0;
        for (int64_t k = begin; k < end; k++)
            total += part_of(k, center, support);
        int64_t given = 0;
        uint16_t *weights = made.weights + i * most;
        made.first[i] = begin;
        for (int64_t k = begin; k < end; k++) {
            reached += 256 * (total > 0 ? part_of(k, center, support) / total : 1.0);
            weights[k - begin] = (uint16_t)((int64_t)(reached + 0.5) - given);
            given += weights[k - begin];
        }
    }
    return made;
}

/* Set each of `count` lines of `target` to the weighted mean of lines of `source`, over `lanes` bytes, in whole blocks:
 * the sums of a block stay in registers. */
DT_CLONES static void blend_lines(const uint8_t *source, size_t stride, size_t lanes, const filter *filter, int64_t count,
                                  const dt_limits *limits, uint8_t *target, size_t target_stride)
{
    for (int64_t i = 0; i < count && !dt_is_stopped(limits); i++) {
        const uint16_t *weights = filter->weights + i * filter->most;
        const uint8_t *line = source + (size_t)filter->first[i] * stride;
        int64_t used = filter->most;
        while (used > 1 && weights[used - 1] == 0)
            used--;
        uint8_t *out = target + (size_t)i * target_stride;
        for (size_t x = 0; x < lanes; x += DT_BLOCK) {
            uint16_t sums[DT_BLOCK];
            for (int j = 0; j < DT_BLOCK; j++)
                sums[j] = 128;
            for (int64_t k = 0; k < used; k++) {
                const uint8_t *from = line + (size_t)k * stride + x;
                uint16_t weight = weights[k];
                for (int j = 0; j < DT_BLOCK; j++)
                    sums[j] = (uint16_t)(sums[j] + from[j] * weight);
            }
            for (int j = 0; j < DT_BLOCK; j++)
                out[x + (size_t)j] = (uint8_t)(sums[j] >> 8);
        }
    }
}

/* Four pixels as words, of which the last byte means nothing. */
typedef uint8_t pixels __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(16)));
typedef uint64_t halves __attribute__((vector_size(16)));

/* Lanes of two vectors, by number; in GCC before 12, by its older name. In GCC before 10, `__has_builtin(…)` is an error,
 * also behind `defined(__has_builtin) &&`. */
#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define LANES(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef LANES
#define LANES(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* Transpose four times four words. */
static inline void transpose(words *w)
{
    words first = LANES(words, w[0], w[1], 0, 4, 1, 5), second = LANES(words, w[0], w[1], 2, 6, 3, 7);
    words third = LANES(words, w[2], w[3], 0, 4, 1, 5), fourth = LANES(words, w[2], w[3], 2, 6, 3, 7);
    w[0] = (words)LANES(halves, (halves)first, (halves)third, 0, 2);
    w[1] = (words)LANES(halves, (halves)first, (halves)third, 1, 3);
    w[2] = (words)LANES(halves, (halves)second, (halves)fourth, 0, 2);
    w[3] = (words)LANES(halves, (halves)second, (halves)fourth, 1, 3);
}

/* Four words as twelve bytes, and four that mean nothing; mirrored if `flip`. */
static inline pixels pack(words four, int flip)
{
    pixels p = (pixels)four;
    if (flip)
        return LANES(pixels, p, p, 12, 13, 14, 8, 9, 10, 4, 5, 6, 0, 1, 2, 0, 0, 0, 0);
    return LANES(pixels, p, p, 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0);
}

/* Transpose: pixel x of line y of `rows`, three bytes, becomes the word `columns[x, y]`; in blocks of four by four, for
 * which `columns` has room. */
DT_CLONES static void turn(const uint8_t *rows, size_t stride, int64_t height, int64_t width, uint8_t *columns, size_t line)
{
    for (int64_t y = 0; y < height; y += 4)
        for (int64_t x = 0; x < width; x += 4) {
            words block[4];
            for (int k = 0; k < 4; k++) {
                pixels four; /* below the last line, that line again */
                memcpy(&four, rows + (size_t)(y + k < height ? y + k : height - 1) * stride + 3 * (size_t)x, 16);
                block[k] = (words)LANES(pixels, four, four, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11);
            }
            transpose(block);
            for (int k = 0; k < 4; k++)
                memcpy(columns + (size_t)(x + k) * line + 4 * (size_t)y, &block[k], 16);
        }
}

/* Write `columns` back as the image `target`, its lines `stride` bytes apart, mirrored if `flip`. */
DT_CLONES static void turn_back(const uint8_t *columns, size_t line, int flip, uint8_t *target, size_t stride,
                                int64_t height, int64_t width)
{
    for (int64_t y = 0; y < height; y += 4) {
        int64_t lines = height - y < 4 ? height - y : 4;
        for (int64_t x = 0; x < width; x += 4) {
            int64_t count = width - x < 4 ? width - x : 4, at = flip ? width - x - count : x;
            words block[4];
            for (int k = 0; k < 4; k++)
                memcpy(&block[k], columns + (size_t)(x + k) * line + 4 * (size_t)y, 16);
            transpose(block);
            for (int k = 0; k < lines; k++) {
                pixels packed = pack(block[k], flip);
                uint8_t *to = target + (size_t)(y + k) * stride + 3 * (size_t)at;
                if (count == 4)
                    memcpy(to, &packed, 12);
                else /* mirrored, the pixels of an incomplete block come last */
                    memcpy(to, (uint8_t *)&packed + (flip ? 12 - 3 * count : 0), 3 * (size_t)count);
            }
        }
    }
}

/* The buffers' lines of a bilinear resize. Three further ones each: they are transposed in blocks of four. */
typedef struct {
    size_t stride, line; /* of `rows`; of `columns` and `turned` */
} lines;

static lines bilinear_lines(int64_t columns, int64_t out_height)
{
    return (lines){dt_whole_blocks(3 * (size_t)columns), dt_whole_blocks(4 * (size_t)out_height)};
}

dt_resizing_bytes dt_resize_bytes(int64_t rows, int64_t columns, int64_t out_height, int64_t out_width)
{
    lines of = bilinear_lines(columns, out_height);
    size_t down = (size_t)(out_height * most_weights((double)rows, out_height));
    size_t across = (size_t)(out_width * most_weights((double)columns, out_width));
    return (dt_resizing_bytes){.first = (size_t)dt_larger(out_height, out_width) * sizeof(int64_t),
                               .weights = (down > across ? down : across) * sizeof(uint16_t),
                               .rows = of.stride * (size_t)out_height,
                               .columns = of.line * (size_t)(columns + 3),
                               .turned = of.line * (size_t)(out_width + 3)};
}

int dt_resize(dt_image image, double top, double left, double height, double width, int flip, uint8_t *target,
              int64_t out_height, int64_t out_width, dt_resizing *memory)
{
    /* Positions of outputs are computed in the whole picture: relative ones would be rounded differently. */
    int64_t above = (int64_t)floor(top), before = (int64_t)floor(left);
    lines of = bilinear_lines(image.columns, out_height);
    if (!dt_reserve_all(memory, dt_resize_bytes(image.rows, image.columns, out_height, out_width)))
        return DT_NO_MEMORY;
    uint8_t *rows = memory->rows.data, *columns = memory->columns.data, *turned = memory->turned.data;
    filter down = weigh(top, height, above + image.rows, out_height, memory);
    for (int64_t i = 0; i < out_height; i++)
        down.first[i] -= above;
    blend_lines(image.data, image.stride, 3 * (size_t)image.columns, &down, out_height, memory->limits, rows, of.stride);
    turn(rows, of.stride, out_height, image.columns, columns, of.line);
    filter across = weigh(left - (double)before, width, image.columns, out_width, memory);
    blend_lines(columns, of.line, 4 * (size_t)out_height, &across, out_width, memory->limits, turned, of.line);
    turn_back(turned, of.line, flip, target, 3 * (size_t)out_width, out_height, out_width);
    return DT_OK;
}

enum { PRECISION = 22 }; /* bits of a fine weight, Pillow's */

static double cubic(double x)
{
    const double a = -0.5;
    x = fabs(x);
    if (x < 1.0)
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}

static double triangle(double x)
{
    x = fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

int64_t dt_most_weights(int bicubic, int64_t size, int64_t count)
{
    double scale = (double)size / (double)count;
    return (int64_t)ceil((bicubic ? 2.0 : 1.0) * (scale > 1.0 ? scale : 1.0)) * 2 + 1;
}

int64_t dt_exact_weights(int bicubic, int64_t size, int64_t count, int64_t i, double *weights, int64_t *begin)
{
    double scale = (double)size / (double)count, wide = scale > 1.0 ? scale : 1.0, support = (bicubic ? 2.0 : 1.0) * wide;
    double center = ((double)i + 0.5) * scale, total = 0.0, narrow = 1.0 / wide;
    int64_t first = (int64_t)(center - support + 0.5), end = (int64_t)(center + support + 0.5);
    first = first > 0 ? first : 0;
    end = end < size ? end : size;
    for (int64_t k = 0; k < end - first; k++) {
        double x = ((double)(k + first) - center + 0.5) * narrow;
        total += weights[k] = bicubic ? cubic(x) : triangle(x);
    }
    for (int64_t k = 0; k < end - first && total != 0.0; k++)
        weights[k] /= total;
    *begin = first;
    return end - first;
}

dt_fine_filter dt_weigh_finely(int bicubic, int64_t size, int64_t count, dt_resizing *memory)
{
    int64_t most = dt_most_weights(bicubic, size, count);
    double *exact = (double *)(void *)memory->exact.data;
    dt_fine_filter made = {(int64_t *)(void *)memory->first.data, (int32_t *)(void *)memory->weights.data, most};
    for (int64_t i = 0; i < count; i++) {
        int64_t used = dt_exact_weights(bicubic, size, count, i, exact, &made.first[i]);
        int32_t *weights = made.weights + i * most;
        for (int64_t k = 0; k < most; k++) {
            double share = k >= used ? 0.0 : exact[k];
            weights[k] = (int32_t)(share * (1 << PRECISION) + (share < 0 ? -0.5 : 0.5));
        }
    }
    return made;
}

/* As `blend_lines`, with fine weights, some of which are negative. */
DT_CLONES void dt_blend_finely(const uint8_t *source, size_t stride, size_t lanes, const dt_fine_filter *filter,
                               int64_t count, const dt_limits *limits, uint8_t *target, size_t target_stride)
{
    for (int64_t i = 0; i < count && !dt_is_stopped(limits); i++) {
        const int32_t *weights = filter->weights + i * filter->most;
        const uint8_t *line = source + (size_t)filter->first[i] * stride;
        int64_t used = filter->most;
        while (used > 1 && weights[used - 1] == 0)
            used--;
        for (size_t x = 0; x < lanes; x += DT_BLOCK) {
            int32_t sums[DT_BLOCK];
            for (int j = 0; j < DT_BLOCK; j++)
                sums[j] = 1 << (PRECISION - 1);
            for (int64_t k = 0; k < used; k++)
                for (int j = 0; j < DT_BLOCK; j++)
                    sums[j] += line[(size_t)k * stride + x + (size_t)j] * weights[k];
            for (int j = 0; j < DT_BLOCK; j++) {
                int32_t level = sums[j] >> PRECISION;
                target[(size_t)i * target_stride + x + (size_t)j] = (uint8_t)(level < 0 ? 0 : level > 255 ? 255 : level);
            }
        }
    }
}

void dt_blend_down(int bicubic, int64_t rows, size_t stride, size_t width, uint8_t *target, int64_t out_height,
                   dt_resizing *memory)
{
    uint8_t *from = memory->rows.data, *done = from + stride * (size_t)rows;
    dt_fine_filter down = dt_weigh_finely(bicubic, rows, out_height, memory);
    dt_blend_finely(from, stride, width, &down, out_height, memory->limits, done, stride);
    for (int64_t y = 0; y < out_height; y++)
        memcpy(target + width * (size_t)y, done + stride * (size_t)y, width);
}

enum { STRIP = 64 }; /* lines that are transposed at a time: they stay in the cache */

/* The buffers' lines of a fine resize. */
static lines fine_lines(int64_t rows, int64_t out_width)
{
    return (lines){dt_whole_blocks(3 * (size_t)out_width), dt_whole_blocks(4 * (size_t)(rows < STRIP ? rows : STRIP))};
}

dt_resizing_bytes dt_resize_finely_bytes(int64_t rows, int64_t columns, int bicubic, int64_t out_height, int64_t out_width)
{
    lines of = fine_lines(rows, out_width);
    int64_t down = dt_most_weights(bicubic, rows, out_height), across = dt_most_weights(bicubic, columns, out_width);
    return (dt_resizing_bytes){.first = (size_t)dt_larger(out_height, out_width) * sizeof(int64_t),
                               .weights = (size_t)dt_larger(out_height * down, out_width * across) * sizeof(int32_t),
                               .exact = (size_t)dt_larger(down, across) * sizeof(double),
                               .rows = of.stride * (size_t)(rows + out_height),
                               .columns = of.line * (size_t)(columns + 3),
                               .turned = of.line * (size_t)(out_width + 3)};
}

int dt_resize_finely(dt_image image, int bicubic, int flip, uint8_t *target, int64_t out_height, int64_t out_width,
                     dt_resizing *memory)
{
    lines of = fine_lines(image.rows, out_width);
    size_t width = 3 * (size_t)out_width;
    if (!dt_reserve_all(memory, dt_resize_finely_bytes(image.rows, image.columns, bicubic, out_height, out_width)))
        return DT_NO_MEMORY;
    uint8_t *rows = memory->rows.data, *columns = memory->columns.data, *turned = memory->turned.data;
    dt_fine_filter across = dt_weigh_finely(bicubic, image.columns, out_width, memory);
    for (int64_t y = 0; y < image.rows && !dt_is_stopped(memory->limits); y += STRIP) {
        int64_t count = image.rows - y < STRIP ? image.rows - y : STRIP;
        turn(image.data + (size_t)y * image.stride, image.stride, count, image.columns, columns, of.line);
        dt_blend_finely(columns, of.line, 4 * (size_t)count, &across, out_width, memory->limits, turned, of.line);
        turn_back(turned, of.line, flip, rows + (size_t)y * of.stride, of.stride, count, out_width);
    }
    dt_blend_down(bicubic, image.rows, of.stride, width, target, out_height, memory);
    return DT_OK;
}

/* Of the lines 0 to `size` - 1, the nearest to each of `count` outputs, as Pillow rounds. */
static void nearest_lines(int64_t size, int64_t count, int64_t *from)
{
    double step = (double)size / (double)count, at = 0.5 * step;
    for (int64_t i = 0; i < count; i++, at += step)
        from[i] = (int64_t)at < size ? (int64_t)at : size - 1;
}

/* Inlined, so that a constant `pixel` is copied without a call. */
static inline void take_nearest(dt_image image, size_t pixel, const int64_t *across, const int64_t *down, uint8_t *target,
                                int64_t out_height, int64_t out_width)
{
    for (int64_t y = 0; y < out_height; y++) {
        const uint8_t *line = image.data + (size_t)down[y] * image.stride;
        for (int64_t x = 0; x < out_width; x++, target += pixel)
            memcpy(target, line + pixel * (size_t)across[x], pixel);
    }
}

dt_resizing_bytes dt_resize_nearest_bytes(int64_t out_height, int64_t out_width)
{
    return (dt_resizing_bytes){.first = (size_t)(out_width + out_height) * sizeof(int64_t)};
}

int dt_resize_nearest(dt_image image, size_t pixel, uint8_t *target, int64_t out_height, int64_t out_width,
                      dt_resizing *memory)
{
    if (!dt_reserve_all(memory, dt_resize_nearest_bytes(out_height, out_width)))
        return DT_NO_MEMORY;
    int64_t *across = (int64_t *)(void *)memory->first.data, *down = across + out_width;
    nearest_lines(image.columns, out_width, across);
    nearest_lines(image.rows, out_height, down);
    if (pixel == 3)
        take_nearest(image, 3, across, down, target, out_height, out_width);
    else
        take_nearest(image, pixel, across, down, target, out_height, out_width);
    return DT_OK;
}
