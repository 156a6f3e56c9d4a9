/* What happens to an image's bytes after the crop: mirroring, colors, CutOut, normalization. */
#include "core.h"

#include <string.h>

#define INLINED static inline __attribute__((always_inline))

/* Call a function that is inlined: RGB's three bytes are a constant to it, and copied without a call. */
#define OF_PIXELS(function, image, pixel, ...)                                                                         \
    do {                                                                                                               \
        if ((pixel) == 3)                                                                                              \
            function(image, 3, __VA_ARGS__);                                                                           \
        else                                                                                                           \
            function(image, pixel, __VA_ARGS__);                                                                       \
    } while (0)

INLINED void flip(uint8_t *image, size_t pixel, int64_t height, int64_t width)
{
    for (int64_t y = 0; y < height; y++) {
        uint8_t *left = image + (size_t)(y * width) * pixel, *right = left + (size_t)(width - 1) * pixel;
        for (; left < right; left += pixel, right -= pixel)
            for (size_t k = 0; k < pixel; k++) {
                uint8_t byte = left[k];
                left[k] = right[k];
                right[k] = byte;
            }
    }
}

void dt_flip(uint8_t *image, size_t pixel, int64_t height, int64_t width)
{
    OF_PIXELS(flip, image, pixel, height, width);
}

/* The position that `at` is reflected to, of `size`. */
static int64_t reflected(int64_t at, int64_t size)
{
    at = at < 0 ? -at : at;
    return at >= size ? 2 * (size - 1) - at : at;
}

INLINED void shifted_copy(dt_image image, size_t pixel, int64_t down, int64_t right, uint8_t *target)
{
    for (int64_t y = 0; y < image.rows; y++) {
        const uint8_t *line = image.data + (size_t)reflected(y - down, image.rows) * image.stride;
        for (int64_t x = 0; x < image.columns; x++, target += pixel)
            memcpy(target, line + pixel * (size_t)reflected(x - right, image.columns), pixel);
    }
}

void dt_shifted_copy(dt_image image, size_t pixel, int64_t down, int64_t right, uint8_t *target)
{
    OF_PIXELS(shifted_copy, image, pixel, down, right, target);
}

uint8_t dt_blend(float base, float value, float factor)
{
    float mixed = base + factor * (value - base);
    mixed = mixed > 0.0f ? mixed : 0.0f;
    return (uint8_t)(mixed < 255.0f ? mixed : 255.0f);
}

/* Pillow's gray value: ITU-R 601-2 luma in 16 bits of fraction. */
static int64_t gray_of(const uint8_t *pixel)
{
    return (19595 * (int64_t)pixel[0] + 38470 * (int64_t)pixel[1] + 7471 * (int64_t)pixel[2] + 0x8000) >> 16;
}

int64_t dt_mean_gray(const uint8_t *image, int64_t pixels)
{
    int64_t total = 0;
    for (int64_t i = 0; i < pixels; i++)
        total += gray_of(image + 3 * i);
    return (int64_t)((double)total / (double)pixels + 0.5);
}

void dt_saturate(uint8_t *image, int64_t pixels, float factor)
{
    for (int64_t i = 0; i < pixels; i++, image += 3) {
        float gray = (float)gray_of(image);
        for (int k = 0; k < 3; k++)
            image[k] = dt_blend(gray, image[k], factor);
    }
}

enum { BRIGHTNESS, CONTRAST, SATURATION };

/* Blend an image with black, with its mean gray, or with its own gray values. */
static void adjust(uint8_t *image, int64_t pixels, int what, float factor)
{
    if (what == SATURATION) {
        dt_saturate(image, pixels, factor);
        return;
    }
    uint8_t table[256];
    float base = what == CONTRAST ? (float)dt_mean_gray(image, pixels) : 0.0f;
    for (int level = 0; level < 256; level++)
        table[level] = dt_blend(base, (float)level, factor);
    for (int64_t i = 0; i < 3 * pixels; i++)
        image[i] = table[image[i]];
}

void dt_jitter_color(uint8_t *image, int64_t pixels, const double *factors)
{
    static const uint8_t orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    const uint8_t *order = orders[(int)factors[3]];
    for (int place = 0; place < 3; place++) {
        float factor = (float)factors[order[place]];
        if (factor != 1.0f)
            adjust(image, pixels, order[place], factor);
    }
}

INLINED void cut_out(uint8_t *image, size_t pixel, int64_t width, int64_t top, int64_t left, int64_t side,
                     const uint8_t *fill)
{
    for (int64_t y = top; y < top + side; y++)
        for (int64_t x = left; x < left + side; x++)
            memcpy(image + pixel * (size_t)(y * width + x), fill, pixel);
}

void dt_cut_out(uint8_t *image, size_t pixel, int64_t width, int64_t top, int64_t left, int64_t side, const uint8_t *fill)
{
    OF_PIXELS(cut_out, image, pixel, width, top, left, side, fill);
}

void dt_look_up(const uint8_t *image, int64_t pixels, const uint16_t *table, uint16_t *values)
{
    for (int64_t i = 0; i < pixels; i++)
        for (int k = 0; k < 3; k++)
            values[3 * i + k] = table[256 * k + image[3 * i + k]];
}
