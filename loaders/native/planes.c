/* Images of any number of channels with 8 or 16 bits per value; those of RGB with 8 bits have faster code, in resize.c and
 * pixels.c.
 *
 * Resizing is separable: sums go along lines of columns · channels, first down the picture, then, transposed, across it.
 * They are of float32, without rounding in between; but of bytes, in evaluation and with the bicubic filter, they are Pillow's.
 */
#include "core.h"

#include <string.h>

typedef struct {
    int64_t *first;
    float *weights; /* (count, most) */
    int64_t most;
} filter;

/* Weigh the lines 0 to `size` - 1 for `count` outputs, in memory that is reserved. */
static filter weigh(int cubic, int64_t size, int64_t count, dt_resizing *memory)
{
    int64_t most = dt_most_weights(cubic, size, count);
    double *exact = (double *)(void *)memory->exact.data;
    filter made = {(int64_t *)(void *)memory->first.data, (float *)(void *)memory->weights.data, most};
    for (int64_t i = 0; i < count; i++) {
        int64_t used = dt_exact_weights(cubic, size, count, i, exact, &made.first[i]);
        for (int64_t k = 0; k < most; k++)
            made.weights[i * most + k] = k < used ? (float)exact[k] : 0.0f;
    }
    return made;
}

/* How many of the i-th output's weights there are, without the zeros at the end, whose lines may not exist. */
static int64_t used_of(const filter *filter, int64_t i)
{
    int64_t used = filter->most;
    while (used > 1 && filter->weights[i * filter->most + used - 1] == 0.0f)
        used--;
    return used;
}

/* Set `sums` to weighted sums of lines of `lanes` values, `stride` values apart. */
#define BLEND(name, type)                                                                                              \
    DT_CLONES static void name(const type *restrict line, size_t stride, size_t lanes, const float *restrict weights,  \
                               int64_t used, float *restrict sums)                                                     \
    {                                                                                                                  \
        for (size_t x = 0; x < lanes; x++)                                                                             \
            sums[x] = weights[0] * (float)line[x];                                                                     \
        for (int64_t k = 1; k < used; k++) {                                                                           \
            const type *next = line + (size_t)k * stride;                                                              \
            float weight = weights[k];                                                                                 \
            for (size_t x = 0; x < lanes; x++)                                                                         \
                sums[x] += weight * (float)next[x];                                                                    \
        }                                                                                                              \
    }

BLEND(blend_bytes, uint8_t)
BLEND(blend_shorts, uint16_t)
BLEND(blend_floats, float)

/* Pixel (y, x) of `rows`, of `size` bytes, becomes pixel (x, y) of `columns`; the strides are in bytes. */
static void turn(const uint8_t *rows, size_t stride, int64_t height, int64_t width, size_t size, uint8_t *columns,
                 size_t line)
{
    for (int64_t y = 0; y < height; y++) {
        const uint8_t *from = rows + (size_t)y * stride;
        uint8_t *to = columns + (size_t)y * size;
        for (int64_t x = 0; x < width; x++, from += size, to += line)
            memcpy(to, from, size);
    }
}

/* Round the sums of one output column to pixels of `target`, whose lines are `stride` bytes apart. */
static void put_column(const float *sums, int64_t channels, int64_t bytes, int64_t height, uint8_t *target, size_t stride)
{
    float most = bytes == 1 ? 255.0f : 65535.0f;
    for (int64_t y = 0; y < height; y++, target += stride)
        for (int64_t c = 0; c < channels; c++) {
            float sum = *sums++ + 0.5f;
            sum = sum > 0.0f ? sum : 0.0f;
            uint16_t level = (uint16_t)(sum < most ? sum : most);
            if (bytes == 1)
                target[c] = (uint8_t)level;
            else
                memcpy(target + 2 * c, &level, 2);
        }
}

dt_resizing_bytes dt_planes_resize_bytes(int64_t rows, int64_t columns, int64_t channels, int64_t bytes, int cubic, int fine,
                                         int64_t out_height, int64_t out_width)
{
    size_t pixel = (size_t)(channels * bytes), values = (size_t)channels * sizeof(float);
    int64_t down = dt_most_weights(cubic, rows, out_height), across = dt_most_weights(cubic, columns, out_width);
    dt_resizing_bytes of = {
        .first = (size_t)dt_larger(out_height, out_width) * sizeof(int64_t),
        .weights = (size_t)dt_larger(out_height * down, out_width * across) * 4, /* of four bytes in either filter */
        .exact = (size_t)dt_larger(down, across) * sizeof(double)};
    if (fine && bytes == 1) {
        of.columns = dt_whole_blocks(pixel * (size_t)rows) * (size_t)columns;
        of.turned = dt_whole_blocks(pixel * (size_t)rows) * (size_t)out_width;
        of.rows = dt_whole_blocks(pixel * (size_t)out_width) * (size_t)(rows + out_height);
    } else {
        of.columns = values * (size_t)out_height * (size_t)columns;
        of.turned = values * (size_t)out_height;
        of.rows = values * (size_t)columns;
    }
    return of;
}

/* Pillow's filters on bytes: across the picture, then, rounded to bytes, down. */
static void resize_finely(dt_image image, size_t pixel, int cubic, uint8_t *target, int64_t out_height, int64_t out_width,
                          dt_resizing *memory)
{
    size_t line = dt_whole_blocks(pixel * (size_t)image.rows);
    size_t width = pixel * (size_t)out_width, stride = dt_whole_blocks(width);
    uint8_t *rows = memory->rows.data, *columns = memory->columns.data, *turned = memory->turned.data;
    turn(image.data, image.stride, image.rows, image.columns, pixel, columns, line);
    dt_fine_filter across = dt_weigh_finely(cubic, image.columns, out_width, memory);
    dt_blend_finely(columns, line, pixel * (size_t)image.rows, &across, out_width, memory->limits, turned, line);
    turn(turned, line, out_width, image.rows, pixel, rows, stride);
    dt_blend_down(cubic, image.rows, stride, width, target, out_height, memory);
}

/* The other filters: down the picture, then, in floats, across it. */
static void resize_floats(dt_image image, int64_t channels, int64_t bytes, int cubic, uint8_t *target, int64_t out_height,
                          int64_t out_width, dt_resizing *memory)
{
    size_t lanes = (size_t)(channels * image.columns), pixel = (size_t)(channels * bytes);
    size_t line = (size_t)(channels * out_height); /* of a column, in floats */
    float *row = (float *)(void *)memory->rows.data, *columns = (float *)(void *)memory->columns.data;
    float *sums = (float *)(void *)memory->turned.data;
    filter down = weigh(cubic, image.rows, out_height, memory);
    for (int64_t y = 0; y < out_height && !dt_is_stopped(memory->limits); y++) {
        const uint8_t *from = image.data + (size_t)down.first[y] * image.stride;
        const float *weights = down.weights + y * down.most;
        if (bytes == 1)
            blend_bytes(from, image.stride, lanes, weights, used_of(&down, y), row);
        else
            blend_shorts((const uint16_t *)(const void *)from, image.stride / 2, lanes, weights, used_of(&down, y), row);
        turn((const uint8_t *)row, 0, 1, image.columns, (size_t)channels * sizeof(float),
             (uint8_t *)(columns + y * channels), line * sizeof(float));
    }
    filter across = weigh(cubic, image.columns, out_width, memory);
    for (int64_t x = 0; x < out_width && !dt_is_stopped(memory->limits); x++) {
        blend_floats(columns + (size_t)across.first[x] * line, line, line, across.weights + x * across.most,
                     used_of(&across, x), sums);
        put_column(sums, channels, bytes, out_height, target + (size_t)x * pixel, (size_t)out_width * pixel);
    }
}

int dt_planes_resize(dt_image image, int64_t channels, int64_t bytes, int cubic, int fine, uint8_t *target,
                     int64_t out_height, int64_t out_width, dt_resizing *memory)
{
    if (!dt_reserve_all(memory, dt_planes_resize_bytes(image.rows, image.columns, channels, bytes, cubic, fine,
                                                       out_height, out_width)))
        return DT_NO_MEMORY;
    if (fine && bytes == 1)
        resize_finely(image, (size_t)channels, cubic, target, out_height, out_width, memory);
    else
        resize_floats(image, channels, bytes, cubic, target, out_height, out_width, memory);
    return DT_OK;
}

/* The nearest bfloat16 of a finite number, halves to even. */
static uint16_t halved(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#define NORMALIZE(name, type, target, rounded)                                                                         \
    DT_CLONES static void name(const type *restrict image, int64_t lanes, const float *restrict factors,               \
                               const float *restrict summands, target *restrict values)                                \
    {                                                                                                                  \
        for (int64_t x = 0; x < lanes; x++)                                                                            \
            values[x] = rounded((float)image[x] * factors[x] + summands[x]);                                           \
    }

NORMALIZE(bytes_to_floats, uint8_t, float, )
NORMALIZE(shorts_to_floats, uint16_t, float, )
NORMALIZE(bytes_to_halves, uint8_t, uint16_t, halved)
NORMALIZE(shorts_to_halves, uint16_t, uint16_t, halved)

void dt_planes_normalize(const uint8_t *image, int64_t bytes, int64_t height, int64_t lanes, const float *factors,
                         const float *summands, int half, void *values)
{
    for (int64_t y = 0; y < height; y++) {
        const uint8_t *line = image + y * lanes * bytes;
        const uint16_t *shorts = (const uint16_t *)(const void *)line;
        if (half) {
            uint16_t *to = (uint16_t *)values + y * lanes;
            if (bytes == 1)
                bytes_to_halves(line, lanes, factors, summands, to);
            else
                shorts_to_halves(shorts, lanes, factors, summands, to);
        } else {
            float *to = (float *)values + y * lanes;
            if (bytes == 1)
                bytes_to_floats(line, lanes, factors, summands, to);
            else
                shorts_to_floats(shorts, lanes, factors, summands, to);
        }
    }
}
