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

static size_t whole_blocks(size_t bytes) { return (bytes + DT_BLOCK - 1) / DT_BLOCK * DT_BLOCK; }

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

/* Weigh the source lines 0 to `limit` - 1 for `count` outputs over the interval of `length` from `start`. The rounding
 * error of each weight is carried to the next, so that they sum to 256. Returns whether there was memory. */
static int weigh(double start, double length, int64_t limit, int64_t count, dt_resizing *memory, filter *found)
{
    double step = length / (double)count, support = step > 1.0 ? step : 1.0;
    int64_t most = (int64_t)(2 * support) + 3;
    found->first = dt_reserve(&memory->first, (size_t)count * sizeof(int64_t));
    found->weights = dt_reserve(&memory->weights, (size_t)count * (size_t)most * sizeof(uint16_t));
    found->most = most;
    if (found->first == NULL || found->weights == NULL)
        return 0;
    memset(found->weights, 0, (size_t)count * (size_t)most * sizeof(uint16_t));
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
        uint16_t *weights = found->weights + i * most;
        found->first[i] = begin;
        for (int64_t k = begin; k < end; k++) {
            reached += 256 * (total > 0 ? part_of(k, center, support) / total : 1.0);
            weights[k - begin] = (uint16_t)((int64_t)(reached + 0.5) - given);
            given += weights[k - begin];
        }
    }
    return 1;
}

/* Set each of `count` lines of `target` to the weighted mean of lines of `source`, over `lanes` bytes, in whole blocks:
 * the sums of a block stay in registers. */
DT_CLONES static void blend_lines(const uint8_t *source, size_t stride, size_t lanes, const filter *filter, int64_t count,
                                  uint8_t *target, size_t target_stride)
{
    for (int64_t i = 0; i < count; i++) {
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

/* Lanes of two vectors, by number; in GCC before 12, by its older name. */
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define LANES(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
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

int dt_resize(dt_image image, double top, double left, double height, double width, int flip, uint8_t *target,
              int64_t out_height, int64_t out_width, dt_resizing *memory)
{
    /* Positions of outputs are computed in the whole picture: relative ones would be rounded differently. */
    int64_t above = (int64_t)floor(top), before = (int64_t)floor(left);
    size_t lanes = 3 * (size_t)image.columns, stride = whole_blocks(lanes), line = whole_blocks(4 * (size_t)out_height);
    uint8_t *rows = dt_reserve(&memory->rows, stride * (size_t)out_height);
    /* Three further lines each: they are transposed in blocks of four. */
    uint8_t *columns = dt_reserve(&memory->columns, line * (size_t)(image.columns + 3));
    uint8_t *turned = dt_reserve(&memory->turned, line * (size_t)(out_width + 3));
    filter filter;
    if (rows == NULL || columns == NULL || turned == NULL)
        return DT_NO_MEMORY;
    if (!weigh(top, height, above + image.rows, out_height, memory, &filter))
        return DT_NO_MEMORY;
    for (int64_t i = 0; i < out_height; i++)
        filter.first[i] -= above;
    blend_lines(image.data, image.stride, lanes, &filter, out_height, rows, stride);
    turn(rows, stride, out_height, image.columns, columns, line);
    if (!weigh(left - (double)before, width, image.columns, out_width, memory, &filter))
        return DT_NO_MEMORY;
    blend_lines(columns, line, 4 * (size_t)out_height, &filter, out_width, turned, line);
    turn_back(turned, line, flip, target, 3 * (size_t)out_width, out_height, out_width);
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

int dt_weigh_finely(int bicubic, int64_t size, int64_t count, dt_resizing *memory, dt_fine_filter *found)
{
    int64_t most = dt_most_weights(bicubic, size, count);
    found->first = dt_reserve(&memory->first, (size_t)count * sizeof(int64_t));
    found->weights = dt_reserve(&memory->weights, (size_t)count * (size_t)most * sizeof(int32_t));
    double *exact = dt_reserve(&memory->exact, (size_t)most * sizeof(double));
    found->most = most;
    if (found->first == NULL || found->weights == NULL || exact == NULL)
        return 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t used = dt_exact_weights(bicubic, size, count, i, exact, &found->first[i]);
        int32_t *weights = found->weights + i * most;
        for (int64_t k = 0; k < most; k++) {
            double share = k >= used ? 0.0 : exact[k];
            weights[k] = (int32_t)(share * (1 << PRECISION) + (share < 0 ? -0.5 : 0.5));
        }
    }
    return 1;
}

/* As `blend_lines`, with fine weights, some of which are negative. */
DT_CLONES void dt_blend_finely(const uint8_t *source, size_t stride, size_t lanes, const dt_fine_filter *filter,
                               int64_t count, uint8_t *target, size_t target_stride)
{
    for (int64_t i = 0; i < count; i++) {
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

enum { STRIP = 64 }; /* lines that are transposed at a time: they stay in the cache */

int dt_resize_finely(dt_image image, int bicubic, int flip, uint8_t *target, int64_t out_height, int64_t out_width,
                     dt_resizing *memory)
{
    int64_t most = image.rows < STRIP ? image.rows : STRIP;
    size_t line = whole_blocks(4 * (size_t)most), width = 3 * (size_t)out_width, stride = whole_blocks(width);
    /* Three further lines each: they are transposed in blocks of four. */
    uint8_t *columns = dt_reserve(&memory->columns, line * (size_t)(image.columns + 3));
    uint8_t *turned = dt_reserve(&memory->turned, line * (size_t)(out_width + 3));
    uint8_t *rows = dt_reserve(&memory->rows, stride * (size_t)(image.rows + out_height));
    dt_fine_filter filter;
    if (columns == NULL || turned == NULL || rows == NULL)
        return DT_NO_MEMORY;
    if (!dt_weigh_finely(bicubic, image.columns, out_width, memory, &filter))
        return DT_NO_MEMORY;
    for (int64_t y = 0; y < image.rows; y += STRIP) {
        int64_t lines = image.rows - y < STRIP ? image.rows - y : STRIP;
        turn(image.data + (size_t)y * image.stride, image.stride, lines, image.columns, columns, line);
        dt_blend_finely(columns, line, 4 * (size_t)lines, &filter, out_width, turned, line);
        turn_back(turned, line, flip, rows + (size_t)y * stride, stride, lines, out_width);
    }
    if (!dt_weigh_finely(bicubic, image.rows, out_height, memory, &filter))
        return DT_NO_MEMORY;
    uint8_t *done = rows + stride * (size_t)image.rows;
    dt_blend_finely(rows, stride, width, &filter, out_height, done, stride);
    for (int64_t y = 0; y < out_height; y++)
        memcpy(target + width * (size_t)y, done + stride * (size_t)y, width);
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

int dt_resize_nearest(dt_image image, size_t pixel, uint8_t *target, int64_t out_height, int64_t out_width,
                      dt_resizing *memory)
{
    int64_t *across = dt_reserve(&memory->first, (size_t)(out_width + out_height) * sizeof(int64_t));
    if (across == NULL)
        return DT_NO_MEMORY;
    int64_t *down = across + out_width;
    nearest_lines(image.columns, out_width, across);
    nearest_lines(image.rows, out_height, down);
    if (pixel == 3)
        take_nearest(image, 3, across, down, target, out_height, out_width);
    else
        take_nearest(image, pixel, across, down, target, out_height, out_width);
    return DT_OK;
}
